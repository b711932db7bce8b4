"""Run the command `nanovllm serve [MODEL]`: parse its options, and start the server."""

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

try:  # a streamed chunk costs a quarter less than in asyncio's event loop
    from uvloop import run
except ImportError:
    from asyncio import run  # type: ignore[assignment]

API_KEY_VARIABLE = "NANOVLLM_API_KEY"
QUESTION = "What is a block table?"


class Settings(NamedTuple):
    """The checked options of a command line."""

    engine_args: EngineArgs
    options: ServerOptions
    max_queued_requests: int | None
    log_level: str
    ray: RayOptions | None
    """None for a server with one engine in this process."""


def main(arguments: list[str]) -> int:
    """Run the server and return the exit status: 0 after a signal, 1 if it cannot start, 2 for a bad command line."""
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
    """Send the log to stderr, from `level` on."""
    log = logging.StreamHandler()
    log.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[log])


def settings_of(args: argparse.Namespace) -> Settings:
    """Check the arguments that `make_parser` has parsed, and return the settings. Raises ValueError, TypeError."""
    args.model = args.server_model or args.model or TINY_QWEN3
    engine_args = EngineArgs.from_cli_args(args)
    engine_args.create_engine_config()
    options = server_options(args)
    return Settings(engine_args, options, args.server_max_queued_requests, args.server_log_level, ray_options(args))


class PlainFormatter(logging.Formatter):
    """Escapes characters that are not printable, so that a client's text cannot move the cursor or start a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, exc_info: Any) -> str:
        return "\n".join(map(printable, super().formatException(exc_info).split("\n")))


def printable(text: str) -> str:
    """Return `text` with the characters escaped that are not printable."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def serve(settings: Settings, args: argparse.Namespace) -> int:
    """Serve until a signal, and return the exit status."""
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
    """Serve with Ray until a signal, and return the exit status. Raises RuntimeError if Ray is not installed."""
    try:
        from nanovllm.extras.serve.ray.ray_launch import run as run_on_cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise RuntimeError("--ray needs the package ray: run pip install 'nanovllm[ray]'") from error
    return run_on_cluster(settings, args.server_host, args.server_port)


def compute_for_others(engine_args: EngineArgs) -> int:
    """Run the ranks of a machine other than machine 0, without HTTP, until machine 0 ends. Return the exit status."""
    try:
        print(f"computing for {engine_args.master_addr}:{engine_args.master_port} …", flush=True)
        LLMEngine(engine_args.create_engine_config())
    except SystemExit as end:
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 0
    raise AssertionError("LLMEngine returned on a machine other than machine 0")


def leave_at_once() -> None:
    """End the process while it loads the model.

    The loading thread cannot be stopped, and may wait for other machines. The processes that it has started end on
    their own.
    """
    print("nanovllm serve: ended while loading", file=sys.stderr, flush=True)
    os._exit(0)


def keep_from_collector() -> None:
    """Exclude all existing objects from garbage collection.

    They live as long as the process. A collection that traverses the objects of torch, transformers and the tokenizer
    takes 100 ms, and stops all streams.
    """
    gc.collect()
    gc.freeze()


async def start(app: FastAPI, *others: Any) -> None:
    """Run the server in an event loop until a signal. others: arguments of `DrainingServer.run_until_signal`."""
    await DrainingServer(app).run_until_signal(*others)


# ---- options


