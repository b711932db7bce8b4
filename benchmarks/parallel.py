"""Measure tensor parallelism on a CPU: the cost of a step's message, and N processes compared with N threads.

    python -m benchmarks.parallel                    # the message of a step of 256 decodes
    python -m benchmarks.parallel --turns 3          # and workload W, in turns

In each turn `benchmarks.offline` runs the workload twice: in one process with N threads, and in N ranks with one thread
each. A ratio above 1 means that the ranks are faster. `python -m benchmarks.all_reduce` times the collectives.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import describe_machine
from benchmarks.step_overhead import start_decoding
from nanovllm.batch import Batch
from nanovllm_extras.parallel.messages import HEADER_BYTES, Header, pack_step, receive, unpack_step


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what ranks cost.")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--context-len", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--turns", type=int, default=0, help="of the workload (default: none)")
    parser.add_argument("--workload", default="W")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N requests of the workload")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)  # the process that messages are sent to
    args = parser.parse_args()
    if args.answer is not None:
        answer(socket.socket(fileno=args.answer))
        return
    report: dict[str, Any] = {"machine": describe_machine("cpu"), "messages": [], "turns": []}
    for context_len in args.context_len:
        report["messages"].append(measure_message(args.num_seqs, context_len))
        print(json.dumps(report["messages"][-1]))
    for _ in range(args.turns):
        report["turns"].append(run_turn(args))
        print(json.dumps(report["turns"][-1]), flush=True)
    if report["turns"]:
        print(f"ranks against threads: {median(turn['ratio'] for turn in report['turns']):.3f} (median)")
    print(report["machine"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


# ---- the message of a step


def measure_message(num_seqs: int, context_len: int, num_rounds: int = 200) -> dict[str, Any]:
    """Return medians in microseconds: to pack the message, and until another process has unpacked and confirmed it."""
    batch = decodes(num_seqs, context_len)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.parallel", "--answer", str(theirs.fileno())]
    pack_us, there_us = [], []
    with subprocess.Popen(command, pass_fds=(theirs.fileno(),)), ours, theirs:
        receive(ours, 1)  # it runs
        for _ in range(num_rounds):
            start = time.perf_counter()
            message = pack_step(batch, has_draw=True)
            packed = time.perf_counter()
            ours.sendall(message.data)
            receive(ours, 1)
            pack_us.append(1e6 * (packed - start))
            there_us.append(1e6 * (time.perf_counter() - packed))
        theirs.close()
    names = {"num_decodes": num_seqs, "context_len": context_len, "kilobytes": message.nbytes / 1000}
    return {**names, "pack_us": round(median(pack_us), 1), "there_and_back_us": round(median(there_us), 1)}


def decodes(num_seqs: int, context_len: int) -> Batch:
    """Return the batch of a step in which all sequences decode."""
    engine = start_decoding(num_seqs, context_len)
    engine.step()
    batch: Batch = engine.runner.batch
    return batch


def answer(peer: socket.socket) -> None:
    """Unpack each message, and answer with one byte."""
    peer.sendall(b"x")
    while True:
        try:
            header = Header(*np.frombuffer(receive(peer, HEADER_BYTES), dtype=np.int32).tolist())
        except ConnectionError:
            return
        unpack_step(header, np.frombuffer(receive(peer, 4 * header.num_values), dtype=np.int32))
        peer.sendall(b"x")


# ---- the workload


def run_turn(args: argparse.Namespace) -> dict[str, float]:
    """Return the output tokens per second of both, and their ratio."""
    threads = run_bench(args, ranks=1, threads=args.ranks)
    ranks = run_bench(args, ranks=args.ranks, threads=1)
    return {"threads": round(threads, 2), "ranks": round(ranks, 2), "ratio": round(ranks / threads, 3)}


def run_bench(args: argparse.Namespace, ranks: int, threads: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "benchmarks.offline", "--workload", args.workload, "--json", str(file)]
        command += ["--no-roofline", "--tensor-parallel-size", str(ranks)]
        if args.first:
            command += ["--first", str(args.first)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(file.read_text(encoding="utf-8"))["output_tokens_per_second"])


if __name__ == "__main__":
    main()
