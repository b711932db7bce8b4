"""The loop over the tiles of a sequence that all attention kernels share, and how a program finds its tile of a chunk.

The kernels in `paged_attention.py` call both. That file also explains the accumulators.
"""

import triton
import triton.language as tl


@triton.jit
def find_sequence(
    cu_seqlens_ptr,  # [num_seqs + 1] int32: rows cu[i] … cu[i + 1] of the batch are the new tokens of sequence i
    tile,
    num_seqs,
    TOKENS: tl.constexpr,
):
    """Return a tile's sequence, that sequence's first row and its number of rows, and the tile's first row within it.

    Chunks differ in length, so a grid of (chunks, tiles of the longest) would be mostly empty. Instead chunk i owns the
    tiles from number cu[i] // TOKENS + i on. Each chunk then has enough tiles, and num_tokens // TOKENS + num_seqs
    tiles are enough for all chunks, a number that follows from shapes. Surplus tiles begin behind their chunk's end.
    """
    seq = -1  # will be the last sequence whose first tile is at or before this one
    for first in range(0, num_seqs, 128):
        i = first + tl.arange(0, 128)
        first_tiles = tl.load(cu_seqlens_ptr + i, mask=i < num_seqs, other=0) // TOKENS + i
        seq += tl.sum(((first_tiles <= tile) & (i < num_seqs)).to(tl.int32), 0)
    start = tl.load(cu_seqlens_ptr + seq)
    num_new = tl.load(cu_seqlens_ptr + seq + 1) - start
    return seq, start, num_new, (tile - start // TOKENS - seq) * TOKENS


@triton.jit
def as_computed_with(q, IS_FP8: tl.constexpr):
    """Convert q from bfloat16 to float16 if the cache is fp8.

    A GPU converts two e4m3 numbers to float16 in one instruction, and float16 represents each of them exactly. Values
    of q beyond its range are clamped to ±65,504.
    """
    if IS_FP8 and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return q


@triton.jit
def soft_capped(scores, score_scale, SOFTCAP: tl.constexpr):
    """Bound the product of scores and score_scale softly by SOFTCAP (in units of log2(e), as the product is)."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    shares = scores * (score_scale / (SOFTCAP * LOG2_E))
    e = tl.exp2(tl.abs(shares) * (-2 * LOG2_E))  # e^-2|x|: never overflows
    bounded = (1 - e) / (1 + e)
    return tl.where(shares < 0, -bounded, bounded) * (SOFTCAP * LOG2_E / score_scale)


@triton.jit
def attend_to_tokens(
    acc,  # [ROWS, HEAD_DIM] float32
    row_max,  # [ROWS] float32
    row_sum,  # [ROWS] float32
    q,  # [ROWS, HEAD_DIM]
    first_seen,  # [ROWS] the first position that each row attends to, only read if HAS_WINDOW
    last_seen,  # [ROWS] the last one
    k_head_ptr,  # the K cache at the program's head; v_head_ptr likewise
    v_head_ptr,
    block_table_ptr,  # [max_num_blocks] int32, of this sequence
    begin,  # a multiple of TILE
    end,
    score_scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Attend to the positions begin … end - 1 of one sequence; return the updated acc, row_max and row_sum.

    Without IS_MASKED, every row must attend to all of these positions, and their number must be a multiple of TILE.
    With IS_MASKED, positions from `end` on are not read, and neither are their block table entries. Without HAS_WINDOW,
    every row must attend to the first position of its first call, which makes row_max finite. With HAS_WINDOW, a row
    may attend to no position of the first tiles.
    """
    dims = tl.arange(0, HEAD_DIM)
    in_tile = tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        start = tl.multiple_of(start, TILE)
        positions = start + in_tile  # [TILE]
        # The slots of the tile. A tile within one block looks up this block once; the slots are consecutive. In a tile
        # that spans several blocks, each position looks up its own block.
        if BLOCK_SIZE >= TILE:
            block = tl.load(block_table_ptr + start // BLOCK_SIZE).to(tl.int64)
            slots = block * BLOCK_SIZE + start % BLOCK_SIZE + in_tile
        else:
            unsigned = positions.to(tl.uint32)  # so that a division is a shift
            if IS_MASKED:
                blocks = tl.load(block_table_ptr + unsigned // BLOCK_SIZE, mask=positions < end, other=0)
            else:
                blocks = tl.load(block_table_ptr + unsigned // BLOCK_SIZE)
            slots = blocks.to(tl.int64) * BLOCK_SIZE + in_tile % BLOCK_SIZE  # a tile begins where a block does
        offsets = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]  # [TILE, HEAD_DIM]

        # A slot from `end` on may hold any value. Its score becomes -inf and its weight 0, but 0 * NaN is NaN, so V is
        # loaded as zeros there. K is masked only to read less. score_scale includes the scale of an fp8 cache.
        if IS_MASKED:
            k = tl.load(k_head_ptr + offsets, mask=(positions < end)[:, None], other=0.0).to(q.dtype)
        else:
            k = tl.load(k_head_ptr + offsets).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, TILE]
        if SOFTCAP > 0:
            scores = soft_capped(scores, score_scale, SOFTCAP)
        if IS_MASKED:
            is_seen = positions[None, :] <= last_seen[:, None]
            if HAS_WINDOW:
                is_seen &= positions[None, :] >= first_seen[:, None]
            scores = tl.where(is_seen, scores, float("-inf"))

        # the scale is applied here, where it costs nothing: product and difference are one instruction
        new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale)
        base = new_max
        if IS_MASKED and HAS_WINDOW:  # -inf - -inf is NaN
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores * score_scale - base[:, None])  # [ROWS, TILE]
        shrink = tl.exp2(row_max - base)
        row_max = new_max
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        if IS_MASKED:
            is_needed = positions < end
            if HAS_WINDOW:  # blocks before the window have been freed; the table has the null block for them
                is_needed &= positions >= tl.min(first_seen, 0)
            v = tl.load(v_head_ptr + offsets, mask=is_needed[:, None], other=0.0).to(q.dtype)
        else:
            v = tl.load(v_head_ptr + offsets).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, row_max, row_sum
