"""The K/V store with a draft model, whose K and V are stored too.

A model that drafts for itself is always right, if its own cache holds what it should after blocks were loaded.
"""

import pytest
import torch

from nanovllm_extras import LLM, Config, LLMEngine, SamplingParams
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache
from tests.conftest import examples
from tests.extras.kv_store.test_store_parity import MEMORY, TORCH, make_requests, serve, tokens_of


def drafts_of(folder):
    model = {"model": str(folder), "num_speculative_tokens": 3, "disable_by_batch_size": 256}
    return {"speculative_config": model}


@pytest.mark.parametrize("is_itself", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tokens_are_those_without_a_store(checkpoints, tiny_checkpoint, is_itself):
    folder, _ = tiny_checkpoint
    draft = folder if is_itself else checkpoints.make(num_hidden_layers=1)[0]
    requests = make_requests(seed=2, num_requests=max(12, examples(40)))
    expected = serve(LLMEngine(Config(folder, **TORCH)), requests)
    engine = LLMEngine(Config(folder, **TORCH, **MEMORY, **drafts_of(draft)))
    assert tokens_of(serve(engine, requests)) == tokens_of(expected)
    stats = engine.get_stats()
    assert stats.kv_store.num_loaded_blocks > 0
    assert (stats.num_draft_tokens == stats.num_accepted_tokens) == is_itself
    assert stats.num_draft_tokens > 10
    assert stats.num_free_blocks == stats.num_kv_blocks


def test_a_tier_smaller_than_a_block_of_both_models_is_refused(tiny_checkpoint):
    folder, _ = tiny_checkpoint
    num_bytes = 2 * 2 * 4 * 2 * 32 * 4  # K and V, layers, tokens, heads, head_dim, float32
    options = TORCH | {"kv_offloading_size": num_bytes / 2**30}
    with pytest.raises(ValueError, match=f"must hold at least one block of {2 * num_bytes} bytes, got {num_bytes}"):
        LLM(folder, **options, **drafts_of(folder))


def test_a_block_of_a_smaller_draft_model_comes_back_bit_by_bit(checkpoints, tiny_checkpoint):
    """Its part of a block's data is behind that of the model."""
    draft = checkpoints.make(num_hidden_layers=1)[0]
    engine = LLMEngine(Config(tiny_checkpoint[0], **TORCH, **MEMORY, **drafts_of(draft)))
    caches = [engine.runner.kv_cache, engine.scheduler.drafter.proposer.runner.kv_cache]
    found = []
    for name in ("computed", "loaded"):
        engine.add_request(name, list(range(30)), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        engine.step()
        blocks = engine.scheduler.running[0].block_table[:7].tolist()
        found.append([cache.tensor[:, :, blocks].clone() for cache in caches])
        while engine.has_unfinished_requests():
            engine.step()
        engine.parts.kv_store.saver.wait(5)
        reset_prefix_cache(engine.scheduler)  # of the pool, not of the store
    assert engine.get_stats().kv_store.num_loaded_blocks == 7
    for computed, loaded in zip(*found, strict=True):
        assert torch.equal(computed, loaded)
