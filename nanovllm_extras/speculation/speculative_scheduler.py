"""Speculation: a step computes several tokens of a sequence that decodes, all but the first of them guessed.

A decode reads all weights for one token; reading them for four costs hardly more. So a `Proposer` guesses the next
tokens, the *drafts*. They are put behind the known tokens, and the step computes them like a chunk of a prompt, with a
row of logits for each. The row of each token draws the next one, as if the draft were known:

    position        6      7      8      9      tokens up to position 6 are known: d1 d2 d3 are drafts
    the step runs   t6     d1     d2     d3     one forward pass, four rows
    its rows draw   t7     t8     t9     t10    t7 = d1, t8 = d2, but t9 is not d3
    kept            t7     t8     t9            t10 was drawn after the wrong d3, and is dropped

**Outputs are exactly those without speculation.** If t7 is d1, the row of d1 has computed what the next step would
compute. It draws with the random number of (seed, position), as that step would. So t8 is the token that the next
step would draw, bit for bit where rows do not depend on the batch; and by the same argument t9. The first draft that
differs ends the argument, and nothing behind it is used. No rule of acceptance is needed: a guess is checked.

A draft is a decode of its own: a chunk of one token, whose row attends to the tokens before it, drafts included, since
each layer stores the K and V of all rows before it attends. So kernels, CUDA graphs and ranks see nothing new.

After the step, `num_computed_tokens` goes back to the drafts that were right, and blocks behind them are given back.
The prefix cache learns only known tokens. `num_tokens` counts drafts while a step computes them, `num_known_tokens`
never.

Who gets no drafts: sequences whose next logits depend on more than their tokens (a grammar, a beam search, functions of
the user); steps that compute prompts, or whose tokens would be more than `max_rows`; sequences that `patience.py` gives
up on. Drafts end before a token that would end the sequence.
"""

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from nanovllm.block_tables import IntArray
from nanovllm.scheduler import Chunk, Step
from nanovllm_extras.extended_scheduler import ExtendedScheduler, count_places
from nanovllm_extras.full_request import Request
from nanovllm_extras.full_sequence import Sequence
from nanovllm_extras.known_tokens import grow
from nanovllm_extras.logits import BadWords, Penalties
from nanovllm_extras.speculation.blocks import shrink
from nanovllm_extras.speculation.patience import Patience

Drafts = dict[Sequence, list[int]]
"""Of each sequence that has some, in the order of the running sequences."""


class Proposer(Protocol):
    """Proposes draft tokens. Wrong drafts cost time but never change the output."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return drafts for each (sequence, most drafts): tokens that may follow its known ones, possibly none."""


class Verification(NamedTuple):
    """A step with drafts, from `schedule()` to `update()`."""

    planned: Step  # where a sequence's token and its drafts are one chunk
    drafts: Drafts
    rows: list[range]  # for each of `planned.samples`, its rows in the step that runs


