"""`nanovllm serve [MODEL]`: from the command line to a server that runs."""

import argparse
import gc
import json
import logging
import os
import socket
import ssl
import sys
from typing import Any, NamedTuple

from fastapi import FastAPI

from nanovllm import TINY_QWEN3
from nanovllm.extras.full_engine import LLMEngine
from nanovllm.extras.serve.app import make_app
from nanovllm.extras.serve.async_llm import AsyncLLM
from nanovllm.extras.serve.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS, parsers_named
from nanovllm.extras.serve.ray.ray_options import RayOptions, add_ray_options, ray_options
from nanovllm.extras.serve.server import DrainingServer, listen
from nanovllm.extras.serve.state import ServerOptions
from nanovllm.extras.serve.ui import LiveLines
from nanovllm.extras.trace.recording import Sinks, TraceFile
from nanovllm.extras.vllm.engine_args import EngineArgs

try:  # a streamed chunk costs a quarter less than in asyncio's own loop
    from uvloop import run
except ImportError:
    from asyncio import run  # type: ignore[assignment]

API_KEY_VARIABLE = "NANOVLLM_API_KEY"
QUESTION = "What is a block table?"


class Settings(NamedTuple):
    """A command line, checked."""

    engine_args: EngineArgs
    options: ServerOptions
    max_queued_requests: int | None
    log_level: str
    ray: RayOptions | None
    """None for a server of one engine, in this process."""


def main(arguments: list[str]) -> int:
    """The exit status: 0 after a signal, 1 if the server cannot start, 2 for a bad command line."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    log_to_stderr(args.server_log_level)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        settings = settings_of(args)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    try:
        return serve(settings, args)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"nanovllm serve: {error}", file=sys.stderr)
        return 1


def log_to_stderr(level: str) -> None:
    log = logging.StreamHandler()
    log.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[log])


def settings_of(args: argparse.Namespace) -> Settings:
    """Of what `make_parser` has parsed. Raises ValueError or TypeError."""
    args.model = args.server_model or args.model or TINY_QWEN3
    engine_args = EngineArgs.from_cli_args(args)
    engine_args.create_engine_config()
    options = server_options(args)
    return Settings(engine_args, options, args.server_max_queued_requests, args.server_log_level, ray_options(args))


class PlainFormatter(logging.Formatter):
    """Escapes what is not printable: a client's text moves no cursor, and begins no line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, exc_info: Any) -> str:
        return "\n".join(map(printable, super().formatException(exc_info).split("\n")))


def printable(text: str) -> str:
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def serve(settings: Settings, args: argparse.Namespace) -> int:
    engine_args, options = settings.engine_args, settings.options
    if settings.ray is not None:
        return serve_by_ray(settings, args)
    if engine_args.node_rank:
        return compute_for_others(engine_args)
    live = LiveLines() if args.server_ui else None
    trace = Sinks([sink for sink in (live, args.server_trace and TraceFile(args.server_trace)) if sink])
    listening = listen(args.server_host, args.server_port)
    url = url_of(listening, "https" if options.tls else "http")
    print(f"loading {options.model_names[0]} for {url} …", flush=True)

    def load() -> AsyncLLM:
        queued = settings.max_queued_requests
        llm = AsyncLLM.from_engine_args(engine_args, max_queued_requests=queued, trace=trace if trace.sinks else None)
        keep_from_collector()
        return llm

    def announce(llm: AsyncLLM) -> None:
        print(announcement(llm, options, url), flush=True)
        if live is not None:
            print(f"watch it         {url}/ui", flush=True)

    run(start(make_app(options, live=live), listening, load, announce, leave_at_once))
    return 0


def serve_by_ray(settings: Settings, args: argparse.Namespace) -> int:
    try:
        from nanovllm.extras.serve.ray.ray_launch import run as run_on_cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise RuntimeError("--ray needs the package ray: pip install 'nanovllm[ray]' brings it") from error
    return run_on_cluster(settings, args.server_host, args.server_port)


def compute_for_others(engine_args: EngineArgs) -> int:
    """On a machine that is not the first: run its ranks, without HTTP, until machine 0 ends."""
    try:
        print(f"computing for {engine_args.master_addr}:{engine_args.master_port} …", flush=True)
        LLMEngine(engine_args.create_engine_config())
    except SystemExit as end:
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 0
    raise AssertionError("an engine of another machine than the first never starts")


def leave_at_once() -> None:
    """A thread that loads cannot be stopped, and may wait for other machines. What it has started ends by itself."""
    print("nanovllm serve: ended while loading", file=sys.stderr, flush=True)
    os._exit(0)


def keep_from_collector() -> None:
    """Exclude all objects of the loaded model from garbage collection: they stay to the end.

    To look through the objects of torch, transformers and the tokenizer takes 100 ms, and stops all streams.
    """
    gc.collect()
    gc.freeze()


async def start(app: FastAPI, *others: Any) -> None:
    await DrainingServer(app).run_until_signal(*others)


# ---- options


