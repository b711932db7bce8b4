"""Compare engines with a model whose layers mostly keep recurrent states: prefill, decode, memory of a sequence.

    python -m benchmarks.hybrids                                   # nanovllm and transformers
    python -m benchmarks.hybrids --engines nanovllm hf llamacpp --python llamacpp=/its/python
    python -m benchmarks.hybrids --num-seqs 1 8 32 --prompt-len 1024 --repeats 1 --json out.json

The model has the shape of Qwen3.5-0.8B and random weights. Each run is a process, `benchmarks.offline`, and the engines
take turns as in `benchmarks.cpu`. There are two kinds of work:

    prefill of P tokens       one request of P tokens, which samples one token. Its time is the time to first token
    decode of N sequences     N requests of 32 tokens. The time of a step is the median time per output token

Each cell has the median time of the runs, and the share of the roofline (`roofline.py`): the least time that the
machine needs for this work, divided by the time that the engine needed. An engine that cannot load the model is named
with its reason, and the others are measured.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import FOLDER, QWEN3_06B, ModelShape
from benchmarks.cpu import Plan, engine_name, parse_arg, parse_env, parse_python, run_undisturbed
from benchmarks.peers import PEERS

QWEN35_08B = FOLDER / "configs" / "qwen3.5-0.8b"  # only a config.json; the weights are random
CONTEXT_LENS = (1024, 8192, 32768)
SHORT_LEN = 32  # of the prompts before decodes
BYTES_PER_VALUE = 2  # bfloat16


@dataclass
class HybridPlan(Plan):
    """How to run each engine. The title of a workload says what it is: `prefill of 512 tokens`."""

    model: Path = QWEN35_08B
    num_steps: int = 32

    def command(self, engine: str, workload: str, report: Path) -> list[str]:
        kind, _, number, _ = workload.split()
        num_requests, input_len, output_len = int(number), SHORT_LEN, 1 + self.num_steps  # prefill samples one token
        if kind == "prefill":
            num_requests, input_len, output_len = 1, int(number), 1
        sizes = {"num-requests": [num_requests], "input-len": [input_len] * 2, "output-len": [output_len] * 2}
        sizes["max-model-len"] = [input_len + output_len]
        options = ["--engine", engine_name(engine), "--model", str(self.model), "--json", str(report)]
        for name, values in sizes.items():
            options += [f"--{name}", *map(str, values)]
        python = self.pythons.get(engine, sys.executable)
        return [python, "-m", "benchmarks.offline", *options, *self.bench_args.get(engine, [])]


def main() -> None:
    args = parse_args()
    plan = HybridPlan(args.engines, dict(args.python), quiet_timeout_s=args.quiet_timeout, retries=args.retries,
                      model=args.model, num_steps=args.steps)  # fmt: skip
    for engine, (name, value) in args.env:
        plan.environments.setdefault(engine, {})[name] = value
    for engine, option in args.arg:
        plan.bench_args.setdefault(engine, []).append(option)
    workloads = [f"prefill of {args.prompt_len} tokens", *(f"decode of {n} sequences" for n in args.num_seqs)]
    runs, reasons = measure(plan, workloads, args.repeats)
    rows = summarize(runs, workloads)
    print(format_times([engine for engine in args.engines if engine not in reasons], rows))
    for engine, reason in reasons.items():
        print(f"{engine} is not in the table: {reason}")
    memory = {folder.name: memory_of_sequence(folder) for folder in (args.model, QWEN3_06B)}
    print(format_memory(memory))
    if args.json:
        report = {"rows": rows, "not_measured": reasons, "memory_mib": memory, "runs": runs}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare engines with a model that keeps recurrent states, on a CPU.")
    parser.add_argument("--engines", nargs="+", default=["nanovllm", "hf"], metavar="ENGINE",
                        help=f"nanovllm, {', '.join(PEERS)}; NAME@LABEL for several settings of one")  # fmt: skip
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8], help="sequences that decode (default: 1 8)")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens of the prompt (default: 512)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a run (default: 32)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each engine and workload (default: 3)")
    parser.add_argument("--model", type=Path, default=QWEN35_08B, help="another folder with a config.json")
    parser.add_argument("--json", type=Path, help="write all runs and the tables to this file")
    parser.add_argument("--quiet-timeout", type=float, default=60.0, metavar="S",
                        help="how long to wait for other work on the machine to end (default: 60)")  # fmt: skip
    parser.add_argument("--retries", type=int, default=2, metavar="N",
                        help="how often to repeat a disturbed run (default: 2)")  # fmt: skip
    parser.add_argument("--python", type=parse_python, action="append", default=[], metavar="ENGINE=PATH",
                        help="interpreter of an engine's environment (default: this one)")  # fmt: skip
    parser.add_argument("--env", type=parse_env, action="append", default=[], metavar="ENGINE:NAME=VALUE")
    parser.add_argument("--arg", type=parse_arg, action="append", default=[], metavar="ENGINE:ARG",
                        help="argument for benchmarks.offline, such as nanovllm:--no-prefix-caching")  # fmt: skip
    args = parser.parse_args()
    for name in ("prompt_len", "steps", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    if unknown := {engine_name(engine) for engine in args.engines} - {"nanovllm", *PEERS}:
        parser.error(f"--engines must be of nanovllm, {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    return args


# ---- times


def measure(plan: HybridPlan, workloads: list[str], repeats: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run all engines in turns. Returns the runs, and why engines were left out.

    Raises RuntimeError if nanovllm fails.
    """
    runs: list[dict[str, Any]] = []
    reasons: dict[str, str] = {}
    for repeat in range(repeats):
        for workload in workloads:
            for engine in plan.engines if repeat % 2 == 0 else plan.engines[::-1]:
                if engine in reasons:
                    continue
                try:
                    run = run_undisturbed(plan, engine, workload, repeat)
                except RuntimeError as error:
                    if engine_name(engine) == "nanovllm":
                        raise
                    reasons[engine] = str(error).strip().splitlines()[-1]  # of a traceback: the error
                    continue
                runs.append({**run, "workload": workload})
    return runs, reasons


