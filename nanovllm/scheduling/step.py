"""One step's work, as the scheduler decides it: what the engine builds a batch from. Records only, without tensors."""

from dataclasses import dataclass, field

from nanovllm.scheduling.sequence import Sequence

Chunk = tuple[Sequence, int]
"""A sequence, and how many of its tokens are to be computed in this step."""

BlockPairs = list[tuple[int, int]]
"""(source, destination)"""


@dataclass(frozen=True)
class BlockMoves:
    """Blocks to be copied before a step's forward pass, in this order of kinds."""

    swap_outs: BlockPairs = field(default_factory=list)  # device -> host
    swap_ins: BlockPairs = field(default_factory=list)  # host -> device
    copies: BlockPairs = field(default_factory=list)  # device -> device: copy-on-write


@dataclass(frozen=True)
class SchedulerOutput:
    """Chunks of one new token, the decodes, come first, then prefill chunks; without any there is nothing to do."""

    chunks: list[Chunk] = field(default_factory=list)
    num_decodes: int = 0
    num_scheduled_tokens: int = 0
    preempted: list[Sequence] = field(default_factory=list)
    moves: BlockMoves = field(default_factory=BlockMoves)
    kv_tokens_stored: int = 0
    """Tokens whose K and V are in the cache when the step has run, tokens in shared blocks counted once."""
    kv_slots_reserved: int = 0
    """Slots of all blocks that are owned; those that hold no token are the waste."""
    samples: list[Sequence] = field(default_factory=list, init=False)
    """Who gets a token by this step: whoever catches up by its chunk, and its children, which come to life then."""
    sampled_chunks: list[int] = field(default_factory=list, init=False)
    """For each of them the place in `chunks` of the sequence whose last row it draws from: itself or its parent."""

    def __post_init__(self) -> None:
        samples, sampled_chunks = self.samples, self.sampled_chunks
        for i, (seq, num_new_tokens) in enumerate(self.chunks):
            if seq.num_computed_tokens + num_new_tokens == seq.num_tokens:
                samples.append(seq)
                sampled_chunks.append(i)
                if seq.children:
                    samples.extend(seq.children)
                    sampled_chunks.extend([i] * len(seq.children))

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_scheduled_tokens - self.num_decodes
