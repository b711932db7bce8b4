"""What one step computes: the record that the scheduler hands to the rest of the engine. Integers, no tensors.

A has 20 tokens, B has 30:

    chunks    [(A, 19, 1), (B, 4, 7)]     A decodes its token 19; B prefills its tokens 4 … 10
    samples   [A]                         19 + 1 == 20: A gets a new token; B goes on with its prompt
"""

from dataclasses import dataclass, field

from nanovllm.sequence import Sequence

Chunk = tuple[Sequence, int, int]
"""(sequence, start, num_new_tokens): the step computes the tokens [start, start + num_new_tokens)."""

BlockPairs = list[tuple[int, int]]
"""(source, destination) of each block that is copied."""


@dataclass(frozen=True)
class BlockMoves:
    """Whole blocks to be copied before a step's forward pass."""

    copies: BlockPairs = field(default_factory=list)  # copy-on-write


@dataclass(frozen=True)
class SchedulerOutput:
    """Chunks of one new token, the decodes, come first, then prefill chunks; without any there is nothing to do."""

    chunks: list[Chunk] = field(default_factory=list)
    num_decodes: int = 0
    num_scheduled_tokens: int = 0
    samples: list[Sequence] = field(default_factory=list)
    """Sequences that get a token: those whose chunk ends at `num_tokens`, and their children."""
    sampled_chunks: list[int] = field(default_factory=list)
    """For each of `samples`, the place in `chunks` of its own or its parent's chunk. The chunk's last row draws."""
    admitted: list[Sequence] = field(default_factory=list)  # sequences that run from this step on
    preempted: list[Sequence] = field(default_factory=list)
    moves: BlockMoves = field(default_factory=BlockMoves)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_scheduled_tokens - self.num_decodes


def make_step(
    chunks: list[Chunk], num_tokens: int, admitted: list[Sequence], preempted: list[Sequence], moves: BlockMoves
) -> SchedulerOutput:
    """Put decodes first, then prefill chunks, each in the order in which they were decided; find who gets a token."""
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
    return SchedulerOutput(chunks, num_decodes, num_tokens, samples, sampled_chunks, admitted, preempted, moves)
