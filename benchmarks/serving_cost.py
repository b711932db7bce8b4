"""Measure the cost of serving: the same streams over HTTP and offline, and the processor time of a streamed token.

    python -m benchmarks.serving_cost                      # 200 streams of the bundled model
    python -m benchmarks.serving_cost --streams 50 --output-len 100 --json out.json
    python -m benchmarks.serving_cost --burst 1000         # then also bursts of 1,000 short requests, of every kind

Client and server are separate processes on the same machine. Offline, `LLM.stream` does the same work in this process.
The parts are the server's main thread, in which the event loop runs (HTTP, JSON, server-sent events); its other
threads, of which one steps the engine and all compute; and the client. Linux counts their times.

A burst is a number of requests that arrive within one second, each over a connection of its own. Meanwhile another
process asks for `/health`, again over new connections; the longest of its waits is reported.
"""

import argparse
import asyncio
import contextlib
import io
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import describe_machine
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.bench.bench_options import make_parser
from nanovllm_extras.bench.benchmark import make_works, run_loads

ROOT = Path(__file__).resolve().parent.parent
TEXT = "What is a block table? "
MESSAGES = [{"role": "user", "content": 6 * TEXT}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8}),
    "chat, streamed": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, "stream": True}),
    "chat with tools": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, "tools": 5 * [TOOL]}),
    "chat in JSON": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 8, "response_format": {"type": "json_object"}},
    ),
    "completions": ("/v1/completions", {"prompt": 20 * TEXT, "max_tokens": 8}),
    "completions of 16 prompts": ("/v1/completions", {"prompt": 16 * [TEXT], "max_tokens": 2}),
    "echo with log-probabilities": (
        "/v1/completions",
        {"prompt": 20 * TEXT, "max_tokens": 1, "echo": True, "logprobs": 5},
    ),
    "embeddings": ("/v1/embeddings", {"input": 20 * TEXT}),
    "embeddings of 16 inputs": ("/v1/embeddings", {"input": 16 * [8 * TEXT]}),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": 8}),
    "tokenize": ("/tokenize", {"prompt": 20 * TEXT}),
}
"""The requests of a burst: path and body."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what serving costs compared with the same work offline.")
    parser.add_argument("--model", default=str(TINY_QWEN3))
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--burst", type=int, default=0, help="requests that arrive within a second; 0 is no burst")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    offline: list[float] = []
    served: list[dict[str, float]] = []
    with LLM(args.model) as llm, serving(args.model) as (url, pid):
        for repeat in range(args.repeats + 1):  # the first round warms up
            alone, through_http = run_offline(llm, args, repeat), run_served(url, pid, args, repeat)
            if repeat:
                offline.append(alone)
                served.append(through_http)
        bursts = {kind: run_burst(url, kind, args.burst) for kind in KINDS if args.burst}
    report = summarize(offline, served) | {f"/health, {kind}, max ms": one["max_ms"] for kind, one in bursts.items()}
    for name, value in report.items():
        print(f"{name:<40} {value:>10,.2f}")
    if args.json:
        runs = {"offline_tokens_per_second": offline, "served": served, "bursts": bursts}
        sizes = {name: getattr(args, name) for name in ("streams", "input_len", "output_len")}
        whole = {**report, **sizes, **runs, "model": Path(args.model).name, "machine": describe_machine("cpu")}
        args.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def load_options(args: argparse.Namespace, seed: int, url: str | None = None) -> argparse.Namespace:
    lengths = ["--random-input-len", args.input_len, "--random-output-len", args.output_len]
    options = ["--num-prompts", args.streams, *lengths, "--seed", seed, *(["--base-url", url] if url else [])]
    options += ["--ignore-eos", "--save-detailed", "--disable-tqdm"]
    return make_parser().parse_args(list(map(str, options)))


def run_offline(llm: LLM, args: argparse.Namespace, seed: int) -> float:
    """Output tokens per second of all streams together."""
    works = make_works(load_options(args, seed), args.streams, seed)
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    start = time.perf_counter()
    for _ in llm.stream([work.prompt_token_ids for work in works], params):
        pass
    return args.streams * args.output_len / (time.perf_counter() - start)


def run_served(url: str, pid: int, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Output tokens per second, and microseconds of processor time for each, by part."""
    before = thread_seconds(pid)
    with contextlib.redirect_stdout(io.StringIO()):
        (run,) = asyncio.run(run_loads(load_options(args, seed, url)))
    after = thread_seconds(pid)
    num_tokens = args.streams * args.output_len
    if run["total_output_tokens"] != num_tokens:
        raise RuntimeError(f"{run['total_output_tokens']} tokens came, and {num_tokens} were asked for")
    used = {part: seconds - before.get(part, 0.0) for part, seconds in after.items()}
    used["client"] = run["client_cpu_seconds"]
    per_token = {part: 1e6 * seconds / num_tokens for part, seconds in used.items()}
    num_chunks = sum(1 + len(itls) for itls in run["itls"])
    pace = {"tokens_per_second": run["output_throughput"], "chunks_per_token": num_chunks / num_tokens}
    return {**pace, "p50_itl_ms": run["p50_itl_ms"], "p99_itl_ms": run["p99_itl_ms"], **per_token}


