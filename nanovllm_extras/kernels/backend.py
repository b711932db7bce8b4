"""What a fast attention backend says of itself, for `choices.py`: where it runs, and what it cannot do."""

import math
from abc import abstractmethod
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.models.masking import AttentionOptions

SMALL_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class AttentionBackend(TorchAttention):
    """An attention backend that may have a cache of 8 bits, and fast versions of other layers.

    Layers with options (`models/masking.py`) pass them to `attend` as a last argument.
    """

    instructions = "PyTorch"
    """What computes, in a word for the log."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
    ) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, block_size, dtype)
        self.kv_cache_dtype = SMALL_DTYPES.get(kv_cache_dtype)
        """None is the model's."""

    def make_fast(self, model: nn.Module, max_model_len: int) -> None:
        """Replace other layers of the model by fast versions, if this backend has any.

        No sequence is longer than `max_model_len`.
        """

    def pack_quantised(self, layer: nn.Module) -> nn.Module:
        """Return a fast version of a quantised layer, if this backend has one that is made layer by layer."""
        return layer

    def unpack_quantised(self, layer: nn.Module) -> nn.Module:
        """Return PyTorch's version of a layer that `pack_quantised` has returned, and of any other layer itself."""
        return layer


class KernelBackend(AttentionBackend):
    """An attention backend that does not run everywhere. Each method returns a reason, or None if there is none."""

    supports_graphs = True  # for decodes, the host decides nothing by values that only the device knows
    supports_sinks = False  # whether `attend` computes `AttentionOptions.sinks`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = 1 / math.sqrt(self.head_dim)  # on the scores, for a layer that has none of its own

    @classmethod
    def why_not_any(
        cls, options: Collection[AttentionOptions], device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        """Return the first reason against the ways in which layers attend, or None. Called after `why_not`."""
        for one in options:
            if one.has_sinks and not cls.supports_sinks:
                return "it computes no attention sinks"
            if reason := cls.why_not_options(one, device, dtype, head_dim):
                return reason
        return None

    @classmethod
    @abstractmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        """Return why this backend cannot serve such a model here, or None if it can. `block_size` None is open."""

    @classmethod
    def why_no_kv_cache(cls, kv_cache_dtype: str, head_dim: int) -> str | None:
        """Return as `why_not`, for a cache of 8 bits: `fp8` or `int8`."""
        return f"it has no {kv_cache_dtype} KV cache"

    @classmethod
    def why_not_options(
        cls, options: AttentionOptions, device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        """Return as `why_not`, for a layer that attends with `options`. Called only if `why_not` returns None."""
        return None

    @classmethod
    def why_slow(cls, device: torch.device, dtype: torch.dtype, kv_cache_dtype: str) -> str | None:
        """Return why `auto` skips this backend although it could serve, or None if `auto` may take it."""
        return None
