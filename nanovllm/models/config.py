"""The shape of a network, read from the config.json of a checkpoint."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.checks import check_bool, check_int, check_number
from nanovllm.layers.attention import TorchAttention


@dataclass(frozen=True)
class ModelConfig:
    """The fields have the names of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str

    def why_not(self, backend: type[TorchAttention], device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why an attention backend cannot compute the layers of this network, or None if it can."""
        return None

    @property
    def supports_graphs(self) -> bool:
        """Whether the forward pass of decodes can be recorded in a CUDA graph."""
        return True


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "attention_bias": False}  # fmt: skip
SUPPORTED = {"hidden_act": ("silu", None), "use_sliding_window": (False, None), "quantization_config": (None,)}


def read_qwen3_config(raw: dict[str, Any]) -> ModelConfig:
    """Read a Qwen3 config.json. Missing fields get the defaults of transformers.

    ValueError for a field with a value that `qwen3.py` does not compute, such as a sliding window.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}  # in this order, as transformers
    for name, allowed in SUPPORTED.items():
        refuse(name, raw.get(name), allowed)
    refuse("rope_type", rope.get("rope_type") or rope.get("type"), ("default", None))
    refuse("partial_rotary_factor", rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor"), (1.0, None))
    for layer_type in raw.get("layer_types") or ():
        refuse("layer_types", layer_type, ("full_attention",))
    if missing := [name for name in REQUIRED if raw.get(name) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    values: dict[str, Any] = {name: raw[name] for name in REQUIRED}
    values |= {name: default if raw.get(name) is None else raw[name] for name, default in DEFAULTS.items()}
    values["num_key_value_heads"] = raw.get("num_key_value_heads", 32) or raw["num_attention_heads"]  # null: all heads
    for name in (*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        check_int(f"config.json: {name}", values[name], 1)
    values["rope_theta"] = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    for name in ("rope_theta", "rms_norm_eps"):
        check_number(f"config.json: {name}", values[name], 0, open_low=name == "rope_theta")
    for name in ("tie_word_embeddings", "attention_bias"):
        check_bool(f"config.json: {name}", values[name])
    values["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if values["head_dim"] % 2 or values["num_attention_heads"] % values["num_key_value_heads"]:
        raise ValueError(
            f"config.json: head_dim must be even, and num_attention_heads a multiple of num_key_value_heads, got "
            f"{values['head_dim']}, {values['num_attention_heads']} and {values['num_key_value_heads']}"
        )
    return ModelConfig(**values)


def refuse(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError unless `value` of the field `name` is one of those that the network computes."""
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(repr(one) for one in allowed)}, config.json has {value!r}; "
                         f"nanovllm_extras.LLM may serve it")  # fmt: skip
