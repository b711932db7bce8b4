"""Measure each part of the time from the start of the process to the first token, as `python example.py` runs.

    python -m benchmarks.cold_start
    python -m benchmarks.cold_start --model path/or/hub-id --repeats 5 --json out.json
    python -m benchmarks.cold_start --serve          # of `nanovllm serve`, as a client sees it

Each run is a separate process. The first has an empty cache folder, so it compiles the CPU kernels (`first ever`); the
others find them in the cache. Prints medians in seconds.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
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
    parser.add_argument("--serve", action="store_true", help="start a server, and ask it over HTTP")
    parser.add_argument("--started-at", type=float, help=argparse.SUPPRESS)  # in the measured process
    args = parser.parse_args()
    if args.started_at:
        print(json.dumps(start(args.model, args.load_format, args.started_at)))
        return
    with tempfile.TemporaryDirectory() as cache:
        measure = run_server if args.serve else run
        first, *later = [measure(args, cache) for _ in range(args.repeats + 1)]
    medians = {part: median(times[part] for times in later) for part in first}
    print(f"| {'part':<44} | first ever | later, median of {args.repeats} |\n|---|---:|---:|")
    for part in first:
        print(f"| {part:<44} | {first[part]:.2f} | {medians[part]:.2f} |")
    print(f"| {'sum':<44} | {sum(first.values()):.2f} | {sum(medians.values()):.2f} |")
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


def run_server(args: argparse.Namespace, cache: str) -> dict[str, float]:
    """Return the seconds from the start of `nanovllm serve` to the first token of a streamed answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nanovllm_extras", "serve", args.model, "--load-format", args.load_format]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    begin = time.perf_counter()
    with subprocess.Popen(
        [*command, "--port", str(port)], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_until(lambda: server.poll() is not None or answers(port, any_status=True))
            listens = time.perf_counter()
            wait_until(lambda: server.poll() is not None or answers(port))
            is_ready = time.perf_counter()
            read_first_token(port)
            first_token = time.perf_counter()
        finally:
            server.terminate()
    return {
        "until the port answers: Python, imports": listens - begin,
        "until it serves: tokenizer, kernels, weights": is_ready - listens,
        "first token, over HTTP": first_token - is_ready,
    }


def wait_until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        time.sleep(0.01)


def answers(port: int, any_status: bool = False) -> bool:
    """Return whether a server answers and has loaded its model; with `any_status`, whether one answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except urllib.error.HTTPError:
        return any_status
    except OSError:
        return False


def read_first_token(port: int) -> None:
    body = {"prompt": "What is paged attention?", "max_tokens": 8, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    with contextlib.closing(urllib.request.urlopen(request, timeout=60)) as response:
        first = response.readline()
    if not first.startswith(b"data: {") or b"choices" not in first:
        raise RuntimeError(f"the server's first event is {first!r}")


def start(model: str, load_format: str, started_at: float) -> dict[str, float]:
    """Return the seconds of each part, in a new process."""
    parts = {"Python itself": time.time() - started_at}
    last = time.perf_counter()

    def read(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        parts[part] = now - last
        last = now

    import torch  # noqa: F401

    read("import torch")
    from nanovllm_extras import LLM, SamplingParams
    from nanovllm_extras.engine import full_engine

    read("import nanovllm_extras")
    inner: dict[str, float] = {}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            inner[part] = time.perf_counter() - begin
            return result

        return wrapped

    full_engine.load_tokenizer = timed("import transformers, tokenizer", full_engine.load_tokenizer)
    llm = LLM(model, load_format=load_format)
    read("rest of the engine")
    inner |= {f"engine: {part}": seconds for part, seconds in llm.engine.parts.startup_seconds.items()}
    parts["rest of the engine"] -= sum(inner.values())
    parts |= inner
    prompt = [1, 2, 3] if llm.engine.tokenizer is None else "What is paged attention?"
    next(iter(llm.stream([prompt], SamplingParams(temperature=0, max_tokens=8))))
    read("first token")
    return parts


if __name__ == "__main__":
    main()
