"""Run the command `nanovllm run-batch -i in.jsonl -o out/`: parse its options, and answer the rows."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import torch

from nanovllm import TINY_QWEN3
from nanovllm_extras.machine.printing import say
from nanovllm_extras.options.argument_types import filled
from nanovllm_extras.options.option_checks import first_given
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.batch.batch_inputs import Digests, Input, are_in, find_sources, scan
from nanovllm_extras.serve.batch.one_machine import answer_here
from nanovllm_extras.serve.batch.parts import Parts
from nanovllm_extras.serve.batch.replica import ReplicaSpec
from nanovllm_extras.serve.batch.rows import Form
from nanovllm_extras.serve.parsers.parser_registry import parsers_named
from nanovllm_extras.serve.serve_settings import (
    add_log_level,
    add_model_options,
    add_request_bounds,
    keep_from_collector,
    log_to_stderr,
    positive,
)
from nanovllm_extras.serve.state import ServerOptions
from nanovllm_extras.vllm.engine_args import EngineArgs

ROWS_PER_PART = 1000
SAMPLING = {"temperature": float, "top-p": float, "top-k": int, "min-p": float, "max-tokens": int, "n": int}


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status.

    0 if each row has an answer or an error, 1 if the run failed, 2 for a bad command line, 130 after Ctrl-C.
    """
    parser = make_parser()
    args = parser.parse_args(arguments)
    log_to_stderr(args.server_log_level)
    args.model = first_given(args.batch_model, args.model, TINY_QWEN3)
    try:
        engine_args = EngineArgs.from_cli_args(args)
        engine_args.create_engine_config()
        form, options = form_of(args), options_of(args)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    try:
        return run_batch(args, form, options, partial(load, engine_args))
    except ModuleNotFoundError as error:
        install = "pip install 'nanovllm[ray]'"
        print(f"nanovllm run-batch --replicas needs the package {error.name}: run {install}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"nanovllm run-batch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nanovllm run-batch: stopped; run the same command to continue", file=sys.stderr)
        return 130


def load(engine_args: EngineArgs) -> AsyncLLM:
    """Load the engine. This runs in the process of the replica."""
    llm = AsyncLLM.from_engine_args(engine_args)
    keep_from_collector()
    return llm


def run_batch(args: argparse.Namespace, form: Form, options: ServerOptions, load: Callable[[], AsyncLLM]) -> int:
    """Answer the rows that are not done, print a summary, and return the exit status."""
    start, answer = time.monotonic(), way_of(args)
    batch = scan(find_sources(args.input), form, args.rows_per_part)
    with Parts.opened(args.output) as parts:
        parts.check_same({"model": args.model, **vars(form)})
        done, paths_before = parts.done(), set(parts.paths())
        num_left = int((~are_in(batch.digests, done)).sum())
        say(f"{len(batch.digests):,} rows, of which {len(batch.digests) - num_left:,} are done")
        if num_left:
            max_in_flight = args.max_in_flight or 2 * args.max_num_seqs
            spec = ReplicaSpec(load, options, parts.attempts, parts.run, max_in_flight, args.replicas or 1)
            answer(batch, parts, done, spec)
        new = [path for path in parts.paths() if path not in paths_before]
        say(summary(new, num_left, time.monotonic() - start))
        return check_each_once(batch, parts)


def way_of(args: argparse.Namespace) -> Callable[[Input, Parts, Digests, ReplicaSpec], None]:
    """Return the function that answers the rows. Raises ModuleNotFoundError if Ray is needed but not installed."""
    if args.replicas is None:
        return answer_here
    from nanovllm_extras.serve.batch.ray_data import Pool, answer_with_ray

    return partial(answer_with_ray, pool=Pool(args.replicas, num_devices(args), args.ray_address))


def num_devices(args: argparse.Namespace) -> int:
    """Return the number of GPUs of one engine. With `--device cuda`, this machine itself does not need a GPU."""
    has_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    return int(args.tensor_parallel_size) if has_gpu else 0


def summary(paths: list[Path], num_rows: int, seconds: float) -> str:
    """Return a line with the number of answers, errors and tokens in the parts at `paths`."""
    num_errors = num_in = num_out = 0
    for path in paths:
        table = pq.read_table(path, columns=["error", "prompt_tokens", "completion_tokens"])
        num_errors += len(table) - table.column("error").null_count
        num_in += table.column("prompt_tokens").drop_null().to_numpy().sum()
        num_out += table.column("completion_tokens").drop_null().to_numpy().sum()
    return (
        f"{num_rows:,} rows in {seconds:.1f} s ({num_rows / seconds:,.1f} rows/s): {num_rows - num_errors:,} answers, "
        f"{num_errors:,} errors; {num_in:,} tokens in, {num_out:,} out ({num_out / seconds:,.0f} tokens/s)"
    )


def check_each_once(batch: Input, parts: Parts) -> int:
    """Return 0 if the parts contain each row of the input exactly once, else 1."""
    done = parts.done()
    num_missing, num_twice = int((~are_in(batch.digests, done)).sum()), int((done[1:] == done[:-1]).sum())
    if num_missing or num_twice:
        print(f"nanovllm run-batch: {num_missing} rows have no answer, {num_twice} have two", file=sys.stderr)
        return 1
    return 0


# ---- options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanovllm run-batch",
        usage="nanovllm run-batch -i FILE … -o FOLDER [MODEL] [options]",
        description="Answer all rows of the input files. If the command is run again, it continues where it stopped.",
        conflict_handler="resolve",
    )
    text = "folder or hub id (default: the bundled model)"
    parser.add_argument("batch_model", metavar="MODEL", nargs="?", type=filled, help=text)
    files = parser.add_argument_group("files")
    rows = parser.add_argument_group("rows with a prompt column")
    replicas = parser.add_argument_group("replicas")
    requests = parser.add_argument_group("requests")
    EngineArgs.add_cli_args(parser)
    add_files(files)
    add_rows(rows)
    add_replicas(replicas)
    add_requests(requests)
    return parser


