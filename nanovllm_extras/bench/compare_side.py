"""One side of a comparison: a process with an engine (`compare_worker.py`), to which loads are sent in turns.

Each side has a process of its own, because two engines in one process would share its memory, threads, caches of
compiled kernels and random state, and its peak memory could not be divided. Both processes stay alive, so that the runs
of the sides alternate on the same machine in the same minute.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from nanovllm_extras.bench.compare_workloads import TimedWork
from nanovllm_extras.bench.results import Result
from nanovllm_extras.bench.serve_load import ServedLoad

ROOT = Path(__file__).resolve().parents[2]  # the folder with both packages
END_S = 10.0  # how long a process may take to end


class SideError(RuntimeError):
    """Raised if an engine cannot be started, or fails while it serves. The traceback is on stderr."""


@dataclass(frozen=True)
class SideSettings:
    """What a side's process needs to make its engine."""

    package: str
    model: str
    options: Mapping[str, Any]
    extension: str | None
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Ready:
    """What an engine reports when it has started."""

    description: str
    """What computes."""
    max_prompt_and_output: int
    """Tokens that a request may have, prompt and output together."""
    vocab_size: int


@dataclass(frozen=True)
class SideRun:
    """One served load, and the peak memory of the process up to now."""

    served: ServedLoad
    peak_memory_bytes: int


class Side:
    """Starts the process of one side, and ends it as a context manager."""

    def __init__(self, name: str, settings: SideSettings) -> None:
        self.name = name
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nanovllm_extras.bench.compare_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        self.send(asdict(settings))

    def wait_until_ready(self) -> Ready:
        """Return what the engine reports when it has started. Raises SideError if it cannot start."""
        return Ready(**self.receive())

    def serve(self, load: Sequence[TimedWork], extra_args: Sequence[Mapping[str, object]] | None = None) -> SideRun:
        """Let the engine serve a load from an empty prefix cache. Raises SideError if it fails."""
        self.send({"load": [asdict(work) for work in load], "extra_args": extra_args})
        message = self.receive()
        results = [Result(**one) for one in message["results"]]
        served = ServedLoad(results, message["token_ids"], message["counters"])
        return SideRun(served, message["peak_memory_bytes"])

    def send(self, message: Mapping[str, object]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `receive` says why the process has ended
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SideError(f"the process of the {self.name} has ended with status {self.process.wait()}")
        message = json.loads(line)
        if "error" in message:
            raise SideError(f"the {self.name} has failed: {message['error']}")
        return message

    def __enter__(self) -> "Side":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        if kind is not None:
            self.process.terminate()  # it may be in a load
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