def summarize(runs: list[dict[str, Any]], workloads: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by workload and engine, the median milliseconds of a prompt or step, and the share of the roofline."""
    rows: dict[str, dict[str, dict[str, float]]] = {workload: {} for workload in workloads}
    for workload, row in rows.items():
        own = [run for run in runs if run["workload"] == workload]
        for engine in dict.fromkeys(run["label"] for run in own):
            times = [time_of(run) for run in own if run["label"] == engine]
            bounds = [bound_of(run) for run in own if run["label"] == engine]
            shares = [bound / time for bound, time in zip(bounds, times, strict=True)]
            row[engine] = {"ms": round(1e3 * median(times), 2), "share": round(median(shares), 4)}
    return rows


def time_of(run: dict[str, Any]) -> float:
    """Return the seconds of a prompt, or of a decode step."""
    return run["ttft_s"]["p50"] if run["workload"].startswith("prefill") else run["tpot_s"]["p50"]


def bound_of(run: dict[str, Any]) -> float:
    """Return the least seconds of a prompt, or of a decode step."""
    bound = run["roofline"]
    if run["workload"].startswith("prefill"):
        return bound["prefill_s"]
    return bound["decode_s"] / bound["num_decode_steps"]


def format_times(engines: list[str], rows: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [f"| milliseconds (share of the roofline) | {' | '.join(engines)} |", "|---|" + "---:|" * len(engines)]
    for workload, row in rows.items():
        cells = [f"{row[engine]['ms']:.1f} ({row[engine]['share']:.0%})" for engine in engines]
        lines.append(f"| {workload} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- memory


def memory_of_sequence(folder: Path) -> list[float]:
    """Return the MiB of one sequence in bfloat16, K and V and states, for each of `CONTEXT_LENS`."""
    shape = ModelShape.from_folder(folder)
    states = shape.delta.bytes_per_sequence(BYTES_PER_VALUE) if shape.delta is not None else 0
    return [(states + n * shape.kv_values_per_token * BYTES_PER_VALUE) / 2**20 for n in CONTEXT_LENS]


def format_memory(memory: dict[str, list[float]]) -> str:
    lines = [f"| MiB of a sequence | {' | '.join(f'{n:,} tokens' for n in CONTEXT_LENS)} |"]
    lines.append("|---|" + "---:|" * len(CONTEXT_LENS))
    lines += [f"| {name} | {' | '.join(f'{size:,.0f}' for size in sizes)} |" for name, sizes in memory.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
