"""Measure the cost of a step besides the model: schedule, build_batch, update, and making outputs.

    python -m benchmarks.step_overhead
    python -m benchmarks.step_overhead --num-seqs 256 1024 4096 --context-len 512 131072

No model runs: a stand-in returns a token for each sequence. Prints the median over the steps in microseconds, for
sequences that all decode. Outputs are measured separately, for requests that stream text and tokens at every step.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from statistics import median

from benchmarks.common import describe_machine
from nanovllm.batch import build_batch
from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler
from nanovllm_extras import TINY_QWEN3, Config, SamplingParams
from nanovllm_extras.checkpoint import load_tokenizer
from nanovllm_extras.full_detokenizer import TokenDecoder
from nanovllm_extras.full_request import Request
from nanovllm_extras.full_sequence import Sequence
from nanovllm_extras.runner_hooks import StepTokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the engine's own cost per decode step.")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[256])
    parser.add_argument("--context-len", type=int, nargs="+", default=[512])
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    columns = ("num_seqs", "context_len", "block_size", "schedule", "build_batch", "update", "sum", "outputs")
    print(" ".join(f"{name:>11}" for name in columns), "(microseconds)")
    rows = []
    for num_seqs, context_len, block_size in itertools.product(args.num_seqs, args.context_len, args.block_size):
        row = measure(num_seqs, context_len, block_size, args.steps)
        print(" ".join(f"{row[name]:>11.0f}" for name in columns))
        rows.append(row)
    if args.json:
        args.json.write_text(json.dumps({"machine": describe_machine("cpu"), "rows": rows}, indent=2) + "\n")


def measure(num_seqs: int, context_len: int, block_size: int, num_steps: int) -> dict[str, float]:
    """Return medians in microseconds over `num_steps` steps in which all `num_seqs` sequences decode."""
    max_len = context_len + 2 * num_steps + 8
    blocks = BlockManager(num_seqs * -(-max_len // block_size), block_size)
    scheduler = Scheduler(blocks, num_seqs, max_num_batched_tokens=num_seqs * context_len, max_model_len=max_len)
    requests = add_requests(scheduler, num_seqs, context_len)
    tokens = [400 + i % 600 for i in range(num_seqs)]  # words and parts of words, in the bundled tokenizer
    step_tokens = StepTokens(tokens, None, ())
    scheduler.update(scheduler.schedule(), tokens)  # all prompts at once
    times: dict[str, list[float]] = {"schedule": [], "build_batch": [], "update": [], "sum": [], "outputs": []}
    for _ in range(num_steps):
        t0 = time.perf_counter()
        scheduled = scheduler.schedule()
        t1 = time.perf_counter()
        build_batch(scheduled, blocks.block_tables)
        t2 = time.perf_counter()
        scheduler.update(scheduled, tokens)
        t3 = time.perf_counter()
        for name, seconds in zip(times, (t1 - t0, t2 - t1, t3 - t2, t3 - t0), strict=False):
            times[name].append(seconds * 1e6)
    for _ in range(num_steps):  # apart: not everybody streams
        scheduler.update(scheduler.schedule(), tokens)
        start = time.perf_counter()
        for row, request in enumerate(requests):
            request.read_token(request.seqs[0], step_tokens, row)  # type: ignore[arg-type]
            request.finish_step(scheduler, start)
            request.make_output()
        times["outputs"].append((time.perf_counter() - start) * 1e6)
    sizes = {"num_seqs": num_seqs, "context_len": context_len, "block_size": block_size}
    return {**sizes, **{name: round(median(values), 1) for name, values in times.items()}}


def add_requests(scheduler: Scheduler, num_seqs: int, context_len: int) -> list[Request]:
    tokenizer = load_tokenizer(Config(TINY_QWEN3), TINY_QWEN3) if TINY_QWEN3.is_dir() else None
    decoder = tokenizer and TokenDecoder(tokenizer)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    requests = []
    for i in range(num_seqs):
        token_ids = [i % 1000] * context_len
        seq = Sequence(str(i), token_ids, params)
        scheduler.add(seq)
        requests.append(Request(None, token_ids, [seq], True, decoder, time.monotonic()))
    return requests


if __name__ == "__main__":
    main()
