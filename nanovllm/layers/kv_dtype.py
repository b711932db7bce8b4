"""The dtype of the KV cache: the model's own, or 8-bit floats (fp8 e4m3: 4 bits of exponent, 3 of mantissa).

An fp8 cache holds twice the tokens; arithmetic stays in the model's dtype. Used by the PyTorch definition of attention,
which writes slots and gathers blocks through these functions whatever the dtype is.
"""

import torch

GATHERED_ELEMENTS = 1 << 20  # of K and V that are gathered at a time on CPU: as many as fit its L2 cache


def write_slots(slots: torch.Tensor, slot_mapping: torch.Tensor, x: torch.Tensor) -> None:
    """slots: [num_slots, num_kv_heads, head_dim], x: [num_tokens, num_kv_heads, head_dim]: slots[slot_mapping] = x"""
    if slots.dtype == torch.float8_e4m3fn:
        slots, x = slots.view(torch.uint8), to_fp8(x).view(torch.uint8)  # as bytes: fp8 cannot be indexed everywhere
    slots[slot_mapping] = x


def gather_blocks(layer_cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in `dtype`, the model's: [2, *blocks.shape, block_size, num_kv_heads, head_dim]"""
    if layer_cache.dtype != torch.float8_e4m3fn:
        return layer_cache[:, blocks]
    return layer_cache.view(torch.uint8)[:, blocks].view(layer_cache.dtype).to(dtype)


def slices_that_fit(num_decodes: int, max_len: int, layer_cache: torch.Tensor) -> list[slice]:
    """Decodes that are padded and gathered together: all of them on a GPU, as many as its caches hold on a CPU."""
    num_elements = 2 * max_len * layer_cache[0, 0, 0].numel()  # of one sequence's K and V
    num_at_once = num_decodes if layer_cache.is_cuda else GATHERED_ELEMENTS // num_elements
    step = max(1, num_at_once)
    return [slice(i, min(i + step, num_decodes)) for i in range(0, num_decodes, step)]


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """As e4m3, clamped to its largest number: beyond it a value would become NaN, and spread to every later token."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-limit, limit).to(torch.float8_e4m3fn)
