"""The attention backend `cpu`: paged attention in C, and C for all other layers.

`nanovllm_extras/execution/choices.py` chooses it; the runner calls `make_fast` when the weights are loaded.
"""

import logging
from typing import Any

import torch
from torch import nn

from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.kernels.backend import KernelBackend
from nanovllm_extras.kernels.cpu.cpu_decoder_layer import fuse_layers
from nanovllm_extras.kernels.cpu.cpu_gated_delta import fuse_gated_delta
from nanovllm_extras.kernels.cpu.cpu_layers import replace_layers
from nanovllm_extras.kernels.cpu.cpu_quantised import replace_quantised
from nanovllm_extras.kernels.cpu.experts import fuse_experts
from nanovllm_extras.kernels.cpu.library import DTYPES, INT8_KV, LANES, NoLibraryError, load_library, masking
from nanovllm_extras.models.masking import PLAIN, AttentionOptions

logger = logging.getLogger(__name__)


class CpuAttention(KernelBackend):
    """Walks the block tables in C. A block holds each head's K and V in the layout that the products like best."""

    default_block_size = 16
    supports_sinks = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.library = load_library(self.dtype)
        self.instructions = self.library.description
        is_int8 = self.kv_cache_dtype == torch.int8
        self.cache_library = load_library(self.dtype, INT8_KV) if is_int8 else self.library
        self.scale_bytes = 4 if is_int8 else 0  # of a token and head, behind the head's panels

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        if device.type != "cpu":
            return f"it runs on CPU, not on {device}"
        if head_dim % (2 * LANES):
            return f"the model's head_dim must be a multiple of {2 * LANES}, it is {head_dim}"
        if block_size is not None and block_size % LANES:
            return f"block_size must be a multiple of {LANES}, got {block_size}"
        try:
            load_library(dtype)
        except NoLibraryError as error:
            if dtype in DTYPES:  # something is wrong with this machine, and the layers in PyTorch are much slower
                logger.warning("the CPU kernels cannot be used: %s", error)
            return str(error)
        return None

    @classmethod
    def why_no_kv_cache(cls, kv_cache_dtype: str, head_dim: int) -> str | None:
        if kv_cache_dtype != "int8":
            return super().why_no_kv_cache(kv_cache_dtype, head_dim)
        return f"for an int8 KV cache head_dim must be at most 512, it is {head_dim}" if head_dim > 512 else None

    def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        return (2, num_layers, num_blocks, self.num_kv_heads, self.block_size * (self.head_dim + self.scale_bytes))

    def make_fast(self, model: nn.Module, max_model_len: int) -> None:
        replace_quantised(model, self.dtype)
        replace_layers(model, self.dtype)
        fuse_experts(model, self.dtype)
        fuse_gated_delta(model, self.dtype)
        fuse_layers(model, self)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.dtype != torch.float32 or not logits.is_contiguous() or not logits.shape[1]:
            return super().argmax(logits)
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        self.library.argmax(logits.data_ptr(), token_ids.data_ptr(), *logits.shape)
        return token_ids

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        k_cache, v_cache = layer_cache
        self.cache_library.store_kv(
            *(t.data_ptr() for t in (k, v, k_cache, v_cache, slot_mapping)),
            *(len(k), k.stride(0), v.stride(0), self.num_kv_heads, self.head_dim, self.block_size),
        )

    def attend(
        self,
        q: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        tensors = (q, out, *layer_cache, metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q)
        sinks = None if options.sinks is None else options.sinks.float()  # [num_heads]
        self.cache_library.attend(
            *(t.data_ptr() for t in tensors),
            None if sinks is None else sinks.data_ptr(),
            *(*metadata.block_tables.shape, q.stride(0), self.num_heads, self.num_kv_heads, self.head_dim),
            *(self.block_size, *masking(options, self.scale)),
        )
        return out
