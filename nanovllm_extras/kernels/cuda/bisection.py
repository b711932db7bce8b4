"""Find the truncation limit of a row of logits by bisection, without a sort: `find_limit`.

The limit is the largest value such that the tokens whose logit is at least this value have enough weight in total.
Each step of the bisection adds up the weights of the tokens whose logit is at least some value. It reads only the
chunks whose maximum reaches this value. When few tokens are left between the bounds, the kernel gathers their logits
into registers and reads no more memory.

The bisection is exact: `key_of` maps logits to integers in the same order, and the loop ends when the bounds are
neighbours. Every sum is over one row only and in a fixed order, so a row's token does not depend on the batch.
`truncate.py` calls `find_limit` for top-k (all weights are 1) and for top-p.
"""

import torch
import triton
import triton.language as tl

from nanovllm_extras.kernels.cuda.logit_weights import LOWEST, load_logits, weigh

# how many of a float32's last bits are zero if it was widened from this dtype; keys omit these bits
ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}

LINEAR_STEPS = tl.constexpr(12)  # the first steps halve the interval of values; later steps halve that of keys


@triton.jit
def key_of(value, ZERO_BITS: tl.constexpr):
    """Map a float to an integer key in the same order. (The bits of negative floats count downwards.)"""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> ZERO_BITS


@triton.jit
def value_of(key, ZERO_BITS: tl.constexpr):
    """Map a key back to its float: the inverse of `key_of`."""
    ordered = (key << ZERO_BITS) | ((key >> 31) & ((1 << ZERO_BITS) - 1))
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def choose_between(low, high, step, row_max, ZERO_BITS: tl.constexpr):
    """Return a key between `low` and `high`, at which the bisection tests next.

    Most keys belong to values near 0, so the first steps halve the interval of values and later ones that of the keys.
    While the row has no known lower bound, each step doubles the distance to the row's maximum.
    """
    low_value, high_value = value_of(low, ZERO_BITS), value_of(high, ZERO_BITS)
    is_endless = low_value <= 0.99 * LOWEST
    value = tl.where(is_endless, 2 * high_value - row_max - 1.0, 0.5 * low_value + 0.5 * high_value)
    halved = (low >> 1) + (high >> 1) + (low & high & 1)  # the sum could be too large for 32 bits
    return tl.where(step < LINEAR_STEPS, key_of(value, ZERO_BITS), halved)


@triton.jit
def rank_chunks(maxima, limit):
    """Number the chunks whose maximum is at least `limit`: each chunk's rank (-1 for other chunks), and their count."""
    is_needed = maxima >= limit
    ranks = tl.cumsum(is_needed.to(tl.int32), 0) - 1
    return tl.where(is_needed, ranks, -1), tl.sum(is_needed.to(tl.int32), 0)


@triton.jit
def load_group(row_ptr, ranks, first, num_needed, vocab_size, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Load the chunks of ranks `first`, first + 1, …; return their numbers [GROUP] and logits [GROUP, CHUNK]."""
    wanted = first + tl.arange(0, GROUP)
    all_chunks = tl.arange(0, ranks.shape[0])
    chunks = tl.sum(tl.where(ranks[None, :] == wanted[:, None], all_chunks[None, :], 0), 1)
    tokens = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return chunks, load_logits(row_ptr + tokens, (tokens < vocab_size) & (wanted < num_needed)[:, None])


@triton.jit
def add_up(row_ptr, maxima, vocab_size, limit, row_max, scale, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Sum the weights of the tokens whose logit is at least `limit`, and count them (float32 is exact up to 2^24)."""
    weights = tl.zeros([GROUP * CHUNK // 4], tl.float32)  # a thread holds four neighbours and sums them itself
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
    """Write the logits from `begin` to below `end` to `spare`, and return how many there are."""
    num_gathered = 0
    ranks, num_needed = rank_chunks(maxima, begin)
    for first in range(0, num_needed, GROUP):
        _, logits = load_group(row_ptr, ranks, first, num_needed, vocab_size, CHUNK, GROUP)
        is_in = (logits >= begin) & (logits < end)
        in_chunk = tl.cumsum(is_in.to(tl.int32), 1)  # [GROUP, CHUNK] how many up to and including this one
        sizes = tl.sum(is_in.to(tl.int32), 1)  # [GROUP]
        before = num_gathered + tl.cumsum(sizes, 0) - sizes
        tl.store(spare_ptr + (before[:, None] + in_chunk - 1), logits, mask=is_in)
        num_gathered += tl.sum(sizes, 0)
    return num_gathered


@triton.jit
def find_limit(
    low,  # the result if no larger key has enough weight
    guess,  # the key that is tested first
    num_low,  # upper bound of the number of tokens whose key is at least `low`
    needed,
    row_ptr,
    maxima,  # [CHUNKS] of the row's chunks
    spare_ptr,  # [CAPACITY] float32
    vocab_size,
    row_max,
    scale,  # if 0, all tokens weigh 1
    ZERO_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Return the largest key such that the tokens with at least this key have a total weight of at least `needed`.

    Invariant: the tokens with keys of at least `low` weigh `needed` or more (or `low` is still the argument). The
    tokens with keys of at least `high` weigh `above`, which is less than `needed`.
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
        tl.debug_barrier()  # wait for the writes of the other threads
        i = tl.arange(0, CAPACITY)
        logits = tl.load(spare_ptr + i, mask=i < num_gathered, other=float("-inf"))
        weights = weigh(logits, begin, row_max, scale)
        tl.debug_barrier()  # all threads have read, so the next `gather` may write
        while low + 1 < high:
            middle = choose_between(low, high, step, row_max, ZERO_BITS)
            middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
            amount = above + tl.sum(tl.where(logits >= value_of(middle, ZERO_BITS), weights, 0.0), 0)
            low = tl.where(amount >= needed, middle, low)
            high = tl.where(amount >= needed, high, middle)
            step += 1
    return low
