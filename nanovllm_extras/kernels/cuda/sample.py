"""The Triton version of `sample_tokens` in `nanovllm/sampler.py`: temperature, min-p, top-k, top-p and the random draw.

It neither sorts the logits nor writes probabilities to memory. Up to three kernels run for a batch:

    stats_kernel     logit_weights.py  computes the largest logit and the sum of the weights of each chunk of a row
    truncate_kernel  truncate.py       finds the logit of each row below which min-p, top-k and top-p drop tokens
    pick_kernel      inverse_cdf.py    uses the row's uniform number to select a chunk, then the token in that chunk

The host makes no decision that depends on values on the device, so a CUDA graph can contain all launches.
`nanovllm_extras/execution/cuda_startup.py` chooses this version on CUDA.
"""

import torch
import triton

from nanovllm_extras.kernels.cuda.bisection import ZERO_BITS
from nanovllm_extras.kernels.cuda.inverse_cdf import pick_kernel
from nanovllm_extras.kernels.cuda.logit_weights import CHUNK, row_stride, stats_kernel
from nanovllm_extras.kernels.cuda.truncate import CAPACITY, GROUP, find_limits


def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    chunk: int = CHUNK,
    group: int = GROUP,
    capacity: int = CAPACITY,
) -> torch.Tensor:
    """Sample one token for each row of logits: [num_samples, vocab_size] -> token ids [num_samples] int64

    The other tensors have one entry for each row. The tokens equal those of `sample_tokens` in `sampler.py`, unless
    rounding moves a probability across a border between two tokens. A token whose logit is NaN is never sampled.
    `chunk`, `group` (2 or more) and `capacity` are powers of two; tests and measurements set them.
    """
    if logits.dtype not in ZERO_BITS or logits.stride(1) != 1:
        logits = logits.to(torch.float32).contiguous()
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, chunk)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0 or vocab_size == 1:  # Triton turns the 1 into a constant and fails
        return token_ids.zero_()
    # two tensors: the second half of a single one would not always be aligned, so Triton would compile twice
    maxima, sums = [
        torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device) for _ in range(2)
    ]  # [num_rows, num_chunks] each
    is_truncated = top_k is not None or top_p is not None or min_p is not None
    all_greedy, sizes = uniforms is None, (vocab_size, row_stride(logits))
    with torch.cuda.device_of(logits):  # Triton launches on the current device, not on that of the logits
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
