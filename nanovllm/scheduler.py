"""The scheduler: which sequence computes how many tokens in the next step?

Prefill and decode are not separate phases. A sequence has `num_tokens` tokens, of which `num_computed_tokens` are
computed. Each step distributes a token budget so that the sequences catch up, and a sequence that catches up gets a new
token. So a decode is a chunk of one token, and a prefill is one or several larger chunks. Chunked prefill (Sarathi,
Agrawal et al. 2023, https://arxiv.org/abs/2308.16369), prefix hits and resumption after preemption are the same lines
of code.

This file decides admission, the chunks of each step, preemption, and when a sequence ends. The `BlockManager` says
whether there is room. The engine calls `schedule()` before the forward pass and `update()` after it. `Step` is the
record that the scheduler passes on.
"""

from dataclasses import dataclass, field, replace

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence

Chunk = tuple[Sequence, int, int]
"""(sequence, start, num_new_tokens): the step computes the tokens [start, start + num_new_tokens)."""


@dataclass(frozen=True)
class Step:
    """What one step computes: integers, no tensors. Decodes (chunks of one new token) come first, then prefill chunks.

    A has 20 tokens, B has 30:

        chunks    [(A, 19, 1), (B, 4, 7)]     A decodes its token 19; B prefills its tokens 4 … 10
        samples   [A]                         19 + 1 == 20: A gets a new token; B goes on with its prompt
    """

    chunks: list[Chunk] = field(default_factory=list)  # empty if there is nothing to do
    num_decodes: int = 0
    num_scheduled_tokens: int = 0
    samples: list[Sequence] = field(default_factory=list)
    """Sequences that get a token: those whose chunk ends at `num_tokens`, and their children."""
    sampled_chunks: list[int] = field(default_factory=list)
    """For each of `samples`, the index in `chunks` of its own or its parent's chunk: the last row gives the logits."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) of each block that is copied before the forward pass: copy-on-write."""
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """First come, first served. When blocks run out, the sequence that came last is preempted.

    `max_model_len` limits prompt and output together. Both queues keep the order of arrival: the first of `waiting` is
    admitted next, and the last of `running` is preempted first, unless `choose_victim` takes another one.

    An interrupt can come between any two lines. A sequence enters its next queue before it leaves the last one, and
    owns blocks only while it is in a queue, so that an engine that goes on (`LLMEngine.on_failure`) can find it.
    """

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self.block_manager = block_manager
        self.observer = block_manager.observer
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Its children wait with it. The engine has checked that it can be served."""
        capacity = self.block_manager.capacity
        assert seq.num_tokens <= min(self.max_model_len - 1, capacity)
        for one in (seq, *seq.children):
            wanted, max_tokens = self.max_model_len, one.sampling_params.max_tokens
            if max_tokens is not None:
                wanted = min(wanted, one.num_prompt_tokens + max_tokens)
            one.max_num_tokens = min(wanted, capacity + 1)  # K and V of the last token need not be in the cache
            one.limit_reason = "kv_cache" if one.max_num_tokens < wanted else None
        self.waiting.append(seq)
        self.observer.on_add(seq)

    def schedule(self) -> Step:
        """Give the running sequences their next tokens, then admit waiting ones while budget and blocks last.

        With a budget of 8:

            A  20 tokens, 19 computed    gets 1: a decode            budget 7
            B  11 tokens,  4 computed    gets 7: a prefill chunk     budget 0
            C  30 tokens, waits          is not admitted in this step
        """
        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        for seq in self.running.copy():
            if preempted and seq in preempted:  # by `make_room`, never one before `seq`
                continue
            num_new_tokens = self.share_of(seq, budget)
            if num_new_tokens and self.make_room(seq, num_new_tokens, preempted):
                chunks.append((seq, seq.num_computed_tokens, num_new_tokens))
                seq.num_computed_tokens += num_new_tokens
                budget -= num_new_tokens
        if not preempted or not chunks:  # a sequence that this step preempts waits, unless nothing runs
            budget = self.admit_waiting(budget, chunks)
        step = make_step(chunks, self.max_num_batched_tokens - budget)
        step = replace(step, copies=self.block_manager.take_copies(), preempted=preempted)
        for seq in step.samples:
            while seq.children:  # the last chunk of the prompt is scheduled: the children share its blocks from now on
                self.fork(seq, seq.children[0])
                seq.children.pop(0)
        if step.chunks:
            self.observer.on_schedule(step, self.running, self.block_manager)
        return step

    def update(self, step: Step, new_token_ids: list[int]) -> list[tuple[int, Sequence]]:
        """Append the sampled tokens of a step, one for each of `step.samples`, and end sequences that are done.

        Returns (row, sequence) for each sequence that got a token. Sequences that ended after `schedule()` get none:

            samples [A, B], new_token_ids [63, 7], B was aborted    -> [(0, A)], and 63 is A's newest token
        """
        assert len(new_token_ids) == len(step.samples)
        advanced = [(row, seq) for row, seq in enumerate(step.samples) if seq.finish_reason is None]
        for row, seq in advanced:
            token_id = new_token_ids[row]
            seq.append_token(token_id)
            if token_id in seq.stop_token_ids:
                self.finish(seq, "stop", seq.stop_token_ids[token_id])
            elif len(seq.token_ids) >= seq.max_num_tokens:
                self.finish(seq, "length", seq.limit_reason)
        self.observer.on_update(step, new_token_ids)
        return advanced

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, whose tokens begin with all computed tokens of `parent`, share its blocks and run."""
        child.num_cached_tokens = parent.num_cached_tokens
        self.observer.on_fork(parent, child)
        place = self.running.index(parent) + child.sample_index - parent.sample_index  # after the earlier siblings
        self.running.insert(place, child)
        self.block_manager.fork(parent, child)

    def finish(self, seq: Sequence, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """End `seq`, which may be running or waiting."""
        seq.finish_reason, seq.stop_reason = finish_reason, stop_reason
        self.block_manager.free(seq)
        for queue in (self.running, self.waiting):
            if seq in queue:
                queue.remove(seq)
        self.observer.on_finish(seq)

    # ---- the parts of `schedule`

    def share_of(self, seq: Sequence, budget: int) -> int:
        """Return the number of tokens of `seq` that the step computes, if there is room for their K and V."""
        return min(seq.num_tokens - seq.num_computed_tokens, budget)

    def make_room(self, seq: Sequence, num_new_tokens: int, preempted: list[Sequence]) -> bool:
        """Allocate blocks for the next tokens of a running sequence, preempting others if necessary.

        Returns False if `seq` itself was preempted.
        """
        while not self.block_manager.try_allocate(seq, seq.num_computed_tokens + num_new_tokens):
            candidates = self.running[self.running.index(seq) :]  # those before it have their chunks
            victim = self.choose_victim(candidates, seq)
            if victim not in candidates:
                raise ValueError(
                    f"choose_victim must return one of its candidates, got {getattr(victim, 'request_id', victim)!r}"
                )
            self.preempt(victim, needy=seq)
            self.waiting.insert(0, victim)
            self.running.remove(victim)
            preempted.append(victim)
            if victim is seq:
                return False
        return True

    def choose_victim(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        """Return the sequence that gives up its blocks: the one that came last.

        candidates: the running sequences that have no chunk in this step yet, in order, beginning with `needy`. A
        sequence with a chunk must keep its blocks, because the step writes to them.
        """
        return candidates[-1]

    def preempt(self, seq: Sequence, needy: Sequence) -> None:
        """Free the blocks of `seq`, which keeps its tokens. K and V that the prefix cache loses are computed again."""
        self.block_manager.free(seq)
        self.observer.on_preempt(seq, needy)

    def admit_waiting(self, budget: int, chunks: list[Chunk]) -> int:
        """Let waiting sequences run, in order, as long as there is room for all tokens of the first one.

        Adds to `chunks`, and returns the rest of the budget.
        """
        blocks = self.block_manager
        if not self.waiting:
            return budget
        # blocks that partly computed prompts will still need
        num_reserved = sum([blocks.num_missing_blocks(seq) for seq in self.running])
        # the places of children that have not started yet are reserved
        num_places = self.max_num_seqs - sum([1 + len(seq.children) for seq in self.running])
        while self.waiting and budget:
            seq = self.waiting[0]
            has_place = 1 + len(seq.children) <= num_places
            if not has_place or not blocks.try_admit(seq, num_reserved):
                self.observer.on_wait(seq, has_place, blocks.num_missing_blocks(seq), num_reserved)
                break
            self.running.append(seq)
            self.waiting.pop(0)
            self.observer.on_admit(seq)
            if seq.num_cached_tokens is None:  # admitted for the first time: its computed tokens are cached ones
                seq.num_cached_tokens = seq.num_computed_tokens
            num_new_tokens = self.share_of(seq, budget)
            has_room = blocks.try_allocate(seq, seq.num_computed_tokens + num_new_tokens)
            assert has_room, "there is room for an admitted sequence"
            chunks.append((seq, seq.num_computed_tokens, num_new_tokens))
            seq.num_computed_tokens += num_new_tokens
            budget -= num_new_tokens
            num_reserved += blocks.num_missing_blocks(seq)
            num_places -= 1 + len(seq.children)
        return budget


def make_step(chunks: list[Chunk], num_tokens: int) -> Step:
    """Put decodes first, then prefill chunks, both in the given order, and find the sequences that get a token."""
    num_decodes = len(chunks)
    if num_tokens > num_decodes:  # some are prefill chunks
        decodes = [chunk for chunk in chunks if chunk[2] == 1]
        chunks, num_decodes = decodes + [chunk for chunk in chunks if chunk[2] > 1], len(decodes)
    samples: list[Sequence] = []
    sampled_chunks: list[int] = []
    for i, (seq, start, num_new_tokens) in enumerate(chunks):
        if start + num_new_tokens == seq.num_tokens:
            samples += (seq, *seq.children)
            sampled_chunks += [i] * (1 + len(seq.children))
    return Step(chunks, num_decodes, num_tokens, samples, sampled_chunks)
