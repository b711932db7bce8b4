"""Limits for the learner's code: time, memory, output, and no other programs.

They protect the learner from mistakes, not the machine from attacks.
"""

import faulthandler
import io
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from types import FrameType

from labs.learn.answers import Stopped
from labs.learn.texts import Text

MAX_PRINTED = 4_000  # characters
MEMORY_BYTES = 1 << 30  # more than the process has at the start
PROCESS_EVENTS = ("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen")


class Printed(io.StringIO):
    """Keeps what the learner's code prints, and stops it if that is too much."""

    def write(self, text: str) -> int:
        room = MAX_PRINTED - self.tell()
        if len(text) > room:
            super().write(text[:room])
            why = Text(
                f"The code printed more than {MAX_PRINTED} characters and was stopped.",
                f"代码打印了超过 {MAX_PRINTED} 个字符，已被停止。",
            )
            raise Stopped(why)
        return super().write(text)


@contextmanager
def capture() -> Iterator[Printed]:
    """Keep what is printed in one run. It is printed after all if the code is stopped, for the report of that."""
    printed = Printed()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            yield printed
    except Stopped:
        with suppress(Stopped):
            sys.stdout.write(printed.getvalue())
        raise


def limit(seconds: float, file: str) -> Printed:
    """Apply all limits to this process, for good. Return what the code prints from now on.

    file: the learner's file, so that the line that runs too long can be named
    """
    faulthandler.disable()  # a crash is described by the process that waits for this one
    printed = Printed()
    sys.stdout = sys.stderr = printed
    sys.stdin = io.StringIO()
    limit_memory()
    forbid_processes()
    limit_time(seconds, file)
    return printed


def limit_memory() -> None:
    """Let large allocations raise MemoryError, where the system can do that."""
    with suppress(ImportError, OSError, ValueError, AttributeError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def forbid_processes() -> None:
    """Stop code that starts another process."""

    def refuse(event: str, _: object) -> None:
        if event in PROCESS_EVENTS:
            raise Stopped(
                Text("The code tried to start another process and was stopped.", "代码试图启动另一个进程，已被停止。")
            )

    sys.addaudithook(refuse)


def limit_time(seconds: float, file: str) -> None:
    """Stop code that is still running after `seconds`, and say in which line."""

    def stop(_: int, frame: FrameType | None) -> None:
        lines = [one for one in traceback.extract_stack(frame) if one.filename == file]
        where = Text("", "") if not lines else Text(f" in line {lines[-1].lineno}", f"第 {lines[-1].lineno} 行")
        raise Stopped(
            Text(
                f"The code was still running after {seconds:g} s{where.en} and was stopped. "
                "Is there a loop without an end?",
                f"{seconds:g} 秒后代码{where.zh}仍在运行，已被停止。是不是有死循环？",
            )
        )

    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds)


class TimeIsOver(BaseException):
    """Ends a search. `except Exception` does not catch it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End a block after `seconds`, where the system can do that. The limit for the whole process goes on afterwards."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeIsOver

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds, 0.02)  # again, if it came in a callback that ignores it
    try:
        with suppress(TimeIsOver):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, left - (time.monotonic() - start)))
