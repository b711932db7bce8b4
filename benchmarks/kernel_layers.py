"""Measure the rest of a decoder layer on a GPU: small kernels, compared with PyTorch's, and matrix products.

`benchmarks.kernels` calls this file. Each kernel is checked against PyTorch's layers before it is timed, and compared
with the same layers run eagerly (`eager`) and by `torch.compile`. The bytes are those of each input and output, once.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.layers.basic import ApplyRotary, RMSNorm, SiluAndMul
from nanovllm_extras.models.rope import Rope, ScaledRotary

KERNEL_TOKENS, PRODUCT_TOKENS = (1, 32, 256, 8192), (1, 2, 4, 8, 16, 64, 256)
EPS = 1e-6
Timer = Callable[[Callable[[], object]], float]  # seconds of one call


@dataclass(frozen=True)
class Shape:
    """The shape of a layer: by default, of Qwen3-0.6B's."""

    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class Contest:
    """One kernel, the PyTorch code that it replaces, and the bytes that both move; both return a tensor."""

    kernel: Callable[[], torch.Tensor]
    pytorch: Callable[..., torch.Tensor]
    inputs: tuple[Any, ...]  # of `pytorch`
    num_bytes: int


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()  # each size on its own, none of them as one size among many
    return torch.compile(function, dynamic=False)


def measure_kernels(
    shape: Shape, dtype: torch.dtype, device: torch.device, seconds: Timer, num_tokens: Sequence[int] = KERNEL_TOKENS
) -> Iterator[dict[str, Any]]:
    for name, make in {"rms_norm": rms_norm, "norm_rotary_store": norm_rotary_store, "silu_and_mul": silu}.items():
        for n in num_tokens:
            contest = make(shape, n, dtype, device)
            check(name, contest.kernel(), contest.pytorch(*contest.inputs))
            time_s = seconds(contest.kernel)
            yield {
                "kernel": name,
                "tokens": n,
                "us": round(time_s * 1e6, 2),
                "GB/s": round(contest.num_bytes / time_s / 1e9, 1),
                "eager us": round(seconds(partial(contest.pytorch, *contest.inputs)) * 1e6, 2),
                "compiled us": time_compiled(contest, seconds),
            }


def check(name: str, out: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.005) -> None:
    """Single numbers may be rounded to the other side, and what is left of a difference may be small: so together."""
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert error < tolerance, f"{name}: the output is off by {error:.2%}"


