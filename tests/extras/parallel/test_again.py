"""The requests of other tests, once more with ranks that share each pass: their oracles stay the same.

They come from `tests/extras/test_parity.py` and `tests/extras/test_isolation.py`. The ranks are threads.
"""

import functools

import pytest

from nanovllm_extras import Config, SamplingParams
from nanovllm_extras.machine.dead import EngineDeadError
from tests.extras import test_isolation as isolation
from tests.extras import test_parity as parity
from tests.extras.test_isolation import answer  # noqa: F401 (a fixture)
from tests.extras.test_parity import oracles  # noqa: F401 (a fixture)

NUM_RANKS = {"mqa-1-layer": 3, "gqa-12-layers": 3}  # which have 3 heads, and 3 K and V heads; 2 for the others


# ---- tests/extras/test_parity.py


@pytest.mark.parametrize("name", parity.SHAPES)
@pytest.mark.slow
def test_the_requests_of_the_parity_test(oracles, quick_ranks, name):  # noqa: F811
    oracle = oracles(name)
    options = {"max_num_batched_tokens": 100, "block_size": 8, "num_kv_blocks": 40}
    llm = parity.make_llm(oracle, **options, tensor_parallel_size=NUM_RANKS.get(name, 2))
    parity.assert_parity(llm, oracle, oracle.pool)
    parity.assert_parity(llm, oracle, oracle.overlapping)
    assert parity.hits(llm) > 0
    assert llm.get_stats().num_preemptions > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_random_traffic(oracles, quick_ranks, monkeypatch, seed):  # noqa: F811
    monkeypatch.setattr(parity, "Config", functools.partial(Config, tensor_parallel_size=2))
    name = ("gqa", "mqa-tied", "gqa-bias-tied")[seed]
    parity.random_traffic(oracles(name), f"{name}-{seed}")


# ---- tests/extras/test_isolation.py: only the request that raises ends


def two_ranks(monkeypatch):
    monkeypatch.setattr(isolation, "Config", functools.partial(Config, tensor_parallel_size=2))


@isolation.both_ways
def test_who_fails_ends_alone(tiny_checkpoint, answer, quick_ranks, monkeypatch, overlap):  # noqa: F811
    two_ranks(monkeypatch)
    isolation.test_who_fails_ends_alone_and_nothing_is_computed_anew(tiny_checkpoint, answer, overlap, 1)


@pytest.mark.parametrize("breakage", isolation.BREAKAGES)
@isolation.both_ways
@pytest.mark.slow
def test_wherever_it_fails(tiny_checkpoint, answer, quick_ranks, monkeypatch, overlap, breakage):  # noqa: F811
    two_ranks(monkeypatch)
    isolation.test_wherever_it_fails(tiny_checkpoint, answer, monkeypatch, overlap, breakage)


@isolation.both_ways
@pytest.mark.slow
def test_others_keep_what_they_read(tiny_checkpoint, answer, quick_ranks, monkeypatch, overlap):  # noqa: F811
    two_ranks(monkeypatch)
    isolation.test_others_keep_their_log_probabilities_of_the_prompt(tiny_checkpoint, answer, overlap)
    isolation.test_all_samples_of_a_request_end_with_it(tiny_checkpoint, answer, overlap)


@pytest.mark.parametrize("preemption", [{}, {"preemption_mode": "swap", "swap_space_bytes": 1 << 16}])
@isolation.both_ways
@pytest.mark.slow
def test_every_third_request_fails(tiny_checkpoint, answer, quick_ranks, monkeypatch, overlap, preemption):  # noqa: F811
    two_ranks(monkeypatch)
    isolation.test_random_traffic_in_which_every_third_request_fails(tiny_checkpoint, answer, overlap, preemption, 1)


def test_a_pass_that_fails_half_way_ends_the_engine(tiny_checkpoint, rank_threads, monkeypatch):
    """The other ranks wait in a sum that rank 0 will not come to."""
    two_ranks(monkeypatch)
    engine = isolation.make_engine(tiny_checkpoint[0])
    layer = engine.runner.model.model.layers[1]
    layer.mlp.register_forward_pre_hook(isolation.fail)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="rank 0 failed, while others computed with it: Failing"):
            engine.step()
