"""`nanovllm what-if run.jsonl --block-size 32`: the same requests with other options, without the model.

nanovllm what-if run.jsonl                                  # repeat the recording: the same steps
nanovllm what-if run.jsonl --block-size 8,16,32,64          # a table; the pool keeps its memory
nanovllm what-if run.jsonl --extension short_first.py       # a scheduler of one's own
nanovllm what-if run.jsonl --num-blocks 100 -o other.jsonl  # write the simulated run, for `nanovllm view`
nanovllm what-if --trace FILE --clock run.jsonl             # a trace of Mooncake or Azure in place of the recording
"""

import argparse
import json
import sys
import traceback
from itertools import product
from pathlib import Path
from typing import Any

from nanovllm.extension import find_parts
from nanovllm_extras.what_if.answer import find_answer
from nanovllm_extras.what_if.clock import Clock, Machine
from nanovllm_extras.what_if.comparison import compare, compare_on_trace, fit_to
from nanovllm_extras.what_if.options import Options, Parts
from nanovllm_extras.what_if.recording_file import read
from nanovllm_extras.what_if.report import write_report
from nanovllm_extras.what_if.run import replay
from nanovllm_extras.what_if.trace_requests import plan_trace

PARTS = ("scheduler_cls", "block_manager_cls", "prefix_cache_cls")
PARTS_OF_A_MODEL = ("runner_cls", "sampler_cls", "attention_backend", "models", "extra_args")
"""An extension may have them, too. They compute, so a run without the model does not use them."""
MACHINE = ("bandwidth", "flops", "weight_bytes", "kv_bytes_per_token", "flops_per_token", "step_overhead")
SIZES = ("block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len")
MAX_RUNS = 100


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanovllm what-if",
        description="Run the scheduler again on recorded requests with other options, without the model.",
    )
    parser.add_argument("recording", type=Path, nargs="?", help="a file that LLM(…, trace=…) or --trace wrote")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests of a service, in the form of Mooncake "
                        "(JSON lines) or Azure (CSV), in place of a recording")  # fmt: skip
    options = parser.add_argument_group("options to change; several values, such as 8,16,32, make a table")
    options.add_argument("--block-size", type=integers, metavar="N,…", help="without --num-blocks, the pool keeps its "
                         "memory: the number of blocks changes, too")  # fmt: skip
    options.add_argument("--num-blocks", "--num-kv-blocks", type=integers, metavar="N,…")
    options.add_argument("--max-num-batched-tokens", type=integers, metavar="N,…")
    options.add_argument("--max-num-seqs", type=integers, metavar="N,…")
    options.add_argument("--max-model-len", type=integers, metavar="N,…")
    options.add_argument("--prefix-caching", type=switches, dest="enable_prefix_caching", metavar="on,off")
    options.add_argument("--extension", metavar="FILE", help="a Python file, or the name of a module, with a scheduler,"
                         " a block manager or a prefix cache of your own")  # fmt: skip
    clock = parser.add_argument_group("how long a step takes; by default as in the recording")
    clock.add_argument("--clock", type=Path, metavar="RECORDING", help="fit the times of steps to this recording")
    clock.add_argument("--bandwidth", type=float, help="of a machine by hand: bytes per second")
    clock.add_argument("--flops", type=float, help="its floating-point operations per second")
    clock.add_argument("--weight-bytes", type=float, help="bytes of weights, which each step reads")
    clock.add_argument("--kv-bytes-per-token", type=float, help="bytes of K and V of a token (default: 0)")
    clock.add_argument("--flops-per-token", type=float, help="operations for a token (default: WEIGHT_BYTES, as for "
                       "weights of two bytes)")  # fmt: skip
    clock.add_argument("--step-overhead", type=float, help="seconds of each step in which the device waits")
    trace = parser.add_argument_group("of a trace")
    trace.add_argument("--num-requests", type=int, metavar="N", help="only the first N")
    trace.add_argument("--speed", type=float, default=1.0, help="divides the times between requests")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-o", "--output", type=Path, metavar="RECORDING", help="write the simulated run as a recording")
    return parser


