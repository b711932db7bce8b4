"""The attention backend `triton`: launches the kernels of this package on one step's batch.

Chosen and made by `execution/choices.py`, like any backend. Decides nothing by the sequences' lengths, which are
on the GPU only: grids and workspaces follow from shapes.
"""

import math
import os
from typing import Any

import torch
from torch import nn

from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.kernels.backend import KernelBackend
from nanovllm_extras.kernels.cuda.kernel_launch import (
    Launch,
    choose_chunk_splits,
    choose_splits,
    decode_launch,
    describe_gpu,
    prefill_launch,
)
from nanovllm_extras.kernels.cuda.requirements import why_no_triton, why_too_old
from nanovllm_extras.models.masking import PLAIN, AttentionOptions

SPLITS_AT_A_TIME = 16  # parts that merge_kernel holds in registers


class TritonAttention(KernelBackend):
    """Paged attention in Triton, over a cache in the model's dtype or in 8 bits (`kv_cache_dtype="fp8"`).

    An fp8 cache (e4m3: 4 bits of exponent, 3 of mantissa) holds K / k_scale and V / v_scale, in half the memory, so a
    decode reads half the bytes. Arithmetic is in the model's dtype. The scales are 1, as in vLLM, unless the caller has
    measured better ones: values beyond 448, the largest number, are clamped.
    """

    default_block_size = 16
    instructions = "Triton"

    def __init__(self, *args: Any, k_scale: float = 1.0, v_scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from nanovllm_extras.kernels.cuda import (
            paged_attention,  # these import triton
            store_kv,
        )

        self._kernels, self._store_kv = paged_attention, store_kv.store_kv
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.group = self.num_heads // self.num_kv_heads

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":  # Triton's own switch
            return f"it needs a CUDA device, got {device} (TRITON_INTERPRET=1 runs it on cpu, slowly, for tests)"
        if head_dim & (head_dim - 1) or not 16 <= head_dim <= 512:
            return f"the model's head_dim must be a power of two from 16 to 512, it is {head_dim}"
        if block_size is not None and (block_size < 16 or block_size & (block_size - 1)):
            return f"block_size must be a power of two and at least 16, got {block_size}"
        # on GPUs before Ampere the tiles are larger than shared memory
        return why_no_triton() or why_too_old((8, 0), "Ampere")

    @classmethod
    def why_no_kv_cache(cls, kv_cache_dtype: str, head_dim: int) -> str | None:
        if kv_cache_dtype != "fp8":
            return super().why_no_kv_cache(kv_cache_dtype, head_dim)
        too_old = why_too_old((8, 9), "Ada, Hopper")  # Triton needs their instructions to convert e4m3
        return too_old and f"for an fp8 KV cache {too_old}"

    @classmethod
    def why_slow(cls, device: torch.device, dtype: torch.dtype, kv_cache_dtype: str) -> str | None:
        # exact float32 products do not use the tensor cores
        return f"it is slow in {dtype}" if dtype == torch.float32 else None

    def make_fast(self, model: nn.Module, max_model_len: int) -> None:
        from nanovllm_extras.kernels.cuda.cuda_decoder_layer import replace_layers  # imports triton

        replace_layers(model, self, max_model_len, self.k_scale, self.v_scale)

    def pack_quantised(self, layer: nn.Module) -> nn.Module:
        from nanovllm_extras.kernels.cuda.quantised_layers import fast_version_of

        return fast_version_of(layer) or layer

    def unpack_quantised(self, layer: nn.Module) -> nn.Module:
        from nanovllm_extras.kernels.cuda.quantised_layers import plain_version_of

        return plain_version_of(layer)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        with torch.cuda.device_of(k):  # Triton launches on the current device, which need not be the engine's
            k_cache, v_cache = layer_cache
            self._store_kv(k, v, k_cache, v_cache, slot_mapping, self.k_scale, self.v_scale)

    def attend(
        self,
        q: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        q = q.contiguous()
        out = torch.empty_like(q)
        nd = metadata.num_decodes
        with torch.cuda.device_of(q):
            if nd:
                rows = metadata.block_tables[:nd], metadata.seq_lens[:nd]
                self.decode(out[:nd], q[:nd], layer_cache, *rows, options=options)
            if metadata.max_seqlen_q:
                tables, seq_lens = metadata.block_tables[nd:], metadata.seq_lens[nd:]
                cu, max_len = metadata.prefill_cu_seqlens_q, metadata.max_seqlen_k
                self.prefill(out[nd:], q[nd:], layer_cache, tables, seq_lens, cu, max_len, options=options)
        return out

    def decode(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        layer_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        launch: Launch | None = None,
        splits: tuple[int, int] | None = None,
        options: AttentionOptions = PLAIN,
    ) -> None:
        """Attend with one token of each sequence.

        q, out: [num_seqs, num_heads, head_dim]; block_tables: [num_seqs, max_num_blocks]

        `launch` and `splits` (how many, how long at least) are for tests and measurements.
        """
        num_seqs, table_width = block_tables.shape
        gpu = describe_gpu(q.device)
        launch = launch or decode_launch(self.group, self.head_dim, q.dtype, layer_cache.dtype, gpu)
        num_splits, min_split_len = splits or choose_splits(
            num_seqs * self.num_kv_heads, table_width * self.block_size, gpu
        )
        shape = (num_seqs, self.num_heads, num_splits)
        parts = torch.empty(*shape, self.head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        k_cache, v_cache = layer_cache
        self._kernels.decode_kernel[(self.num_kv_heads, num_seqs, num_splits)](
            out,
            parts,
            lse,
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            block_tables.stride(0),
            self.score_scale(options),
            self.v_scale,
            min_split_len,
            **self.constants(launch, options),
        )
        if num_splits > 1:
            self._kernels.merge_kernel[(self.num_heads, num_seqs)](
                out,
                parts,
                lse,
                seq_lens,
                num_splits,
                min_split_len,
                HEAD_DIM=self.head_dim,
                TILE=launch.tile,
                WINDOW=options.window or 0,
                SPLITS=SPLITS_AT_A_TIME,
                num_warps=4,
                enable_fp_fusion=True,
            )

    def prefill(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        layer_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_len: int = 0,
        launch: Launch | None = None,
        splits: tuple[int, int] | None = None,
        options: AttentionOptions = PLAIN,
    ) -> None:
        """Attend with chunks of new tokens, end to end. q, out: [num_tokens, num_heads, head_dim]

        No sequence has more than `max_len` tokens; 0 if unknown. `launch` and `splits` as in `decode`.
        """
        gpu = describe_gpu(q.device)
        launch = launch or prefill_launch(self.group, self.head_dim, q.dtype, layer_cache.dtype, gpu)
        num_seqs = len(block_tables)
        num_programs = self.num_kv_heads * (q.shape[0] // (launch.rows // self.group) + num_seqs)
        num_splits, min_split_len = splits or choose_chunk_splits(
            num_programs, min(max_len, options.window or max_len), gpu
        )
        shape = (num_splits, len(q) if num_splits > 1 else 0, self.num_heads)
        parts = torch.empty(*shape, self.head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        k_cache, v_cache = layer_cache
        self._kernels.prefill_kernel[(num_programs, num_splits)](
            out,
            parts,
            lse,
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            cu_seqlens_q,
            block_tables.stride(0),
            num_seqs,
            self.score_scale(options),
            self.v_scale,
            min_split_len,
            IS_SPLIT=num_splits > 1,
            **self.constants(launch, options),
        )
        if num_splits > 1:
            self._kernels.merge_chunks_kernel[(self.num_heads * len(q),)](
                out,
                parts,
                lse,
                num_splits,
                HEAD_DIM=self.head_dim,
                SPLITS=SPLITS_AT_A_TIME,
                num_warps=4,
                enable_fp_fusion=True,
            )

    def score_scale(self, options: AttentionOptions) -> float:
        """Return the factor that turns q k^T over the cached K into exponents of two."""
        return (options.scale or self.scale) * math.log2(math.e) * self.k_scale

    def constants(self, launch: Launch, options: AttentionOptions) -> dict[str, int | float]:
        """Return the constants for which `decode_kernel` and `prefill_kernel` are compiled."""
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_SIZE": self.block_size,
            "ROWS": launch.rows,
            "TILE": launch.tile,
            "WINDOW": options.window or 0,
            "SOFTCAP": options.softcap or 0.0,
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "enable_fp_fusion": True,  # a product and a sum may be one instruction, which rounds once
        }
