"""Measure how fast the engine is next to another busy process, compared with a quiet machine.

    python -m benchmarks.busy [--workloads W W2] [--first 8] [--rounds 3] [--processes 1] [--json out.json]

Each round serves a workload twice, on the quiet machine and while other processes use a whole core each. Prints the
medians in output tokens per second, and the median of the rounds' ratios. W has only its first requests, so that a
round takes less than a minute. The default model has the shape of Qwen3-0.6B and random weights.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import QWEN3_06B, ModelShape, Workload, describe_machine, named_workload, resolve_dtype_name
from nanovllm_extras import LLM, SamplingParams

SPIN = "print(flush=True)\nwhile True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=QWEN3_06B, help="a folder with a config.json")
    parser.add_argument("--workloads", nargs="+", choices=["W", "W2", "W3"], default=["W", "W2"])
    parser.add_argument("--first", type=int, default=8, help="how many requests of each workload (default: 8)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="how many processes are busy (default: 1)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "max_model_len": 1024}
    options["enable_prefix_caching"] = False  # a second run computes the same prompts again
    llm = LLM(args.model, dtype=resolve_dtype_name("auto", args.model), **options)
    report: dict[str, object] = {"machine": describe_machine("cpu"), "processes": args.processes}
    print("| workload | quiet | beside a busy process | ratio |\n|---|---:|---:|---:|")
    for name in args.workloads:
        workload = named_workload(name, ModelShape.from_folder(args.model).vocab_size).first(args.first)
        serve(llm, workload)  # the first run allocates memory
        quiet, busy = [], []
        for _ in range(args.rounds):
            quiet.append(serve(llm, workload))
            with busy_processes(args.processes):
                busy.append(serve(llm, workload))
        ratio = median(b / q for q, b in zip(quiet, busy, strict=True))
        print(f"| {name} | {median(quiet):.1f} | {median(busy):.1f} | {ratio:.0%} |", flush=True)
        report[name] = {"quiet": quiet, "busy": busy}
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def serve(llm: LLM, workload: Workload) -> float:
    """Return the output tokens per second."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.output_lens]
    start = time.perf_counter()
    llm.generate(workload.prompts, params, use_tqdm=False)
    return round(workload.num_output_tokens / (time.perf_counter() - start), 2)


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that each use a whole core until the `with` block ends."""
    command = [sys.executable, "-c", SPIN]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout
            process.stdout.readline()  # it has started
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    main()