def make_parser(kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = kind(
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
    tls = parser.add_argument_group("https")
    limits = parser.add_argument_group("limits")
    replicas = parser.add_argument_group("replicas, by Ray Serve (extra: ray)")
    EngineArgs.add_cli_args(parser)
    add_server_options(server)
    add_tls(tls)
    add_limits(limits)
    add_ray_options(replicas)
    return parser


def add_server_options(group: Any) -> None:
    add(group, "host", str, "address to listen on; 0.0.0.0 is all", "127.0.0.1")
    add(group, "port", int, "0 takes any free port", 8000)
    add_model_options(group)
    add(group, "root-path", str, "path under which a proxy serves all of this", "")
    flag(group, "disable-log-requests", "no line of the log for each request")
    add_log_level(group, "info")
    add(group, "trace", str, "record each step in this file; nanovllm view replays it")
    flag(group, "ui", "a page that shows each step, at /ui")
    flag(group, "enable-auto-tool-choice", "as always: calls are read where a request has tools")
    add(group, "drain-timeout", seconds, "time for requests to finish after SIGTERM", ServerOptions.drain_timeout_s)


def add_model_options(group: Any) -> None:
    """What clients call the model, and how it writes."""
    add(group, "served-model-name", str, "names of the model in requests; the first is in answers", nargs="+")
    tool_parsers, reasoning_parsers = sorted(TOOL_PARSERS), sorted(REASONING_PARSERS)
    add(group, "tool-call-parser", str, "how the model writes calls of tools", "hermes", choices=tool_parsers)
    add(group, "reasoning-parser", str, "how the model writes thoughts", "qwen3", choices=reasoning_parsers)


def add_log_level(group: Any, default: str) -> None:
    add(group, "log-level", str, "what is logged", default, choices=["debug", "info", "warning", "error"])


def add_request_bounds(group: Any) -> None:
    add(group, "max-choices", positive, "completions of one request: its prompts times n", ServerOptions.max_choices)
    add(group, "max-request-bytes", positive, "of a request's body", ServerOptions.max_request_bytes)
    values = "numbers, texts, lists and objects of a request's body, and tokens of its prompts"
    add(group, "max-request-values", positive, values, ServerOptions.max_request_values)


def add_tls(group: Any) -> None:
    add(group, "ssl-keyfile", str, "the server's private key; with --ssl-certfile it speaks https")
    add(group, "ssl-certfile", str, "the server's certificate")
    add(group, "ssl-ca-certs", str, "certificates that vouch for clients")
    add(
        group, "ssl-cert-reqs", int, "of clients: 0 none, 1 may, 2 must have one", int(ssl.CERT_NONE), choices=[0, 1, 2]
    )


def add_limits(group: Any) -> None:
    keys = f"requests need one of these keys; also from the variable {API_KEY_VARIABLE}, with spaces between several"
    add(group, "api-key", str, keys, [], nargs="+")
    add(
        group,
        "max-requests-per-minute",
        positive,
        "of each key; without keys, of each address (IPv6: each /64); no limit",
    )
    add(group, "max-queued-requests", positive, "refuse requests when this many wait to be computed; no limit")
    add_request_bounds(group)
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


def flag(group: Any, name: str, text: str) -> None:
    group.add_argument(f"--{name}", dest=f"server_{name.replace('-', '_')}", action="store_true", help=text)


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
        parsers=parsers_named(args.server_tool_call_parser, args.server_reasoning_parser),
        root_path=root_path(args.server_root_path),
        log_requests=not args.server_disable_log_requests,
        forwarded_allow_ips=tuple(args.server_forwarded_allow_ips),
        drain_timeout_s=args.server_drain_timeout,
        tls=tls_options(args),
    )


def root_path(text: str) -> str:
    if text and (not text.startswith("/") or text.endswith("/")):
        raise ValueError(f"--root-path must begin with / and not end with it, got {text!r}")
    return text


def tls_options(args: argparse.Namespace) -> dict[str, Any]:
    """uvicorn's; none without a certificate."""
    names = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")
    given = {name: value for name in names if (value := getattr(args, f"server_{name}"))}
    if given and "ssl_certfile" not in given:
        raise ValueError(f"--{next(iter(given)).replace('_', '-')} needs --ssl-certfile")
    for name, path in given.items():
        if not os.path.isfile(path):
            raise ValueError(f"--{name.replace('_', '-')} must be a file, got {path!r}")
    if args.server_ssl_cert_reqs and "ssl_ca_certs" not in given:
        raise ValueError("--ssl-cert-reqs needs --ssl-ca-certs")
    return given | {"ssl_cert_reqs": args.server_ssl_cert_reqs} if given else {}


# ---- what it prints


def url_of(listening: socket.socket, scheme: str) -> str:
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{host}:{port}"


def announcement(llm: AsyncLLM, options: ServerOptions, url: str) -> str:
    """What is served, how much fits, and a command to try it."""
    engine = llm.engine
    num_tokens, most = engine.parts.num_kv_blocks * engine.parts.block_size, engine.config.max_num_seqs
    concurrency = min(num_tokens / engine.parts.max_model_len, most)
    has_chat = getattr(engine.tokenizer, "chat_template", None) is not None
    return f"""\
serving          {", ".join(options.model_names)} at {url}/v1
computed by      {engine.description.split("; ")[-1]}
KV cache         {num_tokens:,} tokens in {engine.parts.num_kv_blocks:,} blocks
max concurrency  {most} requests, of which {concurrency:.1f} may have {engine.parts.max_model_len:,} tokens
{attempt(url, options, has_chat)}"""


def attempt(url: str, options: ServerOptions, has_chat: bool) -> str:
    """The last line of an announcement."""
    body = {"messages": [{"role": "user", "content": QUESTION}]} if has_chat else {"prompt": QUESTION}
    key = ' -H "Authorization: Bearer $KEY"' if options.api_keys else ""
    return f"""\
try it           curl {url}/v1/{"chat/" if has_chat else ""}completions{key} \
-H 'Content-Type: application/json' -d '{json.dumps(body)}'"""
