"""Overlap: when may a step be scheduled while the step before it is in flight?

With overlap the next step is scheduled, built and launched while the device computes the one before, so that the device
never waits for the host. Of the tokens that are in flight, the next step has to know only where the device keeps them:

    step N      is scheduled     token_ids of A: [ 11  7  42 ] -1      of B: [ 5  90 ] -2
                                 the placeholder -1 - row: step N draws this token in this row
    step N + 1  is scheduled     its input ids are -1 and -2; the device puts the tokens in their places
    step N      has run          token_ids of A: [ 11  7  42  63 ]     of B: [ 5  90  0 ], where 0 ends B
    step N + 1  has run          its token for A is kept, its token for B is dropped

If a token itself is needed to go on (penalties, logits processors, bad words of several tokens, beams), the next step
waits. The blocks of B are free as soon as step N has run: the device computes in the order of the launches, so what
step N + 1 still writes for B is overwritten by the next owner before that reads it.
"""

from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.sequence import Sequence


def can_schedule_ahead(scheduler: Scheduler) -> bool:
    """Whether the next step needs no token of the step in flight, and would preempt no sequence.

    Both reasons end when the step in flight has run: sequences that finish by it free blocks.
    """
    if any([needs_token(seq) for seq in scheduler.in_flight[-1].samples]):
        return False
    blocks, running = scheduler.block_manager, scheduler.running
    # each sequence fills the rest of one block and copies one at most, besides the blocks that the budget fills
    if blocks.num_free_blocks >= scheduler.max_num_batched_tokens // blocks.block_size + 2 * len(running):
        return True
    needed = [max(0, blocks.num_missing_blocks(seq)) + seq.has_shared_tail for seq in running]
    return sum(needed) <= blocks.num_free_blocks


def needs_token(seq: Sequence) -> bool:
    """Whether its search, its penalties or its processors must see the token in flight before the next one is drawn."""
    if not (seq.is_beam or seq.reads_output) or seq.finish_reason is not None:
        return False
    return seq.num_known_tokens + 1 < seq.max_num_tokens
