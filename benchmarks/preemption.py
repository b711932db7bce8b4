"""Compare preemption by swap with preemption by recomputation: the time until a sequence has its K and V again.

    python -m benchmarks.preemption
    python -m benchmarks.preemption --model benchmarks/configs/qwen3-0.6b --load-format dummy --context-len 256 1024

Swap copies the blocks of a sequence to host memory and back. Recomputation runs the tokens through the model again. The
time of a swap grows with the tokens; that of a recomputation grows with tokens times parameters, and with the square of
long contexts.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch

from benchmarks.common import describe_machine
from nanovllm.batch import build_batch
from nanovllm_extras import TINY_QWEN3, Config, LLMEngine, SamplingParams
from nanovllm_extras.records.moves import Moves


def main() -> None:
    parser = argparse.ArgumentParser(description="Swap against recompute, by context length.")
    parser.add_argument("--model", default=TINY_QWEN3)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context-len", type=int, nargs="+", default=[32, 128, 512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = Config(
        model=args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        preemption_mode="swap",
        swap_space_bytes=1 << 30,
        enable_prefix_caching=False,
        max_num_batched_tokens=max(args.context_len),
    )
    engine = LLMEngine(config)
    print(describe_machine(str(engine.runner.device)))
    print(f"{'context':>8} {'swap out and in':>16} {'recompute':>12}   recompute / swap")
    for context_len in args.context_len:
        swap, recompute = measure(engine, context_len, args.rounds)
        print(f"{context_len:>8} {swap * 1e3:>13.2f} ms {recompute * 1e3:>9.2f} ms {recompute / swap:>8.1f}")


def measure(engine: LLMEngine, context_len: int, rounds: int) -> tuple[float, float]:
    """Return median seconds: (both copies, the forward pass)."""
    blocks = range(1, -(-context_len // engine.parts.block_size) + 1)
    pairs = [(block, block - 1) for block in blocks]  # host blocks count from 0
    back = [(host, device) for device, host in pairs]
    runner: Any = engine.runner
    swaps, recomputes = [], []
    for round_ in range(rounds + 1):
        start = time.perf_counter()
        runner.transfers.before(Moves(swap_outs=pairs))
        runner.transfers.before(Moves(swap_ins=back))
        synchronize(engine)
        swapped = time.perf_counter()
        engine.add_request("r", [1] * context_len, SamplingParams(max_tokens=1))
        scheduled = engine.scheduler.schedule()
        computing = time.perf_counter()
        engine.runner.run(build_batch(scheduled, engine.scheduler.block_manager.block_size)).wait()
        synchronize(engine)
        if round_:  # the first warms up
            swaps.append(swapped - start)
            recomputes.append(time.perf_counter() - computing)
        engine.on_failure()
        engine.abort_request("r")
    return median(swaps), median(recomputes)


def synchronize(engine: LLMEngine) -> None:
    if engine.runner.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