def make_parser(kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser of the command's options, including those of the engine."""
    parser = kind(
        prog="nanovllm serve",
        usage="nanovllm serve [MODEL] [options]",
        description="Serve a model over HTTP, with OpenAI's API.",
        epilog="Without MODEL, the command serves the bundled model, which answers questions about LLM inference.",
        conflict_handler="resolve",  # the server's option replaces one of the engine with the same name
    )
    parser.add_argument("server_model", metavar="MODEL", nargs="?", help="a folder or a hub id such as Qwen/Qwen3-0.6B")
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
    """Add the options of the server itself."""
    add(group, "host", str, "address to listen on; 0.0.0.0 for all addresses", "127.0.0.1")
    add(group, "port", int, "port to listen on; 0 for any free port", 8000)
    add_model_options(group)
    add(group, "root-path", str, "path under which a proxy serves this server", "")
    flag(group, "disable-log-requests", "do not log a line for each request")
    add_log_level(group, "info")
    add(group, "trace", str, "record each step in this file; nanovllm view replays it")
    flag(group, "ui", "serve a page that shows each step, at /ui")
    flag(group, "enable-auto-tool-choice", "no effect (vLLM's option): calls are always parsed if a request has tools")
    add(group, "drain-timeout", seconds, "time for requests to finish after SIGTERM", ServerOptions.drain_timeout_s)


def add_model_options(group: Any) -> None:
    """Add the options for the model's names and for the format of its answers."""
    add(group, "served-model-name", str, "names of the model in requests; answers have the first one", nargs="+")
    tool_parsers, reasoning_parsers = sorted(TOOL_PARSERS), sorted(REASONING_PARSERS)
    add(group, "tool-call-parser", str, "format of the model's tool calls", "hermes", choices=tool_parsers)
    add(group, "reasoning-parser", str, "format of the model's reasoning", "qwen3", choices=reasoning_parsers)


def add_log_level(group: Any, default: str) -> None:
    """Add `--log-level`."""
    add(group, "log-level", str, "least severe level to log", default, choices=["debug", "info", "warning", "error"])


def add_request_bounds(group: Any) -> None:
    """Add the options that limit the size of one request."""
    add(group, "max-choices", positive, "completions of one request: its prompts times n", ServerOptions.max_choices)
    add(group, "max-request-bytes", positive, "size of a request's body", ServerOptions.max_request_bytes)
    values = "numbers, texts, lists and objects of a request's body, and tokens of its prompts"
    add(group, "max-request-values", positive, values, ServerOptions.max_request_values)


def add_tls(group: Any) -> None:
    """Add the options of HTTPS."""
    add(group, "ssl-keyfile", str, "the server's private key")
    add(group, "ssl-certfile", str, "the server's certificate; enables HTTPS")
    add(group, "ssl-ca-certs", str, "certificates of the authorities that sign clients' certificates")
    add(
        group, "ssl-cert-reqs", int, "of clients: 0 none, 1 optional, 2 required", int(ssl.CERT_NONE), choices=[0, 1, 2]
    )


def add_limits(group: Any) -> None:
    """Add the options of access and limits."""
    keys = f"keys, of which requests need one; more can be in the variable {API_KEY_VARIABLE}, separated by spaces"
    add(group, "api-key", str, keys, [], nargs="+")
    add(
        group,
        "max-requests-per-minute",
        positive,
        "limit for each key, or without keys for each address (IPv6: each /64) (default: no limit)",
    )
    add(group, "max-queued-requests", positive, "refuse requests if this many are waiting (default: no limit)")
    add_request_bounds(group)
    proxies = "addresses or networks of proxies whose X-Forwarded-For is trusted; * for all (default: none)"
    add(group, "forwarded-allow-ips", str, proxies, [], nargs="+")
    add(group, "allowed-origins", str, "origins of web pages that may call the server; * for all", [], nargs="+")


def add(group: Any, name: str, kind: Any, text: str, default: Any = None, **others: Any) -> None:
    """Add the option `--name`. It is stored as `server_name`, because the engine may have an option `name`."""
    if default:
        text += f" (default: {default})"
    if "choices" not in others:
        others["metavar"] = {str: name.split("-")[-1].upper(), seconds: "SECONDS"}.get(kind, "N")
    group.add_argument(
        f"--{name}", dest=f"server_{name.replace('-', '_')}", type=kind, default=default, help=text, **others
    )


def flag(group: Any, name: str, text: str) -> None:
    """Add the option `--name`, which has no value."""
    group.add_argument(f"--{name}", dest=f"server_{name.replace('-', '_')}", action="store_true", help=text)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a finite number of at least 0."""
    if not 0 <= float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return float(text)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Return the server's options. Raises ValueError if they are invalid."""
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
    """Return a valid `--root-path`. Raises ValueError if it is invalid."""
    if text and (not text.startswith("/") or text.endswith("/")):
        raise ValueError(f"--root-path must begin with / and not end with it, got {text!r}")
    return text


def tls_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return uvicorn's options of HTTPS; an empty dict without a certificate. Raises ValueError."""
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
    """Return a URL at which the server can be reached from this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{host}:{port}"


def announcement(llm: AsyncLLM, options: ServerOptions, url: str) -> str:
    """Return the text that is printed when the server is ready: names, capacity, and a command to try it."""
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
    """Return the last line of an announcement: a command that sends a request."""
    body = {"messages": [{"role": "user", "content": QUESTION}]} if has_chat else {"prompt": QUESTION}
    key = ' -H "Authorization: Bearer $KEY"' if options.api_keys else ""
    return f"""\
try it           curl {url}/v1/{"chat/" if has_chat else ""}completions{key} \
-H 'Content-Type: application/json' -d '{json.dumps(body)}'"""
