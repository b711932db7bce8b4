"""Measure what a single user waits for: each token of a stream, and the first token after a very long prompt.

    python -m benchmarks.gpu.latency --attention-backend triton

A single stream is memory-bound: each token reads all weights and the K and V of its context once. Its limit is the time
to read these bytes at the measured rate of a copy. The limit of the first token is the time of its arithmetic at the
rate of large products.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common import DTYPE_BYTES, QWEN3_06B, ModelShape, resolve_dtype_name
from benchmarks.roofline import Rates, measure_rates_apart, roofline
from nanovllm_extras import LLM, SamplingParams

REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one stream, and the first token of a long prompt.")
    parser.add_argument("--model", type=Path, default=QWEN3_06B)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--long-len", type=int, default=32_768)
    parser.add_argument("--rates", type=float, nargs=2, metavar=("GB/S", "GFLOP/S"), help="of the machine, if known")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    dtype = resolve_dtype_name("auto", args.model)
    rates = Rates(*(1e9 * r for r in args.rates)) if args.rates else measure_rates_apart(dtype, args.device)
    llm = LLM(args.model, load_format="dummy", device=args.device, attention_backend=args.attention_backend,
              max_model_len=max(args.long_len, args.input_len + args.output_len) + 16, max_num_seqs=4,
              enable_prefix_caching=False)  # fmt: skip
    report = measure(llm, args, ModelShape.from_folder(args.model), DTYPE_BYTES[dtype], rates)
    report["engine_description"] = llm.engine.description
    print(json.dumps(report, indent=1))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1))


def measure(llm: LLM, args: argparse.Namespace, shape: ModelShape, num_bytes: int, rates: Rates) -> dict[str, Any]:
    stream = [serve(llm, args.input_len, args.output_len) for _ in range(REPEATS + 1)][1:]  # the first warms up
    first = [serve(llm, args.long_len, 1) for _ in range(REPEATS + 1)][1:]
    bound = roofline(shape, [args.input_len], [args.output_len], 0, num_bytes, rates)
    least_ms = 1e3 * bound.decode_s / bound.num_decode_steps
    ms = 1e3 * median(output.tpot for output in stream)
    gaps = sorted(gap for output in stream for gap in output.inter_token_latencies)
    ttft_s = median(output.ttft for output in first)
    least_ttft_s = roofline(shape, [args.long_len], [1], 0, num_bytes, rates).prefill_s
    return {
        "input_len": args.input_len,
        "output_len": args.output_len,
        "ms_per_token": round(ms, 4),
        "p99_gap_ms": round(1e3 * gaps[int(0.99 * len(gaps))], 4) if gaps else None,
        "least_ms_per_token": round(least_ms, 4),
        "fraction_of_limit": round(least_ms / ms, 4),
        "short_ttft_ms": round(1e3 * mean(output.ttft for output in stream), 3),
        "long_len": args.long_len,
        "long_ttft_s": round(ttft_s, 4),
        "least_long_ttft_s": round(least_ttft_s, 4),
    }


def serve(llm: LLM, input_len: int, output_len: int) -> Any:
    """The metrics of a single request. Its tokens are awaited one by one."""
    prompt = [i % 1000 for i in range(input_len)]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    *_, last = llm.stream([prompt], params)
    return last.metrics


if __name__ == "__main__":
    main()
