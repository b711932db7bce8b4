"""Convert the fields of a request's JSON body to `SamplingParams`, by vLLM's rules."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nanovllm_extras.options.request_params import SamplingParams


def from_optional(cls: type[SamplingParams], **values: Any) -> SamplingParams:
    """Create `SamplingParams` from the fields of a request's body.

    None means a field's default. The keys of `logit_bias` may be strings, and a bias is clipped to [-100, 100], as in
    vLLM.
    """
    bias = values.get("logit_bias")
    if isinstance(bias, Mapping):
        values["logit_bias"] = {as_token_id(key): as_bias(value) for key, value in bias.items()}
    needed = {field.name for field in fields(cls) if field.default is not None} - {"max_tokens"}
    return cls(**{name: value for name, value in values.items() if not (value is None and name in needed)})


def as_token_id(key: object) -> object:
    """Return a key of `logit_bias` as an int, if it is a string of digits: JSON has only strings as keys."""
    return int(key) if isinstance(key, str) and key.strip().isdecimal() else key


def as_bias(value: object) -> object:
    """Return a bias clipped to [-100, 100]. A value that is not a number is returned unchanged: the field checks it."""
    return min(100.0, max(-100.0, value)) if isinstance(value, int | float) and value == value else value
