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

from nanovllm.extras.learn.exercise import Seen
from nanovllm.extras.learn.simulation import Parts, Simulation, Step, Traffic
from nanovllm.extras.learn.texts import Text

NUM_LINES = 9  # of a timetable, at most


class Moment(NamedTuple):
    """A step, and the run that it is in."""

    step: Step
    label: Text
    steps: tuple[Step, ...]
    """Of the whole run."""
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
        seen.extend(simulation.run())
    except Exception as raised:
        error = raised
    texts = {name: tuple(seq.token_ids) for name, seq in simulation.seqs.items()}
    steps = tuple(one.value for one in seen)
    names = sorted(simulation.seqs)
    for i, one in enumerate(seen):
        labels = [each.label.en.removeprefix("step ") for each in seen]
        yield Seen(one.label, Moment(one.value, one.label, steps, texts), draw_timetable(names, labels, steps, i))
    if error is not None:
        raise error


def simulate(parts: Parts, traffic: Traffic) -> Iterator[Seen]:
    return run_whole(Simulation(parts, traffic))


def draw_timetable(names: list[str], labels: list[str], steps: tuple[Step, ...], here: int) -> str:
    """Return the steps around step `here`: how many tokens of each sequence are computed, and who waits."""
    header = ["  step", *names, "free", "preemptions", "waiting"]
    first = max(0, min(here - 3, len(steps) - NUM_LINES))
    rows = []
    for i in range(first, min(first + NUM_LINES, len(steps))):
        step, chunks = steps[i], dict(steps[i].chunks)
        cells = [f"+{chunks[name]}" if name in chunks else "" for name in names]
        mark = "→" if i == here else " "
        counts = [str(len(step.free)), str(step.preemptions or "")]
        rows.append([f"{mark} {labels[i]:>4}", *cells, *counts, " ".join(step.waiting)])
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    lines = [[cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)] for row in [header, *rows]]
    return "\n".join("   ".join([*line, row[-1]]).rstrip() for line, row in zip(lines, [header, *rows], strict=True))


def explain_difference(_: Traffic, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Return sentences: which sequence overtook which, and what the whole run costs."""
    if right is None or yours is None or not (isinstance(right.value, Moment) and isinstance(yours.value, Moment)):
        return []
    is_same = right.value.texts == yours.value.texts
    found = [Text("same tokens", "token 相同") if is_same else Text("other tokens", "token 不同")]
    found += [
        Text(f"{a} overtook {b} at {yours.label.en}", f"{yours.label.zh} {a} 超过了 {b}")
        for a, b in find_overtakes(right.value.step, yours.value.step)
    ]
    found += compare_totals(right.value.steps, yours.value.steps)
    but = (", but ", "，但") if is_same else ("; ", "；")
    en = found[0].en + but[0] * (len(found) > 1) + "; ".join(one.en for one in found[1:])
    zh = found[0].zh + but[1] * (len(found) > 1) + "；".join(one.zh for one in found[1:])
    return [(Text(en, zh), "")]


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
