"""Export a recording in Chrome's trace format, which https://ui.perfetto.dev and chrome://tracing open.

One process has the steps, the parts of each step, and the counters. The other process has a thread for each sequence,
with the spans queued, prefill, decode, idle, preempted and swapped. Times are microseconds. "Trace Event Format"
describes the format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from typing import Any, cast

from nanovllm_extras.trace.recording import Header
from nanovllm_extras.trace.replay import Replay

ENGINE, REQUESTS = 1, 2


class Exporter:
    """Reads a recording once and collects the trace events."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        header = cast(Header, lines[0])
        self.replay = Replay(header)
        self.events: list[dict[str, object]] = []
        self._threads: dict[str, int] = {}  # name of a request or of one of its samples -> its thread
        self._since: dict[int, tuple[str, int]] = {}  # sequence -> kind of its open span, and start of the span
        self._ends = header["num_steps_before"]
        self._name(ENGINE, 0, "process_name", "engine")
        self._name(REQUESTS, 0, "process_name", "requests")
        for line in lines[1:]:
            for event in line["events"]:
                self._read(event)
            if "times" in line:
                self._end_step(line["t"], line["times"])
        for number in list(self._since):
            self._turn(number, None, lines[-1]["t"])

    def _name(self, process: int, thread: int, kind: str, name: str) -> None:
        self.events.append({"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}})

    def _span(self, process: int, thread: int, name: str, start: int, stop: int, **args: object) -> None:
        duration = max(0, stop - start)
        self.events.append({
            "ph": "X", "pid": process, "tid": thread, "name": name, "ts": start, "dur": duration, "args": args,
        })  # fmt: skip

    def _read(self, event: list) -> None:
        code = event[0]
        self.replay.apply(event)
        if code == "add":
            self._turn(event[1], "queued", event[2])
        elif code == "fork":
            self._turn(event[2], "queued", event[6])
        elif code == "finish":
            self._turn(event[1], None, event[5])
        elif code == "schedule":
            self._schedule(event)

    def _schedule(self, event: list) -> None:
        replay, time = self.replay, event[2]
        prefills = {chunk[0] for chunk in event[4] if chunk[3] != "drafts"}
        decodes = {*replay.decodes, *(chunk[0] for chunk in event[4] if chunk[3] == "drafts")}
        for number, seq in replay.seqs.items():
            if number not in self._since:
                continue
            kind = "prefill" if number in prefills else "decode" if number in decodes else "idle"
            if kind == "decode" and seq.num_computed_tokens < len(seq.tokens):
                kind = "prefill"  # a chunk of one token need not be a decode
            if seq.status == "waiting":
                is_new = self._since[number][0] == "queued"
                kind = "queued" if is_new else "swapped" if seq.host_block_ids else "preempted"
            if kind != self._since[number][0]:
                self._turn(number, kind, time)
        living = [seq.status for seq in replay.seqs.values()]
        for name, args in {
            "sequences": {"running": living.count("running"), "waiting": living.count("waiting")},
            "blocks": {"owned": replay.num_used, "shared": replay.num_shared},
            "waste, %": {"waste": round(100 * replay.waste, 2)},
        }.items():
            self.events.append({"ph": "C", "pid": ENGINE, "tid": 0, "name": name, "ts": time, "args": args})

    def _turn(self, number: int, kind: str | None, time: int) -> None:
        """End the sequence's span at `time` and begin one of `kind`; None begins none: the sequence has finished."""
        seq = self.replay.seqs[number]
        name = f"{seq.request}.{seq.sample}" if seq.sample else seq.request
        if name not in self._threads:
            self._threads[name] = len(self._threads) + 1
            self._name(REQUESTS, self._threads[name], "thread_name", name)
        if number in self._since:
            before, start = self._since.pop(number)
            num_blocks = len([block_id for block_id in seq.blocks if block_id])  # without null blocks
            self._span(REQUESTS, self._threads[name], before, start, time, blocks=num_blocks)
        if kind is not None:
            self._since[number] = kind, time

    def _end_step(self, time: int, times: dict[str, int]) -> None:
        self._ends += 1
        start = time - sum(times.values())
        self._span(ENGINE, 1, f"step {self._ends}", start, time, step=self._ends)
        for name, duration in times.items():
            self._span(ENGINE, 1, name, start, start + duration)
            start += duration


def to_perfetto(lines: list[dict[str, Any]]) -> dict[str, object]:
    """Return the trace of a recording, given as `lines` of `read_recording`.

    Raises ReplayError if the recording contradicts itself.
    """
    return {"traceEvents": Exporter(lines).events, "displayTimeUnit": "ms"}
