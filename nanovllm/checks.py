"""Checks of the values that users pass in. Each error names the field, the value and what is allowed.

Invariants of the engine itself are not checked here: they are `assert` statements in the code that relies on them.
"""

import numbers
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, fields
from functools import partial
from pathlib import Path
from typing import Any

MAX = sys.float_info.max


def checked(default: Any, check: Callable[..., None], **limits: Any) -> Any:
    """Declare a dataclass field whose values must pass `check(name, value, **limits)`.

    >>> max_num_seqs: int = checked(256, check_int, minimum=1)
    """
    return field(default=default, metadata={"check": partial(check, **limits)})


def checks_of(record: Any) -> Mapping[str, Callable[[str, Any], None]]:
    """Return the check of each `checked` field of a dataclass, a function of name and value."""
    return {one.name: one.metadata["check"] for one in fields(record) if "check" in one.metadata}


def check_int(name: str, value: Any, minimum: int, optional: bool = False, maximum: int | None = None) -> None:
    """Raise unless `value` is an integer in [minimum, maximum], or None if `optional`. A bool is not an integer."""
    is_integer = type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))
    if is_integer and minimum <= value and (maximum is None or value <= maximum) or (value is None and optional):
        return
    most = "" if maximum is None else f" and <= {maximum}"
    allowed = f"an integer >= {minimum}{most}" + (" or None" if optional else "")
    if not is_integer:
        raise TypeError(f"{name} must be {allowed}, got {value!r}")
    raise ValueError(f"{name} must be {allowed}, got {value}")


def check_number(name: str, value: Any, low: float, high: float = MAX, open_low: bool = False) -> None:
    """Raise unless `value` is a finite number in [low, high], or in (low, high] if `open_low`."""
    allowed = f"a finite number {'>' if open_low else '>='} {low:g}" + ("" if high == MAX else f" and <= {high:g}")
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        raise TypeError(f"{name} must be {allowed}, got {value!r}")
    if not low <= value <= high or (open_low and value == low):  # this refuses NaN and infinities too
        raise ValueError(f"{name} must be {allowed}, got {value}")


def check_bool(name: str, value: Any, optional: bool = False) -> None:
    if not isinstance(value, bool) and not (value is None and optional):
        raise TypeError(f"{name} must be {'True, False or None' if optional else 'True or False'}, got {value!r}")


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def check_str(name: str, value: Any, optional: bool = False, or_path: bool = False) -> None:
    """Raise unless `value` is a str that is not empty, or None if `optional`, or a Path if `or_path`."""
    if value is None and optional:
        return
    if not isinstance(value, str | Path if or_path else str) or not str(value):
        allowed = "a str" + (" or a Path" if or_path else "") + (" or None" if optional else "")
        raise TypeError(f"{name} must be {allowed}, and not empty, got {value!r}")


def check_list(name: str, value: Any, of_what: str) -> Collection[Any]:
    """Return `value`, or an empty list for None. Raise TypeError if it is not a list."""
    if value is None:
        return []
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of {of_what} or None, got {value!r}")
    return value


def check_token_ids(name: str, value: Any) -> None:
    for i, token_id in enumerate(check_list(name, value, "token ids")):
        check_int(f"{name}[{i}]", token_id, 0)


def check_strings(name: str, value: Any, blank: str = "", or_one: bool = False) -> None:
    """Raise unless `value` is a list of strings, or one string if `or_one`. Strings of only `blank` are refused."""
    strings = [value] if or_one and isinstance(value, str) else check_list(name, value, "strings")
    for i, string in enumerate(strings):
        if not isinstance(string, str):
            raise TypeError(f"{name}[{i}] must be a str, got {string!r}")
        if not string.strip(blank):
            raise ValueError(f"{name}[{i}] must not be empty, got {string!r}")
