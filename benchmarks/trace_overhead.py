"""Measure the cost of a recording: steps of decodes with and without one, in turns.

    python -m benchmarks.trace_overhead
    python -m benchmarks.trace_overhead --num-seqs 256 --rounds 40

Two engines with the bundled model decode the same requests in turns of several steps. Prints the median time of a step
of each, and the time that the recording adds. "off again" is a second engine without a recording, and shows the
difference between two equal engines.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.common import describe_machine
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a recording adds to a decode step.")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30, help="turns of each engine")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        times = measure({"off": None, "off again": None, "on": path}, args.num_seqs, args.rounds, args.steps)
        num_bytes = path.stat().st_size
    off = median(times["off"])
    report = {name: round(1e3 * median(values), 4) for name, values in times.items()}
    ratios = {
        name: round(median([a / b for a, b in zip(values, times["off"], strict=True)]) - 1, 4)
        for name, values in times.items()
        if name != "off"
    }
    print(f"a step of {args.num_seqs} decodes, milliseconds: {report}; median of the turns' ratios: {ratios}")
    print(f"recording adds {1e6 * off * ratios['on']:.0f} microseconds; "
          f"{num_bytes / (args.rounds * args.steps):.0f} bytes a step")  # fmt: skip
    if args.json:
        machine = describe_machine("cpu")
        args.json.write_text(json.dumps({"machine": machine, "ms": report, "ratios": ratios}, indent=2) + "\n")


def measure(traces: dict[str, Path | None], num_seqs: int, rounds: int, num_steps: int) -> dict[str, list[float]]:
    """For each engine the seconds of a step, one value for each turn: the median of the turn's steps."""
    engines = {name: start(trace, num_seqs, rounds * num_steps + 20) for name, trace in traces.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds):
        names = list(engines) if turn % 2 else list(engines)[::-1]
        for name in names:
            seconds = []
            for _ in range(num_steps):
                begin = time.perf_counter()
                step = engines[name].engine.step()
                seconds.append(time.perf_counter() - begin)
                assert step.num_decode_tokens == num_seqs
            times[name].append(median(seconds))
    for llm in engines.values():
        llm.shutdown()
    return times


def start(trace: Path | None, num_seqs: int, max_tokens: int) -> LLM:
    """Return an engine whose prompts are computed, so that all of its requests decode."""
    llm = LLM(TINY_QWEN3, trace=trace, max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * 32)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i in range(num_seqs):
        llm.engine.add_request(str(i), [(7 * i + j) % 1000 for j in range(16)], params, stream=False)
    while llm.engine.step().num_prefill_tokens:
        pass
    return llm


if __name__ == "__main__":
    main()
