"""The options of one request. Names, defaults and meanings are vLLM's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.checks import (
    check_bool,
    check_int,
    check_mapping,
    check_number,
    check_strings,
    check_token_ids,
    checked,
    checks_of,
)


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
    extra_args: Mapping[str, Any] | None = checked(None, check_mapping)
    """Fields for parts of one's own, which the engine's option `extra_args` declares (docs/extending.md)."""

    def __post_init__(self) -> None:
        for name, check in checks_of(self).items():
            check(name, getattr(self, name))
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n must be 1 with temperature 0, where all samples would be the same, got {self.n}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def check_extra_args(extra_args: Mapping[str, Any] | None, declared: Mapping[str, Any] | None) -> None:
    """Raise unless an engine's option `extra_args` declares all fields: a typing error must not become a default."""
    kinds = declared or {}
    for name, value in (extra_args or {}).items():
        if name not in kinds:
            allowed = (
                f"may have {', '.join(kinds)}" if kinds else "must be None: this engine has no extension with fields"
            )
            raise ValueError(f"extra_args {allowed}, got {name!r}")
        kind = kinds[name]
        if kind is float and type(value) is int:  # JSON writes 1.0 as 1
            continue
        if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
            raise TypeError(f"extra_args[{name!r}] must be of class {kind.__name__}, got {value!r}")
