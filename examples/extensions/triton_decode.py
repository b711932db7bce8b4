"""An attention kernel of one's own in Triton: paged decodes, with CUDA graphs and without flash-attn.

A program computes the query heads that share one head of K and V (GQA) of one sequence. It follows the block table,
TOKENS tokens at a time, with the online softmax of FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135):
whenever the largest score so far grows, what has been summed shrinks. Nothing is read on the host, so decodes are
recorded in CUDA graphs. Prefill chunks are computed by PyTorch.

One program reads all of a sequence. With fewer sequences than the GPU has processors, some are idle: FlashDecoding
(https://pytorch.org/blog/flash-decoding/) and the kernels of nanovllm_extras split a long sequence among programs.

    nanovllm bench compare examples/extensions/triton_decode.py
    LLM(model, extension="examples/extensions/triton_decode.py")    # on a CPU only with TRITON_INTERPRET=1, for tests
"""

import os
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.attention import AttentionMetadata, TorchAttention, softmax_attention

TOKENS = 32  # of a sequence, at a time: with two stages, K and V of 128 numbers in bfloat16 take 32 KiB
MIN_ROWS = 16  # of a matrix product on tensor cores; those beyond the group of query heads are zeros


@triton.jit
def decode_kernel(
    out_ptr,  # [num_seqs, num_heads, DIM], contiguous, as q
    q_ptr,
    k_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, DIM], contiguous, as v
    v_ptr,
    tables_ptr,  # [num_seqs, …] int32
    lens_ptr,  # [num_seqs] int32, 0 for padding
    table_stride,
    scale,
    GROUP: tl.constexpr,  # query heads of a program
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP and DIM, rounded up to powers of two
    DIMS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Attend with the query heads of one head of K and V of one sequence. Grid: (num_seqs, num_kv_heads)."""
    seq, head, num_kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    rows, dims = tl.arange(0, ROWS)[:, None], tl.arange(0, DIMS)[None, :]
    is_q, q_at = (rows < GROUP) & (dims < DIM), ((seq * num_kv_heads + head) * GROUP + rows) * DIM + dims
    q = tl.load(q_ptr + q_at, mask=is_q, other=0.0)  # [ROWS, DIMS]
    length = tl.load(lens_ptr + seq)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(0, length, TOKENS):
        positions = start + tl.arange(0, TOKENS)
        is_seen = positions < length
        blocks = tl.load(tables_ptr + seq * table_stride + positions // BLOCK_SIZE, mask=is_seen, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE  # [TOKENS]
        is_kv, kv_at = is_seen[:, None] & (dims < DIM), (slots * num_kv_heads + head)[:, None] * DIM + dims
        k = tl.load(k_ptr + kv_at, mask=is_kv, other=0.0)  # [TOKENS, DIMS]
        v = tl.load(v_ptr + kv_at, mask=is_kv, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [ROWS, TOKENS]
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - larger[:, None]), tl.exp(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = larger
    total = tl.where(total > 0, total, 1.0)  # padding has no tokens: zeros
    tl.store(out_ptr + q_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_q)


class TritonDecode(TorchAttention):
    supports_graphs = True  # of steps that have only decodes

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if device.type == "cuda" or is_interpreted else f"it needs a CUDA device, got {device}"

    def attend(
        self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata, weigh: Callable = softmax_attention
    ) -> Tensor:
        """Attend from each new token to its own and earlier positions: q [num_tokens, num_heads, head_dim] -> as q"""
        n = metadata.num_decodes
        decodes = self.decode(q[:n], layer_cache, metadata)
        if n == len(q):
            return decodes
        tables, seq_lens, starts = metadata.block_tables[n:], metadata.seq_lens[n:], metadata.prefill_cu_seqlens_q
        chunks = replace(metadata, block_tables=tables, seq_lens=seq_lens, cu_seqlens_q=starts, num_decodes=0)
        return torch.cat((decodes, super().attend(q[n:], layer_cache, chunks, weigh)))

    def decode(self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Attend from one new token of each decode: q [num_decodes, num_heads, head_dim] -> as q"""
        q = q.contiguous()
        out, group, tables = torch.empty_like(q), self.num_heads // self.num_kv_heads, metadata.block_tables
        sizes = {"GROUP": group, "DIM": self.head_dim, "BLOCK_SIZE": self.block_size, "TOKENS": TOKENS}
        powers = {"ROWS": max(MIN_ROWS, triton.next_power_of_2(group)), "DIMS": triton.next_power_of_2(self.head_dim)}
        if len(q):
            arguments = out, q, *layer_cache, tables, metadata.seq_lens, tables.stride(0), self.head_dim**-0.5
            with torch.cuda.device_of(q):
                decode_kernel[(len(q), self.num_kv_heads)](*arguments, **sizes, **powers, num_stages=2)
        return out


attention_backend = TritonDecode
