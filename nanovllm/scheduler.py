"""Which sequence gets how many tokens of a step?

There is no prefill phase and no decode phase. Every sequence has `num_tokens` tokens, of which `num_computed_tokens`
are computed. Each step hands out a budget of tokens so that the sequences catch up, and a sequence that catches up gets
a new token. So a decode is a chunk of one token and a prefill is one or several larger chunks. Chunked prefill
(Sarathi, Agrawal et al. 2023, https://arxiv.org/abs/2308.16369), prefix hits and resumption after preemption are the
same lines of code.

This file decides admission, the share of each step, preemption, and when a sequence ends; the `BlockManager` says
whether there is room. `LLMEngine.step()` calls `schedule()` before the forward pass and `update()` after it.
"""

from itertools import count

from nanovllm.block_manager import BlockManager
from nanovllm.preemption import Recompute
from nanovllm.queues import Policy, Queue, fcfs, set_order
from nanovllm.sequence import Sequence, SequenceStatus
from nanovllm.step import Chunk, SchedulerOutput, make_step


class Scheduler:
    """Serves in the order of `policy`; when blocks run out, the last running sequence in that order is preempted.

    `max_model_len` bounds prompt and output together; `long_prefill_token_threshold`, if not 0, the tokens of one
    sequence in a step. `preemption` says what becomes of sequences that lose their blocks.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Policy = fcfs,
        long_prefill_token_threshold: int = 0,
        preemption: Recompute | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.observer = block_manager.observer
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk_len = long_prefill_token_threshold or max_num_batched_tokens
        self.max_model_len = max_model_len
        self.preemption = preemption or Recompute(block_manager)
        self.policy = policy
        self.waiting = Queue(SequenceStatus.WAITING)
        self.running = Queue(SequenceStatus.RUNNING)
        self._arrivals = count()

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence; its children wait with it. `InputProcessor` has checked that it can be served."""
        assert seq.num_tokens <= min(self.max_model_len - 1, self.block_manager.capacity)
        for one in (seq, *seq.children):
            one.limit_growth(self.max_model_len, self.block_manager.capacity)
        set_order(seq, self.policy, next(self._arrivals))
        self.waiting.add(seq)
        self.observer.on_add(seq)

    def schedule(self) -> SchedulerOutput:
        """Give the running sequences their next tokens, then admit waiting ones while budget and blocks last.

        With a budget of 8:

            A  20 tokens, 19 computed    gets 1: a decode            budget 7
            B  11 tokens,  4 computed    gets 7: a prefill chunk     budget 0
            C  30 tokens, waits          is not admitted in this step
        """
        self.block_manager.begin_step()
        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        for seq in self.running:  # `_make_room` takes sequences from its end, never one before `seq`
            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, self.max_chunk_len)
            if num_new_tokens and self._make_room(seq, num_new_tokens, preempted):
                chunks.append(self._advance(seq, num_new_tokens))
                budget -= num_new_tokens
            if not budget:
                break
        admitted: list[Sequence] = []
        # A preempted sequence would only come back to be preempted again. (Without chunks, which only overlap can bring
        # about, some sequence must be admitted.)
        if not preempted or not chunks:
            budget = self._admit_waiting(budget, chunks, admitted)
        num_tokens = self.max_num_batched_tokens - budget
        step = make_step(chunks, num_tokens, admitted, preempted, self.preemption.take_moves())
        for seq in step.samples:
            while seq.children:  # the last chunk of the prompt is scheduled: they share its blocks, and run from now on
                self.fork(seq, seq.children.pop(0))
        if step.chunks:
            self.observer.on_schedule(step, self.running, self.block_manager)
        return step

    def update(self, step: SchedulerOutput, new_token_ids: list[int]) -> list[tuple[int, Sequence]]:
        """The step has run: append its tokens, one for each of `step.samples`, and end sequences that are done.

        Returns (row, sequence) for each sequence that got a token. With overlap, a sequence may have been finished
        since `schedule()`, and gets none:

            samples [A, B], new_token_ids [63, 7], B was aborted    -> [(0, A)], and 63 is A's newest token
        """
        assert len(new_token_ids) == len(step.samples)
        advanced = [(row, seq) for row, seq in enumerate(step.samples) if seq.finish_reason is None]
        for row, seq in advanced:
            token_id = new_token_ids[row]
            seq.append_token(token_id)
            if token_id in seq.stop_token_ids and seq.num_output_tokens > seq.sampling_params.min_tokens:
                self.finish(seq, "stop", seq.stop_token_ids[token_id])
            elif seq.num_known_tokens >= seq.max_num_tokens:
                self.finish(seq, "length", seq.limit_reason)
        self.observer.on_update(step, new_token_ids)
        return advanced

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, whose tokens begin with all computed tokens of `parent`, share the blocks of `parent` and run.

        If `parent` is not running, or if no place is free, `child` waits and is computed anew.
        """
        child.num_cached_tokens = parent.num_cached_tokens
        is_shared = parent.status is SequenceStatus.RUNNING and self.running.num_places < self.max_num_seqs
        self.observer.on_fork(parent, child, is_shared)
        if is_shared:
            self.block_manager.fork(parent, child)
            self.running.add(child)
        else:
            self.waiting.add(child)

    def finish(self, seq: Sequence, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """End `seq` wherever it is. If a step is computing it (with overlap), the token of that step is dropped."""
        seq.status, seq.finish_reason, seq.stop_reason = SequenceStatus.FINISHED, finish_reason, stop_reason
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.preemption.drop(seq)
        self.observer.on_finish(seq)

    def roll_back(self) -> None:
        """A step has failed: running sequences keep their tokens, lose their blocks, and wait.

        The step may have failed half-way, even in `schedule()`. So no block that it was to fill may be found again, and
        no copy that it has asked for is done. Tokens that it would have drawn are drawn again, from the same random
        numbers.
        """
        self.preemption.roll_back()
        self.block_manager.prefix_cache.forget_new_blocks()
        for seq in [*self.running, *self.waiting]:
            if seq.block_table.length:
                seq.num_computed_tokens = 0  # so that `drop` registers no block that may not have been filled
                self.preemption.drop(seq)
        while self.running:
            self.waiting.add(self.running.pop())
        self.observer.on_roll_back()

    def _advance(self, seq: Sequence, num_new_tokens: int) -> Chunk:
        """The step computes the next tokens of `seq`, which has blocks for them."""
        start = seq.num_computed_tokens
        seq.num_computed_tokens = start + num_new_tokens
        return seq, start, num_new_tokens

    def _make_room(self, seq: Sequence, num_new_tokens: int, preempted: list[Sequence]) -> bool:
        """Blocks for the next tokens of a running sequence; False if it is the last, and was preempted itself."""
        while not self.block_manager.try_allocate(seq, seq.num_computed_tokens + num_new_tokens):
            last = self.running[-1]
            host_block_ids = self.preemption.preempt(last)
            self.waiting.add(self.running.pop())  # until then it is in `running`, where `roll_back` finds it
            preempted.append(last)
            last.num_preemptions += 1
            self.observer.on_preempt(last, host_block_ids, seq)
            if last is seq:
                return False
        return True

    def _admit_waiting(self, budget: int, chunks: list[Chunk], admitted: list[Sequence]) -> int:
        """Let waiting sequences run, in order, as long as the first one finds room for all of its tokens.

        Adds to `chunks` and `admitted`, and returns what is left of the budget.
        """
        blocks = self.block_manager
        # free blocks that the running sequences still need for the tokens they have (none, where tables are longer)
        num_reserved = sum([max(0, blocks.num_missing_blocks(seq)) for seq in self.running]) if self.waiting else 0
        while self.waiting and budget:
            seq = self.waiting[0]
            has_place = self.running.num_places + seq.num_places <= self.max_num_seqs
            if not has_place or not self.preemption.try_admit(seq, num_reserved):
                self.observer.on_wait(seq, has_place, blocks.num_missing_blocks(seq), num_reserved)
                break
            self.running.add(self.waiting.pop(0))
            admitted.append(seq)
            self.observer.on_admit(seq)
            if seq.num_cached_tokens is None:  # it never ran before: what counts as computed is in the prefix cache
                seq.num_cached_tokens = seq.num_computed_tokens
            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, self.max_chunk_len)
            has_room = blocks.try_allocate(seq, seq.num_computed_tokens + num_new_tokens)
            assert has_room, "an admitted sequence fits"
            chunks.append(self._advance(seq, num_new_tokens))
            budget -= num_new_tokens
            num_reserved += blocks.num_missing_blocks(seq)
        return budget
