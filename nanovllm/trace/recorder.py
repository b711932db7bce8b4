"""What is recorded of a run? Every decision that scheduler and block manager tell their observer, in order.

A `Recorder` is the engine's `SchedulingStats`, and notes what it counts: an event is a short list that begins with a
code, `["take", 3, 17, 0]` (sequence 3 owns block 17, which held nothing cached). All events up to the end of a step are
one line of JSON. docs/trace.md lists the events; `replay.py` makes the state of each step of them again.

Nothing is noted for a token or a block that does not change, and a decode step whose sequences are those of the step
before names none of them: a step of 256 decodes costs some 0.1 ms (benchmarks/trace_overhead.py).
"""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol, runtime_checkable

from nanovllm.scheduling.observer import Blocks, SchedulingStats
from nanovllm.scheduling.sequence import Sequence
from nanovllm.scheduling.step import Chunk, SchedulerOutput
from nanovllm.trace.snapshot import take_snapshot

FORMAT = "nanovllm-trace"
VERSION = 1


@runtime_checkable
class Sink(Protocol):
    """Where lines go: a file, or the browsers that watch."""

    @property
    def is_full(self) -> bool:
        """Whether the lines before may be dropped: the recorder begins anew then, with the state of this moment."""

    def begin(self, line: str) -> None:
        """The header, with which a reader can begin."""

    def write(self, line: str) -> None: ...

    def close(self) -> None: ...


