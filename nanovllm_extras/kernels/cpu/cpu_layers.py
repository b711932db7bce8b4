"""Fast CPU versions of the layers in `layers/`, with the same signatures. They call `cpu.c`.

Each weight is packed once, when its layer is replaced. `F.linear` would reorder a bfloat16 weight at every call.
"""

import contextlib
import math
import mmap
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.basic import ApplyRotary, Embedding, FusedLinear, Linear, RMSNorm, Rotary, SiluAndMul
from nanovllm_extras.kernels.classes import is_one
from nanovllm_extras.kernels.cpu.library import LANES, Library, keep_freed_memory, load_library
from nanovllm_extras.machine.one_thread import on_one_thread
from nanovllm_extras.models.gated_mlp import GeluAndMul
from nanovllm_extras.models.rope import ApplyPartialRotary

# paths and not imports, because the files of architectures may be deleted
ROUTER, SIGMOID_ROUTER = "nanovllm_extras.models.moe.Router", "nanovllm_extras.models.group_routing.SigmoidRouter"
NORMS = {  # others round at other points: `enum norm_kind` of cpu.c
    "nanovllm.layers.basic.RMSNorm": 0,
    "nanovllm_extras.models.gemma3.UnitOffsetRMSNorm": 1,
    "nanovllm_extras.models.gpt_oss.OnceRoundedRMSNorm": 2,
}
CLAMPED_SWIGLU = "nanovllm_extras.models.gpt_oss.ClampedSwiGLU"


