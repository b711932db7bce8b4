"""How far may the fast result be from the exact one? As far as rounding explains, which PyTorch's own result shows.

    exact     PyTorch's layers in a wider dtype: float32 for bfloat16 and float16, float64 for float32
    plain     PyTorch's layers in the model's dtype
    fast      what the engine is to compute with

An error is the length of the difference to the exact row, as a share of that row's length. The fast rows may have a few
times the largest error of the plain rows. A wrong kernel exceeds that by far: a token left out of a block, a wrong
constant or an uninitialised value change some rows by tenths.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nanovllm.layers.flash_attention import FlashAttention
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.kernels.backend import KernelBackend
from nanovllm_extras.machine.own_process import SelfCheckError
from nanovllm_extras.self_check.steps import MIN_MODEL_LEN

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
TIMES_PLAIN = 8  # other orders of summation, and other points of rounding
NUM_ROUNDINGS = 2  # of the dtype, which are allowed in any case
OF_QUANTISED = 0.1  # allowed with quantised weights: a product rounds x to 8 bits, and x may be near a border
OF_INT8_KV = 0.01  # with K and V in 8 bits: they, and the weights of V, are rounded, and may be near a border


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn the RuntimeError of PyTorch's allocator for CPUs into a MemoryError within the context."""
    try:
        yield
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise MemoryError(str(error)) from error


def has_kernels(runner: Runner) -> bool:
    """Return whether anything but PyTorch attends, and sequences are long enough for the steps of a check."""
    return isinstance(runner.backend, KernelBackend | FlashAttention) and runner.max_model_len >= MIN_MODEL_LEN


def check_rows(what: str, fast: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype, allowed: float = 0.0) -> None:
    """Raise SelfCheckError if `fast` is farther from `exact` than rounding explains. All three: [num_rows, …]

    Errors up to `allowed` pass in any case. Rows that are not finite in PyTorch either, because the weights are broken
    or overflow, are not compared.
    """
    if fast.shape != exact.shape:
        raise SelfCheckError(f"{what}: the shape is {list(fast.shape)}, PyTorch's is {list(exact.shape)}")
    is_finite = (plain.isfinite() & exact.isfinite()).flatten(1).all(dim=1)
    if not is_finite.any():
        return
    fast, plain, exact = fast[is_finite], plain[is_finite], exact[is_finite]
    errors = errors_of(fast, exact)
    of_rounding = max(TIMES_PLAIN * float(errors_of(plain, exact).max()), NUM_ROUNDINGS * torch.finfo(dtype).eps)
    allowed = max(allowed, of_rounding)
    is_wrong = ~(errors <= allowed)  # NaN is wrong
    if is_wrong.any():
        worst = float(errors.nan_to_num(torch.inf).max())
        raise SelfCheckError(
            f"wrong result: {what}: {int(is_wrong.sum())} of {len(errors)} rows differ from PyTorch's by up to "
            f"{worst:.2g} of their length; rounding explains {allowed:.2g}"
        )


def errors_of(rows: Tensor, exact: Tensor) -> Tensor:
    """Return the relative error of each row: [num_rows, …] -> [num_rows] float64"""
    rows, exact = rows.double().flatten(1), exact.double().flatten(1)
    return (rows - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-30)