class Recorder(SchedulingStats):
    """Counts as its parent does, and writes events to `sink` once `begin` has been called.

    decode: the text of a token id; each is noted when it first occurs. None records no texts.
    """

    def __init__(self, sink: Sink, decode: Callable[[int], str] | None = None) -> None:
        super().__init__()
        self.decode = decode
        self._sink = sink
        self._start = time.monotonic()
        self._blocks: Blocks | None = None
        self._config: dict[str, Any] = {}
        self._events: list[list] = []
        self._seqs: dict[Sequence, int] = {}  # the numbers of all that have not finished
        self._num_seqs = 0
        self._beams: dict[Sequence, int] = {}  # how many tokens of each beam are noted: its search chooses them
        self._num_steps = 0
        self._flights: deque[tuple[int, list[Sequence]]] = deque()  # steps in flight, and the sequences they sample
        self._decodes: list[Sequence] = []  # of the step before
        self._new_ids: set[int] = set()  # token ids whose text has to be noted
        self._known_ids: set[int] = set()

    # ---- lines

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write the header; `config` are the limits that the scheduler keeps, and what else is to be shown."""
        self._config = dict(config)
        self._start = time.monotonic()
        self._sink.begin(self._make_header())

    def flush(self, seconds: Mapping[str, float] | None = None) -> None:
        """Write what has happened since the last line; `seconds` are the times of the step that has ended."""
        texts = {}
        if self.decode is not None:
            texts = {str(i): self.decode(i) for i in sorted(self._new_ids - self._known_ids)}
        self._known_ids |= self._new_ids
        self._new_ids.clear()
        line: dict[str, Any] = {"t": self._now(), "events": self._events}
        if texts:
            line["texts"] = texts
        if seconds is not None:
            line["times"] = {name.removesuffix("_time_s"): round(1e6 * value) for name, value in seconds.items()}
        self._sink.write(to_json(line))
        self._events = []
        if self._sink.is_full:
            self._sink.begin(self._make_header())

    def close(self) -> None:
        """Write what is left. The sink takes no more lines."""
        if self._events:
            self.flush()
        self._sink.close()

    def _make_header(self) -> str:
        assert self._blocks is not None, "a scheduler has begun"
        self._known_ids.clear()
        self._decodes = []
        flights = [[step, [self._seqs.get(seq, 0) for seq in samples]] for step, samples in self._flights]
        self._beams = {seq: seq.num_known_tokens for seq in self._beams}
        state = take_snapshot(self._blocks, self._seqs) if self._num_seqs else None
        if state is not None:
            self._new_ids |= {i for seq in state["seqs"] for i in seq["tokens"]}
            self._new_ids |= {i for *_, token_ids in state["cached"] for i in token_ids}
        return to_json({
            "format": FORMAT, "version": VERSION, "num_blocks": self._blocks.num_blocks,
            "block_size": self._blocks.block_size, "num_steps_before": self._num_steps, "t": self._now(),
            "config": self._config, "in_flight": flights, "state": state,
        })  # fmt: skip

    def _now(self) -> int:
        """Microseconds since `begin`."""
        return int(1e6 * (time.monotonic() - self._start))

    # ---- sequences

    def _number(self, seq: Sequence) -> int:
        number = self._seqs.get(seq)
        return self._name(seq) if number is None else number

    def _name(self, seq: Sequence) -> int:
        """Give `seq`, which has not been seen before, a number."""
        self._num_seqs += 1
        self._seqs[seq] = self._num_seqs
        token_ids = seq.token_ids.view().tolist()
        self._new_ids.update(token_ids)
        if seq.is_beam:
            self._beams[seq] = len(token_ids)
        about = {"request": seq.request_id, "sample": seq.sample_index, "tokens": token_ids}
        about |= {"num_prompt_tokens": seq.num_prompt_tokens, "max_num_tokens": seq.max_num_tokens}
        self._events.append(["add", self._num_seqs, self._now(), about | ({"beam": 1} if seq.is_beam else {})])
        return self._num_seqs

    def _note_chosen(self, seq: Sequence) -> None:
        """The tokens that a search has appended to a beam since it was last looked at."""
        first = self._beams[seq]
        if seq.num_known_tokens > first:
            token_ids = seq.token_ids.view(first).tolist()
            self._new_ids.update(token_ids)
            self._events.append(["tokens", self._number(seq), first, token_ids])
            self._beams[seq] = seq.num_known_tokens

    def on_start(self, blocks: Blocks) -> None:
        super().on_start(blocks)
        if self._blocks is not None:
            self._events.append(["start", blocks.num_blocks])
        self._blocks = blocks
        self._seqs.clear()
        self._beams.clear()
        self._flights.clear()
        self._decodes = []

    def on_add(self, seq: Sequence) -> None:
        self._number(seq)

    def on_fork(self, parent: Sequence, child: Sequence) -> None:
        if parent in self._beams:
            self._note_chosen(parent)
        number = self._number(parent)
        self._num_seqs += 1
        self._seqs[child] = self._num_seqs
        if child.is_beam:
            self._beams[child] = child.num_known_tokens
        place = [child.sample_index, child.num_known_tokens, parent.num_computed_tokens]
        self._events.append(["fork", number, self._num_seqs, *place, self._now()])

    def on_finish(self, seq: Sequence) -> None:
        if seq in self._beams:
            self._note_chosen(seq)
            del self._beams[seq]
        place = [seq.finish_reason, seq.stop_reason, seq.num_known_tokens, self._now()]
        self._events.append(["finish", self._number(seq), *place])
        del self._seqs[seq]
        if seq.finish_reason == "abort":  # between two steps, and there may be no further step
            self.flush()

    # ---- decisions

    def on_wait(self, seq: Sequence, has_place: bool, num_needed_blocks: int, num_reserved_blocks: int) -> None:
        assert self._blocks is not None
        num_free = self._blocks.num_free_blocks - num_reserved_blocks
        code = "blocks" if has_place else "max_num_seqs"
        self._events.append(["wait", self._number(seq), code, num_needed_blocks, num_free])

    def on_admit(self, seq: Sequence) -> None:
        super().on_admit(seq)
        code = "new" if seq.num_cached_tokens is None else "again"
        self._events.append(["admit", self._number(seq), code, seq.num_computed_tokens])

    def on_preempt(self, seq: Sequence, is_swapped: bool, needy: Sequence) -> None:
        super().on_preempt(seq, is_swapped, needy)
        place = [self._number(needy), seq.num_computed_tokens, seq.host_block_ids.copy()]
        self._events.append(["preempt", self._number(seq), *place])

    def on_schedule(self, step: SchedulerOutput, running: list[Sequence], blocks: Blocks) -> None:
        super().on_schedule(step, running, blocks)
        for seq in self._beams:
            self._note_chosen(seq)
        self._note_idle(step, running)
        self._num_steps += 1
        self._flights.append((self._num_steps, step.samples))
        decodes = [chunk[0] for chunk in step.chunks[: step.num_decodes]]
        named = 0 if decodes == self._decodes else self._numbers(decodes)
        samples = 0 if step.samples == decodes else self._numbers(step.samples)
        chunks = [self._describe(chunk) for chunk in step.chunks[step.num_decodes :]]
        moves = [step.moves.swap_outs, step.moves.swap_ins]
        num_stored = self._in_flight[-1][0]
        place = [named, chunks, samples, moves, blocks.num_free_blocks, num_stored]
        self._events.append(["schedule", self._num_steps, self._now(), *place])
        self._decodes = decodes

    def _numbers(self, seqs: SequenceOf[Sequence]) -> list[int]:
        return [self._number(seq) for seq in seqs]

    def _describe(self, chunk: Chunk) -> list:
        """[sequence, start, num_new_tokens, why no more]."""
        seq, start, num_new_tokens = chunk
        code = "threshold" if num_new_tokens == self._config.get("long_prefill_token_threshold") else "budget"
        if start + num_new_tokens >= seq.num_known_tokens:
            code = "all"
        return [self._number(seq), start, num_new_tokens, code]

    def _note_idle(self, step: SchedulerOutput, running: list[Sequence]) -> None:
        """Why running sequences get nothing, and why no waiting one has been looked at."""
        has_waiting = len(self._seqs) > len(running)
        if has_waiting and step.preempted and not step.admitted:
            self._events.append(["wait", 0, "preemption", 0, 0])
        elif has_waiting and step.num_scheduled_tokens == self._config.get("max_num_batched_tokens"):
            self._events.append(["wait", 0, "budget", 0, 0])
        if len(running) == len(step.chunks):
            return
        scheduled = {chunk[0] for chunk in step.chunks} | set(step.samples)
        for seq in running:
            if seq not in scheduled:
                code = "caught_up" if seq.num_computed_tokens == seq.num_tokens else "budget"
                self._events.append(["idle", self._number(seq), code])

    def on_update(self, step: SchedulerOutput, new_token_ids: SequenceOf[int]) -> None:
        super().on_update(step, new_token_ids)
        number, _ = self._flights.popleft()
        self._new_ids.update(new_token_ids)
        self._events.append(["update", number, self._now(), list(new_token_ids)])

    def on_step_end(self, step: SchedulerOutput, seconds: Mapping[str, float]) -> None:
        self.flush(seconds)

    def on_roll_back(self) -> None:
        super().on_roll_back()
        self._flights.clear()
        self._events.append(["roll_back", self._now()])

    # ---- blocks

    def on_take_block(self, seq: Sequence, block_id: int, is_evicted: bool) -> None:
        self._events.append(["take", self._number(seq), block_id, int(is_evicted)])

    def on_share_block(self, seq: Sequence, block_id: int) -> None:
        self._events.append(["share", self._number(seq), block_id])

    def on_copy_block(self, seq: Sequence, source: int, destination: int) -> None:
        self._events.append(["copy", self._number(seq), source, destination])

    def on_give_back(self, seq: Sequence, block_ids: list[int]) -> None:
        super().on_give_back(seq, block_ids)
        self._events.append(["give_back", self._number(seq), list(block_ids)])

    def on_free(self, seq: Sequence) -> None:
        number = self._seqs.get(seq)
        if number is not None:  # else it has finished: a failed step ends it once more
            self._events.append(["free", number])

    def on_register_block(self, seq: Sequence, block_id: int, block_hash: int, serial: int) -> None:
        self._events.append(["register", self._number(seq), block_id, f"{block_hash:016x}", serial])

    def on_forget_block(self, block_id: int) -> None:
        self._events.append(["forget", block_id])

    def on_reset_prefix_cache(self) -> None:
        self._events.append(["reset"])


def to_json(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False)
