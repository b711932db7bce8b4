"""Tokens that are not known yet: a step in flight samples them, or they are drafts.

Both follow the known tokens of a sequence, and may still change: `unknown_token_ids`. `num_tokens` counts them, and
`num_known_tokens` does not. The steps that are scheduled compute their K and V, but the prefix cache learns only known
tokens (`memory/prefix_cache.py`).

**In flight.** With overlap, the next step is scheduled, built and launched while the device computes the step before.
Of a token in flight, the next step needs to know only where the device keeps it. So its place holds the placeholder
-1 - row, where row is its row among the tokens of the step:

    step N      is scheduled     token_ids of A: [ 11  7  42 ] -1      of B: [ 5  90 ] -2      num_tokens 4 and 3
    step N + 1  is scheduled     its input ids are -1 and -2; the device replaces them by the tokens
    step N      has run          token_ids of A: [ 11  7  42  63 ]     of B: [ 5  90  0 ], where 0 ends B
    step N + 1  has run          its token for A is kept, its token for B is dropped

    without overlap     launch N     wait N       update N     launch N+1     wait N+1
    with overlap        launch N     launch N+1   wait N       update N       launch N+2     wait N+1

The blocks of B are free as soon as step N has run, although step N + 1 still writes to them: the device computes in the
order of the launches, so their next owner writes its K and V later, and reads them after that. The same holds for the
slot of a state.

**Drafts.** A draft is a decode of its own: a chunk of one token, whose row attends to the tokens before it, drafts
included, since each layer stores the K and V of all rows before it attends. So kernels, CUDA graphs and ranks see
nothing new. When the step has run, the drafts are compared with what the rows have drawn (`drafter.py`), and
`BlockManager.rewind` gives up what was computed in vain.
"""

from array import array
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from nanovllm import sequence
from nanovllm.scheduler import Chunk, Step
from nanovllm_extras.records.full_sequence import Sequence, own_sequences
from nanovllm_extras.sampling.thinking_budget import ThinkingBudget

Drafts = dict[Sequence, list[int]]
"""Of each sequence that has some, in the order of the running sequences."""


class Verification(NamedTuple):
    """A step with drafts, from `schedule()` to `update()`."""

    planned: Step  # where a sequence's token and its drafts are one chunk
    drafts: Drafts
    rows: list[range]  # for each of `planned.samples`, its rows in the step that runs


class Pending:
    """`steps` are scheduled and not updated yet, the oldest first. The newest one may have drafts: `verification`."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.verification: Verification | None = None

    def add(self, planned: Step, drafts: Drafts, expects_tokens: bool) -> Step:
        """Add a step and return it with a row for each draft.

        expects_tokens: give the tokens that it samples their places, so that the next step can be scheduled
        """
        step = planned
        if drafts:
            step, rows = one_row_each(planned, drafts)
            self.verification = Verification(planned, drafts, rows)
        elif expects_tokens:
            for row, seq in enumerate(own_sequences(step.samples)):
                if seq.num_tokens + 1 < seq.max_num_tokens:  # no step computes K and V of the last token
                    expect_token(seq, row)
        self.steps.append(step)
        return step

    def confirm(self, step: Step, num_kept: Iterable[int]) -> tuple[Step, list[int]]:
        """Return a step with drafts as if only the right ones had been drawn, and the rows of its samples.

        num_kept: for each sample of the planned step, how many of its first rows are right
        """
        assert self.verification is not None
        planned, _, all_rows = self.verification
        samples: list[sequence.Sequence] = []
        places: list[int] = []
        kept: list[int] = []
        for seq, place, rows, count in zip(planned.samples, planned.sampled_chunks, all_rows, num_kept, strict=True):
            samples += [seq] * count
            places += [place] * count
            kept += rows[:count]
        return replace(planned, samples=samples, sampled_chunks=places), kept

    def end_step(self) -> None:
        """Remove the oldest step, which has run."""
        self.steps.pop(0)
        self.verification = None

    def drop_all(self) -> None:
        """Forget all steps, which have failed."""
        self.steps, self.verification = [], None

    def has_drafts(self, seq: Sequence) -> bool:
        """Return whether `seq` has drafts that are not verified."""
        has_some = self.verification is not None and seq in self.verification.drafts
        return has_some and seq.num_tokens > seq.num_known_tokens


def expect_token(seq: Sequence, row: int) -> None:
    """Append a placeholder for the token that a step in flight samples in `row`."""
    seq.unknown_token_ids.append(-1 - row)
    seq.num_tokens += 1


def place_drafts(seq: Sequence, token_ids: list[int]) -> None:
    """Let drafts follow the known tokens, so that `num_tokens` counts them."""
    seq.unknown_token_ids = array("i", token_ids)
    seq.num_tokens = seq.num_known_tokens + len(token_ids)


def forget_unknown(seq: Sequence) -> None:
    """Remove placeholders and drafts."""
    del seq.unknown_token_ids[:]
    seq.num_tokens = seq.num_known_tokens


def as_if(seq: Sequence, token_ids: list[int]) -> Sequence:
    """Return a copy of `seq` in which `token_ids` follow its known tokens."""
    seen: Sequence = copy(seq)
    seen.token_ids = seq.token_ids + array("i", token_ids)
    return seen


def needs_token(seq: Sequence) -> bool:
    """Return whether the token in flight must be known before the next one is sampled."""
    if not seq.processors or seq.finish_reason is not None or seq.num_known_tokens + 1 >= seq.max_num_tokens:
        return False
    return any([reads_newest(processor, seq) for processor in seq.processors])


def reads_newest(processor: Any, seq: Sequence) -> bool:
    """Return whether a processor of `seq` reads the token in flight to change the logits of the next one."""
    if isinstance(processor, ThinkingBudget):  # only where the budget ends, as answers may long go on after it
        return processor.may_force(seq, seq.num_known_tokens + 1)
    return bool(processor.reads_output)


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
    samples: list[sequence.Sequence] = []
    sampled_chunks: list[int] = []
    rows: list[range] = []
    for one, i in zip(own_sequences(planned.samples), planned.sampled_chunks, strict=True):
        num_rows = planned.chunks[i][2]
        rows.append(range(len(samples), len(samples) + num_rows))
        samples += [one, *(as_if(one, drafts[one][:j]) if one.processors else one for j in range(1, num_rows))]
        sampled_chunks += range(firsts[i], firsts[i] + num_rows)
    step = replace(planned, chunks=chunks, num_decodes=len(chunks), samples=samples, sampled_chunks=sampled_chunks)
    return step, rows
