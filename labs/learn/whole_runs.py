"""Run a learner's scheduler to its end, and compare both runs at the first step that differs.

Many mistakes change no token, but the order in which sequences advance, or the work that is done twice. So each
observation also has the whole run: the timetable, the texts, and the totals.

    step     A     B     C   free   preemptions   waiting
       1    +3    +4    +2      0
    →  2    +1    +1            1             1   C
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

from labs.learn.exercise import Seen
from labs.learn.simulation import Parts, Simulation, Step, Traffic
from labs.learn.texts import Text

NUM_LINES = 9  # of a timetable, at most


class Moment(NamedTuple):
    """A step, and the run that it is in."""

    step: Step
    here: int
    """The index of this step in the run."""
    labels: tuple[Text, ...]
    """Of all steps of the run."""
    steps: tuple[Step, ...]
    texts: dict[str, tuple[int, ...]]
    """What the sequences have at the end."""

    def __repr__(self) -> str:
        return repr(self.step)


def is_same_step(a: Any, b: Any) -> bool:
    return bool(a.step == b.step)


def run_whole(simulation: Simulation) -> Iterator[Seen]:
    """Run to the end, then yield each step. An exception of the learner's code comes after the steps before it."""
    seen: list[Seen] = []
    error = None
    try:
        seen.extend(simulation.run(has_drawings=False))
    except Exception as raised:
        error = raised
    texts = {name: tuple(seq.token_ids) for name, seq in sorted(simulation.seqs.items())}
    labels, steps = tuple(one.label for one in seen), tuple(one.value for one in seen)
    for i, one in enumerate(seen):
        yield Seen(one.label, Moment(one.value, i, labels, steps, texts))
    if error is not None:
        raise error


def simulate(parts: Parts, traffic: Traffic) -> Iterator[Seen]:
    return run_whole(Simulation(parts, traffic))


def draw_timetable(moment: Moment) -> str:
    """Return the steps around this one: how many tokens of each sequence are computed, and which sequences wait."""
    names, steps, here = list(moment.texts), moment.steps, moment.here
    header = ["  step", *names, "free", "preemptions", "waiting"]
    first = max(0, min(here - 3, len(steps) - NUM_LINES))
    rows = []
    for i in range(first, min(first + NUM_LINES, len(steps))):
        step, chunks = steps[i], dict(steps[i].chunks)
        cells = [f"+{chunks[name]}" if name in chunks else "" for name in names]
        mark = "→" if i == here else " "
        counts = [str(len(step.free)), str(step.preemptions or "")]
        label = moment.labels[i].en.removeprefix("step ")
        rows.append([f"{mark} {label:>4}", *cells, *counts, " ".join(step.waiting)])
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    lines = [[cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)] for row in [header, *rows]]
    return "\n".join("   ".join([*line, row[-1]]).rstrip() for line, row in zip(lines, [header, *rows], strict=True))


def explain_difference(_: Any, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Return both timetables, and in a sentence which sequence overtook which, and what the whole run costs."""
    moments = [one.value if one is not None and isinstance(one.value, Moment) else None for one in (right, yours)]
    drawn = [draw_timetable(one) if one is not None else "" for one in moments]
    titles = [Text("right", "正确"), Text("yours", "你的")]
    if drawn[0] == drawn[1]:
        titles, drawn = [Text("the timetable of both runs", "两次运行的时间表相同")], drawn[:1]
    found = [(title, lines) for title, lines in zip(titles, drawn, strict=True) if lines]
    if moments[0] is not None and moments[1] is not None:
        found.append((summarize(moments[0], moments[1]), ""))
    return found


def summarize(right: Moment, yours: Moment) -> Text:
    """Return a sentence: "same tokens, but B overtook C at step 4"."""
    is_same = right.texts == yours.texts
    label = yours.labels[yours.here]
    found = [
        Text(f"{a} overtook {b} at {label.en}", f"{label.zh} {a} 超过了 {b}")
        for a, b in find_overtakes(right.step, yours.step)
    ]
    found += compare_totals(right.steps, yours.steps)
    first = Text("same tokens", "token 相同") if is_same else Text("other tokens", "token 不同")
    but = Text(", but ", "，但") if is_same else Text("; ", "；")
    if not found:
        return first
    en = first.en + but.en + "; ".join(one.en for one in found)
    return Text(en, first.zh + but.zh + "；".join(one.zh for one in found))


def find_overtakes(right: Step, yours: Step) -> list[tuple[str, str]]:
    """Return pairs (a, b): `b` is before `a` in the right order of service, and after it in the other order."""
    first, second = ((*step.running, *step.waiting) for step in (right, yours))
    return [
        (a, b) for b, a in combinations(first, 2) if a in second and b in second and second.index(a) < second.index(b)
    ]


def compare_totals(right: tuple[Step, ...], yours: tuple[Step, ...]) -> list[Text]:
    """Return the totals of the whole run that differ."""
    found = []
    for en, zh, total in (
        ("steps", "步数", len),
        ("preemptions", "抢占次数", lambda steps: steps[-1].preemptions),
        ("tokens computed", "计算的 token 数", lambda steps: sum(num for step in steps for _, num in step.chunks)),
        ("blocks moved", "搬动的块数", lambda steps: sum(len(step.moves) for step in steps)),
        ("requests still waiting at the end", "结束时仍在等待的请求数", lambda steps: len(steps[-1].waiting)),
    ):
        a, b = total(right), total(yours)
        if a != b:
            found.append(Text(f"{en} {b}, not {a}", f"{zh} {b}，应为 {a}"))
    return found
