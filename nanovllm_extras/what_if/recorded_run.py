"""Read a recording as a run that can be repeated: its requests and answers, what its steps computed, and their times.

Only runs that the core's scheduler can make are read. `read_run` refuses the others, and names what the core lacks.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm_extras.what_if.options import Options
from nanovllm_extras.what_if.requests import Answer, PlannedRequest

SALTED = 1 << 255
"""A root of requests with a salt has this bit, so it is not the serial number of a block (`cache_salt.py`)."""

UNKNOWN_TO_THE_CORE = {
    "draft": "drafts (speculative decoding)",
    "verify": "drafts (speculative decoding)",
    "load": "a K/V store",
    "tokens": "beams",
    "slot": "recurrent states",
    "move": "recurrent states",
    "snapshot": "recurrent states",
    "drop": "recurrent states",
    "give_back": "blocks behind the window of a model",
    "roll_back": "a step that failed",
    "start": "an engine that was started again",
    "reset": "a prefix cache that was emptied between two steps",
}
"""Event -> what made it."""


@dataclass
class RecordedStep:
    """What a step computed: chunks [sequence, start, number of tokens], decodes first."""

    chunks: list[tuple[int, int, int]]
    samples: list[int]
    num_free: int
    num_stored: int
    scheduled_s: float
    end_s: float | None = None
    seconds: float = 0.0


@dataclass
class RecordedRun:
    """The requests in the order of arrival, and what happened, in order.

    actions     ("add", index in `requests`), ("abort", index in `aborts`), ("schedule", index in `steps`) and
                ("update", index in `steps`)
    aborts      (index in `requests`, sample)
    has_times   False for a simulated run whose clock was wrong
    """

    model: str
    options: Options
    has_times: bool
    requests: list[PlannedRequest] = field(default_factory=list)
    steps: list[RecordedStep] = field(default_factory=list)
    actions: list[tuple[str, int]] = field(default_factory=list)
    aborts: list[tuple[int, int]] = field(default_factory=list)


def read_run(lines: list[dict[str, Any]]) -> RecordedRun:
    """Return the run of a recording. Raises ValueError if the core's scheduler cannot make it.

    lines: the header and the lines after it, which `check.py` has checked
    """
    header = lines[0]
    check_header(header)
    config = header["config"]
    reader = RunReader(
        RecordedRun(
            str(config["model"]),
            Options(
                block_size=header["block_size"],
                num_blocks=header["num_blocks"],
                max_num_batched_tokens=config["max_num_batched_tokens"],
                max_num_seqs=config["max_num_seqs"],
                max_model_len=config["max_model_len"],
                enable_prefix_caching=config["enable_prefix_caching"],
            ),
            config.get("has_times", True),
        )
    )
    try:
        for line in lines[1:]:
            for event in line["events"]:
                reader.read(event)
            reader.read_times(line)
    except OverflowError:
        raise ValueError("the recording has a token id above 2147483647, which no vocabulary has") from None
    reader.finish()
    return reader.run


def texts_of(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Return the text of each token that a recording has, by the token's id, which is a string in JSON."""
    return {i: text for line in lines[1:] for i, text in line.get("texts", {}).items()}


def check_header(header: Mapping[str, Any]) -> None:
    """Raise ValueError, which names it, if the engine had what the core lacks."""
    config = header["config"]
    reasons = {
        "swap": config.get("num_swap_blocks"),
        "recurrent states": header.get("num_slots"),
        "groups of layers with block tables of their own": header.get("num_groups", 1) > 1,
        "steps that overlap (enable_overlap)": config.get("enable_overlap"),
        "the scheduling policy " + repr(config.get("scheduling_policy")): config.get("scheduling_policy") != "fcfs",
        "long_prefill_token_threshold": config.get("long_prefill_token_threshold"),
        "a window for all layers": config.get("sliding_window"),
        "a block manager or a prefix cache of one's own": config.get("has_own_blocks"),
    }
    for name, is_used in reasons.items():
        if is_used:
            raise ValueError(f"the core's scheduler cannot make this run: it has {name}")
    if header["state"] is not None:
        raise ValueError("the recording begins in the middle of a run, so what was cached before is not known; "
                         "give its first file, or record a shorter run")  # fmt: skip
    missing = [name for name in ("model", "max_num_batched_tokens", "max_num_seqs", "max_model_len",
                                 "enable_prefix_caching") if name not in config]  # fmt: skip
    if missing:
        raise ValueError(f"the recording does not name the engine's {missing[0]}")


