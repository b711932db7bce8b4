"""Which sequence gets how many tokens of a step?

There is no prefill phase and no decode phase. Every sequence has `num_tokens` tokens, of which `num_computed_tokens`
are computed, or will be by the steps in flight. Each step hands out a budget of tokens so that the sequences catch up,
and a sequence that catches up gets a new token. So a decode is a chunk of one token and a prefill is one or several
larger chunks; chunked prefill (Sarathi, Agrawal et al. 2023, https://arxiv.org/abs/2308.16369), prefix hits and
resumption after preemption are the same lines of code.

This file decides admission, the share of each step, preemption, and when a sequence ends; the `BlockManager` says
whether there is room. `LLMEngine.step()` calls `schedule()` before the forward pass and `update()` after it.
"""

from collections.abc import Sequence as SequenceOf

from nanovllm.scheduling import forks
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.policies import Policy, fcfs
from nanovllm.scheduling.preemption import Recompute
from nanovllm.scheduling.queues import RunningQueue, WaitingQueue
from nanovllm.scheduling.sequence import Sequence, SequenceStatus
from nanovllm.scheduling.step import Draft, SchedulerOutput, finish_draft


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
        self.waiting = WaitingQueue(policy)
        self.running = RunningQueue()
        self.in_flight: list[SchedulerOutput | Draft] = []  # scheduled, and not updated yet; the oldest first

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence; its children wait with it. `Limits` has checked that it can be served."""
        assert seq.num_tokens <= min(self.max_model_len - 1, self.block_manager.capacity)
        for one in (seq, *seq.children):
            one.limit_growth(self.max_model_len, self.block_manager.capacity)
        seq.num_places += len(seq.children)
        self.waiting.add_new(seq)
        self.observer.on_add(seq)

    def schedule(self) -> SchedulerOutput:
        """Give the running sequences their next tokens, then admit waiting ones while budget and blocks last.

        With a budget of 8:

            A  20 tokens, 19 computed    gets 1: a decode            budget 7
            B  11 tokens,  4 computed    gets 7: a prefill chunk     budget 0
            C  30 tokens, waits          is not admitted in this step
        """
        step = Draft(self.max_num_batched_tokens, self.block_manager.begin_step())
        self.in_flight.append(step)  # before the first sequence changes: `roll_back` can undo a half-made step
        for seq in self.running:  # make room from the end of the list, until `seq` fits or is itself the last
            while not self._try_give_tokens(seq, step):
                if self._preempt_last(step, seq) is seq:
                    break
            if not step.budget:
                break
        if not step.preempted or not step.chunks:  # a preempted sequence would only come back to be preempted again
            self._admit_waiting(step)
        return self._launch(step)

    def update(self, step: SchedulerOutput, new_token_ids: SequenceOf[int]) -> list[tuple[int, Sequence]]:
        """The oldest step has run: append its tokens, one for each of `step.samples`, and end sequences that are done.

        Returns (row, sequence) for each sequence that got a token; those that were finished meanwhile get none:
            samples [A, B], new_token_ids [63, 7], B was aborted meanwhile    -> [(0, A)], and A ends with token 63
        """
        assert len(new_token_ids) == len(step.samples)
        assert step is self.in_flight[0], "the oldest"
        advanced = [(row, seq) for row, seq in enumerate(step.samples) if seq.finish_reason is None]
        for row, seq in advanced:
            if seq.is_beam:  # its search appends a token, when all of its beams have caught up
                continue
            token_id = new_token_ids[row]
            seq.append_token(token_id)
            if token_id in seq.stop_token_ids and seq.num_output_tokens > seq.sampling_params.min_tokens:
                self.finish(seq, "stop", seq.stop_token_ids[token_id])
            elif seq.num_known_tokens >= seq.max_num_tokens:
                self.finish(seq, "length", seq.limit_reason)
        self.in_flight.pop(0)  # not before: if a line above fails, `roll_back` forgets the placeholders
        self.observer.on_update(step, new_token_ids)
        return advanced

    def finish(self, seq: Sequence, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """End `seq` wherever it is: a step in flight may still compute it, and its token is dropped."""
        seq.status, seq.finish_reason, seq.stop_reason = SequenceStatus.FINISHED, finish_reason, stop_reason
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.discard(seq)
        self.release(seq)
        self.observer.on_finish(seq)

    def _try_give_tokens(self, seq: Sequence, step: Draft) -> bool:
        """Its next tokens, as many as budget and `max_chunk_len` allow; False, and no change, if blocks run out."""
        start = seq.num_computed_tokens
        num_new_tokens = seq.num_tokens - start
        if num_new_tokens > 1:
            num_new_tokens = min(num_new_tokens, step.budget, self.max_chunk_len)
        if num_new_tokens == 0:  # caught up: a beam that waits for others, or the last token is in flight
            return True
        if not self.block_manager.try_allocate(seq, start + num_new_tokens):
            return False
        step.chunks.append((seq, start, num_new_tokens))
        step.budget -= num_new_tokens
        seq.num_computed_tokens = start + num_new_tokens
        return True

    def _admit_waiting(self, step: Draft) -> None:
        """Let waiting sequences run, in order, as long as the first one finds room for all of its tokens."""
        blocks = self.block_manager
        num_reserved = sum([max(0, blocks.num_missing_blocks(seq)) for seq in self.running]) if self.waiting else 0
        while self.waiting and step.budget:
            seq = self.waiting.first
            has_place = self.running.num_places + seq.num_places <= self.max_num_seqs
            if not has_place or not self.preemption.try_admit(seq, num_reserved):
                self.observer.on_wait(seq, has_place, blocks.num_missing_blocks(seq), num_reserved)
                break
            step.admitted.append(seq)
            self.running.add(self.waiting.pop())
            self.observer.on_admit(seq)
            seq.note_cached_tokens()
            has_room = self._try_give_tokens(seq, step)
            assert has_room, "an admitted sequence fits"
            num_reserved += blocks.num_missing_blocks(seq)
        if self.waiting and self.running and not step.chunks and self.in_flight == [step]:
            # skip at first reading: beams that have caught up hold the blocks that others of their search need
            self._preempt_last(step, self.waiting.first)
            self._admit_waiting(step)

    def _launch(self, draft: Draft) -> SchedulerOutput:
        """The step is decided: append a placeholder for each token that it draws."""
        step = finish_draft(draft, self.max_num_batched_tokens - draft.budget, self.preemption.take_moves())
        if not step.chunks:
            self.in_flight.pop()
            return step
        self.in_flight[-1] = step
        for row, seq in enumerate(step.samples):
            if seq.children:
                forks.start_children(self, seq)
            if seq.num_tokens + 1 < seq.max_num_tokens and not seq.is_beam:  # no step needs K and V of the last token
                seq.expect_token(row)
        self.observer.on_schedule(step, self.running, self.block_manager)
        return step

    def release(self, seq: Sequence) -> None:
        """Take the blocks of `seq`, and forget the placeholders of its tokens in flight."""
        self.preemption.drop(seq)
        seq.expect_nothing()

    def _preempt_last(self, step: Draft, needy: Sequence) -> Sequence:
        """The last sequence gives up its blocks for `needy`; a caught-up beam is queued by `resume`, with a token."""
        assert self.in_flight == [step], "`can_schedule_ahead` has found blocks for all"
        seq = self.running.pop()
        has_caught_up = seq.num_computed_tokens == seq.num_tokens
        step.preempted.append(seq)
        self.observer.on_preempt(seq, self.preemption.preempt(seq), needy)
        seq.num_preemptions += 1
        seq.status = SequenceStatus.WAITING
        if not has_caught_up:
            self.waiting.add(seq)
        return seq
