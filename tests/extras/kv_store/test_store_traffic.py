"""Random traffic over pools of a few blocks with a store that fails: no sequence reads K and V that are not its own."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from nanovllm_testing.machine import SETTINGS
from tests.conftest import examples
from tests.extras.full_traffic import BeamMachine, OverlapMachine
from tests.extras.store_traffic import SpeculativeStoreRun, StoreRun

WINDOWS = st.sampled_from([None, None, 1, 3, 5, 9])


class WithStoreSeed:
    windows = WINDOWS

    def draw_options(self, data):
        return super().draw_options(data) | {"store_seed": data.draw(st.sampled_from([None, 0, 1, 2]))}


class OverlapStoreMachine(WithStoreSeed, OverlapMachine):
    make_run = StoreRun


class EverythingMachine(WithStoreSeed, BeamMachine):
    """Overlap, drafts, beams, swap and a store."""

    make_run = SpeculativeStoreRun
    overlap = True


TestTrafficWithOverlap = pytest.mark.examples(OverlapStoreMachine.TestCase)
TestTrafficWithOverlap.settings = settings(SETTINGS, max_examples=examples(80))
TestTrafficWithEverything = pytest.mark.examples(EverythingMachine.TestCase)
TestTrafficWithEverything.settings = settings(SETTINGS, max_examples=examples(80))


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
    num_computed_again = 1  # the block of the last token and the output
    assert run.store.num_saves == len(run.store.kept) + num_computed_again, "each computed block is saved once"


def test_a_sequence_that_is_swapped_in_half_way_in_a_block_loads_nothing():
    """The rest of the block would not be computed."""
    run = StoreRun(num_blocks=16, block_size=4, budget=6, num_swap_blocks=8)
    seq, prompt = run.add(list(range(21)), max_tokens=3), tuple(range(21))
    run.step()
    assert seq.num_computed_tokens == 6
    for i, name in enumerate(run.store.names(seq, 0, 5)):  # another engine has computed the prompt meanwhile
        run.store.kept[name] = [prompt[: 4 * i + j] for j in range(1, 5)]
    run.scheduler.preempt(seq, needy=seq)
    run.scheduler.waiting.insert(0, run.scheduler.running.pop())
    assert run.host_block_ids(seq)
    run.cache.move(run.manager.take_copies().swap_outs)
    run.finish()
    run.check_end()
    assert run.store.num_loads == 0
