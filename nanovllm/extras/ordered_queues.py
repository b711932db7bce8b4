"""Queues that keep their sequences in the order in which a policy serves them.

The core puts a sequence at the front or at the end of a queue, which keeps the order of arrival. These queues put it at
its own place instead. So they serve other policies (`policies.py`), and sequences that are forked while later ones run
(`beam_search/`).
"""

from bisect import bisect
from collections.abc import Callable
from itertools import count
from operator import attrgetter
from typing import Any

from nanovllm.scheduler import Scheduler

Policy = Callable[[Any], float]
"""Ranks a sequence: smaller numbers go first, and earlier arrivals among equals."""


def fcfs(seq: Any) -> float:
    """First come, first served."""
    return 0


class OrderedQueue(list[Any]):
    """Sequences sorted by `order`, wherever they are put."""

    def append(self, seq: Any) -> None:
        self.insert(0, seq)

    def insert(self, _: Any, seq: Any) -> None:
        """Insert `seq` at its place in the order."""
        super().insert(bisect(self, seq.order, key=attrgetter("order")), seq)


class OrderedArrivals(OrderedQueue):
    """The waiting sequences. A new one is appended: then the policy decides its place, and those of its children."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self._arrivals = count()

    def append(self, seq: Any) -> None:
        arrival = next(self._arrivals)
        for one in (seq, *seq.children):
            one.arrival = arrival
            rank = self.policy(one)
            if not isinstance(rank, int | float) or rank != rank:
                raise TypeError(f"scheduling_policy must return a number for each sequence, got {rank!r}")
            one.order = (rank, arrival, one.sample_index)
        super().append(seq)


def order_queues(scheduler: Scheduler, policy: Policy = fcfs) -> None:
    """Let an empty scheduler serve in the order of `policy`."""
    scheduler.waiting, scheduler.running = OrderedArrivals(policy), OrderedQueue()
