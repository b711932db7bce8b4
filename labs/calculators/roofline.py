"""What a decode step waits for: memory, arithmetic, or launches; by batch size.

    python -m labs.calculators.roofline                                                      # measures this machine
    python -m labs.calculators.roofline --read-gb-s 3350 --tflops 989 --launch-us 4          # describes another one
    python -m labs.calculators.roofline --plot roofline.png --model Qwen/Qwen3-0.6B --context-len 8192

A decode step computes one token of each sequence. It takes at least the longest of three times, which overlap at best:

    reading     (bytes of the weights + batch size · context · bytes of KV cache for a token) / read rate
    arithmetic  batch size · FLOPs of a token at this context / rate of matrix products
    launches    number of launches · time of one launch

The weights are read once for all sequences: for few of them reading is longest, and a larger batch is nearly free. The
ridge is the batch size from which on arithmetic is longest:

    ridge = (weight bytes / read rate) / (FLOPs of a token / rate of products - KV bytes of a context / read rate)

If the bracket is not positive, each further sequence brings more reading than arithmetic, and there is no ridge.

The bytes and FLOPs are `benchmarks/roofline.py`'s, and so are the measured rates. Of experts, the weights of one token
count, although a batch may read more. A launch is a small product here, 12 for each layer and 4 besides, as without
fused kernels or CUDA graphs. The figures of a card are those that its maker publishes; the second command above has an
H100 SXM's (3.35 TB/s, 989 TFLOP/s in bfloat16 without sparsity), and 4 microseconds are assumed.
"""

import argparse
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
    """In seconds."""

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
    parser = argparse.ArgumentParser(description="What a decode step waits for, by batch size.")
    parser.add_argument("--model", default=str(QWEN3_06B), help="a folder with a config.json, or a hub id")
    parser.add_argument("--dtype", default="auto", help="auto (the model's), bfloat16, float16, float32")
    parser.add_argument("--device", default="cpu", help="what is measured: cpu (default) or cuda")
    parser.add_argument("--read-gb-s", type=float, help="10^9 bytes per second of a machine, instead of measuring")
    parser.add_argument("--tflops", type=float, help="10^12 FLOP per second of a machine, instead of measuring")
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
    print("\nBatch size from which on arithmetic takes longer than reading, by context:")
    for context_len in sorted({*RIDGE_CONTEXTS, args.context_len}):
        ridge = find_ridge(shape, context_len, size, rates)
        why = "never: the KV cache of a sequence takes longer to read than its token to compute"
        print(f"  {context_len:>7,} tokens   {why if ridge is None else f'{ridge:,.1f}'}")
    if args.plot:
        lines = {part: [1e3 * vars(step)[part] for step in steps.values()] for part in vars(steps[args.batch_size[0]])}
        panel = Panel("batch size", "milliseconds of a step, at least", args.batch_size, lines, is_log=True)
        draw(args.plot, f"{name}, {args.context_len:,} tokens of context\n{machine}", [panel])


def rates_of(args: argparse.Namespace, dtype: str) -> tuple[Rates, float]:
    """As given, and measured for what is not; seconds of a launch are the second."""
    given = (args.read_gb_s, args.tflops, args.launch_us)
    if any(number is not None and number <= 0 for number in given):
        raise ValueError(f"--read-gb-s, --tflops and --launch-us must be > 0, got {given}")
    measured = measure_rates(dtype, args.device) if None in given[:2] else Rates(0, 0)
    launch_s = measure_launch(dtype, args.device) if args.launch_us is None else args.launch_us / 1e6
    read = measured.read_bytes_per_s if args.read_gb_s is None else args.read_gb_s * 1e9
    gemm = measured.gemm_flops_per_s if args.tflops is None else args.tflops * 1e12
    return Rates(read, gemm), launch_s


def measure_launch(dtype: str, device: str, num_launches: int = 500) -> float:
    """Seconds of a product that is too small to matter."""
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
    """Of a step whose tokens attend to `context_len` tokens each, themselves among them."""
    if batch_size < 1 or context_len < 2:
        raise ValueError(f"--batch-size must be >= 1 and --context-len >= 2, got {batch_size} and {context_len}")
    # requests of two tokens: the prefill makes the first, and the one decode step the second
    step = roofline(shape, [context_len - 1] * batch_size, [2] * batch_size, 0, bytes_per_value, rates)
    num_launches = LAUNCHES_PER_LAYER * shape.num_layers + OTHER_LAUNCHES
    return StepTimes(
        step.decode_bytes / rates.read_bytes_per_s, step.decode_flops / rates.gemm_flops_per_s, num_launches * launch_s
    )


def find_ridge(shape: ModelShape, context_len: int, bytes_per_value: int, rates: Rates) -> float | None:
    """The batch size at which arithmetic takes as long as reading; None if it never does."""
    weights_s = (shape.body_params + shape.head_params) * bytes_per_value / rates.read_bytes_per_s
    token_s = (token_flops(shape, context_len) + 2 * shape.head_params) / rates.gemm_flops_per_s
    kv_s = context_len * shape.kv_values_per_token * bytes_per_value / rates.read_bytes_per_s
    return weights_s / (token_s - kv_s) if token_s > kv_s else None


if __name__ == "__main__":
    main()
