"""A process of its own, in which kernels may crash or hang, and the first load of a library in such a process.

A library runs code when it is loaded. If that is not for this processor, it would end the engine before the self-check
could say anything. So a library that this machine has not loaded since its start is loaded by another process first.
"""

import functools
import json
import logging
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from nanovllm.layers.attention import BackendError
from nanovllm_extras.machine.machine_limits import read_text

logger = logging.getLogger(__name__)

TIMEOUTS = {"cpu": 20.0, "compile": 120.0, "cuda": 15.0}  # seconds
CRASHES = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}
FAILED = 3  # exit status of the process: a kernel has raised an exception


class SelfCheckError(BackendError):
    """Raised with the reason if the kernels have failed the self-check."""


class HangError(SelfCheckError):
    """Raised if kernels did not return in time. The machine may have been busy, so the next start tries again."""


class LoadError(SelfCheckError):
    """Raised if a library crashes or hangs when it is loaded. Each start tries again: no result is stored for that."""


class NotAvailableError(SelfCheckError):
    """Raised with the reason if a way to compute is not for this machine or this model."""


class CrashTest:
    """Runs a command in another process. `wait` raises SelfCheckError if a kernel has crashed, hung or failed.

    The process may take `timeout` seconds. If it prints a number, it may take that many seconds from then on. If it
    ends in another way (it cannot be started, has no memory, is killed), nothing is known. The comparison in this
    process must suffice then.
    """

    def __init__(self, command: list[str], timeout: float) -> None:
        self.command, self.timeout = command, timeout
        self.error: SelfCheckError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        try:
            process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environment, text=True, errors="replace",
            )  # fmt: skip
        except OSError as error:
            logger.info("the kernels are not tested in a process of their own: %s", error)
            return
        try:
            last = self._read_to_end(process)
        except queue.Empty:
            seconds = f"{self.timeout:g} s"
            self.error = HangError(f"hang: the kernels did not return within {seconds}, in a process of their own")
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it may still wait for a device
                process.wait(1)
            return
        status = process.wait()
        if -status in CRASHES:
            name = signal.Signals(-status).name
            self.error = SelfCheckError(f"crash: the kernels ended a process of their own by {name}")
        elif status == FAILED:
            self.error = SelfCheckError(f"error: the kernels failed in a process of their own: {last}")
        elif status:
            logger.info("the kernels are not tested in a process of their own (%d): %s", status, last)

    def _read_to_end(self, process: "subprocess.Popen[str]") -> str:
        """Return the last line that is not a number. Raises queue.Empty if the process takes too long."""
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read() -> None:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    lines.put(line.strip())
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        last, end = "", time.monotonic() + self.timeout
        while (line := lines.get(timeout=max(0.0, end - time.monotonic()))) is not None:
            if line.isdecimal():
                self.timeout = float(line)
                end = time.monotonic() + self.timeout
            else:
                last = line or last
        return last


def call_in_own_process(sizes: dict[str, object] | None, *paths: str) -> list[str]:
    """Return the command that loads libraries of C kernels and calls them, unless `sizes` is None."""
    kernels = find_spec("nanovllm_extras.machine.call_kernels")
    assert kernels is not None
    return [sys.executable, "-I", "-S", str(kernels.origin), json.dumps([sizes, *paths])]


# ---- the first load


def load_elsewhere_first(path: Path) -> None:
    """Load a library in another process, unless this machine has loaded it. Raises LoadError if it crashes or hangs."""
    reason = why_not_loaded(path)
    if reason is not None:
        raise LoadError(reason)


@functools.cache
def why_not_loaded(path: Path) -> str | None:
    """Return how another process that loads the library ends, or None if it loads the library.

    A file beside the library remembers a load until this machine starts again. A container image may contain the folder
    of another machine.
    """
    stored = path.with_name(f"loaded-{path.stem}")
    if read_text(stored) == this_machine():
        return None
    try:
        CrashTest(call_in_own_process(None, str(path)), TIMEOUTS["cpu"]).wait()
    except SelfCheckError as error:
        return f"{error}, when it loaded {path}; delete this file to compile it again"
    with suppress(OSError):  # a folder that cannot be written to
        stored.write_text(this_machine(), encoding="utf-8")
    return None


def this_machine() -> str:
    """Return a text that differs between machines, and on Linux between their starts."""
    return read_text(Path("/proc/sys/kernel/random/boot_id")).strip() or platform.node()
