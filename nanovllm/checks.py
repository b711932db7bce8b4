"""What users hand in: names of extras, names of options, values. Each error says what is wrong and what is allowed.

Called by `config.py`, `sampling_params.py` and `llm.py` before anything changes. The engine's own invariants are not
checked here: they are `assert`s in the code that relies on them.
"""

import math
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")


# ---- extras


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


def import_extra(file: str, feature: str) -> Any:
    """The module `extras/FILE.py`."""
    with extra(f"extras/{file}.py", feature):
        return import_module(f"nanovllm.extras.{file.replace('/', '.')}")


def names_of_extras(module: str, files: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`: imports a name when it is used. files: name -> its file in `extras/`."""

    def resolve(name: str) -> Any:
        if name not in files:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_extra(files[name], name), name)

    return resolve


# ---- options, by the names here or by vLLM's


def own_options(options: Mapping[str, Any], known: Collection[str], kind: str) -> Mapping[str, Any]:
    """Options of the names `known`; unknown names may be vLLM's, and are translated."""
    return options if options.keys() <= {*known} else translate_options(options, known, kind)


def translate_options(options: Mapping[str, Any], known: Collection[str], kind: str) -> Mapping[str, Any]:
    """Options of vLLM -> options of the names `known`, by an extra; `kind` is a key of its `tables.OPTIONS`.

    TypeError for a name that neither knows, ValueError for an option of vLLM that is not at its neutral value.
    """
    try:
        with extra("extras/vllm", "any other option of vLLM"):
            from nanovllm.extras.vllm.options import translate
    except MissingExtra as missing:
        if unknown := unknown_names(options, known):
            raise TypeError(f"{unknown}; {missing}") from missing
        return options
    return translate(options, known, kind)


def unknown_names(options: Mapping[str, Any], known: Collection[str]) -> str:
    """What is wrong with the names of `options`; empty if nothing is."""
    unknown = sorted(str(name) for name in options if name not in known)
    return f"unknown argument {', '.join(unknown)}; allowed are {', '.join(known)}" if unknown else ""


def takes_vllm_options(kind: str) -> Callable[[type[Record]], type[Record]]:
    """A decorator of dataclasses, whose constructors then take vLLM's options of this kind, too."""

    def decorate(cls: type[Record]) -> type[Record]:
        own_init = cls.__init__
        names = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
        known = frozenset(names)

        @wraps(own_init)
        def __init__(self: Record, *args: Any, **options: Any) -> None:
            own_init(self, *args, **options if known.issuperset(options) else translate_options(options, names, kind))

        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return decorate


# ---- values


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
