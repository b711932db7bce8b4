"""Compare the products of a decode step on a CPU with weights in 16, 8 and 4 bits; or whole requests.

    python -m benchmarks.quantised_products [--batch 1 8 32] [--json out.json]
    python -m benchmarks.quantised_products --batch --requests 15

The products are those of one step of Qwen3-0.6B's shape (28 layers and the logits), for several numbers of rows. If the
layers have 4 bits, the logits have 8. The formats run in turns. Prints the median milliseconds of each, and the GB/s
that it reads.

--requests: engines of this shape, with random weights, serve one request each in turns, 64 tokens in and 64 out
(workload W2). Successive requests can be compared even if the speed of the memory changes within minutes. Prints the
median of their ratios, and the range of the middle half.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.common import QWEN3_06B, describe_machine
from benchmarks.cpu_kernels import HEAD_SHAPE, LAYER_SHAPES, NUM_LAYERS, multiply_all, race
from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.kernels.cpu.cpu_layers import CpuLinear, HugePages, packed_bytes
from nanovllm_extras.kernels.cpu.cpu_quantised import CpuQuantisedLinear
from nanovllm_extras.weights.quantised_linear import QuantisedLinear, quantise_weight

FORMATS = {"int8": (8, 128), "int4": (4, 128), "int4, groups of 32": (4, 32)}  # bits, group_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="of each engine (default: none)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": describe_machine("cpu")}
    if args.batch:
        report |= race_products(args.batch, args.repeats)
    if args.requests:
        report["requests"] = race_requests(args.requests)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def race_products(batches: list[int], repeats: int) -> dict[str, Any]:
    shapes = LAYER_SHAPES * NUM_LAYERS + [HEAD_SHAPE]
    weights = [torch.randn(shape, dtype=torch.bfloat16).mul_(0.02) for shape in shapes]
    layers = {"bfloat16": plain(weights), **{name: quantised(weights, *FORMATS[name]) for name in FORMATS}}
    num_bytes = {name: sum(bytes_of(layer) for layer in some) for name, some in layers.items()}
    rows = []
    with torch.inference_mode():
        for batch in batches:
            inputs = {k: torch.randn(batch, k).bfloat16() for k in {shape[1] for shape in shapes}}
            contenders: dict[str, Any] = {name: partial(multiply_all, some, inputs) for name, some in layers.items()}
            times = race(contenders, repeats)
            rows.append({"batch": batch, "milliseconds": times})
            for name, ms in times.items():
                rate = num_bytes[name] / ms / 1e6
                print(f"batch {batch:3d}  {name:<20} {ms:8.2f} ms  {rate:5.1f} GB/s  {times['bfloat16'] / ms:5.2f}x")
    return {"rows": rows, "bytes": num_bytes}


def race_requests(count: int) -> dict[str, Any]:
    """Serve requests in turns. The first request of each engine is not counted."""
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "max_model_len": 128, "num_kv_blocks": 32}
    quantizations = {"bfloat16": None, "int8": "int8", "int4": "int4"}
    llms = {
        name: LLM(QWEN3_06B, dtype="bfloat16", enable_prefix_caching=False, quantization=quantization, **options)
        for name, quantization in quantizations.items()
    }
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    speeds: dict[str, list[float]] = {name: [] for name in llms}  # output tokens/s
    for _ in range(count + 1):
        for name, llm in llms.items():
            start = time.perf_counter()
            llm.generate([list(range(64))], sampling, use_tqdm=False)
            speeds[name].append(round(64 / (time.perf_counter() - start), 2))
    for name, values in speeds.items():
        del values[0]
        ratios = [value / other for value, other in zip(values, speeds["bfloat16"], strict=True)]
        low, _, high = quantiles(ratios, n=4) if count > 1 else ratios * 3
        range_of_half = f"{low:.2f} to {high:.2f}"
        print(f"one request  {name:<20} {median(values):6.1f} tokens/s  {median(ratios):5.2f}x ({range_of_half})")
    return speeds


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
