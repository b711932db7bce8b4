"""Manage the folder of answers: which parts are done, and which process may write.

    out/part-….parquet     a part: the answers of one chunk
    out/_checkpoint/       used by Ray Data: `NAME.pending.parquet` exists while the part NAME is being written
    out/_attempts/         the chunks that are being computed (attempts.py)
    out/_run.json          the model and the form of the requests, the same for all parts
    out/_run.lock          locked during a run; `_writers.lock` is locked by the processes that write

**A part is done if it exists and is not pending.** With Ray or without, a run first removes pending parts, and then
reads the names of the rows in the other parts. Ray's own checkpoint also has these names, but does not suffice: Ray
deletes it after success, and a write task that is repeated after its commit makes rows pending that Ray's checkpoint
lists as done.

Readers of Parquet (pyarrow, Spark, DuckDB, Ray) skip files that begin with `_` or `.`.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanovllm_extras.serve.batch.batch_inputs import Digests, digests_of

SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("id", pa.string()),
        ("response", pa.struct([("status_code", pa.int64()), ("request_id", pa.string()), ("body", pa.string())])),
        ("error", pa.struct([("code", pa.string()), ("message", pa.string())])),
        ("text", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
    ]
)
"""The columns of OpenAI's batch output (`body` is JSON), then the fields that are used most: the first choice's text,
and the usage."""

ID = "custom_id"
PENDING = ".pending.parquet"
WAIT_S = 60.0  # for writers of a run that was killed


class Busy(RuntimeError):
    """Another run writes to this folder."""


class Parts:
    """The folder of answers. Create it with `opened`."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder
        self.run = run
        """A random name of this run. The file names of its parts contain it."""
        self.checkpoint = folder / "_checkpoint"
        self.attempts = folder / "_attempts"

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator["Parts"]:
        """Open the folder for this run, and remove the unfinished parts of a killed run.

        Raises Busy if another run uses the folder, OSError if it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        parts = cls(folder, uuid4().hex)
        with (folder / "_run.lock").open("a") as mine:
            try:
                fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(f"another run writes to {folder}; wait until it ends") from None
            parts._shut_out_others()
            parts._remove_pending()
            parts.checkpoint.mkdir(exist_ok=True)
            shutil.rmtree(parts.attempts, ignore_errors=True)  # engines of another run may have died for other reasons
            parts.attempts.mkdir()
            yield parts

    def _shut_out_others(self) -> None:
        """Wait for the writers of a killed run, and prevent them from writing again (`PartNames`)."""
        with (self.folder / "_writers.lock").open("a+") as file:
            give_up = time.monotonic() + WAIT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > give_up:
                        raise Busy(f"processes of a run that was killed still write to {self.folder}") from None
                    time.sleep(0.05)
            file.truncate(0)
            file.write(self.run)

    def _remove_pending(self) -> None:
        """Remove parts that may be incomplete."""
        for path in self.folder.glob(".part-*"):
            path.unlink()
        for pending in self.checkpoint.glob(f"*{PENDING}"):
            for path in self.folder.glob(pending.name.removesuffix(PENDING) + "-*.parquet"):
                path.unlink()
            pending.unlink()

    def check_same(self, what: Mapping[str, object]) -> None:
        """Store `what` the parts answer. Raises ValueError if the folder has answers for another value of `what`."""
        path, told = self.folder / "_run.json", json.loads(json.dumps(what, default=str))
        if not path.exists():
            path.with_suffix(".new").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
            os.replace(path.with_suffix(".new"), path)
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        for name in told:
            if told[name] != before.get(name):
                raise ValueError(
                    f"{self.folder} has answers of a run with {name} {before.get(name)!r}, but this run has "
                    f"{told[name]!r}: choose another folder"
                )

    def paths(self) -> list[Path]:
        """Return the paths of all parts, sorted."""
        return sorted(self.folder.glob("part-*.parquet"))

    def done(self) -> Digests:
        """Return the digests of the names of all rows that have an answer, sorted: [num_rows]."""
        return np.sort(digests_of(name for path in self.paths() for name in read_column(path, ID)))

    def write(self, number: int, answers: list[dict[str, object]]) -> None:
        """Write a part atomically: even after a power failure it is either complete or missing."""
        path = self.folder / f"part-{self.run}-{number:012}-0.parquet"
        new = path.with_name(f".{path.name}")
        with new.open("wb") as file:
            pq.write_table(to_table(answers), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def to_table(answers: Iterable[Mapping[str, object]]) -> pa.Table:
    """Return a table of answers with the columns of `SCHEMA`."""
    return pa.Table.from_pylist(list(answers), SCHEMA)


def read_column(path: Path, name: str) -> list[Any]:
    """Return the values of one column of a Parquet file."""
    with pq.ParquetFile(path) as file:
        values: list[Any] = file.read([name]).column(name).to_pylist()
        return values
