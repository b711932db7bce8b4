"""`TraceFile` writes a recording, a file of JSON lines; `read_recording` reads it.

A file larger than half of `max_bytes` is renamed to `run.jsonl.1` and replaces an older one. The new file begins with
the state of that moment. So a long run keeps its newest steps, and each of the two files can be read without the other.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

FORMAT = "nanovllm-trace"
VERSION = 1
MAX_BYTES = 128 * 2**20

logger = logging.getLogger(__name__)


@runtime_checkable
class Sink(Protocol):
    """A destination of lines: a file, or the browsers that watch."""

    @property
    def is_full(self) -> bool:
        """Whether the lines before may be dropped: the recorder begins anew then, with the state of this moment."""

    def begin(self, line: str) -> None:
        """The header, with which a reader can begin."""

    def write(self, line: str) -> None: ...

    def close(self) -> None: ...


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


class Sinks:
    """A `Sink` that passes all to several. One that fails gets no more, and the others go on; the last one raises."""

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks = sinks
        self.on_failure: Callable[[], None] = lambda: None  # called for each that fails, but for the last

    @property
    def is_full(self) -> bool:
        return any(sink.is_full for sink in self.sinks)

    def begin(self, line: str) -> None:
        self._call("begin", line)

    def write(self, line: str) -> None:
        self._call("write", line)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: str) -> None:
        for sink in self.sinks.copy():
            try:
                getattr(sink, method)(*arguments)
            except Exception:
                if len(self.sinks) == 1:
                    raise
                logger.exception("%s has failed, and gets no more of the recording", type(sink).__name__)
                self.sinks.remove(sink)
                self.on_failure()


def to_sink(trace: str | Path | Sink) -> Sink:
    """Opens a path; returns a sink as it is. Raises TypeError or ValueError if the path cannot be written."""
    return trace if isinstance(trace, Sink) else TraceFile(trace)


def read_recording(path: str | Path) -> list[dict[str, Any]]:
    """The header, and the lines after it. Raises ValueError if the file holds something else."""
    try:
        lines = list(read_lines(Path(path)))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    header = lines[0] if lines else {}
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a recording: its first line must have the format {FORMAT!r}")
    if header.get("version") != VERSION:
        raise ValueError(f"{path} has version {header.get('version')!r} of the format; this is {VERSION}")
    return lines


def read_lines(path: Path) -> Iterator[Any]:
    """The parsed lines. A last line without a newline was cut by a crash, and is skipped with a warning."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield DECODER.decode(line.decode())
            except RecursionError as error:
                raise ValueError(f"{path}, line {number} is nested too deeply") from error
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
                logger.warning("%s was cut in its last line, line %d, which is skipped", path, number)


def refuse_constant(name: str) -> None:
    """NaN and Infinity are Python's: browsers do not read them."""
    raise ValueError(f"{name} is no JSON number")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)
