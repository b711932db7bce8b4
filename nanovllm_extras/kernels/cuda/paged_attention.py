"""Attention over a paged cache: a decode kernel, a prefill kernel, and kernels that merge the parts of split contexts.

All are FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135) plus a look-up in the block table. A program
keeps a few rows of queries and loops over the sequence, one tile of tokens at a time. The scores of a tile are only in
registers. The softmax is updated tile by tile (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867):

    row_max   the largest score so far
    row_sum   the sum of exp(score - row_max) so far
    acc       the sum of exp(score - row_max) * v so far

When a larger score is found, row_sum and acc are multiplied by exp(old max - new max). At the end the output is
acc / row_sum. With a window, the loop begins at the first tile that a row attends to; WINDOW 0 means all tokens. A
soft-cap replaces each score by SOFTCAP * tanh(score / SOFTCAP); SOFTCAP 0 leaves the scores unchanged.
The hardware computes exp2, not exp, so the softmax scale includes log2(e), and row_max is in these units.

The look-up: position p of a sequence is in block `block_table[p // block_size]`, in slot `block * block_size +
p % block_size` of the cache.

The rows of a program are the query heads that share one K and V head (GQA), so each K and V is loaded once for all of
them. The tensor cores multiply at least 16 rows. If there are fewer, the other rows are zeros, which cost almost
nothing, because a decode waits for memory.

`do_not_specialize` lists arguments that change from step to step; otherwise Triton would compile a kernel again for a
number that happens to be 1 or a multiple of 16. Arguments in capitals are constant for a model.
"""

import triton
import triton.language as tl

from nanovllm_extras.kernels.cuda.tile_walk import as_computed_with, attend_to_tokens, find_sequence


@triton.jit
def first_tile(position, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return the start of the first tile that the token at `position` attends to."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
    return first


@triton.jit
def split_length(seq_len, num_splits, min_split_len, TILE: tl.constexpr):
    """Return the number of tokens in each split of a sequence: whole tiles, of about equal size, at least a minimum.

    The host knows only the maximum number of splits. If a sequence needs fewer, the other splits are empty, so that a
    launch recorded in a CUDA graph is correct for every length.
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
    ROWS: tl.constexpr,  # GROUP, rounded up to a power of two, at least 16
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attend with a sequence's one new token to one split of its context, for one K and V head.

    Grid: (NUM_KV_HEADS, num_seqs, num_splits). With few sequences there would be too few programs to keep the memory
    busy, so each context is split between several programs, as in Flash-Decoding. If a sequence has one split, the
    result goes to `out`; otherwise the parts go to `part` and `part_lse`, for `merge_kernel`. An empty sequence
    (padding of a CUDA graph) gets zeros.
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
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # it is 0 without tokens
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
    """Merge the parts of one head of one sequence per program. Grid: (num_heads, num_seqs)."""
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
    """Merge the parts of one head of one token per program. An empty split has an lse of -inf.

    Grid: (num_tokens * num_heads,).
    """
    row = tl.program_id(0).to(tl.int64)
    out = joined(part_ptr, part_lse_ptr, row, tl.num_programs(0), num_splits, HEAD_DIM, SPLITS)
    tl.store(out_ptr + row * HEAD_DIM + tl.arange(0, HEAD_DIM), out.to(out_ptr.dtype.element_ty))


@triton.jit
def joined(part_ptr, part_lse_ptr, first, stride, num_used, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Merge `num_used` parts, in rows first, first + stride, …, into one output: [HEAD_DIM]

    This is attention again: the parts are the values, and the logarithm of the sum of their weights (lse) is their
    score. Parts of empty splits were never written and are not read.
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
    IS_SPLIT: tl.constexpr,  # compiled separately, because splitting takes more registers
):
    """Attend with TOKENS new tokens of one sequence, for the heads of one K and V head, to one split of the context.

    Grid: (NUM_KV_HEADS * num_q_tiles, num_splits), with the tiles of `find_sequence`. Programs of surplus tiles return
    early. Tiles late in a chunk attend to more tokens, so they start first, and short ones fill the gaps at the end.

    If this gives too few programs, the context before the diagonal is split, as in `decode_kernel`, and the last split
    includes the diagonal. All parts go to `part` and `part_lse`, for `merge_chunks_kernel`.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS  # neighbouring programs read neighbouring memory
    q_tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS

    seq, q_start, num_new, first_token = find_sequence(cu_seqlens_q_ptr, q_tile, num_seqs, TOKENS)
    if first_token >= num_new:
        return
    num_computed = tl.load(seq_lens_ptr + seq) - num_new

    rows, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    tokens = first_token + rows // GROUP  # [ROWS] the heads of a token are in neighbouring rows
    heads = kv_head * GROUP + rows % GROUP  # [ROWS]
    is_row = (rows < TOKENS * GROUP) & (tokens < num_new)
    q_rows = (q_start + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
    elements = q_rows[:, None] * HEAD_DIM + dims[None, :]

    # Most tiles are before the first of these tokens and need no mask. The tiles on the diagonal follow. With a window,
    # the tiles at its edge come first.
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    diagonal = (num_computed + first_token + 1) // TILE * TILE
    end = num_computed + tl.minimum(first_token + TOKENS, num_new)
    begin = first_tile(num_computed + first_token, WINDOW, TILE)
    edge = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, diagonal)  # no mask from here on
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
    last_seen = num_computed + tokens  # a token attends to itself and to earlier tokens, with a window to the last few
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
    if IS_SPLIT:  # a row that attends to no token of this split has an lse of -inf, and its part is not read
        tl.store(part_ptr + first_part * HEAD_DIM + elements, out, mask=is_row[:, None])
        tl.store(part_lse_ptr + first_part + q_rows, row_max + tl.log2(row_sum), mask=is_row)
    else:
        tl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
