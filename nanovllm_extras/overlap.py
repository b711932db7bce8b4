"""Overlap: the next step is scheduled, built and launched while the device computes the step before.

Of a token in flight, the next step needs to know only where the device keeps it. So the token gets its place at once,
behind the known ones, and the place holds the placeholder -1 - row, where row is its row among the tokens of the step:

    step N      is scheduled     token_ids of A: [ 11  7  42 ] -1      of B: [ 5  90 ] -2      num_tokens 4 and 3
    step N + 1  is scheduled     its input ids are -1 and -2; the device replaces them by the tokens
    step N      has run          token_ids of A: [ 11  7  42  63 ]     of B: [ 5  90  0 ], where 0 ends B
    step N + 1  has run          its token for A is kept, its token for B is dropped

`OverlappedScheduler` gives tokens in flight their places, `Ahead` wraps the engine's launches, and the runner replaces
placeholders by the newest tokens (`send_batch`):

    without overlap     launch N     wait N       update N     launch N+1     wait N+1
    with overlap        launch N     launch N+1   wait N       update N       launch N+2     wait N+1

If the next step needs the token itself (`Processor.reads_output`), it waits. The blocks of B are free as soon as step
N has run, although step N + 1 still writes to them: the device computes in the order of the launches, so their next
owner writes its K and V later, and reads them after that.
"""

from collections.abc import Callable
from typing import Any

from nanovllm.scheduler import Step
from nanovllm_extras.extended_scheduler import ExtendedScheduler
from nanovllm_extras.known_tokens import grow


class OverlappedScheduler(ExtendedScheduler):
    """`in_flight` are the steps that are scheduled and not updated yet, the oldest first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.in_flight: list[Step] = []

    def schedule(self) -> Step:
        step = super().schedule()
        if step.chunks:
            self.in_flight.append(step)
            for row, seq in enumerate(step.samples):
                if seq.num_tokens + 1 < seq.max_num_tokens:  # no step computes K and V of the last token
                    expect_token(seq, row)
        return step

    def update(self, step: Step, new_token_ids: list[int]) -> list[tuple[int, Any]]:
        assert step is self.in_flight[0], "the oldest"
        advanced = super().update(step, new_token_ids)
        self.in_flight.pop(0)  # not before: if a line above fails, `forget_steps` forgets the placeholders
        return advanced

    def forget_steps(self) -> None:
        super().forget_steps()
        for step in self.in_flight:
            for seq in step.preempted:  # blocks that were to be copied to host memory may not have been
                self.preemption.forget(seq)
        self.in_flight = []

    def can_schedule_ahead(self) -> bool:
        """Return whether the next step needs no token of the step in flight, and would preempt no sequence.

        Otherwise the next step waits until the step in flight has run: then its tokens are known, and the sequences
        that they end have freed their blocks.
        """
        if any([needs_token(seq) for seq in self.in_flight[-1].samples]):
            return False
        blocks, running = self.block_manager, self.running
        num_groups = getattr(blocks, "num_groups", 1)  # of layers, with blocks of their own (`kv_groups/`)
        # each sequence fills the rest of one block and copies one at most, besides the blocks that the budget fills
        num_blocks = self.max_num_batched_tokens // blocks.block_size + 2 * len(running)
        if blocks.num_free_blocks >= num_groups * num_blocks:
            return True
        needed = [max(0, blocks.num_missing_blocks(seq)) + num_groups * seq.has_shared_tail for seq in running]
        return sum(needed) <= blocks.num_free_blocks


def expect_token(seq: Any, row: int) -> None:
    """Append a placeholder for the token that a step in flight samples in `row`."""
    num_tokens, ids = seq.num_tokens, seq.token_ids
    if num_tokens == len(ids.data):
        grow(ids)
    ids.data[num_tokens] = -1 - row
    seq.num_tokens = num_tokens + 1


def needs_token(seq: Any) -> bool:
    """Return whether the token in flight must be known before the next one is sampled."""
    if (
        not seq.processors
        or seq.finish_reason is not None
        or not any(processor.reads_output for processor in seq.processors)
    ):
        return False
    return seq.num_known_tokens + 1 < seq.max_num_tokens


class Ahead:
    """Replaces `LLMEngine.launch_one`: launches the next step, and returns the step to wait for."""

    def __init__(self, launch: Callable[[Any], Any], scheduler: OverlappedScheduler) -> None:
        self._launch = launch
        self._scheduler = scheduler
        self._ahead: Any = None

    def __call__(self, engine: Any) -> Any:
        step = self._ahead if self._scheduler.in_flight else None  # it was rolled back if none is in flight
        step, self._ahead = step or self._launch(engine), None
        if step is not None and self._scheduler.can_schedule_ahead():
            self._ahead = self._launch(engine)
        return step
