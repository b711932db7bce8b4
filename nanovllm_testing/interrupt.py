"""Interrupt code that computes too long, for example a loop without an end, also if it swallows exceptions."""

import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

AGAIN_S = 0.02
"""Seconds of the processor until the next interrupt."""


class TimeIsOver(BaseException):
    """Interrupts code. `except Exception` does not catch it. `stack` says where the code was."""

    def __init__(self, stack: traceback.StackSummary | None = None) -> None:
        super().__init__("the time is over")
        self.stack = stack or traceback.StackSummary()


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Raise TimeIsOver in a block that computes longer, every `AGAIN_S` until it ends. Only in the main thread on Unix.

    seconds: of the processor's time, so that a busy machine makes no difference

    One exception is not enough: a callback of the garbage collector, a `__del__` and a bare `except:` swallow it. For a
    TimeIsOver that a callback swallows, Python's report of an unraisable exception is left out.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        # At the end of a `with` block it would leave out that block's manager, perhaps the one that catches it. The
        # next interrupt comes soon.
        if not is_over and (frame is None or frame.f_code.co_filename != contextlib.__file__):
            raise TimeIsOver(traceback.extract_stack(frame))

    report: Callable[[Any], object] = sys.unraisablehook
    handler = signal.signal(signal.SIGVTALRM, interrupt)
    sys.unraisablehook = lambda found: None if found.exc_type is TimeIsOver else report(found)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:
            is_over = True
    finally:  # also if an interrupt has come before the line above
        is_over = True
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        sys.unraisablehook = report
