"""Who gets how many tokens this step.

There is no prefill phase and no decode phase. Every sequence has `num_tokens` tokens, of which `num_computed_tokens`
are in the KV cache; each step hands out a budget of tokens so that the sequences catch up, and one that has caught up
gets a new token. So a decode is a chunk of one token, a prefill is one or several larger chunks, and chunked prefill
(Sarathi, Agrawal et al. 2023, https://arxiv.org/abs/2308.16369), prefix hits and resumption after preemption are all
the same.

This file decides admission, the share of each step, preemption and when a sequence is done. It knows no tensors and no
text. Called by `LLMEngine.step()`: `schedule()` before the forward pass, `update()` after it; with overlap, the next
step's `schedule()` comes in between.

    budget 8    A: 20 tokens, 19 computed   -> 1 new token  (decode)
                B: 11 tokens,  4 computed   -> 7 new tokens (prefill chunk; budget used up)
                C: 30 tokens, waiting       -> waits
"""

from bisect import insort
from collections.abc import Sequence as SequenceOf
from heapq import heapify, heappop, heappush
from itertools import count
from operator import attrgetter

from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.overlap import StepsInFlight
from nanovllm.scheduling.policies import Policy, fcfs
from nanovllm.scheduling.sequence import Sequence, SequenceStatus
from nanovllm.scheduling.step import BlockMoves, Chunk, SchedulerOutput
from nanovllm.scheduling.swap import SwapSpace


