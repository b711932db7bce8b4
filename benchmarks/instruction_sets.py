"""Compare the processor time of `bench.py` and of the ladder with all instructions of the processor and only AVX2.

    python -m benchmarks.instruction_sets --json benchmarks/results/cpu-avx2-limit.json
    python -m benchmarks.instruction_sets --works W2 --turns 5 --json …   # other works of the file stay

The runs of a turn follow one another, and each turn begins with the other set. Each run has one thread, and its
processor time counts, so other programs on the machine change the ratio little. `benchmarks.pretend` limits a run to
AVX2. The processor, its caches and its memory are the same, so a ratio does not describe an older processor.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import describe_machine
from nanovllm_extras.cli.machine_report import machine_class

ROOT = Path(__file__).resolve().parent.parent
WORKS = {
    "W": ["bench.py", "--workload", "W"],
    "W2": ["bench.py", "--workload", "W2"],
    "batch": ["bench.py", "--num-requests", "8", "--input-len", "64", "64", "--output-len", "16", "16"],
    "ladder": ["-m", "labs.ladder", "--num-requests", "8"],
}
SETS = {"all": [], "avx2": ["-m", "benchmarks.pretend", "avx2", sys.executable]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures and the machine to this file")
    args = parser.parse_args()
    print(machine_class(), flush=True)
    results: dict[str, Any] = {"works": {}}
    if args.json and args.json.exists():
        results = json.loads(args.json.read_text(encoding="utf-8"))
    results |= {"machine": describe_machine("cpu") | {"cpu_threads": 1}, "class": machine_class()}
    for work in args.works:
        turns = [measure_turn(work, turn) for turn in range(args.turns)]
        ratios = compare(turns)
        results["works"][work] = {"command": ["python", *WORKS[work]], "turns": turns, "avx2 / all": ratios}
        for name, ratio in ratios.items():
            print(f"{work:<8}{name:<28}{ratio:>6.2f} times the processor time with AVX2 only", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure_turn(work: str, turn: int) -> dict[str, dict[str, float]]:
    """Return the processor seconds of each program of `work`, for each set of instructions."""
    order = list(SETS) if turn % 2 == 0 else list(SETS)[::-1]
    return {name: measure(work, name) for name in order}


def measure(work: str, name: str) -> dict[str, float]:
    """Run `work` with one set of instructions. Return processor seconds: of `bench.py`, or of each ladder program."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        command = [sys.executable, *SETS[name], *WORKS[work], "--json", str(file)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(file.read_text(encoding="utf-8"))
    if "processor_s" in report:
        return {"bench.py": report["processor_s"]}
    return {one["name"]: round(one["processor_seconds"], 3) for one in report["programs"]}


def compare(turns: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return the median over the turns of the ratio of processor times, by program."""
    ratios: dict[str, list[float]] = {}
    for turn in turns:
        for (program, limited), full in zip(turn["avx2"].items(), turn["all"].values(), strict=True):
            ratios.setdefault(program, []).append(limited / full)
    return {program: round(median(values), 2) for program, values in ratios.items()}


if __name__ == "__main__":
    main()
