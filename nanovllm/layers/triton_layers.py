"""Layers of one Triton kernel each, for a GPU: together they take 6 launches a decoder layer instead of 52.

Between its products and attention, a decoder layer computes little on each number. So the time goes into the launches
(two to four microseconds each in a CUDA graph) and into reading and writing memory, and a kernel does as much as it can
between one load and one store. Each kernel rounds where PyTorch's layers do: `basic.py` is the definition.

    rms_norm           a program normalises one row
    norm_and_rotate    a program normalises and rotates all heads of one token
    store_kv           a program copies the K and V of one token to its slot of the cache
    silu_and_mul       a program computes BLOCK outputs of one row

`FlashAttention` puts these layers in place. `TRITON_INTERPRET=1` runs them on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from nanovllm.layers.basic import ApplyRotary, RMSNorm, SiluAndMul

BLOCK = 1024  # outputs of a program of `silu_and_mul`: with 4 warps, a thread loads 16 bytes of each input


def replace_layers(model: nn.Module) -> None:
    """Replace the layers of a network for which this file has a fast version. The weights must be loaded."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in FAST_LAYERS:  # a subclass computes something else
                setattr(module, name, FAST_LAYERS[type(child)](child))


def warps_for(num_bytes: int) -> int:
    """Return how many warps load `num_bytes` at once, 16 bytes in each of a warp's 32 threads; at most 16 warps."""
    return max(1, min(16, num_bytes // 512))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round x to `dtype` and widen it to float32 again, as between two operations of PyTorch's layers."""
    return x.to(dtype).to(tl.float32)


# ---- normalisation


@triton.jit
def rms_norm_kernel(
    y_ptr,  # [num_rows, SIZE], contiguous
    x_ptr,  # [num_rows, SIZE], any stride but the last, which is 1
    weight_ptr,  # [SIZE]
    x_row_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, rounded up to a power of two
):
    """Normalise one row per program. The row stays in registers between the sum and the product. Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    is_used = i < SIZE
    x = tl.load(x_ptr + row * x_row_stride + i, mask=is_used, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=is_used, other=0.0).to(tl.float32)  # overlaps with the sum
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    normed = rounded(x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps), dtype)
    tl.store(y_ptr + row * SIZE + i, (weight * normed).to(dtype), mask=is_used)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x: [num_tokens, size] -> x / sqrt(mean(x²) + eps) * weight, of the same shape"""
    num_tokens, size = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return y
    assert x.stride(1) == 1
    block = triton.next_power_of_2(size)
    sizes = {"SIZE": size, "BLOCK": block, "num_warps": warps_for(block * x.element_size())}
    with torch.cuda.device_of(x):
        rms_norm_kernel[(num_tokens,)](y, x, weight, x.stride(0), eps, **sizes, enable_fp_fusion=True)
    return y


class TritonRMSNorm(nn.Module):
    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x: [..., size] -> the same shape, contiguous"""
        return rms_norm(x.flatten(0, -2), self.weight, self.eps).view(x.shape)


# ---- rotation


@triton.jit
def norm_and_rotate_kernel(
    y_ptr,  # [num_tokens, NUM_HEADS, 2 * HALF], contiguous
    x_ptr,  # as y, but with any stride of the tokens
    weight_ptr,  # [2 * HALF]
    cos_ptr,  # [num_tokens, HALF], contiguous, as sin
    sin_ptr,
    x_token_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,  # NUM_HEADS, rounded up to a power of two
    DIMS: tl.constexpr,  # HALF, rounded up to a power of two
):
    """Normalise and rotate all heads of one token per program. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS)[:, None], tl.arange(0, DIMS)[None, :]
    is_dim = dims < HALF
    is_used = (heads < NUM_HEADS) & is_dim  # [HEADS, DIMS]
    offsets = heads * (2 * HALF) + dims  # of the first halves
    x_ptr += token * x_token_stride
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    cos = tl.load(cos_ptr + token * HALF + dims, mask=is_dim, other=0.0).to(tl.float32)  # [1, DIMS]
    sin = tl.load(sin_ptr + token * HALF + dims, mask=is_dim, other=0.0).to(tl.float32)
    first = tl.load(x_ptr + offsets, mask=is_used, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offsets + HALF, mask=is_used, other=0.0).to(tl.float32)
    first_weight = tl.load(weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    second_weight = tl.load(weight_ptr + dims + HALF, mask=is_dim, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)  # [HEADS]
    inverse_norm = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    first = rounded(first_weight * rounded(first * inverse_norm, dtype), dtype)
    second = rounded(second_weight * rounded(second * inverse_norm, dtype), dtype)
    y_ptr += token * (NUM_HEADS * 2 * HALF)
    turned = rounded(first * cos, dtype) - rounded(second * sin, dtype)
    tl.store(y_ptr + offsets, turned.to(dtype), mask=is_used)
    turned = rounded(second * cos, dtype) + rounded(first * sin, dtype)
    tl.store(y_ptr + offsets + HALF, turned.to(dtype), mask=is_used)


def norm_and_rotate(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise and rotate each head: x: [num_tokens, num_heads, head_dim] -> the same shape

    cos, sin: [num_tokens, 1, head_dim / 2]; weight: [head_dim]
    """
    num_tokens, num_heads, head_dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert x.stride()[1:] == (head_dim, 1)
    assert cos.stride(0) == sin.stride(0) == head_dim // 2
    heads, dims = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim // 2)
    sizes = {"NUM_HEADS": num_heads, "HALF": head_dim // 2, "HEADS": heads, "DIMS": dims}
    num_warps = warps_for(heads * dims * x.element_size())
    with torch.cuda.device_of(x):
        norm_and_rotate_kernel[(num_tokens,)](
            *(y, x, weight, cos, sin, x.stride(0), eps), **sizes, num_warps=num_warps, enable_fp_fusion=True
        )
    return y


class TritonApplyRotary(ApplyRotary):
    def __init__(self, rotary: ApplyRotary) -> None:
        super().__init__()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Compute what `ApplyRotary` does, in one launch if `norm` is a fast one."""
        if isinstance(norm, TritonRMSNorm):
            return norm_and_rotate(x, cos, sin, norm.weight, norm.eps)
        return super().forward(x, cos, sin, norm)


# ---- K and V


@triton.jit
def store_kv_kernel(
    k_cache_ptr,  # [num_slots, SIZE], contiguous, as v_cache
    v_cache_ptr,
    k_ptr,  # [num_tokens, SIZE], with any stride of the tokens, as v
    v_ptr,
    slot_mapping_ptr,  # [num_tokens] int32
    k_token_stride,
    v_token_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, rounded up to a power of two
):
    """Copy the K and V of one token per program to its slot. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)  # a large cache has more than 2^31 elements
    i = tl.arange(0, BLOCK)
    is_used = i < SIZE
    k = tl.load(k_ptr + token * k_token_stride + i, mask=is_used)
    v = tl.load(v_ptr + token * v_token_stride + i, mask=is_used)  # both loads first, so that they overlap
    tl.store(k_cache_ptr + slot * SIZE + i, k, mask=is_used)
    tl.store(v_cache_ptr + slot * SIZE + i, v, mask=is_used)


def store_kv(k: Tensor, v: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v: [num_tokens, num_kv_heads, head_dim] to the slots slot_mapping: [num_tokens] int32.

    layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim]
    """
    num_tokens, size = len(k), k.shape[1] * k.shape[2]
    k_cache, v_cache = layer_cache
    k, v = k.flatten(1), v.flatten(1)  # views: the heads of a token are end to end
    block = triton.next_power_of_2(size)
    sizes = {"SIZE": size, "BLOCK": block, "num_warps": warps_for(block * k.element_size())}
    with torch.cuda.device_of(k):
        store_kv_kernel[(num_tokens,)](k_cache, v_cache, k, v, slot_mapping, k.stride(0), v.stride(0), **sizes)


# ---- the gate of the feed-forward network


@triton.jit
def silu_and_mul_kernel(
    y_ptr,  # [num_tokens, SIZE], contiguous
    gate_ptr,  # [num_tokens, SIZE], with any stride of the tokens, as up
    up_ptr,
    row_stride,  # of gate and of up
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK outputs of one row per program. Grid: (num_tokens * blocks of a row,)."""
    NUM_BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    i = tl.program_id(0) % NUM_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    is_used = i < SIZE
    gate = tl.load(gate_ptr + row * row_stride + i, mask=is_used, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * row_stride + i, mask=is_used, other=0.0).to(tl.float32)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    tl.store(y_ptr + row * SIZE + i, (rounded(gate / (1 + tl.exp(-gate)), dtype) * up).to(dtype), mask=is_used)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up: two halves of rows, [num_tokens, intermediate_size] each -> the same shape"""
    num_tokens, size = gate.shape
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not num_tokens:
        return y
    assert gate.stride() == up.stride() == (gate.stride(0), 1)
    grid = (num_tokens * triton.cdiv(size, BLOCK),)
    sizes = {"SIZE": size, "BLOCK": BLOCK, "num_warps": 4}
    with torch.cuda.device_of(gate):
        silu_and_mul_kernel[grid](y, gate, up, gate.stride(0), **sizes, enable_fp_fusion=True)
    return y


class TritonSiluAndMul(nn.Module):
    def __init__(self, activation: SiluAndMul) -> None:
        super().__init__()

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up: [num_tokens, intermediate_size] -> silu(gate) * up, the same shape"""
        return silu_and_mul(gate, up)


FAST_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    RMSNorm: TritonRMSNorm,
    ApplyRotary: TritonApplyRotary,
    SiluAndMul: TritonSiluAndMul,
}
