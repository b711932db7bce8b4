"""Measure a decode step by its number of sequences: reading the weights limits small steps, arithmetic large ones.

The network has four layers of Qwen3-0.6B with random weights, too large for a CPU's caches. It runs on one thread.

    python -m labs.demos.batch_size
    python -m labs.demos.batch_size --plot batch_size.png
"""

import argparse
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.common import QWEN3_06B, ModelShape
from nanovllm_extras import LLM, SamplingParams

BATCH_SIZES = [1, 2, 4, 8, 16, 32, 64]
OVERRIDES = {"num_hidden_layers": 4, "vocab_size": 4096}
NUM_ROUNDS, NUM_STEPS = 2, 8  # the fastest of all these steps counts
BYTES = 4  # of a weight in float32


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decode steps by batch size.")
    parser.add_argument("--plot", help="draw the picture to this file (needs matplotlib)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = replace(ModelShape.from_folder(QWEN3_06B), num_layers=4, vocab_size=4096)
    num_weights = shape.body_params + shape.head_params
    options: dict[str, Any] = {"load_format": "dummy", "hf_overrides": OVERRIDES, "dtype": "float32", "device": "cpu"}
    with LLM(QWEN3_06B, max_model_len=64, num_kv_blocks=256, enable_prefix_caching=False, **options) as llm:
        print(f"{num_weights / 1e6:.0f} million weights, {num_weights * BYTES / 1e6:.0f} MB\n")
        print("sequences  ms a step  tokens/s  FLOP/byte  GB/s  GFLOP/s")
        rounds = [{n: decode(llm, n) for n in BATCH_SIZES} for _ in range(NUM_ROUNDS)]
        seconds = {n: min(one[n] for one in rounds) for n in BATCH_SIZES}
        for n, s in seconds.items():
            num_bytes, flops = num_weights * BYTES, 2 * num_weights * n  # for the weights only
            print(f"{n:>9}  {1e3 * s:>9.1f}  {n / s:>8.0f}  {flops / num_bytes:>9.1f}  ", end="")
            print(f"{num_bytes / s / 1e9:>4.1f}  {flops / s / 1e9:>7.0f}")
    if args.plot:
        draw(seconds, args.plot)


def decode(llm: LLM, num_seqs: int) -> float:
    """Return the seconds of the fastest step in which `num_seqs` sequences decode, each with a short context."""
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS + 1, ignore_eos=True)
    for i in range(num_seqs):
        llm.engine.add_request(f"{num_seqs}-{i}", [7 * i + j for j in range(4)], params)
    seconds = []
    while llm.engine.has_unfinished_requests():
        start = time.perf_counter()
        step = llm.engine.step()
        if step.num_prefill_tokens == 0:
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def draw(seconds: dict[int, float], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    sizes = list(seconds)
    left.plot(sizes, [1e3 * s for s in seconds.values()], "o-")
    left.set_ylabel("milliseconds of a decode step")
    left.set_ylim(bottom=0)
    right.plot(sizes, [n / s for n, s in seconds.items()], "o-")
    right.plot(sizes, [n / seconds[1] for n in sizes], "--", color="gray", label="if a step took no longer")
    right.set_ylabel("tokens per second")
    right.set_yscale("log")
    right.yaxis.set_major_formatter("{x:,.0f}")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, sizes)
        axes.set_xlabel("sequences in the step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
