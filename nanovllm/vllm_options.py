"""What becomes of an option that vLLM has? It is taken, renamed, dropped at its neutral value, or refused by name.

The options are in the tables of `vllm_tables.py`. Called by `Config.from_options`, `EngineArgs` and `LLM`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from nanovllm.vllm_tables import ENGINE_OPTIONS, RENAMED, SERVER_OPTIONS, VALUES, WITHOUT_EFFECT, Refused

Record = TypeVar("Record")


def translate(
    options: Mapping[str, Any], known: Iterable[str], others: tuple[Refused, ...] = ENGINE_OPTIONS
) -> dict[str, Any]:
    """Options as vLLM writes them -> options of the names `known`; `others` are those that may be neutral.

    ValueError for a vLLM option that is not neutral, TypeError for a name that neither knows.
    """
    names = list(known)
    translated: dict[str, Any] = {}
    unknown = []
    for vllm_name, value in options.items():
        name = RENAMED.get(vllm_name, vllm_name)
        if name in translated:
            raise TypeError(f"{name} is given twice, once by vLLM's name for it; give one")
        if name in names:
            translated[name] = here(name, value)
        elif not is_neutral(vllm_name, value, others):
            unknown.append(vllm_name)
    if unknown:
        raise TypeError(f"unknown argument {', '.join(sorted(unknown))}; allowed are {', '.join(names)}")
    return translated


def is_neutral(name: str, value: Any, others: tuple[Refused, ...]) -> bool:
    """Whether `name` is an option of vLLM, and may be dropped; ValueError if this value may not."""
    is_engines = others is ENGINE_OPTIONS
    if is_engines and name in WITHOUT_EFFECT:
        return True
    for refused in (*others, *(SERVER_OPTIONS if is_engines else ())):
        if name in refused.neutral:
            if not any(type(value) is type(one) and value == one for one in refused.neutral[name]):
                accepted = ", ".join(repr(one) for one in refused.neutral[name][:2])
                raise ValueError(f"{name}={value!r} is not supported, only {accepted}: {refused.instead}")
            return True
    return False


def here(name: str, value: Any) -> Any:
    """The value that means here what `value` means in vLLM."""
    same = VALUES.get(name, {})
    is_key = value is None or isinstance(value, str)
    return same.get(value, value) if is_key else value


def names_of_vllm() -> list[str]:
    """vLLM's names of engine options that `Config` does not have; without those of a server, which has its own."""
    refused = [name for group in ENGINE_OPTIONS for name in group.neutral]
    return sorted({*RENAMED, *WITHOUT_EFFECT, *refused})


def takes_vllm_options(others: tuple[Refused, ...]) -> Callable[[type[Record]], type[Record]]:
    """A decorator of dataclasses, whose constructors then take `others` at their neutral values."""

    def decorate(cls: type[Record]) -> type[Record]:
        own_init = cls.__init__
        names = frozenset(field.name for field in fields(cls))  # type: ignore[arg-type]

        @wraps(own_init)
        def __init__(self: Record, *args: Any, **options: Any) -> None:
            own_init(self, *args, **options if names.issuperset(options) else translate(options, names, others))

        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return decorate
