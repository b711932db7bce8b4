"""Read an engine's metrics for Prometheus with much memory and with little, in the order in which one looks at them.

    python -m labs.demos.metrics
    python -m labs.demos.metrics --num-requests 40 --num-kv-blocks 60

Both engines get the same requests at once, each with the same 32 tokens of instructions and 24 of its own. A
server has these numbers at `/metrics`; there, Prometheus computes rates and quantiles from two readings.
"""

import argparse

from nanovllm import TINY_QWEN3
from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.vllm.vllm_metrics import Counter, Gauge, Histogram

QUESTIONS = {
    "num_preemptions": "is memory too small?",
    "request_queue_time_seconds": "do requests wait to be admitted?",
    "prefix_cache_hits": "are prompts shared?",
    "request_prefill_time_seconds": "do prompts wait for each other?",
    "inter_token_latency_seconds": "does the text flow?",
}


def measure(num_requests: int, num_kv_blocks: int) -> dict[str, float]:
    """Return the engine's metrics: counters and gauges as they are, and the mean of each histogram."""
    llm = LLM(TINY_QWEN3, block_size=16, num_kv_blocks=num_kv_blocks)
    prompts = [[*range(100, 132), *[200 + number] * 24] for number in range(num_requests)]
    llm.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("nanovllm:")
        if isinstance(metric, Histogram):
            found[name] = metric.sum / max(metric.count, 1)
        elif isinstance(metric, (Counter, Gauge)):
            found[name] = metric.value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Metrics of an engine with much memory and with little.")
    parser.add_argument("--num-requests", type=int, default=24)
    parser.add_argument("--num-kv-blocks", type=int, default=32, help="of the engine with little memory")
    args = parser.parse_args()
    measure(1, 64)  # the first requests of a process are slower
    much, little = measure(args.num_requests, 1024), measure(args.num_requests, args.num_kv_blocks)
    print(f"{'':<30}{'1024 blocks':>12}{f'{args.num_kv_blocks} blocks':>12}   the question")
    for name, question in QUESTIONS.items():
        is_time = name.endswith("_seconds")
        cells = [f"{1000 * one[name]:.1f} ms" if is_time else f"{one[name]:,.0f}" for one in (much, little)]
        print(f"{name:<30}" + "".join(f"{cell:>12}" for cell in cells) + f"   {question}")


if __name__ == "__main__":
    main()
