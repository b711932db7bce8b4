"""Runs of a scheduler that serves first come, first served, as the core's own does: `Run` and the order of service.

A scheduler with another order need not pass these checks. A subclass of the core's scheduler that only adds something
should.
"""

from itertools import pairwise
from typing import Any

from nanovllm.scheduler import Step
from nanovllm.sequence import Sequence
from nanovllm_testing import run
from nanovllm_testing.fake_kv_cache import check_cached_blocks, check_ownership, count, name_of, table_of
from nanovllm_testing.violation import Violation, require


class FirstComeRun(run.Run):
    """A run of the core's own parts: also its order, its free queue, and the entries of its prefix cache."""

    def make_before(self) -> Any:
        return FirstComeBefore(self)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def may_pause(self) -> bool:
        """Whether a step may compute nothing."""
        return not self.has_unfinished

    def max_steps(self) -> int:
        """While the first in order waits, no other is admitted, and the first of those that run advances each step."""
        lens = self.lens_at_the_end()
        return (len(lens) + 1) * sum(lens)

    def check_progress(self, out: Step) -> None:
        require(out.chunks or self.may_pause, "the step computes nothing, but some sequence must always advance")

    def check_table(self, seq: Sequence, start: int, num_needed: int) -> None:
        super().check_table(seq, start, num_needed)
        require(
            len(table_of(seq)) == num_needed, f"{name_of(seq)} has blocks for tokens that the step does not compute"
        )

    def check_queues(self) -> None:
        super().check_queues()
        for queue in (self.scheduler.running, self.waiting):
            places = [self.place_of(seq) for seq in queue]
            require(
                places == sorted(places), f"a queue is not in the order of arrival: {[name_of(seq) for seq in queue]}"
            )

    def check_blocks(self) -> None:
        check_ownership(self.manager, self.seqs)
        check_cached_blocks(self.manager, self.cache)


class FirstComeBefore(run.Before):
    """The rules of the core's scheduler: order, budget, and who is preempted."""

    def check(self, out: Step) -> None:
        super().check(out)
        kept = [seq for seq in self.running if seq not in out.preempted]
        born = [child for seq, _, _ in out.chunks for child in self.children[seq] if not seq.children]
        admitted = [seq for seq in self.run.scheduler.running if seq not in kept + born]
        place_of = self.run.place_of
        for victim in out.preempted:
            for seq in kept:
                if place_of(victim) < place_of(seq):
                    raise Violation(f"{name_of(victim)} is preempted, but {name_of(seq)} came later and is not")
        self.check_budget(out, kept + admitted)
        self.check_queues(out, admitted)

    def check_queues(self, out: Step, admitted: list[Sequence]) -> None:
        place_of = self.run.place_of
        for seq in admitted:
            for other in self.run.waiting:
                if place_of(seq) > place_of(other):
                    raise Violation(f"{name_of(seq)} is admitted before {name_of(other)}, which came first")
        for one, next_one in pairwise(out.preempted):
            require(place_of(one) > place_of(next_one), "sequences are not preempted in order, the last one first")
        require(not (admitted and out.preempted), "a step preempts and admits: what it admits will be preempted again")
        self.check_preempted(out, admitted)

    def check_preempted(self, out: Step, admitted: list[Sequence]) -> None:
        for seq in out.preempted:
            require(seq.num_computed_tokens == 0, f"{name_of(seq)} is preempted, but keeps its computed tokens")

    def check_budget(self, out: Step, in_turn: list[Sequence]) -> None:
        """Raise unless those that ran, in order, then new ones, each get what they need while the budget lasts.

        A chunk is never longer than `max_chunk_len`.
        """
        left, expected = self.run.scheduler.max_num_batched_tokens, {}
        starts = {seq: start for seq, start, _ in out.chunks}
        for seq in in_turn:
            start = starts[seq] if seq in starts else self.num_computed[seq]
            num_new = min(self.num_tokens[seq] - start, left, self.run.max_chunk_len)
            left -= num_new
            if num_new:
                expected[seq] = start, num_new
        found = {seq: (start, num_new) for seq, start, num_new in out.chunks}
        for seq in {**expected, **found}:
            (_, right), (_, num_new) = expected.get(seq, (0, 0)), found.get(seq, (0, 0))
            require(right == num_new, f"{name_of(seq)} gets {count(num_new, 'token')} of the budget, not {right}")
        require(found == expected, "a chunk begins at another token")
