"""What an attention backend is: how it stores K and V and attends, and which other layers it replaces.

`TorchAttention` is the one that runs anywhere. The fast backends are in `kernels/`: `flash_attn` and `triton` on CUDA,
`cpu`. `extras/kernels/choices.py` chooses among them.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers import attention
from nanovllm.layers.attention import AttentionMetadata, Weigh

GATHERED_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # of K and V at a time: what an L2 cache holds; 128 MiB in bf16


class AttentionBackend(ABC):
    """`num_kv_heads` divides `num_heads`: a group of query heads shares one K and V head (GQA, https://arxiv.org/abs/2305.13245)."""

    default_block_size: int
    instructions = "PyTorch"  # what computes, in a word for the log

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.kv_cache_dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(kv_cache_dtype)  # None: the model's

    def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """[parts, num_layers, num_blocks, …]: two parts, K and V, or one of latents (`latent_attention.py`).

        It begins so in every backend, and `KVCache` copies whole blocks."""
        return (2, num_layers, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    def replace_layers(self, model: nn.Module) -> None:  # noqa: B027 (most have none)
        """Replace other layers of the model by fast versions, if this backend has any."""

    def argmax(self, logits: Tensor) -> Tensor:
        """logits: [num_samples, vocab_size] -> the likeliest tokens' ids: [num_samples] int64; of equals the first"""
        return logits.argmax(dim=-1)

    def store_kv(self, k: Tensor, v: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        """k, v: [num_tokens, num_kv_heads, head_dim], written to the slots slot_mapping: [num_tokens]"""
        attention.store_kv(k, v, layer_cache, slot_mapping)

    @abstractmethod
    def attend(self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """q: [num_tokens, num_heads, head_dim] over layer_cache: kv_cache[:, layer] -> as q

        Each new token attends to its sequence's tokens up to itself, whose K and V `store_kv` has written. Slots that
        no token sees may hold anything. A backend that can do more takes the layer's `options` too.
        """


class TorchAttention(AttentionBackend):
    """PyTorch's, for any device, dtype and block size: the definition, with decodes as padded batches.

    A step of 256 decodes would call the definition 256 times in each layer. Here their K and V are gathered together,
    as many at a time as `slices_that_fit` says. Prefill chunks are computed by the definition, one by one.
    """

    default_block_size = 16

    def attend(
        self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata, weigh: Weigh = F.scaled_dot_product_attention
    ) -> Tensor:
        out = torch.empty_like(q)
        nd, tables = metadata.num_decodes, metadata.block_tables
        cu_seqlens, seq_lens = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
        for rows in slices_that_fit(nd, max(seq_lens), layer_cache):
            width = -(-max(seq_lens[rows]) // layer_cache.shape[2])
            out[rows] = attend_decodes(q[rows], layer_cache, tables[rows, :width], metadata.seq_lens[rows], weigh)
        for i in range(nd, len(seq_lens)):
            rows = slice(cu_seqlens[i], cu_seqlens[i + 1])
            out[rows] = attention.attend_chunk(q[rows], layer_cache, tables[i], seq_lens[i], weigh)
        return out


def attend_decodes(q: Tensor, layer_cache: Tensor, tables: Tensor, seq_lens: Tensor, weigh: Weigh) -> Tensor:
    """One new token each of several sequences, as one padded batch. q: [num_decodes, num_heads, head_dim] -> as q"""
    kv = layer_cache[:, tables].flatten(2, 3)  # [2, n, len, num_kv_heads, head_dim], a copy
    n, num_slots, num_kv_heads, head_dim = kv.shape[1:]
    is_seen = torch.arange(num_slots, device=q.device) < seq_lens[:, None]  # [n, len]
    kv.masked_fill_(~is_seen[None, :, :, None, None], 0)  # a NaN behind a sequence's end must reach no output
    k, v = kv.transpose(2, 3)  # [n, num_kv_heads, len, head_dim] each
    # the heads of a group are rows of one K and V head; no mask among them: they see the same
    rows = q.view(n, num_kv_heads, -1, head_dim)  # [n, num_kv_heads, group, head_dim]
    return weigh(rows, k, v, is_seen[:, None, None]).reshape(q.shape)


def slices_that_fit(num_decodes: int, max_len: int, layer_cache: Tensor) -> list[slice]:
    """Decodes that are padded and gathered together: few on a CPU, more on a GPU, where each launch costs time."""
    num_elements = 2 * max_len * layer_cache.shape[3:].numel()  # of one sequence's K and V
    step = max(1, GATHERED_ELEMENTS[layer_cache.device.type] // num_elements)
    return [slice(i, min(i + step, num_decodes)) for i in range(0, num_decodes, step)]


def pytorch_layers(module: nn.Module) -> set[str]:
    """Classes of single layers that compute by their definition, because `replace_layers` has no fast version."""
    if type(module).__module__.startswith("nanovllm.extras.kernels."):
        return set()  # what a fast version keeps of the layer that it replaces
    rooms = ("nanovllm.layers.", "nanovllm.models.", "nanovllm.extras.models.", "nanovllm.extras.quantization.")
    is_single = type(module).__module__.startswith(rooms) and not list(module.children())
    own = {type(module).__name__} if is_single and not isinstance(module, attention.Attention) else set()
    return own.union(*(pytorch_layers(child) for child in module.children()))
