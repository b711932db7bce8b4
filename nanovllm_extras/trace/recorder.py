"""`Recorder`: writes down each decision that scheduler and block manager tell their observer. `start_engine` adds one.

An event is a short list that begins with a code: `["take", 3, 17, 0]` means that sequence 3 now owns block 17, which
held nothing cached. All events up to the end of a step are one line of JSON. docs/trace.md lists the events;
`replay.py` reads them back into the state of each step.

A recording may begin in the middle of a run: its header then holds the state of that moment (`Recorder.take_snapshot`).

Tokens and blocks that do not change cause no event. A decode step with the sequences of the step before does not repeat
their numbers. So a step of 256 decodes takes about 0.1 ms longer (benchmarks/trace_overhead.py).
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Step
from nanovllm_extras.engine.faults import FaultHandler
from nanovllm_extras.engine.prefix_misses import PrefixMiss
from nanovllm_extras.memory.kinds import Window
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.records.full_observer import Observer, count_stored_tokens
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.moves import Moves
from nanovllm_extras.trace.asked_params import describe_params
from nanovllm_extras.trace.recording import (
    FORMAT,
    VERSION,
    Header,
    Line,
    Miss,
    NewSequence,
    SequenceState,
    Sink,
    Sinks,
    State,
    to_sink,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm_extras.memory.block_manager import BlockManager as GroupedBlockManager
    from nanovllm_extras.memory.slots import Slots

logger = logging.getLogger(__name__)

Engine = TypeVar("Engine")  # an `LLMEngine`


Chunk = tuple[Any, int, int]  # as the core's, with a sequence of the extras


class Recorder(Observer):
    """Writes events to a sink. It keeps those before `begin` until then."""

    _sink: Sink

    def __init__(self) -> None:
        self._decode: Callable[[int], str] | None = None
        self._start = time.monotonic()
        self._blocks: BlockManager | None = None
        self._config: dict[str, object] = {}
        self._events: list[list] = []
        self._seqs: dict[Sequence, int] = {}  # the numbers of all that have not finished
        self._arrivals: dict[int, int] = {}  # by these numbers: when their requests arrived
        self._num_seqs = 0
        self._drawn: list[tuple[Sequence, int, int]] = []  # place and token of the newest draws that may be replaced
        self._running: Collection[Sequence] = ()  # the scheduler's own queue
        self._leaving: list[int] = []  # host blocks of the sequence that is being preempted
        self._host_block_ids: dict[Sequence, list[int]] = {}  # of sequences that are swapped out
        self._host_slots: dict[Sequence, int] = {}  # the same for their recurrent states
        self._num_steps = 0
        self._num_admitted = 0  # since the last step
        # salts and adapters, each with a number
        self._salts: dict[tuple[str | None, str | None], int] = {}
        self._flights: deque[tuple[int, list[Any]]] = deque()  # steps in flight, and the sequences they sample
        self._loaded: dict[int, str] = {}  # block whose contents came from the K/V store -> name of the tier
        self._snapshots: dict[int, tuple[int, int]] = {}  # slot -> the block at whose end the state was, its tokens
        self._states: Slots | None = None  # the block manager's `Slots`, if the model has recurrent states
        self._decodes: list[Sequence] = []  # of the step before
        self._new_ids: set[int] = set()  # token ids whose text has to be noted
        self._known_ids: set[int] = set()

    # ---- lines

    def begin(self, sink: Sink, config: Mapping[str, object], decode: Callable[[int], str] | None = None) -> None:
        """Write the header to `sink`, and from now on the events.

        config: the limits that the scheduler keeps, and what else is to be shown
        decode: the text of a token id; each is noted when it first occurs. None records no texts.
        """
        self._sink, self._config, self._decode = sink, dict(config), decode
        self._start = time.monotonic()
        self._sink.begin(self._make_header())

    def flush(self, seconds: Mapping[str, float] | None = None) -> None:
        """Write what has happened since the last line; `seconds` are the times of the step that has ended."""
        texts = {}
        if self._decode is not None:
            texts = {str(i): self._decode(i) for i in sorted(self._new_ids - self._known_ids)}
        self._known_ids |= self._new_ids
        self._new_ids.clear()
        line: Line = {"t": self._now(), "events": self._events}
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
        flights = [(step, [self._seqs.get(seq, 0) for seq in samples]) for step, samples in self._flights]
        blocks = self._blocks
        header: Header = {
            "format": FORMAT, "version": VERSION, "num_blocks": blocks.num_blocks,
            "block_size": blocks.block_size, "num_steps_before": self._num_steps, "t": self._now(),
            "config": self._config, "in_flight": flights, "state": self.take_snapshot() if self._num_seqs else None,
        }  # fmt: skip
        if self._states is not None:
            header["num_slots"] = self._states.num_slots
        if has_groups(blocks):
            assert isinstance(blocks.other_kind, Window)
            header["num_groups"], header["group_window"] = blocks.num_groups, blocks.other_kind.window
        return to_json(header)

    def take_snapshot(self) -> State:
        """Return the state of the block manager and of the unfinished sequences, for a header.

        free            the free blocks, in the order in which they will be handed out
        cached          [block id, hash, serial number, token ids] of each block that the prefix cache can find
        loaded          [block id, name of the tier] of each block whose contents came from the K/V store
        seqs            of each unfinished sequence: what `replay.py` keeps of it

        Of a model with recurrent states:

        slots           [sequence, slot] of each sequence that owns one; a negative slot is in host memory
        snapshots       [slot, block id, number of tokens] of each snapshot
        state_copies    [source, destination] of the copies that the next step will do

        Of a model whose layers form groups:

        window_tables   [sequence, its block table in each group with a window] of each sequence that owns blocks
        window_cached   [serial number, block ids] of each cached block of group 0 that these groups have too
        """
        blocks = self._blocks
        assert blocks is not None, "a scheduler has begun"
        running, numbers = set(self._running), self._seqs
        cached = [
            (one.block_id, f"{one.block_hash:016x}", one.serial, np.frombuffer(one.tokens, dtype=np.int32).tolist())
            for one in blocks.prefix_cache._by_id.values()
        ]
        seqs: list[SequenceState] = [
            {
                "number": number,
                **self._describe_sequence(seq),
                "arrived": self._arrivals[number],
                "status": "running" if seq in running else "waiting",
                "num_computed_tokens": seq.num_computed_tokens,
                "block_table": seq.block_table.tolist(),
                "host_block_ids": list(self._host_block_ids.get(seq, [])),
                "misses": describe_misses(seq.prefix_misses or []),
            }
            for seq, number in numbers.items()
        ]
        state: State = {
            "free": list(blocks._free), "loaded": list(self._loaded.items()), "cached": cached, "seqs": seqs,
        }  # fmt: skip
        if self._states is not None:
            state["slots"] = [
                [numbers[seq], slot] for seq, slot in [*self._states.owned.items(), *self._host_slots.items()]
            ]
            state["snapshots"] = [[slot, *about] for slot, about in self._snapshots.items()]
            state["state_copies"] = [list(copy) for copy in self._states.copies_for_next]
        if has_groups(blocks):
            others = blocks.prefix_cache.others
            assert others is not None
            state["window_tables"] = [
                (number, [table.tolist() for table in seq.window_tables])
                for seq, number in numbers.items()
                if seq.window_tables
            ]
            state["window_cached"] = [(serial, list(block_ids)) for serial, block_ids in others.blocks_of.items()]
        self._new_ids |= {i for seq in state["seqs"] for i in seq["tokens"]}
        self._new_ids |= {i for *_, token_ids in state["cached"] for i in token_ids}
        self._new_ids |= {i for seq in state["seqs"] for miss in seq["misses"] for i in miss.get("cached", ())}
        return state

    def _now(self) -> int:
        """Return the microseconds since `begin`."""
        return int(1e6 * (time.monotonic() - self._start))

    # ---- sequences

    def _number(self, seq: Sequence) -> int:
        number = self._seqs.get(seq)
        return self._name(seq) if number is None else number

    def _name(self, seq: Sequence) -> int:
        """Give `seq`, which has not been seen before, a number."""
        number, now, about = self._next_number(seq), self._now(), self._describe_sequence(seq)
        self._arrivals[number] = now
        self._new_ids.update(about["tokens"])
        self._events.append(["add", number, now, about])
        return number

    def _describe_sequence(self, seq: Sequence) -> NewSequence:
        """Return what a new sequence is, and what its request asks for. Salts are secrets, so they get numbers."""
        about: NewSequence = {
            "request": seq.request_id,
            "sample": seq.sample_index,
            "tokens": seq.token_ids.tolist(),
            "num_prompt_tokens": seq.num_prompt_tokens,
            "max_num_tokens": seq.max_num_tokens,
            "params": describe_params(seq.sampling_params),
        }
        if seq.priority:
            about["priority"] = seq.priority
        if seq.cache_salt is not None or seq.adapter is not None:  # an adapter separates blocks as a salt does
            key = seq.cache_salt, None if seq.adapter is None else seq.adapter.digest
            about["cache_salt"] = f"salt {self._salts.setdefault(key, len(self._salts) + 1)}"
        if seq.adapter is not None:
            about["adapter"] = seq.adapter.name
        return about

    def _next_number(self, seq: Sequence) -> int:
        self._num_seqs += 1
        self._seqs[seq] = self._num_seqs
        return self._num_seqs

    def _note_replaced(self) -> None:
        """Record the tokens with which a beam search has replaced those that the newest step sampled for its beams."""
        for i, (seq, place, token_id) in enumerate(self._drawn):
            chosen = seq.token_ids[place]
            if chosen != token_id and seq in self._seqs:
                self._note_tokens(seq, place, [chosen])
                self._drawn[i] = seq, place, chosen

    def _note_tokens(self, seq: Sequence, first: int, token_ids: list[int]) -> None:
        self._new_ids.update(token_ids)
        self._events.append(["tokens", self._number(seq), first, token_ids])

    def on_start(self, blocks: BlockManager) -> None:
        if self._blocks is not None:
            self._events.append(["start", blocks.num_blocks])
        self._blocks = blocks
        self._states = getattr(blocks, "states", None)
        self._seqs.clear()
        self._arrivals.clear()
        self._drawn = []
        self._host_block_ids.clear()
        self._host_slots.clear()
        self._running = ()
        self._flights.clear()
        self._loaded.clear()
        self._snapshots.clear()
        self._decodes = []

    def on_add(self, seq: Sequence) -> None:
        self._number(seq)

    def on_fork(self, parent: Sequence, child: Sequence) -> None:
        self._note_fork(parent, child, is_shared=True)

    def on_fork_apart(self, parent: Sequence, child: Sequence) -> None:
        self._note_fork(parent, child, is_shared=False)

    def _note_fork(self, parent: Sequence, child: Sequence, is_shared: bool) -> None:
        self._note_replaced()
        if parent not in self._seqs:  # it has finished
            self._name(child)
            return
        number, of_child = self._number(parent), self._next_number(child)
        self._arrivals[of_child] = self._arrivals[number]
        num_known = child.num_known_tokens
        place = [child.sample_index, num_known, parent.num_computed_tokens if is_shared else 0]
        self._events.append(["fork", number, of_child, *place, self._now()])
        newest = child.token_ids[num_known - 1]
        if newest != parent.token_ids[num_known - 1]:
            self._note_tokens(child, num_known - 1, [newest])

    def on_finish(self, seq: Sequence) -> None:
        self._note_replaced()
        self._host_block_ids.pop(seq, None)
        place = [seq.finish_reason, seq.stop_reason, seq.num_known_tokens, self._now()]
        self._events.append(["finish", self._number(seq), *place])
        self._arrivals.pop(self._seqs.pop(seq))
        if seq.finish_reason == "abort":  # between two steps, and there may be no further step
            self.flush()

    # ---- decisions

    def on_wait(self, seq: Sequence, has_place: bool, num_needed_blocks: int, num_reserved_blocks: int) -> None:
        assert self._blocks is not None
        num_free = self._blocks.num_free_blocks - num_reserved_blocks
        code = "blocks" if has_place else "max_num_seqs"
        self._events.append(["wait", self._number(seq), code, num_needed_blocks, num_free])

    def on_admit(self, seq: Sequence) -> None:
        self._host_block_ids.pop(seq, None)
        self._num_admitted += 1
        code = "new" if seq.num_cached_tokens is None else "again"
        self._events.append(["admit", self._number(seq), code, seq.num_computed_tokens])

    def on_miss(self, seq: Sequence, misses: list[PrefixMiss]) -> None:
        self._new_ids.update(i for miss in misses for i in miss.cached_token_ids)
        self._events.append(["miss", self._number(seq), describe_misses(misses)])

    def on_swap_out(self, seq: Sequence, host_block_ids: list[int]) -> None:
        self._leaving = host_block_ids

    def on_preempt(self, seq: Sequence, needy: Sequence) -> None:
        host_block_ids, self._leaving = self._leaving, []
        self._host_block_ids[seq] = host_block_ids
        place = [self._number(needy), seq.num_computed_tokens, host_block_ids]
        self._events.append(["preempt", self._number(seq), *place])

    def on_schedule(self, step: Step, running: list[Sequence], blocks: BlockManager) -> None:
        self._note_replaced()
        self._note_idle(step, running)
        self._note_drafts(step)
        self._num_steps += 1
        self._running = running
        self._flights.append((self._num_steps, step.samples))
        decodes, others = self._split(step)
        named = 0 if decodes == self._decodes else self._numbers(decodes)
        samples = 0 if step.samples == decodes else self._numbers(step.samples)
        chunks = [self._describe(chunk) for chunk in others]
        copies = Moves.of(step.copies)
        moves = [copies.swap_outs, copies.swap_ins]
        if self._states is not None:
            moves.append(copies.state_copies)
        place = [named, chunks, samples, moves, blocks.num_free_blocks, count_stored_tokens(running, blocks)]
        self._events.append(["schedule", self._num_steps, self._now(), *place])
        self._decodes = decodes
        self._num_admitted = 0

    def _numbers(self, seqs: Collection[Any]) -> list[int]:
        return [self._number(seq) for seq in seqs]

    def _split(self, step: Step) -> tuple[list[Any], list[Chunk]]:
        """Return the sequences that decode, and the other chunks, among them chunks of one token before a snapshot."""
        singles, chunks = step.chunks[: step.num_decodes], step.chunks[step.num_decodes :]
        cut = [chunk for chunk in singles if self._ends_at_snapshot(chunk)] if self._states is not None else []
        return [chunk[0] for chunk in singles if chunk not in cut], cut + chunks

    def _ends_at_snapshot(self, chunk: Chunk) -> bool:
        seq, start, num_new_tokens = chunk
        return self._states is not None and start + num_new_tokens < seq.num_known_tokens and self._states.is_due(seq)

    def _describe(self, chunk: Chunk) -> list:
        """Return [sequence, start, num_new_tokens, why no more]."""
        seq, start, num_new_tokens = chunk
        code = "threshold" if num_new_tokens == self._config.get("long_prefill_token_threshold") else "budget"
        if start + num_new_tokens >= seq.num_known_tokens:
            code = "all" if start + num_new_tokens == seq.num_known_tokens else "drafts"
        elif self._ends_at_snapshot(chunk):
            code = "snapshot"
        return [self._number(seq), start, num_new_tokens, code]

    def _note_drafts(self, step: Step) -> None:
        """Record drafts: tokens after the known ones that a chunk computes. (Others belong to steps in flight.)"""
        chunks: list[Chunk] = [*step.chunks[step.num_decodes :]]
        for seq, start, num_new_tokens in chunks:
            drafts = seq.unknown_token_ids[: max(0, start + num_new_tokens - seq.num_known_tokens)].tolist()
            if drafts:
                self._new_ids.update(drafts)
                self._events.append(["draft", self._number(seq), drafts])

    def _note_idle(self, step: Step, running: list[Sequence]) -> None:
        """Record why running sequences get no tokens, and why no waiting sequence was considered."""
        has_waiting = len(self._seqs) > len(running)
        if has_waiting and step.preempted and not self._num_admitted:
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

    def on_update(self, step: Step, new_token_ids: list[int]) -> None:
        number, _ = self._flights.popleft()
        self._new_ids.update(new_token_ids)
        self._events.append(["update", number, self._now(), list(new_token_ids)])
        newest: dict[Any, int] = dict(zip(step.samples, new_token_ids, strict=True))  # of several, the last
        self._drawn = [
            (seq, seq.num_known_tokens - 1, token_id)
            for seq, token_id in newest.items()
            if seq.processors and seq in self._seqs
        ]

    def on_step_end(self, step: Step, seconds: Mapping[str, float]) -> None:
        self._note_replaced()
        self.flush(seconds)

    def on_roll_back(self) -> None:
        self._flights.clear()
        self._events.append(["roll_back", self._now()])

    # ---- blocks

    def on_take_block(self, seq: Sequence, block_id: int, is_evicted: bool) -> None:
        self._loaded.pop(block_id, None)
        self._events.append(["take", self._number(seq), block_id, int(is_evicted)])

    def on_share_block(self, seq: Sequence, block_id: int) -> None:
        self._events.append(["share", self._number(seq), block_id])

    def on_copy_block(self, seq: Sequence, source: int, destination: int) -> None:
        self._events.append(["copy", self._number(seq), source, destination])

    def on_load_blocks(self, seq: Sequence, by_tier: dict[str, list[int]], num_tokens: int) -> None:
        self._loaded |= {block_id: tier for tier, block_ids in by_tier.items() for block_id in block_ids}
        self._events.append(["load", self._number(seq), num_tokens, by_tier])

    def on_give_back(self, seq: Sequence, block_ids: list[int]) -> None:
        self._events.append(["give_back", self._number(seq), list(block_ids)])

    def on_take_in_group(self, seq: Sequence, group: int, place: int, block_id: int, is_evicted: bool) -> None:
        self._events.append(["take", self._number(seq), block_id, int(is_evicted), group, place])

    def on_share_in_group(self, seq: Sequence, group: int, place: int, block_id: int) -> None:
        self._events.append(["share", self._number(seq), block_id, group, place])

    def on_copy_in_group(self, seq: Sequence, group: int, source: int, destination: int) -> None:
        self._events.append(["copy", self._number(seq), source, destination, group])

    def on_register_in_group(self, seq: Sequence, group: int, block_id: int, block_hash: int, serial: int) -> None:
        self._events.append(["register", self._number(seq), block_id, f"{block_hash:016x}", serial, group])

    def on_forget_in_group(self, block_id: int) -> None:
        self._events.append(["forget", block_id])

    def on_verify(self, seq: Sequence, num_drafts: int, num_accepted: int, block_ids: list[int]) -> None:
        self._events.append(["verify", self._number(seq), num_drafts, num_accepted, block_ids])

    def on_take_slot(self, seq: Sequence, slot: int, source: int) -> None:
        self._host_slots.pop(seq, None)
        self._events.append(["slot", self._number(seq), slot, source])

    def on_move_slot(self, seq: Sequence, slot: int) -> None:
        if slot < 0:
            self._host_slots[seq] = slot
        self._events.append(["move", self._number(seq), slot])

    def on_snapshot(self, seq: Sequence, slot: int, block_id: int) -> None:
        self._snapshots[slot] = block_id, seq.num_computed_tokens
        self._events.append(["snapshot", self._number(seq), slot, block_id, seq.num_computed_tokens])

    def on_drop_snapshot(self, slot: int, why: str) -> None:
        del self._snapshots[slot]
        self._events.append(["drop", slot, why])

    def on_free(self, seq: Sequence) -> None:
        self._host_block_ids.pop(seq, None)
        if seq not in self._running:  # else `seq` is being preempted, and keeps its slot in host memory
            self._host_slots.pop(seq, None)
        number = self._seqs.get(seq)
        if number is not None:  # else it has finished: a failed step ends it once more
            self._events.append(["free", number])

    def on_register_block(self, seq: Sequence, block_id: int, block_hash: int, serial: int) -> None:
        self._events.append(["register", self._number(seq), block_id, f"{block_hash:016x}", serial])

    def on_forget_block(self, block_id: int) -> None:
        self._events.append(["forget", block_id])

    def on_reset_prefix_cache(self) -> None:
        self._events.append(["reset"])


def to_json(line: Mapping[str, object]) -> str:
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False)


# ---- records


def has_groups(blocks: BlockManager) -> "TypeGuard[GroupedBlockManager]":
    """Return whether the model's layers form groups, each of which has block tables of its own."""
    return getattr(blocks, "num_groups", 1) > 1


