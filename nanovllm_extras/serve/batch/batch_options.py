"""Define and check the options of `nanovllm run-batch`, without the packages of the extra `batch`."""

import argparse
import json
from pathlib import Path

from nanovllm_extras.options.argument_types import filled
from nanovllm_extras.serve.batch.rows import Form
from nanovllm_extras.serve.serve_settings import add_request_bounds, add_shared_options, positive
from nanovllm_extras.vllm.engine_args import EngineArgs

ROWS_PER_PART = 1000
SAMPLING = {"temperature": float, "top-p": float, "top-k": int, "min-p": float, "max-tokens": int, "n": int}


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
    add_shared_options(requests, "warning")
    add_request_bounds(requests)
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
