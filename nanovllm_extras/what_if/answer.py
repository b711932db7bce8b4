"""Answer a page that asks "what if": a request as a dict, and the answer as one, both of which JSON can represent.

    {"options": {"block_size": 32}}   ->   {"figures": …, "recording": …}   or   {"error": …}

`figures` is the dict of `compare`, which `nanovllm what-if --json` prints, too. `recording` is the text of the run with
the changed options, which the page shows next to the recorded one. A request has values only: it never names code.
"""

import io
import math
import time
from collections.abc import Mapping
from typing import Any

from nanovllm_extras.what_if.clock import Machine
from nanovllm_extras.what_if.comparison import compare
from nanovllm_extras.what_if.journal import Journal
from nanovllm_extras.what_if.options import Options, Parts
from nanovllm_extras.what_if.recorded_run import RecordedRun

CHANGEABLE = ("block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching")
MAX_SECONDS = 20.0
"""After so long, a run is stopped."""


class TimedJournal(Journal):
    """A journal of a run that raises ValueError when the time is `deadline_s` (of `time.monotonic`)."""

    deadline_s = float("inf")

    def begin(self, now_s: float) -> None:
        super().begin(now_s)
        if time.monotonic() > self.deadline_s:
            raise ValueError(f"the run was stopped in step {self.steps + 1}: it took too long. Choose larger steps "
                             f"(max_num_batched_tokens, max_num_seqs), or use nanovllm what-if")  # fmt: skip


def answer(
    run: RecordedRun, texts: Mapping[str, str], request: Mapping[str, Any], max_seconds: float = MAX_SECONDS
) -> dict[str, Any]:
    """Return the figures of a recording and of the same requests with other options, and the latter run as a recording.

    texts: of the recording's tokens, by the token's id

    A request that is not valid, or that takes longer than `max_seconds`, gets `{"error": reason}`.
    """
    try:
        return find_answer(run, texts, read_options(request), max_seconds=max_seconds)
    except (ValueError, TypeError) as error:
        return {"error": str(error)}


def find_answer(
    run: RecordedRun,
    texts: Mapping[str, str],
    change: Mapping[str, Any],
    machine: Machine | None = None,
    parts: Parts | None = None,
    max_seconds: float = math.inf,
) -> dict[str, Any]:
    """Return the same as `answer` for the options `change`. Raises ValueError or TypeError as `compare` does."""
    deadline_s = time.monotonic() + max_seconds
    files: list[io.StringIO] = []
    journals: list[TimedJournal] = []

    def make_figures(options: Options, has_times: bool) -> TimedJournal:
        files.append(io.StringIO())
        journals.append(TimedJournal(files[-1], options, run.model, texts, has_times))
        journals[-1].deadline_s = deadline_s
        return journals[-1]

    figures = compare(run, [change], machine, parts, make_figures)
    journals[-1].close()
    return {"figures": figures, "recording": files[-1].getvalue()}


def read_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request. Raises ValueError or TypeError if it has other fields or options."""
    if not isinstance(request, dict) or not isinstance(request.get("options"), dict):
        raise TypeError('a request must be an object with the field "options", an object')
    if unknown := [name for name in request if name != "options"]:
        raise ValueError(f"a request has the field options only, got {unknown[0]!r}")
    if unknown := [name for name in request["options"] if name not in CHANGEABLE]:
        raise ValueError(f"options can be {', '.join(CHANGEABLE)}, got {unknown[0]!r}")
    return dict(request["options"])
