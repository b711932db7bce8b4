"""A whole decoder layer on CPU in one call of C, for layers whose parts all have fast versions in `cpu_layers.py`.

The same C functions run in the same order as if Python called each part, and they give the same bits. One call saves
the time of Python between 17 operations, in each of 28 layers (Qwen3-0.6B). `CpuAttention.make_fast` calls
`fuse_layers`; the model file does not depend on it.
"""

from ctypes import Structure, byref, c_float, c_long, c_void_p, cast
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.kernels.classes import LORA_LINEAR, base_of, is_one
from nanovllm_extras.kernels.cpu.cpu_layers import CpuGate, CpuLinear, CpuRMSNorm
from nanovllm_extras.kernels.cpu.library import LANES, Library, load_library, masking
from nanovllm_extras.kernels.dense_layers import DenseParts, dense_parts
from nanovllm_extras.models.masking import PLAIN

ADAPTED = ("adapted_qkv", "adapted_o", "adapted_gate_up", "adapted_down")


class Layer(Structure):
    """The C type `struct layer` of cpu.c."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("store_kv", "attend")),
        *((name, c_void_p) for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        *((name, c_void_p) for name in ("qkv_bias", "o_bias", "gate_up_bias", "down_bias")),
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_attention_norm")),
        *((name, c_long) for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")),
        *((name, c_long) for name in ("head_dim", "block_size", "window", "gate")),
        *((name, c_float) for name in ("eps", "scale", "softcap", "residual_factor")),
        ("ranks", c_void_p),
        *((name, c_void_p) for name in ("other_qkv", "other_o", "other_gate_up", "other_down")),
        *((name, c_void_p) for name in ADAPTED),
    ]


class Step(Structure):
    """The C type `struct step` of cpu.c."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("cos", "sin", "slot_mapping", "block_tables", "seq_lens", "cu_seqlens_q")),
        *((name, c_long) for name in ("num_tokens", "num_seqs", "max_num_blocks", "half")),
        ("rows", c_void_p),
    ]


class Ranks(Protocol):
    """The part of `SharedMemoryCommunicator` that this file uses: processes that each have a share of each layer."""

    address: int  # of `struct ranks`

    def check(self, status: int) -> None:
        """Raise CommunicationError if a C function returned a non-zero `status`."""


class AttentionInC(Protocol):
    """What a decoder layer reads of `CpuAttention`, whose file imports this one."""

    cache_library: Library
    """Writes and reads the KV cache."""
    dtype: torch.dtype
    scale: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class CpuDecoderLayer(nn.Module):
    """Computes all parts of a decoder layer in one call of C."""

    def __init__(self, layer: nn.Module, parts: DenseParts, backend: AttentionInC) -> None:
        super().__init__()
        self.layer = layer
        self.library = load_library(backend.dtype)
        self.ranks: Ranks | None = None
        products, norms = [base_of(product) for product in parts.products], parts.norms
        down_proj = products[-1]
        window, scale, softcap = masking((*parts.options, PLAIN)[0], backend.scale)
        library = backend.cache_library
        self.struct = Layer(
            *(cast(function, c_void_p) for function in (library.store_kv, library.attend)),
            *(product.packed.data_ptr() for product in products),
            *(None if product.bias is None else product.bias.data_ptr() for product in products),
            *(None if norm is None else norm.weight.data_ptr() for norm in norms),
            *(down_proj.out_features, down_proj.in_features, backend.num_heads, backend.num_kv_heads),
            *(backend.head_dim, backend.block_size, window, parts.activation.kind, norms[0].eps, scale, softcap),
            parts.residual_factor,
        )
        for name, product in zip(("other_qkv", "other_o", "other_gate_up", "other_down"), products, strict=True):
            setattr(self.struct, name, product.other)
        self.rows: Any = None
        for name, product in zip(ADAPTED, parts.products, strict=True):
            if is_one(product, LORA_LINEAR):
                self.rows = product.rows
                setattr(self.struct, name, product.products.address)

    def join(self, communicator: Any) -> bool:
        """Sum the outputs of attention and of the MLP over all ranks, because the weights are one rank's share.

        Returns False and changes nothing if the communicator has no C implementation.
        """
        if not hasattr(communicator, "address"):
            return False
        self.ranks, self.struct.ranks = communicator, communicator.address
        return True

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute the layer in place: x: [num_tokens, hidden_size] -> the same tensor

        No other code reads the old x, because it is a new tensor from the embedding or the output of the layer before.
        """
        if cos.shape[-1] % LANES:  # partial rotary whose halves are not whole vectors
            return self.layer(x, cos, sin, layer_cache, metadata)
        tables = (metadata.slot_mapping, metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q)
        step = Step(*(t.data_ptr() for t in (cos, sin, *tables)), len(x), *metadata.block_tables.shape, cos.shape[-1])
        if self.rows is not None:
            step.rows = self.rows.address
        k_cache = layer_cache.data_ptr()
        v_cache = k_cache + layer_cache.stride(0) * layer_cache.itemsize
        status = self.library.decoder_layer(byref(self.struct), byref(step), x.data_ptr(), k_cache, v_cache)
        if self.ranks is not None:
            self.ranks.check(status)
        return x


def fuse_layers(model: nn.Module, backend: AttentionInC) -> None:
    """Replace every supported decoder layer of the model by `CpuDecoderLayer`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if (parts := dense_parts(child)) is not None and is_fast(parts):
                setattr(module, name, CpuDecoderLayer(child, parts, backend))


def is_fast(parts: DenseParts) -> bool:
    """Return whether every part of the layer has been replaced by a fast version."""
    for product in [base_of(product) for product in parts.products]:
        if not isinstance(product, CpuLinear) or product.order is not None:
            return False
    if not all(norm is None or isinstance(norm, CpuRMSNorm) for norm in parts.norms):
        return False
    return isinstance(parts.activation, CpuGate) and base_of(parts.down_proj).in_features % LANES == 0
