"""A run that does not end is stopped, also if it swallows the first exception, and nothing is left behind."""

import contextlib
import gc
import signal
import sys
from contextlib import suppress

import pytest

from nanovllm_testing.interrupt import TimeIsOver, interrupt_after
from nanovllm_testing.played_run import time_limit
from nanovllm_testing.violation import Hang

SECONDS = 0.05


def spin():
    while True:
        pass


def in_except_exception():
    while True:
        with suppress(Exception):
            spin()


def in_bare_except():
    for _ in range(3):
        with suppress(BaseException):  # as a bare `except:`
            spin()
    spin()


def in_callback():
    """The garbage collector calls `spin`, and swallows what it raises."""

    def callback(phase, info):
        spin()

    gc.callbacks.append(callback)
    try:
        gc.collect()
        spin()
    finally:
        gc.callbacks.remove(callback)


def in_del():
    class Slow:
        def __del__(self):
            spin()

    Slow()
    spin()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("run", [spin, in_except_exception, in_bare_except, in_callback, in_del])
def test_a_run_without_an_end_is_stopped(run):
    before = signal.getsignal(signal.SIGVTALRM), sys.unraisablehook
    where = r"not ended after 0\.05 s; it is in line \d+ of .*test_interrupt\.py, `(pass|while)"
    with pytest.raises(Hang, match=where), time_limit(SECONDS):
        run()
    assert (signal.getsignal(signal.SIGVTALRM), sys.unraisablehook) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_a_block_that_ends_is_not_interrupted():
    with interrupt_after(SECONDS):
        pass
    for _ in range(2_000_000):  # longer than the limit
        pass


def test_other_errors_of_a_callback_are_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: reported.append(found.exc_type))

    class Bad:
        def __del__(self):
            raise KeyError

    with suppress(TimeIsOver), interrupt_after(SECONDS):
        Bad()
        in_del()
    assert reported == [KeyError]


def test_the_end_of_a_block_is_not_interrupted():
    """It would leave the manager of the block out, and so the exception would be caught by nobody."""
    code = "import signal; signal.raise_signal(signal.SIGVTALRM)"
    with interrupt_after(60):
        exec(compile(code, contextlib.__file__, "exec"))
    with pytest.raises(TimeIsOver), interrupt_after(60):
        exec(compile(code, "own.py", "exec"))
