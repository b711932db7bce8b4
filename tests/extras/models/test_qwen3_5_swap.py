"""Qwen3.5 with `preemption_mode="swap"`: the tokens of `transformers`, and no token is computed twice."""

import pytest

from nanovllm_extras import SamplingParams
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS
from tests.extras.models.test_qwen3_5 import TINY_POOLS, check_all_free, check_greedy, check_samples, make_llm

pytest.importorskip("transformers.models.qwen3_5")
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
POOLS = {1: 72, **TINY_POOLS}  # blocks, by their size
CASES = [("torch", 13, 4), ("cpu", 64, 16)]  # (backend, budget, block size)
SLOW_CASES = [("torch", 64, 1), ("torch", 7, 16), ("cpu", 13, 16)]


@pytest.fixture(scope="module")
def hybrids(all_hybrids):
    return all_hybrids["Qwen3_5"]


def check_host_memory_is_free(llm):
    space = llm.engine.scheduler.block_manager.swap_space
    assert (space.num_free_blocks, space.num_free_slots) == (space.num_blocks, space.num_slots)


@pytest.mark.parametrize(
    ("backend", "budget", "block_size"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_tokens_are_those_of_transformers(hybrids, backend, budget, block_size):
    options = {"attention_backend": backend, "block_size": block_size, "max_num_batched_tokens": budget}
    llm = make_llm(hybrids.make()[0], num_kv_blocks=POOLS[block_size], enable_prefix_caching=False, **options, **SWAP)
    check_greedy(llm, hybrids.prompts(), hybrids.greedy())
    stats = llm.get_stats()
    assert stats.num_swaps == stats.num_preemptions
    assert (stats.num_swaps > 0) == (budget > 7), "a smaller budget computes one prompt after the other"
    num_tokens = sum(len(prompt) + MAX_TOKENS - 1 for prompt in hybrids.prompts())
    assert stats.scheduled_tokens == num_tokens, "each token is computed once"
    check_host_memory_is_free(llm)


@pytest.mark.slow
@pytest.mark.parametrize(("num_bytes", "interval"), [(40_000, 1), (75_000, 64), (140_000, 2)])
def test_little_host_memory_and_snapshots(hybrids, num_bytes, interval):
    """Some sequences are swapped, and others computed again, from snapshots if they can be found."""
    options = {"num_kv_blocks": 19, "max_num_batched_tokens": 13, "state_snapshot_interval": interval}
    llm = make_llm(hybrids.make()[0], preemption_mode="swap", swap_space_bytes=num_bytes, **options)
    for _ in range(2):  # then prefixes are cached
        check_greedy(llm, hybrids.prompts(), hybrids.greedy())
        check_greedy(llm, hybrids.prompts()[::-1], hybrids.greedy()[::-1])
    stats = llm.get_stats()
    assert 0 < stats.num_swaps <= stats.num_preemptions
    assert stats.prefix_cache_hit_tokens > 0
    check_host_memory_is_free(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 64},
        pytest.param({"attention_backend": "cpu", "block_size": 16, "num_kv_blocks": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_samples_swap_their_own_states(hybrids, options):
    """Some samples of a prompt are swapped while the others run."""
    folder, model = hybrids.make()
    llm = make_llm(folder, **{"num_kv_blocks": 20, **SWAP, **options})
    check_samples(llm, model, hybrids.prompts()[:4])
    assert llm.get_stats().num_swaps > 0
    check_host_memory_is_free(llm)


def test_aborted_requests_leave_nothing_in_host_memory(hybrids):
    llm = make_llm(hybrids.make()[0], num_kv_blocks=19, max_num_batched_tokens=64, **SWAP)
    engine, space = llm.engine, llm.engine.scheduler.block_manager.swap_space
    for i, prompt in enumerate(hybrids.prompts()):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    while space.num_free_slots == space.num_slots:
        engine.step()
    for i in range(len(hybrids.prompts())):
        engine.abort_request(str(i))
    check_all_free(llm)
    check_host_memory_is_free(llm)
