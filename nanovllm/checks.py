"""Checks of what users hand in: each raises an error that names the field, the value and what is allowed.

Called by `config.py`, `sampling_params.py` and `llm.py` before anything changes. The engine's own invariants are not
checked here: they are `assert`s in the code that relies on them.
"""

import math
import numbers
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class MissingExtra(ImportError):
    """A feature was asked for whose files have been deleted."""


@contextmanager
def extra(name: str, feature: str) -> Iterator[None]:
    """Around the import of an extra: `name` is its file or folder in the package, `feature` what the user asked for.

    >>> with extra("extras/swap", "preemption_mode='swap'"):
    ...     from nanovllm.extras.swap.space import Swap
    """
    try:
        yield
    except ModuleNotFoundError as error:
        is_ours = (error.name or "").startswith("nanovllm.")
        if not is_ours or (Path(__file__).parent / name).exists():  # a library that the extra needs
            raise
        raise MissingExtra(f"{feature} is an extra, and nanovllm/{name} is not there") from error


def check_int(name: str, value: Any, minimum: int, optional: bool = False, maximum: int | None = None) -> None:
    """`value` is a whole number (no bool) in [minimum, maximum], or None where that is allowed."""
    if value is None and optional:
        return
    most = "" if maximum is None else f" and <= {maximum}"
    allowed = f"an integer >= {minimum}{most}" + (" or None" if optional else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be {allowed}, got {value!r}")
    if int(value) < minimum or (maximum is not None and int(value) > maximum):
        raise ValueError(f"{name} must be {allowed}, got {value}")


def check_number(name: str, value: Any, low: float, high: float = math.inf, open_low: bool = False) -> None:
    """`value` is a finite number in [low, high], or in (low, high] with `open_low`."""
    allowed = f"a finite number {'>' if open_low else '>='} {low:g}" + ("" if high == math.inf else f" and <= {high:g}")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {allowed}, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not math.isfinite(number) or number < low or number > high or (open_low and number == low):
        raise ValueError(f"{name} must be {allowed}, got {value}")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_str(name: str, value: Any, optional: bool = False, or_path: bool = False) -> None:
    """`value` is a str that is not empty, or None or a Path where that is allowed."""
    if value is None and optional:
        return
    if not isinstance(value, str | Path if or_path else str) or not str(value):
        allowed = "a str" + (" or a Path" if or_path else "") + (" or None" if optional else "")
        raise TypeError(f"{name} must be {allowed}, and not empty, got {value!r}")


def check_dict(name: str, value: Any) -> None:
    """`value` is a dict from str, or None."""
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise TypeError(f"{name} must be a dict from str or None, got {value!r}")
