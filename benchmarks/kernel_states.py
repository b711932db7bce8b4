"""Measure the kernels of Gated DeltaNet on a GPU, compared with PyTorch's layer between the same projections.

`benchmarks.kernels` calls this file. Outputs and states are checked against PyTorch's layer before anything is timed. A
decode reads and writes the state of its sequence, which for many sequences are almost all bytes that it moves.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.kernel_layers import Timer, check, normal
from nanovllm_extras.models.gated_delta import GatedDeltaNet
from nanovllm_extras.self_check.state_check import metadata_of

NUM_COMPUTED = 64  # tokens of each sequence, before the new ones
WORK = {  # new tokens of each sequence
    "1 decode": [1],
    "32 decodes": [1] * 32,
    "256 decodes": [1] * 256,
    "1 x 2048": [2048],
    "8 x 1024": [1024] * 8,
    "1 x 1024 and 255 decodes": [1] * 255 + [1024],
}


@dataclass(frozen=True)
class StateSizes:
    """The sizes of a layer: by default, of Qwen3.5-4B's."""

    num_key_heads: int = 16
    num_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    width: int = 4

    @property
    def num_channels(self) -> int:
        """Of q, k and v together, which the convolution mixes."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def state_size(self) -> int:
        return self.num_heads * self.key_dim * self.value_dim


class Projected(nn.Module):
    """In place of the first projection: returns what it would give, whatever its input."""

    def __init__(self, parts: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.parts


def make_layer(sizes: StateSizes, num_tokens: int, dtype: torch.dtype, device: torch.device) -> GatedDeltaNet:
    """Make PyTorch's layer with random weights, without projections."""
    names = {"num_key_heads": sizes.num_key_heads, "num_value_heads": sizes.num_heads, "key_head_dim": sizes.key_dim,
             "value_head_dim": sizes.value_dim, "conv_kernel_dim": sizes.width}  # fmt: skip
    linear = {f"linear_{name}": size for name, size in names.items()}
    layer = GatedDeltaNet(SimpleNamespace(hidden_size=1, rms_norm_eps=1e-6, **linear))
    widths = (sizes.num_channels, sizes.num_heads * sizes.value_dim, sizes.num_heads, sizes.num_heads)
    projected = normal(num_tokens, sum(widths), dtype=dtype, device=device)
    layer.in_proj, layer.out_proj = Projected(projected.split(widths, 1)), nn.Identity()  # type: ignore[assignment]
    layer = layer.to(device, dtype).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(std=0.5)
    layer.A_log.uniform_(-6, -1)  # decays of states that remember
    return layer


def measure_states(
    sizes: StateSizes,
    dtype: torch.dtype,
    device: torch.device,
    seconds: Timer,
    bandwidth: float,
    work: Mapping[str, list[int]] = WORK,
) -> Iterator[dict[str, Any]]:
    """Measure the three kernels together and one by one, for each kind of `work`. `bandwidth`: in bytes per second."""
    from nanovllm_extras.kernels.cuda import cuda_gated_delta, delta_kernels

    for name, lens in work.items():
        layer = make_layer(sizes, sum(lens), dtype, device)
        fast = cuda_gated_delta.TritonGatedDeltaNet(layer)
        conv = normal(len(lens) + 1, sizes.width - 1, sizes.num_channels, dtype=dtype, device=device)
        shape = (sizes.num_heads, sizes.key_dim, sizes.value_dim)
        states = normal(len(lens) + 1, *shape, dtype=torch.float32, device=device)
        metadata = metadata_of([(i + 1, NUM_COMPUTED, n) for i, n in enumerate(lens)], device)
        x = normal(sum(lens), 1, dtype=dtype, device=device)
        others = conv.clone(), states.clone()
        on_host = replace(metadata, cu_seqlens_q=metadata.cu_seqlens_q.cpu())  # PyTorch's layer reads it there
        expected = layer(x, *others, on_host)
        check(name, fast(x, conv, states, metadata), expected, 0.02)
        check(f"{name}: states", states, others[1], 0.02)

        qkv, z, b, a = layer.in_proj(x)
        mixed = delta_kernels.causal_conv(qkv, conv, layer.conv1d.weight, metadata)
        gates = (b, a, layer.A_log, layer.dt_bias)
        advanced = delta_kernels.gated_delta(mixed, *gates, states, sizes.num_key_heads, metadata)
        steps: dict[str, Callable[[], object]] = {
            "conv": partial(delta_kernels.causal_conv, qkv, conv, layer.conv1d.weight, metadata),
            "delta": partial(delta_kernels.gated_delta, mixed, *gates, states, sizes.num_key_heads, metadata),
            "norm": partial(delta_kernels.gated_norm, advanced, z, layer.norm.weight, layer.norm.eps),
        }
        times = {step: seconds(function) for step, function in steps.items()}
        num_bytes = 2 * len(lens) * sizes.state_size * 4
        num_bytes += (mixed.numel() + b.numel() + a.numel() + advanced.numel()) * dtype.itemsize
        yield {
            "work": name,
            "us": round(seconds(partial(fast, x, conv, states, metadata)) * 1e6, 2),
            **{f"{step} us": round(time_s * 1e6, 2) for step, time_s in times.items()},
            "GB/s": round(num_bytes / times["delta"] / 1e9, 1),
            "of copy": f"{num_bytes / times['delta'] / bandwidth:.0%}",
            "eager us": time_eager(partial(layer, x, *others, on_host), seconds),
        }


def time_eager(function: Callable[[], object], seconds: Timer) -> float | str:
    try:
        return round(seconds(function) * 1e6, 2)
    except RuntimeError as error:  # it may not be possible to record its triangular solve in a graph
        print(f"Gated DeltaNet in PyTorch: {str(error).splitlines()[0]}", file=sys.stderr)
        return "-"
