"""Compute what limits a decode step, by batch size: memory, arithmetic, or launches.

    python -m labs.calculators.roofline                                                      # measures this machine
    python -m labs.calculators.roofline --read-gb-s 3350 --tflops 989 --launch-us 4          # describes another one
    python -m labs.calculators.roofline --plot roofline.png --model Qwen/Qwen3-0.6B --context-len 8192

A decode step computes one token of each sequence. At best, three times overlap, and the step takes the longest one:

    reading     (bytes of the weights + batch size · context · bytes of KV cache for a token) / read rate
    arithmetic  batch size · FLOPs of a token at this context / rate of matrix products
    launches    number of launches · time of one launch

The weights are read once for all sequences. With few sequences, reading takes longest, and more sequences take hardly
more time. The ridge is the batch size above which arithmetic takes longer than reading:

    ridge = (weight bytes / read rate) / (FLOPs of a token / rate of products - KV bytes of a context / read rate)

If the difference in brackets is not positive, each further sequence adds more reading than arithmetic, and arithmetic
never takes longer.

`benchmarks/roofline.py` counts the bytes and FLOPs, and measures the rates. For a mixture of experts, only the experts
of one token count, although a batch may read more. A launch is measured as a small matrix product. Without fused
kernels and CUDA graphs, a step has 12 launches for each layer and 4 more. The second command above has the published
figures of an H100 SXM (3.35 TB/s, 989 TFLOP/s in bfloat16 without sparsity), and an assumed 4 microseconds a launch.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.common import DTYPE_BYTES, QWEN3_06B, ModelShape, find_model, resolve_dtype_name
from benchmarks.roofline import Rates, best_time, measure_rates, roofline, token_flops
from labs.calculators.common import Panel, draw, print_table

LAUNCHES_PER_LAYER, OTHER_LAUNCHES = 12, 4
RIDGE_CONTEXTS = (1, 256, 1024, 4096, 16_384)


@dataclass(frozen=True)
class StepTimes:
    """The three times of a step, in seconds."""

    reading: float
    arithmetic: float
    launches: float

    @property
    def total(self) -> float:
        return max(vars(self).values())

    @property
    def waits_for(self) -> str:
        return max(vars(self), key=lambda name: vars(self)[name])


def main() -> None:
    parser = argparse.ArgumentParser(description="What limits a decode step, by batch size.")
    parser.add_argument("--model", default=str(QWEN3_06B), help="a folder with a config.json, or a hub id")
    parser.add_argument("--dtype", default="auto", help="auto (the model's), bfloat16, float16, float32")
    parser.add_argument("--device", default="cpu", help="the device to measure: cpu (default) or cuda")
    parser.add_argument("--read-gb-s", type=float, help="read rate in 10^9 bytes per second, instead of measuring")
    parser.add_argument("--tflops", type=float, help="rate of products in 10^12 FLOP per second, instead of measuring")
    parser.add_argument("--launch-us", type=float, help="microseconds of a launch, instead of measuring")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[2**i for i in range(10)])
    parser.add_argument("--context-len", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--plot", type=Path, help="draw the curves to this file (needs matplotlib)")
    args = parser.parse_args()
    try:
        folder = find_model(args.model, with_weights=False)
        shape, dtype = ModelShape.from_folder(folder), resolve_dtype_name(args.dtype, folder)
        rates, launch_s = rates_of(args, dtype)
        size = DTYPE_BYTES[dtype]
        steps = {n: step_times(shape, n, args.context_len, size, rates, launch_s) for n in args.batch_size}
    except ValueError as error:
        parser.error(str(error))
    name = Path(args.model).resolve().name
    machine = (
        f"{rates.read_bytes_per_s / 1e9:,.1f} GB/s, {rates.gemm_flops_per_s / 1e12:,.3g} TFLOP/s in {dtype}, "
        f"{launch_s * 1e6:.1f} us a launch"
    )
    print(f"{machine}; {name}, {args.context_len:,} tokens of context\n")
    print_table(
        ["batch size", "reading ms", "arithmetic ms", "launches ms", "step ms", "tokens/s", "waits for"],
        [
            [str(n), *(f"{1e3 * t:,.3f}" for t in (*vars(step).values(), step.total)), f"{n / step.total:,.0f}",
             step.waits_for]
            for n, step in steps.items()
        ],
    )  # fmt: skip
    print("\nBatch size above which arithmetic takes longer than reading, by context:")
    for context_len in sorted({*RIDGE_CONTEXTS, args.context_len}):
        ridge = find_ridge(shape, context_len, size, rates)
        why = "never: reading the KV cache of a sequence takes longer than computing its token"
        print(f"  {context_len:>7,} tokens   {why if ridge is None else f'{ridge:,.1f}'}")
    if args.plot:
        lines = {part: [1e3 * vars(step)[part] for step in steps.values()] for part in vars(steps[args.batch_size[0]])}
        panel = Panel("batch size", "milliseconds of a step, at least", args.batch_size, lines, is_log=True)
        draw(args.plot, f"{name}, {args.context_len:,} tokens of context\n{machine}", [panel])


def rates_of(args: argparse.Namespace, dtype: str) -> tuple[Rates, float]:
    """Return the rates and the seconds of a launch: as given by options, or measured."""
    given = (args.read_gb_s, args.tflops, args.launch_us)
    if any(number is not None and number <= 0 for number in given):
        raise ValueError(f"--read-gb-s, --tflops and --launch-us must be > 0, got {given}")
    if None in given:
        print("measuring how fast this machine reads, multiplies and launches …", file=sys.stderr, flush=True)
    measured = measure_rates(dtype, args.device) if None in given[:2] else Rates(0, 0)
    launch_s = measure_launch(dtype, args.device) if args.launch_us is None else args.launch_us / 1e6
    read = measured.read_bytes_per_s if args.read_gb_s is None else args.read_gb_s * 1e9
    gemm = measured.gemm_flops_per_s if args.tflops is None else args.tflops * 1e12
    return Rates(read, gemm), launch_s


def measure_launch(dtype: str, device: str, num_launches: int = 500) -> float:
    """Return the seconds of a launch, measured by a product so small that its arithmetic takes no time."""
    x = torch.ones(1, 8, device=device).to(getattr(torch, dtype))
    weight = torch.ones(8, 8, device=device).to(x.dtype)

    def launch() -> None:
        for _ in range(num_launches):
            F.linear(x, weight)
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    return best_time(launch, 5) / num_launches


def step_times(
    shape: ModelShape, batch_size: int, context_len: int, bytes_per_value: int, rates: Rates, launch_s: float
) -> StepTimes:
    """Return the times of a step in which each token attends to `context_len` tokens, its own included."""
    if batch_size < 1 or context_len < 2:
        raise ValueError(f"--batch-size must be >= 1 and --context-len >= 2, got {batch_size} and {context_len}")
    # requests of two output tokens: the prefill samples the first, and the only decode step the second
    step = roofline(shape, [context_len - 1] * batch_size, [2] * batch_size, 0, bytes_per_value, rates)
    num_launches = LAUNCHES_PER_LAYER * shape.num_layers + OTHER_LAUNCHES
    return StepTimes(
        step.decode_bytes / rates.read_bytes_per_s, step.decode_flops / rates.gemm_flops_per_s, num_launches * launch_s
    )


def find_ridge(shape: ModelShape, context_len: int, bytes_per_value: int, rates: Rates) -> float | None:
    """Return the batch size at which arithmetic takes as long as reading, or None if arithmetic never does."""
    weights_s = (shape.body_params + shape.head_params) * bytes_per_value / rates.read_bytes_per_s
    token_s = (token_flops(shape, context_len) + 2 * shape.head_params) / rates.gemm_flops_per_s
    kv_s = context_len * shape.kv_values_per_token * bytes_per_value / rates.read_bytes_per_s
    return weights_s / (token_s - kv_s) if token_s > kv_s else None


if __name__ == "__main__":
    main()
