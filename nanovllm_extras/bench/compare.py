"""Run the command `nanovllm bench compare`: measure an extension against the unchanged engine.

Read `compare_figures.py` first: the figures, and the rule by which a difference is seen. `compare_side.py` starts a
process for each side (`compare_worker.py`), whose engine (`compare_engine.py`) serves the requests (`serve_load.py`).
`compare_workloads.py` and `trace_file.py` create the requests, and `compare_report.py` shows the result.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanovllm_extras.bench.compare_figures import compare_figures, compare_tokens, figures_of
from nanovllm_extras.bench.compare_options import Settings, parse
from nanovllm_extras.bench.compare_report import Report, as_json, as_markdown, as_text
from nanovllm_extras.bench.compare_side import Ready, Side, SideError, SideRun, SideSettings
from nanovllm_extras.bench.compare_workloads import (
    VOCAB_SIZE,
    TimedWork,
    load_of_trace,
    make_load,
    rounds_of,
    with_history,
)
from nanovllm_extras.machine.printing import say

LONG_RUN_S = 60.0
Extra = Sequence[Mapping[str, object]] | None
"""The `extra_args` of each request, or None."""


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0, 1 if an engine has failed, 2 for a bad option, or 130 after Ctrl-C."""
    settings = parse(argv)
    try:
        report = compare(settings)
    except (SideError, ValueError) as error:
        say(f"nanovllm bench compare: {error}", sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    say(as_markdown(report) if settings.is_markdown else as_text(report))
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(as_json(report), indent=2) + "\n", encoding="utf-8")
    return 0


def compare(settings: Settings) -> Report:
    """Start both engines, let them serve the requests in turns, and return the comparison.

    Raises SideError if an engine fails, and ValueError if a request is too long for an engine.
    """
    with ExitStack() as stack:
        sides = [
            stack.enter_context(Side(name, side_settings(settings, extension)))
            for name, extension in (("base", None), ("extension", settings.extension))
        ]
        ready = [side.wait_until_ready() for side in sides]
        load = make_requests(settings, min(VOCAB_SIZE, *(one.vocab_size for one in ready)))
        check_lengths(load, min(one.max_prompt_and_output for one in ready))
        warn_of_length(load, settings.repeats)
        extra_args = draw_extra_args(settings.extra_args, len(load), settings.seed)
        runs = run_turns(sides[0], sides[1], load, extra_args, settings.repeats)
    return make_report(settings, ready, load, *runs)


def side_settings(settings: Settings, extension: str | None) -> SideSettings:
    return SideSettings(
        settings.package, settings.model, settings.options, extension, settings.temperature, settings.seed
    )


def make_requests(settings: Settings, vocab_size: int) -> list[TimedWork]:
    """Return the requests of the workload, or of the trace."""
    if settings.trace is not None:
        return load_of_trace(settings.trace, settings.speed, settings.scale_lengths, settings.seed, vocab_size)
    return make_load(settings.workload, settings.num_prompts, settings.request_rate, settings.seed, vocab_size)


def check_lengths(load: Sequence[TimedWork], limit: int) -> None:
    """Raise ValueError if a request is too long for an engine with room for `limit` tokens of one request."""
    lens: list[int] = []
    for i, work in enumerate(load):
        history = 0 if work.after is None else lens[work.after]
        lens.append(history + len(work.prompt_token_ids) + work.output_len)
        if lens[i] > limit:
            raise ValueError(
                f"request {i} of the workload has {lens[i]:,} tokens, prompt and output together, but the engine has "
                f"room for {limit:,}: choose another workload or model, raise --max-model-len or --num-kv-blocks, or "
                f"for a trace lower --scale-lengths"
            )


def warn_of_length(load: Sequence[TimedWork], repeats: int) -> None:
    """Say how long the runs take at least if requests arrive for more than a minute."""
    seconds = max(work.arrival for work in load)
    if seconds > LONG_RUN_S:
        num_runs = 2 * (repeats + 1)
        say(
            f"the last request arrives after {seconds:,.0f} s, so {num_runs} runs take at least "
            f"{num_runs * seconds / 60:,.0f} minutes; --num-prompts, and --speed for a trace, shorten them",
            sys.stderr,
        )


def draw_extra_args(values: Mapping[str, list[object]], num_requests: int, seed: int) -> Extra:
    """Return for each request one value of each list; None if there are no lists."""
    if not values:
        return None
    rng = np.random.default_rng([seed, 2])
    return [{name: some[rng.integers(len(some))] for name, some in values.items()} for _ in range(num_requests)]


def run_turns(
    base: Side, extension: Side, load: Sequence[TimedWork], extra_args: Extra, repeats: int
) -> tuple[list[SideRun], list[SideRun]]:
    """Let both sides serve the load in turns, and return the runs of each, without the first, which is a warm-up.

    The later turns of conversations repeat the answers of the base, which it computes before.
    """
    load = complete_prompts(base, load)
    runs: tuple[list[SideRun], list[SideRun]] = ([], [])
    with tqdm(total=2 * (repeats + 1), unit="run", disable=sys.stderr is None or None) as bar:
        for _ in range(repeats + 1):
            runs[0].append(base.serve(load))
            bar.update()
            runs[1].append(extension.serve(load, extra_args))
            bar.update()
    return runs[0][1:], runs[1][1:]


def complete_prompts(base: Side, load: Sequence[TimedWork]) -> list[TimedWork]:
    """Return the load with prompts that repeat their conversations, with answers of the base."""
    answers: dict[int, list[int]] = {}
    for indices in rounds_of(load)[:-1]:
        works = with_history(load, answers)
        served = base.serve([replace(works[i], arrival=0.0, after=None) for i in indices]).served
        answers.update(zip(indices, served.token_ids, strict=True))
    return with_history(load, answers)


def make_report(
    settings: Settings,
    ready: Sequence[Ready],
    load: Sequence[TimedWork],
    base: Sequence[SideRun],
    extension: Sequence[SideRun],
) -> Report:
    """Return the comparison of the counted runs."""
    figures = [[figures_of(run.served, settings.goodput) for run in runs] for runs in (base, extension)]
    name = Path(settings.model).name if Path(settings.model).is_dir() else settings.model
    given = {
        "--request-rate": settings.request_rate if settings.request_rate != float("inf") else None,
        "--speed": settings.speed if settings.speed != 1 else None,
        "--scale-lengths": settings.scale_lengths if settings.scale_lengths != 1 else None,
        "--temperature": settings.temperature or None,
        **{f"--{option.replace('_', '-')}": value for option, value in settings.options.items()},
    }
    return Report(
        package=settings.package,
        model=name,
        extension=settings.extension or "no extension (a control)",
        options={option: value for option, value in given.items() if value is not None},
        workload=settings.workload,
        num_requests=len(load),
        num_turns=len(base),
        computed_by=(ready[0].description, ready[1].description),
        figures=compare_figures(*figures),
        peak_memory_bytes=(base[-1].peak_memory_bytes, extension[-1].peak_memory_bytes),
        tokens=compare_tokens([run.served.token_ids for run in base], [run.served.token_ids for run in extension]),
    )
