"""Define the options of `nanovllm bench serve`, with vLLM's names: the server, the load, the requests, the report."""

import argparse
import json
import os
from pathlib import Path

from nanovllm_extras.bench.report import METRICS
from nanovllm_extras.options.argument_types import filled, http_url, port

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="nanovllm bench serve",
        description="Send requests at random times to an OpenAI-compatible server, and measure its answers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_server_options(parser.add_argument_group("the server"))
    add_load_options(parser.add_argument_group("the load"))
    add_work_options(parser.add_argument_group("the requests"))
    add_report_options(parser.add_argument_group("the report"))
    return parser


def add_server_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", type=http_url, help="such as http://127.0.0.1:8000, instead of --host and --port")
    group.add_argument("--host", type=filled, default="127.0.0.1", help="address of the server")
    group.add_argument("--port", type=port, default=8000, help="port of the server")
    group.add_argument("--backend", choices=ENDPOINTS, default="openai",
                       help="completions of token ids (openai, vllm) or chats of words (openai-chat)")  # fmt: skip
    group.add_argument("--endpoint", type=filled, help="path of the API (default: the backend's)")
    group.add_argument("--model", type=filled, help="name of the model (default: the first that the server lists)")
    group.add_argument("--header", type=parse_pair, action="append", default=[], metavar="NAME=VALUE",
                       help="header of every request; OPENAI_API_KEY is sent as the key if it is set")  # fmt: skip
    group.add_argument("--ready-check-timeout-sec", type=positive_or_zero, metavar="SECONDS",
                       help="how long to wait for the server (default: 600, or 5 if it cannot be reached)")  # fmt: skip


def add_load_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-prompts", type=positive_int, default=1000, help="number of requests of a load")
    group.add_argument("--request-rate", type=positive, nargs="+", default=[float("inf")], metavar="RATE",
                       help="requests per second; inf: all at once; several rates: a load for each")  # fmt: skip
    group.add_argument("--burstiness", type=positive, default=1.0, help="1 is Poisson; less is burstier")
    group.add_argument("--max-concurrency", type=positive_int, help="maximum number of requests in flight")
    group.add_argument("--num-warmups", type=count, default=0, help="requests before the load, one by one, not counted")
    group.add_argument("--seed", type=int, default=0, help="seed of lengths, tokens and departure times")


def add_work_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset-name", choices=["random", "prefix_repetition"], default="random",
                       help="random prompts, or prompts with shared prefixes")  # fmt: skip
    group.add_argument("--random-input-len", type=positive_int, default=1024, help="tokens of a prompt")
    group.add_argument("--random-output-len", type=positive_int, default=128, help="maximum tokens of an answer")
    group.add_argument("--random-range-ratio", type=fraction, default=0.0, help="lengths vary by this fraction")
    group.add_argument(
        "--random-prefix-len", type=count, default=0, help="tokens of a prefix that all prompts share, added in front"
    )
    group.add_argument(
        "--tokenizer", type=filled, help="folder or hub id: prompts of chats have exact lengths in its tokens"
    )
    group.add_argument("--random-vocab-size", type=positive_int, default=1000, help="token ids are below this number")
    group.add_argument("--prefix-repetition-prefix-len", type=positive_int, default=256, help="tokens of a prefix")
    group.add_argument("--prefix-repetition-suffix-len", type=positive_int, default=256, help="tokens of a suffix")
    group.add_argument("--prefix-repetition-num-prefixes", type=positive_int, default=10, help="number of prefixes")
    group.add_argument(
        "--prefix-repetition-output-len", type=positive_int, default=128, help="maximum tokens of an answer"
    )
    group.add_argument("--ignore-eos", action="store_true", help="give all answers full length (vLLM, nanovllm)")
    group.add_argument("--temperature", type=positive_or_zero, default=0.0, help="0 is greedy")
    group.add_argument("--top-p", type=float, help="without it, the server's default")
    group.add_argument("--top-k", type=int, help="without it, the server's default")
    group.add_argument("--min-p", type=float, help="without it, the server's default")
    group.add_argument(
        "--extra-body", type=parse_object, default={}, metavar="JSON", help="more fields of each request"
    )


def add_report_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--percentile-metrics", type=metric_names, default=tuple(METRICS), metavar="NAMES",
                       help="metrics to report, some of ttft,tpot,itl,e2el")  # fmt: skip
    group.add_argument("--metric-percentiles", type=percentiles, default=(50.0, 90.0, 99.0), metavar="NUMBERS",
                       help="percentiles to report, such as 50,99")  # fmt: skip
    group.add_argument("--goodput", type=parse_limit, nargs="+", default=[], metavar="METRIC:MS",
                       help="limits, such as ttft:500 tpot:50; goodput counts requests within all")  # fmt: skip
    group.add_argument("--save-result", action="store_true", help="write the results as JSON")
    group.add_argument("--save-detailed", action="store_true", help="write the results of every request, too")
    group.add_argument("--result-dir", type=Path, default=Path(), help="folder of the JSON file")
    group.add_argument("--result-filename", help="name of the JSON file (default: from rate, model and time)")
    group.add_argument("--label", help="name of the run in the JSON file and the picture")
    group.add_argument("--metadata", type=parse_pair, nargs="+", default=[], metavar="NAME=VALUE", help="added to JSON")
    group.add_argument("--plot", type=Path, metavar="PNG", help="draw latency against rate")
    group.add_argument("--disable-tqdm", action="store_true", help="do not show a progress bar")


def base_url(args: argparse.Namespace) -> str:
    """Return the URL of the server."""
    return args.base_url or f"http://{args.host}:{args.port}"


def make_headers(args: argparse.Namespace) -> dict[str, str]:
    """Return the headers of every request."""
    key = os.environ.get("OPENAI_API_KEY")
    return {**({"Authorization": f"Bearer {key}"} if key else {}), **dict(args.header)}


# ---- parsers of values; argparse prints their errors after the option's name


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be > 0, got {text}")
    return value


def positive_or_zero(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be >= 0 and finite, got {text}")
    return value


def fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 0 and < 1, got {text}")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be >= 0, got {text}")
    return value


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text}")
    return value


def parse_pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def parse_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def metric_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"must be some of {','.join(METRICS)}, got {unknown[0]!r}")
    return names


def percentiles(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"must be from 0 to 100, got {text}")
    return values


def parse_limit(text: str) -> tuple[str, float]:
    name, colon, value = text.partition(":")
    if name not in METRICS or not colon:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(METRICS)}, a colon and milliseconds, got {text!r}")
    return name, positive(value)
