"""Overlap: when may a step be scheduled while the step before it is in flight?

With overlap the next step is scheduled, built and launched while the device computes the step before, so that the
device need not wait for the host. Of a token in flight, the next step needs to know only where the device keeps it:

    step N      is scheduled     token_ids of A: [ 11  7  42 ] -1      of B: [ 5  90 ] -2
                                 the placeholder -1 - row: step N draws this token in this row
    step N + 1  is scheduled     its input ids are -1 and -2; the device puts the tokens in their places
    step N      has run          token_ids of A: [ 11  7  42  63 ]     of B: [ 5  90  0 ], where 0 ends B
    step N + 1  has run          its token for A is kept, its token for B is dropped

If the token itself is needed to go on (penalties, logits processors, bad words of several tokens, beams), the next step
waits. The blocks of B are free as soon as step N has run, although step N + 1 still writes to them: the device computes
in the order of the launches, so their next owner writes its K and V later, and reads them after that.
"""

from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.sequence import Sequence


def can_schedule_ahead(scheduler: Scheduler) -> bool:
    """Whether the next step needs no token of the step in flight, and would preempt no sequence.

    Otherwise the next step waits until the step in flight has run: then its tokens are known, and the sequences that
    they end have freed their blocks.
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
    """Whether the token in flight must be known before the next one is drawn (beams, penalties, processors)."""
    if not (seq.is_beam or seq.reads_output) or seq.finish_reason is not None:
        return False
    return seq.num_known_tokens + 1 < seq.max_num_tokens
