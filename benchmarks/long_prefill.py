"""Measure the TTFT of short prompts behind a very long one, with and without a limit on the long prompt's chunks.

    python -m benchmarks.long_prefill

One prompt of 32,768 tokens arrives, followed by short ones. Without `long_prefill_token_threshold` the long prompt
takes the whole budget of each step until it is computed. With it, the short prompts are prefilled in the same steps,
and the first token of the long prompt comes somewhat later. The model has two layers and random weights
(`configs/qwen3-2layers`), so that the benchmark takes a minute on a CPU.
"""

import argparse
import time
from pathlib import Path
from statistics import median

from benchmarks.common import describe_machine
from nanovllm_extras import Config, LLMEngine, SamplingParams

MODEL = Path(__file__).parent / "configs" / "qwen3-2layers"


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT behind a long prompt.")
    parser.add_argument("--long-len", type=int, default=32_768)
    parser.add_argument("--short-len", type=int, default=64)
    parser.add_argument("--num-short", type=int, default=16)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--thresholds", type=int, nargs="+", default=[0, 1024])
    args = parser.parse_args()
    for i, threshold in enumerate(args.thresholds):
        engine = LLMEngine(
            Config(
                model=MODEL,
                load_format="dummy",
                dtype="float32",
                max_num_batched_tokens=args.budget,
                long_prefill_token_threshold=threshold,
                enable_prefix_caching=False,
            )
        )
        if i == 0:
            print(describe_machine(str(engine.runner.device)))
        long_ttft, short_ttft = measure(engine, args)
        print(
            f"threshold {threshold:>6}: first token after {short_ttft:.2f} s for the short prompts (median), "
            f"{long_ttft:.2f} s for the long one"
        )


def measure(engine: LLMEngine, args: argparse.Namespace) -> tuple[float, float]:
    """Return (TTFT of the long prompt, median TTFT of the short prompts) in seconds."""
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request("warm-up", [1] * args.short_len, params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.add_request("long", [i % 4096 for i in range(args.long_len)], params)
    for i in range(args.num_short):
        engine.add_request(f"short-{i}", [i] * args.short_len, params)
    start = time.monotonic()
    ttfts = {}
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            ttfts[output.request_id] = time.monotonic() - start
    return ttfts.pop("long"), median(ttfts.values())


if __name__ == "__main__":
    main()
