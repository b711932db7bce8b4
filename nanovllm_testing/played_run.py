"""Play a case (`traffic.py`) with parts of one's own, without a model, and explain what does not hold."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nanovllm
from nanovllm.block_manager import BlockManager
from nanovllm.prefix_cache import PrefixCache
from nanovllm.scheduler import Scheduler, Step
from nanovllm.sequence import CachedBlock, Sequence
from nanovllm_testing.interrupt import TimeIsOver, interrupt_after
from nanovllm_testing.progress import Progress
from nanovllm_testing.run import RecordingStats, Run
from nanovllm_testing.timetable import Row, draw_state, draw_timetable, label, make_row
from nanovllm_testing.traffic import Request, Traffic, letter
from nanovllm_testing.violation import Hang, Violation

NUM_HASHES = 3  # of a prefix cache with equal hashes
TIME_LIMIT = 1.0  # seconds of the processor for one run, which takes milliseconds


@dataclass(frozen=True)
class Parts:
    """The classes of a run."""

    scheduler_cls: type[Scheduler] = Scheduler
    block_manager_cls: type[BlockManager] = BlockManager
    prefix_cache_cls: type[PrefixCache] = PrefixCache
    patience_s: float = 0.0
    """Of `Progress`."""


@dataclass
class Played:
    """What happened in a run: its steps and, if something did not hold, the error."""

    rows: list[Row] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    error: Exception | None = None


class RowRecorder(RecordingStats):
    """Keeps each step as a row of a timetable."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows
        self.waiting: list[Sequence] = []  # the scheduler's queue, once there is one

    def on_schedule(self, step: Step, running: list[Sequence], blocks: BlockManager) -> None:
        super().on_schedule(step, running, blocks)
        self.rows.append(make_row(step, self.waiting, blocks))


def with_equal_hashes(prefix_cache_cls: type[PrefixCache]) -> type[PrefixCache]:
    """Return a subclass whose blocks have one of a few hashes. It matters only to a cache that uses `key`."""

    return type(prefix_cache_cls.__name__, (EqualHashes, prefix_cache_cls), {})


class EqualHashes(PrefixCache):
    """Has few hashes, which must not matter: only `tokens` and `parent_serial` prove that a block is the right one."""

    def key(self, seq: Sequence, before: list[CachedBlock]) -> tuple[int, int, bytes]:
        block_hash, parent_serial, tokens = super().key(seq, before)
        return block_hash % NUM_HASHES, parent_serial, tokens


class PlayedRun(Run):
    """The run of a case, with its parts. Sequences are named A, B, …"""

    def __init__(self, parts: Parts, traffic: Traffic, rows: list[Row]) -> None:
        self.parts = parts
        self.traffic = traffic
        self.rows = rows
        self.number = 0  # of the newest request
        self.samples: dict[int, list[Sequence]] = {}  # of each request that has arrived
        super().__init__(
            traffic.num_blocks,
            traffic.block_size,
            traffic.max_num_seqs,
            traffic.budget,
            eos_token_ids=traffic.eos_token_ids,
            enable_prefix_caching=traffic.enable_prefix_caching,
        )

    def make_progress(self) -> Progress:
        return Progress(self.parts.patience_s)

    def make_stats(self) -> RowRecorder:
        return RowRecorder(self.rows)

    def make_manager(self, *arguments: Any) -> BlockManager:
        prefix_cache_cls = self.parts.prefix_cache_cls
        if self.traffic.has_equal_hashes:
            prefix_cache_cls = with_equal_hashes(prefix_cache_cls)
        make: Any = self.parts.block_manager_cls
        manager: BlockManager = make(*arguments, prefix_cache_cls)
        return manager

    def make_scheduler(self, *arguments: Any) -> Scheduler:
        return self.parts.scheduler_cls(*arguments)

    def make_seq(self, name: str, prompt: list[int], params: Any, sample_index: int) -> Any:
        return super().make_seq(letter(self.number), prompt, params, sample_index)

    def launch(self) -> Any:
        """Schedule and compute the next step, and keep a row of it, also if the step fails."""
        self.stats.waiting = self.scheduler.waiting
        num_rows, note = len(self.rows), "fails"
        try:
            flight = super().launch()
            note = "" if flight else "computes nothing"
            return flight
        finally:
            if len(self.rows) == num_rows:  # `schedule` has not called the observer
                waiting = [label(seq) for seq in self.scheduler.waiting]
                self.rows.append(Row({}, self.manager.num_free_blocks, waiting, [note] * bool(note)))

    def play(self) -> None:
        """Let the requests arrive, step until all have finished, and check everything."""
        for i in range(max(max(one.arrival, one.abort or 0) for one in self.traffic.requests) + 1):
            for number, request in enumerate(self.traffic.requests):
                if request.arrival == i:
                    self.submit(number, request)
                if request.abort == i:
                    self.abort(self.samples.get(number, []))
            if self.has_unfinished:
                self.step()
        self.finish()

    def submit(self, number: int, request: Request) -> None:
        self.number = number
        params = {"max_tokens": request.max_tokens, "extra_args": request.extra_args}
        self.add(list(request.prompt), request.n, **params)
        self.samples[number] = self.requests[-1]
        self.check_state()


def play(parts: Parts, traffic: Traffic, seconds: float = TIME_LIMIT) -> Played:
    """Play a case, and return its steps and the error, if something does not hold or the parts raise."""
    played = Played()
    run = None
    try:
        with time_limit(seconds):
            run = PlayedRun(parts, traffic, played.rows)
            run.play()
    except Exception as error:  # the code under test raises any kind
        played.error = error
        played.state = [] if run is None else draw_state(run.seqs)
    return played


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise a Hang in code that uses more processor time, for example a loop without an end (`interrupt_after`)."""
    try:
        with interrupt_after(seconds):
            yield
    except TimeIsOver as error:
        place = describe_place(error.stack)
        raise Hang(f"a run of few requests has not ended after {seconds:g} s; it is in {place}") from None


def describe_error(error: Exception) -> str:
    """Return what does not hold, or for another exception its text and the line that raised it."""
    if isinstance(error, Violation):
        return str(error)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{what}, in {describe_place(traceback.extract_tb(error.__traceback__))}"


def describe_place(frames: traceback.StackSummary) -> str:
    """Return the innermost line of code that belongs to neither this package nor the core, or the innermost of all."""
    packages = {Path(__file__).parent, Path(nanovllm.__file__).parent}
    own = [frame for frame in frames if packages.isdisjoint(Path(frame.filename).parents)] or frames
    return f"line {own[-1].lineno} of {own[-1].filename}, `{own[-1].line}`"


def explain(traffic: Traffic, played: Played) -> list[str]:
    """Return lines: the requests, the steps as a timetable, and what is wrong."""
    assert played.error is not None
    rows = draw_timetable(played.rows) if played.rows else ["(no step)"]
    state = ["", *played.state] if played.state else []
    return [*traffic.describe(), "", *rows, *state, "", f"wrong: {describe_error(played.error)}"]
