"""Translate vLLM's options: each is kept, renamed, dropped at its neutral value, or refused.

`vllm_tables.py` lists the options. `translate_options` of `option_checks.py` calls `translate` if the core does not
know a name or a value.
"""

from collections.abc import Collection, Mapping

from nanovllm_extras.options.vllm_tables import (
    ENGINE_OPTIONS,
    OPTIONS,
    RENAMED,
    RENAMED_OF,
    VALUES,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_OF,
)


def translate(options: Mapping[str, object], known: Collection[str], kind: str) -> dict[str, object]:
    """Return vLLM's options as options with the names `known`.

    kind: selects the table of options that are accepted with neutral values.

    Raises ValueError for an option of vLLM with a value that is not neutral. A name that neither vLLM nor `known` has
    is kept.
    """
    translated: dict[str, object] = {}
    for vllm_name, value in options.items():
        name = RENAMED_OF.get(kind, {}).get(vllm_name, vllm_name)
        if name in translated:
            raise TypeError(f"{name} is given twice, once with vLLM's name; use one of them")
        if name in known and value is None and kind == "pooling":  # None is the default of vLLM
            continue
        if name in known:
            translated[name] = here(name, value) if kind == "engine" else value
        elif not is_neutral(vllm_name, value, kind):
            translated[vllm_name] = value
    return translated


def is_neutral(name: str, value: object, kind: str) -> bool:
    """Return whether an option of vLLM can be dropped. Raises ValueError if its value is not neutral."""
    if name in WITHOUT_EFFECT_OF.get(kind, ()):
        return True
    for refused in OPTIONS[kind]:
        if name in refused.neutral:
            if not any(type(value) is type(one) and value == one for one in refused.neutral[name]):
                accepted = ", ".join(repr(one) for one in refused.neutral[name][:2])
                raise ValueError(f"{name}={value!r} is not supported, only {accepted}: {refused.instead}")
            return True
    return False


def here(name: str, value: object) -> object:
    """Return the value of an engine's option that has the meaning of `value` in vLLM."""
    return VALUES.get(name, {}).get(value, value) if value is None or isinstance(value, str) else value


def names_of_vllm() -> list[str]:
    """Return the names of vLLM's engine options that `Config` does not have, without the options of a server."""
    refused = [name for group in ENGINE_OPTIONS for name in group.neutral]
    return sorted({*RENAMED, *WITHOUT_EFFECT, *refused})
