"""What has killed an engine is found: rows that were being computed when it died are tried again, in the end alone.

Without this, a row at which the engine dies would be tried for ever, and its chunk never be done.

    attempt 1, 2    all rows of the chunk together: a process may have died for another reason
    attempt 3, …    one row at a time, with nothing beside it. A row at which the engine dies now is not tried again:
                    it gets an error, and the next attempt goes on with the others

A file for each chunk that is being computed says how often, in this run. So it outlives the process. Another file
counts the engines of the run, so that one that dies while it does nothing is not replaced for ever either.
"""

import json
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

NUM_TOGETHER = 2  # attempts
MAX_ENGINES = 20  # of each replica


def count_engine(folder: Path, run: str, num_replicas: int) -> None:
    """Before an engine is made. Raises RuntimeError if too many have died in this run."""
    with (folder / f"{run}.engines").open("ab") as file:
        file.write(b".")
        file.flush()
        if file.tell() > MAX_ENGINES * num_replicas:
            raise RuntimeError(f"{MAX_ENGINES * num_replicas} engines have died in this run, the last reason is logged")


class Attempt:
    """One attempt at the rows `names`; `end()` when they are computed. Another run's attempts do not count."""

    def __init__(self, folder: Path, run: str, names: Iterable[str]) -> None:
        self._path = folder / f"{sha256(json.dumps(list(names)).encode()).hexdigest()}.json"
        self._run = run
        before = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        if before.get("run") != run:
            before = {}
        self.number: int = before.get("number", 0) + 1
        self.given_up: list[str] = before.get("given_up", [])
        """Rows at which the engine died when nothing was beside them."""
        if before.get("alone") is not None:
            self.given_up.append(before["alone"])
        self.note(None)

    @property
    def is_alone(self) -> bool:
        """Whether rows are computed one at a time."""
        return self.number > NUM_TOGETHER

    def note(self, alone: str | None) -> None:
        """The row that is now computed alone."""
        told = {"run": self._run, "number": self.number, "given_up": self.given_up, "alone": alone}
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(told), encoding="utf-8")
        os.replace(new, self._path)

    def end(self) -> None:
        self._path.unlink(missing_ok=True)
