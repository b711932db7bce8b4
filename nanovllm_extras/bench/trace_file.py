"""Read a trace: when the requests of a real service arrived, and how many tokens they had.

Two public forms are known by their contents:

    Mooncake   JSON lines    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
    Azure      CSV           TIMESTAMP,ContextTokens,GeneratedTokens

A number as a timestamp is in milliseconds; otherwise it is a date with a time. Each of `hash_ids` names the contents of
512 tokens of the prompt, so prompts that begin with the same ids begin with the same tokens. A CSV file may use the
names of the other form, with the ids separated by spaces.

Mooncake: https://github.com/kvcache-ai/Mooncake. Azure: https://github.com/Azure/AzurePublicDataset.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

HASH_BLOCK_LEN = 512  # tokens that an entry of `hash_ids` names
ALIASES = {
    "timestamp": "timestamp",
    "input_length": "input_length",
    "contexttokens": "input_length",
    "output_length": "output_length",
    "generatedtokens": "output_length",
    "hash_ids": "hash_ids",
}
"""A name in the file, in lower case -> the field of a request."""


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace. Equal `hash_ids` name equal blocks of tokens."""

    arrival_s: float
    """After the first request of the trace."""
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Return the requests of a trace in the order of arrival; at most the first `limit` of the file.

    Raises ValueError with the number of the first line that is invalid, and OSError if the file cannot be read.
    """
    requests = list(iterate_trace(path, limit))
    first = min(one.arrival_s for one in requests)
    requests.sort(key=lambda one: one.arrival_s)
    return [TraceRequest(one.arrival_s - first, one.input_len, one.output_len, one.hash_ids) for one in requests]


def iterate_trace(path: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yield the requests in the order of the file, as `read_trace` does; `arrival_s` is the file's own timestamp."""
    num_requests = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            for number, fields in read_fields(lines, path):
                if limit is not None and num_requests == limit:
                    break
                try:
                    yield read_request(fields)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
                num_requests += 1
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text file in UTF-8: {error}") from None
    if not num_requests:
        raise ValueError(f"{path} must have at least one request, got none")


def read_fields(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield the number of each line with a request, and its fields. Raises ValueError for a line of another form."""
    names: list[str] | None = None  # the head of a CSV file
    for number, line in lines:
        if names is None and line.lstrip().startswith("{"):
            yield number, rename(parse_object(line, f"{path}, line {number}"))
            continue
        try:
            values = [value.strip() for value in next(csv.reader([line]))]
        except csv.Error as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if names is None:
            names = [ALIASES.get(name.lower(), name) for name in values]
            if missing := {"timestamp", "input_length", "output_length"}.difference(names):
                raise ValueError(
                    f"{path}, line {number}: must be a JSON object, or a head such as TIMESTAMP,ContextTokens,"
                    f"GeneratedTokens; the column {min(missing)} is missing in {line.strip()[:200]!r}"
                )
        elif len(values) != len(names):
            raise ValueError(f"{path}, line {number}: must have {len(names)} columns, got {len(values)}")
        else:
            yield number, dict(zip(names, values, strict=True))


def parse_object(line: str, place: str) -> dict[str, object]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{place}: must be a JSON object, got {line.strip()[:200]!r}")
    return found


def rename(fields: Mapping[str, object]) -> dict[str, object]:
    return {ALIASES.get(name.lower(), name): value for name, value in fields.items()}


def read_request(fields: Mapping[str, object]) -> TraceRequest:
    """Return the request with these fields. Raises ValueError if one is missing or invalid."""
    for name in ("timestamp", "input_length", "output_length"):
        if name not in fields:
            raise ValueError(f"must have the field {name}, got {', '.join(fields) or 'none'}")
    hash_ids = fields.get("hash_ids") or []
    if isinstance(hash_ids, str):
        hash_ids = hash_ids.split()
    if not isinstance(hash_ids, list):
        raise ValueError(f"hash_ids must be a list of integers, got {hash_ids!r}")
    input_len = read_int("input_length", fields["input_length"], 1)
    ids = tuple(read_int("hash_ids", one, 0) for one in hash_ids)
    if len(ids) > -(-input_len // HASH_BLOCK_LEN):
        raise ValueError(
            f"hash_ids must have at most one entry for each {HASH_BLOCK_LEN} tokens of input_length {input_len}, "
            f"got {len(ids)} entries"
        )
    output_len = read_int("output_length", fields["output_length"], 0)
    return TraceRequest(read_seconds(fields["timestamp"]), input_len, max(1, output_len), ids)


def read_int(name: str, value: object, minimum: int) -> int:
    number = value
    if isinstance(value, str):
        number = int(value) if re.fullmatch(r"-?\d{1,18}", value) else None
    if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    return number


def read_seconds(value: object) -> float:
    """Return a timestamp in seconds: a number of milliseconds, or a date with a time. A date without a zone is UTC."""
    text = str(value)
    if not isinstance(value, bool) and re.fullmatch(r"\d{1,18}(\.\d+)?", text):
        return float(text) / 1e3
    # `fromisoformat` of Python 3.10 needs exactly 6 digits of a fraction; Azure's first trace has 7
    digits = re.sub(r"\.(\d+)", lambda match: "." + match[1][:6].ljust(6, "0"), text.replace("Z", "+00:00"))
    try:
        moment = datetime.fromisoformat(digits)
    except ValueError:
        raise ValueError(
            f"timestamp must be a number of milliseconds, or such as 2023-11-16 18:15:46.68, got {value!r}"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
