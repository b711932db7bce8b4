"""PyTorch's products in bfloat16 and in float32, on a processor without bfloat16 arithmetic.

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 python -m benchmarks.fallback_dtype

These variables have a newer processor compute as one with AVX2 does.
"""

import argparse
import time

import torch
import torch.nn.functional as F

NUM_LAYERS, OUT, IN = 40, 3072, 1024  # more weights than caches hold


def measure(num_rows: int, dtype: torch.dtype) -> float:
    """Microseconds of a product; the best of four passes through all weights."""
    weights = [torch.randn(OUT, IN).to(dtype) for _ in range(NUM_LAYERS)]
    x, best = torch.randn(num_rows, IN).to(dtype), float("inf")
    for _ in range(4):
        start = time.perf_counter()
        for weight in weights:
            F.linear(x, weight)
        best = min(best, time.perf_counter() - start)
    return best / NUM_LAYERS * 1e6


def main() -> None:
    argparse.ArgumentParser(description="Compare PyTorch's products in two dtypes.").parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    print(f"us for [rows, {IN}] x [{IN}, {OUT}]\n{'rows':>6} {'bfloat16':>10} {'float32':>10}")
    for num_rows in (1, 4, 32, 256):
        print(f"{num_rows:6} {measure(num_rows, torch.bfloat16):10.0f} {measure(num_rows, torch.float32):10.0f}")


if __name__ == "__main__":
    main()
