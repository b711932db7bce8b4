"""A Triton kernel that writes the new tokens' K and V to the paged cache."""

import torch
import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)  # the largest number of e4m3


@triton.jit
def to_cache_dtype(x, inverse_scale, IS_FP8: tl.constexpr, dtype: tl.constexpr):
    """Convert x to the cache's dtype. For fp8, first divide it by the scale and clamp it to the range of e4m3.

    Without the clamp, a value beyond that range would become NaN, and so would every later token of the sequence.
    """
    if IS_FP8:
        x = tl.clamp(x.to(tl.float32) * inverse_scale, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit(do_not_specialize=["slot_mapping_ptr"])
def store_kv_kernel(
    k_ptr,  # [num_tokens, num_kv_heads, head_dim], any strides but the last, which is 1
    v_ptr,  # as k
    k_cache_ptr,  # [num_slots, num_kv_heads, head_dim], contiguous
    v_cache_ptr,  # as k_cache
    slot_mapping_ptr,  # [num_tokens] int32
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_inverse_scale,
    v_inverse_scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,  # NUM_KV_HEADS * HEAD_DIM, rounded up to a power of two
    IS_FP8: tl.constexpr,
):
    """Copy all heads of one token's K and V to the token's slot, one token per program. Grid: (num_tokens,).

    K and V are views of the fused projection's output; the strides avoid a copy. A token's row in the cache is
    contiguous, and neighbouring threads write neighbouring 16 bytes of it.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)  # a large cache has more than 2^31 elements
    i = tl.arange(0, ROW)
    head, dim = i // HEAD_DIM, i % HEAD_DIM
    is_used = i < NUM_KV_HEADS * HEAD_DIM
    # both loads before both stores, so that the loads overlap
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=is_used)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=is_used)
    row = slot * (NUM_KV_HEADS * HEAD_DIM) + i
    dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
    tl.store(k_cache_ptr + row, to_cache_dtype(k, k_inverse_scale, IS_FP8, dtype), mask=is_used)
    tl.store(v_cache_ptr + row, to_cache_dtype(v, v_inverse_scale, IS_FP8, dtype), mask=is_used)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Write k and v to the slots `slot_mapping` of the caches.

    k, v: [num_tokens, num_kv_heads, head_dim]; k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    row = triton.next_power_of_2(num_kv_heads * head_dim)
    store_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        1 / k_scale,
        1 / v_scale,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROW=row,
        IS_FP8=k_cache.dtype == torch.float8_e4m3fn,
        num_warps=max(1, min(8, row * k.element_size() // 512)),  # 32 threads of 16 bytes each
        enable_fp_fusion=True,
    )
