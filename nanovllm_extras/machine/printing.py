"""Print in programs that must not end because nobody reads their output: a closed pipe, or a disk that is full.

nanovllm serve | head -1        # the server goes on when head has ended
"""

import os
import sys
from contextlib import suppress
from typing import IO


def say(text: object = "", file: IO[str] | None = None) -> None:
    """Print a line and flush it. Text that cannot be printed is lost, and so is all later output of this stream.

    file: stdout by default.
    """
    stream = sys.stdout if file is None else file
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):  # ValueError: the stream has been closed
        discard_output(stream)


def escape_unprintable() -> None:
    """Print escape sequences for characters that the encoding of the output lacks, instead of raising an exception."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # None: no stream, or not a stream of text with an encoding
        if reconfigure is not None:
            with suppress(ValueError, OSError):
                reconfigure(errors="backslashreplace")


def flush_output() -> OSError | None:
    """Write what is left of stdout, and return the error if that is not possible.

    Otherwise, Python would print a traceback when it ends.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except ValueError:  # it has been closed
        return None
    except OSError as error:
        discard_output(sys.stdout)
        return error
    return None


def discard_output(stream: IO[str] | None) -> None:
    """Discard what is left of a stream, and all that is printed to it from now on."""
    if stream is None:
        return
    with suppress(AttributeError, OSError, ValueError):  # a stream without a file
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
