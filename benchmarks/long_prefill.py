"""Short prompts behind a very long one: their time to first token, with and without a cap on what one prompt gets.

    python -m benchmarks.long_prefill

One prompt of 32,768 tokens arrives, and short ones right after it. Without `long_prefill_token_threshold` the long one
takes each step's whole budget until it is computed; with it, the short ones are prefilled beside it, for a somewhat
later first token of the long one. A model of two layers with dummy weights (`configs/qwen3-2layers`), so that the whole
takes a minute on a CPU.
"""

import argparse
import time
from pathlib import Path
from statistics import median

from benchmarks.common import describe_machine
from nanovllm import Config, LLMEngine, SamplingParams

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
    """(TTFT of the long prompt, median TTFT of the short ones) in seconds."""
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
