"""Inverse-CDF sampling in two steps: a row's uniform number selects a chunk of the vocabulary, then a token in it.

A greedy row gets its likeliest token (the first of equals). `sample.py` launches `pick_kernel` last.
"""

import triton
import triton.language as tl

from nanovllm_extras.kernels.cuda.logit_weights import LOWEST, load_logits, load_scale, weigh


@triton.jit
def first_where(condition, i, otherwise, SIZE: tl.constexpr):
    """Return the smallest `i` below SIZE for which the condition holds, or `otherwise` if there is none."""
    first = tl.min(tl.where(condition, i, SIZE), 0)
    return tl.where(first < SIZE, first, otherwise)


@triton.jit
def find_share(weights, target, SIZE: tl.constexpr):
    """Find the entry whose share of the cumulative sum contains `target`. Return it and the sum before it.

    An entry of weight 0 has no share. If rounding puts the target beyond the end, choose the last entry with a share.
    """
    i = tl.arange(0, SIZE)
    cumulative = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0, i, 0), 0)
    chosen = first_where((cumulative > target) & (weights > 0), i, last, SIZE)
    return chosen, tl.sum(tl.where(i == chosen, cumulative - weights, 0.0), 0)


@triton.jit(do_not_specialize=["temperatures_ptr", "uniforms_ptr"])
def pick_kernel(
    token_ids_ptr,  # [num_rows] int64
    maxima_ptr,  # [num_rows, num_chunks] float32
    sums_ptr,  # as maxima
    limits_ptr,  # [num_rows] float32; read if HAS_LIMITS
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    temperatures_ptr,  # [num_rows] float32
    uniforms_ptr,  # [num_rows] float64
    vocab_size,
    row_stride,
    ALL_GREEDY: tl.constexpr,  # neither temperatures nor uniforms are read
    HAS_LIMITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # num_chunks, rounded up to a power of two
):
    """Pick the token of one row per program: the likeliest, or the one whose share contains the row's uniform number.

    If all weights are 0 or one is NaN, a draw is impossible, and the row gets its likeliest token. Grid: (num_rows,).
    """
    row = tl.program_id(0)
    num_chunks = tl.cdiv(vocab_size, CHUNK)
    chunks = tl.arange(0, CHUNKS)
    maxima_ptr += row * num_chunks
    maxima = tl.load(maxima_ptr + chunks, mask=chunks < num_chunks, other=float("-inf"))  # [CHUNKS]
    row_max = tl.max(maxima, 0)
    chunk = first_where(maxima == row_max, chunks, 0, CHUNKS)
    is_drawn = False
    if not ALL_GREEDY:
        scale = load_scale(temperatures_ptr, row)
        limit = LOWEST
        if HAS_LIMITS:
            limit = tl.load(limits_ptr + row)
        sums = tl.load(sums_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
        shares = sums.to(tl.float64) * weigh(maxima, limit, row_max, scale).to(tl.float64)  # [CHUNKS]
        total = tl.sum(shares, 0)
        is_drawn = (tl.load(temperatures_ptr + row) > 0) & (total > 0)
        target = tl.load(uniforms_ptr + row) * total
        drawn_chunk, before = find_share(shares, target, CHUNKS)
        chunk = tl.where(is_drawn, drawn_chunk, chunk)

    tokens = tl.arange(0, CHUNK)
    is_token = chunk * CHUNK + tokens < vocab_size
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    logits = load_logits(row_ptr + chunk * CHUNK + tokens, is_token)
    largest = tl.max(logits, 0)
    token = first_where((logits == largest) & is_token, tokens, 0, CHUNK)
    if not ALL_GREEDY:
        # the chunk's weights are relative to its own maximum
        weights = weigh(logits, limit, largest, scale).to(tl.float64)
        ratio = tl.exp2((largest - row_max) * scale).to(tl.float64)
        drawn_token, _ = find_share(weights, (target - before) / ratio, CHUNK)
        token = tl.where(is_drawn, drawn_token, token)
    tl.store(token_ids_ptr + row, (chunk * CHUNK + token).to(tl.int64))
