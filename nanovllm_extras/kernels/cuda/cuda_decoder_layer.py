"""A whole decoder layer on CUDA in nine launches: four matrix products, attention, and four small kernels.

For up to 16 tokens the products also do the work of three of these kernels (`few_tokens.py`), which leaves six
launches. If attention splits long contexts, one more launch joins the parts. Each quantised product
(`cuda_quantised.py`) takes two launches.

The classes replace the layers in `dense_layers.py`, norms and the rotary angles, and have the same signatures. (The
version of layers with recurrent states is in `cuda_gated_delta.py`.) In PyTorch each operation between two products
reads and writes the activations; here one kernel does all of these operations. The layer rounds where PyTorch's layers
round, except that it adds the residual to the sums of a product before it rounds them, which saves two roundings.

The attention backends for CUDA call `replace_layers` after the weights have been loaded. The model file does not
depend on it.
"""

from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.attention import AttentionMetadata
from nanovllm.layers.basic import Linear, RMSNorm, Rotary, SiluAndMul
from nanovllm.layers.triton_layers import TritonRMSNorm, rms_norm, silu_and_mul
from nanovllm_extras.kernels.backend import AttentionBackend
from nanovllm_extras.kernels.classes import LORA_LINEAR, base_of, is_one
from nanovllm_extras.kernels.cuda import few_tokens
from nanovllm_extras.kernels.cuda.cuda_gated_delta import TritonGatedDeltaNet, has_fast_delta
from nanovllm_extras.kernels.cuda.norm_kernels import norm_rotary_store
from nanovllm_extras.kernels.cuda.quantised_layers import TritonQuantisedLinear, replace_quantised
from nanovllm_extras.kernels.dense_layers import DenseParts, dense_parts

Product: TypeAlias = Linear | TritonQuantisedLinear
MAX_SIZE = 1 << 15  # the longest row that one program can normalise in its registers


class Ranks(Protocol):
    """The part of a `Communicator` (`parallel/communicator.py`) that this file uses."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks."""


