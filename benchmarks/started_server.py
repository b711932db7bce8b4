"""A server of `nanovllm` in a process of its own, for as long as a benchmark uses it."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Running(NamedTuple):
    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def running(
    *words: str, variables: Mapping[str, str] | None = None, cores: set[int] | None = None, start_s: float = 300
) -> Iterator[Running]:
    """Start `nanovllm WORDS` on a free port, and wait until it says that it serves. The block may kill the process.

    variables: environment variables beside those of this process.
    cores: the processors that it may use, with a thread each.
    Raises RuntimeError with its output if it ends, or does not serve within `start_s` seconds.
    """
    command = [sys.executable, "-m", "nanovllm_extras", *words, "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | dict(variables or {})
    if cores:
        environment["OMP_NUM_THREADS"] = str(len(cores))
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        if cores:
            os.sched_setaffinity(process.pid, cores)  # before it starts threads
        try:
            deadline = time.monotonic() + start_s
            while not (found := re.search(r"^serving .*at (\S+)/v1$", read(log), re.MULTILINE)):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)} has not started: {read(log)}")
                time.sleep(0.1)
            yield Running(found[1], process)
        finally:
            process.terminate()
            process.wait(60)


def read(log: Any) -> str:
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")
