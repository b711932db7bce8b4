"""Two ranks with drafts that a network makes: the tokens of one rank without drafts, and the drafts of one rank.

A draft model is whole, and only rank 0 has it. A head for multi-token prediction is divided like the other layers. The
ranks are threads of this process.
"""

import random
from dataclasses import replace

import pytest
import torch

from nanovllm_extras import LLM, Config, LLMEngine
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.parallel import start_ranks as start
from nanovllm_extras.parallel.driver import Driver
from tests.extras.failing_request import isolating_engine, serve_beside_a_failing_one
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.late_runner import LateRunner
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS
from tests.extras.models.test_qwen3_5 import GREEDY, check_all_free, check_greedy, make_llm
from tests.extras.speculation import test_drafts_beside_layouts as layouts
from tests.extras.speculation.test_draft_model import requests
from tests.extras.speculation.test_drafts_with_overlap import FEW_SEQS, LateEngine, itself, make_requests
from tests.extras.speculation.test_mtp import Heads, check_draws, predicting, record_draws
from tests.extras.speculation.test_speculation import serve
from tests.extras.test_overlap import visible

TWO = {"tensor_parallel_size": 2}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
OPTIONS = {
    "small budget": {"max_num_batched_tokens": 24},
    "swap": {"num_kv_blocks": 22, **SWAP},
    "preemption and a K/V store": {"num_kv_blocks": 22, "kv_offloading_size": 1e-2},
    "cpu": {"attention_backend": "cpu", "block_size": 16},
}


def slow_but(names, default):
    return [name if name in default else pytest.param(name, marks=pytest.mark.slow) for name in names]


def drafting(folder):
    return {"model": str(folder), "num_speculative_tokens": 3, "disable_by_batch_size": 256}


