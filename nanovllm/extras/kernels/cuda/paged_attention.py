"""Attention over a paged cache: a decode kernel, a prefill kernel, and those that merge their parts.

All are FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135) with one more look-up. A program keeps a few
rows of queries and walks along the sequence, a tile of tokens at a time; the scores of a tile live in registers only.
The softmax over all tiles is built up as they come (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867):

    row_max   the largest score so far
    row_sum   the sum of exp(score - row_max) so far
    acc       the sum of exp(score - row_max) * v so far

When a larger score turns up, row_sum and acc shrink by exp(old max - new max). In the end the output is acc / row_sum.
With a window, the walk begins at the first tile that a row sees; WINDOW 0 means all tokens. A soft-cap bounds the
scores by SOFTCAP * tanh(score / SOFTCAP); SOFTCAP 0 leaves them as they are.
The hardware knows exp2 and not exp, so the softmax scale has log2(e) in it, and row_max is in these units.

The look-up: position p of a sequence is in block `block_table[p // block_size]`, in slot `block * block_size +
p % block_size` of the cache.

The rows of a program are the query heads that share one K and V head (GQA), so each K and V is loaded once for all of
them. The tensor cores take 16 rows at least; where there are fewer, the rest are zeros, which cost next to nothing,
because a decode waits for memory.

`do_not_specialize` names arguments that change from step to step: Triton would compile a kernel anew for a number that
happens to be 1 or a multiple of 16. What is written in capitals is fixed for a model.
"""

import triton
import triton.language as tl

from nanovllm.extras.kernels.cuda.tile_walk import as_computed_with, attend_to_tokens


