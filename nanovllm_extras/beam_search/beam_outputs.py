"""What a beam search returns; names are vLLM's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BeamSearchSequence:
    """One completion that a beam search has found."""

    tokens: list[int]
    """Those of the prompt included."""
    cum_logprob: float
    """Of the generated tokens."""
    text: str
    """Of the generated tokens."""


@dataclass(frozen=True)
class BeamSearchOutput:
    """What a beam search has found, best first."""

    request_id: str
    sequences: list[BeamSearchSequence]
    finished: bool
