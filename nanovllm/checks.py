"""Checks of the values that users pass in. Each error names the field, the value and what is allowed.

Invariants of the engine itself are not checked here: they are `assert` statements in the code that relies on them.
"""

import math
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


def checks_of(record: Any) -> Mapping[str, Callable[[str, object], None]]:
    """Return the check of each `checked` field of a dataclass, a function of name and value."""
    return {one.name: one.metadata["check"] for one in fields(record) if "check" in one.metadata}


def narrowed(record: Any, kind: Any) -> Any:
    """Return a copy of a dataclass as a `kind`, which its own class may extend, checked again.

    ValueError if a field that `kind` lacks has another value than its default, so that no option is lost.
    """
    names = {one.name for one in fields(kind)}
    for one in fields(record):
        if one.name not in names and getattr(record, one.name) != one.default:
            raise ValueError(f"{one.name}={getattr(record, one.name)!r} is an option of nanovllm_extras.LLM, "
                             f"not of nanovllm.LLM")  # fmt: skip
    return kind(**{name: getattr(record, name) for name in names})


def check_int(name: str, value: object, minimum: int, optional: bool = False, maximum: int | None = None) -> None:
    """Raise unless `value` is an integer in [minimum, maximum], or None if `optional`. A bool is not an integer."""
    most = "" if maximum is None else f" and <= {maximum}"
    allowed = f"an integer >= {minimum}{most}" + (" or None" if optional else "")
    if not (optional and value is None):
        check_range(name, value, numbers.Integral, minimum, math.inf if maximum is None else maximum, allowed)


def check_number(name: str, value: Any, low: float, high: float = MAX, open_low: bool = False) -> None:
    """Raise unless `value` is a finite number in [low, high], or in (low, high] if `open_low`."""
    if isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()  # NumPy would convert the limits to the value's own type, and warn of an overflow
    allowed = f"a finite number {'>' if open_low else '>='} {low:g}" + ("" if high == MAX else f" and <= {high:g}")
    check_range(name, value, numbers.Real, low, high, allowed)
    if open_low and value == low:
        raise ValueError(f"{name} must be {allowed}, got {value}")


def check_range(name: str, value: Any, kind: Any, low: float, high: float, allowed: str) -> None:
    """Raise unless `value` is of the class `kind` and in [low, high]. `allowed` says so in the error."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {allowed}, got {value!r}")
    if not low <= value <= high:  # this refuses NaN and infinities too
        raise ValueError(f"{name} must be {allowed}, got {value}")


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, allowed: Collection[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def check_str(name: str, value: object, or_path: bool = False, optional: bool = False) -> None:
    """Raise unless `value` is a str that is not empty, or a Path if `or_path`, or None if `optional`."""
    if not (optional and value is None) and (not isinstance(value, str | Path if or_path else str) or not str(value)):
        allowed = "a str" + " or a Path" * or_path + " or None" * optional
        raise TypeError(f"{name} must be {allowed}, and not empty, got {value!r}")


def check_mapping(name: str, value: object) -> None:
    """Raise unless `value` is a dict with str keys, or None."""
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise TypeError(f"{name} must be a dict from str or None, got {value!r}")


def check_class(name: str, value: object, base: type = object) -> None:
    """Raise TypeError unless `value` is a subclass of `base`, or None."""
    if value is not None and not (isinstance(value, type) and issubclass(value, base)):
        kind = "class" if base is object else f"subclass of {base.__module__}.{base.__qualname__}"
        raise TypeError(f"{name} must be a {kind}, its name as 'module:Class', or None, got {value!r}")


def check_classes(name: str, value: Any) -> None:
    """Raise unless `value` is a dict from str to classes, or None."""
    check_mapping(name, value)
    if not all(isinstance(one, type) for one in (value or {}).values()):
        raise TypeError(f"{name} must be a dict from str to classes, such as float, or None, got {value!r}")


def check_callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function or None, got {value!r}")


def check_backend(name: str, value: object) -> None:
    """Raise unless `value` is a str that is not empty, or a class."""
    if not isinstance(value, type):
        check_str(name, value)


def check_list(name: str, value: object, of_what: str) -> Collection[Any]:
    """Return `value`, or an empty list for None. Raise TypeError if it is not a list."""
    if value is None:
        return []
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of {of_what} or None, got {value!r}")
    return value


def check_token_ids(name: str, value: object) -> None:
    for i, token_id in enumerate(check_list(name, value, "token ids")):
        check_int(f"{name}[{i}]", token_id, 0)


def check_strings(name: str, value: object, or_one: bool = False) -> None:
    """Raise unless `value` is a list of strings that are not empty, or one such string if `or_one`."""
    strings = [value] if or_one and isinstance(value, str) else check_list(name, value, "strings")
    for i, string in enumerate(strings):
        if not isinstance(string, str):
            raise TypeError(f"{name}[{i}] must be a str, got {string!r}")
        if not string:
            raise ValueError(f"{name}[{i}] must not be empty, got {string!r}")
