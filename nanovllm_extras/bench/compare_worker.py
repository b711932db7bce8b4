"""The process of one side of `nanovllm bench compare`: one engine that serves loads when it is told to.

Messages are lines of JSON: the first line on stdin has the engine's options, and each further line a load. Each is
answered by a line. Whatever else prints goes to stderr, so that a `print` of an extension cannot break the messages.
"""

import json
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from nanovllm_extras.bench.compare_engine import make_engine, make_params
from nanovllm_extras.bench.compare_workloads import TimedWork
from nanovllm_extras.bench.serve_load import LoadServer
from nanovllm_extras.machine.machine_limits import read_text

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def main() -> int:
    """Answer the messages of this process until stdin ends. Return 1 if the engine has failed."""
    messages, replies = sys.stdin, take_stdout()
    try:
        with ExitStack() as stack:
            answer(messages, replies, stack)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # an extension may raise anything, also SystemExit
        traceback.print_exc()
        reply(replies, {"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def take_stdout() -> IO[str]:
    """Return a file that writes to this process's stdout. From now on, all other output goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def answer(messages: IO[str], replies: IO[str], stack: ExitStack) -> None:
    """Make the engine that the first message describes, and serve the load of each further message."""
    first = messages.readline()
    if not first:
        return
    side: dict[str, Any] = json.loads(first)
    engine = make_engine(side["package"], side["model"], side["options"], side["extension"], stack)
    runner, capacity = engine.runner, engine.scheduler.block_manager.capacity
    reply(
        replies,
        {
            "description": engine.description.split("; ")[-1],
            "max_prompt_and_output": min(runner.max_model_len, capacity),
            "vocab_size": runner.shape.vocab_size,
        },
    )
    make = partial(make_request_params, side["package"], side["temperature"], side["seed"])
    server = LoadServer(engine, make)
    for line in messages:
        message = json.loads(line)
        served = server.serve([TimedWork(**work) for work in message["load"]], message["extra_args"])
        reply(replies, {**asdict(served), "peak_memory_bytes": peak_memory_bytes()})


def make_request_params(
    package: str, temperature: float, seed: int, index: int, num_tokens: int, extra_args: Mapping[str, object]
) -> Any:
    """Return the parameters of request `index`, which has a seed of its own."""
    return make_params(package, num_tokens, temperature, seed + index, dict(extra_args))


def reply(replies: IO[str], message: Mapping[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def peak_memory_bytes() -> int:
    """Return the peak memory of tensors on CUDA, otherwise that of this process and its descendants.

    On Linux it is read from /proc: `getrusage` would count the memory of the process that has started this one.
    Returns 0 if the system does not say.
    """
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/status"):
        lines = [line.partition(":") for line in read_text(file).splitlines()]
        values = {name: value.strip() for name, _, value in lines}
        if "PPid" in values:  # else the process has ended meanwhile
            pid = int(file.parent.name)
            parents[pid] = int(values["PPid"])
            peaks[pid] = int(values.get("VmHWM", "0 kB").split()[0]) * 1024  # kernel threads have none
    family = {os.getpid()}
    if not family <= peaks.keys():
        if resource is None:
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    while found := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= found
    return sum(peaks[pid] for pid in family)


if __name__ == "__main__":
    sys.exit(main())
