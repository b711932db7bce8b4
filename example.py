"""Offline generation, and what it cost.

    python example.py                                    # the bundled model answers a few questions
    python example.py --prompt "What is a block table?"  # ask it yourself; may be given several times
    python example.py --model Qwen/Qwen3-0.6B            # a local folder, or a hub id

All prompts are answered at once, in one continuously batched engine. The table shows what a serving engine is judged
by: how soon the first token came (TTFT), the pace after it (TPOT), and how little of the KV cache was wasted.
"""

import argparse
import textwrap
from statistics import median

from nanovllm import LLM, TINY_QWEN3, EngineStats, RequestOutput, SamplingParams

PROMPTS = [
    "What is paged attention?",
    "Why does an LLM server use continuous batching?",
    "What is the KV cache?",
    "What is chunked prefill?",
    "What is 27 + 58?",
    "Who are you?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model a few questions at once.")
    parser.add_argument("--model", default=TINY_QWEN3, help="folder or hub id (default: the bundled model)")
    parser.add_argument("--prompt", action="append", help="a question; may be given several times")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 always takes the likeliest token (default)")
    parser.add_argument("--max-tokens", type=int, default=320, help="longest answer, in tokens (default: %(default)s)")
    args = parser.parse_args()

    prompts = args.prompt or PROMPTS
    sampling_params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with LLM(model=args.model) as llm:
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(conversations, sampling_params)
        stats = llm.get_stats()
    print_answers(prompts, outputs)
    print_costs(outputs, stats)


def print_answers(prompts: list[str], outputs: list[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        answer = textwrap.fill(completion.text.strip(), width=100, initial_indent="  ", subsequent_indent="  ")
        cut = " [cut at --max-tokens]" if completion.finish_reason == "length" else ""
        print(f"\n> {prompt}\n{answer}{cut}")


def print_costs(outputs: list[RequestOutput], stats: EngineStats) -> None:
    ttfts = [output.metrics.ttft for output in outputs if output.metrics.ttft is not None]
    tpots = [output.metrics.tpot for output in outputs if output.metrics.tpot is not None]
    rows = [
        ("requests", f"{len(outputs)}"),
        ("tokens", f"{stats.prompt_tokens} in, {stats.generation_tokens} out, {stats.steps} steps"),
        ("time to first token", f"{1000 * median(ttfts):.1f} ms (median)"),
        ("time per output token", f"{1000 * median(tpots):.1f} ms (median)" if tpots else "-"),
        ("prefill throughput", rate(stats.prefill_step_tokens, stats.prefill_step_time_s)),
        ("decode throughput", rate(stats.decode_step_tokens, stats.decode_step_time_s)),
        ("prefix-cache hit rate", f"{stats.prefix_cache_hit_rate:.0%} of the prompt tokens"),
        ("KV blocks", f"{stats.num_kv_blocks}, up to {stats.peak_used_blocks} of them used at a time"),
        ("KV waste", f"{stats.waste:.1%} of the reserved slots held no token"),
    ]
    print()
    for name, value in rows:
        print(f"{name:<22} {value}")


def rate(num_tokens: int, time_s: float) -> str:
    return f"{num_tokens / time_s:,.0f} tokens/s" if time_s else "-"


if __name__ == "__main__":
    main()
