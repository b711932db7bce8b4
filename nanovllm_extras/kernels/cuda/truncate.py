"""min-p, top-k and top-p in Triton: each of them keeps the tokens of a row whose logit is at least some limit.

`truncate_kernel` finds the limit and sums the weights of each chunk again without the tokens below it. The largest
logits of the chunks bound the search: if top-k is at most the number of chunks, the k-th largest of them is a lower
bound. `sample.py` calls `find_limits` if a row of the batch uses min-p, top-k or top-p.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm_extras.kernels.cuda.bisection import (
    ZERO_BITS,
    add_up,
    find_limit,
    key_of,
    load_group,
    rank_chunks,
    value_of,
)
from nanovllm_extras.kernels.cuda.logit_weights import LARGEST, LOWEST, load_scale, row_stride, weigh

GROUP = 4  # chunks that truncate_kernel reads at a time
CAPACITY = 4096  # tokens that truncate_kernel can gather into registers


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
    """Find the limit of one row per program; greedy rows and rows without truncation have none. Grid: (num_rows,)."""
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
    low += (value_of(low, ZERO_BITS) < limit).to(tl.int32)  # the limit may lie between two numbers of the logits' dtype
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
        # lighter tokens are dropped: their total weight is less than what top-p may drop
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


def find_limits(
    logits: torch.Tensor,
    asked: tuple[torch.Tensor | None, ...],
    maxima: torch.Tensor,
    sums: torch.Tensor,
    chunk: int,
    group: int,
    capacity: int,
) -> torch.Tensor:
    """Return the smallest logit that each row keeps: [num_rows] float32. Reduce `sums` to those of the kept tokens.

    `asked` holds the rows' temperatures, top_k, top_p and min_p, [num_rows] each; all but the first may be None.
    """
    num_rows, vocab_size = logits.shape
    temperatures, top_k, top_p, min_p = asked
    options: dict[str, Any] = {"dtype": torch.float32, "device": logits.device}
    limits = torch.empty(num_rows, **options)
    # one kernel for all combinations: an option that no row uses is off in every row
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


def num_truncate_warps(chunk: int, group: int) -> int:
    """Return the number of warps for 16 logits (32 bytes of bfloat16) per thread, enough loads to keep memory busy."""
    return max(1, min(16, chunk * group // 512))
