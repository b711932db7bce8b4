"""Measure an engine that shares a process with an event loop: how late the loop runs, and how fast streams are.

    python -m benchmarks.async_engine                  # 200 streams of the bundled model
    python -m benchmarks.async_engine --json out.json

One process measures three things in turns, and prints the medians: streams offline (`LLM.stream`), the same streams
through `AsyncLLM`, and how late the event loop is meanwhile. `late` is the time between the moment when a task of the
loop is due and the moment when it runs, sampled every 2 ms.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from statistics import median

from benchmarks.common import describe_machine
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM

QUESTION = "What is a block table?"
EVERY_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what an engine in a thread costs an event loop.")
    parser.add_argument("--num-streams", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    with LLM(TINY_QWEN3) as llm, AsyncLLM(TINY_QWEN3) as async_llm:
        prompts = [f"{QUESTION} {i}" for i in range(args.num_streams)]
        turns = []
        for _ in range(args.turns + 1):  # the first warms up
            offline = stream_offline(llm, prompts, params)
            shared, late = asyncio.run(stream_shared(async_llm, prompts, params))
            turns.append((offline, shared, *late))
    names = ("offline_tokens_per_s", "shared_tokens_per_s", "late_p50_ms", "late_p99_ms", "late_max_ms")
    report = {name: round(median(values), 2) for name, values in zip(names, zip(*turns[1:], strict=True), strict=True)}
    report["shared_over_offline"] = round(median(turn[1] / turn[0] for turn in turns[1:]), 3)
    report |= {"num_streams": args.num_streams, "machine": describe_machine("cpu", ("torch",))}
    for name, value in report.items():
        print(f"{name:<22} {value}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def stream_offline(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    """Return the tokens per second."""
    start = time.perf_counter()
    outputs = [output for output in llm.stream(prompts, params) if output.finished]
    return num_tokens(outputs) / (time.perf_counter() - start)


async def stream_shared(llm: AsyncLLM, prompts: list[str], params: SamplingParams) -> tuple[float, list[float]]:
    """Return the tokens per second, and how late the loop was in ms: median, 99th percentile, maximum."""

    async def consume(prompt: str) -> list:
        return [output async for output in llm.generate(prompt, params) if output.finished]

    late: list[float] = []
    sampling = asyncio.create_task(sample_lateness(late))
    start = time.perf_counter()
    outputs = await asyncio.gather(*[consume(prompt) for prompt in prompts])
    elapsed = time.perf_counter() - start
    sampling.cancel()
    late.sort()
    quantiles = [late[len(late) // 2], late[int(len(late) * 0.99)], late[-1]]
    return num_tokens([one[0] for one in outputs]) / elapsed, [1000 * one for one in quantiles]


async def sample_lateness(late: list[float]) -> None:
    while True:
        due = time.perf_counter() + EVERY_S
        await asyncio.sleep(EVERY_S)
        late.append(time.perf_counter() - due)


def num_tokens(outputs: list) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)


if __name__ == "__main__":
    main()
