"""Run the command `nanovllm serve [MODEL]`: parse its options, and start the server."""

import argparse
import logging
import os
import socket
import sys
from typing import Any

from fastapi import FastAPI

from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.machine.event_loop import run
from nanovllm_extras.machine.machine_limits import allow_open_files
from nanovllm_extras.machine.printing import say
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.routes.app import load_adapters, make_app
from nanovllm_extras.serve.routes.server import DrainingServer, listen
from nanovllm_extras.serve.routes.ui import LiveLines
from nanovllm_extras.serve.serve_settings import (
    Settings,
    attempt,
    keep_from_collector,
    log_to_stderr,
    make_parser,
    settings_of,
)
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.trace.recording import Sinks, TraceFile
from nanovllm_extras.vllm.engine_args import EngineArgs


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
        say(f"nanovllm serve: {error}", sys.stderr)
        return 1


def serve(settings: Settings, args: argparse.Namespace) -> int:
    """Serve until a signal, and return the exit status."""
    engine_args, options = settings.engine_args, settings.options
    if settings.ray is not None:
        return serve_by_ray(settings, args)
    if engine_args.node_rank:
        return compute_for_others(engine_args)
    live = LiveLines() if args.server_ui else None
    trace = Sinks([sink for sink in (live, args.server_trace and TraceFile(args.server_trace)) if sink])
    allow_open_files()
    listening = listen(args.server_host, args.server_port)
    url = url_of(listening, "https" if options.tls else "http")
    say(f"loading {options.model_names[0]} for {url} …")

    def load() -> AsyncLLM:
        queued = settings.max_queued_requests
        llm = AsyncLLM.from_engine_args(engine_args, max_queued_requests=queued, trace=trace if trace.sinks else None)
        load_adapters(llm, options)
        keep_from_collector()
        return llm

    def announce(llm: AsyncLLM) -> None:
        say(announcement(llm, options, url))
        if live is not None:
            say(f"watch it         {url}/ui")

    run(start(make_app(options, live=live), listening, load, announce, leave_at_once))
    return 0


def serve_by_ray(settings: Settings, args: argparse.Namespace) -> int:
    """Serve with Ray until a signal, and return the exit status. Raises RuntimeError if Ray is not installed."""
    try:
        from nanovllm_extras.serve.ray.ray_launch import run as run_on_cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise RuntimeError("--ray needs the package ray: run pip install 'nanovllm[ray]'") from error
    return run_on_cluster(settings, args.server_host, args.server_port)


def compute_for_others(engine_args: EngineArgs) -> int:
    """Run the ranks of a machine other than machine 0, without HTTP, until machine 0 ends. Return the exit status."""
    try:
        say(f"computing for {engine_args.master_addr}:{engine_args.master_port} …")
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
    say("nanovllm serve: ended while loading", sys.stderr)
    os._exit(0)


async def start(app: FastAPI, *others: Any) -> None:
    """Run the server in an event loop until a signal. others: arguments of `DrainingServer.run_until_signal`."""
    await DrainingServer(app).run_until_signal(*others)


def url_of(listening: socket.socket, scheme: str) -> str:
    """Return a URL at which the server can be reached from this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{host}:{port}"


def announcement(llm: AsyncLLM, options: ServerOptions, url: str) -> str:
    """Return the text that is printed when the server is ready: names, capacity, and a command to try it."""
    engine = llm.engine
    num_groups = getattr(engine.scheduler.block_manager, "num_groups", 1)  # of layers, each of which needs blocks
    num_tokens = engine.parts.num_kv_blocks // num_groups * engine.parts.block_size
    most = engine.config.max_num_seqs
    concurrency = min(num_tokens / engine.parts.max_model_len, most)
    pool = engine.runner.layout.pool
    state_line = "" if pool is None else f"states           {pool.describe()}\n"
    has_chat = getattr(engine.tokenizer, "chat_template", None) is not None
    return f"""\
serving          {", ".join(options.model_names)} at {url}/v1
computed by      {engine.description.split("; ")[-1]}
KV cache         {num_tokens:,} tokens in {engine.parts.num_kv_blocks:,} blocks
{state_line}max concurrency  {most} requests, of which {concurrency:.1f} may have {engine.parts.max_model_len:,} tokens
{attempt(url, options, has_chat)}"""
