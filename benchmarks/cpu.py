"""Compare engines on a CPU: three workloads, served by the engines in turns, and the ratio of each pair of runs.

    python -m benchmarks.cpu --engines nanovllm vllm --python vllm=/path/to/its/python --repeats 3 --json out.json
    python -m benchmarks.cpu --engines hf llamacpp --python llamacpp=… --workloads W2 --env llamacpp:OMP_NUM_THREADS=2

Each run is a process, `benchmarks.offline`, with the interpreter of the engine's environment (cpu_peers.md describes
these). The order alternates (A B, B A, …), so that a disturbance of the machine slows both engines. The reported ratio
is the median of the paired ratios, which a disturbance changes less than a ratio of medians. If other processes use the
machine, a run waits for them for a limited time, and is repeated if they disturb it. The JSON has the CPU time used by
others.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = ("W", "W2", "W3")
SPEED = "output_tokens_per_second"
QUIET_CORES = 0.15  # in cores: a run counts as undisturbed while other processes use less


@dataclass
class Plan:
    """How to run each engine: interpreter, environment variables, arguments of `benchmarks.offline`."""

    engines: list[str]
    pythons: dict[str, str]
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    bench_args: dict[str, list[str]] = field(default_factory=dict)
    quiet_timeout_s: float = 60.0
    retries: int = 0

    def command(self, engine: str, workload: str, report: Path) -> list[str]:
        python = self.pythons.get(engine, sys.executable)
        options = ["--engine", engine_name(engine), "--workload", workload, "--json", str(report)]
        return [python, "-m", "benchmarks.offline", *options, *self.bench_args.get(engine, [])]


def engine_name(engine: str) -> str:
    """Return the name without its label: `vllm@default` is vllm, measured with settings of its own."""
    return engine.partition("@")[0]


def main() -> None:
    args = parse_args()
    plan = Plan(args.engines, dict(args.python), quiet_timeout_s=args.quiet_timeout, retries=args.retries)
    for engine, (name, value) in args.env:
        plan.environments.setdefault(engine, {})[name] = value
    for engine, option in args.arg:
        plan.bench_args.setdefault(engine, []).append(option)
    for engine in {*plan.pythons, *plan.environments, *plan.bench_args} - set(plan.engines):
        raise ValueError(f"--python, --env or --arg names {engine!r}, but --engines has only {', '.join(plan.engines)}")
    runs: list[dict[str, Any]] = []
    for repeat in range(args.repeats):
        for workload in args.workloads:
            for engine in plan.engines if repeat % 2 == 0 else plan.engines[::-1]:
                runs.append(run_undisturbed(plan, engine, workload, repeat))
                if args.json:  # after every run, so that an interrupted series keeps its results
                    write_results(args.json, plan, runs)
    print(format_table(plan.engines, runs))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare engines on a CPU.")
    parser.add_argument(
        "--engines", nargs="+", required=True, help="of benchmarks.offline; NAME@LABEL for several settings of one"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all runs and the summary to this file")
    parser.add_argument("--quiet-timeout", type=float, default=60.0, metavar="S",
                        help="how long to wait for other work on the machine to end (default: 60)")  # fmt: skip
    parser.add_argument("--retries", type=int, default=2, metavar="N",
                        help="how often to repeat a disturbed run (default: 2)")  # fmt: skip
    pair = parser.add_argument_group("per engine; may be repeated")
    pair.add_argument("--python", type=parse_python, action="append", default=[], metavar="ENGINE=PATH",
                      help="its interpreter (default: this one)")  # fmt: skip
    pair.add_argument("--env", type=parse_env, action="append", default=[], metavar="ENGINE:NAME=VALUE")
    pair.add_argument("--arg", type=parse_arg, action="append", default=[], metavar="ENGINE:ARG",
                      help="argument for benchmarks.offline, such as vllm:--enforce-eager")  # fmt: skip
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats must be >= 1, got {args.repeats}")
    return args


def parse_python(text: str) -> tuple[str, str]:
    return split(text, "=", "ENGINE=PATH")


def parse_env(text: str) -> tuple[str, tuple[str, str]]:
    engine, setting = split(text, ":", "ENGINE:NAME=VALUE")
    return engine, split(setting, "=", "ENGINE:NAME=VALUE")


def parse_arg(text: str) -> tuple[str, str]:
    return split(text, ":", "ENGINE:ARG")


def split(text: str, separator: str, form: str) -> tuple[str, str]:
    left, found, right = text.partition(separator)
    if not left or not found:
        raise argparse.ArgumentTypeError(f"must be {form}, got {text!r}")
    return left, right


def run_undisturbed(plan: Plan, engine: str, workload: str, repeat: int) -> dict[str, Any]:
    """Return the first undisturbed run or, after too many tries, the least disturbed one."""
    tries: list[dict[str, Any]] = []
    while len(tries) <= plan.retries and (not tries or tries[-1]["cores_used_by_others"] > QUIET_CORES):
        tries.append(run_once(plan, engine, workload, repeat))
    return min(tries, key=lambda run: run["cores_used_by_others"])


def run_once(plan: Plan, engine: str, workload: str, repeat: int) -> dict[str, Any]:
    """Run `benchmarks.offline`. Return its report with the label, the repeat and the cores used by others."""
    wait_until_quiet(plan.quiet_timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.json", Path(folder) / "log.txt"
        environment = os.environ | plan.environments.get(engine, {})
        command = plan.command(engine, workload, report)
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            others = watch_others(process)
        if process.returncode or not report.exists():
            raise RuntimeError(f"{' '.join(command)} failed:\n{log.read_text(encoding='utf-8')[-4000:]}")
        run = {"label": engine, "repeat": repeat, "cores_used_by_others": others, **json.loads(report.read_text())}
    fraction = f", {run['roofline_fraction']:.1%} of the roofline" if "roofline_fraction" in run else ""
    print(f"{workload:<3} {engine:<16} {run[SPEED]:8.2f} output tokens/s{fraction}; others used {others} cores",
          file=sys.stderr, flush=True)  # fmt: skip
    return run


def watch_others(process: subprocess.Popen[bytes]) -> float:
    """Wait for the process. Return how many cores, on average, were busy with other processes than its family."""
    start, busy = time.monotonic(), cpu_seconds()
    own: dict[int, float] = {}
    while process.poll() is None:
        own |= family_cpu_seconds(process.pid)  # repeatedly, because a process that has ended is no longer listed
        time.sleep(0.5)
    elapsed = time.monotonic() - start
    return round(max(cpu_seconds() - busy - sum(own.values()), 0.0) / elapsed, 2)


def family_cpu_seconds(root: int) -> dict[int, float]:
    """Return the CPU seconds of a process and its descendants, by process id; empty on other systems than Linux."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text(encoding="utf-8").rpartition(")")[2].split()  # a name may contain spaces
        except OSError:
            continue  # the process has ended meanwhile
        pid = int(file.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family = {root}
    while found := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= found
    return {pid: seconds[pid] for pid in family if pid in seconds}


def wait_until_quiet(timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and busy_cores(2.0) > QUIET_CORES:
        pass


def busy_cores(seconds: float) -> float:
    """Return the cores in use over the next seconds; 0 on other systems than Linux."""
    before = cpu_seconds()
    time.sleep(seconds)
    return (cpu_seconds() - before) / seconds


def cpu_seconds() -> float:
    """Return the seconds that all cores together have been busy since boot, stolen time included."""
    try:
        ticks = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except OSError:
        return 0.0
    return (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and waiting for disks


def summarize(engines: list[str], runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, by workload, the median and the range of each engine's speed, and the medians of the paired ratios."""
    summary: dict[str, dict[str, Any]] = {}
    for workload in dict.fromkeys(run["workload"] for run in runs):
        speeds = {engine: speeds_by_repeat(runs, engine, workload) for engine in engines}
        row: dict[str, Any] = {"median": {e: round(median(s.values()), 2) for e, s in speeds.items() if s}}
        row["spread"] = {e: [min(s.values()), max(s.values())] for e, s in speeds.items() if s}
        row["ratio"] = {}
        for a, b in combinations(engines, 2):
            if ratios := [speeds[a][i] / speeds[b][i] for i in speeds[a] if i in speeds[b]]:
                row["ratio"][f"{a} / {b}"] = round(median(ratios), 3)
        summary[workload] = row
    return summary


def speeds_by_repeat(runs: list[dict[str, Any]], engine: str, workload: str) -> dict[int, float]:
    return {run["repeat"]: run[SPEED] for run in runs if (run["label"], run["workload"]) == (engine, workload)}


def format_table(engines: list[str], runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table: median, lowest and highest output tokens/s of each engine, and the ratios."""
    summary = summarize(engines, runs)
    pairs = list(dict.fromkeys(pair for row in summary.values() for pair in row["ratio"]))
    lines = ["| workload | " + " | ".join([*engines, *pairs]) + " |", "|---" * (1 + len(engines) + len(pairs)) + "|"]
    for workload, row in summary.items():
        cells = [f"{row['median'][e]} ({row['spread'][e][0]}-{row['spread'][e][1]})" for e in engines]
        cells += [f"{row['ratio'][pair]}×" for pair in pairs]
        lines.append(f"| {workload} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_results(path: Path, plan: Plan, runs: list[dict[str, Any]]) -> None:
    """Write all reports, which have hardware, versions and commit, with the settings and the summary."""
    settings = {
        engine: {"env": plan.environments.get(engine, {}), "args": plan.bench_args.get(engine, [])}
        for engine in plan.engines
    }
    content = {"settings": settings, "summary": summarize(plan.engines, runs), "runs": runs}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
