"""hypothesis' traffic with parts of one's own, as the package's docstring shows it."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from nanovllm.scheduler import Scheduler
from nanovllm_testing.machine import SETTINGS, SchedulerMachine
from nanovllm_testing.run import Run
from nanovllm_testing.violation import Violation


class LastFirst(Scheduler):
    """Serves the newest request first, which the core's own order forbids."""

    def add(self, seq):
        super().add(seq)
        self.waiting.sort(key=lambda one: one.request_id, reverse=True)


class NeverAborts(LastFirst):
    """Takes a sequence that is aborted out of its queue, and keeps its blocks. Only aborts show it."""

    def finish(self, seq, finish_reason, stop_reason=None):
        if finish_reason == "abort" and seq in self.running:
            seq.finish_reason = finish_reason
            self.running.remove(seq)
        else:
            super().finish(seq, finish_reason, stop_reason)


def machine_of(scheduler_cls):
    class MyRun(Run):
        def make_scheduler(self, *arguments):
            return scheduler_cls(*arguments)

    class MyMachine(SchedulerMachine):
        make_run = MyRun

    return MyMachine


def test_any_order_of_service_is_allowed():
    run_state_machine_as_test(machine_of(LastFirst), settings=settings(SETTINGS, max_examples=15))


def test_a_leak_of_aborted_requests_is_found():
    few = settings(SETTINGS, max_examples=30, phases=[Phase.generate])
    with pytest.raises(Violation, match="has finished, but owns the blocks"):
        run_state_machine_as_test(machine_of(NeverAborts), settings=few)
