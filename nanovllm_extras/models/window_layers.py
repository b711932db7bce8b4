"""Sliding windows: which layers see only the newest tokens, read from config.json.

Mistral and Gemma 3 have such layers; `qwen3.py` imports this file for a config that asks for them.
"""

from typing import TypedDict

from nanovllm.checks import check_int
from nanovllm.models.qwen3 import refuse
from nanovllm_extras.models.masking import AttentionOptions
from nanovllm_extras.models.raw_config import RawConfig

FULL, SLIDING = "full_attention", "sliding_attention"


class Windows(TypedDict, total=False):
    """The fields of `NetworkConfig` for how layers attend."""

    attention_options: tuple[AttentionOptions, ...]
    widest_window: int | None


def read_windows(layer_types: list[str], sliding_window: int | None, scale: float | None = None) -> Windows:
    """Return the fields of `NetworkConfig` for how each layer attends. All layers have the same `scale`."""
    for layer_type in layer_types:
        refuse("layer_types", layer_type, (FULL, SLIDING))
    if SLIDING in layer_types:
        check_int("config.json: sliding_window", sliding_window, 1)
    windows = [sliding_window if layer_type == SLIDING else None for layer_type in layer_types]
    options = tuple(AttentionOptions(scale, window) for window in windows)
    return {"attention_options": options, "widest_window": None if None in windows else sliding_window}


def layer_types_of(raw: RawConfig, default: list[str]) -> list[str]:
    """Return each layer's type from the file, or else `default`. A file may have more types than layers."""
    types = raw.get("layer_types") or default
    if len(types) < raw["num_hidden_layers"]:
        raise ValueError(
            f"layer_types must have one entry for each of the {raw['num_hidden_layers']} layers, "
            f"config.json has {len(types)}"
        )
    return types[: raw["num_hidden_layers"]]


def read_qwen_windows(raw: RawConfig) -> Windows:
    """Read the windows of a Qwen model. Without `layer_types`, layers from `max_window_layers` on have one."""
    num_layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    first_sliding = num_layers
    if window is not None:
        first_sliding = raw.get("max_window_layers", 28)
        check_int("config.json: max_window_layers", first_sliding, 0)
    default_types = [SLIDING if i >= first_sliding else FULL for i in range(num_layers)]
    return read_windows(layer_types_of(raw, default_types), window)
