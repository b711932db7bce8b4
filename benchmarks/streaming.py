"""Measure the cost of output per step for many streams: detokenization, and making outputs.

    python -m benchmarks.streaming
    python -m benchmarks.streaming --against a6f8fb2 --json out.json   # and another commit, in turns

The bundled model runs. The figure is `StepOutput.output_time_s` plus the time in which a user reads the outputs,
because some fields are made when they are read. It is the median over steps in which all requests decode and each gives
an output with its text and tokens so far. `--against` unpacks another commit of this repository and measures it with
this file, in turns with the working tree, on the same machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["What is paged attention?", "What is the KV cache?", "What is chunked prefill?", "Who are you?"]


def read_text(output) -> None:
    _ = output.finished, output.outputs[0].text


def read_token_ids(output) -> None:
    _ = output.finished, output.outputs[0].token_ids


def read_all(output) -> None:
    _ = output.finished, output.outputs[0].text, output.outputs[0].token_ids, output.metrics


KINDS: dict[str, tuple] = {  # name -> fields of SamplingParams, and what the user reads of each output
    "text": ({}, read_text),
    "text, 2 stop strings": ({"stop": ["no such text", "\n\n\n\n"]}, read_text),
    "token ids alone": ({"detokenize": False}, read_token_ids),
    "text, all is read": ({}, read_all),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the output of many streams costs a step.")
    parser.add_argument("--num-streams", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="of all kinds, in turns; the best median is reported")
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit too, and print the ratio")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_only:  # in a process of its own
        print(json.dumps(measure(args.num_streams, args.output_len)))
        return
    report = compare(args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def compare(args: argparse.Namespace) -> dict[str, object]:
    """Microseconds a step, by commit and kind; printed as a table."""
    with tempfile.TemporaryDirectory() as folder:
        trees = {"working tree": ROOT}
        if args.against:
            unpack(args.against, Path(folder))
            trees[args.against] = Path(folder)
        rounds = [{name: run_apart(tree, args) for name, tree in trees.items()} for _ in range(args.rounds)]
    best = {name: {kind: min(one[name][kind] for one in rounds) for kind in KINDS} for name in trees}
    for kind in KINDS:
        line = f"{kind:<22}" + "".join(f"{name:>14} {best[name][kind]:7.0f} us" for name in trees)
        ratio = f"{best['working tree'][kind] / best[args.against][kind]:9.2f}" if args.against else ""
        print(line + ratio)
    from benchmarks.common import describe_machine

    return {
        "num_streams": args.num_streams,
        "output_len": args.output_len,
        "microseconds_a_step": best,
        "machine": describe_machine("cpu"),
    }


def unpack(commit: str, folder: Path) -> None:
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)


def run_apart(tree: Path, args: argparse.Namespace) -> dict[str, float]:
    """The figures of one tree, from a process that imports it and nothing of another."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure-only"]
    command += ["--num-streams", str(args.num_streams), "--output-len", str(args.output_len)]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=env, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(num_streams: int, output_len: int) -> dict[str, float]:
    """Microseconds a step, by kind."""
    from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

    llm = LLM(TINY_QWEN3, max_num_seqs=num_streams, max_num_batched_tokens=64 * num_streams)
    prompts = llm.render_chat([[{"role": "user", "content": prompt}] for prompt in PROMPTS])
    return {
        kind: measure_kind(
            llm.engine,
            prompts,
            [SamplingParams(max_tokens=output_len, ignore_eos=True, seed=i, **fields) for i in range(num_streams)],
            read,
        )
        for kind, (fields, read) in KINDS.items()
    }


def measure_kind(engine, prompts: list, params: list, read: Callable) -> float:
    for i, one in enumerate(params):
        engine.add_request(str(i), prompts[i % len(prompts)], one)
    times = []
    while engine.has_unfinished_requests():
        step = engine.step()
        if step.num_decode_tokens == len(params):
            assert len(step.outputs) == len(params)
            start = time.monotonic()
            for output in step.outputs:
                read(output)
            times.append(1e6 * (step.output_time_s + time.monotonic() - start))
    return round(median(times), 1)


if __name__ == "__main__":
    main()
