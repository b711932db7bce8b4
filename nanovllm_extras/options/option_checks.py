"""Options by the names here or by vLLM's, and checks that are imported when a value needs them.

The checks of plain values are the core's (`nanovllm/checks.py`).
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm_extras.options.vllm_options import translate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")


class LazyMethod:
    """A method that is imported when it is used: `embed = LazyMethod("embedding.pooling_params")`.

    of_class: the method gets the class, as with `classmethod`.
    """

    def __init__(self, module: str, of_class: bool = False) -> None:
        self.module, self.of_class = module, of_class

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Any:
        method = getattr(import_module(f"nanovllm_extras.{self.module}"), self.name)
        return MethodType(method, owner) if self.of_class else method.__get__(instance, owner)


def check_in(name: str, value: object, module: str) -> None:
    """Check a field by the table `FIELD_CHECKS` of the module that reads it. None is always allowed."""
    if value is not None:
        import_module(f"nanovllm_extras.{module}").FIELD_CHECKS[name](name, value)


def check_optional_bool(name: str, value: object) -> None:
    if not isinstance(value, bool | None):
        raise TypeError(f"{name} must be True, False or None, got {value!r}")


def check_optional_str(name: str, value: object, or_path: bool = False) -> None:
    """Raise unless `value` is a str that is not empty, or None, or a Path if `or_path`."""
    if value is not None and (not isinstance(value, str | Path if or_path else str) or not str(value)):
        allowed = "a str or a Path or None" if or_path else "a str or None"
        raise TypeError(f"{name} must be {allowed}, and not empty, got {value!r}")


def check_dict(name: str, value: object) -> None:
    """Raise unless `value` is a dict with str keys, or None."""
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise TypeError(f"{name} must be a dict from str or None, got {value!r}")


def translate_options(options: Mapping[str, object], known: Collection[str], kind: str) -> Mapping[str, Any]:
    """Translate options as vLLM's users write them to the names `known`. `kind` is a key of vLLM's tables.

    TypeError for an unknown name, ValueError for an option of vLLM that does not have its neutral value.
    """
    if not options:
        return options
    options = translate(options, known, kind)
    if unknown := sorted(str(name) for name in options if name not in known):
        raise TypeError(f"unknown argument {', '.join(unknown)}; allowed are {', '.join(known)}")
    return options


def first_given(*values: Any) -> Any:
    """Return the first value that is not None. An empty text and 0 count as given, unlike with `or`."""
    return next((value for value in values if value is not None), None)


def takes_vllm_options(kind: str) -> Callable[[type[Record]], type[Record]]:
    """Decorate a dataclass: arguments that its constructor refuses are translated from vLLM's and tried again."""

    def decorate(cls: type[Record]) -> type[Record]:
        own_init = cls.__init__
        names = tuple(field.name for field in fields(cls))

        @wraps(own_init)
        def __init__(self: Record, *args: object, **options: object) -> None:
            with suppress(TypeError, ValueError):  # raised again below, unless the options were vLLM's
                own_init(self, *args, **options)
                return
            own_init(self, *args, **translate_options(options, names, kind))

        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return decorate
