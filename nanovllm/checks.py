"""What users hand in: names of extras, names of options, values. Each error says what is wrong and what is allowed.

Called by `config.py`, `sampling_params.py` and `llm.py` before anything changes. The engine's own invariants are not
checked here: they are `assert`s in the code that relies on them.
"""

import math
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, fields
from functools import partial, wraps
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


class OfExtra:
    """A method that is imported when it is used: `embed = OfExtra("embedding/pooling_params")`."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        method = getattr(import_extra(self.file, f"{owner.__name__}.{self.name}"), self.name)
        return method.__get__(instance, owner)


def check_by_extra(name: str, value: Any, file: str) -> None:
    """By the extra that reads the field; None asks for nothing."""
    if value is not None:
        import_extra(file, name).FIELD_CHECKS[name](name, value)


def names_of_extras(module: str, names: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """A module's `__getattr__`: imports a name when it is used. names: file in `extras/` -> its names."""

    def resolve(name: str) -> Any:
        for file in names:
            if name in names[file]:
                return getattr(import_extra(file, name), name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return resolve


# ---- options, by the names here or by vLLM's


def translate_options(options: Mapping[str, Any], known: Collection[str], kind: str) -> Mapping[str, Any]:
    """Options as vLLM's users write them -> options of the names `known`; `kind` is a key of the extra's `OPTIONS`.

    TypeError for a name that neither knows, ValueError for an option of vLLM that is not at its neutral value.
    """
    if not options:
        return options
    hint = ""
    try:
        with extra("extras/vllm", "any other option of vLLM"):
            from nanovllm.extras.vllm.vllm_options import translate
        options = translate(options, known, kind)
    except MissingExtra as missing:
        hint = f"; {missing}"
    if unknown := sorted(str(name) for name in options if name not in known):
        raise TypeError(f"unknown argument {', '.join(unknown)}; allowed are {', '.join(known)}{hint}")
    return options


def takes_vllm_options(kind: str) -> Callable[[type[Record]], type[Record]]:
    """A decorator of dataclasses: what a constructor refuses may be vLLM's, is translated, and tried again."""

    def decorate(cls: type[Record]) -> type[Record]:
        own_init = cls.__init__
        names = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]

        @wraps(own_init)
        def __init__(self: Record, *args: Any, **options: Any) -> None:
            with suppress(TypeError, ValueError):  # raised again below, unless they were vLLM's
                own_init(self, *args, **options)
                return
            own_init(self, *args, **translate_options(options, names, kind))

        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return decorate


# ---- fields and their checks


def checked(default: Any, check: Callable[..., None], **limits: Any) -> Any:
    """A field of a dataclass whose values pass `check(name, value, **limits)`.

    >>> max_num_seqs: int = checked(256, check_int, minimum=1)
    """
    return field(default=default, metadata={"check": partial(check, **limits)})


def checks_of(record: Any) -> Mapping[str, Callable[[str, Any], None]]:
    """The check of each `checked` field of a dataclass: a function of name and value."""
    return {one.name: one.metadata["check"] for one in fields(record) if "check" in one.metadata}


# ---- values


def check_int(name: str, value: Any, minimum: int, optional: bool = False, maximum: int | None = None) -> None:
    """`value` is a whole number (no bool) in [minimum, maximum], or None where that is allowed."""
    is_integer = type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))
    if is_integer and minimum <= value and (maximum is None or value <= maximum) or (value is None and optional):
        return
    most = "" if maximum is None else f" and <= {maximum}"
    allowed = f"an integer >= {minimum}{most}" + (" or None" if optional else "")
    if not is_integer:
        raise TypeError(f"{name} must be {allowed}, got {value!r}")
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


def check_bool(name: str, value: Any, optional: bool = False) -> None:
    if not isinstance(value, bool) and not (value is None and optional):
        raise TypeError(f"{name} must be {'True, False or None' if optional else 'True or False'}, got {value!r}")


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


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


def check_list(name: str, value: Any, of_what: str) -> Collection[Any]:
    """`value`, or an empty list for None; TypeError if it is not a list."""
    if value is None:
        return []
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of {of_what} or None, got {value!r}")
    return value


def check_token_ids(name: str, value: Any) -> None:
    for i, token_id in enumerate(check_list(name, value, "token ids")):
        check_int(f"{name}[{i}]", token_id, 0)


def check_strings(name: str, value: Any, blank: str = "", or_one: bool = False) -> None:
    """A list of strings, or one where that is allowed; none of them consists of characters of `blank` only."""
    strings = [value] if or_one and isinstance(value, str) else check_list(name, value, "strings")
    for i, string in enumerate(strings):
        if not isinstance(string, str):
            raise TypeError(f"{name}[{i}] must be a str, got {string!r}")
        if not string.strip(blank):
            raise ValueError(f"{name}[{i}] must not be empty, got {string!r}")
