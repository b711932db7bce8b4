"""Run a learner's scheduler on counters only, without blocks and without a network, and draw its steps as a timetable.

    step         A      B  budget left  waiting
       1   0 … 7                     0  B
       2  8 … 11+  0 … 3             0

The cells are the tokens that a step computes. A plus says that the sequence gets a new token.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs.learn.exercise import Seen
from labs.learn.tensors import draw_table
from labs.learn.texts import Text, count

MAX_STEPS = 60


RUNNING = -1


class Request(NamedTuple):
    """A request that arrives before step `arrival`, which counts from 0. `RUNNING`: it decodes when the run begins."""

    prompt_len: int
    max_tokens: int
    arrival: int = 0


class Step(NamedTuple):
    """What a step did. `tokens`: name, tokens and computed tokens of each sequence that has arrived, after the step."""

    chunks: tuple[tuple[str, int], ...]
    tokens: tuple[tuple[str, int, int], ...]
    running: tuple[str, ...]
    waiting: tuple[str, ...]

    def __repr__(self) -> str:
        return self.show("en")

    def show(self, language: str) -> str:
        """Return the step on one line: "A+8; tokens (computed): A 12 (8)"."""
        if language == "zh":
            parts = [" ".join(f"{name}+{num}" for name, num in self.chunks) or "没有 chunk"]
            parts += [
                "token 数（已计算）：" + " ".join(f"{name} {n}（{computed}）" for name, n, computed in self.tokens)
            ]
            parts += [f"运行：{' '.join(self.running) or '–'}", f"等待：{' '.join(self.waiting) or '–'}"]
            return "；".join(parts)
        parts = [" ".join(f"{name}+{num}" for name, num in self.chunks) or "no chunks"]
        parts += ["tokens (computed): " + " ".join(f"{name} {n} ({computed})" for name, n, computed in self.tokens)]
        parts += [f"running: {' '.join(self.running) or '–'}", f"waiting: {' '.join(self.waiting) or '–'}"]
        return "; ".join(parts)


def run_scheduler(answer: ModuleType, scheduler: Any, budget: int, requests: tuple[Request, ...]) -> Iterator[Seen]:
    """Yield each step with its timetable so far, until all requests are finished or a step has no chunks.

    answer: has the class `Sequence`; scheduler: has `waiting`, `running`, `schedule` and `update`
    """
    seqs = [answer.Sequence(chr(ord("A") + i), one.prompt_len, one.max_tokens) for i, one in enumerate(requests)]
    for seq, one in zip(seqs, requests, strict=True):
        if one.arrival == RUNNING:
            seq.num_computed_tokens = seq.num_tokens - 1
            scheduler.running.append(seq)
    rows = [["step", *(seq.name for seq in seqs), "budget left", "waiting"]]
    for number in range(MAX_STEPS):
        scheduler.waiting.extend(seq for seq, one in zip(seqs, requests, strict=True) if one.arrival == number)
        if not (scheduler.waiting or scheduler.running):
            if all(one.arrival <= number for one in requests):
                return
            continue
        chunks = [(seq, int(num)) for seq, num in scheduler.schedule()]
        before = [(seq.num_tokens, seq.num_computed_tokens) for seq in seqs]
        scheduler.update(chunks)
        cells = [draw_chunk(seq, chunks, *counters) for seq, counters in zip(seqs, before, strict=True)]
        waiting = " ".join(seq.name for seq in scheduler.waiting)
        rows.append([str(number + 1), *cells, str(budget - sum(num for _, num in chunks)), waiting])
        arrived = [seq for seq, one in zip(seqs, requests, strict=True) if one.arrival <= number]
        step = make_step(scheduler, chunks, arrived)
        yield Seen(Text(f"step {number + 1}", f"第 {number + 1} 步"), step, draw_table(rows[0], rows[1:]))
        if not chunks:
            return


def make_step(scheduler: Any, chunks: list[tuple[Any, int]], arrived: list[Any]) -> Step:
    return Step(
        tuple((seq.name, num) for seq, num in chunks),
        tuple((seq.name, seq.num_tokens, seq.num_computed_tokens) for seq in arrived),
        tuple(seq.name for seq in scheduler.running),
        tuple(seq.name for seq in scheduler.waiting),
    )


def draw_chunk(seq: Any, chunks: list[tuple[Any, int]], num_tokens: int, start: int) -> str:
    """Return a cell: the tokens of `seq` that the step computes, and a plus if it gets a token.

    num_tokens, start: the counters of `seq` before the step
    """
    lens = [num for one, num in chunks if one is seq]
    if not lens:
        return ""
    if sum(lens) < 1:
        return "0 tokens"
    last = start + sum(lens) - 1
    return (f"{start} … {last}" if last > start else str(start)) + "+" * (seq.num_tokens - num_tokens)


def describe_requests(requests: tuple[Request, ...]) -> Text:
    """Return the requests in words, a line for each."""
    en, zh = [], []
    for i, one in enumerate(requests):
        name = chr(ord("A") + i)
        when = Text(f", arrives before step {one.arrival + 1}", f"，在第 {one.arrival + 1} 步之前到达")
        if one.arrival <= 0:
            when = (
                Text("", "")
                if one.arrival == 0
                else Text(
                    f", already running, {one.prompt_len - 1} computed", f"，已在运行，已算 {one.prompt_len - 1} 个"
                )
            )
        en.append(f"{name}: {count(one.prompt_len, 'token')}{when.en}; max_tokens {one.max_tokens}.")
        zh.append(f"{name}：{one.prompt_len} 个 token{when.zh}；max_tokens {one.max_tokens}。")
    return Text("  \n".join(en), "  \n".join(zh))


def request_lists(max_prompt: int = 9) -> st.SearchStrategy[tuple[Request, ...]]:
    one = st.builds(Request, st.integers(1, max_prompt), st.integers(1, 4), st.sampled_from((RUNNING, 0, 1, 2, 3)))
    return st.lists(one, min_size=1, max_size=4).map(lambda many: tuple(sorted(many, key=lambda one: one.arrival)))
