"""The shape of a Qwen3 network, read from the config.json of a checkpoint.

Refuses what `qwen3.py` would compute wrongly: rope scaling, sliding windows, other activations. Made by the loader.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Qwen3Config:
    """The shape of the network, by the names of config.json. A field that the file lacks has transformers' default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02
    dtype: str = "float32"

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Qwen3Config":
        """Read config.json as transformers 4 or 5 writes it; ValueError for what this model would compute wrongly."""
        known = {f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None}
        if missing := [f.name for f in fields(cls) if f.default is MISSING and f.name not in known]:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        if raw.get("num_key_value_heads", 0) is None:  # present and null: every head has its own
            known["num_key_value_heads"] = known["num_attention_heads"]
        # transformers 5 keeps theta inside rope_parameters; 4 keeps it outside, and scaling in rope_scaling
        rope = raw.get("rope_parameters") or {}
        for one in (rope, raw.get("rope_scaling") or {}):
            rope_type = one.get("rope_type", one.get("type", "default"))
            if rope_type != "default" or one.get("partial_rotary_factor", 1.0) != 1.0:
                raise ValueError(f"rope scaling is not supported, only rope_type 'default'; config.json has {one}")
        if raw.get("use_sliding_window") or set(raw.get("layer_types") or []) - {"full_attention"}:
            raise ValueError("sliding-window attention is not supported; config.json asks for it")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act must be 'silu', config.json has {raw['hidden_act']!r}")
        known["rope_theta"] = float(rope.get("rope_theta", known.get("rope_theta", cls.rope_theta)))
        known["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or cls.dtype).removeprefix("torch.")
        config = cls(**known)
        if config.num_attention_heads % config.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"config.json has {config.num_attention_heads} and {config.num_key_value_heads}"
            )
        return config
