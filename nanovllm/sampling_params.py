"""The options of one request. Names, defaults and meanings are vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.checks import check_bool, check_int, check_number, check_strings, check_token_ids, checked, checks_of


@dataclass
class SamplingParams:
    """How the tokens of a request are sampled, and when it ends.

    A bad value raises a TypeError or ValueError that names the field, the value and what is allowed. Fields may be
    assigned until a request is added: the request takes a copy, which is checked again.
    """

    n: int = checked(1, check_int, minimum=1)
    """Samples of one prompt, which is computed once. More than one needs a temperature above 0."""
    temperature: float = checked(1.0, check_number, low=0)
    """Divides the logits before sampling. With 0 the most likely token is taken (greedy)."""
    top_p: float = checked(1.0, check_number, low=0, high=1, open_low=True)
    """Sample from the fewest most likely tokens whose probabilities add up to this (https://arxiv.org/abs/1904.09751)."""
    top_k: int = checked(0, check_int, minimum=-1)
    """Sample from this number of most likely tokens; 0 or -1 is all."""
    min_p: float = checked(0.0, check_number, low=0, high=1)
    """Sample from tokens at least this many times as likely as the most likely (https://arxiv.org/abs/2407.01082)."""
    seed: int | None = checked(None, check_int, minimum=0, optional=True, maximum=2**64 - 1)
    """Same seed and prompt, same random numbers; and the same tokens if kernels round alike in every batch (CPU)."""
    max_tokens: int | None = checked(16, check_int, minimum=1, optional=True)
    """Maximum number of generated tokens. None goes on until `max_model_len`."""
    stop: str | Sequence[str] | None = checked(None, check_strings, or_one=True)
    """Texts that end the request. The output is the text before them."""
    stop_token_ids: Sequence[int] | None = checked(None, check_token_ids)
    """Tokens that end the request, also with `ignore_eos`. The stop token is part of the output."""
    ignore_eos: bool = checked(False, check_bool)
    """Whether to go on after the model's own end-of-sequence tokens."""

    def __post_init__(self) -> None:
        for name, check in checks_of(self).items():
            check(name, getattr(self, name))
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n must be 1 with temperature 0, where all samples would be the same, got {self.n}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
