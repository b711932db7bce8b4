"""What an attention backend is: how it stores K and V and attends, and which other layers it replaces.

`torch_attention.py` has the one that runs anywhere. The fast backends are in `kernels/`: `flash_attn` and `triton` on
CUDA, `cpu`. `kernels/choices.py` chooses among them.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import nn

from nanovllm.layers import attention
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.layers.masking import PLAIN, AttentionOptions


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
        self.kv_cache_dtype = torch.float8_e4m3fn if kv_cache_dtype == "fp8" else None  # None: the model's
        self.scale = 1 / math.sqrt(head_dim)

    def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """[parts, num_layers, num_blocks, …]: two parts, K and V, or one of latents (`latent_attention.py`).

        It begins so in every backend, and `KVCache` copies whole blocks."""
        return (2, num_layers, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    def replace_layers(self, model: nn.Module) -> None:  # noqa: B027 (most have none)
        """Replace other layers of the model by fast twins, if this backend has any."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: [num_samples, vocab_size] -> the likeliest tokens' ids: [num_samples] int64; of equals the first"""
        return logits.argmax(dim=-1)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """k, v: [num_tokens, num_kv_heads, head_dim], written to the slots slot_mapping: [num_tokens]"""
        attention.store_kv(k, v, layer_cache, slot_mapping)

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        """q: [num_tokens, num_heads, head_dim] over layer_cache: kv_cache[:, layer] -> as q

        Each new token attends to its sequence's tokens up to itself, or to those in its window, whose K and V
        `store_kv` has written. Slots that no token sees may hold anything.
        """


def pytorch_layers(module: nn.Module) -> set[str]:
    """Classes of single layers that compute by their definition, because `replace_layers` found no twin."""
    if type(module).__module__.startswith("nanovllm.kernels."):
        return set()  # what a twin keeps of the layer in whose place it is
    rooms = ("nanovllm.layers.", "nanovllm.models.")
    is_single = type(module).__module__.startswith(rooms) and not list(module.children())
    own = {type(module).__name__} if is_single and not isinstance(module, attention.Attention) else set()
    return own.union(*(pytorch_layers(child) for child in module.children()))
