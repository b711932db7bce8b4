"""The fields of a request's body, as JSON has them -> those of `SamplingParams`; rules are vLLM's.

Called by `SamplingParams.from_optional`.
"""

from collections.abc import Mapping
from dataclasses import Field
from typing import Any


def given_fields(values: Mapping[str, Any], fields: tuple[Field, ...]) -> dict[str, Any]:
    """`values` without each None that stands for a default; keys of `logit_bias` are numbers, its values in range."""
    values = dict(values)
    bias = values.get("logit_bias")
    if isinstance(bias, Mapping):
        values["logit_bias"] = {as_token_id(key): as_bias(value) for key, value in bias.items()}
    needed = {field.name for field in fields if field.default is not None} - {"max_tokens"}
    return {name: value for name, value in values.items() if not (value is None and name in needed)}


def as_token_id(key: Any) -> Any:
    """JSON writes the keys of `logit_bias` as strings."""
    return int(key) if isinstance(key, str) and key.strip().isdecimal() else key


def as_bias(value: Any) -> Any:
    """Cut to [-100, 100]; the check of the field refuses what is not a number."""
    return min(100.0, max(-100.0, value)) if isinstance(value, int | float) and value == value else value
