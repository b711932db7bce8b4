"""Answer the question: the figures of a recording, and those of the same requests with other options.

The result is a dict that JSON can represent. The command prints it, and a page can show the same one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from nanovllm_extras.what_if.clock import MIN_STEPS, Clock, FittedClock, Machine, fit_clock
from nanovllm_extras.what_if.figures import Figures
from nanovllm_extras.what_if.options import Options, Parts
from nanovllm_extras.what_if.recorded_run import RecordedRun
from nanovllm_extras.what_if.requests import PlannedRequest
from nanovllm_extras.what_if.run import Replayed, replay, simulate


def compare(
    run: RecordedRun,
    changes: Sequence[Mapping[str, Any]],
    machine: Machine | None = None,
    parts: Parts | None = None,
    make_figures: Callable[[Options, bool], Figures] = lambda options, has_times: Figures(),
) -> dict[str, Any]:
    """Return the figures of a recorded run, and of one run for each of `changes`, which are options by name.

    If nothing changes, the recorded steps are repeated. Otherwise all runs follow a clock: that of `machine`, or one
    that is fitted to the recording. The first one then has the recording's own options, so that the runs differ in
    their options only, and not in the clock.

    make_figures: called once for each run of the result, with its options and whether its times may be shown. It can
        return a `Journal`, for example

    Raises ValueError if the core's scheduler does not make the recorded steps, if an option is invalid, or if a clock
    is needed and cannot be fitted.
    """
    replayed, parts = replay(run), parts or Parts()
    sets = [(dict(change), run.options.changed(change)) for change in changes]
    is_repeated = can_repeat(run, [options for _, options in sets], machine, parts)
    clock: Clock | None = machine
    if machine is None and not (is_repeated and len(replayed.costs) < MIN_STEPS):
        clock = fit_to(run, replayed)
    about: dict[str, Any] | None = None
    if clock is not None:
        about = dict(clock.describe())
        if machine is None:
            about["own_time_s"] = replay(run, clock).figures.time_s
            about["recorded_time_s"] = replayed.figures.time_s
    has_times = clock is not None and clock.is_good
    rows = []
    if is_repeated:
        figures = replay(run, clock, make_figures(run.options, has_times)).figures
        rows = [describe_row({}, run.options, figures, clock, "replay")]
    elif clock is not None:
        own = simulate(run.requests, run.options, clock, figures=make_figures(run.options, has_times))
        rows = [describe_row({}, run.options, own, clock, "own options")]
        for change, options in sets:
            figures = simulate(run.requests, options, clock, parts, make_figures(options, has_times))
            rows.append(describe_row(change, options, figures, clock, "simulated"))
    return {
        "model": run.model,
        "options": asdict(run.options),
        "parts": describe_parts(parts),
        "clock": about,
        "recorded": replayed.figures.describe(run.has_times),
        "runs": rows,
    }


def fit_to(run: RecordedRun, replayed: Replayed) -> FittedClock:
    """Return a clock that is fitted to a recording. Raises ValueError if it has no times, or too few steps."""
    if not run.has_times:
        raise ValueError("the recording is a simulated run without times, because its clock was wrong; give the "
                         "recording that it was made from, or a machine by hand")  # fmt: skip
    return fit_clock(replayed.costs)


def can_repeat(run: RecordedRun, options: Sequence[Options], machine: Machine | None, parts: Parts) -> bool:
    """Return whether nothing changes, so that the recorded steps can be repeated."""
    return machine is None and parts == Parts() and all(one == run.options for one in options)


def compare_on_trace(
    make_requests: Callable[[], Iterable[PlannedRequest]],
    base: Options,
    changes: Sequence[Mapping[str, Any]],
    clock: Clock,
    parts: Parts | None = None,
) -> dict[str, Any]:
    """Return the figures of one run for each of `changes`; `make_requests` begins the trace again for each of them."""
    parts = parts or Parts()
    sets = [(dict(change), base.changed(change)) for change in changes]
    rows = [
        describe_row(
            change, options, simulate(make_requests(), options, clock, parts, is_stream=True), clock, "simulated"
        )
        for change, options in sets
    ]
    return {
        "options": asdict(base),
        "parts": describe_parts(parts),
        "clock": dict(clock.describe()),
        "recorded": None,
        "runs": rows,
    }


def describe_row(
    change: Mapping[str, Any], options: Options, figures: Figures, clock: Clock | None, kind: str
) -> dict[str, Any]:
    """Return what one run changed, all of its options, and its figures; without times if the clock is not good.

    kind: `replay` (the recording's steps), `own options` (the recording's, by the clock) or `simulated`
    """
    if not isfinite(figures.time_s):
        raise ValueError(f"the run takes {figures.time_s} s by this clock; check the numbers of the machine")
    return {
        "changes": dict(change),
        "options": asdict(options),
        "kind": kind,
        "figures": figures.describe(clock is not None and clock.is_good),
    }


def describe_parts(parts: Parts) -> dict[str, str]:
    """Return the names of the classes that are not the core's."""
    own, core = vars(parts), vars(Parts())
    return {name: kind.__qualname__ for name, kind in own.items() if kind is not core[name]}
