"""The sampling parameters of a request in a recording: as JSON, and read back, to repeat the request."""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from math import isfinite
from typing import Any

from nanovllm import sampling_params
from nanovllm_extras.options.request_params import SamplingParams

LIMITS = ("n", "max_tokens")  # noted even if they have their default values


def describe_params(params: sampling_params.SamplingParams) -> dict[str, object]:
    """Return the fields that JSON can represent: `LIMITS`, and those that do not have their default values.

    Fields with functions are left out, such as `logits_processors`.
    """
    described: dict[str, object] = {}
    for one in fields(params):
        value = getattr(params, one.name)
        if one.name in LIMITS or value != one.default:
            if is_dataclass(value) and not isinstance(value, type):
                value = {name: part for name, part in asdict(value).items() if part is not None}
            if is_plain_json(value):
                described[one.name] = value
    return described


def read_params(described: Mapping[str, Any]) -> SamplingParams:
    """Return the `SamplingParams` that `describe_params` has described. JSON has made the keys of dicts strings."""
    values = dict(described)
    if "logit_bias" in values:
        values["logit_bias"] = {int(token_id): bias for token_id, bias in values["logit_bias"].items()}
    return SamplingParams(**values)


def is_plain_json(value: object) -> bool:
    """Return whether JSON can represent `value`. The request has checked that its texts are UTF-8."""
    if isinstance(value, dict):
        return all(map(is_plain_json, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain_json, value))
    if type(value) is float:
        return isfinite(value)
    return value is None or type(value) in (bool, int, str)
