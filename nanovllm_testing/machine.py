"""Random traffic for a `Run` as hypothesis generates it: with aborts, stop strings and several samples.

A subclass sets `make_run`. Its `TestCase` is a test for pytest or unittest:

    class MyMachine(SchedulerMachine):
        make_run = MyRun

    TestMyTraffic = MyMachine.TestCase
    TestMyTraffic.settings = SETTINGS
"""

import sys
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nanovllm.sequence import Sequence
from nanovllm_testing.first_come import FirstComeRun
from nanovllm_testing.run import VOCAB_SIZE, output_of
from nanovllm_testing.violation import require

SETTINGS = settings(stateful_step_count=30, deadline=None, derandomize=True, report_multiple_bugs=False)


def choose(data: Any, values: list[Any]) -> Any:
    """Draw one of the values by its index: hypothesis cannot print a sequence, as it does with what a failure draws."""
    return values[data.draw(st.integers(0, len(values) - 1))]


class SchedulerMachine(RuleBasedStateMachine):
    """Any pool, block size, budget and limits, with and without prefix caching.

    Requests with one or several samples come; samples reach stop tokens and stop strings, or are aborted. Preemption,
    forks and copies follow from caches of a few blocks. The run checks each step, and at the end that every request was
    served in a bounded number of steps and that no block is lost.
    """

    make_run: Callable[..., Any] = FirstComeRun

    @initialize(data=st.data())
    def make(self, data: Any) -> None:
        self.run = self.make_run(**self.draw_options(data))

    def draw_options(self, data: Any) -> dict[str, Any]:
        block_size, num_blocks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 10))
        return {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": data.draw(st.integers(1, 5)),
            "budget": data.draw(st.sampled_from([1, 2, 3, 5, 8, 13, 20])),
            "max_model_len": data.draw(st.sampled_from([2, 12, 40, 40])),
            "eos_token_ids": data.draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2)),
            "enable_prefix_caching": data.draw(st.booleans()),
        }

    def draw_params(self, data: Any) -> dict[str, Any]:
        return {
            "max_tokens": data.draw(st.none() | st.integers(1, 12)),
            "ignore_eos": data.draw(st.booleans()),
            "stop_token_ids": data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2)),
        }

    @property
    def living(self) -> list[list[Sequence]]:
        """The requests that have not finished: of each, its sequences."""
        return [seqs for seqs in self.run.requests if any(seq.finish_reason is None for seq in seqs)]

    @property
    def longest_prompt(self) -> int:
        longest: int = min(self.run.manager.capacity, self.run.scheduler.max_model_len - 1)
        return longest

    @rule(data=st.data(), n=st.sampled_from([1, 1, 2, 3]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def add(self, data: Any, n: int, tokens: list[int]) -> None:
        n = min(n, self.run.scheduler.max_num_seqs)
        self.run.add(tokens[: self.longest_prompt], n=n, **self.draw_params(data))
        self.run.check_state()

    @precondition(lambda self: self.living)
    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.run.has_unfinished:
                self.run.step()

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        self.run.abort(choose(data, self.living))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def find_stop_string(self, data: Any) -> None:
        """End one sample by its text. The others go on."""
        seqs = [seq for seq in choose(data, self.living) if seq.finish_reason is None]
        self.end_by_its_text(choose(data, seqs))

    def end_by_its_text(self, seq: Sequence) -> None:
        if output_of(seq):
            self.run.scheduler.finish(seq, "stop", "a stop string")
            is_queued = self.run.is_running(seq) or self.run.is_waiting(seq)
            require(seq.finish_reason == "stop" and not is_queued, f"`finish` did not end {seq.request_id}")
            self.run.check_state()

    def teardown(self) -> None:
        has_failed = sys.exc_info()[0] is not None  # what follows from a failure would hide it
        if hasattr(self, "run") and not has_failed:
            self.run.finish()
