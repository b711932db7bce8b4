"""How does a recording lie on disk, and how is it read? A file of JSON lines that never grows above a limit.

When the file has half of `max_bytes`, it is renamed to `run.jsonl.1`, in the place of an older one, and a new file
begins with the state of that moment: so a long run keeps its newest steps, and either file can be read alone.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from nanovllm.trace.recorder import FORMAT, VERSION

MAX_BYTES = 128 * 2**20


class TraceFile:
    """A `Sink`. Raises ValueError or TypeError if `path` cannot be written."""

    def __init__(self, path: str | Path, max_bytes: int = MAX_BYTES) -> None:
        if not isinstance(path, str | Path) or not str(path):
            raise TypeError(f"trace must be the path of a file to write, as str or Path, got {path!r}")
        self.path = Path(path)
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._file = self._open()

    def _open(self) -> TextIO:
        try:
            return self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"trace: {self.path} cannot be written: {error.strerror}") from error

    @property
    def is_full(self) -> bool:
        return self._num_bytes > self.max_bytes // 2

    def begin(self, line: str) -> None:
        if self._num_bytes:
            self._file.close()
            os.replace(self.path, f"{self.path}.1")
            self._file, self._num_bytes = self._open(), 0
        self.write(line)

    def write(self, line: str) -> None:
        """Whole lines reach the file at once, so that what a crash leaves can be read."""
        self._num_bytes += self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_recording(path: str | Path) -> list[dict[str, Any]]:
    """The header, and the lines after it. Raises ValueError if the file is no recording."""
    try:
        lines = list(read_lines(Path(path)))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    header = lines[0] if lines else {}
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is no recording: its first line must have the format {FORMAT!r}")
    if header.get("version") != VERSION:
        raise ValueError(f"{path} has version {header.get('version')!r} of the format; this is {VERSION}")
    return lines


def read_lines(path: Path) -> Iterator[Any]:
    """The parsed lines; a last line without an end is what a crash has left, and is passed over."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                if line.endswith("\n"):
                    raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