@triton.jit
def first_tile(position, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The begin of the first tile that the token at `position` sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
    return first


@triton.jit
def split_length(seq_len, num_splits, min_split_len, TILE: tl.constexpr):
    """How many tokens each split of a sequence takes: whole tiles, as even as they go, but no tiny ones.

    The host knows only how many splits there are at most. If a sequence needs fewer, the rest are empty, so that a
    launch recorded in a CUDA graph is right for every length.
    """
    return tl.maximum(tl.cdiv(tl.cdiv(seq_len, num_splits), TILE) * TILE, min_split_len)


@triton.jit(do_not_specialize=["block_tables_ptr", "seq_lens_ptr", "table_stride", "min_split_len"])
def decode_kernel(
    out_ptr,  # [num_seqs, NUM_KV_HEADS * GROUP, HEAD_DIM]
    part_ptr,  # [num_seqs, NUM_KV_HEADS * GROUP, num_splits, HEAD_DIM] float32
    part_lse_ptr,  # [num_seqs, NUM_KV_HEADS * GROUP, num_splits] float32: log2 of the sum of exp2(scores)
    q_ptr,  # as out
    k_cache_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM], as v_cache
    v_cache_ptr,
    block_tables_ptr,  # [num_seqs, table_stride] int32
    seq_lens_ptr,  # [num_seqs] int32
    table_stride,
    score_scale,  # softmax scale * log2(e) * scale of the cached K
    v_scale,
    min_split_len,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, rounded up to a power of two of 16 at least
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Grid: (NUM_KV_HEADS, num_seqs, num_splits). One token of a sequence, one K and V head, one split of the context.

    With few sequences there would be too few programs to keep the memory busy, so each context is split between
    several, as in Flash-Decoding. A sequence of one split is written to `out` at once; otherwise the parts go to
    `part` and `part_lse`, for `merge_kernel`. A sequence of no tokens (padding of a CUDA graph) gets zeros.
    """
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    start = first_tile(seq_len - 1, WINDOW, TILE)
    split_len = split_length(seq_len - start, num_splits, min_split_len, TILE)
    begin = start + split * split_len
    if (begin >= seq_len) & (split > 0):
        return
    end = tl.minimum(begin + split_len, seq_len)

    rows, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    is_head = rows < GROUP
    heads = (seq * NUM_KV_HEADS + kv_head).to(tl.int64) * GROUP + rows  # [ROWS] rows of q and out
    elements = heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + elements, mask=is_head[:, None], other=0.0)  # [ROWS, HEAD_DIM]
    q = as_computed_with(q, k_cache_ptr.dtype.element_ty == tl.float8e4nv)

    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    first_seen = tl.zeros([ROWS], tl.int32) + (seq_len - WINDOW)
    last_seen = tl.zeros([ROWS], tl.int32) + (end - 1)
    k_head_ptr, v_head_ptr = k_cache_ptr + kv_head * HEAD_DIM, v_cache_ptr + kv_head * HEAD_DIM
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    # fmt: off
    acc, row_max, row_sum = attend_to_tokens(
        acc, row_max, row_sum, q, first_seen, last_seen, k_head_ptr, v_head_ptr, block_table_ptr, begin, end,
        score_scale, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW > 0, SOFTCAP, IS_MASKED=True,
    )
    # fmt: on
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # 0 where there were no tokens
    out = acc * (v_scale / row_sum)[:, None]
    if split_len >= seq_len - start:
        tl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=is_head[:, None])
    else:
        parts = heads * num_splits + split  # [ROWS]
        tl.store(part_ptr + parts[:, None] * HEAD_DIM + dims[None, :], out, mask=is_head[:, None])
        tl.store(part_lse_ptr + parts, row_max + tl.log2(row_sum), mask=is_head)


@triton.jit(do_not_specialize=["seq_lens_ptr", "num_splits", "min_split_len"])
def merge_kernel(
    out_ptr,  # [num_seqs, num_heads, HEAD_DIM]
    part_ptr,  # [num_seqs, num_heads, num_splits, HEAD_DIM] float32
    part_lse_ptr,  # [num_seqs, num_heads, num_splits] float32
    seq_lens_ptr,  # [num_seqs] int32
    num_splits,
    min_split_len,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,  # of decode_kernel, as WINDOW
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,  # at a time
):
    """Grid: (num_heads, num_seqs). Joins the parts of one head of one sequence."""
    head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    num_seen = seq_len - first_tile(seq_len - 1, WINDOW, TILE)
    num_used = tl.cdiv(num_seen, split_length(num_seen, num_splits, min_split_len, TILE))
    if num_used <= 1:
        return  # decode_kernel has written the output
    row = (seq * tl.num_programs(0) + head).to(tl.int64)
    out = joined(part_ptr, part_lse_ptr, row * num_splits, 1, num_used, HEAD_DIM, SPLITS)
    tl.store(out_ptr + row * HEAD_DIM + tl.arange(0, HEAD_DIM), out.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["num_splits"])
def merge_chunks_kernel(
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    part_ptr,  # [num_splits, num_tokens, num_heads, HEAD_DIM] float32
    part_lse_ptr,  # [num_splits, num_tokens, num_heads] float32
    num_splits,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,  # at a time
):
    """Grid: (num_tokens * num_heads,). The same for one head of one token; an empty split has an lse of -inf."""
    row = tl.program_id(0).to(tl.int64)
    out = joined(part_ptr, part_lse_ptr, row, tl.num_programs(0), num_splits, HEAD_DIM, SPLITS)
    tl.store(out_ptr + row * HEAD_DIM + tl.arange(0, HEAD_DIM), out.to(out_ptr.dtype.element_ty))


@triton.jit
def joined(part_ptr, part_lse_ptr, first, stride, num_used, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    """[HEAD_DIM] of the parts first, first + stride, …: num_used of them.

    This is attention once more: the parts are the values, and the logarithm of what their weights add up to (lse) is
    their score. Parts of empty splits were never written, and are not read.
    """
    dims = tl.arange(0, HEAD_DIM)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    lse_max, weight_sum = float("-inf"), 0.0
    for done in range(0, num_used, SPLITS):
        splits = done + tl.arange(0, SPLITS)
        rows = first + splits.to(tl.int64) * stride  # [SPLITS]
        lse = tl.load(part_lse_ptr + rows, mask=splits < num_used, other=float("-inf"))  # [SPLITS]
        offsets = rows[:, None] * HEAD_DIM + dims[None, :]
        parts = tl.load(part_ptr + offsets, mask=(lse > float("-inf"))[:, None], other=0.0)  # [SPLITS, HEAD_DIM]
        new_max = tl.maximum(lse_max, tl.max(lse, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf is NaN
        weights = tl.exp2(lse - base)
        shrink = tl.exp2(lse_max - base)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        weight_sum = weight_sum * shrink + tl.sum(weights, 0)
        lse_max = new_max
    return acc / weight_sum


@triton.jit(
    do_not_specialize=[
        "block_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "table_stride", "num_seqs", "min_split_len"
    ]
)  # fmt: skip
def prefill_kernel(
    out_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM]
    part_ptr,  # [num_splits, num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM] float32, only written if IS_SPLIT
    part_lse_ptr,  # [num_splits, num_tokens, NUM_KV_HEADS * GROUP] float32
    q_ptr,  # as out
    k_cache_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM], as v_cache
    v_cache_ptr,
    block_tables_ptr,  # [num_seqs, table_stride] int32
    seq_lens_ptr,  # [num_seqs] int32, earlier chunks and cached prefixes included
    cu_seqlens_q_ptr,  # [num_seqs + 1] int32: rows cu[i] … cu[i + 1] of q are the new tokens of sequence i
    table_stride,
    num_seqs,
    score_scale,
    v_scale,
    min_split_len,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # a variant of its own: its registers are not taken where nothing is split
):
    """Grid: (NUM_KV_HEADS * num_q_tiles, num_splits). TOKENS new tokens of one sequence, with the GROUP heads of one K
    and V head, over one split of their context.

    Chunks differ in length, so a grid of (chunks, tiles of the longest) would be mostly empty. Instead chunk i owns the
    q tiles from cu[i] // TOKENS + i on: each chunk has enough of them, and num_tokens // TOKENS + num_seqs are enough
    for all, a number that follows from shapes. Programs of surplus tiles return at once. Tiles late in a chunk have
    more to attend to, so they are started first, and short ones fill the gaps at the end.

    Where these are too few programs, what lies before the diagonal is split, as in `decode_kernel`, and the last split
    takes the diagonal too. All parts go to `part` and `part_lse`, for `merge_chunks_kernel`.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS  # neighbours read neighbouring memory
    q_tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS

    seq = -1  # the last sequence whose first tile is not behind this one
    for first in range(0, num_seqs, 128):
        i = first + tl.arange(0, 128)
        first_tiles = tl.load(cu_seqlens_q_ptr + i, mask=i < num_seqs, other=0) // TOKENS + i
        seq += tl.sum(((first_tiles <= q_tile) & (i < num_seqs)).to(tl.int32), 0)
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    num_new = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    first_token = (q_tile - q_start // TOKENS - seq) * TOKENS
    if first_token >= num_new:
        return
    num_computed = tl.load(seq_lens_ptr + seq) - num_new

    rows, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    tokens = first_token + rows // GROUP  # [ROWS] the heads of a token in neighbouring rows
    heads = kv_head * GROUP + rows % GROUP  # [ROWS]
    is_row = (rows < TOKENS * GROUP) & (tokens < num_new)
    q_rows = (q_start + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
    elements = q_rows[:, None] * HEAD_DIM + dims[None, :]

    # Most tiles lie before the first of these tokens, and need no mask; then come those on the diagonal. With a window,
    # the tiles at its edge come first.
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    diagonal = (num_computed + first_token + 1) // TILE * TILE
    end = num_computed + tl.minimum(first_token + TOKENS, num_new)
    begin = first_tile(num_computed + first_token, WINDOW, TILE)
    edge = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, diagonal)  # from here on, all rows see all
    if IS_SPLIT:
        num_tokens = tl.load(cu_seqlens_q_ptr + num_seqs)
        first_part = split * num_tokens.to(tl.int64) * (NUM_KV_HEADS * GROUP)
        split_len = split_length(diagonal - begin, num_splits, min_split_len, TILE)
        last_split = tl.maximum(tl.cdiv(diagonal - begin, split_len) - 1, 0)
        if split > last_split:
            tl.store(part_lse_ptr + first_part + q_rows, float("-inf"), mask=is_row)
            return
        begin += split * split_len
        if split < last_split:
            diagonal = begin + split_len
            end = diagonal

    q = tl.load(q_ptr + elements, mask=is_row[:, None], other=0.0)  # [ROWS, HEAD_DIM]
    q = as_computed_with(q, k_cache_ptr.dtype.element_ty == tl.float8e4nv)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    k_head_ptr, v_head_ptr = k_cache_ptr + kv_head * HEAD_DIM, v_cache_ptr + kv_head * HEAD_DIM
    block_table_ptr = block_tables_ptr + tl.cast(seq, tl.int64) * table_stride
    last_seen = num_computed + tokens  # a token sees what is not behind it, and with a window, not too far before it
    first_seen = last_seen - WINDOW + 1
    # fmt: off
    if WINDOW > 0:
        edge = tl.minimum(tl.maximum(edge, begin), diagonal)
        acc, row_max, row_sum = attend_to_tokens(
            acc, row_max, row_sum, q, first_seen, last_seen, k_head_ptr, v_head_ptr, block_table_ptr, begin, edge,
            score_scale, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, True, SOFTCAP, IS_MASKED=True,
        )
        begin = edge
    acc, row_max, row_sum = attend_to_tokens(
        acc, row_max, row_sum, q, first_seen, last_seen, k_head_ptr, v_head_ptr, block_table_ptr, begin, diagonal,
        score_scale, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW > 0, SOFTCAP, IS_MASKED=False,
    )
    acc, row_max, row_sum = attend_to_tokens(
        acc, row_max, row_sum, q, first_seen, last_seen, k_head_ptr, v_head_ptr, block_table_ptr, diagonal, end,
        score_scale, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW > 0, SOFTCAP, IS_MASKED=True,
    )
    # fmt: on
    out = acc * (v_scale / row_sum)[:, None]
    if IS_SPLIT:  # a row that sees nothing of this split has an lse of -inf, and its part is not read
        tl.store(part_ptr + first_part * HEAD_DIM + elements, out, mask=is_row[:, None])
        tl.store(part_lse_ptr + first_part + q_rows, row_max + tl.log2(row_sum), mask=is_row)
    else:
        tl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
