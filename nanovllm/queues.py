"""In which order are sequences served? Those that wait and those that run are in the order of a policy.

A policy gives each sequence a number as it arrives; smaller numbers go first, and earlier arrivals among equals. The
order decides which sequence is admitted, which gets the budget, and, from its other end, which is preempted. It never
changes while sequences wait. To add a policy, write a function of one line and pass it:
`LLM(model, scheduling_policy=lambda seq: -seq.num_prompt_tokens)`. `extras/policies.py` has two. The `Scheduler` moves
sequences between the queues.
"""

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from nanovllm.sequence import Sequence, SequenceStatus

Policy = Callable[[Sequence], float]


def fcfs(seq: Sequence) -> float:
    """First come, first served."""
    return 0


def set_order(seq: Sequence, policy: Policy, arrival: int) -> None:
    """Order `seq` and its children by `policy`, then by arrival, then by sample."""
    for one in (seq, *seq.children):
        one.arrival = arrival
        rank = policy(one)
        if not isinstance(rank, int | float) or rank != rank:
            raise TypeError(f"scheduling_policy must return a number for each sequence, got {rank!r}")
        one.order = (rank, arrival, one.sample_index)


class Queue(list[Sequence]):
    """All sequences of one status in their order: the first is admitted next, the last is preempted first."""

    def __init__(self, status: SequenceStatus) -> None:
        super().__init__()
        self.status = status

    @property
    def num_places(self) -> int:
        """Places of `max_num_seqs` that they take, those of children to come included."""
        return sum([seq.num_places for seq in self])

    def add(self, seq: Sequence) -> None:
        seq.status = self.status
        insort(self, seq, key=attrgetter("order"))
