"""SwiGLU's gate in Triton: the fast version of `SiluAndMul` in `layers/basic.py`, for the fused projection's output."""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # outputs of one program: with 4 warps, a thread loads 16 bytes of each half in half precision


@triton.jit
def silu_and_mul_kernel(
    z_ptr,  # [num_tokens, SIZE], contiguous
    gate_up_ptr,  # [num_tokens, 2 * SIZE], any stride but the last, which is 1: gate, then up
    row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK outputs of one row per program. Grid: (num_tokens * blocks of a row,)."""
    NUM_BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    i = tl.program_id(0) % NUM_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    is_used = i < SIZE
    gate = tl.load(gate_up_ptr + row * row_stride + i, mask=is_used, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + i, mask=is_used, other=0.0).to(tl.float32)
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)  # rounded before the product, as PyTorch's layer does
    tl.store(z_ptr + row * SIZE + i, (silu * up).to(dtype), mask=is_used)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up: gate_up: [num_tokens, 2 * intermediate_size] -> [num_tokens, intermediate_size]"""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    z = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if not num_tokens:
        return z
    assert gate_up.stride(1) == 1
    with torch.cuda.device_of(gate_up):
        silu_and_mul_kernel[(num_tokens * triton.cdiv(size, BLOCK),)](
            z, gate_up, gate_up.stride(0), SIZE=size, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True
        )
    return z
