"""Queues that keep sequences in the order in which they are served.

The core puts a sequence at the front or at the end of a queue, which keeps the order of arrival. These queues sort by
`Sequence.order` instead. Other policies (`policies.py`) need this, and sequences that are forked while later ones run
(`beam_search/`).
"""

from bisect import bisect
from collections.abc import Callable
from itertools import count
from operator import attrgetter
from typing import Any

from nanovllm.scheduler import Scheduler
from nanovllm_extras.records.full_sequence import Sequence, own_sequences

Policy = Callable[[Sequence], float]
"""Ranks a sequence: smaller numbers go first, and earlier arrivals among equals."""


def fcfs(seq: Sequence) -> float:
    """First come, first served."""
    return 0


class OrderedQueue(list[Any]):
    """A list whose `append` and `insert` put a sequence at its place in the order. `insert` ignores the index."""

    def append(self, seq: Sequence) -> None:
        self.insert(0, seq)

    def insert(self, _: object, seq: Sequence) -> None:
        """Insert `seq` at its place in the order."""
        super().insert(bisect(self, seq.order, key=attrgetter("order")), seq)


class OrderedArrivals(OrderedQueue):
    """The waiting sequences. A new one is appended: then the policy decides its place, and those of its children."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self._arrivals = count()

    def append(self, seq: Sequence) -> None:
        self.rank(seq)
        super().append(seq)

    def rank(self, seq: Sequence) -> None:
        """Give `seq` and its children their places in the order, behind earlier arrivals of the same rank."""
        arrival = next(self._arrivals)
        for one in own_sequences([seq, *seq.children]):
            one.arrival = arrival
            rank = self.policy(one)
            if not isinstance(rank, int | float) or rank != rank:
                raise TypeError(f"scheduling_policy must return a number for each sequence, got {rank!r}")
            one.order = (rank, arrival, one.sample_index)


def order_queues(scheduler: Scheduler, policy: Policy = fcfs) -> None:
    """Let a scheduler serve in the order of `policy`, unless its queues are ordered already.

    A scheduler that has sequences has served them first come, first served: running ones arrived before waiting ones.
    """
    if isinstance(scheduler.waiting, OrderedArrivals):
        return
    running, waiting = own_sequences(scheduler.running), own_sequences(scheduler.waiting)
    arrivals = OrderedArrivals(policy)
    for seq in running:
        arrivals.rank(seq)
    for seq in waiting:
        arrivals.append(seq)
    scheduler.waiting, scheduler.running = arrivals, OrderedQueue(running)
