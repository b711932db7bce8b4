"""Follow one HTTP request through the layers of a server: what each layer logs, and in which thread.

    python -m labs.demos.one_request

The program starts `nanovllm serve` in a process of its own, sends it one chat request, and prints the log. The lines
come from wrappers around methods of each layer; the code of the server is not changed. Needs the extra `serve`.
"""

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from nanovllm_extras.cli.commands import install_command

MARK = "|layer|"  # begins the lines that the parent process prints
BODY = {
    "messages": [{"role": "user", "content": "What is a block table?"}],
    "max_tokens": 3,
    "temperature": 0,
    "stream": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="One request through the layers of a serving stack.")
    parser.add_argument("--server", action="store_true", help="be the server (the program starts itself so)")
    args = parser.parse_args()
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            parser.exit(1, f"the server needs the package {package}: run {install_command('serve')}\n")
    if args.server:
        run_server()
    else:
        lines, events = send_one_request()
        print_log(lines)
        print(f"\nthe client has received {len(events)} events: {''.join(map(text_of, events))!r}")


# ---- the server, whose layers are wrapped


def run_server() -> None:
    from nanovllm.scheduler import Scheduler
    from nanovllm_extras.engine.full_engine import LLMEngine
    from nanovllm_extras.execution.full_runner import ModelRunner
    from nanovllm_extras.serve.async_llm import AsyncLLM
    from nanovllm_extras.serve.commands import serve_command
    from nanovllm_extras.serve.engine_thread import EngineThread
    from nanovllm_extras.serve.routes import chat_route
    from nanovllm_extras.serve.streaming import EventStream

    api, core, executor, worker = "API server", "engine core", "executor", "worker"
    before(
        chat_route, "prepare_chat", api, lambda server, request, body: f"POST {request.url.path}: check, render, encode"
    )
    before(EngineThread, "add", api, lambda thread, requests: "queue a command for the engine's thread")
    before(LLMEngine, "add_request", core, lambda *arguments: "add the request to the waiting queue")
    after(Scheduler, "schedule", core, describe_step)
    before(
        LLMEngine, "compute", executor, lambda engine, step: "build the batch, call the worker (one rank: a function)"
    )
    before(ModelRunner, "run", worker, lambda runner, batch: f"forward pass; rows: {len(batch.input_ids)}; sample")
    after(Scheduler, "update", core, lambda advanced, *_: f"append {len(advanced)} token, end what is done")
    before(AsyncLLM, "_hand_over", core, lambda llm, outputs: f"put {len(outputs)} output into an inbox")
    after(EventStream, "encode", api, lambda event, *_: f"send an event of {len(event)} bytes")
    sys.exit(serve_command.main(["--port", "0", "--log-level", "warning"]))


def describe_step(step: Any, *_: Any) -> str:
    chunks = ", ".join(f"{'decode' if n == 1 else 'prefill'} of {n}" for _, _, n in step.chunks)
    return f"schedule: {chunks}" if chunks else "schedule: nothing to do"


def before(owner: Any, name: str, layer: str, describe: Callable[..., str]) -> None:
    """Log a line whenever the function is called. describe: gets its arguments"""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        log(layer, describe(*arguments))
        return inner(*arguments, **named)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, layer: str, describe: Callable[..., str]) -> None:
    """Log a line whenever the function returns. describe: gets its result, then its arguments"""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        result = inner(*arguments, **named)
        log(layer, describe(result, *arguments))
        return result

    setattr(owner, name, wrapped)


def log(layer: str, text: str) -> None:
    thread = "event loop" if threading.current_thread() is threading.main_thread() else "engine"
    line = "\t".join([MARK, str(time.monotonic()), thread, layer, text])
    sys.stderr.write(f"{line}\n")  # in one piece: two threads write here


# ---- the client


def send_one_request() -> tuple[list[list[str]], list[Any]]:
    """Start the server, and send the request. Return the fields of each log line, and the events of the answer."""
    command = [sys.executable, "-m", "labs.demos.one_request", "--server"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        url = next((found[1] for line in server.stdout if (found := re.match(r"serving .* at (\S+)$", line))), None)
        if url is None:
            raise RuntimeError(f"the server has not started: {server.communicate()[1]}")
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(BODY).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            data = [line[6:].strip() for line in response if line.startswith(b"data: {")]
        server.send_signal(signal.SIGTERM)
        log_text = server.communicate()[1]
    lines = [line.split("\t")[1:] for line in log_text.splitlines() if line.startswith(MARK)]
    return lines, [json.loads(one) for one in data]


def print_log(lines: list[list[str]]) -> None:
    start = float(lines[0][0])
    print("    ms   thread       layer         what it does")
    for moment, thread, layer, text in lines:
        print(f"{1e3 * (float(moment) - start):6.1f}   {thread:10}   {layer:11}   {text}")


def text_of(event: Any) -> str:
    choices = event["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


if __name__ == "__main__":
    main()
