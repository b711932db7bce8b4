"""The fields of a request's body, as JSON has them -> `SamplingParams`; rules are vLLM's."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nanovllm.extras.request_params import SamplingParams


@classmethod  # type: ignore[misc]
def from_optional(cls: type[SamplingParams], **values: Any) -> SamplingParams:
    """As a server makes `SamplingParams` of a request's body: None is a field's default, and bias keys may be strings.

    A bias outside [-100, 100] is cut to it, as in vLLM.
    """
    bias = values.get("logit_bias")
    if isinstance(bias, Mapping):
        values["logit_bias"] = {as_token_id(key): as_bias(value) for key, value in bias.items()}
    needed = {field.name for field in fields(cls) if field.default is not None} - {"max_tokens"}
    return cls(**{name: value for name, value in values.items() if not (value is None and name in needed)})


def as_token_id(key: Any) -> Any:
    """JSON writes the keys of `logit_bias` as strings."""
    return int(key) if isinstance(key, str) and key.strip().isdecimal() else key


def as_bias(value: Any) -> Any:
    """Cut to [-100, 100]; the check of the field refuses what is not a number."""
    return min(100.0, max(-100.0, value)) if isinstance(value, int | float) and value == value else value
