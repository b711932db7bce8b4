"""The options of the command `nanovllm serve`, checked, and what each of its processes needs at its start."""

import argparse
import gc
import json
import logging
import os
import ssl
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

from nanovllm import TINY_QWEN3
from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.options.argument_types import filled, port
from nanovllm_extras.options.chat_options import check_chat_template
from nanovllm_extras.options.option_checks import first_given
from nanovllm_extras.options.store_options import check_folder
from nanovllm_extras.serve.parsers.parser_registry import TOOL_PARSERS, parsers_named
from nanovllm_extras.serve.ray_options import RayOptions, add_ray_options, ray_options
from nanovllm_extras.serve.serve_checks import check_tls
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.vllm.engine_args import EngineArgs

API_KEY_VARIABLE = "NANOVLLM_API_KEY"
LORA_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
QUESTION = "What is a block table?"


class Settings(NamedTuple):
    """The checked options of a command line."""

    engine_args: EngineArgs
    options: ServerOptions
    max_queued_requests: int | None
    log_level: str
    ray: RayOptions | None
    """None for a server with one engine in this process."""


def make_parser(kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser of the command's options, including those of the engine."""
    parser = kind(
        prog="nanovllm serve",
        usage="nanovllm serve [MODEL] [options]",
        description="Serve a model over HTTP, with OpenAI's API.",
        epilog="Without MODEL, the command serves the bundled model, which answers questions about LLM inference.",
        conflict_handler="resolve",  # the server's option replaces one of the engine with the same name
    )
    text = "a folder or a hub id such as Qwen/Qwen3-0.6B"
    parser.add_argument("server_model", metavar="MODEL", nargs="?", type=filled, help=text)
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


def add_server_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of the server itself."""
    add(group, "host", filled, "address to listen on; 0.0.0.0 for all addresses", "127.0.0.1")
    add(group, "port", port, "port to listen on; 0 for any free port", 8000)
    add_shared_options(group, "info")
    updating = "load and unload adapters at /v1/load_lora_adapter and /v1/unload_lora_adapter; also the variable "
    flag(group, "allow-runtime-lora-updating", updating + LORA_VARIABLE)
    add(group, "root-path", str, "path under which a proxy serves this server", "")
    flag(group, "disable-log-requests", "do not log a line for each request")
    add(group, "trace", filled, "record each step in this file; nanovllm view replays it")
    flag(group, "ui", "serve a page that shows each step, at /ui")
    flag(
        group,
        "enable-kv-slots",
        "save and restore K and V of prompts by name, at /slots; needs a K/V store in a folder",
    )
    flag(group, "enable-tokenizer-info-endpoint", "return the tokenizer's configuration at /tokenizer_info")
    flag(group, "enable-auto-tool-choice", "no effect (vLLM's option): calls are always parsed if a request has tools")
    add(group, "drain-timeout", seconds, "time for requests to finish after SIGTERM", ServerOptions.drain_timeout_s)


def add_shared_options(group: argparse._ArgumentGroup, log_level: str) -> None:
    """Add the options that `nanovllm run-batch` has, too. log_level: the default of `--log-level`."""
    add(group, "served-model-name", filled, "names of the model in requests; answers have the first one", nargs="+")
    add(group, "tool-call-parser", str, "format of the model's tool calls", "hermes", choices=sorted(TOOL_PARSERS))
    text = 'adapters as NAME=PATH, or as JSON {"name": "…", "path": "…"}; requests name one as their model'
    add(group, "lora-modules", filled, text, [], nargs="+")
    levels = ["debug", "info", "warning", "error"]
    add(group, "log-level", str, "least severe level to log", log_level, choices=levels)


def lora_modules(given: list[str]) -> tuple[LoRARequest, ...]:
    """Return the adapters of `--lora-modules`. ValueError or TypeError if one is invalid, or two have one name."""
    found: dict[str, LoRARequest] = {}
    for number, text in enumerate(given, 1):
        if text.lstrip().startswith("{"):
            try:
                fields = json.loads(text)
            except ValueError as error:
                raise ValueError(f"--lora-modules must be NAME=PATH or a JSON object, got {text!r}: {error}") from error
            unknown = fields.keys() - {"name", "path", "base_model_name"}
            if unknown or not {"name", "path"} <= fields.keys():
                raise ValueError(f"--lora-modules: an object must have name and path, and nothing else, got {text!r}")
            name, path = fields["name"], fields["path"]
        else:
            name, _, path = text.partition("=")
            if not name or not path:
                raise ValueError(f"--lora-modules must be NAME=PATH or a JSON object, got {text!r}")
        adapter = LoRARequest(name, number, path)
        if found.setdefault(name, adapter) is not adapter:
            raise ValueError(f"--lora-modules has the name {name!r} twice")
    return tuple(found.values())


def allows_updating(args: argparse.Namespace) -> bool:
    """Return whether adapters can be loaded over HTTP: by the option, or by vLLM's variable, if it is 1 or true."""
    return args.server_allow_runtime_lora_updating or os.environ.get(LORA_VARIABLE, "").lower() in ("1", "true")


def add_request_bounds(group: argparse._ArgumentGroup) -> None:
    """Add the options that limit the size of one request."""
    add(group, "max-choices", positive, "completions of one request: its prompts times n", ServerOptions.max_choices)
    add(group, "max-request-bytes", positive, "size of a request's body", ServerOptions.max_request_bytes)
    values = "numbers, texts, lists and objects of a request's body, and tokens of its prompts"
    add(group, "max-request-values", positive, values, ServerOptions.max_request_values)


def add_tls(group: argparse._ArgumentGroup) -> None:
    """Add the options of HTTPS."""
    add(group, "ssl-keyfile", filled, "the server's private key")
    add(group, "ssl-certfile", filled, "the server's certificate; enables HTTPS")
    add(group, "ssl-ca-certs", filled, "certificates of the authorities that sign clients' certificates")
    add(
        group, "ssl-cert-reqs", int, "of clients: 0 none, 1 optional, 2 required", int(ssl.CERT_NONE), choices=[0, 1, 2]
    )


def add_limits(group: argparse._ArgumentGroup) -> None:
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
    text = "time without a request after which a connection is closed; must be longer than that of a proxy"
    add(group, "timeout-keep-alive", seconds, text, ServerOptions.timeout_keep_alive_s)
    add(
        group,
        "max-stored-responses",
        not_negative,
        "responses to store; 0 stores none",
        ServerOptions.max_stored_responses,
    )
    add(
        group,
        "max-stored-response-bytes",
        not_negative,
        "memory of stored responses; 0 stores none",
        ServerOptions.max_stored_response_bytes,
    )
    text = "time for which a response is stored; 0 stores none"
    add(group, "max-stored-response-age", seconds, text, ServerOptions.max_stored_response_age_s)
    proxies = "addresses or networks of proxies whose X-Forwarded-For is trusted; * for all (default: none)"
    add(group, "forwarded-allow-ips", filled, proxies, [], nargs="+")
    add(group, "allowed-origins", filled, "origins of web pages that may call the server; * for all", [], nargs="+")


def add(
    group: argparse._ArgumentGroup,
    name: str,
    kind: Callable[[str], object],
    text: str,
    default: object = None,
    nargs: str | None = None,
    choices: Collection[object] | None = None,
) -> None:
    """Add the option `--name`. It is stored as `server_name`, because the engine may have an option `name`."""
    if default:
        text += f" (default: {default})"
    metavar = None
    if choices is None:
        metavar = name.split("-")[-1].upper() if kind in (str, filled) else "SECONDS" if kind is seconds else "N"
    group.add_argument(
        f"--{name}",
        dest=f"server_{name.replace('-', '_')}",
        type=kind,
        default=default,
        help=text,
        nargs=nargs,
        choices=choices,
        metavar=metavar,
    )


def flag(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    """Add the option `--name`, which has no value."""
    group.add_argument(f"--{name}", dest=f"server_{name.replace('-', '_')}", action="store_true", help=text)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def not_negative(text: str) -> int:
    """Parse an integer of at least 0."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a finite number of at least 0."""
    if not 0 <= float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return float(text)


def settings_of(args: argparse.Namespace) -> Settings:
    """Check the arguments that `make_parser` has parsed, and return the settings. Raises ValueError, TypeError."""
    args.model = first_given(args.server_model, args.model, TINY_QWEN3)
    engine_args = EngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config()
    if args.server_enable_kv_slots:
        check_folder(engine_args)
    if not (args.server_ray and (args.server_ray_address or os.environ.get("RAY_ADDRESS"))):
        check_files(engine_args)  # otherwise, other machines read the files
    options = server_options(args)
    if options.allow_runtime_lora_updating and not config.enable_lora:
        raise ValueError(f"--allow-runtime-lora-updating and {LORA_VARIABLE} need --enable-lora")
    if args.server_ray and options.allow_runtime_lora_updating:
        raise ValueError(
            f"--allow-runtime-lora-updating and {LORA_VARIABLE} cannot be used with --ray: only one of the replicas "
            f"would load the adapter. Name all adapters in --lora-modules"
        )
    of_ray = ray_options(args, config)
    return Settings(engine_args, options, args.server_max_queued_requests, args.server_log_level, of_ray)


def check_files(engine_args: EngineArgs) -> None:
    """Raise ValueError if a file that the engine reads after its start is invalid: the chat template."""
    if engine_args.chat_template is not None:
        check_chat_template(engine_args.chat_template)


def shared_options(args: argparse.Namespace) -> ServerOptions:
    """Return the options that `nanovllm run-batch` has, too. Raises ValueError if they are invalid."""
    if args.server_lora_modules and not args.enable_lora:
        raise ValueError("--lora-modules needs --enable-lora")
    name = TINY_QWEN3.name if args.model == TINY_QWEN3 else str(args.model)
    return ServerOptions(
        model_names=tuple(args.server_served_model_name or [name]),
        max_request_bytes=args.server_max_request_bytes,
        max_request_values=args.server_max_request_values,
        max_choices=args.server_max_choices,
        parsers=parsers_named(args.server_tool_call_parser, args.reasoning_parser),
        lora_modules=lora_modules(args.server_lora_modules),
    )


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Return the server's options. Raises ValueError if they are invalid."""
    return replace(
        shared_options(args),
        api_keys=(*args.server_api_key, *keys_of_environment()),
        max_requests_per_minute=args.server_max_requests_per_minute,
        allowed_origins=tuple(args.server_allowed_origins),
        allow_runtime_lora_updating=allows_updating(args),
        root_path=args.server_root_path,
        log_requests=not args.server_disable_log_requests,
        forwarded_allow_ips=tuple(args.server_forwarded_allow_ips),
        drain_timeout_s=args.server_drain_timeout,
        timeout_keep_alive_s=args.server_timeout_keep_alive,
        enable_kv_slots=args.server_enable_kv_slots,
        enable_tokenizer_info=args.server_enable_tokenizer_info_endpoint,
        max_stored_responses=args.server_max_stored_responses,
        max_stored_response_bytes=args.server_max_stored_response_bytes,
        max_stored_response_age_s=args.server_max_stored_response_age,
        tls=tls_options(args),
    )


def keys_of_environment() -> list[str]:
    """Return the keys in the variable of the environment. Raises ValueError if it is set but has no key.

    Such a variable would start a server that needs no key, although its operator wanted one.
    """
    text = os.environ.get(API_KEY_VARIABLE)
    keys = [] if text is None else text.split()
    if text is not None and not keys:
        raise ValueError(f"{API_KEY_VARIABLE} must have at least one key, got {text!r}; unset it to allow all requests")
    return keys


def tls_options(args: argparse.Namespace) -> dict[str, object]:
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
    tls = given | {"ssl_cert_reqs": args.server_ssl_cert_reqs} if given else {}
    check_tls(tls)
    return tls


def log_to_stderr(level: str) -> None:
    """Send the log to stderr, from `level` on."""
    log = logging.StreamHandler()
    log.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[log])


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


def keep_from_collector() -> None:
    """Exclude all existing objects from garbage collection.

    They live as long as the process. A collection that traverses the objects of torch, transformers and the tokenizer
    takes 100 ms, and stops all streams.
    """
    gc.collect()
    gc.freeze()


def attempt(url: str, options: ServerOptions, has_chat: bool) -> str:
    """Return the last line of an announcement: a command that sends a request."""
    body = {"messages": [{"role": "user", "content": QUESTION}]} if has_chat else {"prompt": QUESTION}
    key = ' -H "Authorization: Bearer $KEY"' if options.api_keys else ""
    return f"""\
try it           curl {url}/v1/{"chat/" if has_chat else ""}completions{key} \
-H 'Content-Type: application/json' -d '{json.dumps(body)}'"""