class SpeculativeScheduler(ExtendedScheduler):
    """`max_rows` bounds the tokens of a step that has drafts, `max_seqs` its sequences, `max_drafts` those of one."""

    def __init__(
        self, *arguments: Any, proposer: Proposer, max_drafts: int, max_rows: int, max_seqs: int, vocab_size: int
    ) -> None:
        super().__init__(*arguments)
        self.proposer = proposer
        self.max_seqs = max_seqs
        self.max_drafts = min(max_drafts, self.max_chunk_len - 1)
        self.max_rows = min(max_rows, self.max_num_batched_tokens)
        self.vocab_size = vocab_size
        self.requests: Mapping[str, Request] = {}  # the engine's: their stop strings end drafts
        self._patience: dict[Sequence, Patience] = {}
        self._underway: Verification | None = None

    def schedule(self) -> Step:
        drafts = self._draft()
        planned = super().schedule()
        if not drafts:
            return planned
        step, rows = one_row_each(planned, drafts)
        self._underway = Verification(planned, drafts, rows)
        return step

    def update(self, step: Step, new_token_ids: list[int]) -> list[tuple[int, Sequence]]:
        """Update as the parent does. A sequence with drafts may be among the advanced ones several times."""
        if self._underway is None:
            return super().update(step, new_token_ids)
        planned, drafts, all_rows = self._underway
        samples: list[Sequence] = []
        places: list[int] = []
        kept: list[int] = []
        for seq, place, rows in zip(planned.samples, planned.sampled_chunks, all_rows, strict=True):
            drawn = new_token_ids[rows.start : rows.stop]
            num_kept = 1 + (self._verify(seq, drafts[seq], drawn) if seq in drafts else 0)
            samples += [seq] * num_kept
            places += [place] * num_kept
            kept += rows[:num_kept]
        known = replace(planned, samples=samples, sampled_chunks=places)
        advanced = super().update(known, [new_token_ids[row] for row in kept])
        self._underway = None  # not before: if a line above fails, `roll_back` forgets the drafts
        return [(kept[i], seq) for i, seq in advanced]

    def finish(self, seq: Sequence, finish_reason: str, stop_reason: int | str | None = None) -> None:
        super().finish(seq, finish_reason, stop_reason)
        forget_drafts(seq)
        self._patience.pop(seq, None)

    def forget_steps(self) -> None:
        super().forget_steps()
        self._underway = None
        for seq in self.running:
            forget_drafts(seq)

    # ---- before a step

    def _draft(self) -> Drafts:
        """Put drafts after the known tokens of running sequences."""
        drafts: Drafts = {}
        wanted = self._choose()
        if not wanted:
            return drafts
        all_proposed = self.proposer.propose(wanted)
        if not any(all_proposed) or not self.has_blocks_for(wanted):
            return drafts
        for (seq, count), proposed in zip(wanted, all_proposed, strict=True):
            if allowed := self._allow(seq, proposed[:count]):
                place_drafts(seq, allowed)
                drafts[seq] = allowed
            if self.block_manager.num_missing_blocks(seq) < 0:  # a draft model has reserved too many
                self.observer.on_verify(seq, 0, 0, shrink(self.block_manager, seq, seq.num_tokens))
        return drafts

    def _choose(self) -> list[tuple[Sequence, int]]:
        """Return the sequences that are worth drafts, and how many each may have in this step."""
        running = self.running
        room = self.max_rows - len(running)
        if room <= 0 or len(running) > self.max_seqs or (self.waiting and self._may_admit()):
            return []
        wanted = []
        for seq in running:
            if seq.num_tokens - seq.num_computed_tokens > 1:  # a step with prompts has many tokens
                return []
            earned = (self._patience.get(seq) or self._meet(seq)).next_count()
            if earned:
                count = min(earned, self.max_drafts, seq.max_num_tokens - seq.num_known_tokens - 1)
                if count > 0:
                    wanted.append((seq, count))
        share = room // len(wanted) if wanted else room
        if share >= self.max_drafts:
            return wanted
        return [(seq, min(count, max(1, share))) for seq, count in wanted[:room]]

    def _meet(self, seq: Sequence) -> Patience:
        """Return the patience for a new sequence."""
        if seq.children:  # they will share its blocks, and these must hold no drafts
            return Patience(math.inf)
        patience = self._patience[seq] = Patience(0 if can_be_guessed(seq) else math.inf)
        return patience

    def _may_admit(self) -> bool:
        return count_places(self.running) + 1 + len(self.waiting[0].children) <= self.max_num_seqs

    def has_blocks_for(self, wanted: list[tuple[Sequence, int]]) -> bool:
        """Return whether there are blocks for these drafts without preempting a sequence."""
        blocks, counts, num_needed = self.block_manager, dict(wanted), 0
        for seq in self.running:
            num_blocks = -(-(seq.num_known_tokens + counts.get(seq, 0)) // blocks.block_size)
            num_needed += max(0, num_blocks - seq.block_table.length) + seq.has_shared_tail
        num_groups = getattr(blocks, "num_groups", 1)  # of layers, with blocks of their own (`kv_groups/`)
        return num_groups * num_needed <= blocks.num_free_blocks

    def _allow(self, seq: Sequence, proposed: list[int]) -> list[int]:
        """Return the drafts before the first one that would end the sequence or is outside the vocabulary."""
        for i, token_id in enumerate(proposed):
            if token_id in seq.all_stop_token_ids or not 0 <= token_id < self.vocab_size:
                proposed = proposed[:i]
                break
        if not seq.sampling_params.stop_strings or not proposed:
            return proposed
        request = self.requests.get(seq.request_id)
        return [] if request is None else before_stop_string(request, seq, proposed)

    # ---- after a step

    def _verify(self, seq: Sequence, drafts: list[int], drawn: list[int]) -> int:
        """Return how many drafts were right. The sequence drops all drafts; correct ones are appended as usual."""
        if seq.finish_reason is not None:  # it has failed, and owns nothing
            return 0
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == drawn[num_accepted]:
            num_accepted += 1
        forget_drafts(seq)
        seq.num_computed_tokens -= len(drafts) - num_accepted
        given_back = shrink(self.block_manager, seq, seq.num_computed_tokens)
        self._patience[seq].note(len(drafts), num_accepted)
        self.observer.on_verify(seq, len(drafts), num_accepted, given_back)
        return num_accepted


# ---- drafts of one sequence


def can_be_guessed(seq: Sequence) -> bool:
    """Return whether the logits after a draft follow from the tokens before it.

    Penalties and bad words read the output, which `as_if` provides. A grammar keeps a state, a beam search chooses
    otherwise, and a logits processor of the user may do both: their sequences get no drafts.
    """
    return all(
        [not processor.reads_output or isinstance(processor, BadWords | Penalties) for processor in seq.processors]
    )


def place_drafts(seq: Sequence, token_ids: list[int]) -> None:
    """Put drafts after the known tokens, so that `num_tokens` counts them."""
    ids = seq.token_ids
    while ids.length + len(token_ids) > len(ids.data):
        grow(ids)
    ids.data[ids.length : ids.length + len(token_ids)] = token_ids
    seq.num_tokens = ids.length + len(token_ids)


def forget_drafts(seq: Sequence) -> None:
    seq.num_tokens = seq.num_known_tokens


def as_if(seq: Sequence, num_known_tokens: int) -> Sequence:
    """Return a view of `seq` with its first `num_known_tokens` tokens, drafts included, for logits processors."""
    seen = copy(seq)
    seen.token_ids = IntArray.__new__(IntArray)
    seen.token_ids.data, seen.token_ids.length = seq.token_ids.data, num_known_tokens
    return seen


def before_stop_string(request: Request, seq: Sequence, drafts: list[int]) -> list[int]:
    """Return the drafts before the one that would complete a stop string, which may only be a step's last token.

    The text is grown by a copy of the request's detokenizer.
    """
    completion = request.completions[seq.sample_index]
    if len(completion.token_ids) != seq.num_output_tokens:  # a step has failed before the newest token was read
        return []
    detokenizer = completion.detokenizer.copy()
    for i, token_id in enumerate(drafts):
        detokenizer.append(token_id)
        if detokenizer.stop_string is not None:
            return drafts[:i]
    return drafts


# ---- a step


def one_row_each(planned: Step, drafts: Drafts) -> tuple[Step, list[range]]:
    """Return the step in which each draft is a decode, and the rows of each of `planned.samples` in this step.

    planned     chunks [(A, 19, 1), (B, 7, 3)]                         samples [A, B]          B has two drafts
    step        chunks [(A, 19, 1), (B, 7, 1), (B, 8, 1), (B, 9, 1)]   samples [A, B, B, B]    rows [0 … 0], [1 … 3]
    """
    assert all([num_new_tokens == 1 or seq in drafts for seq, _, num_new_tokens in planned.chunks])
    chunks: list[Chunk] = []
    firsts = []  # of each chunk: where its rows begin
    for seq, start, num_new_tokens in planned.chunks:
        firsts.append(len(chunks))
        chunks += [(seq, start + i, 1) for i in range(num_new_tokens)]
    samples: list[Sequence] = []
    sampled_chunks: list[int] = []
    rows: list[range] = []
    for seq, i in zip(planned.samples, planned.sampled_chunks, strict=True):
        num_rows = planned.chunks[i][2]
        rows.append(range(len(samples), len(samples) + num_rows))
        samples += [seq, *(as_if(seq, seq.num_known_tokens + j) if seq.processors else seq for j in range(1, num_rows))]
        sampled_chunks += range(firsts[i], firsts[i] + num_rows)
    step = replace(planned, chunks=chunks, num_decodes=len(chunks), samples=samples, sampled_chunks=sampled_chunks)
    return step, rows


class KnowsRequests:
    """Replaces `LLMEngine.launch_one`, and gives the scheduler the engine's requests."""

    def __init__(self, launch: Callable[[Any], Any], scheduler: SpeculativeScheduler) -> None:
        self._launch = launch
        self._scheduler = scheduler

    def __call__(self, engine: Any) -> Any:
        self._scheduler.requests = engine.requests
        return self._launch(engine)
