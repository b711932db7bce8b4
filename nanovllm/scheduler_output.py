"""One step's work, as the scheduler decides it: what the engine builds a batch from. Records only, without tensors."""

from dataclasses import dataclass, field

from nanovllm.sequence import Sequence

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


@dataclass
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
    samples: list[tuple[int, Sequence]] = field(init=False)
    """Who gets a token by this step, and the place in `chunks` of the sequence whose last row it is drawn from."""

    def __post_init__(self) -> None:
        self.samples = find_samples(self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_scheduled_tokens - self.num_decodes


def find_samples(chunks: list[Chunk]) -> list[tuple[int, Sequence]]:
    """Whoever catches up by its chunk. Children that are about to come to life draw from their parent's row."""
    samples: list[tuple[int, Sequence]] = []
    for i, (seq, num_new_tokens) in enumerate(chunks):
        if seq.num_computed_tokens + num_new_tokens == seq.num_tokens:
            samples.append((i, seq))
            if seq.children:
                samples += [(i, child) for child in seq.children]
    return samples