def integers(text: str) -> list[int]:
    """Parse "8,16" -> [8, 16]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers such as 8 or 8,16,32, got {text!r}") from None


def switches(text: str) -> list[bool]:
    """Parse "on,off" -> [True, False]."""
    values = {"on": True, "off": False}
    if unknown := [part for part in text.split(",") if part not in values]:
        raise argparse.ArgumentTypeError(f"must be on, off or on,off, got {unknown[0]!r}")
    return [values[part] for part in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(arguments)
    if (args.recording is None) == (args.trace is None):
        parser.error("give a recording, or --trace FILE")
    parts = Parts()
    try:
        parts = read_parts(args.extension)
        found = answer(args, parts)
    except (ValueError, TypeError) as error:
        if is_from(error, parts):
            raise
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename} cannot be used: {error.strerror}")
    print(json.dumps(found, indent=2) if args.json else write_report(found))
    return 0


def is_from(error: Exception, parts: Parts) -> bool:
    """Return whether a class that is not the core's raised the error, so that its author needs the traceback."""
    own = {kind.__module__ for name, kind in vars(parts).items() if kind is not getattr(Parts, name)}
    return any(frame.f_globals["__name__"] in own for frame, _ in traceback.walk_tb(error.__traceback__))


def answer(args: argparse.Namespace, parts: Parts) -> dict[str, Any]:
    """Return the comparison that the arguments ask for. With `--output`, write the run with the changed options."""
    changes, machine = read_changes(args), read_machine(args)
    if args.clock is not None and (machine is not None or args.trace is None):
        raise ValueError("--clock fits the times of a trace to a recording; it cannot be combined with a recording or "
                         "a machine by hand")  # fmt: skip
    if args.trace is not None:
        return answer_for_trace(args, changes, parts, machine)
    if args.num_requests is not None or args.speed != 1.0:
        raise ValueError("--num-requests and --speed are for --trace; a recording has its own requests and times")
    if args.output is not None and len(changes) > 1:
        raise ValueError(f"--output writes one run, and these are {len(changes)}")
    run, texts = read(args.recording)
    if args.output is None:
        return compare(run, changes, machine, parts)
    found = find_answer(run, texts, changes[0], machine, parts)
    args.output.write_text(found["recording"], encoding="utf-8")
    figures: dict[str, Any] = found["figures"]
    return figures


def answer_for_trace(
    args: argparse.Namespace, changes: list[dict[str, Any]], parts: Parts, machine: Machine | None
) -> dict[str, Any]:
    if args.output is not None:
        raise ValueError("--output writes the run of a recording; a trace has no tokens to write")
    clock: Clock | None = machine
    base = Options()
    if args.clock is not None:
        run, _ = read(args.clock)
        clock, base = fit_to(run, replay(run)), run.options
    if clock is None:
        raise ValueError("a trace does not say how long steps take; give --clock RECORDING, or a machine by hand "
                         "(--bandwidth, --flops, --weight-bytes)")  # fmt: skip
    return compare_on_trace(lambda: plan_trace(args.trace, args.num_requests, args.speed), base, changes, clock, parts)


def read_changes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the options of each run: every combination of the values."""
    given = {name: getattr(args, name) for name in (*SIZES, "enable_prefix_caching") if getattr(args, name) is not None}
    changes = [dict(zip(given, values, strict=True)) for values in product(*given.values())]
    if len(changes) > MAX_RUNS:
        raise ValueError(f"the values make {len(changes)} runs; at most {MAX_RUNS} are compared")
    return changes


def read_parts(extension: str | None) -> Parts:
    """Import the extension that the command line names. Raises ValueError if it has no part that decides."""
    if extension is None:
        return Parts()
    found = find_parts(dict.fromkeys([*PARTS, *PARTS_OF_A_MODEL]), extension)
    own = {name: found[name] for name in PARTS if found[name] is not None}
    if not own:
        raise ValueError(f"{extension} must name one of {', '.join(PARTS)}: what computes is not used here")
    if unused := [name for name in PARTS_OF_A_MODEL[:-1] if found[name] is not None]:
        print(f"nanovllm what-if: {', '.join(unused)} of {extension} is not used: no model runs", file=sys.stderr)
    return Parts(**own)


def read_machine(args: argparse.Namespace) -> Machine | None:
    """Return the machine that the arguments describe, None if they describe none."""
    given = {name: getattr(args, name) for name in MACHINE if getattr(args, name) is not None}
    if not given:
        return None
    if missing := [name for name in MACHINE[:3] if name not in given]:
        raise ValueError(f"a machine by hand needs --{missing[0].replace('_', '-')}, too")
    return Machine(**given)
