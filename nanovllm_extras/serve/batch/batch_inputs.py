"""Read the input: files of rows, cut into chunks that are read, answered and written as a whole.

A scan reads the files once before any row is answered. It keeps the start of each chunk, and 16 bytes for each row: a
hash of the row's name. Ten million rows take 160 MB. The scan also finds names that several rows have: their answers
could not be told apart.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from nanovllm_extras.serve.batch.rows import Form, Refused, Row

Digests: TypeAlias = NDArray[np.bytes_]
"""Digests of row names: [num_rows], 16 bytes each."""
SUFFIXES = (".jsonl", ".parquet")


class Source(NamedTuple):
    """A file of rows."""

    path: Path
    name: str
    """Unique among the sources. Rows without a name are named by it and their number: `in.jsonl:17`."""


class Chunk(NamedTuple):
    """Consecutive rows of one file, which become one part of the output."""

    source: Source
    number: int
    """The number of the first row in its file (a line or a record), counted from 1."""
    start: int
    """The offset in bytes of the first line in a `.jsonl` file; 0 for Parquet."""
    num_rows: int


@dataclass(frozen=True)
class Input:
    """The result of a scan: the chunks, and the names of the rows."""

    form: Form
    chunks: list[Chunk]
    digests: Digests
    """Digests of the names of all rows, sorted and unique."""
    first_of: dict[bytes, str]
    """For each name that several rows have: its digest -> file and number of the first row, which keeps the name."""

    def num_chunks_at_once(self, max_in_flight: int) -> int:
        """Return how many chunks to compute at once.

        They hold at least `max_in_flight` rows, not counting one chunk whose last rows are being computed.
        """
        return 1 + math.ceil(max_in_flight / max(chunk.num_rows for chunk in self.chunks))

    def read(self, chunk: Chunk, records: "Records") -> list[Row]:
        """Return the rows of a chunk, in their order."""
        return read_rows(chunk, self.form, self.first_of, records)


def digest(name: str) -> bytes:
    """Return 16 bytes that identify a name: 120 bits of a hash, then a byte of 1, since numpy drops trailing zeros."""
    return bytes(xxhash.xxh3_128_digest(name.encode())[:15]) + b"\1"


def digests_of(names: Iterable[str]) -> Digests:
    """Return the digests of `names`, in their order."""
    return np.frombuffer(b"".join(map(digest, names)), "S16")


def are_in(wanted: Digests, digests: Digests) -> NDArray[np.bool_]:
    """Return for each of `wanted` whether it is among the sorted `digests`."""
    if not len(digests):
        return np.zeros(len(wanted), bool)
    places = np.minimum(np.searchsorted(digests, wanted), len(digests) - 1)
    found: NDArray[np.bool_] = digests[places] == wanted
    return found


# ---- which files


def find_sources(paths: Iterable[Path]) -> list[Source]:
    """Return the given files, and the files in the given folders sorted by path. Raises ValueError, OSError."""
    sources = []
    for path in paths:
        if path.is_dir():
            found = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
            sources += [Source(one, one.relative_to(path).as_posix()) for one in found]
        else:
            sources.append(Source(path, path.name))
    for source in sources:
        if source.path.suffix not in SUFFIXES:
            raise ValueError(f"an input must be a {' or '.join(SUFFIXES)} file or a folder, got {source.path}")
    names = [source.name for source in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two inputs have the name {twice[0]}: their rows without a name would get the same names")
    if not sources:
        raise ValueError(f"there is no {' or '.join(SUFFIXES)} file in {', '.join(map(str, paths))}")
    return sources


# ---- the scan


def scan(sources: list[Source], form: Form, rows_per_part: int) -> Input:
    """Cut the files into chunks and read the names of all rows. Raises ValueError, OSError."""
    for source in sources:
        if source.path.suffix == ".parquet":
            check_columns(source, form)
    chunks = [chunk for source in sources for chunk in cut(source, rows_per_part)]
    first_of: dict[bytes, str] = {}
    digests = scan_names(chunks, form, first_of)
    unique, counts = np.unique(digests, return_counts=True)
    if len(unique) < len(digests):
        first_of = dict.fromkeys(unique[counts > 1].tolist(), "")
        digests = scan_names(chunks, form, first_of)
        unique = np.unique(digests)
    if len(unique) < len(digests):
        raise ValueError("the name of one row is the file and number of another row: choose another --id-column")
    return Input(form, chunks, unique, first_of)


def check_columns(source: Source, form: Form) -> None:
    """Raise ValueError if a Parquet file does not have the columns of `form`."""
    if form.prompt_column is None:
        raise ValueError(f"{source.path}: rows of Parquet need --prompt-column; OpenAI's batch format is .jsonl")
    known = pq.read_schema(source.path).names
    if missing := [name for name in form.columns if name not in known]:
        raise ValueError(f"{source.path} has no column {missing[0]}; it has {', '.join(known)}")


def cut(source: Source, rows_per_part: int) -> Iterator[Chunk]:
    """Yield the chunks of a file. Blank lines count in the numbers, but are not rows."""
    if source.path.suffix == ".parquet":
        num_rows = pq.read_metadata(source.path).num_rows
        for start in range(0, num_rows, rows_per_part):
            yield Chunk(source, start + 1, 0, min(rows_per_part, num_rows - start))
        return
    number, start, first, num_rows = 1, 0, (1, 0), 0
    with source.path.open("rb") as file:
        for line in file:
            if line.strip():
                first, num_rows = first if num_rows else (number, start), num_rows + 1
            number, start = number + 1, start + len(line)
            if num_rows == rows_per_part:
                yield Chunk(source, *first, num_rows)
                num_rows = 0
    if num_rows:
        yield Chunk(source, *first, num_rows)


def scan_names(chunks: list[Chunk], form: Form, first_of: dict[bytes, str]) -> Digests:
    """Return the digests of all rows, in their order. Sets the values of `first_of`: the first row of each name."""
    found, records = bytearray(), Records()
    columns = [] if form.id_column is None else [form.id_column]
    for chunk in chunks:
        for place, value in read_values(chunk, columns, records):
            name = form.name_of(value) or place
            own = digest(name)
            if first_of and own in first_of:
                first_of[own] = first_of[own] or place
                own = own if first_of[own] == place else digest(place)
            found += own
    return np.frombuffer(bytes(found), "S16")


# ---- rows


def read_rows(chunk: Chunk, form: Form, first_of: dict[bytes, str], records: "Records") -> list[Row]:
    """Return the rows of a chunk, in their order."""
    return [make_row(place, value, form, first_of) for place, value in read_values(chunk, form.columns, records)]


def make_row(place: str, value: object, form: Form, first_of: dict[bytes, str]) -> Row:
    """Return the row for a value, with an error if it cannot be a request.

    place: file and number of the row, its name if it has none.
    """
    name = form.name_of(value)
    try:
        if name is not None and first_of.get(digest(name), place) != place:
            first, name = first_of[digest(name)], None
            raise Refused("duplicate_id", f"the row has the same name as {first}")
        if isinstance(value, Refused):
            raise value
        return Row(name or place, *form.request(value))
    except Refused as error:
        return Row(name or place, "", "", error.code, str(error))


def read_values(chunk: Chunk, columns: list[str], records: "Records") -> Iterator[tuple[str, object]]:
    """Yield `(file and number, value)` for each row. The value is a `Refused` if the row cannot be parsed.

    columns: the columns to read from Parquet. If empty, nothing is parsed, and all values are None.
    """
    name = chunk.source.name
    if chunk.source.path.suffix == ".parquet":
        values: Iterable[object] = records.read(chunk, columns) if columns else [None] * chunk.num_rows
        yield from ((f"{name}:{chunk.number + i}", value) for i, value in enumerate(values))
        return
    with chunk.source.path.open("rb") as file:
        file.seek(chunk.start)
        numbered = ((number, line) for number, line in enumerate(file, chunk.number) if line.strip())
        for number, line in islice(numbered, chunk.num_rows):
            yield f"{name}:{number}", parse(line) if columns else None


def parse(line: bytes) -> object:
    """Return the JSON value of a line, or a `Refused` if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        return Refused("invalid_json", f"the line is not valid JSON: {error}")


class Records:
    """Reads chunks of Parquet. It keeps the last decoded row group, because the next chunk is often in it too."""

    def __init__(self) -> None:
        self._key: tuple[Path, int, tuple[str, ...]] | None = None
        self._table: pa.Table | None = None

    def read(self, chunk: Chunk, columns: list[str]) -> list[dict[str, object]]:
        """Return the rows of a chunk, each as a dict of the given columns."""
        start, left, records = chunk.number - 1, chunk.num_rows, []
        with pq.ParquetFile(chunk.source.path) as file:
            for i in range(file.num_row_groups):
                size = file.metadata.row_group(i).num_rows
                if start < size and left:
                    found = self._group(file, chunk.source.path, i, columns).slice(start, left).to_pylist()
                    records += found
                    left -= len(found)
                start = max(0, start - size)
        return records

    def _group(self, file: pq.ParquetFile, path: Path, i: int, columns: list[str]) -> pa.Table:
        if self._key != (path, i, tuple(columns)):
            self._key, self._table = (path, i, tuple(columns)), file.read_row_group(i, columns)
        return self._table
