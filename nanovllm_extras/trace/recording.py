"""`TraceFile` writes a recording, a file of JSON lines; `read_recording` reads it.

A file that exceeds half of `max_bytes` is renamed to `run.jsonl.1`, which replaces an older file of that name. The new
file begins with the current state. So a long run keeps its newest steps, and each file can be read without the other.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO, TypedDict, runtime_checkable

FORMAT = "nanovllm-trace"
VERSION = 1
MAX_BYTES = 128 * 2**20

logger = logging.getLogger(__name__)


# ---- the JSON of the lines; docs/trace.md describes the fields


class MissDetails(TypedDict, total=False):
    """What only some causes have."""

    cached: list[int]
    prompt: list[int]
    step: int
    request: str


class Miss(MissDetails):
    start: int
    end: int
    cause: str


class Asked(TypedDict, total=False):
    """What a request asks for. Older files lack it."""

    params: dict[str, object]
    priority: int
    cache_salt: str
    adapter: str


class NewSequence(Asked):
    request: str
    sample: int
    tokens: list[int]
    num_prompt_tokens: int
    max_num_tokens: int


class SequenceState(NewSequence):
    number: int
    arrived: int
    status: str
    num_computed_tokens: int
    block_table: list[int]
    host_block_ids: list[int]
    misses: list[Miss]


class StateOfSomeModels(TypedDict, total=False):
    slots: list[list[int]]
    snapshots: list[list[int]]
    state_copies: list[list[int]]
    window_tables: list[tuple[int, list[list[int]]]]
    window_cached: list[tuple[int, list[int]]]


class State(StateOfSomeModels):
    free: list[int]
    cached: list[tuple[int, str, int, list[int]]]
    loaded: list[tuple[int, str]]
    seqs: list[SequenceState]


class HeaderOfSomeModels(TypedDict, total=False):
    num_slots: int
    num_groups: int
    group_window: int | None


class Header(HeaderOfSomeModels):
    format: str
    version: int
    num_blocks: int
    block_size: int
    num_steps_before: int
    t: int
    config: dict[str, object]
    in_flight: list[tuple[int, list[int]]]
    state: State | None


class LineOfSomeSteps(TypedDict, total=False):
    texts: dict[str, str]
    times: dict[str, int]


class Line(LineOfSomeSteps):
    t: int
    events: list[list]


# ---- writers


@runtime_checkable
class Sink(Protocol):
    """A destination of a recording's lines: a file, or the browsers that follow a server's run."""

    @property
    def is_full(self) -> bool:
        """Return whether earlier lines may be dropped. If so, the recorder calls `begin` with the current state."""

    def begin(self, line: str) -> None:
        """Write a header. A reader can start here without the lines before."""

    def write(self, line: str) -> None: ...

    def close(self) -> None: ...


class TraceFile:
    """A `Sink` that writes to a file. Raises ValueError or TypeError if `path` cannot be written."""

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
        """Write one line and flush it, so that the file can be read after a crash."""
        self._num_bytes += self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Sinks:
    """A `Sink` that passes each line to several sinks.

    A sink that raises is removed, `on_failure` is called, and the others continue. The error of the last remaining sink
    is raised.
    """

    def __init__(self, sinks: list[Sink], on_failure: Callable[[], None] = lambda: None) -> None:
        self.sinks = sinks
        self.on_failure = on_failure

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
                logger.exception("%s has failed and receives no more of the recording", type(sink).__name__)
                self.sinks.remove(sink)
                self.on_failure()


def to_sink(trace: str | Path | Sink) -> Sink:
    """Return `trace` if it is a sink; otherwise open it as a file.

    Raises TypeError or ValueError if the path cannot be written.
    """
    return trace if isinstance(trace, Sink) else TraceFile(trace)


def read_recording(path: str | Path) -> list[dict[str, Any]]:
    """Return the header and the lines after it. Raises ValueError if the file is not a recording."""
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
    """Yield the parsed lines. A last line without a newline was cut by a crash: it is skipped with a warning."""
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
    """Reject NaN and Infinity, which Python's parser accepts and browsers do not."""
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)
