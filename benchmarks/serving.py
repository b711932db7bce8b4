"""Compare servers in turns: throughput at saturation, and latencies at half of that rate.

    python -m benchmarks.serving --server nanovllm=http://127.0.0.1:8000 --server vllm=http://127.0.0.1:8001 \\
        --repeats 3 --json out.json

Start the servers first (see cpu_peers.md), all with the same model and on the same machine; idle servers use no CPU
time. `nanovllm bench serve` sends the loads. The rate of the second part is half of the lowest saturation rate, the
same for all servers. Ratios are medians of paired ratios, of the first server to each other server.
"""

import argparse
import asyncio
import contextlib
import io
import json
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import describe_machine
from nanovllm_extras.bench.bench_options import make_parser, parse_pair
from nanovllm_extras.bench.benchmark import run_loads

SATURATION = "output_throughput"
LATENCIES = ("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="Servers side by side.")
    parser.add_argument("--server", type=parse_pair, action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=float, help="of the second part, if known; the first part is then left out")
    parser.add_argument("--first-seed", type=int, default=0, help="of the first round; each has its own requests")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=144, help="mean; lengths vary by --range-ratio")
    parser.add_argument("--output-len", type=int, default=80)
    parser.add_argument("--range-ratio", type=float, default=0.75)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    servers = dict(args.server)
    for url in servers.values():  # kernels are compiled for what they meet first
        measure(url, args, num_prompts=4, seed=1000)
    runs = [] if args.rate else load_in_turns(servers, args, args.first_seed, "inf")
    rate = args.rate or half_of_slowest(runs, list(servers))
    # with requests of its own: those of the first part are in prefix caches
    runs += load_in_turns(servers, args, args.first_seed + args.repeats, str(rate))
    summary = summarize(runs, list(servers))
    print(format_table(runs, list(servers), summary, rate))
    if args.json:
        versions = {name: version_of(url) for name, url in servers.items()}
        report = {"half_rate": rate, "summary": summary, "versions": versions, "runs": runs}
        report["machine"] = describe_machine("cpu")
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def version_of(url: str) -> str | None:
    """Return the answer of `GET /version`, which nanovllm and vLLM have, or None."""
    try:
        with urllib.request.urlopen(f"{url}/version", timeout=10) as answer:
            return json.load(answer)["version"]
    except (OSError, ValueError, KeyError):
        return None


def half_of_slowest(runs: list[dict[str, Any]], names: list[str]) -> float:
    """Half of the smallest rate at which requests were answered, in requests per second."""
    return round(min(median(run["request_throughput"] for run in of(runs, name)) for name in names) / 2, 3)


def load_in_turns(
    servers: dict[str, str], args: argparse.Namespace, first_seed: int, rate: str
) -> list[dict[str, Any]]:
    """Measure in the order A B, B A, …, so that a disturbance slows both. A round has the same requests for all."""
    runs = []
    for repeat in range(args.repeats):
        names = list(servers) if repeat % 2 == 0 else list(servers)[::-1]
        for name in names:
            run = measure(servers[name], args, args.num_prompts, seed=first_seed + repeat, rate=rate)
            runs.append({"server": name, "repeat": repeat, **run})
            print(f"{name}, {rate} per second: {run[SATURATION]:.1f} tokens/s, TTFT {run['p50_ttft_ms']:.0f} ms, "
                  f"ITL {run['p50_itl_ms']:.1f} ms", flush=True)  # fmt: skip
    return runs


def measure(url: str, args: argparse.Namespace, num_prompts: int, seed: int, rate: str = "inf") -> dict[str, Any]:
    """One load; every request has exactly its tokens."""
    options = {
        "base-url": url,
        "num-prompts": num_prompts,
        "request-rate": rate,
        "random-input-len": args.input_len,
        "random-output-len": args.output_len,
        "random-range-ratio": args.range_ratio,
        "seed": seed,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with contextlib.redirect_stdout(io.StringIO()):
        (run,) = asyncio.run(run_loads(make_parser().parse_args([*words, "--ignore-eos", "--disable-tqdm"])))
    if run["failed"]:
        raise RuntimeError(f"{url}: {run['failed']} of {num_prompts} requests failed")
    return run


def of(runs: list[dict[str, Any]], name: str, rate: float | str = "inf") -> list[dict[str, Any]]:
    """The server's runs at this rate, in the order of the rounds."""
    found = [run for run in runs if run["server"] == name and run["request_rate"] == rate]
    return sorted(found, key=lambda run: run["repeat"])


def summarize(runs: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, float | None]]:
    """For each other server: the first server's figures over its own, medians of the rounds."""
    first, *others = names
    (rate,) = {run["request_rate"] for run in runs} - {"inf"}

    def ratio(key: str, other: str, rate: float | str) -> float | None:
        pairs = zip(of(runs, first, rate), of(runs, other, rate), strict=True)
        ratios = [ours[key] / theirs[key] for ours, theirs in pairs if theirs[key]]
        return median(ratios) if ratios else None  # where chunks arrive together, most gaps are zero

    return {
        f"{first} / {other}": {
            SATURATION: ratio(SATURATION, other, "inf"),
            **{key: ratio(key, other, rate) for key in LATENCIES},
        }
        for other in others
    }


def format_table(
    runs: list[dict[str, Any]], names: list[str], summary: dict[str, dict[str, float | None]], rate: float
) -> str:
    heads = ["output tokens/s, saturated", *(f"{key[4:-3].upper()} {key[:3]}, ms" for key in LATENCIES)]
    rows = [["", *heads], ["---", *["---:"] * len(heads)]]
    for name in names:
        saturated = median([run[SATURATION] for run in of(runs, name)] or [0.0])
        latencies = [median(run[key] for run in of(runs, name, rate)) for key in LATENCIES]
        rows.append([name, f"{saturated:.1f}", *(f"{value:.1f}" for value in latencies)])
    rows += [
        [pair, *("-" if value is None else f"{value:.2f}" for value in ratios.values())]
        for pair, ratios in summary.items()
    ]
    return f"latencies at {rate} requests per second\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