class RunReader:
    """Reads the events one by one."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self._answers: dict[int, Answer] = {}  # by the numbers of the sequences
        self._place: dict[int, tuple[int, int]] = {}  # of a sequence: index of its request, sample
        self._newest: dict[str, int] = {}  # id of a request -> its index; ids may be used again
        self._num_computed: dict[int, int] = {}
        self._final: dict[int, int] = {}  # tokens of an answer that has ended: its last `update` may follow
        self._decodes: list[int] = []
        self._gap: list[PlannedRequest] = []  # added since the last step
        self._flying = -1  # index of the step that runs
        self._live: set[int] = set()  # sequences that have not ended
        self._goes_on = False  # whether some were left when the newest step ended

    def read(self, event: list) -> None:
        code = event[0]
        if code in UNKNOWN_TO_THE_CORE:
            raise ValueError(f"the core's scheduler cannot make this run: it has {UNKNOWN_TO_THE_CORE[code]}")
        reader = getattr(self, f"_read_{code}", None)
        if reader is not None:
            reader(*event[1:])

    def _read_add(self, number: int, time: int, about: Mapping[str, Any]) -> None:
        if about["sample"]:  # aborted before it has begun: its `finish` follows
            if about["request"] not in self._newest:
                raise ValueError(f"the recording has a sample of request {about['request']!r} without the request")
            self._begin(number, self._newest[about["request"]], about["sample"])
            return
        prompt = about["tokens"][: about["num_prompt_tokens"]]
        params = about.get("params", {})
        request = PlannedRequest(
            about["request"],
            array("i", prompt),
            [Answer(0, array("i"), finish_reason=None) for _ in range(params.get("n", 1))],
            arrival_s=time / 1e6,
            max_tokens=params.get("max_tokens", about["max_num_tokens"] - len(prompt)),
            extra_args=params.get("extra_args"),
        )
        if "cache_salt" in about:
            request.root_serial = SALTED | int(about["cache_salt"].rpartition(" ")[2])
        index = self._newest[about["request"]] = len(self.run.requests)
        self.run.requests.append(request)
        self.run.actions.append(("add", index))
        self._begin(number, index, 0)
        self._gap.append(request)

    def _read_fork(self, parent: int, number: int, sample: int, num_known: int, num_computed: int, time: int) -> None:
        self._begin(number, self._place[parent][0], sample)
        self._num_computed[number] = num_computed

    def _begin(self, number: int, index: int, sample: int) -> None:
        """Let a number mean a sample of a request."""
        answers = self.run.requests[index].answers
        while len(answers) <= sample:  # recordings of earlier versions do not have `n`
            answers.append(Answer(0, array("i"), finish_reason=None))
        self._place[number] = index, sample
        self._answers[number] = answers[sample]
        self._num_computed[number] = 0
        self._live.add(number)

    def _read_admit(self, number: int, code: str, num_computed: int) -> None:
        self._num_computed[number] = num_computed

    def _read_preempt(self, number: int, needy: int, num_computed: int, host_block_ids: list[int]) -> None:
        if host_block_ids:
            raise ValueError("the core's scheduler cannot make this run: it has swap")

    def _read_miss(self, number: int, misses: list[Mapping[str, Any]]) -> None:
        if self.run.options.enable_prefix_caching and any(miss["cause"] == "cache_off" for miss in misses):
            raise ValueError("the core's scheduler cannot make this run: it has requests that need the hidden states "
                             "of all prompt tokens (embeddings, prompt_logprobs)")  # fmt: skip

    def _read_schedule(self, number: int, time: int, *about: Any) -> None:
        decodes, chunks, samples, _, num_free, num_stored = about
        self._decodes = self._decodes if isinstance(decodes, int) else decodes
        described = [(i, self._num_computed[i], 1) for i in self._decodes]
        described += [(i, start, num_new_tokens) for i, start, num_new_tokens, _ in chunks]
        for i, start, num_new_tokens in described:
            self._num_computed[i] = start + num_new_tokens
        sampled = [*self._decodes] if isinstance(samples, int) else samples
        for request in self._gap:
            request.visible_s = self._gap[-1].arrival_s
        self._gap = []
        if self._goes_on:
            before = self.run.steps[-1]
            before.seconds = time / 1e6 - before.scheduled_s
        self._flying = len(self.run.steps)
        self.run.steps.append(RecordedStep(described, sampled, num_free, num_stored, time / 1e6))
        self.run.actions.append(("schedule", self._flying))

    def _read_update(self, number: int, time: int, token_ids: list[int]) -> None:
        step = self.run.steps[self._flying]
        step.end_s = time / 1e6
        step.seconds = step.end_s - step.scheduled_s
        for i, token_id in zip(step.samples, token_ids, strict=True):
            answer = self._answers[i]
            if answer.token_ids is not None and len(answer.token_ids) != self._final.get(i):
                answer.token_ids.append(token_id)
                answer.num_tokens += 1
        self.run.actions.append(("update", self._flying))

    def _read_finish(self, number: int, reason: str, stop: int | str | None, num_tokens: int, time: int) -> None:
        answer = self._answers[number]
        self._live.discard(number)
        answer.finish_reason, answer.stop_reason = reason, stop
        self._final[number] = num_tokens - len(self.run.requests[self._place[number][0]].prompt)
        if reason == "abort":
            answer.aborted_s = time / 1e6
            self.run.actions.append(("abort", len(self.run.aborts)))
            self.run.aborts.append(self._place[number])

    def read_times(self, line: Mapping[str, Any]) -> None:
        """Take the time of a step: until the next one if sequences are left, otherwise the sum of its parts.

        The time to the next step includes what the program does between two steps, which users wait for, too.
        """
        if "times" in line and self.run.steps:
            self.run.steps[-1].seconds = sum(line["times"].values()) / 1e6
            self._goes_on = bool(self._live)

    def finish(self) -> None:
        """Complete the requests that were added after the last step."""
        for request in self._gap:
            request.visible_s = self._gap[-1].arrival_s
