"""What one request may ask for.

Decides which fields exist and which values are legal; names, defaults and meaning are vLLM's. The `Sampler` turns them
into tokens, the `Scheduler` stops a sequence by them.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from nanovllm.checks import check_bool, check_int, check_number


@dataclass(frozen=True)
class SamplingParams:
    """Raises TypeError or ValueError for a bad value; it names the field, the value and what is allowed."""

    temperature: float = 1.0
    """Logits are divided by it before the draw; 0 takes the likeliest token (greedy)."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None goes on until `max_model_len`."""
    ignore_eos: bool = False
    """Whether to go on after the model's own end-of-sequence tokens."""
    stop_token_ids: SequenceOf[int] | None = None
    """More tokens that end the request, also under `ignore_eos`; the stop token is part of the output."""

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0)
        check_int("max_tokens", self.max_tokens, 1, optional=True)
        check_bool("ignore_eos", self.ignore_eos)
        if self.stop_token_ids is not None:
            if isinstance(self.stop_token_ids, str | bytes | int):
                raise TypeError(f"stop_token_ids must be a list of token ids or None, got {self.stop_token_ids!r}")
            for i, token_id in enumerate(self.stop_token_ids):
                check_int(f"stop_token_ids[{i}]", token_id, 0)