class HugePages:
    """Memory for weights in pages of 2 MiB, if Linux provides them.

    With pages of 4 KiB, translating addresses can take half of the time of reading the weights.
    """

    ALIGNMENT = 64  # bytes, of each tensor, for vector loads

    def __init__(self, num_bytes: int) -> None:
        page = 2 << 20
        try:
            memory = mmap.mmap(-1, num_bytes + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:  # a limit of the process (RLIMIT_AS) or of the machine
            raise MemoryError(f"there was no memory for {num_bytes} bytes of packed weights: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # this Linux kernel has no huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory`, as do all its slices
        self._next = -self._memory.data_ptr() % page

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        start, num_bytes = self._next, math.prod(shape) * dtype.itemsize
        self._next += num_bytes + -num_bytes % self.ALIGNMENT
        return self._memory[start : start + num_bytes].view(dtype).view(shape)


def packed_shape(weight: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of weight: [out, in] in panels of 16 outputs: [ceil(out / 16), in / per_word, 16, per_word]."""
    per_word = 4 // weight.itemsize  # elements in 32 bits
    return (-(-weight.shape[0] // LANES), weight.shape[1] // per_word, LANES, per_word)


def packed_bytes(weight: torch.Tensor) -> int:
    return math.prod(packed_shape(weight)) * weight.itemsize + HugePages.ALIGNMENT


def pack(weight: torch.Tensor, memory: HugePages) -> torch.Tensor:
    """Copy a weight: [out, in] to panels: `packed_shape`, with zeros to fill the last panel."""
    num_panels, num_words, _, per_word = shape = packed_shape(weight)
    missing = -len(weight) % LANES
    padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight  # padding copies, even by nothing
    panels = padded.view(num_panels, LANES, num_words, per_word).transpose(1, 2)
    return memory.empty(shape, weight.dtype).copy_(panels)


class CpuLinear(nn.Module):
    """Linear layer: x: [num_tokens, in_features] -> x @ weight.T + bias: [num_tokens, out_features]"""

    packed: torch.Tensor
    bias: torch.Tensor | None
    other: int | None = None
    """Address of the weight's `struct other_weight`, if another library multiplies by it (`cpu_quantised.py`)."""
    order: torch.Tensor | None = None
    """[in_features]: the order of inputs in the weight, or None if the weight has them in their normal order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, memory: HugePages) -> None:
        super().__init__()
        self.library = load_library(weight.dtype)
        self.out_features, self.in_features = weight.shape
        self.register_buffer("packed", pack(weight, memory))
        padded = None if bias is None else F.pad(bias, (0, -len(bias) % LANES))
        self.register_buffer("bias", padded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, torch.empty(len(x), self.out_features, dtype=x.dtype))

    def product(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Write the product to `y` and return it. If `y` is float32, it gets the sums without rounding."""
        x, bias = x.contiguous(), None if self.bias is None else self.bias.data_ptr()
        wants_floats = y.dtype == torch.float32
        self.library.linear(
            *(x.data_ptr(), self.packed.data_ptr(), bias, y.data_ptr()),
            *(len(x), self.out_features, self.in_features, wants_floats),
        )
        return y


class CpuRouter(CpuLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, torch.empty(len(x), self.out_features, dtype=torch.float32))


class CpuSigmoidRouter(CpuRouter):
    def __init__(self, router: Any, memory: HugePages) -> None:
        super().__init__(router.weight, None, memory)
        self.register_buffer("e_score_correction_bias", router.e_score_correction_bias.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x)
        self.library.sigmoid(scores.data_ptr(), scores.numel())
        return scores


class CpuFusedLinear(CpuLinear):
    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, memory: HugePages, rows: tuple[int, ...]
    ) -> None:
        super().__init__(weight, bias, memory)
        self.rows = rows

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(x).split(self.rows, dim=-1)


class CpuEmbedding(CpuLinear):
    """Reads token vectors from the packed weight, so that tied embeddings are in memory only once."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        index = (token_ids // LANES, slice(None), token_ids % LANES)
        return on_one_thread(self.packed.__getitem__, index).flatten(1)  # [num_tokens, hidden_size]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits: [num_samples, hidden_size] -> [num_samples, vocab_size] float32, not rounded to bfloat16"""
        return self.product(hidden, torch.empty(len(hidden), self.out_features, dtype=torch.float32))


class CpuRMSNorm(nn.Module):
    """RMS norm that also rotates each head if it gets cosines and sines (`CpuApplyRotary`).

    `kind` is a value of `NORMS`.
    """

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float, kind: int = 0) -> None:
        super().__init__()
        self.library = load_library(weight.dtype)
        self.register_buffer("weight", weight)
        self.eps = eps
        self.kind = kind

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalise x: [num_tokens, (num_heads,) size], and rotate it by cos, sin: [num_tokens, 1, size / 2]"""
        return norm_and_rotate(self.library, x, self.weight, cos, sin, self.kind, self.eps)


class CpuRotary(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return on_one_thread(self.rotary, positions, dtype)


class CpuApplyRotary(ApplyPartialRotary):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.library = load_library(dtype)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: nn.Module | None = None
    ) -> torch.Tensor:
        if cos.shape[-1] % LANES:
            return super().forward(x, cos, sin, norm)
        if isinstance(norm, CpuRMSNorm):
            return norm(x, cos, sin)
        return norm_and_rotate(self.library, x if norm is None else norm(x), None, cos, sin)


def norm_and_rotate(
    library: Library,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    kind: int = 0,
    eps: float = 0.0,
) -> torch.Tensor:
    """Normalise x if there is a weight, then rotate it if there are cosines and sines.

    x: [num_tokens, (num_heads,) size] -> the same shape; cos, sin: [num_tokens, 1, rotary_dim / 2]
    """
    y = torch.empty(x.shape, dtype=x.dtype)
    num_heads = x.shape[1] if x.dim() == 3 else 1
    pointers = (None if t is None else t.data_ptr() for t in (weight, cos, sin))
    half = 0 if cos is None else cos.shape[-1]
    sizes = (len(x), num_heads, x.shape[-1], half, x.stride(0))
    library.rms_norm(x.data_ptr(), *pointers, y.data_ptr(), *sizes, kind, eps)
    return y


class CpuGate(nn.Module):
    """The fast version of `SiluAndMul` and `GeluAndMul`, and of gpt-oss's gate with its usual numbers."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.library = load_library(dtype)
        self.kind = 1 if isinstance(layer, SiluAndMul) else 2 if isinstance(layer, GeluAndMul) else 3  # `enum gate`

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if gate.shape[1] % LANES:
            return self.layer(gate, up)
        y = torch.empty(gate.shape, dtype=gate.dtype)
        pointers = (t.data_ptr() for t in (gate, up, y))
        self.library.gate_and_mul(*pointers, len(gate), gate.shape[1], gate.stride(0), self.kind)
        return y


def replace_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every single layer for which there is a fast version of its shape. The weights must be loaded."""
    memory = HugePages(sum(packed_bytes(layer.weight) for layer in model.modules() if has_matrix(layer)))
    put_fast_layers(model, lambda layer: make_fast_layer(layer, dtype, memory))
    keep_freed_memory()


def put_fast_layers(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace every layer for which `make` returns a fast version. `make` returns None for other layers."""
    fast_layers: dict[nn.Module, nn.Module | None] = {}  # the model may contain a layer twice: tied embeddings
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # named_children() leaves out a second name
            if child is None:
                continue
            if child not in fast_layers:
                fast_layers[child] = make(child)
                if fast_layers[child] is not None:  # the dict keeps the layer alive, but not its weight
                    child._parameters.clear()
            if fast_layers[child] is not None:
                setattr(module, name, fast_layers[child])


def has_matrix(layer: nn.Module) -> TypeGuard[Linear | Embedding]:
    """Return whether the layer has a weight that one of the fast versions can pack."""
    is_known = type(layer) in (Linear, FusedLinear, Embedding) or is_one(layer, ROUTER, SIGMOID_ROUTER)
    return isinstance(layer, Linear | Embedding) and is_known and layer.weight.shape[1] % 2 == 0


def is_usual_clamp(layer: nn.Module) -> bool:
    """Return whether the layer is gpt-oss's gate with the numbers that gates.h has."""
    return is_one(layer, CLAMPED_SWIGLU) and (layer.alpha, layer.limit) == (1.702, 7.0)


def make_fast_layer(layer: nn.Module, dtype: torch.dtype, memory: HugePages) -> nn.Module | None:
    """Return the fast version of a layer, or None if there is none for its class and shape."""
    if isinstance(layer, SiluAndMul | GeluAndMul) or is_usual_clamp(layer):
        return CpuGate(layer, dtype)
    if isinstance(layer, Rotary):
        return CpuRotary(layer)
    if isinstance(layer, ApplyRotary):
        return CpuApplyRotary(dtype)
    for name, kind in NORMS.items():
        if isinstance(layer, RMSNorm) and is_one(layer, name):
            return None if len(layer.weight) % LANES else CpuRMSNorm(layer.weight, layer.eps, kind)
    if not has_matrix(layer):
        return None
    if is_one(layer, SIGMOID_ROUTER):
        return CpuSigmoidRouter(layer, memory)
    if isinstance(layer, Linear) and is_one(layer, ROUTER):
        return CpuRouter(layer.weight, layer.bias, memory)
    if isinstance(layer, FusedLinear):
        return CpuFusedLinear(layer.weight, layer.bias, memory, tuple(layer.parts.values()))
    if isinstance(layer, Linear):
        return CpuLinear(layer.weight, layer.bias, memory)
    return CpuEmbedding(layer.weight, None, memory)
