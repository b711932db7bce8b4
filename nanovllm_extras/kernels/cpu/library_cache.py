"""Run the C compiler, and keep its output in the user's cache folder under a name that proves the contents.

A process that maps a damaged library ends in SIGBUS or SIGSEGV, which no code can catch. So the name of a library ends
with a hash of its contents, and `find_or_compile` reads and checks the file before `library.py` loads it.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

UNFINISHED = "compiling-"  # prefix of the folders that compilers write to
TEMPORARY = "nanovllm-"  # prefix of folders that replace the cache folder
GUARD = f"""
exec 3<&0 </dev/null
{{
    read -r nothing <&3
    trap '' TERM
    kill -TERM 0
    sleep 1
    rm -rf -- "$0"
    case $0 in */{TEMPORARY}*/*) rmdir -- "${{0%/*}}";; esac
    kill -KILL 0
}} >/dev/null 2>&1 &
"$@" 3<&-
status=$?
kill $!
wait $! 2>/dev/null
exit $status
"""
"""A shell script that runs the compiler, with the folder for its output as `$0`.

Its input is a pipe to this process. When this process ends in any way, `read` returns, and the script ends the compiler
and deletes the folder. The process itself cannot do this if a signal kills it: Python handles signals only in the main
thread, and the server loads the model in another one.
"""
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

    The compiler ends if an exception interrupts it, and if this process ends: all of its processes are killed, which
    have their own process group, and the folder is deleted.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    environment = {**os.environ, "TMPDIR": temporary_folder, "LC_ALL": "C"}
    ends_with_us, keep_open = os.pipe()
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, temporary_folder, *command], stdin=ends_with_us, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            _, output = process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    finally:
        os.close(ends_with_us)
        os.close(keep_open)
    if process.returncode:
        reason = reason_of(output.decode(errors="replace")) or f"it ended with status {process.returncode}"
        raise NoLibraryError(f"{command[0]} could not compile {name.partition('-')[0]}.c: {reason}")


def reason_of(output: str, most: int = 1000) -> str:
    """Return the compiler's output from its first error on, because warnings before it may be long."""
    lines = output.strip().splitlines()
    is_error = [re.search(r"error|ld: (?!warning)|cannot|No space", line) is not None for line in lines]
    text = "\n".join(lines[is_error.index(True) :]) if True in is_error else "\n".join(lines)[-most:]
    return text[:most].strip()
