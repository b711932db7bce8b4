"""The figures as text: two runs in columns, or many runs in a table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

NO_VALUE = "-"
MAX_COLUMNS = 4  # of runs


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def milliseconds(value: float) -> str:
    return f"{1e3 * value:.1f} ms"


def whole(value: float) -> str:
    return f"{value:,}"


LINES: dict[str, tuple[str, Callable[[float], str]]] = {
    "steps": ("steps", whole),
    "tokens_per_step": ("tokens per step", lambda value: f"{value:.1f}"),
    "waste": ("waste of the pool", percent),
    "hit_rate": ("prefix cache hits", percent),
    "preemptions": ("preemptions", whole),
    "peak_blocks": ("peak blocks", whole),
    "ttft_p50_s": ("TTFT p50", milliseconds),
    "ttft_p99_s": ("TTFT p99", milliseconds),
    "tpot_p50_s": ("TPOT p50", milliseconds),
    "tpot_p99_s": ("TPOT p99", milliseconds),
    "time_s": ("time", lambda value: f"{value:.3f} s"),
}
"""Figure -> its line in the report, and how it is written."""
LINES_IF_ANY = {
    "refused_requests": "requests refused",
    "cut_answers": "answers cut by the pool",
    "unknown_answers": "answers whose end is unknown",
}


def write_report(found: Mapping[str, Any]) -> str:
    """Return the text of a comparison (`comparison.py`)."""
    runs = found["runs"]
    columns = [] if found["recorded"] is None else [("recorded", found["recorded"])]
    columns += [(name_of(run, found["parts"]), run["figures"]) for run in runs]
    rows = [[title, *[shown(figures, name) for _, figures in columns]] for name, (title, _) in LINES.items()]
    rows += [
        [title, *[whole(figures[name]) for _, figures in columns]]
        for name, title in LINES_IF_ANY.items()
        if any(figures[name] for _, figures in columns)
    ]
    table = [["", *[name for name, _ in columns]], *rows]
    if len(columns) > MAX_COLUMNS:  # runs in lines
        table = [list(line) for line in zip(*table, strict=True)]
    lines = [describe_options(found["options"]), *describe_clock(found["clock"]), "", *align(table)]
    if any(run["kind"] == "replay" for run in runs):
        lines += ["", "The replay has the steps of the recording, one by one."]
    if any(run["kind"] == "own options" for run in runs):
        lines += ["", "Compare with own options: the recording's options, simulated by the same clock."]
    if any(figures["unknown_answers"] for _, figures in columns):
        lines += ["", "Of answers that an abort, the pool or the end of the recording has cut, the rest is unknown: "
                  "each run ends them there."]  # fmt: skip
    return "\n".join(lines)


def name_of(run: Mapping[str, Any], parts: Mapping[str, str]) -> str:
    """Return the options that a run changes: `block_size 32`. The number of blocks is named if it follows from that."""
    if run["kind"] != "simulated":
        return str(run["kind"])
    changes = dict(run["changes"])
    if "block_size" in changes:
        changes["num_blocks"] = run["options"]["num_blocks"]
    words = [f"{name} {describe_value(value)}" for name, value in changes.items()]
    return ", ".join([*words, *parts.values()]) or "simulated"


def describe_value(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def shown(figures: Mapping[str, Any], name: str) -> str:
    return NO_VALUE if figures[name] is None else LINES[name][1](figures[name])


def describe_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {describe_value(value)}" for name, value in options.items())


def describe_clock(clock: Mapping[str, Any] | None) -> list[str]:
    """Return lines about where the times come from, and how wrong they are."""
    if clock is None:
        return ["The recording has too few steps for a clock, so there are no times."]
    if clock["kind"] == "machine":
        return [f"A machine given by hand: {clock['bandwidth']:g} bytes/s, {clock['flops']:g} FLOP/s, "
                f"{clock['weight_bytes']:g} bytes of weights"]  # fmt: skip
    lines = [
        f"A step takes {1e6 * clock['per_step_s']:.1f} µs + {1e6 * clock['per_token_s']:.2f} µs per token + "
        f"{1e6 * clock['per_context_token_s']:.4f} µs per token of context, fitted to {clock['num_steps']} steps.",
        f"Error of a step: mean {percent(clock['mean_error'])}, median {percent(clock['median_error'])}. "
        f"Error of the time of a quarter of the run: at most {percent(clock['total_error'])}.",
    ]
    if "own_time_s" in clock:
        lines.append(
            f"The recorded run takes {clock['own_time_s']:.3f} s by this clock, and took "
            f"{clock['recorded_time_s']:.3f} s."
        )
    if not clock["is_good"]:
        lines.append(
            "The mean error is above 20 %, so the clock only orders arrivals and steps, and no times are shown."
        )
    return lines


def align(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(f"{cell:<{widths[0]}}" if not i else f"{cell:>{widths[i]}}" for i, cell in enumerate(line)).rstrip()
        for line in table
    ]
