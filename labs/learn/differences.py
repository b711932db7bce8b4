"""Show the first observation that differs: what both runs do here, and a line for each field that differs."""

import re
from difflib import SequenceMatcher
from typing import Any

from labs.learn.answers import Raised
from labs.learn.findings import Drawing
from labs.learn.seen import Seen
from labs.learn.texts import Language, Text

MOST = 160  # characters of a value in a line
NUM_NOTES = 4  # sentences about wrong blocks
RIGHT, YOURS = Text("right: ", "正确："), Text("yours: ", "你的：")


def draw_difference(right: Seen | None, yours: Seen | None, language: Language) -> Drawing:
    """Return lines about two observations that differ, with the words that differ marked. The title is empty."""
    here = right or yours
    assert here is not None
    drawing = Drawing("", [f"→ {here.label.show(language)}"])
    if right is None or yours is None or isinstance(yours.value, Raised):
        add_pair(drawing, "", show_end(right, language), show_end(yours, language), language)
        if yours is not None and isinstance(yours.value, Raised):
            drawing.lines += explain_error(yours, language)
        return drawing
    a, b = unwrap(right.value), unwrap(yours.value)
    shown = show(a, language), show(b, language)
    names = list_fields(a, b)
    if shown[0] != shown[1] and not hasattr(a, "compare"):
        add_pair(drawing, "", *cut(*shown), language)
    elif names:
        if not hasattr(a, "compare"):
            drawing.lines[0] += colon(language) + shown[0]
            text = Text("  in both runs; afterwards these differ:", "  两次运行都这样；之后不同的是：")
            drawing.lines.append(text.show(language))
        width = max(map(len, names))
        for name, (one, other) in names.items():
            add_pair(drawing, name.ljust(width) + "  ", one, other, language)
    else:
        is_below = shown[0] == "↓"  # a tensor that is drawn below
        below = Text("    the values differ: see below", "    两个值不同，见下面")
        text = Text("    the values differ; both are shown as ", "    两个值不同；显示出来都是 ")
        drawing.lines.append(below.show(language) if is_below else text.show(language) + shorten(shown[0]))
    drawing.lines += [f"    {note.show(language)}" for note in getattr(b, "wrong_blocks", ())[:NUM_NOTES]]
    return drawing


def unwrap(value: Any) -> Any:
    """Return the step of a value that also has the run around it (`whole_runs.py`)."""
    return getattr(value, "step", value)


def show(value: Any, language: Language) -> str:
    """Return a value on one line. A value can have a method `show` for this."""
    if hasattr(value, "show"):
        return str(value.show(language))
    if isinstance(value, str) and not isinstance(value, Raised):
        return value
    start = f"{type(value).__name__}("  # of a named tuple
    return repr(value).removeprefix(start).removesuffix(")") if repr(value).startswith(start) else repr(value)


def colon(language: Language) -> str:
    return "：" if language == "zh" else ": "


def shorten(text: str) -> str:
    return text if len(text) <= MOST else text[: MOST - 1] + "…"


def cut(right: str, yours: str) -> tuple[str, str]:
    """Return both texts cut to a length, so that the first character that differs is in them."""
    pairs = enumerate(zip(right, yours, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(right), len(yours)))
    start = 0 if same < MOST - 40 else same - 40
    first, second = (shorten(("…" if start else "") + one[start:]) for one in (right, yours))
    return first, second


def list_fields(right: Any, yours: Any) -> dict[str, tuple[str, str]]:
    """Return the fields that differ. A value can have a method `compare`, or is a named tuple, or has another type."""
    if type(right) is not type(yours):
        return {"": (f"{right!r} ({type(right).__name__})", f"{yours!r} ({type(yours).__name__})")}
    if hasattr(right, "compare"):
        lines = (text.split("\n") for text in right.compare(yours))
        words = [(one.partition(" "), other.partition(" ")) for one, other in zip(*lines, strict=True)]
        return {one[0]: (one[2], other[2]) for one, other in words}
    if hasattr(right, "_fields"):
        both = {name: (getattr(right, name), getattr(yours, name)) for name in right._fields if name != "wrong_blocks"}
        return {name: (show_field(a), show_field(b)) for name, (a, b) in both.items() if a != b}
    return {}


def show_field(value: Any) -> str:
    return repr(list(value)) if isinstance(value, tuple) and not hasattr(value, "_fields") else repr(value)


def add_pair(drawing: Drawing, name: str, right: str, yours: str, language: Language) -> None:
    """Add two lines, and mark the words that differ."""
    for title, text, other in ((RIGHT, right, yours), (YOURS, yours, right)):
        start = f"    {name if title is RIGHT else ' ' * len(name)}{title.show(language)}"
        drawing.marks += [[len(drawing.lines), len(start) + a, len(start) + b] for a, b in find_words(text, other)]
        drawing.lines.append(start + text)


def find_words(text: str, other: str) -> list[tuple[int, int]]:
    """Return where `text` has words that `other` does not have at the same place: (start, end)."""
    words = list(re.finditer(r"[\w.+→-]+|[^\w\s]", text))
    matcher = SequenceMatcher(None, [one.group() for one in words], re.findall(r"[\w.+→-]+|[^\w\s]", other), False)
    changes = [(i, j) for tag, i, j, _, _ in matcher.get_opcodes() if tag in ("replace", "delete")]
    return [(words[i].start(), words[j - 1].end()) for i, j in changes]


def mark_rows(lines: list[str], others: list[str]) -> list[list[int]]:
    """Return the words of a drawing that differ from the other drawing in the same line: [line, start, end]."""
    pairs = enumerate(zip(lines, others, strict=False))
    return [[i, *where] for i, (line, other) in pairs for where in find_words(line, other)]


def show_end(seen: Seen | None, language: Language) -> str:
    """Return the value of an observation, also of one that is not there, or that is an exception."""
    if seen is None:
        return Text("the run has ended", "运行已结束").show(language)
    return seen.drawing if isinstance(seen.value, Raised) else shorten(show(unwrap(seen.value), language))


def explain_error(seen: Seen, language: Language) -> list[str]:
    """Return lines that say where an exception was raised, and what a StopIteration means."""
    lines = [f"           {seen.label.show(language)}"]
    if seen.value == "StopIteration":
        text = Text(
            "`next` was called, but nothing is left. `take` does so if no block is free.",
            "调用了 `next`，但已经没有元素了。没有空闲块时调用 `take` 就会这样。",
        )
        lines.append(f"           {text.show(language)}")
    return lines