def time_compiled(contest: Contest, seconds: Timer) -> float | str:
    try:
        function = compiled(contest.pytorch)
        return round(seconds(lambda: function(*contest.inputs)) * 1e6, 2)
    except Exception as error:  # report the other figures even if this one does not compile
        print(f"torch.compile: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return "-"


def normal(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=device)


def make_norm(size: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    norm = RMSNorm(size, EPS).to(device, dtype).requires_grad_(False)
    norm.weight.normal_()
    return norm


def rms_norm(shape: Shape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Contest:
    from nanovllm.layers.triton_layers import rms_norm as kernel

    norm = make_norm(shape.hidden_size, dtype, device)
    x = normal(num_tokens, shape.hidden_size, dtype=dtype, device=device)
    num_bytes = (2 * x.numel() + norm.weight.numel()) * dtype.itemsize
    return Contest(lambda: kernel(x, norm.weight, norm.eps), norm, (x,), num_bytes)


def silu(shape: Shape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Contest:
    from nanovllm.layers.triton_layers import silu_and_mul as kernel

    activation = SiluAndMul()
    gate_up = normal(num_tokens, 2 * shape.intermediate_size, dtype=dtype, device=device)
    num_bytes = 3 * num_tokens * shape.intermediate_size * dtype.itemsize
    return Contest(lambda: kernel(*gate_up.chunk(2, dim=1)), activation, tuple(gate_up.chunk(2, dim=1)), num_bytes)


def norm_rotary_store(shape: Shape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Contest:
    from nanovllm_extras.kernels.cuda.norm_kernels import norm_rotary_store as kernel

    h, kv, d, block_size = shape.num_heads, shape.num_kv_heads, shape.head_dim, 16
    q_norm, k_norm = (make_norm(d, dtype, device) for _ in range(2))
    qkv = normal(num_tokens, (h + 2 * kv) * d, dtype=dtype, device=device)
    num_blocks = -(-num_tokens // block_size) + 1
    cache = torch.zeros(2, num_blocks, block_size, kv, d, dtype=dtype, device=device)
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens].int()
    cos, sin = ScaledRotary(d, Rope(1e6), 40960)(torch.arange(num_tokens, device=device), dtype)

    def pytorch(qkv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, d)) for t in qkv.split((h * d, kv * d, kv * d), dim=-1))
        k_slots, v_slots = cache.view(2, -1, kv, d)
        k_slots[slots] = ApplyRotary()(k_norm(k), cos, sin)
        v_slots[slots] = v
        return ApplyRotary()(q_norm(q), cos, sin)

    def fused() -> torch.Tensor:
        return kernel(qkv, q_norm.weight, k_norm.weight, q_norm.eps, cos, sin, cache, slots)

    other = torch.zeros_like(cache)
    fused()
    pytorch(qkv, other, slots)
    check("the cache", cache, other)
    num_bytes = (2 * qkv.numel() + 2 * cos.numel() + 2 * d) * dtype.itemsize + slots.numel() * slots.itemsize
    return Contest(fused, pytorch, (qkv, cache, slots), num_bytes)


@dataclass(frozen=True)
class Ways:
    """A product by itself, with its neighbours in separate launches, and all in one launch."""

    alone: Callable[[], torch.Tensor]
    separate: Callable[[], torch.Tensor]
    fused: Callable[[], torch.Tensor]


def normed_product(x: torch.Tensor, weight: torch.Tensor) -> Ways:
    from nanovllm.layers.triton_layers import rms_norm as kernel
    from nanovllm_extras.kernels.cuda import few_tokens

    norm_weight = torch.randn_like(x[0])
    return Ways(
        lambda: F.linear(x, weight),
        lambda: F.linear(kernel(x, norm_weight, EPS), weight),
        lambda: few_tokens.norm_linear(x, norm_weight, EPS, weight, None),
    )


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> Ways:
    from nanovllm.layers.triton_layers import rms_norm as kernel
    from nanovllm.layers.triton_layers import silu_and_mul
    from nanovllm_extras.kernels.cuda import few_tokens

    norm_weight = torch.randn_like(x[0])
    return Ways(
        lambda: F.linear(x, weight),
        lambda: silu_and_mul(*F.linear(kernel(x, norm_weight, EPS), weight).chunk(2, dim=1)),
        lambda: few_tokens.norm_gate_up(x, norm_weight, EPS, weight),
    )


def added_product(x: torch.Tensor, weight: torch.Tensor) -> Ways:
    """Add the residual in the last step of PyTorch's product as well, so that no separate launch remains."""
    from nanovllm_extras.kernels.cuda import few_tokens

    residual, fused_residual = x.new_zeros(2, len(x), len(weight))

    def alone() -> torch.Tensor:
        return residual.addmm_(x, weight.t())

    return Ways(alone, alone, lambda: few_tokens.add_linear(fused_residual, x, weight, None))


def measure_products(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    seconds: Timer,
    bandwidth: float,
    num_tokens: Sequence[int] = PRODUCT_TOKENS,
) -> Iterator[dict[str, Any]]:
    """Few tokens wait for the weights, which are read once: their share of `bandwidth`, in bytes per second, counts.

    For as few as `few_tokens.py` takes, its way is compared with the same with PyTorch's product.
    """
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    products: dict[str, tuple[int, int, Callable[..., Ways]]] = {  # name: (inputs, outputs, ways)
        "qkv": (shape.hidden_size, q_size + 2 * kv_size, normed_product),
        "o + residual": (q_size, shape.hidden_size, added_product),
        "gate_up": (shape.hidden_size, 2 * shape.intermediate_size, gated_product),
        "down + residual": (shape.intermediate_size, shape.hidden_size, added_product),
    }
    for name, (num_inputs, num_outputs, make) in products.items():
        weight = normal(num_outputs, num_inputs, dtype=dtype, device=device) * num_inputs**-0.5
        for n in num_tokens:
            x = normal(n, num_inputs, dtype=dtype, device=device)
            ways = make(x, weight)
            beside = compare(name, x, ways, seconds)
            time_s = seconds(ways.alone)
            num_moved = weight.numel() + x.numel() + (1 + (make is added_product)) * n * num_outputs
            num_bytes = num_moved * dtype.itemsize
            yield {
                "product": name,
                "tokens": n,
                "us": round(time_s * 1e6, 2),
                "GB/s": round(num_bytes / time_s / 1e9, 1),
                "of copy": f"{num_bytes / time_s / bandwidth:.0%}",
                "TFLOP/s": round(2 * n * weight.numel() / time_s / 1e12, 1),
                **beside,
            }


def compare(name: str, x: torch.Tensor, ways: Ways, seconds: Timer) -> dict[str, float | str]:
    """Microseconds of a product with its neighbours, in launches of their own and in one."""
    from nanovllm_extras.kernels.cuda import few_tokens

    if len(x) > few_tokens.MAX_TOKENS or not few_tokens.takes(x.shape[1]):
        return {"separate us": "-", "fused us": "-"}
    check(name, ways.fused(), ways.separate(), 0.01)  # PyTorch's product may add up parts that are rounded
    return {f"{way} us": round(seconds(getattr(ways, way)) * 1e6, 2) for way in ("separate", "fused")}
