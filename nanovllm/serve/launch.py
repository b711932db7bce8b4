"""`nanovllm serve [MODEL]`: from the command line to a server that runs."""

import argparse
import gc
import json
import logging
import os
import socket
import sys
from typing import Any

from fastapi import FastAPI

from nanovllm import TINY_QWEN3
from nanovllm.extras.vllm.engine_args import EngineArgs
from nanovllm.serve.app import make_app
from nanovllm.serve.async_llm import AsyncLLM
from nanovllm.serve.server import DrainingServer, listen
from nanovllm.serve.state import ServerOptions
from nanovllm.serve.ui import LiveLines
from nanovllm.trace.recording import Sinks, TraceFile

try:  # a streamed chunk costs a quarter less than in asyncio's own loop
    from uvloop import run
except ImportError:
    from asyncio import run  # type: ignore[assignment]

API_KEY_VARIABLE = "NANOVLLM_API_KEY"
QUESTION = "What is a block table?"


def main(arguments: list[str]) -> int:
    """The exit status: 0 after a signal, 1 if the server cannot start, 2 for a bad command line."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    log = logging.StreamHandler()
    log.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=args.server_log_level.upper(), handlers=[log])
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    args.model = args.server_model or args.model or TINY_QWEN3
    try:
        engine_args = EngineArgs.from_cli_args(args)
        engine_args.create_engine_config()
        options = server_options(args)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    try:
        return serve(engine_args, options, args)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"nanovllm serve: {error}", file=sys.stderr)
        return 1


class PlainFormatter(logging.Formatter):
    """Escapes what is not printable: a client's text moves no cursor, and begins no line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, exc_info: Any) -> str:
        return "\n".join(map(printable, super().formatException(exc_info).split("\n")))


def printable(text: str) -> str:
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def serve(engine_args: EngineArgs, options: ServerOptions, args: argparse.Namespace) -> int:
    live = LiveLines() if args.server_ui else None
    trace = Sinks([sink for sink in (live, args.server_trace and TraceFile(args.server_trace)) if sink])
    listening = listen(args.server_host, args.server_port)
    url = url_of(listening)
    print(f"loading {options.model_names[0]} for {url} …", flush=True)

    def load() -> AsyncLLM:
        queued = args.server_max_queued_requests
        llm = AsyncLLM.from_engine_args(engine_args, max_queued_requests=queued, trace=trace if trace.sinks else None)
        keep_from_collector()
        return llm

    def announce(llm: AsyncLLM) -> None:
        print(announcement(llm, options, url), flush=True)
        if live is not None:
            print(f"watch it         {url}/ui", flush=True)

    run(start(make_app(options, live=live), listening, load, announce))
    return 0


def keep_from_collector() -> None:
    """Exclude all objects of the loaded model from garbage collection: they stay to the end.

    To look through the objects of torch, transformers and the tokenizer takes 100 ms, and stops all streams.
    """
    gc.collect()
    gc.freeze()


async def start(app: FastAPI, *others: Any) -> None:
    await DrainingServer(app).run_until_signal(*others)


# ---- options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanovllm serve",
        usage="nanovllm serve [MODEL] [options]",
        description="Serve a model over HTTP, with OpenAI's API.",
        epilog="Without MODEL, the tiny bundled model is served, which knows about LLM inference.",
        conflict_handler="resolve",  # the server's option replaces one of the engine with the same name
    )
    parser.add_argument(
        "server_model", metavar="MODEL", nargs="?", help="a folder, or a hub id such as Qwen/Qwen3-0.6B"
    )
    server = parser.add_argument_group("server")
    limits = parser.add_argument_group("limits")
    EngineArgs.add_cli_args(parser)
    add_server_options(server)
    add_limits(limits)
    return parser


