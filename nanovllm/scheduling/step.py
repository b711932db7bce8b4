"""One step's work: a `Draft` while the scheduler decides it, then a `SchedulerOutput`. Records only, without tensors.

A has 20 tokens, B has 30:

    chunks    [(A, 19, 1), (B, 4, 7)]     A decodes its token 19; B prefills its tokens 4 … 10
    samples   [A]                         19 + 1 == 20: A gets a new token; B goes on with its prompt
"""

from dataclasses import dataclass, field

from nanovllm.scheduling.sequence import Sequence

Chunk = tuple[Sequence, int, int]
"""(sequence, start, num_new_tokens): the step computes the tokens [start, start + num_new_tokens)."""

BlockPairs = list[tuple[int, int]]  # (source, destination)


@dataclass(frozen=True)
class BlockMoves:
    """Whole blocks to be copied before a step's forward pass, in this order."""

    swap_outs: BlockPairs = field(default_factory=list)  # device -> host
    swap_ins: BlockPairs = field(default_factory=list)  # host -> device
    copies: BlockPairs = field(default_factory=list)  # device -> device: copy-on-write


class Draft:
    """A step while the scheduler decides it: `budget` tokens are left to give."""

    def __init__(self, max_num_batched_tokens: int, new_blocks: set[int]) -> None:
        self.budget = max_num_batched_tokens
        self.chunks: list[Chunk] = []
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.samples: list[Sequence] = []  # always empty: `roll_back` reads drafts and outputs alike
        self.new_blocks = new_blocks


@dataclass(frozen=True)
class SchedulerOutput:
    """Chunks of one new token, the decodes, come first, then prefill chunks; without any there is nothing to do."""

    chunks: list[Chunk] = field(default_factory=list)
    num_decodes: int = 0
    num_scheduled_tokens: int = 0
    admitted: list[Sequence] = field(default_factory=list)  # sequences that run from this step on
    preempted: list[Sequence] = field(default_factory=list)
    new_blocks: set[int] = field(default_factory=set)
    """Blocks that the prefix cache knows already, although only this step fills them: forgotten if the step fails."""
    moves: BlockMoves = field(default_factory=BlockMoves)
    samples: list[Sequence] = field(default_factory=list)
    """Sequences that get a token: those whose chunk ends at `num_tokens`, and their children."""
    sampled_chunks: list[int] = field(default_factory=list)
    """For each of `samples` the place in `chunks` of its chunk, or its parent's, whose last row draws its token."""

    def __post_init__(self) -> None:
        samples, sampled_chunks = self.samples, self.sampled_chunks
        for i, (seq, start, num_new_tokens) in enumerate(self.chunks):
            if start + num_new_tokens == seq.num_tokens:
                samples += (seq, *seq.children)
                sampled_chunks += [i] * (1 + len(seq.children))

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_scheduled_tokens - self.num_decodes


def finish_draft(draft: Draft, num_tokens: int, moves: BlockMoves) -> SchedulerOutput:
    """Decodes first, then prefill chunks, each in the order in which they were decided."""
    chunks, num_decodes = draft.chunks, len(draft.chunks)
    if num_tokens > num_decodes:  # some are prefill chunks
        decodes = [chunk for chunk in chunks if chunk[2] == 1]
        chunks, num_decodes = decodes + [chunk for chunk in chunks if chunk[2] > 1], len(decodes)
    return SchedulerOutput(chunks, num_decodes, num_tokens, draft.admitted, draft.preempted, draft.new_blocks, moves)
