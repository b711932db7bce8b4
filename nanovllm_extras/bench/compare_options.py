"""Define the options of `nanovllm bench compare`, and check all that can be checked before an engine starts."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm import TINY_QWEN3, config
from nanovllm_extras.bench.bench_options import parse_limit, parse_object, positive, positive_int, positive_or_zero
from nanovllm_extras.bench.compare_engine import PACKAGES, core_option_names
from nanovllm_extras.bench.compare_workloads import WORKLOADS
from nanovllm_extras.bench.trace_file import TraceRequest, read_trace
from nanovllm_extras.vllm.engine_args import EngineArgs, option_names

DESCRIPTION = """\
Measure an extension against the unchanged engine. FILE is what LLM(…, extension=FILE) takes: a module with your own
scheduler, cache, kernel, model, sampler or proposer. Without FILE, the engine is compared with itself, which shows the
noise of this machine.

Both engines serve the same requests in turns (base, extension, base, extension …), each in a process of its own. The
first run of each is a warm-up. The prefix cache is empty at the start of every run. Requests are greedy and generate a
fixed number of tokens, so the tokens of both sides can be compared.

A figure is called better or worse only if a rank test (Mann-Whitney) finds a difference that fewer than 1 in 100
comparisons of equal engines would show. With 5 repeats, every run of one side must be better than every run of the
other; more repeats can show smaller differences. Otherwise the difference is below the spread: "no difference seen".
Peak memory is one value for each process, without a verdict.
"""
WORKLOAD_HELP = "\n".join(
    [
        "workloads:",
        *(f"  {name:<15}{text}" + f" ({number} requests)" * (number > 1) for name, (number, text) in WORKLOADS.items()),
        "  trace:FILE     a trace in the form of Mooncake (JSON lines: timestamp in ms, input_length, output_length,",
        "                 hash_ids) or of Azure (CSV: TIMESTAMP,ContextTokens,GeneratedTokens)",
    ]
)


@dataclass(frozen=True)
class Settings:
    """The checked options of a command line."""

    extension: str | None
    package: str
    model: str
    options: Mapping[str, Any]
    """Options of the engine that were given."""
    workload: str
    trace: list[TraceRequest] | None
    """The requests of `trace:FILE`, otherwise None."""
    num_prompts: int
    request_rate: float
    speed: float
    scale_lengths: float
    seed: int
    temperature: float
    extra_args: Mapping[str, list[object]]
    repeats: int
    goodput: Mapping[str, float]
    json_file: Path | None
    is_markdown: bool


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options, including those of the engine."""
    parser = argparse.ArgumentParser(
        prog="nanovllm bench compare",
        usage="nanovllm bench compare [FILE] [options]",
        description=DESCRIPTION,
        epilog=WORKLOAD_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # an option of this command replaces one of the engine with the same name
    )
    parser.add_argument("compare_extension", nargs="?", metavar="FILE", help="the extension (default: none)")
    own = parser.add_argument_group("the comparison")
    load = parser.add_argument_group("the requests")
    EngineArgs.add_cli_args(parser)  # among them --model and --seed
    add(own, "package", "the engine", choices=PACKAGES, default="nanovllm")
    add(own, "repeats", "number of turns that are counted", type=positive_int, default=5,
        metavar="N")  # fmt: skip
    add(own, "goodput", "limits, such as ttft:500 tpot:50; goodput counts requests within all", type=parse_limit,
        nargs="+", default=[], metavar="METRIC:MS")  # fmt: skip
    add(own, "json", "also write all values to this file", type=Path, metavar="FILE")
    own.add_argument("--markdown", dest="compare_markdown", action="store_true", help="print a table in Markdown")
    add(load, "workload", "see below", default="w", metavar="NAME")
    add(load, "num-prompts", "number of requests (default: the workload's; a trace: all)", type=positive_int,
        metavar="N")  # fmt: skip
    add(load, "request-rate", "requests per second, as a Poisson process (default: all at once)", type=positive,
        metavar="RATE")  # fmt: skip
    add(load, "speed", "divides the times of a trace", type=factor, metavar="FACTOR")
    add(load, "scale-lengths", "multiplies the numbers of tokens of a trace", type=factor, metavar="FACTOR")
    add(load, "temperature", "0 is greedy", type=positive_or_zero, default=0.0,
        metavar="NUMBER")  # fmt: skip
    add(load, "extra-args", 'values for the extra_args of requests, such as \'{"deadline": [0.2, 2.0]}\': each request '
        "gets one value of each list, drawn by --seed; only the extension's side gets them", type=parse_object,
        default={}, metavar="JSON")  # fmt: skip
    return parser


def add(group: argparse._ArgumentGroup, name: str, text: str, **options: Any) -> None:
    """Add the option `--name`. It is stored as `compare_name`, because the engine may have an option `name`."""
    shown = "" if options.get("default") in (None, [], {}) else f" (default: {options['default']})"
    group.add_argument(f"--{name}", dest=f"compare_{name.replace('-', '_')}", help=text + shown, **options)