def run_burst(url: str, kind: str, num_requests: int) -> dict[str, Any]:
    """Return how long `/health` took during a burst of requests of one kind, and the statuses of these requests."""
    port = int(url.rpartition(":")[2])
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    burst = context.Process(target=send_burst, args=(port, kind, num_requests, answers))
    burst.start()
    waits: list[float] = []
    while answers.empty() and burst.is_alive():
        start = time.perf_counter()
        with urllib.request.urlopen(f"{url}/health", timeout=60):
            waits.append(1000 * (time.perf_counter() - start))
        time.sleep(0.01)
    seconds, statuses = answers.get(timeout=60)
    burst.join()
    return {"max_ms": max(waits), "p50_ms": median(waits), "seconds": seconds, "statuses": statuses}


def send_burst(port: int, kind: str, num_requests: int, answers: Any) -> None:
    """Send requests within one second, and put the time until all are answered and the number of each status."""
    path, body = KINDS[kind]
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    async def ask(start_s: float) -> str:
        await asyncio.sleep(start_s)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer[9:12].decode()

    async def ask_all() -> Counter[str]:
        return Counter(await asyncio.gather(*(ask(i / num_requests) for i in range(num_requests))))

    start = time.perf_counter()
    statuses = asyncio.run(ask_all())
    answers.put((time.perf_counter() - start, dict(statuses)))


def summarize(offline: list[float], served: list[dict[str, float]]) -> dict[str, float]:
    ratios = [run["tokens_per_second"] / alone for run, alone in zip(served, offline, strict=True)]
    parts = {f"µs per token, {part}": median(run[part] for run in served) for part in served[0] if "_" not in part}
    return {
        "offline, tokens/s": median(offline),
        "served, tokens/s": median(run["tokens_per_second"] for run in served),
        "served / offline": median(ratios),
        "chunks per token": median(run["chunks_per_token"] for run in served),
        "ITL p50, ms": median(run["p50_itl_ms"] for run in served),
        "ITL p99, ms": median(run["p99_itl_ms"] for run in served),
        **parts,
    }


def thread_seconds(pid: int) -> dict[str, float]:
    """Processor time that the process has used, by part; Linux."""
    seconds = {"event loop": 0.0, "engine": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds = int((task / "schedstat").read_text(encoding="utf-8").split()[0])
        seconds["event loop" if task.name == str(pid) else "engine"] += nanoseconds / 1e9
    return seconds


@contextlib.contextmanager
def serving(model: str) -> Iterator[tuple[str, int]]:
    """URL and process of a server that is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "nanovllm_extras", "serve", model, "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.05)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
