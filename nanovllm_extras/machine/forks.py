"""Processes without threads: a process that was forked after an engine was made."""

import functools
import os

from nanovllm_extras.machine.dead import forked

first_process = functools.cache(os.getpid)  # the process that called it first: forked processes inherit the result


def check_process() -> None:
    """Raise EngineDeadError if this process was forked after an engine was made.

    A forked process has none of its parent's threads, but OpenMP waits for them, so a step would never end.
    """
    if first_process() != os.getpid():
        raise forked(first_process())