def describe_misses(misses: list[PrefixMiss]) -> list[Miss]:
    """Return the records as objects, without the details that a cause does not have."""
    described: list[Miss] = []
    for miss in misses:
        about: Miss = {"start": miss.start, "end": miss.end, "cause": miss.cause}
        if miss.cached_token_ids:
            about["cached"] = list(miss.cached_token_ids)
        if miss.prompt_token_ids:
            about["prompt"] = list(miss.prompt_token_ids)
        if miss.step is not None:
            about["step"] = miss.step
        if miss.request_id is not None:
            about["request"] = miss.request_id
        described.append(about)
    return described


# ---- engines that are recorded


def start_engine(
    make_engine: Callable[[Config, Observer | None, FaultHandler | None], Engine],
    config: Config,
    trace: str | Path | Sink | None,
    on_exit: ExitStack,
    faults: FaultHandler | None = None,
) -> Engine:
    """Start an engine. Its run is recorded in the file or sink `trace`, until `on_exit` closes it.

    make_engine: the class of the engine. Raises ValueError or TypeError, before the model is loaded, if the file cannot
    be written.
    """
    if trace is None:
        return make_engine(config, None, faults)
    sink = to_sink(trace)
    recorder = Recorder()
    try:
        engine: Any = make_engine(replace(config, explain_prefix_misses=True), recorder, faults)
    except BaseException:
        sink.close()
        raise
    if isinstance(sink, Sinks):
        sink = Sinks(sink.sinks, engine.stats.count_failed_observer)
    decode = None if engine.tokenizer is None else partial(text_of, engine.tokenizer)
    recorder.begin(sink, describe_engine(engine), decode)
    on_exit.callback(close_recording, recorder)
    started: Engine = engine
    return started