def factor(text: str) -> float:
    """Parse a finite number above 0."""
    if positive(text) == float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite, got {text}")
    return float(text)


def parse(argv: list[str] | None) -> Settings:
    """Return the checked options of a command line. Exits with status 2 for a bad option."""
    parser = make_parser()
    # the engine's options are None unless they are given, because each package has defaults of its own
    args = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(option_names())))
    try:
        return settings_of(args)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))


def settings_of(args: argparse.Namespace) -> Settings:
    """Check the arguments that `make_parser` has parsed. Raises ValueError, TypeError or OSError."""
    given = {name: value for name, value in vars(args).items() if value is not None and name in option_names()}
    if "extension" in given:
        raise ValueError("the extension is the argument FILE, not an option --extension")
    model = str(given.pop("model", TINY_QWEN3))
    seed = given.get("seed", 0)
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"--seed must be an integer of at least 0, got {seed!r}")
    check_extension(args.compare_extension)
    check_options(args.compare_package, model, given, args)
    json_file = args.compare_json
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ValueError(f"--json must be a file in a folder that exists, got {str(json_file)!r}")
    name, number, trace = read_workload(args)
    return Settings(
        extension=args.compare_extension,
        package=args.compare_package,
        model=model,
        options=given,
        workload=name,
        trace=trace,
        num_prompts=number,
        request_rate=args.compare_request_rate or float("inf"),
        speed=args.compare_speed or 1.0,
        scale_lengths=args.compare_scale_lengths or 1.0,
        seed=seed,
        temperature=args.compare_temperature,
        extra_args=check_extra_args(args.compare_extra_args, args.compare_extension),
        repeats=args.compare_repeats,
        goodput=dict(args.compare_goodput),
        json_file=json_file,
        is_markdown=args.compare_markdown,
    )


def check_extension(file: str | None) -> None:
    """Raise ValueError if the file of the extension is missing, or is not a Python file."""
    if file is None:
        return
    path = Path(file)
    if path.suffix != ".py":
        raise ValueError(f"FILE must be the Python file of an extension, such as my_file.py, got {file!r}")
    if not path.is_file():
        raise ValueError(f"FILE must be the Python file of an extension, got {file!r}, which does not exist")
    try:
        compile(path.read_bytes(), file, "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"FILE must be the Python file of an extension, got {file!r}: {error}") from None


def check_options(package: str, model: str, given: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Raise ValueError or TypeError if the package refuses an option."""
    EngineArgs.from_cli_args(argparse.Namespace(**other_options(args), model=model))
    if package != "nanovllm":
        EngineArgs(model, **given).create_engine_config()
        return
    if unknown := sorted(given.keys() - core_option_names()):
        name = unknown[0].replace("_", "-")
        raise ValueError(f"--{name} is not an option of nanovllm: add --package nanovllm_extras, which has it")
    config.Config(model, **given)


def other_options(args: argparse.Namespace) -> dict[str, object]:
    """Return the options of vLLM that the engine does not have, and accepts only at their neutral values."""
    return {name: value for name, value in vars(args).items() if value is not None and name not in option_names()}


def read_workload(args: argparse.Namespace) -> tuple[str, int, list[TraceRequest] | None]:
    """Return the workload's name, the number of its requests, and the requests of a trace."""
    name, number = args.compare_workload, args.compare_num_prompts
    kind, colon, file = name.partition(":")
    is_trace = kind == "trace" and bool(colon)
    if not is_trace and name not in WORKLOADS:
        raise ValueError(f"--workload must be one of {', '.join(WORKLOADS)} or trace:FILE, got {name!r}")
    if (is_trace or name == "burst") and args.compare_request_rate:
        hint = "--speed scales its times" if is_trace else "it has its own times"
        raise ValueError(f"--request-rate is not for --workload {name}: {hint}")
    for option in ("speed", "scale_lengths"):
        if not is_trace and getattr(args, f"compare_{option}"):
            raise ValueError(f"--{option.replace('_', '-')} is for --workload trace:FILE, not for {name}")
    if not is_trace:
        return name, number or WORKLOADS[name][0], None
    path = Path(file)
    if not file or not path.is_file():
        raise ValueError(f"--workload trace:FILE must name a file, got {file!r}, which does not exist")
    trace = read_trace(path, number)
    return name, len(trace), trace


def check_extra_args(extra_args: Mapping[str, object], extension: str | None) -> dict[str, list[object]]:
    """Return the values of the extra arguments. Raises ValueError if they are not lists with values."""
    if extra_args and extension is None:
        raise ValueError("--extra-args is for an extension: add FILE")
    for name, values in extra_args.items():
        if not isinstance(values, list) or not values:
            raise ValueError(
                f"--extra-args must be a list with at least one value for each name, got {json.dumps(values)} for "
                f"{name!r}"
            )
    return {name: list(values) for name, values in extra_args.items() if isinstance(values, list)}