class TritonDecoderLayer(nn.Module):
    """A decoder layer that shares the weights of the layer it replaces. An fp8 cache uses `k_scale` and `v_scale`."""

    def __init__(
        self, parts: DenseParts, backend: AttentionBackend, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.input_norm = parts.input_norm
        self.qkv_proj = parts.qkv_proj
        self.q_norm = parts.q_norm
        self.k_norm = parts.k_norm
        self.options = parts.options
        self.o_proj = parts.o_proj
        self.post_attention_norm = parts.post_attention_norm
        self.gate_up_proj = parts.gate_up_proj
        self.down_proj = parts.down_proj
        self.backend = backend
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.communicator: Ranks | None = None

    def join(self, communicator: Ranks) -> bool:
        """Sum the last product of attention and of the MLP over the ranks of `communicator` (`parallel/`)."""
        self.communicator = communicator
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
        qkv = norm_linear(x, self.input_norm, self.qkv_proj)  # [num_tokens, (num_heads + 2 * num_kv_heads) * …]
        q = norm_rotary_store(
            qkv,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.input_norm.eps,
            cos,
            sin,
            layer_cache,
            metadata.slot_mapping,
            self.k_scale,
            self.v_scale,
        )
        out = self.backend.attend(q, layer_cache, metadata, *self.options)  # [num_tokens, num_heads, head_dim]
        self.add_product(x, out.flatten(1), self.o_proj)
        z = norm_gate_up(x, self.post_attention_norm, self.gate_up_proj)  # [num_tokens, intermediate_size]
        self.add_product(x, z, self.down_proj)
        return x

    def add_product(self, x: torch.Tensor, y: torch.Tensor, linear: Product) -> None:
        """Compute x += linear(y) in place. With several ranks, each computes a part of the sum."""
        if self.communicator is None:
            add_linear(x, y, linear)
        else:
            x += self.communicator.all_reduce(product(y, linear))


def product(x: torch.Tensor, linear: Any) -> torch.Tensor:
    """Compute the product of any `Product`, or of one with LoRA adapters."""
    if is_one(linear, LORA_LINEAR):
        y = product(x, linear.base)
        if linear.rows.slots is not None:
            linear.products.add(x, y)
        return y
    if isinstance(linear, TritonQuantisedLinear):
        return linear.product(x)
    whole: torch.Tensor = F.linear(x, linear.weight, linear.bias)
    return whole


def is_few(x: torch.Tensor) -> bool:
    """Return whether `few_tokens.py` can compute products of x. (Constant in all replays of a CUDA graph.)"""
    return len(x) <= few_tokens.MAX_TOKENS and few_tokens.takes(x.shape[1])


def norm_linear(x: torch.Tensor, norm: RMSNorm, linear: Product) -> torch.Tensor:
    if isinstance(linear, Linear) and is_few(x):
        return few_tokens.norm_linear(x, norm.weight, norm.eps, linear.weight, linear.bias)
    return product(rms_norm(x, norm.weight, norm.eps), linear)


def norm_gate_up(x: torch.Tensor, norm: RMSNorm, linear: Product) -> torch.Tensor:
    """Compute silu(gate) * up of the normalised x. The outputs of `linear` are the gates, then the ups."""
    if isinstance(linear, Linear) and is_few(x) and linear.bias is None:
        return few_tokens.norm_gate_up(x, norm.weight, norm.eps, linear.weight)
    return silu_and_mul(*product(rms_norm(x, norm.weight, norm.eps), linear).chunk(2, dim=-1))


def add_linear(x: torch.Tensor, y: torch.Tensor, linear: Product) -> None:
    """Compute x += linear(y) in place. The product itself adds x in its last step, which saves a kernel."""
    if not isinstance(linear, Linear):
        x += product(y, linear)
        return
    if is_few(y):
        few_tokens.add_linear(x, y, linear.weight, linear.bias)
        return
    x.addmm_(y, linear.weight.t())
    if linear.bias is not None:
        x.add_(linear.bias)


class RotaryTable(nn.Module):
    """A table of the cosines and sines of all positions, computed once by the layer that it replaces."""

    table: torch.Tensor  # [num_positions, head_dim]: cosines, then sines, of half the length each

    def __init__(self, rotary: Rotary, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        cos_sin = rotary(torch.arange(num_positions, device=device), dtype)
        self.register_buffer("table", torch.cat(cos_sin, dim=-1)[:, 0])

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up cosine and sine: positions: [num_tokens] int -> two of [num_tokens, 1, head_dim / 2]"""
        assert dtype == self.table.dtype
        cos, sin = self.table.index_select(0, positions)[:, None].chunk(2, dim=-1)
        return cos, sin


def replace_layers(
    model: nn.Module, backend: AttentionBackend, max_model_len: int, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Replace every layer for which there is a fast version of its shape. The weights must be loaded."""
    replace_quantised(model)
    weight = next(model.parameters())
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            parts = dense_parts(child)
            if parts is not None and has_fast_version(parts, backend):
                setattr(module, name, TritonDecoderLayer(parts, backend, k_scale, v_scale))
            elif has_fast_delta(child):
                setattr(module, name, TritonGatedDeltaNet(child))
            elif isinstance(child, Rotary):
                setattr(module, name, RotaryTable(child, max_model_len, weight.dtype, weight.device))
            elif type(child) is RMSNorm and len(child.weight) <= MAX_SIZE:
                setattr(module, name, TritonRMSNorm(child))


def has_fast_version(parts: DenseParts, backend: AttentionBackend) -> bool:
    """Return whether `TritonDecoderLayer` supports the products, activation, rotation, factor and sizes of the layer.

    Triton's blocks are powers of two. The kernels pad rows to a power of two, but not the halves of heads.
    """
    if not isinstance(parts.activation, SiluAndMul) or parts.is_partly_rotated or parts.residual_factor != 1:
        return False
    if not all(isinstance(base_of(one), Linear | TritonQuantisedLinear) for one in parts.products):
        return False  # projections of one input in several products
    head_dim = backend.head_dim
    fits = len(parts.input_norm.weight) <= MAX_SIZE and 2 <= head_dim <= 1024
    return fits and head_dim & (head_dim - 1) == 0