def add_server_options(group: Any) -> None:
    add(group, "host", str, "address to listen on; 0.0.0.0 is all", "127.0.0.1")
    add(group, "port", int, "0 takes any free port", 8000)
    add(group, "served-model-name", str, "names of the model in requests; the first is in answers", nargs="+")
    add(group, "log-level", str, "what is logged", "info", choices=["debug", "info", "warning", "error"])
    add(group, "trace", str, "record each step in this file; nanovllm view replays it")
    group.add_argument("--ui", dest="server_ui", action="store_true", help="a page that shows each step, at /ui")
    add(group, "drain-timeout", seconds, "time for requests to finish after SIGTERM", ServerOptions.drain_timeout_s)


def add_limits(group: Any) -> None:
    keys = f"requests need one of these keys; also from the variable {API_KEY_VARIABLE}, with spaces between several"
    add(group, "api-key", str, keys, [], nargs="+")
    add(group, "max-requests-per-minute", positive, "of each key, or of each address where there are no keys; no limit")
    add(group, "max-queued-requests", positive, "refuse requests when this many wait to be computed; no limit")
    add(group, "max-choices", positive, "completions of one request: its prompts times n", ServerOptions.max_choices)
    add(group, "max-request-bytes", positive, "of a request's body", ServerOptions.max_request_bytes)
    values = "numbers, texts, lists and objects of a request's body, and tokens of its prompts"
    add(group, "max-request-values", positive, values, ServerOptions.max_request_values)
    proxies = "addresses or networks of proxies whose X-Forwarded-For is believed; * is all; none"
    add(group, "forwarded-allow-ips", str, proxies, [], nargs="+")
    add(group, "allowed-origins", str, "web pages from there may call the server; * is all", [], nargs="+")


def add(group: Any, name: str, kind: Any, text: str, default: Any = None, **others: Any) -> None:
    """`--name`, kept as `server_name`: the engine has options of its own."""
    if default:
        text += f" (default: {default})"
    if "choices" not in others:
        others["metavar"] = {str: name.split("-")[-1].upper(), seconds: "SECONDS"}.get(kind, "N")
    group.add_argument(
        f"--{name}", dest=f"server_{name.replace('-', '_')}", type=kind, default=default, help=text, **others
    )


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def seconds(text: str) -> float:
    if not 0 <= float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return float(text)


def server_options(args: argparse.Namespace) -> ServerOptions:
    name = TINY_QWEN3.name if args.model == TINY_QWEN3 else str(args.model)
    return ServerOptions(
        model_names=tuple(args.server_served_model_name or [name]),
        api_keys=(*args.server_api_key, *os.environ.get(API_KEY_VARIABLE, "").split()),
        max_request_bytes=args.server_max_request_bytes,
        max_request_values=args.server_max_request_values,
        max_requests_per_minute=args.server_max_requests_per_minute,
        max_choices=args.server_max_choices,
        allowed_origins=tuple(args.server_allowed_origins),
        forwarded_allow_ips=tuple(args.server_forwarded_allow_ips),
        drain_timeout_s=args.server_drain_timeout,
    )


# ---- what it prints


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def announcement(llm: AsyncLLM, options: ServerOptions, url: str) -> str:
    """What is served, how much fits, and a command to try it."""
    engine = llm.engine
    num_tokens, most = engine.parts.num_kv_blocks * engine.parts.block_size, engine.config.max_num_seqs
    concurrency = min(num_tokens / engine.parts.max_model_len, most)
    has_chat = getattr(engine.tokenizer, "chat_template", None) is not None
    body = {"messages": [{"role": "user", "content": QUESTION}]} if has_chat else {"prompt": QUESTION}
    key = ' -H "Authorization: Bearer $KEY"' if options.api_keys else ""
    return f"""\
serving          {", ".join(options.model_names)} at {url}/v1
computed by      {engine.description.split("; ")[-1]}
KV cache         {num_tokens:,} tokens in {engine.parts.num_kv_blocks:,} blocks
max concurrency  {most} requests, of which {concurrency:.1f} may have {engine.parts.max_model_len:,} tokens
try it           curl {url}/v1/{"chat/" if has_chat else ""}completions{key} \
-H 'Content-Type: application/json' -d '{json.dumps(body)}'"""
