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

from nanovllm.scheduling.sequence import Sequence
from nanovllm.scheduling.step import SchedulerOutput


class StepsInFlight:
    """At most two, the older first: it is taken for granted when the younger is scheduled, and lands before it."""

    def __init__(self) -> None:
        self.steps: list[SchedulerOutput] = []
        self.leaving: list[Sequence] = []  # finished, but a step in flight writes to their blocks
        self._is_taken_for_granted = False  # the older step: its tokens count as computed

    def holds(self, seq: Sequence) -> bool:
        return any(other is seq for step in self.steps for other, _ in step.chunks)

    def try_take_for_granted(self) -> bool:
        """Go on as if the step in flight had landed; False, and no change, if the next one has to know its tokens."""
        assert len(self.steps) == 1, "one step can be in flight while another is scheduled"
        assert not self._is_taken_for_granted, "it is taken for granted once"
        # for the others that token is the last, or not even wanted any more
        going_on = [
            (row, seq)
            for row, seq in enumerate(self.steps[0].samples)
            if seq.finish_reason is None and seq.num_tokens + 1 < seq.max_num_tokens
        ]
        if any([seq.is_beam or seq.children or seq.reads_output for _, seq in going_on]):
            return False
        count_as_computed(self.steps[0])
        self._is_taken_for_granted = True
        for row, seq in going_on:
            seq.expect_token(row)
        return True

    def land(self, step: SchedulerOutput) -> None:
        """The oldest step has ended well."""
        assert step is self.steps[0], "steps land in the order in which they were launched"
        if not self._is_taken_for_granted:
            count_as_computed(step)
        self.steps.pop(0)
        self._is_taken_for_granted = False

    def take_back(self) -> list[SchedulerOutput]:
        """All that is in flight has failed. Nothing was lost: tokens that were under way will be drawn again."""
        if self._is_taken_for_granted:
            for seq, num_new_tokens in self.steps[0].chunks:
                seq.num_computed_tokens -= num_new_tokens
                seq.drop_expected_token()
        steps, self.steps, self._is_taken_for_granted = self.steps, [], False
        return steps


def count_as_computed(step: SchedulerOutput) -> None:
    for seq, num_new_tokens in step.chunks:
        seq.num_computed_tokens += num_new_tokens