@pytest.mark.parametrize("name", slow_but(OPTIONS, ("preemption and a K/V store",)))
def test_a_draft_model_of_two_ranks(with_tokenizer, request, name):
    """It is the model itself, so all drafts are right, if its cache holds what it should."""
    request.getfixturevalue("rank_threads" if name == "cpu" else "quick_ranks")
    options = {"attention_backend": "torch", "block_size": 4, **OPTIONS[name]}
    if name == "cpu":
        need_a_compiler(torch.float32)
    made = requests(random.Random(2))
    plain, _ = serve(with_tokenizer, made, attention_backend="torch", block_size=4)
    outputs, engine = serve(with_tokenizer, made, drafting(with_tokenizer), **options, **TWO)
    assert {i: visible(one)[0] for i, one in outputs.items()} == {i: visible(one)[0] for i, one in plain.items()}
    stats = engine.get_stats()
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 10
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)
    assert stats.num_swaps == (stats.num_preemptions if "preemption_mode" in options else 0)
    if "kv_offloading_size" in options:  # blocks of rank 0 have the draft model's K and V, too
        assert stats.kv_store.num_loaded_blocks > 0


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return layouts.Pairs(tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize("name", slow_but(layouts.MODELS, ("qwen3_5", "gemma3")))
def test_a_draft_model_beside_other_layouts_on_two_ranks(pairs, quick_ranks, name):
    """Rank 0 has the draft model beside its share of states, or of K and V of several shapes.

    Gemma 3 and 4 mix windows, so that all ranks must know of the draft model: with it, all layers have one block table.
    """
    folder, small, _, draft = pairs.make(name)
    llm = LLM(folder, **layouts.options_for(small, **layouts.TIGHT, **SWAP, **TWO))
    draws = layouts.record_draws(llm.engine)
    assert layouts.tokens_of(llm, pairs.prompts(name)) == [[token_ids] for token_ids in pairs.greedy(name)]
    layouts.check_draws(draft, draws)
    assert llm.get_stats().num_accepted_tokens > 0
    assert llm.get_stats().num_swaps > 0


def test_a_draft_model_follows_steps_that_are_launched_ahead(with_tokenizer, quick_ranks):
    made, options = make_requests("seeded"), {"attention_backend": "torch", "block_size": 4}
    plain, _ = serve(with_tokenizer, made, **options)
    config = itself(with_tokenizer)
    outputs, engine = serve(with_tokenizer, made, config, LateEngine, enable_overlap=True, **options, **TWO)
    assert {i: visible(one) for i, one in outputs.items()} == {i: visible(one) for i, one in plain.items()}
    stats = engine.get_stats()
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 5
    assert engine.late.num_expected_ids > 10


@pytest.mark.parametrize("memory", [{"kv_cache_memory_bytes": 1 << 20}, {}])
def test_all_ranks_have_the_blocks_that_fit_beside_the_draft_model(with_tokenizer, quick_ranks, monkeypatch, memory):
    """Only rank 0 needs memory for the draft model's K and V. All ranks take the least number of blocks."""
    runners, whole = [], ModelRunner.describe

    def describe(self):
        runners.append(self)
        return whole(self)

    monkeypatch.setattr(ModelRunner, "describe", describe)
    monkeypatch.setattr(start.Device, "free_bytes", lambda self, runner: 1 << 20)
    options = {"device": "cpu", "attention_backend": "torch", "max_num_seqs": 64, **TWO, **memory}
    engine = LLMEngine(Config(with_tokenizer, speculative_config=drafting(with_tokenizer), **options))
    draft = engine.scheduler.drafter.proposer.runner
    assert [one.part.communicator.rank for one in runners if one is not draft] in ([0, 1], [1, 0])
    assert len({one.kv_cache.num_blocks for one in runners}) == 1
    of_rank_0 = engine.runner.kv_cache.tensor.nbytes + draft.kv_cache.tensor.nbytes
    assert (1 << 20) - of_rank_0 // draft.kv_cache.num_blocks < of_rank_0 <= 1 << 20


# ---- a head for multi-token prediction


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return Heads(tmp_path_factory.mktemp("mtp"))


@pytest.mark.parametrize("name", slow_but([*OPTIONS][:2] + ["cpu"], ("swap",)))
def test_drafts_of_a_divided_head_are_those_of_the_reference(heads, request, name):
    """The second time prompts begin with hits, and with the hidden states that each rank has kept."""
    request.getfixturevalue("rank_threads" if name == "cpu" else "quick_ranks")
    if name == "cpu":
        need_a_compiler(torch.float32)
    folder, model, head = heads.make()
    llm = make_llm(folder, speculative_config=predicting(), **OPTIONS[name], **TWO)
    draws = record_draws(llm.engine)
    prompts, expected = heads.hybrids.prompts(), heads.hybrids.greedy()
    check_greedy(llm, prompts, expected)
    check_greedy(llm, prompts[::-1], expected[::-1])
    check_draws(model, head, draws)
    stats = llm.get_stats()
    assert stats.num_accepted_tokens / stats.num_draft_tokens > 0.3
    check_all_free(llm)
    one = make_llm(folder, speculative_config=predicting(), **OPTIONS[name]).engine.runner
    assert 2 * llm.engine.runner.kv_caches[1].bytes_per_block == one.kv_caches[1].bytes_per_block


def test_a_divided_head_follows_steps_that_are_launched_ahead(heads, quick_ranks):
    folder, model, head = heads.make()
    config = {**predicting(), "disable_by_batch_size": FEW_SEQS}
    llm = make_llm(folder, speculative_config=config, enable_overlap=True, **TWO)
    late, draws = LateRunner(llm.engine), record_draws(llm.engine)
    params = [replace(GREEDY, max_tokens=5 if i else MAX_TOKENS) for i in range(4)]
    outputs = llm.generate(heads.hybrids.prompts()[:4], params, use_tqdm=False)
    for output, (token_ids, _), one in zip(outputs, heads.hybrids.greedy()[:4], params, strict=True):
        assert output.outputs[0].token_ids == token_ids[: one.max_tokens]
    check_draws(model, head, draws)
    assert late.num_expected_ids > 4


@pytest.mark.slow
def test_a_head_with_experts_is_divided(tmp_path, quick_ranks):
    heads = Heads(tmp_path, "Qwen3_5Moe")
    folder, model, head = heads.make()
    llm = make_llm(folder, speculative_config=predicting(), **TWO)
    draws = record_draws(llm.engine)
    check_greedy(llm, heads.hybrids.prompts(), heads.hybrids.greedy())
    check_draws(model, head, draws)


def test_a_request_that_fails_does_not_change_the_hidden_states_of_others(heads, quick_ranks):
    folder, model, head = heads.make()
    config = Config(model=folder, device="cpu", dtype="float32", attention_backend="torch", block_size=4,
                    num_kv_blocks=120, max_num_seqs=8, speculative_config=predicting(), **TWO)  # fmt: skip
    engine = isolating_engine(config)
    draws = record_draws(engine)
    tokens = serve_beside_a_failing_one(engine, heads.hybrids.prompts(), GREEDY)
    assert tokens == [token_ids for token_ids, _ in heads.hybrids.greedy()]
    check_draws(model, head, draws)


def test_random_weights_of_the_head_are_those_of_one_rank(heads, quick_ranks):
    found = []
    for ranks in ({}, TWO):
        options = {"load_format": "dummy", "speculative_config": predicting(), **ranks}
        llm = make_llm(heads.hybrids.make()[0], **options)
        draws = record_draws(llm.engine)
        llm.generate(heads.hybrids.prompts()[:2], GREEDY, use_tqdm=False)
        found.append([one[:3] for one in draws])
    assert found[0] == found[1] != []


def test_the_driver_is_idle_between_drafts(heads, quick_ranks):
    """So that a request may be refused, or a step fail, between any two messages."""
    llm = make_llm(heads.make()[0], speculative_config=predicting(), **TWO)
    llm.generate(heads.hybrids.prompts()[:2], GREEDY, use_tqdm=False)
    driver = llm.engine.runner.ranks
    assert isinstance(driver, Driver)
    assert not driver._is_underway
