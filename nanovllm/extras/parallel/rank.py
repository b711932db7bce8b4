"""The process of a rank above 0: what holds from its first moment, before it imports torch, which takes seconds.

    python nanovllm/extras/parallel/rank.py SOCKET PARENT FOLDER

SOCKET is the number of an inherited socket to rank 0, PARENT the process that has started this one. `worker.py` does
the work. However this ends, the process ends:

    rank 0 closes the socket, or dies       at once, even while a collective waits
    the parent dies                         once it is ready, Linux kills it
    an error                                rank 0 gets its text

FOLDER is where the ranks of this machine meet, "" on other machines. Rank 0 removes it when all are ready; if rank 0 is
killed before, this process does.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ^C in the terminal is for rank 0, which then ends this process
    driver = socket.socket(fileno=number)
    folders = [folder] if folder else []
    threading.Thread(target=exit_with, args=(driver, folders), daemon=True).start()

    def on_ready() -> None:
        folders.clear()
        end_with_parent(parent)

    os._exit(run(driver, on_ready))  # with whatever a library would still wait for


def exit_with(driver: socket.socket, folders: list[str]) -> None:
    """Remove folders and end the process when rank 0 has closed the socket."""
    poll = select.poll()
    poll.register(driver.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def run(driver: socket.socket, on_ready: Callable[[], None]) -> int:
    """Returns the exit status."""
    try:
        sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
        from nanovllm.extras.parallel.worker import work

        work(driver, on_ready)
    except ConnectionError:  # rank 0 has ended
        return 0
    except BaseException as error:
        with suppress(OSError):  # rank 0 has ended too
            driver.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        with suppress(OSError):
            traceback.print_exc()
    return 1


def end_with_parent(parent: int) -> None:
    """From now on Linux kills this process when its parent ends, even if another process holds rank 0's socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before the line above
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
