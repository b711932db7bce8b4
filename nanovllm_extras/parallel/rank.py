"""The main program of a rank above 0. It makes sure that the process ends with its engine.

    python nanovllm_extras/parallel/rank.py SOCKET PARENT FOLDER

SOCKET is the number of an inherited socket to rank 0, PARENT the id of the process that started this one. This file
does not import torch, which takes seconds, so its guarantees hold from the start. `worker.py` does the work. The
process ends when

    rank 0 closes the socket, or dies       immediately, even while a collective waits
    the parent dies                         Linux kills this process, once it is ready
    an error occurs                         rank 0 gets the error's text

FOLDER is the folder in which the ranks of this machine meet, "" on other machines. Rank 0 removes it when all ranks are
ready. If rank 0 is killed before, this process removes it. A K/V store saves what waits before the process ends, unless
its parent is killed.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def main(arguments: list[str]) -> NoReturn:
    number, parent, folder = int(arguments[0]), int(arguments[1]), arguments[2]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles ^C in the terminal and then ends this process
    driver = socket.socket(fileno=number)
    folders = [folder] if folder else []
    last: list[Callable[[], object]] = []
    thread = threading.Thread(target=exit_with, args=(driver, folders, last), daemon=True)
    thread.start()

    def on_ready() -> None:
        folders.clear()
        end_with_parent(parent)

    status = run(driver, on_ready, last.append)
    if not status:
        thread.join()  # rank 0 has closed the socket: the thread ends the process
    os._exit(status)  # without waiting for threads of libraries


def exit_with(driver: socket.socket, folders: list[str], last: list[Callable[[], object]]) -> None:
    """Wait until rank 0 closes the socket; then remove the folders, make the last calls and end the process."""
    poll = select.poll()
    poll.register(driver.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for call in last:
        with suppress(Exception):
            call()
    os._exit(0)


def run(
    driver: socket.socket,
    on_ready: Callable[[], None],
    at_exit: Callable[[Callable[[], object]], None] = lambda call: None,
) -> int:
    """Do the rank's work, report an error to rank 0, and return the exit status.

    at_exit: registers a call that is made after rank 0 has closed the socket.
    """
    try:
        own = os.path.dirname(os.path.abspath(__file__))
        package = os.path.abspath(os.path.join(own, "..", ".."))  # not by PYTHONPATH, where ":" separates paths
        sys.path[:] = [package, *(path for path in sys.path if path != own)]
        from nanovllm_extras.parallel.worker import work

        work(driver, on_ready, at_exit)
    except ConnectionError:  # rank 0 has ended
        return 0
    except BaseException as error:
        with suppress(OSError):  # rank 0 may have ended too
            driver.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        with suppress(OSError):
            traceback.print_exc()
    return 1


def end_with_parent(parent: int) -> None:
    """Make Linux kill this process when its parent ends, even if another process still holds rank 0's socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the line above
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
