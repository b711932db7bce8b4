"""`draw_tokens` of `nanovllm/execution/sampler.py` in Triton: temperature, min-p, top-k, top-p and the draw.

Nothing is sorted, and no probability is written down. min-p, top-k and top-p all keep the tokens whose logit is at
least some limit, so a row's limit is all that has to be found, by bisection:

    stats_kernel     the largest logit of each chunk of a row, and its sum of exp((logit - largest) / temperature)
    truncate_kernel  finds the row's limit, and sums the chunks' weights again without what lies below it
    pick_kernel      inverse-CDF sampling: the row's uniform number selects first the chunk, then the token in it

A step of the bisection adds up the weights of the tokens from some value on. It reads only chunks whose maximum reaches
this value. Once few tokens are left between the bounds, they are gathered into registers, and nothing more is read.
With a top-k of at most the number of chunks, few tokens are left from the start: the k-th largest of the maxima is a
lower bound.

The bisection is exact: logits are mapped to integers in the same order (their keys), and it ends when the bounds are
neighbours, not at some precision. Every sum is taken in a fixed order and over one row only, so that a row's token does
not depend on the batch. Nothing is decided on the host, so that a CUDA graph can hold all launches.
`execution/choices.py` chooses this twin on CUDA.
"""

from typing import Any

import torch
import triton
import triton.language as tl

CHUNK = 2048  # logits of which stats_kernel and pick_kernel hold all in registers
GROUP = 4  # chunks that truncate_kernel reads at a time
CAPACITY = 4096  # tokens that truncate_kernel gathers into registers

# how many of a float32's last bits are zero if it was widened from this dtype: keys do without these bits
ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of the finite numbers of float32
LARGEST = tl.constexpr(3.4028234663852886e38)
LOG2E = tl.constexpr(1.4426950408889634)
LINEAR_STEPS = tl.constexpr(12)  # of a bisection, before it halves the keys


# ---- what a logit weighs


@triton.jit
def load_logits(ptr, mask):
    """Logits in float32: -inf for NaN, and where `mask` is off."""
    logits = tl.load(ptr, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def weigh(logits, limit, largest, scale):
    """exp((logits - largest) / temperature), and 0 below the limit; `scale` is log2(e) / temperature."""
    return tl.where(logits >= limit, tl.exp2((logits - largest) * scale), 0.0)


@triton.jit
def load_scale(temperatures_ptr, row):
    """log2(e) / temperature, kept finite: its product with a difference of 0 has to be 0, not NaN."""
    temperature = tl.load(temperatures_ptr + row)
    return tl.minimum(1.0 / tl.where(temperature > 0, temperature, 1.0) * LOG2E, LARGEST)


# ---- bisection


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


# ---- kernels


@triton.jit(do_not_specialize=["temperatures_ptr"])
def stats_kernel(
    maxima_ptr,  # [num_rows, num_chunks] float32
    sums_ptr,  # as maxima; not written if ALL_GREEDY
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    temperatures_ptr,  # [num_rows] float32
    vocab_size,
    row_stride,
    ALL_GREEDY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (num_rows * num_chunks,). One chunk: its largest logit, and the sum of its weights relative to that."""
    num_chunks = tl.cdiv(vocab_size, CHUNK)
    row, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + row.to(tl.int64) * row_stride + tokens, tokens < vocab_size)
    largest = tl.max(logits, 0)
    tl.store(maxima_ptr + tl.program_id(0), largest)
    if not ALL_GREEDY:
        scale = load_scale(temperatures_ptr, row)
        tl.store(sums_ptr + tl.program_id(0), tl.sum(weigh(logits, LOWEST, largest, scale), 0))


@triton.jit(do_not_specialize=["temperatures_ptr", "min_p_ptr", "top_k_ptr", "top_p_ptr"])
def truncate_kernel(
    limits_ptr,  # [num_rows] float32: the smallest logit that is kept
    sums_ptr,  # [num_rows, num_chunks] float32, as stats_kernel writes them; replaced for chunks that reach the limit
    maxima_ptr,  # [num_rows, num_chunks] float32
    spare_ptr,  # [num_rows, CAPACITY] float32
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    temperatures_ptr,  # [num_rows] float32
    min_p_ptr,  # [num_rows] float32
    top_k_ptr,  # [num_rows] int64
    top_p_ptr,  # [num_rows] float32
    vocab_size,
    row_stride,
    ZERO_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # num_chunks, rounded up to a power of two
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Grid: (num_rows,). Rows that are greedy or want no truncation return at once."""
    row = tl.program_id(0)
    temperature, min_p = tl.load(temperatures_ptr + row), tl.load(min_p_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    num_chunks = tl.cdiv(vocab_size, CHUNK)
    chunks = tl.arange(0, CHUNKS)
    maxima_ptr += row * num_chunks
    maxima = tl.load(maxima_ptr + chunks, mask=chunks < num_chunks, other=float("-inf"))  # [CHUNKS]
    row_max = tl.max(maxima, 0)
    is_cut = (min_p > 0) | has_top_k | (top_p < 1)
    if (temperature <= 0) | (is_cut == 0) | (tl.abs(row_max) > LARGEST):
        tl.store(limits_ptr + row, LOWEST)
        return
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    spare_ptr += row * CAPACITY
    scale = load_scale(temperatures_ptr, row)

    limit = row_max + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0))
    limit = tl.where(min_p > 0, tl.maximum(limit, LOWEST), LOWEST)
    low = key_of(limit, ZERO_BITS)
    low += (value_of(low, ZERO_BITS) < limit).to(tl.int32)  # the limit need not be a number of the logits' dtype
    # fmt: off
    if has_top_k:
        kth = tl.minimum(top_k, num_chunks).to(tl.int32) - 1
        ordered = tl.sort(maxima, descending=True)
        guess = key_of(tl.max(tl.where(chunks == kth, ordered, LOWEST), 0), ZERO_BITS)
        low = find_limit(
            low, guess, tl.cast(vocab_size, tl.float32), top_k.to(tl.float32), row_ptr, maxima, spare_ptr, vocab_size,
            row_max, 0.0, ZERO_BITS, CHUNK, GROUP, CAPACITY,
        )
    if top_p < 1:
        total, num = add_up(row_ptr, maxima, vocab_size, value_of(low, ZERO_BITS), row_max, scale, CHUNK, GROUP)
        # tokens that weigh less than this are left out: all of them together weigh less than top-p may cut off
        guess = key_of(row_max + temperature * tl.log((1 - top_p) * total / num), ZERO_BITS)
        low = find_limit(
            low, guess, num, top_p * total, row_ptr, maxima, spare_ptr, vocab_size,
            row_max, scale, ZERO_BITS, CHUNK, GROUP, CAPACITY,
        )
    # fmt: on
    limit = value_of(low, ZERO_BITS)
    tl.store(limits_ptr + row, limit)

    ranks, num_needed = rank_chunks(maxima, limit)
    for first in range(0, num_needed, GROUP):
        group, logits = load_group(row_ptr, ranks, first, num_needed, vocab_size, CHUNK, GROUP)
        largest = tl.load(maxima_ptr + group)  # [GROUP]
        sums = tl.sum(weigh(logits, limit, largest[:, None], scale), 1)
        tl.store(sums_ptr + row * num_chunks + group, sums, mask=first + tl.arange(0, GROUP) < num_needed)


@triton.jit
def first_where(condition, i, otherwise, SIZE: tl.constexpr):
    """The smallest of `i` for which the condition holds, below SIZE."""
    first = tl.min(tl.where(condition, i, SIZE), 0)
    return tl.where(first < SIZE, first, otherwise)


@triton.jit
def find_share(weights, target, SIZE: tl.constexpr):
    """The entry in whose share of the sum the target falls, and what the entries before it add up to.

    An entry of weight 0 has no share. If rounding leads beyond the end, the last entry with a share is taken.
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
    """Grid: (num_rows,). The row's token: the first of the likeliest, or the one in whose share the uniform falls.

    If all weights are 0, or one is NaN, no token can be drawn, and the likeliest is taken too.
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


# ---- launches: the twin of `draw_tokens` in `execution/sampler.py`


def draw_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    max_top_k: int = 0,
    chunk: int = CHUNK,
    group: int = GROUP,
    capacity: int = CAPACITY,
) -> torch.Tensor:
    """logits: [num_samples, vocab_size] -> token ids [num_samples] int64; the other tensors have an entry for each row

    The tokens are those of `draw_tokens` in `execution/sampler.py`, except where a border is missed by no more than
    rounding. A token whose logit is NaN counts as impossible. `max_top_k` is not needed here. `chunk`, `group` (2 or
    more) and `capacity` are powers of two, for tests and measurements.
    """
    if logits.dtype not in ZERO_BITS or logits.stride(1) != 1:
        logits = logits.to(torch.float32).contiguous()
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, chunk)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0 or vocab_size == 1:  # Triton would make a constant of the 1, and fail
        return token_ids.zero_()
    # two tensors: the second half of one would not always be aligned, and Triton would compile everything once more
    maxima, sums = [
        torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device) for _ in range(2)
    ]  # [num_rows, num_chunks] each
    is_truncated = top_k is not None or top_p is not None or min_p is not None
    all_greedy, sizes = uniforms is None, (vocab_size, row_stride(logits))
    with torch.cuda.device_of(logits):  # Triton launches on the current device, which need not be that of the logits
        stats_kernel[(num_rows * num_chunks,)](
            *(maxima, sums, logits, temperatures, *sizes),
            ALL_GREEDY=all_greedy,
            CHUNK=chunk,
            num_warps=4,
            enable_fp_fusion=True,
        )
        limits = maxima  # not read without HAS_LIMITS
        if is_truncated and not all_greedy:
            asked = (temperatures, top_k, top_p, min_p)
            limits = find_limits(logits, asked, maxima, sums, chunk, group, capacity)
        pick_kernel[(num_rows,)](
            *(token_ids, maxima, sums, limits, logits, temperatures, temperatures if all_greedy else uniforms),
            *sizes,
            ALL_GREEDY=all_greedy,
            HAS_LIMITS=is_truncated and not all_greedy,
            CHUNK=chunk,
            CHUNKS=triton.next_power_of_2(num_chunks),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return token_ids


def find_limits(
    logits: torch.Tensor,
    asked: tuple[torch.Tensor | None, ...],
    maxima: torch.Tensor,
    sums: torch.Tensor,
    chunk: int,
    group: int,
    capacity: int,
) -> torch.Tensor:
    """The smallest logit that each row keeps: [num_rows] float32. `sums` are replaced by those of the kept tokens.

    `asked` are the rows' temperatures, top_k, top_p and min_p, [num_rows] each; all but the first may be None.
    """
    num_rows, vocab_size = logits.shape
    temperatures, top_k, top_p, min_p = asked
    options: dict[str, Any] = {"dtype": torch.float32, "device": logits.device}
    limits = torch.empty(num_rows, **options)
    # one kernel for all mixtures: what no row asks for is off in all of them
    min_p = torch.zeros(num_rows, **options) if min_p is None else min_p
    top_k = torch.zeros(num_rows, **options | {"dtype": torch.int64}) if top_k is None else top_k
    top_p = torch.ones(num_rows, **options) if top_p is None else top_p
    truncate_kernel[(num_rows,)](
        *(limits, sums, maxima, torch.empty(num_rows, capacity, **options), logits),
        *(temperatures, min_p, top_k, top_p, vocab_size, row_stride(logits)),
        ZERO_BITS=ZERO_BITS[logits.dtype],
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(maxima.shape[1]),
        GROUP=group,
        CAPACITY=capacity,
        num_warps=num_truncate_warps(chunk, group),
        enable_fp_fusion=True,
    )
    return limits


def row_stride(logits: torch.Tensor) -> int:
    """A single row may have any stride; with its length, the same compiled kernels read it as rows of a batch."""
    return logits.stride(0) if len(logits) > 1 else logits.shape[1]


def num_truncate_warps(chunk: int, group: int) -> int:
    """16 logits for each thread at a time, that is 32 bytes of bfloat16: enough in flight to keep the memory busy."""
    return max(1, min(16, chunk * group // 512))
