"""`nanovllm serve --ray` with a cluster of its own, for the tests that need one."""

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.extras.serve.real_server import ROOT, RealServer, read

WITH_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray: pip install 'nanovllm[ray]'")
"""Tests import it when they run: it takes seconds, and most runs leave them out."""


def environment_with_token():
    """The environment of a cluster with a token of its own, and of what connects to it.

    Not that of this process: Ray reads its variables when it is imported, and keeps them, while the next module may
    connect to a cluster without a token.
    """
    ray = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**os.environ, "PYTHONPATH": str(ROOT), **ray}


@contextlib.contextmanager
def ray_command(environment, *options, timeout_s=300):
    """The command, in a process group of its own, and what it has said when it is ready."""
    words = [sys.executable, "-m", "nanovllm_extras", "serve", "--ray", "--port", "0", *map(str, options)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0)
        try:
            deadline = time.monotonic() + timeout_s
            while "try it" not in read(log):
                assert time.monotonic() < deadline, read(log)
                assert process.poll() is None, read(log)
                time.sleep(0.1)
            yield process, read(log)
        finally:
            process.terminate()  # it ends what it has started, unless a test has done so already
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(120)
            process.kill()
            process.wait()


def server_of(process, said):
    """The server of a command that is ready."""
    port = re.search(r"^serving .* at http://127\.0\.0\.1:(\d+)/v1$", said, re.MULTILINE)[1]
    return RealServer(int(port), process=process)


def processes_below(pid):
    """Of /proc: pid -> name, of all descendants."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, rest = re.fullmatch(r"\d+ \((.*)\) (.*)", stat.read_text(), re.DOTALL).groups()
            children.setdefault(int(rest.split()[1]), {})[int(stat.parent.name)] = name
    found, todo = {}, [pid]
    while todo:
        below = children.get(todo.pop(), {})
        found |= below
        todo += below
    return found


def replicas_below(pid, deployment):
    """The process ids of a deployment's replicas."""
    title, found = f"ServeReplica:nanovllm:{deployment}".encode(), []
    for one in processes_below(pid):
        with contextlib.suppress(OSError):  # it has ended
            if title in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(one)
    return found


def metric_of(server, name, **labels):
    """Values of a metric, of all samples that have these labels."""
    text = httpx.get(server.url + "/metrics", timeout=60).text
    samples = re.findall(rf"^nanovllm:{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return [float(value) for found, value in samples if all(one in found for one in wanted)]
