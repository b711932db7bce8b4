"""The K/V store with a draft model, whose K and V are stored too."""

import pytest
import torch

from nanovllm_extras import LLM, Config, LLMEngine, SamplingParams
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache
from tests.extras.kv_store.test_store_parity import MEMORY, TORCH


def drafts_of(folder):
    model = {"model": str(folder), "num_speculative_tokens": 3, "disable_by_batch_size": 256}
    return {"speculative_config": model}


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
