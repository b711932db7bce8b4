"""What may be taken for granted of a step whose tokens are still on their way?

With overlap the next step is scheduled, built and launched while the one before runs, so that the device never waits
for the host. All that the next step needs to know of the tokens that are under way is where the device keeps them:

    step N      in flight       A's row is 0, B's row is 1
    step N + 1  is scheduled    token_ids of A: [ 11  7  42  -1 ]    B: [ 5  90  -2 ]
                                the placeholder -1 - row says: the token that step N draws in this row
    step N      lands           token_ids of A: [ 11  7  42  63 ]    B: [ 5  90  end ]: finished
    step N + 1  in flight       its token for A is kept, the one for B is dropped when it lands

Where the token itself is needed, there is no placeholder, and the next step waits. Blocks of a sequence that finishes
are kept until no step that writes to them is in flight. Part of the `Scheduler`, and like it without tensors.
"""

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


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's work; decodes (one new token each) come first, then prefill chunks."""

    chunks: list[Chunk]
    num_decodes: int
    num_scheduled_tokens: int
    preempted: list[Sequence]
    moves: BlockMoves
    kv_tokens_stored: int
    """Tokens whose K and V are in the cache when the step has run, tokens in shared blocks counted once."""
    kv_slots_reserved: int
    """Slots of all blocks that are owned; those that hold no token are the waste."""

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_scheduled_tokens - self.num_decodes


class StepsInFlight:
    """At most two, the older first: it is taken for granted when the younger is scheduled, and lands before it."""

    def __init__(self) -> None:
        self.steps: list[SchedulerOutput] = []
        self.leaving: list[Sequence] = []  # finished, but a step in flight writes to their blocks
        self._samples: list[Sequence] | None = (
            None  # who gets a token by the older step, once that is taken for granted
        )

    def holds(self, seq: Sequence) -> bool:
        return any(other is seq for step in self.steps for other, _ in step.chunks)

    def take_for_granted(self) -> bool:
        """Go on as if the step in flight had landed; False if the next one has to wait for its tokens all the same."""
        assert len(self.steps) == 1, "one step can be in flight while another is scheduled"
        assert self._samples is None, "it is taken for granted once"
        self._samples = count_as_computed(self.steps[0])
        # for the others that token is the last, or not even wanted any more
        going_on = [
            (row, seq)
            for row, seq in enumerate(self._samples)
            if seq.finish_reason is None and seq.num_tokens + 1 < seq.max_num_tokens
        ]
        if any([seq.is_beam or seq.children or seq.reads_output for _, seq in going_on]):
            return False
        for row, seq in going_on:
            seq.expect_token(row)
        return True

    def land(self, step: SchedulerOutput) -> list[Sequence]:
        """The oldest step has ended well; returns the sequences that it brings a token, in the order of its rows."""
        assert step is self.steps[0], "steps land in the order in which they were launched"
        samples = count_as_computed(step) if self._samples is None else self._samples
        self.steps.pop(0)
        self._samples = None
        return samples

    def take_back(self) -> list[SchedulerOutput]:
        """All that is in flight has failed. Nothing was lost: tokens that were under way will be drawn again."""
        if self._samples is not None:
            for seq, num_new_tokens in self.steps[0].chunks:
                seq.num_computed_tokens -= num_new_tokens
                seq.drop_expected_token()
        steps, self.steps, self._samples = self.steps, [], None
        return steps


def count_as_computed(step: SchedulerOutput) -> list[Sequence]:
    """Whoever has caught up by it gets a token, and its children, which will come to life, one each."""
    samples: list[Sequence] = []
    for seq, num_new_tokens in step.chunks:
        seq.num_computed_tokens += num_new_tokens
        if seq.num_computed_tokens == seq.num_tokens:
            samples.append(seq)
            if seq.children:
                samples += seq.children
    return samples
