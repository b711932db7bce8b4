"""Find the row that kills the engine: repeat the rows of a failed chunk, from the third attempt on one at a time.

Without this, a row that kills the engine would be repeated forever, and its chunk would never be done.

    attempt 1, 2    all rows of the chunk together: the process may have died for another reason
    attempt 3, …    one row at a time, while no other row is computed. A row that kills the engine now is not repeated:
                    it gets an error, and the next attempt continues with the other rows

A file for each chunk in progress stores the number of attempts in this run, so that the count survives the process.
Another file counts the engines of the run, so that an engine that dies while idle is not replaced forever either.
"""

import json
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

NUM_TOGETHER = 2  # attempts that compute all rows of a chunk together
MAX_ENGINES = 20  # for each replica


def count_engine(folder: Path, run: str, num_replicas: int) -> None:
    """Count an engine that is about to be created. Raises RuntimeError if too many have died in this run."""
    with (folder / f"{run}.engines").open("ab") as file:
        file.write(b".")
        file.flush()
        if file.tell() > MAX_ENGINES * num_replicas:
            raise RuntimeError(f"{MAX_ENGINES * num_replicas} engines have died in this run, see the log")


class Attempt:
    """One attempt to compute the rows `names`. Call `end()` when they are computed. Only attempts of this run count."""

    def __init__(self, folder: Path, run: str, names: Iterable[str]) -> None:
        self._path = folder / f"{sha256(json.dumps(list(names)).encode()).hexdigest()}.json"
        self._run = run
        before = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        if before.get("run") != run:
            before = {}
        self.number: int = before.get("number", 0) + 1
        self.given_up: list[str] = before.get("given_up", [])
        """Rows that killed the engine while no other row was computed."""
        if before.get("alone") is not None:
            self.given_up.append(before["alone"])
        self.note(None)

    @property
    def is_alone(self) -> bool:
        """Return whether rows are computed one at a time."""
        return self.number > NUM_TOGETHER

    def note(self, alone: str | None) -> None:
        """Write to the file which row is now computed by itself; None if there is none."""
        told = {"run": self._run, "number": self.number, "given_up": self.given_up, "alone": alone}
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(told), encoding="utf-8")
        os.replace(new, self._path)

    def end(self) -> None:
        """Remove the file: all rows have been computed."""
        self._path.unlink(missing_ok=True)
