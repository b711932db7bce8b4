"""What the worker of the page calls: `reply` takes a request as JSON and returns the answer as JSON.

    {"recording": text, "options": {"block_size": 32}}                  figures and recording, as answer.py has them
    {"recording": text, "options": {}, "schedule": "def schedule(…"}    the same, by an edited scheduler
    {"requests": [{"prompt": 40, "answer": 8, …}]}                      the recording of these requests

What goes wrong is an answer, too: `{"error": reason, "line": …}`, with the line of the edited text if there is one.
"""

import io
import json
from collections.abc import Mapping
from typing import Any

from nanovllm_extras.what_if import recorded_run
from nanovllm_extras.what_if.answer import find_answer, read_options
from nanovllm_extras.what_if.browser.edited_schedule import EditError, describe_error, line_of, make_scheduler
from nanovllm_extras.what_if.browser.requests_form import MACHINE, MODEL, options_for, plan_requests, texts_of
from nanovllm_extras.what_if.journal import Journal
from nanovllm_extras.what_if.options import Parts
from nanovllm_extras.what_if.run import simulate

MAX_SECONDS = 60.0


def reply(text: str) -> str:
    """Return the answer to a request."""
    try:
        request = json.loads(text)
        found = record_requests(request["requests"]) if "requests" in request else ask(**request)
    except BaseException as error:  # an edited scheduler may call exit()
        found = describe(error)
    return json.dumps(found)


def record_requests(rows: object) -> dict[str, Any]:
    """Return the recording of a form's requests, as the core's scheduler serves them with small options."""
    requests = plan_requests(rows)
    options, file = options_for(requests), io.StringIO()
    journal = Journal(file, options, MODEL, texts_of(requests))
    simulate(requests, options, MACHINE, figures=journal)
    journal.close()
    return {"recording": file.getvalue()}


def ask(recording: str, options: Mapping[str, Any], schedule: str | None = None) -> dict[str, Any]:
    """Return the figures of a recording and of the same requests with other options, and the latter run."""
    lines = [json.loads(line) for line in recording.splitlines() if line.strip()]
    run = recorded_run.read_run(lines)
    parts = Parts() if schedule is None else Parts(scheduler_cls=make_scheduler(schedule))
    machine = MACHINE if run.model == MODEL else None
    texts, change = recorded_run.texts_of(lines), read_options({"options": options})
    return find_answer(run, texts, change, machine, parts, MAX_SECONDS)


def describe(error: BaseException) -> dict[str, Any]:
    """Return the answer that says what went wrong: the message of a bad value, or where the edited scheduler failed."""
    line = error.line if isinstance(error, EditError) else line_of(error.__traceback__)
    is_plain = line is None and isinstance(error, ValueError | TypeError)
    return {"error": str(error) if is_plain or isinstance(error, EditError) else describe_error(error), "line": line}
