"""Qwen3.5 with `preemption_mode="swap"`: the tokens of `transformers`, and no token is computed twice.

By default the tokens are compared with those of an engine without preemption, which `test_qwen3_5.py` compares with
`transformers`.
"""

import itertools

import pytest

from nanovllm_extras import SamplingParams
from nanovllm_extras.execution.transfers import Transfers
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.memory.swap_space import SwapSpace
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS, HybridCheckpoints, logprobs_of
from tests.extras.models.test_qwen3_5 import GREEDY, TINY_POOLS, check_all_free, check_greedy, logprobs, make_llm

pytest.importorskip("transformers.models.qwen3_5")
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
POOLS = {1: 72, **TINY_POOLS}  # blocks, by their size
DEFAULT_CASES = [("torch", 13, 4), ("cpu", 64, 16)]


def cases():
    """(backend, budget, block size), most of which only the sweep takes. The backend `cpu` has blocks of 16."""
    for case in itertools.product(["torch", "cpu"], [1, 7, 13, 64], [1, 4, 16]):
        if case[0] == "torch" or case[2] == 16:
            yield pytest.param(*case, marks=[] if case in DEFAULT_CASES else [pytest.mark.slow])


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    return HybridCheckpoints(tmp_path_factory.mktemp("hybrids"))


def tokens_without_swap(hybrids):
    """For each prompt: its continuation, and the log-probability of each of its tokens."""
    llm = make_llm(hybrids.make()[0])
    outputs = llm.generate(hybrids.prompts(), GREEDY, use_tqdm=False)
    assert llm.get_stats().num_preemptions == 0
    return [(output.outputs[0].token_ids, logprobs(output.outputs[0])) for output in outputs]


def check_host_memory_is_free(llm):
    space = llm.engine.scheduler.block_manager.swap_space
    assert (space.num_free_blocks, space.num_free_slots) == (space.num_blocks, space.num_slots)


@pytest.mark.parametrize(("backend", "budget", "block_size"), list(cases()))
def test_tokens_are_those_of_transformers(hybrids, backend, budget, block_size):
    options = {"attention_backend": backend, "block_size": block_size, "max_num_batched_tokens": budget}
    llm = make_llm(hybrids.make()[0], num_kv_blocks=POOLS[block_size], enable_prefix_caching=False, **options, **SWAP)
    is_default = (backend, budget, block_size) in DEFAULT_CASES
    check_greedy(llm, hybrids.prompts(), tokens_without_swap(hybrids) if is_default else hybrids.greedy())
    stats = llm.get_stats()
    assert stats.num_swaps == stats.num_preemptions
    assert (stats.num_swaps > 0) == (budget > 7), "a smaller budget computes one prompt after the other"
    num_tokens = sum(len(prompt) + MAX_TOKENS - 1 for prompt in hybrids.prompts())
    assert stats.scheduled_tokens == num_tokens, "each token is computed once"
    check_host_memory_is_free(llm)


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [40_000, 75_000, 140_000])
@pytest.mark.parametrize("interval", [1, 2, 64])
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
        pytest.param({"max_num_batched_tokens": 13}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 64, "swap_space_bytes": 60_000}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 64, "attention_backend": "cpu", "block_size": 16, "num_kv_blocks": 8},
                     marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_samples_swap_their_own_states(hybrids, options):
    """Some samples of a prompt are swapped while the others run. The oracle gives their log-probabilities."""
    folder, model = hybrids.make()
    llm, prompts = make_llm(folder, **{"num_kv_blocks": 20, **SWAP, **options}), hybrids.prompts()[:4]
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
        for sample in output.outputs:
            assert logprobs(sample) == pytest.approx(logprobs_of(model, prompt, sample.token_ids), abs=2e-4)
    assert llm.get_stats().num_swaps > 0
    check_all_free(llm)
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


def tokens_of(hybrids, **options):
    """Four prompts of 16 tokens with 30 tokens each behind them: two of them fit into 19 blocks in the end."""
    llm = make_llm(hybrids.make()[0], max_num_batched_tokens=64, **options)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = llm.generate([prompt[:16] for prompt in hybrids.prompts()[2:]], params, use_tqdm=False)
    assert (llm.get_stats().num_swaps > 1) == ("preemption_mode" in options)
    return [output.outputs[0].token_ids for output in outputs]


def copies_only_k_and_v(monkeypatch):
    monkeypatch.setattr(Transfers, "_copy_state", lambda self, source, destination: None)


def brings_no_state_back(monkeypatch):
    def copy_in(self, seq, host_slot):
        self.owned[seq] = self._take_free()

    monkeypatch.setattr(Slots, "copy_in", copy_in)


def forgets_the_convolution(monkeypatch):
    right = Transfers._copy_state

    def copy_state(self, source, destination):
        kept = self.pool.conv.clone()
        right(self, source, destination)
        self.pool.conv.copy_(kept)

    monkeypatch.setattr(Transfers, "_copy_state", copy_state)


def takes_the_wrong_host_slot(monkeypatch):
    right = Slots.copy_in
    monkeypatch.setattr(Slots, "copy_in", lambda self, seq, slot: right(self, seq, slot - 1))


def keeps_the_host_slot(monkeypatch):
    """The next sequence goes to the same one."""
    right = SwapSpace.try_swap_out

    def try_swap_out(self, *arguments):
        is_swapped = right(self, *arguments)
        self._free_slots = list(range(-self.num_slots, 0))
        return is_swapped

    monkeypatch.setattr(SwapSpace, "try_swap_out", try_swap_out)


FAULTS = [brings_no_state_back, copies_only_k_and_v, forgets_the_convolution, takes_the_wrong_host_slot,
          keeps_the_host_slot]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_changes_tokens(hybrids, plant, monkeypatch):
    expected, few_blocks = tokens_of(hybrids), {"num_kv_blocks": 19, **SWAP}
    assert tokens_of(hybrids, **few_blocks) == expected
    plant(monkeypatch)
    try:
        assert tokens_of(hybrids, **few_blocks) != expected
    except AssertionError as error:
        if "it is free and owned" not in str(error):  # of the check after each step, which may come first
            raise
