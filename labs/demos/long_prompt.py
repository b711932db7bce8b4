"""Measure, by the step's budget, how a long prompt delays four decoding requests, and when its first token comes.

python -m labs.demos.long_prompt              # times: they differ from machine to machine
python -m labs.demos.long_prompt --counts     # steps and tokens: equal on all machines
python -m labs.demos.long_prompt --trace run.jsonl && nanovllm view run.jsonl     # 36 tokens, a budget of 16
"""

import argparse
import time
from statistics import median
from typing import Any

import torch

from nanovllm_extras import LLM, TINY_QWEN3, LLMEngine, SamplingParams, StepOutput

LONG_LEN, BUDGETS = 1200, [2048, 256, 64]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "torch",
    "enforce_eager": True,
    "num_kv_blocks": 128,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Chunked prefill: TTFT against the gaps between tokens.")
    parser.add_argument("--counts", action="store_true", help="print steps and tokens instead of times")
    parser.add_argument("--trace", help="record a small run to this file: 36 tokens, a budget of 16")
    args = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for one another would lengthen short steps
    if args.trace:
        with LLM(TINY_QWEN3, trace=args.trace, block_size=4, max_num_batched_tokens=16, **OPTIONS) as llm:
            measure(llm.engine, 36)
        return
    print(f"four requests decode, a prompt of {LONG_LEN} tokens arrives\n")
    if args.counts:
        print("budget   steps to its first token   tokens of these steps")
    else:
        print("budget   TTFT of the long prompt   longest gap   median gap")
    for budget in BUDGETS:
        with LLM(TINY_QWEN3, max_num_batched_tokens=budget, enable_prefix_caching=False, **OPTIONS) as llm:
            if args.counts:
                *full, last = measure(llm.engine, LONG_LEN)[0]
                described = f"{len(full)} x {full[0]}, then {last}" if full else f"{last}"
                print(f"{budget:>6}   {len(full) + 1:>24}   {described}")
            else:
                rounds = [measure(llm.engine, LONG_LEN) for _ in range(3)]
                counts = rounds[0][0]
                # the best of three rounds for each step: the first round warms up
                gaps = [min(times) * 1e3 for times in zip(*(gaps for _, gaps in rounds), strict=True)]
                ttft = sum(gaps[: len(counts)])
                print(f"{budget:>6}   {ttft:>20.1f} ms   {max(gaps):>8.1f} ms   {median(gaps):>7.1f} ms")


def measure(engine: LLMEngine, long_len: int) -> tuple[list[int], list[float]]:
    """Run a long prompt beside four decodes. Return tokens by step, and the gaps of a decoding request in seconds.

    The tokens are those of each step from the arrival of the long prompt to its first token. Each step is a gap, and
    the gaps of ten more steps follow.
    """
    for i, name in enumerate("ABCD"):
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        engine.add_request(name, [1000 + 20 * i + j for j in range(4)], params)
    for _ in range(5):
        engine.step()
    engine.add_request("long", list(range(500, 500 + long_len)), SamplingParams(temperature=0, max_tokens=1))
    counts: list[int] = []
    gaps: list[float] = []
    has_token = False
    while not has_token:
        step, seconds = run_step(engine)
        counts.append(step.num_scheduled_tokens)
        gaps.append(seconds)
        has_token = any(output.request_id == "long" for output in step.outputs)
    gaps += [run_step(engine)[1] for _ in range(10)]
    for name in "ABCD":
        engine.abort_request(name)
    return counts, gaps


def run_step(engine: LLMEngine) -> tuple[StepOutput, float]:
    """Return what a step did, and its processor time: not the time in which other programs have the core."""
    start = time.process_time()
    step = engine.step()
    return step, time.process_time() - start


if __name__ == "__main__":
    main()
