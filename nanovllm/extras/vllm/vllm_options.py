"""vLLM's options: each is taken, renamed, dropped at its neutral value, or refused by name.

The options are in `tables.py`. `translate_options` of `checks.py` asks for a translation when the core meets a
name or a value that it does not know.
"""

from collections.abc import Collection, Mapping
from typing import Any

from nanovllm.extras.vllm.tables import ENGINE_OPTIONS, OPTIONS, RENAMED, VALUES, WITHOUT_EFFECT


def translate(options: Mapping[str, Any], known: Collection[str], kind: str) -> dict[str, Any]:
    """Options as vLLM writes them -> options of the names `known`; `kind` says which others may be neutral.

    ValueError for a vLLM option that is not neutral. A name that neither knows is kept.
    """
    translated: dict[str, Any] = {}
    for vllm_name, value in options.items():
        name = RENAMED.get(vllm_name, vllm_name)
        if name in translated:
            raise TypeError(f"{name} is given twice, once by vLLM's name for it; give one")
        if name in known:
            translated[name] = here(name, value) if kind == "engine" else value
        elif not is_neutral(vllm_name, value, kind):
            translated[vllm_name] = value
    return translated


def is_neutral(name: str, value: Any, kind: str) -> bool:
    """Whether `name` is an option of vLLM, and may be dropped; ValueError if this value may not."""
    if kind == "engine" and name in WITHOUT_EFFECT:
        return True
    for refused in OPTIONS[kind]:
        if name in refused.neutral:
            if not any(type(value) is type(one) and value == one for one in refused.neutral[name]):
                accepted = ", ".join(repr(one) for one in refused.neutral[name][:2])
                raise ValueError(f"{name}={value!r} is not supported, only {accepted}: {refused.instead}")
            return True
    return False


def here(name: str, value: Any) -> Any:
    """The value of an engine's option that means here what `value` means in vLLM."""
    same = VALUES.get(name, {})
    is_key = value is None or isinstance(value, str)
    return same.get(value, value) if is_key else value


def names_of_vllm() -> list[str]:
    """vLLM's names of engine options that `Config` does not have; without those of a server, which has its own."""
    refused = [name for group in ENGINE_OPTIONS for name in group.neutral]
    return sorted({*RENAMED, *WITHOUT_EFFECT, *refused})
