"""Products of one decode step on CPU with weights in 16, 8 and 4 bits, side by side.

    python -m benchmarks.quantised_products [--batch 1 8 32] [--json out.json]

All products of one step of Qwen3-0.6B's shape (28 layers and the logits), for several numbers of rows. Logits have 8
bits where the layers have 4. The contenders take turns; prints the median milliseconds of each, and the GB/s it reads.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import describe_machine
from benchmarks.cpu_kernels import HEAD_SHAPE, LAYER_SHAPES, NUM_LAYERS, race
from nanovllm.extras.quantization.layers import QuantisedLinear, quantise_weight
from nanovllm.kernels.cpu.layers import CpuLinear, HugePages, packed_bytes
from nanovllm.kernels.cpu.quantised import CpuQuantisedLinear

FORMATS = {"int8": (8, 128), "int4": (4, 128), "int4, groups of 32": (4, 32)}  # bits, group_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shapes = LAYER_SHAPES * NUM_LAYERS + [HEAD_SHAPE]
    weights = [torch.randn(shape, dtype=torch.bfloat16).mul_(0.02) for shape in shapes]
    layers = {"bfloat16": plain(weights), **{name: quantised(weights, *FORMATS[name]) for name in FORMATS}}
    num_bytes = {name: sum(bytes_of(layer) for layer in some) for name, some in layers.items()}
    rows = []
    with torch.inference_mode():
        for batch in args.batch:
            inputs = {k: torch.randn(batch, k).bfloat16() for k in {shape[1] for shape in shapes}}
            contenders: dict[str, Any] = {name: partial(multiply_all, some, inputs) for name, some in layers.items()}
            times = race(contenders, args.repeats)
            rows.append({"batch": batch, "milliseconds": times})
            for name, ms in times.items():
                rate = num_bytes[name] / ms / 1e6
                print(f"batch {batch:3d}  {name:<20} {ms:8.2f} ms  {rate:5.1f} GB/s  {times['bfloat16'] / ms:5.2f}x")
    if args.json:
        report = {"rows": rows, "bytes": num_bytes, "machine": describe_machine("cpu")}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def multiply_all(layers: list[Any], inputs: dict[int, torch.Tensor]) -> None:
    """inputs: number of inputs -> [batch, number of inputs]"""
    for layer in layers:
        layer(inputs[layer.in_features])


def plain(weights: list[torch.Tensor]) -> list[Any]:
    memory = HugePages(sum(packed_bytes(weight) for weight in weights))
    return [CpuLinear(weight, None, memory) for weight in weights]


def quantised(weights: list[torch.Tensor], bits: int, group_size: int) -> list[Any]:
    memory = HugePages(sum(packed_bytes(weight) for weight in weights) // 2)
    made: list[Any] = []
    for weight in weights:
        layer = QuantisedLinear(quantise_weight(weight, 8 if weight.shape == HEAD_SHAPE else bits, group_size), None)
        made.append(CpuQuantisedLinear(layer, weight.dtype, memory))
    return made


def bytes_of(layer: Any) -> int:
    """Read for one step."""
    return layer.packed.nbytes + (0 if layer.other is None else layer.scales.nbytes)


if __name__ == "__main__":
    main()
