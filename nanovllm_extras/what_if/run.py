"""Two ways to drive the engine: `replay` repeats a recording step by step, and `simulate` follows a clock.

`replay` adds, aborts and steps in the recorded order. Its steps must be those of the recording; they are compared one
by one. `simulate` adds a request when the clock has reached its arrival, and a step lasts as long as the clock says.
"""

import heapq
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from nanovllm.scheduler import Step
from nanovllm_extras.records.full_observer import count_stored_tokens
from nanovllm_extras.what_if.clock import Clock, StepCost, context_of
from nanovllm_extras.what_if.engine import SimulatedEngine
from nanovllm_extras.what_if.figures import Figures
from nanovllm_extras.what_if.known_sequence import KnownSequence
from nanovllm_extras.what_if.options import Options, Parts
from nanovllm_extras.what_if.recorded_run import RecordedRun, RecordedStep
from nanovllm_extras.what_if.requests import PlannedRequest


@dataclass
class Replayed:
    """The figures of a repeated run, and what each of its steps cost."""

    figures: Figures
    costs: list[StepCost]


def replay(run: RecordedRun, clock: Clock | None = None, figures: Figures | None = None) -> Replayed:
    """Repeat a recording with its own options. Tokens come when they came, or when `clock` says.

    Raises ValueError, which names the first step, if the core's scheduler decides differently.
    """
    figures = figures or Figures()
    engine = SimulatedEngine(run.options, Parts(), figures, is_replay=True)
    costs: list[StepCost] = []
    seqs: dict[int, list[KnownSequence]] = {}
    first = min([one.arrival_s for one in run.requests], default=0.0)
    now, step = first, Step()
    for code, i in run.actions:
        if code == "add":
            now = max(now, run.requests[i].visible_s)
            figures.begin(now)
            seqs[i] = engine.add(run.requests[i])
            if not seqs[i]:
                raise ValueError(f"request {run.requests[i].request_id!r} cannot have been served by this engine")
        elif code == "abort":
            figures.begin(now)
            index, sample = run.aborts[i]
            engine.abort(seqs[index][sample], now)
        elif code == "schedule":
            figures.begin(now if clock else run.steps[i].scheduled_s)
            step = engine.schedule()
            check_step(i, step, run.steps[i], engine, figures)
            cost = StepCost(step.num_scheduled_tokens, context_of(step), run.steps[i].seconds)
            costs.append(cost)
            if clock is not None:
                now += clock.seconds(cost.num_tokens, cost.num_context_tokens)
        else:
            end_s = run.steps[i].end_s
            assert end_s is not None, "a step that is updated has an end"
            now = now if clock else end_s
            figures.begin(now)
            engine.update(step, now)
            figures.time_s = now - first
            seconds = clock.seconds(costs[-1].num_tokens, costs[-1].num_context_tokens) if clock else costs[-1].seconds
            figures.end_step(seconds)
    return Replayed(figures, costs)


def check_step(index: int, step: Step, recorded: RecordedStep, engine: SimulatedEngine, figures: Figures) -> None:
    """Raise ValueError unless a step is the recorded one."""
    blocks = engine.scheduler.block_manager
    here = (
        [(figures.number(seq), start, num_new_tokens) for seq, start, num_new_tokens in step.chunks],
        [figures.number(seq) for seq in step.samples],
        blocks.num_free_blocks,
        count_stored_tokens(engine.scheduler.running, blocks),
    )
    there = (recorded.chunks, recorded.samples, recorded.num_free, recorded.num_stored)
    names = ("chunks (sequence, start, tokens)", "sampled sequences", "free blocks", "stored tokens")
    for name, found, expected in zip(names, here, there, strict=True):
        if found != expected:
            raise ValueError(
                f"the core's scheduler does not make this run: in step {index + 1}, its {name} are {found}, and the "
                f"recording has {expected}. The engine may have had a scheduler of its own, or another version"
            )


def simulate(
    requests: Iterable[PlannedRequest],
    options: Options,
    clock: Clock,
    parts: Parts | None = None,
    figures: Figures | None = None,
    is_stream: bool = False,
) -> Figures:
    """Serve requests, which are in the order of `visible_s`, and return the figures.

    is_stream: do not read requests that the scheduler does not look at yet. The core's scheduler admits at most
    `max_num_seqs` in a step, so it looks at the first ones of its queue only, and the steps are the same. The memory
    does then not grow with the number of requests, except for two numbers for each: its TTFT and its TPOT. A scheduler
    of one's own gets all requests that have arrived.

    Raises ValueError if the scheduler computes nothing although sequences wait.
    """
    figures, parts = figures or Figures(), parts or Parts()
    engine = SimulatedEngine(options, parts, figures)
    waiting = engine.scheduler.waiting
    max_waiting = options.max_num_seqs + 1 if is_stream and parts == Parts() else sys.maxsize
    aborts: list[tuple[float, int, KnownSequence]] = []  # a heap
    order = count()
    arrivals = iter(requests)
    pending = next(arrivals, None)
    first = now = pending.arrival_s if pending is not None else 0.0
    while True:
        while pending is not None and pending.visible_s <= now and len(waiting) < max_waiting:
            figures.begin(now)
            first = min(first, pending.arrival_s)
            for seq in engine.add(pending):
                if seq.answer.aborted_s is not None:
                    heapq.heappush(aborts, (seq.answer.aborted_s, next(order), seq))
            pending = next(arrivals, None)
        while aborts and (aborts[0][0] <= now or aborts[0][2].finish_reason is not None):
            engine.abort(heapq.heappop(aborts)[2], now)
        step = None
        if engine.has_unfinished:
            figures.begin(now)
            step = engine.schedule()
        if step is not None and step.chunks:
            seconds = clock.seconds(step.num_scheduled_tokens, context_of(step))
            now += seconds
            figures.begin(now)
            engine.update(step, now)
            figures.time_s = now - first
            figures.end_step(seconds)
            continue
        times = [pending.visible_s] if pending is not None else []
        times += [time for time, _, _ in aborts[:1]]
        if times:
            now = max(now, min(times))
        elif engine.has_unfinished:
            name = type(engine.scheduler).__name__
            raise ValueError(f"{name}.schedule computes nothing, although {engine.describe_queues()}")
        else:
            return figures
