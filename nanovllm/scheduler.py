"""Who gets how many tokens this step.

There is no prefill phase and no decode phase. Every sequence has `num_tokens` tokens, of which `num_computed_tokens`
are in the KV cache; each step hands out a budget of tokens so that the sequences catch up, and one that has caught up
gets a new token. So a decode is a chunk of one token, a prefill is one or several larger chunks, and chunked prefill
(Sarathi, Agrawal et al. 2023, https://arxiv.org/abs/2308.16369), prefix hits and resumption after preemption are all
the same.

This file decides admission, the share of each step, preemption and when a sequence is done. It knows no tensors and no
text. Called by `LLMEngine.step()`: `schedule()` before the forward pass, `update()` after it.

    budget 8    A: 20 tokens, 19 computed   -> 1 new token  (decode)
                B: 11 tokens,  4 computed   -> 7 new tokens (prefill chunk; budget used up)
                C: 30 tokens, waiting       -> waits
"""

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence, SequenceStatus

Chunk = tuple[Sequence, int]
"""A sequence, and how many of its tokens are to be computed in this step."""


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's work; decodes (one new token each) come first, then prefill chunks."""

    chunks: list[Chunk]
    num_decodes: int
    num_scheduled_tokens: int
    num_preempted: int
    kv_tokens_stored: int
    """Tokens whose K and V are in the cache when the step has run, tokens in shared blocks counted once."""
    kv_slots_reserved: int
    """Slots of all blocks that are owned; those that hold no token are the waste."""

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_scheduled_tokens - self.num_decodes


class Scheduler:
    """First come, first served; the newest sequence is preempted when blocks run out.

    `block_manager` owns the cache; `max_model_len` bounds prompt and output of a sequence together.
    """

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.prefix_cache_query_tokens = 0
        self.prefix_cache_hit_tokens = 0

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        assert seq.num_tokens < self.max_model_len, "checked when the request arrived"
        assert seq.num_tokens <= self.block_manager.capacity, "checked when the request arrived"
        # the newest token needs no room in the cache yet, so a sequence alone can outgrow it by one
        limits = [self.max_model_len, self.block_manager.capacity + 1]
        if seq.sampling_params.max_tokens is not None:
            limits.append(seq.num_prompt_tokens + seq.sampling_params.max_tokens)
        seq.max_num_tokens = min(limits)
        self.waiting.append(seq)

    def schedule(self) -> SchedulerOutput:
        """Give the running sequences their next tokens, then admit waiting ones while budget and blocks last."""
        blocks, budget = self.block_manager, self.max_num_batched_tokens
        decodes: list[Chunk] = []
        prefills: list[Chunk] = []
        num_preempted = 0

        i = 0
        while i < len(self.running) and budget:
            seq = self.running[i]
            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)
            if not blocks.try_allocate(seq, seq.num_computed_tokens + num_new_tokens):
                self._preempt(self.running.pop())  # the newest, and maybe `seq` itself; then try again
                num_preempted += 1
                continue
            (decodes if num_new_tokens == 1 else prefills).append((seq, num_new_tokens))
            budget -= num_new_tokens
            i += 1

        # what was just preempted would only come back to be preempted again
        while self.waiting and budget and not num_preempted and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not blocks.try_admit(seq):
                break
            self.running.append(self.waiting.popleft())
            seq.status = SequenceStatus.RUNNING
            self._count_prefix_hit(seq)
            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)
            has_room = blocks.try_allocate(seq, seq.num_computed_tokens + num_new_tokens)
            assert has_room, "an admitted sequence fits"
            (decodes if num_new_tokens == 1 else prefills).append((seq, num_new_tokens))
            budget -= num_new_tokens

        assert decodes or prefills or not self.has_unfinished(), "some sequence always advances"
        return self._output(decodes, prefills, self.max_num_batched_tokens - budget, num_preempted)

    def update(self, scheduled: SchedulerOutput, new_token_ids: SequenceOf[int]) -> list[Sequence]:
        """Record that a step has run; return the sequences that got a token, some of which are finished by it.

        `new_token_ids` holds one token for each chunk that catches up, in the order of the chunks.
        """
        tokens = iter(new_token_ids)
        advanced = []
        num_finished = 0
        for seq, num_new_tokens in scheduled.chunks:
            seq.num_computed_tokens += num_new_tokens
            if seq.num_computed_tokens < seq.num_tokens:
                continue
            token_id = next(tokens)
            seq.append_token(token_id)
            advanced.append(seq)
            if seq.num_tokens >= seq.max_num_tokens or token_id in seq.stop_token_ids:
                self._finish(seq, token_id)
                num_finished += 1
        if num_finished:
            self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]
        return advanced

    def rollback(self, scheduled: SchedulerOutput) -> None:
        """Take back a step that failed: its sequences wait again, in their order, and lose no token."""
        for seq, _ in scheduled.chunks:
            self.block_manager.unregister(seq, seq.num_computed_tokens)
        chunk_seqs = {id(seq) for seq, _ in scheduled.chunks}
        for seq in reversed(self.running):
            if id(seq) in chunk_seqs:
                self._release(seq)
        self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]

    def abort(self, seq: Sequence) -> None:
        """End `seq` at once, wherever it is."""
        self.block_manager.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = "abort"
        self.waiting = deque(other for other in self.waiting if other is not seq)
        self.running = [other for other in self.running if other is not seq]

    def _preempt(self, seq: Sequence) -> None:
        """Take the blocks of `seq`; it keeps its tokens and computes them anew when it is admitted again."""
        self._release(seq)
        self.num_preemptions += 1

    def _release(self, seq: Sequence) -> None:
        self.block_manager.free(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)  # older than all that wait, since the running ones arrived before them

    def _count_prefix_hit(self, seq: Sequence) -> None:
        """A sequence that resumes after preemption meets its own blocks again: that is no hit of the prefix cache."""
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            self.prefix_cache_query_tokens += seq.num_prompt_tokens
            self.prefix_cache_hit_tokens += seq.num_cached_tokens

    def _finish(self, seq: Sequence, token_id: int) -> None:
        """Free a sequence that its newest token has ended, and say why it ended."""
        if token_id in seq.stop_token_ids:
            seq.finish_reason, seq.stop_reason = "stop", seq.stop_token_ids[token_id]
        else:
            seq.finish_reason = "length"
            is_wanted_length = seq.num_output_tokens == seq.sampling_params.max_tokens
            if not is_wanted_length and seq.num_tokens < self.max_model_len:
                seq.stop_reason = "kv_cache"  # alone in the cache, and still no room for its next K and V
        self.block_manager.free(seq)
        seq.status = SequenceStatus.FINISHED

    def _output(
        self, decodes: list[Chunk], prefills: list[Chunk], num_scheduled_tokens: int, num_preempted: int
    ) -> SchedulerOutput:
        block_size = self.block_manager.block_size
        num_used = self.block_manager.num_used_blocks
        num_duplicates = self.block_manager.num_references - num_used  # shared blocks are always full
        num_stored = sum([seq.num_computed_tokens for seq in self.running]) + num_scheduled_tokens
        return SchedulerOutput(
            chunks=decodes + prefills,
            num_decodes=len(decodes),
            num_scheduled_tokens=num_scheduled_tokens,
            num_preempted=num_preempted,
            kv_tokens_stored=num_stored - num_duplicates * block_size,
            kv_slots_reserved=num_used * block_size,
        )
