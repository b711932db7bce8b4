"""Run a function in a forked process, which is faster than a new one that imports everything again."""

import os
import signal
import traceback


def fork(function, *args):
    """Start `function` in a forked process and return its id. Its exit status is 1 if the function raises."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(60)  # no process is left behind if the test fails
    status = 1
    try:
        function(*args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def join(*pids):
    """Wait for forked processes, and check that none has raised."""
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(pids)


def die_at(function, num_calls=1, after=False):
    """Wrap a function: its call number `num_calls` kills the process, before or after the work is done."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(args)
        if len(calls) == num_calls and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if len(calls) == num_calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped
