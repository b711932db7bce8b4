"""Runs of the command in processes of their own, and what each has left in its folder."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[4]
WAIT_S = 400.0


def write_prompts(path, num_rows, **columns):
    rows = [{"key": f"r{i}", "prompt": f"What is a block table? {i}", **columns} for i in range(num_rows)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def arguments(tmp_path, *others):
    """Of rows that take long enough to be stopped among them."""
    given = ["-i", tmp_path / "in.jsonl", "-o", tmp_path / "out", "--prompt-column", "prompt", "--id-column", "key"]
    given += ["--temperature", 0, "--body", '{"ignore_eos": true}', "--rows-per-part", 10, "--max-num-seqs", 8]
    return [*map(str, [*given, *others])]


@contextlib.contextmanager
def started(*given):
    """A process of the command, in a group of its own, whose whole group ends with the block."""
    command = [sys.executable, "-m", "nanovllm_extras", "run-batch", *map(str, given)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_parts(process, folder, num_parts):
    """Wait until `num_parts` parts are done."""
    deadline = time.monotonic() + WAIT_S
    while len(list(folder.glob("part-*.parquet"))) < num_parts:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_names(folder):
    """Of all rows that readers of Parquet see, with how often they do."""
    return Counter(name for path in folder.glob("part-*.parquet") for name in read(path, "custom_id"))


def read(path, column):
    with pq.ParquetFile(path) as file:
        return file.read([column]).column(column).to_pylist()


def each_once(num_rows):
    return Counter(f"r{i}" for i in range(num_rows))