def close_recording(recorder: Recorder) -> None:
    """Close the recording. An OSError is logged and not raised, so that the engine still ends."""
    try:
        recorder.close()
    except OSError as error:
        logger.error("the recording is not complete: %s", error)


def text_of(tokenizer: "PreTrainedTokenizerBase", token_id: int) -> str:
    """Return the text of one token. Part of a character is shown as �."""
    return str(tokenizer.decode([token_id]))


def describe_engine(engine: Any) -> dict[str, object]:
    """Return the scheduler's limits and the engine's description, for the header of a recording."""
    config, policy = engine.config, engine.config.scheduling_policy
    about: dict[str, object] = {
        "model": Path(config.model).name,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": engine.parts.max_num_batched_tokens,
        "max_model_len": engine.parts.max_model_len,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "sliding_window": engine.parts.model_config.widest_window,  # None if a layer sees all tokens
        "scheduling_policy": policy if isinstance(policy, str) else getattr(policy, "__name__", repr(policy)),
        "enable_prefix_caching": config.enable_prefix_caching,
        "preemption_mode": config.preemption_mode,
        "tensor_parallel_size": config.tensor_parallel_size,
        "num_swap_blocks": engine.runner.num_swap_blocks,
        "enable_overlap": engine.parts.enable_overlap,
        "description": engine.description,
    }
    if config.block_manager_cls is not None or config.prefix_cache_cls is not None:
        about["has_own_blocks"] = True  # which may be handed out in another order
    states = getattr(engine.scheduler.block_manager, "state_stats", None)
    if states is not None:  # the model has recurrent states
        about |= {"state_snapshot_interval": config.state_snapshot_interval, "bytes_per_slot": states.bytes_per_slot}
    groups = getattr(getattr(engine.runner, "layout", None), "layer_groups", None)
    if groups is not None:
        about["layers_of_groups"] = groups.num_layers
    return about
