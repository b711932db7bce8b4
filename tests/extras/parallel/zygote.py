"""A process that has imported nanovllm, and forks a driver for each scenario: to import torch takes seconds.

    python -m tests.extras.parallel.zygote  stdin: lines {"run": "module:function", "arguments": […], "output": path, …}
                                            stdout: lines {"pid": …}, {"status": …}

A driver is a process as users start it: with a session of its own, its own end of the interpreter, nothing shared.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 20.0  # until all have ended, who are told to: far more than they need, on a busy machine too
MARK = "NANOVLLM_TEST_RUN"  # a variable whose value names one driver and all processes that it starts


def main():
    import faulthandler

    import torch.fx.experimental.symbolic_shapes  # noqa: F401 (what drivers need)

    from nanovllm_extras import LLM  # noqa: F401

    faulthandler.enable()

    for line in sys.stdin:
        task = json.loads(line)
        if "wait" in task:
            answer(wait(**task["wait"]))
            continue
        pid = os.fork()
        if pid == 0:
            return task
        answer(pid)
    return None


def answer(value):
    print(json.dumps(value), flush=True)


def wait(pid, timeout_s):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def become_driver(task):
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it deaf to ^C
    os.environ.update(task["environment"])
    output = os.open(task["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import tempfile

    from nanovllm_extras.parallel import peers

    tempfile.tempdir = None
    peers.PATIENCE_S = 2 * LIMIT_S  # a rank that does not end by itself is late
    module, name = task["run"].split(":")
    getattr(importlib.import_module(module), name)(*task["arguments"])


@dataclass
class Driver:
    """One driver, seen from outside."""

    zygote: "Zygote"
    pid: int
    mark: str
    output: Path
    folder: Path
    """Its TMPDIR."""
    has_ended: bool = False

    def wait(self, timeout_s=60.0):
        """Its exit status."""
        status = self.zygote.ask({"wait": {"pid": self.pid, "timeout_s": timeout_s}})
        assert status is not None, f"does not end: {self.said()}"
        self.has_ended = True
        return status

    def said(self):
        return self.output.read_text() if self.output.exists() else ""

    def wait_until_gone(self, timeout_s=LIMIT_S):
        """Until no process of this driver is left; the seconds that it took."""
        begin = time.monotonic()
        while left := marked_processes(self.mark):
            assert time.monotonic() < begin + timeout_s, f"left behind: {left}; {self.said()}"
            time.sleep(0.01)
        return time.monotonic() - begin

    def kill(self):
        # the driver's own environment in /proc is the zygote's
        for pid in (*marked_processes(self.mark), *([] if self.has_ended else [self.pid])):
            with contextlib.suppress(OSError):
                os.kill(pid, 9)


def marked_processes(mark):
    """Process id -> command, of processes whose environment has this mark."""
    wanted, found = f"{MARK}={mark}".encode(), {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


class Zygote:
    def __init__(self, folder):
        self.folder = Path(folder)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.extras.parallel.zygote"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, task):
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, run, *arguments):
        """A driver that calls `run`: "module:function" """
        mark = uuid.uuid4().hex
        folder = self.folder / mark
        folder.mkdir()
        output = self.folder / f"{mark}.txt"
        # the forked process has the zygote's environment in /proc: only what it starts has the mark
        environment = {MARK: mark, "TMPDIR": str(folder)}
        task = {"run": run, "arguments": list(arguments), "output": str(output), "environment": environment}
        return Driver(self, self.ask(task), mark, output, folder)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait(10)


if __name__ == "__main__":
    if (task := main()) is not None:
        become_driver(task)
