"""The cache of compiled libraries: damaged files, full folders, compilers that fail, and processes that are stopped."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from nanovllm_extras.kernels.cpu import library_cache
from nanovllm_extras.kernels.cpu.library_cache import NoLibraryError, find_or_compile

COMPILER = """#!/bin/sh
for last; do :; done
echo "$TMPDIR" >> {log}
printf 'a library' > "$last"
"""


@pytest.fixture
def compiler(tmp_path):
    """A command that writes `a library` to its last argument, and notes that it has run."""
    path = tmp_path / "compiler"
    path.write_text(COMPILER.format(log=tmp_path / "log"))
    path.chmod(0o755)
    (tmp_path / "log").touch()
    (tmp_path / "cache").mkdir()
    return [str(path)]


def num_runs(tmp_path):
    return len((tmp_path / "log").read_text().splitlines())


def write(contents):
    return lambda path: path.write_bytes(contents)


DAMAGE = {
    "empty": write(b""),
    "shorter": lambda path: os.truncate(path, 4),
    "longer": write(b"a library and more"),
    "zeros of the same length": write(bytes(len(b"a library"))),
    "one bit": write(b"a librarx"),
    "dangling link": lambda path: (path.unlink(), path.symlink_to("/no/such/file")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_library_is_replaced_once(tmp_path, compiler, caplog, damage):
    cache = tmp_path / "cache"
    path = find_or_compile(cache, "cpu-0123", compiler)
    damage(path)
    with caplog.at_level(logging.WARNING):
        assert find_or_compile(cache, "cpu-0123", compiler).read_bytes() == b"a library"
    assert f"{path} is damaged" in caplog.text
    assert num_runs(tmp_path) == 2
    find_or_compile(cache, "cpu-0123", compiler)
    assert num_runs(tmp_path) == 2
    assert list(cache.iterdir()) == [path]


def test_what_killed_compilers_left_is_deleted_after_an_hour(tmp_path, compiler):
    cache = tmp_path / "cache"
    for name, age in (("old", 2 * library_cache.HOUR), ("new", 60)):
        folder = cache / f"{library_cache.UNFINISHED}{name}"
        folder.mkdir()
        (folder / "library.so").touch()
        os.utime(folder, times=(time.time() - age,) * 2)
    find_or_compile(cache, "cpu-0123", compiler)
    assert [path.name for path in cache.glob(f"{library_cache.UNFINISHED}*")] == [f"{library_cache.UNFINISHED}new"]


MESSAGES = {
    "clang without omp.h": (
        "warning: unknown option\n" * 100 + "In file included from cpu.c:20:\nwork.h:5:10: fatal error: 'omp.h' file "
        "not found\n#include <omp.h>\n         ^~~~~~~\n1 error generated.",
        "fatal error: 'omp.h' file not found",
    ),
    "a linker that warns first": ("ld: warning: w\n" * 300 + "ld: cannot find -lgomp\ncollect2: error", "find -lgomp"),
    "no word that is known": ("x\n" * 3000 + "out of cheese", "out of cheese"),
    "nothing": ("", "it ended with status 1"),
}


@pytest.mark.parametrize(("text", "reason"), MESSAGES.values(), ids=MESSAGES)
def test_the_compilers_reason_is_not_cut(tmp_path, text, reason):
    (tmp_path / "text").write_text(text)
    with pytest.raises(NoLibraryError, match="could not compile cpu.c: ") as caught:
        find_or_compile(tmp_path, "cpu-0123", ["sh", "-c", f"cat {tmp_path}/text >&2; exit 1"])
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 1200


# ---- processes that are stopped

STOPPED = """
import os, runpy, signal, sys, threading
from pathlib import Path
from typing import NamedTuple
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, processes ignore it
cache = runpy.run_path(sys.argv[1])
folder, pid_file, thread = sys.argv[2:]
command = ["sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait"]
run = lambda: cache["find_or_compile"](Path(folder), "cpu-0123", command)
if thread == "main":
    run()
else:
    threading.Thread(target=run, daemon=True).start()
    sys.stdin.read(1)
    os._exit(0)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def pid_in(file, seconds=60):
    """Wait until the compiler has written its process id."""
    wait_for(lambda: file.exists() and file.read_text().strip(), seconds)
    return int(file.read_text())


STOPS = [(signal.SIGTERM, "main"), (signal.SIGTERM, "another"), (signal.SIGHUP, "another"), (signal.SIGINT, "main"),
         (signal.SIGKILL, "main"), ("exit", "another")]  # fmt: skip


class Stopped(NamedTuple):
    status: int
    compiler: int
    cache: Path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """What each end of a process has left: all of them end together, since the guard of each compiler waits a second.

    The compiler starts other processes, which do not end with it. The folder may be one that replaces the cache.
    """
    started = {}
    for end, thread in STOPS:
        folder = tmp_path_factory.mktemp("stopped")
        cache = folder / (f"{library_cache.TEMPORARY}0123" if end == signal.SIGHUP else "cache")
        cache.mkdir()
        # the file by itself, which needs no torch
        arguments = [library_cache.__file__, str(cache), str(folder / "pid"), thread]
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        started[end, thread] = subprocess.Popen([sys.executable, "-c", STOPPED, *arguments], **pipes), cache
    compilers = {stop: pid_in(cache.parent / "pid") for stop, (_, cache) in started.items()}
    for (end, _), (process, cache) in started.items():
        assert list(cache.iterdir())
        if end == "exit":
            process.communicate(b"x", timeout=60)
        else:
            process.send_signal(end)
    return {stop: Stopped(one.wait(timeout=60), compilers[stop], cache) for stop, (one, cache) in started.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("end", "thread"), STOPS, ids=str)
def test_a_stopped_process_leaves_neither_a_compiler_nor_a_folder(stopped, end, thread):
    status, compiler, cache = stopped[end, thread]
    assert status == (0 if end == "exit" else -end)
    wait_for(lambda: not is_running(compiler))
    wait_for(lambda: not cache.exists() or not list(cache.iterdir()))
    if end == signal.SIGHUP and thread == "another":
        wait_for(lambda: not cache.exists())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_that_is_stopped_while_it_compiles(tmp_path):
    """Without a cache folder, it compiles in a temporary one."""
    compiler, pid_file, cache, temporary = (tmp_path / name for name in ("cc", "pid", "cache", "temporary"))
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\nsleep 1000 & echo $! > {pid_file}; wait\n')
    compiler.chmod(0o755)
    temporary.mkdir()
    cache.write_text("a file")
    environment = {**os.environ, "CC": str(compiler), "XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "nanovllm_extras", "serve", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid = pid_in(pid_file, seconds=120)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    wait_for(lambda: not is_running(pid))
    wait_for(lambda: not list(temporary.iterdir()))