class Scheduler:
    """Serves in the order of `policy`; the last in that order is preempted when blocks run out.

    `block_manager` owns the cache; `max_model_len` bounds prompt and output of a sequence together.
    `long_prefill_token_threshold`, if not 0, caps what one sequence gets of a step, so that short prompts are not stuck
    behind a long one. With a `swap_space`, what is preempted is copied to host memory as long as there is room.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Policy = fcfs,
        long_prefill_token_threshold: int = 0,
        swap_space: SwapSpace | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk_len = long_prefill_token_threshold or max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy
        self.swap_space = swap_space
        self.waiting: list[tuple[tuple, Sequence]] = []  # a heap of (order, sequence)
        self.running: list[Sequence] = []  # in the policy's order
        self.num_preemptions = 0
        self.num_swaps = 0
        self.prefix_cache_query_tokens = 0
        self.prefix_cache_hit_tokens = 0
        self.in_flight = StepsInFlight()
        self._arrivals = count()

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        assert seq.num_tokens < self.max_model_len, "checked when the request arrived"
        assert seq.num_tokens <= self.block_manager.capacity, "checked when the request arrived"
        assert len(seq.children) < self.max_num_seqs, "checked when the request arrived"
        # the newest token needs no room in the cache yet, so a sequence alone can outgrow it by one
        limits = [self.max_model_len, self.block_manager.capacity + 1]
        if seq.sampling_params.max_tokens is not None:
            limits.append(seq.num_prompt_tokens + seq.sampling_params.max_tokens)
        arrival = next(self._arrivals)
        for one in (seq, *seq.children):
            one.max_num_tokens = min(limits)
            one.arrival = arrival
            one.order = (self.policy(one), arrival, one.sample_index)
        seq.num_claims += len(seq.children)
        self._wait(seq)

    def schedule(self) -> SchedulerOutput:
        """Give the running sequences their next tokens, then admit waiting ones while budget and blocks last.

        The step is in flight from here on, until `update()` or `rollback()`. While the step before is in flight there
        may be nothing to do (no chunks): the next one must wait for its tokens, or for the blocks that it frees.
        """
        is_ahead = bool(self.in_flight.steps)
        if is_ahead and not (self.in_flight.try_take_for_granted() and self._has_blocks_to_run_ahead()):
            return SchedulerOutput()
        self.block_manager.begin_step(is_ahead)
        decodes, prefills, preempted = self._share_budget()
        while not (decodes or prefills) and not is_ahead and self.has_unfinished():
            # skip at first reading: beams that have caught up hold the blocks that others of their search need
            assert self.running, "some sequence always advances"
            parked = self._preempt()
            decodes, prefills, more = self._share_budget()
            preempted += [parked, *more]
        scheduled = self._output(decodes, prefills, preempted)
        if scheduled.chunks:
            self.in_flight.steps.append(scheduled)
        return scheduled

    def update(self, scheduled: SchedulerOutput, new_token_ids: SequenceOf[int]) -> list[tuple[int, Sequence]]:
        """Record that the oldest step has run; return the sequences that got a token, some of which are finished by it.

        `new_token_ids` holds one token for each of `scheduled.samples`; with each sequence comes the place of its
        token. Tokens of sequences that have been finished since the step was scheduled are dropped.
        """
        assert len(new_token_ids) == len(scheduled.samples), "one token for each"
        self.in_flight.land(scheduled)
        advanced = list(enumerate(scheduled.samples))
        if self.in_flight.leaving:
            advanced = [(row, seq) for row, seq in advanced if seq.finish_reason is None]
            self._free_those_who_left()
        self.block_manager.end_step()
        num_finished = 0
        for row, seq in advanced:
            if seq.children:
                self._start_children(seq)
            if seq.is_beam:  # its search appends a token, when all of its beams have caught up
                continue
            token_id = new_token_ids[row]
            if seq.num_computed_tokens < seq.num_tokens:  # the token has a place already
                seq.fill_in_token(token_id)
            else:
                seq.append_token(token_id)
            if seq.num_tokens >= seq.max_num_tokens or token_id in seq.stop_token_ids:
                num_finished += self._finish_if_due(seq, token_id)
        if num_finished:
            self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]
        return advanced

    def rollback(self) -> None:
        """Take back all steps in flight, one of which has failed: their sequences wait again, and lose no token.

        What still runs on the device comes before all that is launched later, so its blocks can be given away.
        """
        steps = self.in_flight.take_back()
        self.block_manager.rollback_steps()
        self._free_those_who_left()
        for step in steps:
            for seq, _ in step.chunks:
                if seq.status is SequenceStatus.RUNNING:
                    self._release(seq)
                    self._wait(seq)
            for seq in step.preempted:  # what was to be copied out may not have been
                if self.swap_space is not None and seq.host_block_ids:
                    self.swap_space.drop(seq)
                    seq.num_computed_tokens = 0
        self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]

    def finish(self, seq: Sequence, finish_reason: str, stop_reason: str | None = None) -> None:
        """End `seq` wherever it is: it is aborted, or its text holds a stop string. Not while a token is expected."""
        self._leave(seq)
        seq.finish_reason, seq.stop_reason = finish_reason, stop_reason
        self.running = [other for other in self.running if other is not seq]
        if any(other is seq for _, other in self.waiting):
            self.waiting = [entry for entry in self.waiting if entry[1] is not seq]
            heapify(self.waiting)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which has the tokens of `parent`, go on from where that is, sharing its blocks.

        Where others have taken the places of preempted beams meanwhile, it waits instead, and is computed anew.
        """
        child.num_cached_tokens = parent.num_cached_tokens
        has_place = sum([seq.num_claims for seq in self.running]) < self.max_num_seqs
        if parent.status is SequenceStatus.RUNNING and has_place:
            self.block_manager.fork(parent, child)
            self._run(child)
        else:
            self._wait(child)

    def unpark(self, seq: Sequence) -> None:
        """A beam has got its next token: if it was parked, it waits to be computed again."""
        if seq.status is SequenceStatus.PARKED:
            self._wait(seq)

    # ---- the share of a step

    def _has_blocks_to_run_ahead(self) -> bool:
        """Whether all that runs can go on while a step is in flight, without taking blocks from anybody.

        That can wait until the step has landed: those who finish by it will free some.
        """
        blocks = self.block_manager
        if blocks.num_free_blocks >= self.max_num_batched_tokens // blocks.block_size + 2 * len(self.running):
            return True  # each needs a part of a block at most, and a copy, besides what the budget fills
        needed = [max(0, blocks.num_missing_blocks(seq)) + seq.has_shared_tail for seq in self.running]
        return sum(needed) <= blocks.num_free_blocks

    def _share_budget(self) -> tuple[list[Chunk], list[Chunk], list[Sequence]]:
        """Decodes, prefill chunks, and who was preempted for them."""
        budget = self.max_num_batched_tokens
        decodes: list[Chunk] = []
        prefills: list[Chunk] = []
        preempted: list[Sequence] = []

        i = 0
        while i < len(self.running) and budget:
            seq = self.running[i]
            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, self.max_chunk_len)
            if not num_new_tokens:  # it waits for the other beams, or for its last token
                i += 1
                continue
            if not self.block_manager.try_allocate(seq, seq.num_computed_tokens + num_new_tokens):
                preempted.append(self._preempt())  # the last, and maybe `seq` itself; then try again
                continue
            (decodes if num_new_tokens == 1 else prefills).append((seq, num_new_tokens))
            budget -= num_new_tokens
            i += 1

        # what was just preempted would only come back to be preempted again
        num_seqs, num_promised = self._count_places_and_promises() if self.waiting and not preempted else (0, 0)
        while self.waiting and budget and not preempted:
            seq = self.waiting[0][1]
            num_seqs += seq.num_claims
            if num_seqs > self.max_num_seqs or not self._try_admit(seq, num_promised):
                break
            heappop(self.waiting)
            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, self.max_chunk_len)
            has_room = self.block_manager.try_allocate(seq, seq.num_computed_tokens + num_new_tokens)
            assert has_room, "an admitted sequence fits"
            (decodes if num_new_tokens == 1 else prefills).append((seq, num_new_tokens))
            budget -= num_new_tokens
            num_promised += self.block_manager.num_missing_blocks(seq)
        return decodes, prefills, preempted

    # ---- in and out of the two queues

    def _wait(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        heappush(self.waiting, (seq.order, seq))

    def _run(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=attrgetter("order"))

    def _count_places_and_promises(self) -> tuple[int, int]:
        """Sequences that run, children to come included; and blocks that they still need to catch up."""
        num_seqs = sum([seq.num_claims for seq in self.running])
        return num_seqs, sum([max(0, self.block_manager.num_missing_blocks(seq)) for seq in self.running])

    def _try_admit(self, seq: Sequence, num_promised: int) -> bool:
        """Let `seq` run, if the blocks that are not promised to others have room for it."""
        if seq.host_block_ids:
            assert self.swap_space is not None
            if not self.block_manager.try_admit_swapped(seq, num_promised):
                return False
            self.swap_space.swap_in(seq)
        elif not self.block_manager.try_admit(seq, num_promised):
            return False
        self._run(seq)
        if seq.num_cached_tokens is None:  # what resumes after preemption meets its own blocks: no hit of the cache
            seq.num_cached_tokens = seq.num_computed_tokens
            self.prefix_cache_query_tokens += seq.num_prompt_tokens
            self.prefix_cache_hit_tokens += seq.num_cached_tokens
        return True

    def _preempt(self) -> Sequence:
        """Take the blocks of the last sequence; it keeps its tokens, and its K and V if the swap space has room."""
        seq = self.running.pop()
        num_computed_tokens = seq.num_computed_tokens
        has_caught_up = num_computed_tokens == seq.num_tokens  # a beam that waits for the others, not for blocks
        is_swapped = self.swap_space is not None and self.swap_space.try_swap_out(seq)
        self.block_manager.free(seq)
        if is_swapped:
            seq.num_computed_tokens = num_computed_tokens
            self.num_swaps += 1
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if has_caught_up:
            seq.status = SequenceStatus.PARKED
        else:
            self._wait(seq)
        return seq

    def _start_children(self, seq: Sequence) -> None:
        """The prompt of `seq` is computed: its children share it and run from now on."""
        children, seq.children, seq.num_claims = seq.children, [], 1
        for child in children:
            self.fork(seq, child)

    def _release(self, seq: Sequence) -> None:
        """Take all that `seq` owns."""
        self.block_manager.free(seq)
        if self.swap_space is not None:
            self.swap_space.drop(seq)

    def _leave(self, seq: Sequence) -> None:
        """It is finished, and gives up what it owns, as soon as no step in flight writes to it."""
        seq.status = SequenceStatus.FINISHED
        if self.in_flight.holds(seq):
            self.in_flight.leaving.append(seq)
        else:
            self._release(seq)

    def _free_those_who_left(self) -> None:
        leaving, self.in_flight.leaving = self.in_flight.leaving, []
        for seq in leaving:
            self._leave(seq)

    # ---- the end of a sequence

    def _finish_if_due(self, seq: Sequence, token_id: int) -> bool:
        """Whether the newest token ends the sequence; if so, say why."""
        if token_id in seq.stop_token_ids and seq.num_output_tokens > seq.sampling_params.min_tokens:
            seq.finish_reason, seq.stop_reason = "stop", seq.stop_token_ids[token_id]
        elif seq.num_tokens >= seq.max_num_tokens:
            seq.finish_reason = "length"
            is_wanted_length = seq.num_output_tokens == seq.sampling_params.max_tokens
            if not is_wanted_length and seq.num_tokens < self.max_model_len:
                seq.stop_reason = "kv_cache"  # alone in the cache, and still no room for its next K and V
        else:
            return False
        self._leave(seq)
        return True

    def _output(self, decodes: list[Chunk], prefills: list[Chunk], preempted: list[Sequence]) -> SchedulerOutput:
        blocks = self.block_manager
        num_computed = sum([seq.num_computed_tokens for seq in [*self.running, *self.in_flight.leaving]])
        num_scheduled_tokens = len(decodes) + sum([num_new_tokens for _, num_new_tokens in prefills])
        swap_outs, swap_ins = ([], []) if self.swap_space is None else self.swap_space.take_moves()
        return SchedulerOutput(
            chunks=decodes + prefills,
            num_decodes=len(decodes),
            num_scheduled_tokens=num_scheduled_tokens,
            preempted=preempted,
            moves=BlockMoves(swap_outs, swap_ins, blocks.take_copies()),
            kv_tokens_stored=num_computed + num_scheduled_tokens - blocks.num_duplicate_tokens,
            kv_slots_reserved=blocks.num_used_blocks * blocks.block_size,
        )
