"""A sequence with all that extras keep of it, and queues that keep sequences in the order in which they are served.

The engine makes sequences of this class. The core puts a sequence at the front or at the end of a queue, which keeps
the order of arrival. These queues sort by `Sequence.order` instead. Other policies (`policies.py`) need this, and
sequences that are forked while later ones run (`beam_search/`).
"""

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np

from nanovllm import sequence
from nanovllm.block_tables import IntArray
from nanovllm.scheduler import Scheduler


@dataclass(eq=False, slots=True)
class Sequence(sequence.Sequence):
    """The core's sequence, whose newest tokens may not be known yet.

    `num_tokens` may count tokens that a step in flight samples (`overlap.py`) or that are drafts (`speculation/`);
    `num_known_tokens` does not.
    """

    priority: int = 0
    processors: tuple[Any, ...] = ()  # what changes its logits before sampling (`logits_processors.py`)
    readers: tuple[Any, ...] = ()  # what reads the hidden states of its prompt (`logits_processors.py`)

    arrival: int = field(default=0, init=False)  # number of sequences that arrived before
    order: tuple[float, ...] = field(default=(), init=False)  # its place in the queues
    num_preemptions: int = field(default=0, init=False)
    is_plain: bool = field(init=False)  # sampled only by the core, and without readers
    reads_prompt: bool = field(init=False)  # a reader needs the hidden states of the whole prompt
    # `stop_token_ids`, once the output has `min_tokens` tokens; until then `stop_token_ids` is empty
    all_stop_token_ids: dict[int, int | None] = field(init=False)

    def __post_init__(self, prompt_token_ids: list[int], eos_token_ids: frozenset[int]) -> None:
        sequence.Sequence.__post_init__(self, prompt_token_ids, eos_token_ids)
        params: Any = self.sampling_params
        self.is_plain = not (self.processors or self.readers) and params.is_plain
        self.reads_prompt = any(reader.reads_prompt for reader in self.readers)
        self.all_stop_token_ids = self.stop_token_ids
        if params.min_tokens:
            self.stop_token_ids = {}

    @property
    def num_known_tokens(self) -> int:
        return self.token_ids.length

    @property
    def num_output_tokens(self) -> int:
        return self.token_ids.length - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids.view(self.num_prompt_tokens).tolist()

    @property
    def max_cached_tokens(self) -> int:
        return 0 if self.reads_prompt else self.token_ids.length - 1

    def append_token(self, token_id: int) -> None:
        ids = self.token_ids
        ids.append(token_id)
        if self.num_tokens < ids.length:  # otherwise `num_tokens` has counted this token already
            self.num_tokens = ids.length
        if self.stop_token_ids is not self.all_stop_token_ids:
            params: Any = self.sampling_params
            if ids.length - self.num_prompt_tokens > params.min_tokens:
                self.stop_token_ids = self.all_stop_token_ids


def grow(ids: IntArray) -> None:
    """Double the capacity, keeping the elements."""
    ids.data = np.concatenate([ids.data, np.zeros_like(ids.data)])


# ---- queues


Policy = Callable[[Any], float]
"""Ranks a sequence: smaller numbers go first, and earlier arrivals among equals."""


def fcfs(seq: Any) -> float:
    """First come, first served."""
    return 0


class OrderedQueue(list[Any]):
    """A list whose `append` and `insert` put a sequence at its place in the order. `insert` ignores the index."""

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
