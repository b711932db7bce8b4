"""From the start of the process to the first token, part by part, as `python example.py` goes through it.

    python -m benchmarks.cold_start
    python -m benchmarks.cold_start --model path/or/hub-id --repeats 5 --json out.json

Each run is a process of its own. The first has an empty cache folder, so that it compiles the CPU kernels (`first
ever`); the others find them. Prints medians in seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TINY_QWEN3 = ROOT / "nanovllm" / "assets" / "tiny-qwen3"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a cold start by part.")
    parser.add_argument("--model", default=str(TINY_QWEN3))
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--started-at", type=float, help=argparse.SUPPRESS)  # in the measured process
    args = parser.parse_args()
    if args.started_at:
        print(json.dumps(start(args.model, args.load_format, args.started_at)))
        return
    with tempfile.TemporaryDirectory() as cache:
        first, *later = [run(args, cache) for _ in range(args.repeats + 1)]
    medians = {part: median(times[part] for times in later) for part in first}
    print(f"| {'part':<32} | first ever | later, median of {args.repeats} |\n|---|---:|---:|")
    for part in first:
        print(f"| {part:<32} | {first[part]:.2f} | {medians[part]:.2f} |")
    print(f"| {'sum':<32} | {sum(first.values()):.2f} | {sum(medians.values()):.2f} |")
    if args.json:
        from benchmarks.common import describe_machine

        report = {"model": Path(args.model).name, "first_ever_s": first, "later_s": medians}
        args.json.write_text(json.dumps({**report, "machine": describe_machine("cpu")}, indent=2) + "\n")


def run(args: argparse.Namespace, cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.cold_start", "--model", args.model, "--load-format", args.load_format]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    result = subprocess.run(
        [*command, "--started-at", str(time.time())], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    if result.returncode:
        raise RuntimeError(f"the measured process failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def start(model: str, load_format: str, started_at: float) -> dict[str, float]:
    """In a fresh process: seconds by part."""
    parts = {"Python itself": time.time() - started_at}
    last = time.perf_counter()

    def read(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        parts[part] = now - last
        last = now

    import torch  # noqa: F401

    read("import torch")
    from nanovllm import LLM, SamplingParams
    from nanovllm.engine import assembly

    read("import nanovllm")
    inner: dict[str, float] = {}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            inner[part] = time.perf_counter() - begin
            return result

        return wrapped

    assembly.load_tokenizer = timed("import transformers, tokenizer", assembly.load_tokenizer)
    llm = LLM(model, load_format=load_format)
    read("rest of the engine")
    inner |= {f"engine: {part}": seconds for part, seconds in llm.engine.startup.seconds.items()}
    parts["rest of the engine"] -= sum(inner.values())
    parts |= inner
    prompt = [1, 2, 3] if llm.engine.tokenizer is None else "What is paged attention?"
    next(iter(llm.stream([prompt], SamplingParams(temperature=0, max_tokens=8))))
    read("first token")
    return parts


if __name__ == "__main__":
    main()
