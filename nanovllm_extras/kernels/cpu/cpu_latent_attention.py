"""The attention backend `cpu` for multi-head latent attention: `latent.h`, and C for all other layers.

`execution/choices.py` chooses it for models whose cache holds latents (`models/latent_attention.py`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.kernels.cpu.cpu_layers import HugePages, pack
from nanovllm_extras.kernels.cpu.library import LANES, load_library, masking
from nanovllm_extras.models.latent_attention import UpProjection
from nanovllm_extras.models.masking import PLAIN, AttentionOptions


class CpuLatentAttention(CpuAttention):
    """Walks the block tables in C. A block holds its latents in the layout of panels in which products read K."""

    def __init__(self, *args: Any, rank: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rank = rank

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        if head_dim % LANES:
            return f"kv_lora_rank + qk_rope_head_dim must be a multiple of {LANES}, it is {head_dim}"
        return super().why_not(device, dtype, 2 * LANES, block_size)  # whose heads may be longer

    @classmethod
    def why_no_kv_cache(cls, kv_cache_dtype: str, head_dim: int) -> str | None:
        return f"it has no {kv_cache_dtype} KV cache for latents"

    def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        return (1, num_layers, num_blocks, self.block_size * self.head_dim)

    def make_fast(self, model: nn.Module, max_model_len: int) -> None:
        replace_up_projections(model)
        super().make_fast(model, max_model_len)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store k: [num_tokens, 1, head_dim]. `v` is a view of it, so it is not stored."""
        tensors = (k.contiguous(), layer_cache, slot_mapping)
        self.library.store_latents(*(t.data_ptr() for t in tensors), len(k), self.head_dim)

    def attend(
        self,
        q: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        """Attend with q: [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads, rank]"""
        q = q.contiguous()
        out = torch.empty(*q.shape[:2], self.rank, dtype=q.dtype)
        tensors = (q, out, layer_cache, metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q)
        self.library.attend_latents(
            *(t.data_ptr() for t in tensors),
            *(*metadata.block_tables.shape, self.num_heads, self.head_dim, self.rank, self.block_size),
            *masking(options, self.scale),
        )
        return out


class CpuUpProjection(nn.Module):
    """W_k^T and W_v of all heads, packed."""

    packed_keys: torch.Tensor
    packed_values: torch.Tensor

    def __init__(self, layer: UpProjection) -> None:
        super().__init__()
        self.num_heads, self.rank, self.value_dim = layer.num_heads, layer.rank, layer.value_dim
        self.library = load_library(layer.weight.dtype)
        keys, values = layer.parts()
        self.register_buffer("packed_keys", pack_heads(keys.transpose(1, 2)))
        self.register_buffer("packed_values", pack_heads(values))

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Multiply q: [num_tokens, num_heads, key_dim] -> W_k^T q: [num_tokens, num_heads, rank]"""
        return self.product(q, self.packed_keys, self.rank)

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """Multiply latents: [num_tokens, num_heads, rank] by W_v -> [num_tokens, num_heads, value_dim]"""
        return self.product(latents, self.packed_values, self.value_dim)

    def product(self, x: torch.Tensor, packed: torch.Tensor, out_features: int) -> torch.Tensor:
        x = x.transpose(0, 1).contiguous()  # [num_heads, num_tokens, in_features]
        y = torch.empty(*x.shape[:2], out_features, dtype=x.dtype)
        tensors = (t.data_ptr() for t in (x, packed, y))
        self.library.head_linear(*tensors, *x.shape[:2], out_features, x.shape[2])
        return y.transpose(0, 1)


def pack_heads(weights: torch.Tensor) -> torch.Tensor:
    """Pack [num_heads, out, in] -> the panels of each head one after another"""
    padded = F.pad(weights, (0, 0, 0, -weights.shape[1] % LANES)).flatten(0, 1)  # no panel belongs to two heads
    return pack(padded, HugePages(padded.numel() * padded.itemsize))


def replace_up_projections(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, UpProjection) and child.key_dim % 2 == 0:
                setattr(module, name, CpuUpProjection(child))
