"""Two ranks with drafts that a network makes: memory is divided, and the drafts are those of one rank.

A draft model is whole, and only rank 0 has it. A head for multi-token prediction is divided like the other layers. The
ranks are threads of this process.
"""

import pytest

from nanovllm_extras import Config, LLMEngine
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.parallel import start_ranks as start
from nanovllm_extras.parallel.driver import Driver
from tests.extras.failing_request import isolating_engine, serve_beside_a_failing_one
from tests.extras.models.test_qwen3_5 import GREEDY, check_all_free, check_greedy, make_llm
from tests.extras.speculation.test_mtp import check_draws, predicting, record_draws

TWO = {"tensor_parallel_size": 2}


def drafting(folder):
    return {"model": str(folder), "num_speculative_tokens": 3, "disable_by_batch_size": 256}


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


def test_drafts_of_a_divided_head_are_those_of_the_reference(heads, quick_ranks):
    """The second time prompts begin with hits, and with the hidden states that each rank has kept."""
    folder, model, head = heads.make()
    options = {"num_kv_blocks": 22, "preemption_mode": "swap", "swap_space_bytes": 1 << 20}
    llm = make_llm(folder, speculative_config=predicting(), **options, **TWO)
    draws = record_draws(llm.engine)
    prompts, expected = heads.hybrids.prompts(), heads.hybrids.greedy()
    check_greedy(llm, prompts, expected)
    check_greedy(llm, prompts[::-1], expected[::-1])
    check_draws(model, head, draws)
    stats = llm.get_stats()
    assert stats.num_accepted_tokens / stats.num_draft_tokens > 0.3
    check_all_free(llm)
    one = make_llm(folder, speculative_config=predicting(), **options).engine.runner
    assert 2 * llm.engine.runner.kv_caches[1].bytes_per_block == one.kv_caches[1].bytes_per_block


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
    """And the driver is idle between drafts, so that a request may be refused between any two messages."""
    found = []
    for ranks in ({}, TWO):
        options = {"load_format": "dummy", "speculative_config": predicting(), **ranks}
        llm = make_llm(heads.hybrids.make()[0], **options)
        draws = record_draws(llm.engine)
        llm.generate(heads.hybrids.prompts()[:2], GREEDY, use_tqdm=False)
        found.append([one[:3] for one in draws])
    assert found[0] == found[1] != []
    driver = llm.engine.runner.ranks
    assert isinstance(driver, Driver)
    assert not driver._is_underway
