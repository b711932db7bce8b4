"""Qwen2's and Qwen3's config.json: what a file leaves out means what it means to transformers.

Called through `read_config` of the two networks, in `qwen2.py` and `qwen3.py`.
"""

from dataclasses import replace
from typing import Any

from nanovllm.models.config import FULL, SLIDING, ModelConfig, layer_types_of, read_common, read_windows
from nanovllm.models.rope_config import read_rope, refuse_partial_rotary


def read_qwen2_config(raw: dict[str, Any]) -> ModelConfig:
    config = read_qwen_config(raw, head_dim=None)
    return replace(config, qkv_bias=True, o_bias=False)  # always so, the file does not say it


def read_qwen3_config(raw: dict[str, Any]) -> ModelConfig:
    return read_qwen_config(raw, head_dim=128)


def read_qwen_config(raw: dict[str, Any], head_dim: int | None) -> ModelConfig:
    """ValueError for a field that the network would compute wrongly."""
    common = read_common(raw, max_position_embeddings=32768, num_key_value_heads=32, head_dim=head_dim)
    refuse_partial_rotary(raw)
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    num_layers = common["num_hidden_layers"]
    first_sliding = num_layers if window is None else raw.get("max_window_layers", 28)
    default_types = [SLIDING if i >= first_sliding else FULL for i in range(num_layers)]
    windows = read_windows(layer_types_of(raw, default_types), window)
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"])
    return ModelConfig(**common, rope=rope, windows=windows)
