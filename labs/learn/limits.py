"""Limits for the learner's code: time, memory, output, and no other programs.

They protect the learner from mistakes, not the machine from attacks.
"""

import faulthandler
import io
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from types import TracebackType

from labs.learn.answers import Stopped
from labs.learn.texts import Text
from nanovllm_testing.interrupt import TimeIsOver, interrupt_after

MAX_PRINTED = 4_000  # characters
MEMORY_BYTES = 1 << 30  # more than the process has at the start
WATCH_S = 0.05  # how often the clocks are read
MORE_PROCESSOR_S = 1.0  # after the limit: then the system ends code that lets no other thread run
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


def limit(file: str, processor_s: float, wall_s: float, give_up: Callable[[Text], None]) -> None:
    """Apply all limits to this process, for good. What the code prints from now on is kept in `sys.stdout`.

    file: the learner's file, so that the line that runs too long can be named
    give_up: called by another thread when the time is over. It reports why, and ends the process.
    """
    faulthandler.disable()  # a crash is described by the process that waits for this one
    sys.stdout = sys.stderr = Printed()
    sys.stdin = io.StringIO()
    hide_tracebacks(file)
    use_one_thread()
    limit_time(file, processor_s, wall_s, give_up)
    limit_memory()
    forbid_processes()


def hide_tracebacks(file: str) -> None:
    """Print an exception of a callback or a thread as the learner's own line, without the checker's traceback."""

    def show(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        if not issubclass(kind, Stopped):
            lines = [f"line {one.lineno}: " for one in traceback.extract_tb(trace) if one.filename == file]
            print("".join(lines[-1:]) + "".join(traceback.format_exception_only(kind, error)).strip())

    sys.unraisablehook = lambda found: show(found.exc_type, found.exc_value, found.exc_traceback)
    threading.excepthook = lambda found: show(found.exc_type, found.exc_value, found.exc_traceback)


def use_one_thread() -> None:
    """Let PyTorch compute in one thread: waiting threads of a large machine would use up the processor time."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


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


def limit_time(file: str, processor_s: float, wall_s: float, give_up: Callable[[Text], None]) -> None:
    """Call `give_up` when the code has used too much processor time, or does not end, with the line that it is in.

    Another thread watches the clocks. An exception that is raised in the code would be lost in `except:` and in
    callbacks of libraries. Code that never lets the other thread run is ended by the system, where it can do that.
    """
    learner = threading.get_ident()
    end_processor, end = time.process_time() + processor_s, time.monotonic() + wall_s

    def watch() -> None:
        while True:
            time.sleep(WATCH_S)
            with suppress(MemoryError):
                if time.process_time() > end_processor:
                    give_up(describe_loop(find_running_line(learner, file), processor_s))
                elif time.monotonic() > end:
                    give_up(describe_wait(find_running_line(learner, file), wall_s))

    with suppress(ImportError, OSError, ValueError):
        import resource

        for limited, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, math.ceil(end_processor + MORE_PROCESSOR_S)),
        ):
            resource.setrlimit(limited, (value, resource.getrlimit(limited)[1]))
    threading.Thread(target=watch, daemon=True).start()


def find_running_line(thread: int, file: str) -> int | None:
    """Return the line of `file` that a thread is in, or None if it is in no function of this file."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return None if frame is None else frame.f_lineno


def describe_loop(line: int | None, seconds: float) -> Text:
    en, zh = ("", "") if line is None else (f" in line {line}", f"第 {line} 行")
    return Text(
        f"The code was still running after {seconds:g} s of processor time{en} and was stopped. "
        "Is there a loop without an end?",
        f"用了 {seconds:g} 秒处理器时间后，代码{zh}仍在运行，已被停止。是不是有死循环？",
    )


def describe_wait(line: int | None, seconds: float) -> Text:
    en, zh = ("", "") if line is None else (f" in line {line}", f"第 {line} 行")
    return Text(
        f"The code had not ended after {seconds:g} s{en} and was stopped. Does it sleep, or wait for something?",
        f"{seconds:g} 秒后代码{zh}还没有结束，已被停止。它是不是在休眠，或者在等待什么？",
    )


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End a block after `seconds` of processor time, where the system can do that."""
    with suppress(TimeIsOver), interrupt_after(seconds):
        yield
