"""Read the text that the bundled tiny model is trained on, and make its addition exercises.

This module decides what a well-formed corpus is and which sums are held out of training. `train_tiny.py`, which calls
this module, decides how often each text is shown and how it is tokenized. The tests call this module too.

A corpus file is a list of entries, separated by blank lines; lines that start with `#` are comments:

    Q: What is the KV cache?            a wording used in training (several)
    Q: kv cache?
    U: Please describe the KV cache.    a wording held out of training (exactly one)
    A: The KV cache stores ...          the answer, one line
"""

import random
from dataclasses import dataclass
from pathlib import Path

LONG_PREFIX = "long_"  # files whose answers are explanations of a hundred words and more
MIN_QUESTIONS = 2
NUM_HELD_OUT_SUMS = 200

SUM_WORDINGS = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "Compute {a} + {b}.",
    "{a} plus {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "{a}+{b}=?",
)


@dataclass(frozen=True)
class Entry:
    """One answer that the model learns, with the questions that ask for it."""

    topic: str  # the file's name without its suffix
    questions: tuple[str, ...]  # trained wordings
    unseen: str  # never trained on: measures whether the model generalizes
    answer: str
    is_long: bool


@dataclass(frozen=True)
class _Line:
    """One line of an entry, with its file and line number for error messages."""

    kind: str  # "Q", "U" or "A"
    text: str
    place: str  # "file:line"


def normalize(wording: str) -> str:
    """Remove what the training's augmentation may change: `"What is X?"` -> `"what is x"`."""
    return wording.lower().rstrip("?.! ")


def load_corpus(folder: Path | str) -> list[Entry]:
    """Return the entries of all `*.txt` files in `folder`, in file order. Raises ValueError if a file is malformed."""
    paths = sorted(Path(folder).glob("*.txt"))
    if not paths:
        raise ValueError(f"no *.txt in {folder}: is this the corpus folder?")
    entries = []
    first_places: dict[str, str] = {}  # normalized wording -> where it first occurs
    for path in paths:
        for lines in _split_entries(path):
            entries.append(_make_entry(path, lines))
            _reject_duplicates(lines, first_places)
    return entries


def _split_entries(path: Path) -> list[list[_Line]]:
    """Return the file's lines without comments, grouped by the blank lines between them."""
    groups: list[list[_Line]] = [[]]
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not raw.strip():
            groups.append([])
        elif not raw.startswith("#"):
            groups[-1].append(_parse_line(raw, f"{path.name}:{number}"))
    return [group for group in groups if group]


def _parse_line(raw: str, place: str) -> _Line:
    kind, colon, text = raw.partition(": ")
    if not colon or kind not in ("Q", "U", "A"):
        raise ValueError(f"{place}: a line must start with 'Q: ', 'U: ', 'A: ' or '#', got {raw!r}")
    if not text.strip():
        raise ValueError(f"{place}: nothing after '{kind}:'")
    if text != text.strip() or not text.isascii():
        raise ValueError(f"{place}: text must be ASCII without spaces around it, got {text!r}")
    return _Line(kind, text, place)


def _make_entry(path: Path, lines: list[_Line]) -> Entry:
    """Make an entry of lines in the order Q … Q U A. Raises ValueError otherwise, as without a blank line."""
    kinds = "".join(line.kind for line in lines)
    num_questions = len(kinds) - 2
    if num_questions < MIN_QUESTIONS or kinds != "Q" * num_questions + "UA":
        raise ValueError(
            f"{lines[0].place}: an entry is at least {MIN_QUESTIONS} 'Q:' lines, one 'U:' line and one 'A:' line, "
            f"in this order and followed by a blank line, got {' '.join(kinds)}"
        )
    questions = tuple(line.text for line in lines[:-2])
    return Entry(path.stem, questions, lines[-2].text, lines[-1].text, path.stem.startswith(LONG_PREFIX))


def _reject_duplicates(lines: list[_Line], first_places: dict[str, str]) -> None:
    """Raise ValueError if a wording occurs twice, also if only case or final punctuation differs.

    One wording cannot have two answers, and a held-out wording must not be trained in lower case.
    """
    for line in lines[:-1]:
        key = normalize(line.text)
        if key in first_places:
            raise ValueError(f"{line.place}: the wording {line.text!r} is already at {first_places[key]}")
        first_places[key] = line.place


def split_sums(num_held_out: int = NUM_HELD_OUT_SUMS) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return all pairs of two-digit numbers as (trained, held out). The split is always the same.

    Holding out (23, 48) keeps (48, 23) out of training too, because addition commutes and the model may learn this.
    """
    unordered = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng = random.Random(0)
    chosen = rng.sample(unordered, num_held_out)
    held_out = [pair if rng.random() < 0.5 else pair[::-1] for pair in chosen]
    excluded = {*held_out, *(pair[::-1] for pair in held_out)}
    trained = [(a, b) for a in range(10, 100) for b in range(10, 100) if (a, b) not in excluded]
    return trained, held_out


def sum_exchange(pair: tuple[int, int], wording: int) -> tuple[str, str]:
    """Return question and answer: `sum_exchange((23, 48), 0)` -> `("What is 23 + 48?", "23 + 48 = 71.")`."""
    a, b = pair
    return SUM_WORDINGS[wording % len(SUM_WORDINGS)].format(a=a, b=b), f"{a} + {b} = {a + b}."
