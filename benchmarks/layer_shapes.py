"""Experts, latents and states in a config.json: how many weights a token goes through, and what a cache holds.

Parts of `ModelShape` in `common.py`, and as it without nanovllm.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExpertShape:
    """The shape of mixtures of experts, as Qwen3-MoE, Mixtral and DeepSeek have them."""

    num_layers: int
    """Layers that have experts; the others have one feed-forward network."""
    num_experts: int
    num_used: int
    """Experts of a token, shared ones included."""
    intermediate_size: int

    @classmethod
    def from_config(cls, raw: dict[str, Any]) -> "ExpertShape | None":
        """None for a model without experts."""
        names = ("n_routed_experts", "num_local_experts", "num_experts")
        num_experts = next((raw[name] for name in names if raw.get(name)), None)
        if num_experts is None:
            return None
        step, dense = raw.get("decoder_sparse_step") or 1, set(raw.get("mlp_only_layers") or [])
        dense |= set(range(raw.get("first_k_dense_replace") or 0))
        layers = [i for i in range(raw["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0]
        num_used = raw["num_experts_per_tok"] + (raw.get("n_shared_experts") or 0)
        return cls(len(layers), num_experts, num_used, raw.get("moe_intermediate_size") or raw["intermediate_size"])

    def params(self, hidden_size: int) -> int:
        """Of one layer: the router, and gate, up and down of a token's experts."""
        return hidden_size * (self.num_experts + self.num_used * 3 * self.intermediate_size)


@dataclass(frozen=True)
class LatentShape:
    """The shape of DeepSeek's attention."""

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None

    @classmethod
    def from_config(cls, raw: dict[str, Any]) -> "LatentShape | None":
        """None for a model that keeps K and V."""
        if raw.get("kv_lora_rank") is None:
            return None
        return cls(
            rank=raw["kv_lora_rank"],
            rope_dim=raw["qk_rope_head_dim"],
            nope_dim=raw["qk_nope_head_dim"],
            value_dim=raw["v_head_dim"],
            q_rank=raw.get("q_lora_rank"),
        )

    @property
    def values_per_head(self) -> int:
        """Of a key and a value of one head, which are computed from the latent."""
        return self.nope_dim + self.rope_dim + self.value_dim

    def params(self, hidden_size: int, num_heads: int) -> int:
        """Of one layer: queries, by way of a latent if they have one; the latent, keys and values; the output."""
        q_size = num_heads * (self.nope_dim + self.rope_dim)
        queries = hidden_size * q_size if self.q_rank is None else self.q_rank * (hidden_size + q_size)
        latent = hidden_size * (self.rank + self.rope_dim) + self.rank * num_heads * (self.nope_dim + self.value_dim)
        return queries + latent + num_heads * self.value_dim * hidden_size


@dataclass(frozen=True)
class DeltaShape:
    """The shape of Gated DeltaNet, whose layers keep a recurrent state instead of K and V, as in Qwen3.5."""

    attends: tuple[bool, ...]
    """Of each layer: whether it attends, with a gate on its output, instead of keeping a state."""
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @classmethod
    def from_config(cls, raw: dict[str, Any]) -> "DeltaShape | None":
        """None for a model without such layers."""
        if raw.get("linear_num_value_heads") is None:
            return None
        interval = raw.get("full_attention_interval") or 4
        types = raw.get("layer_types") or [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(raw["num_hidden_layers"])
        ]
        return cls(
            attends=tuple(one == "full_attention" for one in types),
            num_key_heads=raw["linear_num_key_heads"],
            num_value_heads=raw["linear_num_value_heads"],
            key_dim=raw["linear_key_head_dim"],
            value_dim=raw["linear_value_head_dim"],
            conv_width=raw["linear_conv_kernel_dim"],
        )

    @property
    def num_layers(self) -> int:
        """The layers that keep a state."""
        return self.attends.count(False)

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.value_size

    def params(self, hidden_size: int) -> int:
        """Of one layer's matrix products: queries, keys and values; gate; strength and decay of each head; output."""
        return hidden_size * (self.conv_channels + 2 * self.value_size + 2 * self.num_value_heads)

    @property
    def state_values(self) -> int:
        """Of one sequence, in all layers, without the inputs of the convolution."""
        return self.num_layers * self.num_value_heads * self.key_dim * self.value_dim

    @property
    def flops_per_token(self) -> int:
        """In all layers: each value of the state takes part in three products, to correct, to write and to read."""
        return 3 * 2 * self.state_values

    def bytes_per_sequence(self, bytes_per_value: int) -> int:
        """Return the size of a sequence's states, in float32, and of the newest inputs of the convolutions."""
        return 4 * self.state_values + self.num_layers * (self.conv_width - 1) * self.conv_channels * bytes_per_value
