"""The flash-attn library as an attention backend on CUDA: FlashAttention 3 on Hopper where it is installed, else 2.

Version 2 (Dao 2023, https://arxiv.org/abs/2307.08691) is the package flash-attn, version 3 (Shah et al. 2024,
https://arxiv.org/abs/2407.08608) the package flash-attn-3, from the folder `hopper` of
https://github.com/Dao-AILab/flash-attention. The calls of the two versions differ; what they compute does not.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm_extras.kernels.backend import KernelBackend
from nanovllm_extras.kernels.cuda.kernel_launch import describe_gpu, flash_attn_splits
from nanovllm_extras.kernels.cuda.requirements import gpu_capability, is_installed, why_no_triton, why_too_old
from nanovllm_extras.models.masking import PLAIN, AttentionOptions

logger = logging.getLogger(__name__)


class FlashAttention2:
    """A decode kernel that splits long contexts, and a variable-length kernel for prefill chunks."""

    name = "flash-attn 2"

    def __init__(self, scale: float) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._decode, self._prefill = flash_attn_with_kvcache, flash_attn_varlen_func
        self.scale = scale

    def decode(
        self, q: torch.Tensor, layer_cache: torch.Tensor, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        """Attend with q: [num_decodes, num_heads, head_dim], of the batch's first sequences -> as q"""
        nd, (num_heads, head_dim) = metadata.num_decodes, q.shape[1:]
        tables, (block_size, num_kv_heads) = metadata.block_tables[:nd], layer_cache.shape[2:4]
        # the heads of a group are the rows of one program, but with a window, which counts rows, each is a program's
        num_programs = nd * (num_kv_heads if options.window is None else num_heads)
        max_len = tables.shape[1] * block_size
        out = self._decode(
            q[:, None],  # [num_decodes, 1, num_heads, head_dim]
            *layer_cache,  # [num_blocks, block_size, num_kv_heads, head_dim] each
            cache_seqlens=metadata.seq_lens[:nd],
            block_table=tables,
            num_splits=flash_attn_splits(num_programs, max_len, head_dim, describe_gpu(q.device)),
            **masking(options, self.scale),
        )
        return out[:, 0]

    def prefill(
        self, q: torch.Tensor, layer_cache: torch.Tensor, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        """Attend with q: [num_prefill_tokens, num_heads, head_dim], of the sequences after the decodes -> as q

        With block tables the library takes a kernel that is made for few queries. Where no chunk has a prefix in the
        cache, a copy of its own K and V costs less: [num_prefill_tokens, num_kv_heads, head_dim] each.
        """
        if metadata.num_prefix_tokens:
            kv, tables = list(layer_cache), metadata.block_tables[metadata.num_decodes :]
        else:
            slots, tables = metadata.slot_mapping[-len(q) :], None
            # K and V are contiguous each, but not together, and PyTorch copies contiguous rows 16 bytes at a time
            kv = [part.flatten(0, 1).index_select(0, slots) for part in layer_cache]
        return self._prefill(
            q,
            *kv,
            cu_seqlens_q=metadata.prefill_cu_seqlens_q,
            cu_seqlens_k=metadata.prefill_cu_seqlens_k,
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_seqlen_k,
            **masking(options, self.scale),
            block_table=tables,
        )


class FlashAttention3:
    """One function for both; it takes blocks of any size, and finds the lengths of the context on the GPU."""

    name = "flash-attn 3"

    def __init__(self, scale: float) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        self._attend = flash_attn_with_kvcache
        self.scale = scale

    def decode(
        self, q: torch.Tensor, layer_cache: torch.Tensor, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        """Attend as `FlashAttention2.decode` does."""
        nd = metadata.num_decodes
        out = self._attend(
            q[:, None],
            *layer_cache,
            cache_seqlens=metadata.seq_lens[:nd],
            page_table=metadata.block_tables[:nd],
            **masking(options, self.scale),
        )
        return out[:, 0]

    def prefill(
        self, q: torch.Tensor, layer_cache: torch.Tensor, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        """Attend as `FlashAttention2.prefill` does."""
        nd = metadata.num_decodes
        return self._attend(
            q,
            *layer_cache,
            cache_seqlens=metadata.seq_lens[nd:],
            page_table=metadata.block_tables[nd:],
            cu_seqlens_q=metadata.prefill_cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q,
            **masking(options, self.scale),
        )


class FlashAttention(KernelBackend):
    """A mixed batch is two calls, not one: split contexts and the packing of grouped heads are at their best where
    every sequence has one query token.
    """

    default_block_size = 256
    block_size_multiple = 256  # of version 2
    spreads_nan = True
    """Version 3 multiplies V of slots behind a sequence by 0 (https://github.com/Dao-AILab/flash-attention/issues/1745)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = why_not_version_3()
        self._library = FlashAttention3(self.scale) if reason is None else FlashAttention2(self.scale)
        logger.info(f"{self._library.name}" + (f", not 3: {reason}" if reason else ""))
        self.instructions = self._library.name

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return f"it needs a CUDA device and float16 or bfloat16, got {device} and {dtype}"
        if head_dim % 8 or head_dim > 256:
            return f"the model's head_dim must be a multiple of 8 up to 256, it is {head_dim}"
        if why_not_version_3() is None:
            return None
        if block_size is not None and block_size % cls.block_size_multiple:
            return f"block_size must be a multiple of {cls.block_size_multiple}, got {block_size}"
        if not is_installed("flash_attn"):
            return "it needs the package flash-attn: pip install flash-attn --no-build-isolation (see docs/gpu.md)"
        if too_old := why_too_old((8, 0), "Ampere"):
            return too_old
        try:
            import flash_attn  # noqa: F401
        except ImportError as error:  # built for another torch, for example
            return f"the package flash-attn cannot be imported: {error}"
        return None

    @classmethod
    def why_not_options(
        cls, options: AttentionOptions, device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        """Try the options on a few tokens, because a build may lack windows, soft-caps or head sizes silently."""
        if options.window is options.softcap is None and head_dim in (64, 128):
            return None  # what every build has
        version = FlashAttention2 if why_not_version_3() else FlashAttention3
        try:
            error = error_on_few_tokens(version(head_dim**-0.5), options, device, dtype, head_dim)
        except (RuntimeError, TypeError) as failure:
            return f"{version.name} cannot compute {options} with a head_dim of {head_dim}: {failure}"
        return None if error < 0.05 else f"{version.name} ignores {options}: it was built without that"

    def make_fast(self, model: nn.Module, max_model_len: int) -> None:
        if why_no_triton() is None:  # flash-attn itself can do without
            from nanovllm_extras.kernels.cuda.cuda_decoder_layer import replace_layers

            replace_layers(model, self, max_model_len)

    def pack_quantised(self, layer: nn.Module) -> nn.Module:
        if why_no_triton() is not None:
            return layer
        from nanovllm_extras.kernels.cuda.quantised_layers import fast_version_of

        return fast_version_of(layer) or layer

    def unpack_quantised(self, layer: nn.Module) -> nn.Module:
        if why_no_triton() is not None:
            return layer
        from nanovllm_extras.kernels.cuda.quantised_layers import plain_version_of

        return plain_version_of(layer)

    def attend(
        self,
        q: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        nd = metadata.num_decodes
        if not metadata.max_seqlen_q:
            return self._library.decode(q, layer_cache, metadata, options)
        if not nd:
            return self._library.prefill(q, layer_cache, metadata, options)
        decodes = self._library.decode(q[:nd], layer_cache, metadata, options)
        return torch.cat([decodes, self._library.prefill(q[nd:], layer_cache, metadata, options)])


def masking(options: AttentionOptions, default_scale: float) -> dict[str, object]:
    """Return the library's arguments. It counts the tokens before a token, without itself; -1 is all of them."""
    window = -1 if options.window is None else options.window - 1
    scale = default_scale if options.scale is None else options.scale
    return {
        "softmax_scale": scale,
        "causal": True,  # aligned at the ends: the last query sees all keys, also where the chunk is not the first
        "window_size": (window, 0 if window >= 0 else -1),
        "softcap": options.softcap or 0.0,
    }


def error_on_few_tokens(
    library: FlashAttention2 | FlashAttention3,
    options: AttentionOptions,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
) -> float:
    """Return the largest difference to the definition in PyTorch.

    The cases are a decode, a sequence longer than its window, and the last chunk of a sequence.
    """
    options = replace(options, window=options.window and min(options.window, 3))
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 2, 256, 1, head_dim, generator=generator).to(device, dtype)
    queries = torch.randn(9, 2, head_dim, generator=generator).to(device, dtype)
    errors = []
    for num_decodes, num_new in ((1, 1), (0, 8), (0, 5)):
        lens = {name: torch.tensor([0, n], dtype=torch.int32, device=device) for name, n in (("q", num_new), ("k", 8))}
        metadata = AttentionMetadata(
            slot_mapping=torch.arange(256 + 8 - num_new, 256 + 8, dtype=torch.int32, device=device),
            block_tables=torch.ones(1, 1, dtype=torch.int32, device=device),
            seq_lens=lens["k"][1:],
            cu_seqlens_q=lens["q"],
            prefill_cu_seqlens_q=lens["q"],
            prefill_cu_seqlens_k=lens["k"],
            num_decodes=num_decodes,
            max_seqlen_q=num_new,
            max_seqlen_k=8,
            num_prefix_tokens=8 - num_new,
        )
        q = queries[:num_new]
        found = (library.decode if num_decodes else library.prefill)(q, cache, metadata, options)
        errors.append(
            (found - TorchAttention(2, 1, head_dim, 256).attend(q, cache, metadata, options)).abs().max().item()
        )
    return max(errors)


def why_not_version_3() -> str | None:
    if not is_installed("flash_attn_interface"):
        return "it is not installed"
    if gpu_capability() != (9, 0):
        return "it is for Hopper only"  # for later GPUs the package has other kernels
    try:
        import flash_attn_interface  # noqa: F401
    except ImportError as error:
        return f"it cannot be imported: {error}"
    return None
