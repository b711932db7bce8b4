"""In which order are sequences served? The two queues, of waiting and of running sequences, in the order of a policy.

A policy gives each sequence a number as it arrives; smaller numbers go first, and earlier arrivals among equals. The
order decides which sequence is admitted, which gets the budget, and, from its other end, which is preempted. It never
changes while sequences wait. To add a policy, write a function of one line and pass it:
`LLM(model, scheduling_policy=lambda seq: -seq.num_prompt_tokens)`. `extras/policies.py` has two. The `Scheduler` moves
sequences between the queues.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from operator import attrgetter

from nanovllm.scheduling.sequence import Sequence, SequenceStatus

Policy = Callable[[Sequence], float]


def fcfs(seq: Sequence) -> float:
    """First come, first served."""
    return 0


class WaitingQueue:
    """Ordered by `policy`, then by arrival, then by sample; `first` is admitted next."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._heap: list[tuple[tuple, Sequence]] = []  # (order, sequence)
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in sorted(self._heap))

    @property
    def first(self) -> Sequence:
        return self._heap[0][1]

    def add_new(self, seq: Sequence) -> None:
        """Give `seq` and its children their places in the order, and queue `seq`."""
        arrival = next(self._arrivals)
        for one in (seq, *seq.children):
            one.arrival = arrival
            rank = self.policy(one)
            if not isinstance(rank, int | float) or rank != rank:
                raise TypeError(f"scheduling_policy must return a number for each sequence, got {rank!r}")
            one.order = (rank, arrival, one.sample_index)
        self.add(seq)

    def add(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        heappush(self._heap, (seq.order, seq))

    def pop(self) -> Sequence:
        return heappop(self._heap)[1]

    def discard(self, seq: Sequence) -> None:
        """Remove `seq`, if it waits here."""
        if any(other is seq for _, other in self._heap):
            self._heap = [entry for entry in self._heap if entry[1] is not seq]
            heapify(self._heap)


class RunningQueue(list[Sequence]):
    """Ordered as the waiting queue; the last sequence is preempted first."""

    @property
    def num_places(self) -> int:
        """Places of `max_num_seqs` that are taken, those of children to come included."""
        return sum([seq.num_places for seq in self])

    def add(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        insort(self, seq, key=attrgetter("order"))
