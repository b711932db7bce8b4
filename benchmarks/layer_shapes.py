"""Experts and latents in a config.json: how many weights a token goes through, and what a slot of the cache holds.

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
