"""How does one sequence become several? Samples of one prompt (n > 1), and beams where they part.

A fork shares the blocks of its parent. Whichever of them writes to the last, partial block first gets a copy of it
(`BlockManager.try_allocate`). Two samples of a prompt of 6 tokens, with block_size 4:

    the last chunk of the prompt is scheduled     parent [7, 2]    child [7, 2]
    the next step: both write position 6          parent [7, 5]    child [7, 2]      block 2 is copied to 5 first
"""

from typing import Protocol

from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.queues import RunningQueue, WaitingQueue
from nanovllm.scheduling.sequence import Sequence, SequenceStatus


class Queues(Protocol):
    """The part of the `Scheduler` that forks need."""

    block_manager: BlockManager
    max_num_seqs: int
    waiting: WaitingQueue
    running: RunningQueue


def start_children(scheduler: Queues, seq: Sequence) -> None:
    """The last chunk of the prompt of `seq` is scheduled: its children share its blocks, and run from now on."""
    children, seq.children, seq.num_places = seq.children, [], 1
    for child in children:
        fork(scheduler, seq, child)


def fork(scheduler: Queues, parent: Sequence, child: Sequence) -> None:
    """Let `child`, which has the tokens of `parent` and gets a token of its own next, share the blocks of `parent`.

    If `parent` is preempted, or no place is left in `max_num_seqs`, the child begins as if it were preempted too: it
    owns no blocks, and `resume` queues it.
    """
    child.num_cached_tokens = parent.num_cached_tokens
    scheduler.block_manager.observer.on_fork(parent, child)
    if parent.status is SequenceStatus.RUNNING and scheduler.running.num_places < scheduler.max_num_seqs:
        scheduler.block_manager.fork(parent, child)
        scheduler.running.add(child)


def resume(scheduler: Queues, seq: Sequence) -> None:
    """`seq` has got its next token: queue it, if it was preempted when it had caught up."""
    if seq.status is SequenceStatus.WAITING:
        scheduler.waiting.add(seq)
