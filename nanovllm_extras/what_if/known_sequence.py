"""A sequence of the core whose tokens are known before, with the times of its request."""

from dataclasses import dataclass, field

from nanovllm.sequence import Sequence
from nanovllm_extras.what_if.requests import Answer


@dataclass(eq=False, slots=True)
class KnownSequence(Sequence):
    """A sequence and its answer. `number` counts sequences in the order in which they are seen first, from 1."""

    answer: Answer = field(default_factory=lambda: Answer(1))
    arrival_s: float = 0.0
    first_token_s: float | None = field(default=None, init=False)
    has_ended: bool = field(default=False, init=False)
    number: int = field(default=0, init=False)
