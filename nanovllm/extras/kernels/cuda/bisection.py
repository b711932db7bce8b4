"""`find_limit`: the largest limit such that the tokens from it on weigh enough, found by bisection instead of a sort.

A step of the bisection adds up the weights of the tokens from some value on. It reads only chunks whose maximum reaches
this value. Once few tokens are left between the bounds, they are gathered into registers, and nothing more is read.

The bisection is exact: `key_of` maps logits to integers in the same order, and the loop ends when the bounds are
neighbours. Every sum is taken in a fixed order and over one row only, so that a row's token does not depend on the
batch. `truncate.py` calls it, for top-k with weights of 1 and for top-p.
"""

import torch
import triton
import triton.language as tl

from nanovllm.extras.kernels.cuda.logit_weights import LOWEST, load_logits, weigh

# how many of a float32's last bits are zero if it was widened from this dtype: keys do without these bits
ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}

LINEAR_STEPS = tl.constexpr(12)  # of a bisection, before it halves the keys


@triton.jit
def key_of(value, ZERO_BITS: tl.constexpr):
    """An integer key in the order of the float values; the bits of negative floats count downwards."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> ZERO_BITS


@triton.jit
def value_of(key, ZERO_BITS: tl.constexpr):
    """The inverse of `key_of`."""
    ordered = (key << ZERO_BITS) | ((key >> 31) & ((1 << ZERO_BITS) - 1))
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def choose_between(low, high, step, row_max, ZERO_BITS: tl.constexpr):
    """A key between two others. Values near 0 have most of the keys, so the first steps halve values, the later keys.

    While no lower bound of the row's values is known, the distance to its maximum doubles.
    """
    low_value, high_value = value_of(low, ZERO_BITS), value_of(high, ZERO_BITS)
    is_endless = low_value <= 0.99 * LOWEST
    value = tl.where(is_endless, 2 * high_value - row_max - 1.0, 0.5 * low_value + 0.5 * high_value)
    halved = (low >> 1) + (high >> 1) + (low & high & 1)  # the sum could be too large for 32 bits
    return tl.where(step < LINEAR_STEPS, key_of(value, ZERO_BITS), halved)


@triton.jit
def rank_chunks(maxima, limit):
    """For each chunk with a token from `limit` on, how many such chunks are before it, else -1; and their number."""
    is_needed = maxima >= limit
    ranks = tl.cumsum(is_needed.to(tl.int32), 0) - 1
    return tl.where(is_needed, ranks, -1), tl.sum(is_needed.to(tl.int32), 0)


@triton.jit
def load_group(row_ptr, ranks, first, num_needed, vocab_size, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """The chunks of ranks `first`, first + 1, …: which they are, [GROUP], and their logits, [GROUP, CHUNK]"""
    wanted = first + tl.arange(0, GROUP)
    all_chunks = tl.arange(0, ranks.shape[0])
    chunks = tl.sum(tl.where(ranks[None, :] == wanted[:, None], all_chunks[None, :], 0), 1)
    tokens = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return chunks, load_logits(row_ptr + tokens, (tokens < vocab_size) & (wanted < num_needed)[:, None])


@triton.jit
def add_up(row_ptr, maxima, vocab_size, limit, row_max, scale, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """The sum of the weights of the tokens from `limit` on, and their number, which float32 holds up to 2^24."""
    weights = tl.zeros([GROUP * CHUNK // 4], tl.float32)  # four neighbours are in one thread: their sum costs nothing
    counts = tl.zeros([GROUP * CHUNK // 4], tl.float32)
    ranks, num_needed = rank_chunks(maxima, limit)
    for first in range(0, num_needed, GROUP):
        _, logits = load_group(row_ptr, ranks, first, num_needed, vocab_size, CHUNK, GROUP)
        logits = tl.reshape(logits, [GROUP * CHUNK // 4, 4])
        weights += tl.sum(weigh(logits, limit, row_max, scale), 1)
        counts += tl.sum(tl.where(logits >= limit, 1.0, 0.0), 1)
    return tl.sum(weights, 0), tl.sum(counts, 0)


@triton.jit
def gather(spare_ptr, row_ptr, maxima, vocab_size, begin, end, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Write the logits in begin … end, without `end` itself, to `spare`; returns their number."""
    num_gathered = 0
    ranks, num_needed = rank_chunks(maxima, begin)
    for first in range(0, num_needed, GROUP):
        _, logits = load_group(row_ptr, ranks, first, num_needed, vocab_size, CHUNK, GROUP)
        is_in = (logits >= begin) & (logits < end)
        in_chunk = tl.cumsum(is_in.to(tl.int32), 1)  # [GROUP, CHUNK] this one and those before it
        sizes = tl.sum(is_in.to(tl.int32), 1)  # [GROUP]
        before = num_gathered + tl.cumsum(sizes, 0) - sizes
        tl.store(spare_ptr + (before[:, None] + in_chunk - 1), logits, mask=is_in)
        num_gathered += tl.sum(sizes, 0)
    return num_gathered


@triton.jit
def find_limit(
    low,  # the key that is taken if there is none above
    guess,  # a key to begin with
    num_low,  # how many tokens there are from `low` on, or more
    needed,
    row_ptr,
    maxima,  # [CHUNKS] of the row's chunks
    spare_ptr,  # [CAPACITY] float32
    vocab_size,
    row_max,
    scale,  # with 0, all tokens weigh 1
    ZERO_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The largest key such that the weights of the tokens from this key on add up to `needed` or more.

    Invariant: the tokens from `low` on weigh `needed` or more (or `low` is the argument); those from `high` on weigh
    `above`, which is less.
    """
    high = key_of(row_max, ZERO_BITS) + 1
    above, num_high, step = 0.0, 0.0, 0
    middle = guess
    while (low + 1 < high) & (num_low - num_high > CAPACITY):
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        value = value_of(middle, ZERO_BITS)
        amount, num = add_up(row_ptr, maxima, vocab_size, value, row_max, scale, CHUNK, GROUP)
        is_enough = amount >= needed
        low, num_low = tl.where(is_enough, middle, low), tl.where(is_enough, num, num_low)
        high, num_high = tl.where(is_enough, high, middle), tl.where(is_enough, num_high, num)
        above = tl.where(is_enough, above, amount)
        step += 1
        middle = choose_between(low, high, step, row_max, ZERO_BITS)

    if low + 1 < high:
        begin, end = value_of(low, ZERO_BITS), value_of(high, ZERO_BITS)
        num_gathered = gather(spare_ptr, row_ptr, maxima, vocab_size, begin, end, CHUNK, GROUP // 2)
        tl.debug_barrier()  # what the other threads have written
        i = tl.arange(0, CAPACITY)
        logits = tl.load(spare_ptr + i, mask=i < num_gathered, other=float("-inf"))
        weights = weigh(logits, begin, row_max, scale)
        tl.debug_barrier()  # all have read, and the next to gather may write
        while low + 1 < high:
            middle = choose_between(low, high, step, row_max, ZERO_BITS)
            middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
            amount = above + tl.sum(tl.where(logits >= value_of(middle, ZERO_BITS), weights, 0.0), 0)
            low = tl.where(amount >= needed, middle, low)
            high = tl.where(amount >= needed, high, middle)
            step += 1
    return low
