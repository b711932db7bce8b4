"""Run the C compiler, and keep its output in the user's cache folder under a name that proves the contents.

A process that maps a damaged library ends in SIGBUS or SIGSEGV, which no code can catch. So the name of a library ends
with a hash of its contents, and `find_or_compile` reads and checks the file before `library.py` loads it.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

UNFINISHED = "compiling-"  # prefix of the folders that compilers write to
HOUR = 3600.0  # seconds; no compiler takes as long


class NoLibraryError(RuntimeError):
    """Raised with the reason if the C code cannot be compiled or loaded on this machine."""


class CacheError(RuntimeError):
    """Raised with the reason if the cache folder must not be used."""


def cache_folder() -> Path:
    """Return the cache folder, and create it if necessary. Raises OSError or CacheError if it cannot be used.

    Only its owner may write to the folder, because the engine runs the code in it.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # the user has no entry in the password database, as in some containers
        raise CacheError(f"{error} Set HOME or XDG_CACHE_HOME.") from error
    folder = Path(base) / "nanovllm"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise CacheError(f"other users can write to {folder}: run chmod 700 on it, or set XDG_CACHE_HOME")
    return folder


def find_or_compile(folder: Path, name: str, command: list[str]) -> Path:
    """Return an intact library `name` in `folder`. Compile it if there is none, and delete damaged ones.

    Raises NoLibraryError if the compiler fails, and OSError if the folder cannot be used.
    """
    for path in sorted(folder.glob(f"{name}-*.so")):
        if is_intact(path):
            return path
        logger.warning("%s is damaged, so it is compiled again", path)
        with contextlib.suppress(OSError):  # of a folder that cannot be written to, compiling reports the reason
            path.unlink()
    return compile_to(folder, name, command)


def is_intact(path: Path) -> bool:
    """Return whether the file can be read and its name ends with the hash of its contents."""
    try:
        return path.stem.rpartition("-")[2] == hash_of(path.read_bytes())
    except OSError:
        return False


def hash_of(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()[:16]


def compile_to(folder: Path, name: str, command: list[str]) -> Path:
    """Run the compiler and move its output to `folder`. Raises NoLibraryError if the compiler fails.

    Two processes may compile at the same time: each writes to its own folder, and a rename replaces the file at once.
    """
    delete_unfinished(folder)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder) as unfinished:
        target = Path(unfinished) / "library.so"
        run_compiler([*command, "-o", str(target)], name, unfinished)
        with target.open("rb") as file:
            os.fsync(file.fileno())  # before the rename, so that a power failure leaves the whole file or none
            path = folder / f"{name}-{hash_of(file.read())}.so"
        os.replace(target, path)
    return path


def delete_unfinished(folder: Path) -> None:
    """Delete what compilers have left behind that were killed together with their process."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - HOUR:
                shutil.rmtree(path)


def run_compiler(command: list[str], name: str, temporary_folder: str) -> None:
    """Run the compiler with its temporary files in `temporary_folder`. Raises NoLibraryError if it fails.

    If an exception interrupts the compiler, all of its processes are killed: they have their own process group.
    """
    environment = {**os.environ, "TMPDIR": temporary_folder, "LC_ALL": "C"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        _, output = process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        reason = reason_of(output.decode(errors="replace")) or f"it ended with status {process.returncode}"
        raise NoLibraryError(f"{command[0]} could not compile {name.partition('-')[0]}.c: {reason}")


def reason_of(output: str, most: int = 1000) -> str:
    """Return the compiler's output from its first error on, because warnings before it may be long."""
    lines = output.strip().splitlines()
    is_error = [re.search(r"error|ld: (?!warning)|cannot|No space", line) is not None for line in lines]
    text = "\n".join(lines[is_error.index(True) :]) if True in is_error else "\n".join(lines)[-most:]
    return text[:most].strip()


@contextlib.contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise an exception, so that the `with` blocks inside clean up before the process ends.

    Signals that the program handles or ignores itself are not changed. In threads other than the main thread, none is.
    """
    received: list[int] = []

    def unwind(number: int, frame: Any) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    taken = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), received[0])
