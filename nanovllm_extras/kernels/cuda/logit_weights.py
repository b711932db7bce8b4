"""Weights of logits, exp((logit - largest) / temperature), and the sum of these weights for each chunk of a row.

`sample.py` launches `stats_kernel` first. `bisection.py` and `inverse_cdf.py` use the same weight function.
"""

import torch
import triton
import triton.language as tl

CHUNK = 2048  # logits per chunk: stats_kernel and pick_kernel hold a whole chunk in registers

LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite float32
LARGEST = tl.constexpr(3.4028234663852886e38)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_logits(ptr, mask):
    """Load logits as float32, with -inf for NaN and where `mask` is false."""
    logits = tl.load(ptr, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def weigh(logits, limit, largest, scale):
    """Return exp((logits - largest) / temperature), or 0 below the limit; `scale` is log2(e) / temperature."""
    return tl.where(logits >= limit, tl.exp2((logits - largest) * scale), 0.0)


@triton.jit
def load_scale(temperatures_ptr, row):
    """Return log2(e) / temperature, clamped to a finite number so that its product with 0 is 0 and not NaN."""
    temperature = tl.load(temperatures_ptr + row)
    return tl.minimum(1.0 / tl.where(temperature > 0, temperature, 1.0) * LOG2E, LARGEST)


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
    """Compute one chunk's largest logit and the sum of the weights relative to it. Grid: (num_rows * num_chunks,)."""
    num_chunks = tl.cdiv(vocab_size, CHUNK)
    row, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + row.to(tl.int64) * row_stride + tokens, tokens < vocab_size)
    largest = tl.max(logits, 0)
    tl.store(maxima_ptr + tl.program_id(0), largest)
    if not ALL_GREEDY:
        scale = load_scale(temperatures_ptr, row)
        tl.store(sums_ptr + tl.program_id(0), tl.sum(weigh(logits, LOWEST, largest, scale), 0))


def row_stride(logits: torch.Tensor) -> int:
    """Return the distance between rows; for one row, its length, so that the same compiled kernels serve it."""
    return logits.stride(0) if len(logits) > 1 else logits.shape[1]
