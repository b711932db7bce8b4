"""How many tokens a step verifies almost for nothing, and what an engine keeps of that."""

import pytest
import torch

from nanovllm_extras import LLM, TINY_QWEN3, TINY_QWEN3_5, SamplingParams
from nanovllm_extras.speculation import start_speculation as start

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("costs", "most", "num_rows"),
    [
        ({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.5}, 64, 8),
        ({1: 1.9}, 64, 1),
        ({1: 1.0, 2: 1.0, 4: 1.0}, 7, 4),
        ({}, 1, 1),
    ],
)
def test_rows_are_doubled_as_long_as_this_is_cheap(monkeypatch, costs, most, num_rows):
    monkeypatch.setattr(start, "cost_of_doubling", lambda runner, count: costs[count])
    assert start.measure_rows(None, most) == num_rows


def test_a_start_measures_once(monkeypatch):
    """Timed steps leave no trace: nothing is owned, and the first block that is handed out is the first."""
    counts = []
    monkeypatch.setattr(
        start, "measure_rows", lambda runner, most, measure=start.measure_rows: counts.append(most) or 4
    )
    llm = LLM(TINY_QWEN3, speculative_config=NGRAM, max_num_batched_tokens=32)
    engine = llm.engine
    assert counts == [32]
    assert engine.scheduler.drafter.max_rows == 4
    engine.recover()
    assert counts == [32]
    assert engine.scheduler.drafter.max_rows == 4
    assert engine.get_stats().num_free_blocks == engine.get_stats().num_kv_blocks


def test_real_steps_are_timed():
    llm = LLM(TINY_QWEN3, speculative_config={**NGRAM, "disable_by_batch_size": 3})
    assert llm.engine.scheduler.drafter.max_rows == 3 * (1 + 3)
    cache = llm.engine.runner.kv_cache.tensor
    assert 0.2 < start.cost_of_doubling(llm.engine.runner, 2) < 20
    assert not cache[:, :, 1:].any(), "only the null block is written"


def test_steps_of_models_with_states_are_timed_with_drafts(monkeypatch):
    """Two decodes with three drafts each, which read real states; and unwritten memory is not computed with."""
    options = {"num_kv_blocks": 9, "attention_backend": "cpu"}
    llm = LLM(TINY_QWEN3_5, speculative_config={**NGRAM, "disable_by_batch_size": 4}, max_num_seqs=4, **options)
    runner, seen = llm.engine.runner, []
    for states in runner.layout.pool.states:
        states[:, 1:] = torch.nan
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda batch: seen.append(batch.metadata) or forward(batch))
    assert start.cost_of_doubling(runner, 4) > 0
    small, large = seen[:2]
    assert small.state_sources.tolist() == [1, 1, 2, 3]
    assert large.state_slots.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert large.state_sources.tolist() == [1, 1, 2, 3, 5, 5, 6, 7]
    assert [rows.tolist() for rows in large.rounds] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert not large.is_first.any()
    for states in runner.layout.pool.states:
        assert states[:, 1:9].isfinite().all()
        assert states[:, 9:].isnan().all()
        assert not states[:, 0].any()


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_small_pool_is_measured_too(num_slots):
    moves = start.drafts_of_nobody(8, 3, num_slots)
    assert set(moves.slots) == set(range(1, num_slots + 1))
    assert set(moves.sources) <= set(moves.slots)


def test_metrics_have_the_names_of_vllm():
    llm = LLM(TINY_QWEN3, speculative_config={**NGRAM, "disable_by_batch_size": 3})
    llm.generate("a a a a a a a a", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    stats, values = llm.get_stats(), {one.name: getattr(one, "value", None) for one in llm.get_metrics()}
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert values[f"nanovllm:spec_decode_{name}"] == getattr(stats, name)
    assert stats.num_draft_tokens > 0