def add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-i", "--input", type=Path, nargs="+", required=True, help=".jsonl or .parquet files, or folders of them"
    )
    group.add_argument("-o", "--output", type=Path, required=True, help="folder of Parquet files; reuse it to continue")
    text = f"rows of one output file; a crash loses the unfinished files (default: {ROWS_PER_PART})"
    group.add_argument("--rows-per-part", type=positive, default=ROWS_PER_PART, metavar="N", help=text)


def add_rows(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt-column", metavar="NAME", help="column of texts, token ids or messages (default: OpenAI's format)"
    )
    group.add_argument("--id-column", metavar="NAME", help="column of the rows' names (default: file and row number)")
    group.add_argument("--chat", action="store_true", help="send a text as a user's message, not as a text to continue")
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name}", type=kind, dest=f"body_{name.replace('-', '_')}", metavar=name.upper())
    group.add_argument("--stop", nargs="+", dest="body_stop", metavar="TEXT")
    group.add_argument("--body", type=json.loads, default={}, metavar="JSON", help="other fields of every request")
    columns = "columns of the input whose values are fields of the row's request, such as temperature"
    group.add_argument("--body-columns", nargs="+", default=[], metavar="NAME", help=columns)


def add_replicas(group: argparse._ArgumentGroup) -> None:
    text = "number of engines, as Ray actors with their own devices (extra `ray`); default: one engine without Ray"
    group.add_argument("--replicas", type=positive, metavar="N", help=text)
    group.add_argument(
        "--ray-address", type=filled, metavar="ADDRESS", help="a running Ray cluster (default: start one here)"
    )
    text = "rows that an engine computes at the same time (default: twice --max-num-seqs)"
    group.add_argument("--max-in-flight", type=positive, metavar="N", help=text)


def add_requests(group: argparse._ArgumentGroup) -> None:
    """Add the options of requests that `nanovllm serve` has too."""
    add_model_options(group)
    add_request_bounds(group)
    add_log_level(group, "warning")


def form_of(args: argparse.Namespace) -> Form:
    """Return the form of the rows. Raises ValueError or TypeError if the options contradict each other."""
    names = ("chat", "id_column", "body", "body_columns")
    own = {name.removeprefix("body_"): value for name, value in vars(args).items() if name.startswith("body_")}
    own = {name: value for name, value in own.items() if value is not None and name != "columns"}
    if not isinstance(args.body, dict):
        raise TypeError(f"--body must be a JSON object, got {args.body!r}")
    if args.prompt_column is None:
        given = [name for name in names if getattr(args, name)] + list(own)
        if given:
            raise ValueError(f"--{given[0].replace('_', '-')} needs --prompt-column: OpenAI's rows have it")
        return Form()
    if args.body.get("stream"):
        raise ValueError("--body must not set stream: run-batch does not stream answers")
    return Form(args.prompt_column, args.id_column, args.chat, {**args.body, **own}, tuple(args.body_columns))


def options_of(args: argparse.Namespace) -> ServerOptions:
    """Return the options of the server's application, which answers the rows."""
    name = TINY_QWEN3.name if args.model == TINY_QWEN3 else str(args.model)
    return ServerOptions(
        model_names=tuple(args.server_served_model_name or [name]),
        max_request_bytes=args.server_max_request_bytes,
        max_request_values=args.server_max_request_values,
        max_choices=args.server_max_choices,
        parsers=parsers_named(args.server_tool_call_parser, args.server_reasoning_parser),
        log_requests=False,
    )
