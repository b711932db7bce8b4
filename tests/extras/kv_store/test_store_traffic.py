"""Random traffic over pools of a few blocks with a store that fails: no sequence reads K and V that are not its own."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.extras.full_traffic import BeamMachine, OverlapMachine, SchedulerMachine
from tests.extras.store_traffic import SpeculativeStoreRun, StoreRun
from tests.scheduling_traffic import SETTINGS

WINDOWS = st.sampled_from([None, None, 1, 3, 5, 9])


class StoreMachine(BeamMachine):
    make_run = StoreRun
    windows = WINDOWS

    def draw_options(self, data):
        return super().draw_options(data) | {"store_seed": data.draw(st.sampled_from([None, 0, 1, 2]))}


class OverlapStoreMachine(OverlapMachine):
    make_run = StoreRun
    windows = WINDOWS

    def draw_options(self, data):
        return super().draw_options(data) | {"store_seed": data.draw(st.sampled_from([None, 0, 1, 2]))}


class SpeculativeStoreMachine(SchedulerMachine):
    make_run = SpeculativeStoreRun
    windows = WINDOWS

    def draw_options(self, data):
        return super().draw_options(data) | {"store_seed": data.draw(st.sampled_from([None, 0, 1, 2]))}


TestTraffic = pytest.mark.examples(StoreMachine.TestCase)
TestTraffic.settings = settings(SETTINGS, max_examples=examples(60))
TestTrafficWithOverlap = pytest.mark.examples(OverlapStoreMachine.TestCase)
TestTrafficWithOverlap.settings = settings(SETTINGS, max_examples=examples(60))
TestTrafficWithDrafts = pytest.mark.examples(SpeculativeStoreMachine.TestCase)
TestTrafficWithDrafts.settings = settings(SETTINGS, max_examples=examples(60))


def serve_twice(run, prompt, others, **params):
    """Serve a prompt, push it out of the pool with others, and serve it again; the second sequence."""
    run.add(prompt, **params)
    run.finish()
    for other in others:
        run.add(other, max_tokens=2)
        run.finish()
    again = run.add(prompt, **params)
    run.finish()
    return again


OTHERS = [[50 + i] * 15 for i in range(4)]


@pytest.mark.parametrize(("window", "num_loads"), [(None, 5), (5, 2), (9, 3)])
def test_what_was_pushed_out_of_the_pool_is_loaded(window, num_loads):
    """Behind a window nothing is loaded: the token at position 20 sees the positions from 16, or from 12, on."""
    run = StoreRun(num_blocks=8, block_size=4, window=window)
    again = serve_twice(run, list(range(21)), OTHERS, max_tokens=4)
    assert run.store.num_loads == run.store.stats.num_loaded_blocks == num_loads - (window is not None)
    assert again.num_cached_tokens == 20
    assert run.store.stats.loaded_tokens == 20
