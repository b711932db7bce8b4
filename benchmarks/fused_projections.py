"""Whether fusing projections of the same input pays: one product for q, k and v, one for gate and up.

    python -m benchmarks.fused_projections

Times one layer's projections of Qwen3-0.6B's shape, alternating between fused and separate so that noise hits both,
and prints the medians. `models/qwen3.py` fuses because of this.
"""

import argparse
import time
from statistics import median

import torch

from benchmarks.common import describe_machine
from nanovllm.config import DTYPES, resolve_device
from nanovllm.layers.linear import FusedLinear, Linear

HIDDEN = 1024
PARTS = {"qkv": {"q": 2048, "k": 1024, "v": 1024}, "gate_up": {"gate": 3072, "up": 3072}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fused against separate projections.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    device = resolve_device(args.device)
    print(describe_machine(str(device)))
    print(f"{'dtype':<10} {'layer':<8} {'tokens':>6} {'separate':>10} {'fused':>10}  separate / fused")
    for dtype in args.dtypes:
        for name, parts in PARTS.items():
            for num_tokens in args.num_tokens:
                separate, fused = measure(parts, num_tokens, DTYPES[dtype], device, args.rounds)
                print(
                    f"{dtype:<10} {name:<8} {num_tokens:>6} {separate:>8.0f}µs {fused:>8.0f}µs {separate / fused:>8.2f}"
                )


@torch.inference_mode()
def measure(
    parts: dict[str, int], num_tokens: int, dtype: torch.dtype, device: torch.device, rounds: int
) -> tuple[float, float]:
    """Medians in microseconds: (separate, fused)."""
    fused = FusedLinear(HIDDEN, parts).to(device, dtype)
    separate = [Linear(HIDDEN, rows).to(device, dtype) for rows in parts.values()]
    for layer in (fused, *separate):
        layer.weight.normal_(0, 0.02)
    x = torch.randn(num_tokens, HIDDEN, dtype=dtype, device=device)  # [num_tokens, hidden_size]
    contenders: list[list[Linear]] = [separate, [fused]]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for values, layers in zip(times, contenders, strict=True):
            start = time.perf_counter()
            for layer in layers:
                layer(x)
            if device.type == "cuda":
                torch.cuda.synchronize()
            values.append((time.perf_counter() - start) * 1e6)
    return median(times[0]), median(times[1])


if __name__ == "__main__":
    main()
