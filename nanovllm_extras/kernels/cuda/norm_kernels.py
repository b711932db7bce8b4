"""What is between the fused projection and attention, as one Triton kernel: norms, rotation and the KV cache.

The kernel is memory-bound, so it reads and writes each number once. It rounds at the same points as `RMSNorm` and
`ApplyRotary` of `layers/basic.py`; only the order in which squares are added differs. `cuda_decoder_layer.py` calls it.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers.triton_layers import rounded, warps_for
from nanovllm_extras.kernels.cuda.store_kv import to_cache_dtype

HEAD_ELEMENTS = 1024  # elements of the heads that one program computes


@triton.jit
def write_heads(
    out_ptr,  # [NUM_HEADS, HEAD_DIM] of one token
    x_ptr,  # as out
    first_head,
    weight_ptr,  # [HEAD_DIM]
    cos_ptr,  # [HEAD_DIM / 2] of the token's position, as sin
    sin_ptr,
    eps,
    inverse_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_TURNED: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Write up to HEADS heads of one token, starting at `first_head`.

    Heads of Q and K are rotated, after normalisation if HAS_NORM. Heads of V are copied.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    heads, dims = first_head + tl.arange(0, HEADS), tl.arange(0, HALF)
    is_head = (heads < NUM_HEADS)[:, None]
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]  # [HEADS, HALF], of the first halves
    first = tl.load(x_ptr + offsets, mask=is_head, other=0.0)
    second = tl.load(x_ptr + offsets + HALF, mask=is_head, other=0.0)
    if IS_TURNED:
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        # Every head loads these from the L1 cache. A single load would need an exchange between threads.
        same = tl.broadcast_to(dims[None, :], (HEADS, HALF))
        cos, sin = tl.load(cos_ptr + same).to(tl.float32), tl.load(sin_ptr + same).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORM:
            first_weight = tl.load(weight_ptr + same).to(tl.float32)
            second_weight = tl.load(weight_ptr + same + HALF).to(tl.float32)
            inverse_norm = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]  # [HEADS, 1]
            a = rounded(first_weight * rounded(a * inverse_norm, dtype), dtype)
            b = rounded(second_weight * rounded(b * inverse_norm, dtype), dtype)
        first = (rounded(a * cos, dtype) - rounded(b * sin, dtype)).to(dtype)
        second = (rounded(b * cos, dtype) + rounded(a * sin, dtype)).to(dtype)
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, to_cache_dtype(first, inverse_scale, IS_FP8, out_dtype), mask=is_head)
    tl.store(out_ptr + offsets + HALF, to_cache_dtype(second, inverse_scale, IS_FP8, out_dtype), mask=is_head)


@triton.jit(do_not_specialize=["slot_mapping_ptr"])
def norm_rotary_store_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM], contiguous
    k_cache_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM], contiguous, as v_cache
    v_cache_ptr,
    qkv_ptr,  # [num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM], any stride but the last, which is 1
    q_weight_ptr,  # [HEAD_DIM], as k_weight; only read if HAS_NORM
    k_weight_ptr,
    cos_ptr,  # [num_tokens, 1, HEAD_DIM / 2], any strides but the last, which is 1, as sin
    sin_ptr,
    slot_mapping_ptr,  # [num_tokens] int32
    qkv_token_stride,
    cos_token_stride,
    sin_token_stride,
    eps,
    k_inverse_scale,
    v_inverse_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Normalise and rotate the heads of Q and K, write Q to `q`, and write K and V to the token's slot of the cache.

    Grid: (num_tokens * parts of a token,). A part is HEADS heads of Q, of K, or of V. The parts of a token are
    consecutive in the grid, like its heads in memory. A few threads of one warp sum the squares of a head, so the sum
    needs no shared memory.
    """
    Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = (tl.program_id(0) // (Q_PARTS + 2 * KV_PARTS)).to(tl.int64)
    part = tl.program_id(0) % (Q_PARTS + 2 * KV_PARTS)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)  # a large cache has more than 2^31 elements
    x_ptr = qkv_ptr + token * qkv_token_stride
    token_cos_ptr, token_sin_ptr = cos_ptr + token * cos_token_stride, sin_ptr + token * sin_token_stride
    # fmt: off
    if part < Q_PARTS:
        write_heads(
            q_ptr + token * (NUM_HEADS * HEAD_DIM), x_ptr, part * HEADS,
            q_weight_ptr, token_cos_ptr, token_sin_ptr, eps, 1.0,
            NUM_HEADS, HEAD_DIM, HEADS, HAS_NORM, IS_TURNED=True, IS_FP8=False,
        )
    elif part < Q_PARTS + KV_PARTS:
        write_heads(
            k_cache_ptr + slot * (NUM_KV_HEADS * HEAD_DIM), x_ptr + NUM_HEADS * HEAD_DIM, (part - Q_PARTS) * HEADS,
            k_weight_ptr, token_cos_ptr, token_sin_ptr, eps, k_inverse_scale,
            NUM_KV_HEADS, HEAD_DIM, HEADS, HAS_NORM, IS_TURNED=True, IS_FP8=IS_FP8,
        )
    else:
        write_heads(
            v_cache_ptr + slot * (NUM_KV_HEADS * HEAD_DIM), x_ptr + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM,
            (part - Q_PARTS - KV_PARTS) * HEADS,
            k_weight_ptr, token_cos_ptr, token_sin_ptr, eps, v_inverse_scale,
            NUM_KV_HEADS, HEAD_DIM, HEADS, HAS_NORM, IS_TURNED=False, IS_FP8=IS_FP8,
        )
    # fmt: on


def norm_rotary_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Do all work between the fused projection and attention in one launch, and return Q.

    Each head of Q and K is normalised (unless the weights are None) and rotated. K and V are written to the cache, at
    the slots slot_mapping: [num_tokens].

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; q_weight, k_weight: [head_dim]; cos, sin:
    [num_tokens, 1, head_dim / 2]; layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], in which K is
    divided by `k_scale` and V by `v_scale` if it is fp8 -> [num_tokens, num_heads, head_dim]
    """
    num_kv_heads, head_dim = layer_cache.shape[-2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = torch.empty(len(qkv), num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if not len(qkv):
        return q
    assert qkv.stride(1) == cos.stride(-1) == sin.stride(-1) == 1
    k_cache, v_cache = layer_cache
    heads = min(max(1, HEAD_ELEMENTS // head_dim), triton.next_power_of_2(num_kv_heads))
    parts = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    with torch.cuda.device_of(qkv):
        norm_rotary_store_kernel[(len(qkv) * parts,)](
            q,
            k_cache,
            v_cache,
            qkv,
            qkv if q_weight is None else q_weight,
            qkv if k_weight is None else k_weight,
            cos,
            sin,
            slot_mapping,
            qkv.stride(0),
            cos.stride(0),
            sin.stride(0),
            eps,
            1 / k_scale,
            1 / v_scale,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HEADS=heads,
            HAS_NORM=q_weight is not None,
            IS_FP8=k_cache.dtype == torch.float8_e4m3fn,
            num_warps=warps_for(heads * head_dim * qkv.element_size() // 2),  # two loads, of half a head each
            enable_fp_fusion=True,
        )
    return q
