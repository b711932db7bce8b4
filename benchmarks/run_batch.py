"""Measure a batch with and without Ray: rows and tokens per second, in turns, on the bundled model.

    python -m benchmarks.run_batch                     # 3,000 rows, 3 turns, two replicas; needs the extra `ray`
    python -m benchmarks.run_batch --json out.json

Each turn runs the command four times, as separate processes: one engine with all cores and without Ray, then
`--replicas N`, each with few rows and with all rows. `whole` is all rows divided by the whole time of the command, with
imports, models and Ray's start. `running` excludes the start: it is the difference of the rows of two runs divided by
the difference of their times. (Ray writes parts late, and several at once, so the times of the parts are not used.) The
machine must be idle.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.common import describe_machine

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("running_rows_per_s", "running_tokens_per_s", "whole_rows_per_s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a batch with Ray against one engine without.")
    parser.add_argument("--num-rows", type=int, default=3000)
    parser.add_argument("--few-rows", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rows-per-part", type=int, default=50)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    turns = [(run(args, None), run(args, args.replicas)) for _ in range(args.turns)]
    report: dict[str, object] = {}
    for i, name in enumerate(NAMES):
        alone, together = (median(turn[j][i] for turn in turns) for j in (0, 1))
        ratio = median(turn[1][i] / turn[0][i] for turn in turns)
        report[name] = {"one_engine": round(alone, 1), "ray": round(together, 1), "ratio": round(ratio, 3)}
        print(f"{name:<22} {alone:10.1f} without Ray {together:10.1f} with {args.replicas} replicas   {ratio:.2f}")
    given = {"num_rows": args.num_rows, "max_tokens": args.max_tokens, "rows_per_part": args.rows_per_part}
    report |= {**given, "max_num_seqs": args.max_num_seqs, "replicas": args.replicas, "turns": args.turns}
    report["machine"] = describe_machine("cpu", ("ray", "pyarrow")) | {"load_average": os.getloadavg()[0]}
    print(report["machine"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def run(args: argparse.Namespace, replicas: int | None) -> tuple[float, ...]:
    """`NAMES` of one way to run."""
    few, many = (seconds(args, replicas, num_rows) for num_rows in (args.few_rows, args.num_rows))
    running = (args.num_rows - args.few_rows) / (many - few)
    return running, running * args.max_tokens, args.num_rows / many


def seconds(args: argparse.Namespace, replicas: int | None, num_rows: int) -> float:
    """Of one run of the command."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = ({"prompt": f"What is a block table? {i}"} for i in range(num_rows))
        (folder / "in.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        given = ["-i", folder / "in.jsonl", "-o", folder / "out", "--prompt-column", "prompt", "--chat"]
        given += ["--temperature", 0, "--max-tokens", args.max_tokens, "--rows-per-part", args.rows_per_part]
        given += ["--max-num-seqs", args.max_num_seqs]
        given += ["--body", '{"ignore_eos": true}', *(["--replicas", replicas] if replicas else [])]
        start = time.perf_counter()
        command = [sys.executable, "-m", "nanovllm_extras", "run-batch", *map(str, given)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
