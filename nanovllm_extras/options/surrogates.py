"""Refuse texts with half of a surrogate pair. JSON and Python allow them, UTF-8 does not: no tokenizer encodes them."""

from collections.abc import Mapping


def check_texts(name: str, value: object) -> None:
    """Raise ValueError if a text within `value`, including the keys of dicts, has a lone surrogate."""
    if (text := text_with_surrogate(value)) is not None:
        where, character = next((i, one) for i, one in enumerate(text) if "\ud800" <= one <= "\udfff")
        shown = text[max(0, where - 20) : where + 20]
        raise ValueError(f"{name} must not hold half of a surrogate pair, got {character!r} at {where} in {shown!r}")


def text_with_surrogate(value: object) -> str | None:
    """Return a text within a value of lists and dicts that UTF-8 cannot encode, or None."""
    left: list[object] = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            if not is_utf8(one):
                return one
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one
    return None


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode `text`: whether it has no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
