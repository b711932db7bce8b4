"""Measure Ray Serve and replicas: the server without Ray compared with `nanovllm serve --ray`, in turns.

    python -m benchmarks.ray_serve                          # one replica, two replicas, and one server, on two cores
    python -m benchmarks.ray_serve --part haproxy           # Serve's HAProxy in place of its proxy in Python
    python -m benchmarks.ray_serve --part intervals         # several intervals between the messages of a stream
    python -m benchmarks.ray_serve --part prefixes          # routing by prefix and by load: what is found in caches

Each server is one process of the bundled model, or several processes with Ray. Idle servers use little CPU time.
`nanovllm bench serve` sends the loads, as in `benchmarks.serving`. Processor time is that of all processes of a server,
including Ray's own, in microseconds per output token, as Linux counts it.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import serving
from benchmarks.common import describe_machine
from benchmarks.started_server import Running, running
from nanovllm_extras.bench.bench_options import make_parser
from nanovllm_extras.bench.benchmark import run_loads

RAY = ["--ray", "--ray-num-cpus", "1", "--ray-num-replicas"]
FIGURES = ("output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p50_tpot_ms", "us_per_token")
PREFIXES = ["--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "1024"]
START_S = 180


class Server(NamedTuple):
    """A command of `nanovllm serve`, and threads of its engine (with Ray, of each)."""

    words: list[str]
    num_threads: int = 1
    by_haproxy: bool = False


PARTS = {
    "replicas": {
        "alone": Server([]),
        "alone, 2 threads": Server([], 2),
        "ray, 1 replica": Server([*RAY, "1"]),
        "ray, 2 replicas": Server([*RAY, "2"]),
    },
    "intervals": {
        "alone": Server([]),
        **{f"ray, {ms} ms": Server([*RAY, "1", "--ray-stream-batching-interval-ms", str(ms)]) for ms in (0, 5, 20, 50)},
    },
    "haproxy": {
        "alone": Server([]),
        "ray, 1 replica": Server([*RAY, "1"]),
        "ray, 1 replica, HAProxy": Server([*RAY, "1"], by_haproxy=True),
    },
    "prefixes": {
        "prefix": Server([*RAY, "2", "--ray-routing", "prefix"]),
        "load": Server([*RAY, "2", "--ray-routing", "load"]),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ray Serve beside the server alone.")
    parser.add_argument("--part", choices=sorted(PARTS), default="replicas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second, where latencies are measured")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.range_ratio = 0.25
    machine = describe_machine("cpu", ("ray", "fastapi", "uvicorn")) | {"cores": os.cpu_count()}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(start(one)) for name, one in PARTS[args.part].items()}
        runs = prefix_runs(servers, args) if args.part == "prefixes" else load_runs(servers, args)
    print(format_runs(runs, list(servers)))
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "runs": runs}, indent=2) + "\n", encoding="utf-8")


def start(server: Server) -> contextlib.AbstractContextManager[Running]:
    """Start the server, and wait until it serves."""
    variables = {"OMP_NUM_THREADS": str(server.num_threads), "RAY_USAGE_STATS_ENABLED": "0"}
    variables["RAY_SERVE_ENABLE_HA_PROXY"] = str(int(server.by_haproxy))
    words = ("serve", "--device", "cpu", "--disable-log-requests", *server.words)
    return running(*words, variables=variables, start_s=START_S)


def load_runs(servers: dict[str, Running], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure at saturation and at `args.rate`, in the order A B, then B A."""
    for one in servers.values():
        serving.measure(one.url, args, 8, seed=1000)
    runs = []
    for repeat in range(args.repeats):
        for rate in ("inf", str(args.rate)):
            for name in list(servers)[:: 1 if repeat % 2 == 0 else -1]:
                before = cpu_seconds(servers[name].process.pid)
                # prompts of their own: those of other rounds are in prefix caches
                seed = 2 * repeat + (rate == "inf")
                run = serving.measure(servers[name].url, args, args.num_prompts, seed, rate)
                spent = cpu_seconds(servers[name].process.pid) - before
                runs.append(figures(name, rate, run) | {"us_per_token": 1e6 * spent / run["total_output_tokens"]})
                print(runs[-1], flush=True)
    return runs


def prefix_runs(servers: dict[str, Running], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prompts that share prefixes of 1,024 tokens, ten for each prefix: the share found in caches."""
    runs = []
    for repeat in range(args.repeats):
        for name in list(servers)[:: 1 if repeat % 2 == 0 else -1]:
            url, before = servers[name].url, hits(servers[name].url)
            words = [*PREFIXES, "--prefix-repetition-suffix-len", "64", "--prefix-repetition-output-len", "16"]
            words += ["--prefix-repetition-num-prefixes", str(args.num_prompts // 10)]
            run = bench(url, words, args, repeat)
            queried, found = (now - then for now, then in zip(hits(url), before, strict=True))
            runs.append(figures(name, str(args.rate), run) | {"hit_rate": found / queried})
            print(runs[-1], flush=True)
    return runs


def bench(url: str, words: list[str], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    options = {"base-url": url, "num-prompts": args.num_prompts, "request-rate": args.rate, "seed": seed}
    words = [*words, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    with contextlib.redirect_stdout(io.StringIO()):
        (run,) = asyncio.run(run_loads(make_parser().parse_args([*words, "--ignore-eos", "--disable-tqdm"])))
    return run


def hits(url: str) -> tuple[float, float]:
    """Prompt tokens of all replicas: looked for in prefix caches, and found."""
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        text = answer.read().decode()
    queries, found = (
        sum(map(float, re.findall(rf"^nanovllm:prefix_cache_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)))
        for name in ("queries", "hits")
    )
    return queries, found


def figures(name: str, rate: str, run: dict[str, Any]) -> dict[str, Any]:
    if run["failed"]:
        raise RuntimeError(f"{name}: {run['failed']} requests failed")
    return {"server": name, "rate": rate, **{key: run[key] for key in FIGURES if key in run}}


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its living descendants."""
    children: dict[int, list[int]] = {}
    seconds = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
            seconds[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total, todo = 0.0, [pid]
    while todo:
        one = todo.pop()
        total += seconds.get(one, 0.0)
        todo += children.get(one, [])
    return total


def format_runs(runs: list[dict[str, Any]], names: list[str]) -> str:
    """Medians, and ratios to the first server: medians of those of each round."""
    lines = []
    for rate in dict.fromkeys(run["rate"] for run in runs):
        keys = [key for key in runs[0] if key not in ("server", "rate")]
        lines += [f"requests per second: {rate}", f"| | {' | '.join(keys)} |", f"|---|{'---:|' * len(keys)}"]
        by_name = {name: [run for run in runs if (run["server"], run["rate"]) == (name, rate)] for name in names}
        for name, own in by_name.items():
            cells = []
            for key in keys:
                pairs = [run[key] / first[key] for run, first in zip(own, by_name[names[0]], strict=True) if first[key]]
                cells.append(f"{median(run[key] for run in own):.4g} ({median(pairs) if pairs else 0:.2f})")
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
