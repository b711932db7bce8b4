"""A draft model shares block tables with the model that it drafts for: the same outputs, and its own K and V are right.

A model that drafts for itself is always right, if its cache holds what it should: after prefix hits, forks,
preemption, at any temperature.
"""

import random

import pytest

from nanovllm_extras import LLM, TINY_QWEN3, Config, LLMEngine, SamplingParams
from nanovllm_extras.memory.kinds import AllTokens, Window
from nanovllm_extras.sampling.runner_hooks import NO_TOKEN
from nanovllm_extras.speculation.draft_model import DraftModel
from tests.extras.models.architectures import MAX_TOKENS, Checkpoints
from tests.extras.speculation.test_speculation import serve
from tests.extras.test_full_engine import ids
from tests.extras.test_overlap import visible


def requests(rng):
    stem, made = ids(20), []
    for i in range(10):
        prompt = stem[: rng.choice([0, 9, 17])] + ids(rng.randint(1, 9), seed=i)
        kind = [
            {"temperature": 0},
            {"seed": i},
            {"seed": i, "top_k": 9, "n": 2},
            {"seed": i, "repetition_penalty": 1.2},
        ]
        stop = rng.choice([{}, {}, {"stop_token_ids": list(range(0, 256, 5))}])
        made.append((prompt, SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True, **kind[i % 4], **stop)))
    return made


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "max_num_batched_tokens": 24},
        {"num_kv_blocks": 22, "block_size": 4, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
    ],
)
def test_a_model_that_drafts_for_itself_is_right(with_tokenizer, options):
    made = requests(random.Random(2))
    plain, _ = serve(with_tokenizer, made, **options)
    drafting = {"model": str(with_tokenizer), "num_speculative_tokens": 3, "disable_by_batch_size": 256}
    outputs, engine = serve(with_tokenizer, made, drafting, **options)
    assert {i: visible(one) for i, one in outputs.items()} == {i: visible(one) for i, one in plain.items()}
    stats = engine.get_stats()
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 10
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)
    assert stats.num_swaps == (stats.num_preemptions if "preemption_mode" in options else 0)


def test_a_scheduler_that_the_engine_does_not_use_changes_nothing(with_tokenizer):
    """As after a reset that was interrupted. Seen to fail when the newest scheduler got the proposer of all."""
    made = [(ids(9), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))]
    drafting = {"model": str(with_tokenizer), "num_speculative_tokens": 3, "disable_by_batch_size": 256}
    outputs, engine = serve(with_tokenizer, made, drafting, block_size=4)
    engine.make_scheduler(engine.make_block_manager())
    before = engine.get_stats()
    engine.add_request("again", *made[0])
    while engine.has_unfinished_requests():
        again = engine.step()
    assert again[0].outputs[0].token_ids == outputs["0"].outputs[0].token_ids
    stats = engine.get_stats()
    assert stats.num_accepted_tokens - before.num_accepted_tokens == before.num_accepted_tokens > 5


def test_nothing_follows_a_draft_for_which_all_tokens_are_forbidden(with_tokenizer, monkeypatch):
    """No network can read NO_TOKEN. Seen to fail if the next draft is drawn after it."""

    def draw(self, growing, drafts):
        assert all(NO_TOKEN not in drafts[i] for i, _ in growing)
        return [5 if not drafts[i] else NO_TOKEN for i, _ in growing]

    monkeypatch.setattr(DraftModel, "_draw", draw)
    made = [(ids(9), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))]
    plain, _ = serve(with_tokenizer, made)
    drafting = {"model": str(with_tokenizer), "num_speculative_tokens": 4, "disable_by_batch_size": 256}
    outputs, engine = serve(with_tokenizer, made, drafting)
    assert visible(outputs["0"]) == visible(plain["0"])
    assert engine.get_stats().num_draft_tokens > 0


def test_a_model_of_another_vocabulary_is_refused(with_tokenizer):
    drafting = {"model": TINY_QWEN3, "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="must have the vocabulary of the model, 300 tokens"):
        LLMEngine(Config(with_tokenizer, device="cpu", speculative_config=drafting))


def test_a_model_that_takes_fewer_tokens_is_refused(checkpoints, with_tokenizer):
    short, _ = checkpoints.make(num_hidden_layers=1, vocab_size=300, max_position_embeddings=64)
    with pytest.raises(ValueError, match=r"must take max_model_len \d+ tokens; .* takes 64"):
        LLM(with_tokenizer, device="cpu", speculative_config={"model": str(short), "num_speculative_tokens": 2})


def test_the_pool_has_room_for_both_models(checkpoints, with_tokenizer):
    other, _ = checkpoints.make(num_hidden_layers=1, vocab_size=300)
    drafting = {"model": str(other), "num_speculative_tokens": 2, "disable_by_batch_size": 256}
    options = {"device": "cpu", "attention_backend": "torch", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 20}
    engine = LLMEngine(Config(with_tokenizer, speculative_config=drafting, **options))
    runner, draft = engine.runner, engine.scheduler.drafter.proposer.runner
    assert draft.kv_cache.num_blocks == runner.kv_cache.num_blocks
    caches = [runner.kv_cache.tensor.nbytes, draft.kv_cache.tensor.nbytes]
    of_a_block = sum(caches) // (1 + runner.kv_cache.num_blocks)
    assert (1 << 20) - of_a_block < sum(caches) <= 1 << 20
    assert runner.draft_needs.weight_bytes == sum(weight.nbytes for weight in draft.model.parameters())


# ---- a model whose layers all have a window


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("no window", {"num_kv_blocks": 24, "preemption_mode": "swap", "swap_space_bytes": 1 << 20}),
        ("short window", {"enable_overlap": True}),
    ],
    ids=str,
)
def test_a_draft_model_of_a_model_with_windows_only(tmp_path, draft, options):
    """All blocks are kept for the draft model, which may see more. The first draft model is the model itself."""
    checkpoints, kind = Checkpoints(tmp_path), ("mistral", "short window")
    folder = checkpoints.make(*kind)[0]
    config = {"model": str(checkpoints.make("mistral", draft)[0]), "num_speculative_tokens": 3}
    params, prompts = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), checkpoints.prompts(*kind)
    base = {"attention_backend": "torch", "block_size": 4, "dtype": "float32", "device": "cpu", "max_num_seqs": 4}
    plain = LLM(folder, **base).generate(prompts, params, use_tqdm=False)
    expected = [one.outputs[0].token_ids for one in plain]
    assert [token_ids[:MAX_TOKENS] for token_ids in expected] == checkpoints.greedy(*kind)
    llm = LLM(folder, speculative_config={**config, "disable_by_batch_size": 4}, **base, **options)
    for order in (1, -1):  # the second time prompts begin with hits
        outputs = llm.generate(prompts[::order], params, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in outputs] == expected[::order]
    stats = llm.get_stats()
    assert stats.num_draft_tokens > 10
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (draft == "short window")
    assert stats.prefix_cache_hit_tokens > 0
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)
    assert stats.num_window_blocks == 0
    assert type(llm.engine.scheduler.block_manager.kind) is AllTokens


def test_a_model_with_windows_only_gives_blocks_back_without_a_draft_model(tmp_path):
    folder = Checkpoints(tmp_path).make("mistral", "short window")[0]
    knowing = {"method": "ngram", "num_speculative_tokens": 2}
    for config in (None, knowing):
        llm = LLM(folder, device="cpu", attention_backend="torch", block_size=4, speculative_config=config)
        assert type(llm.engine.scheduler.block_manager.kind) is Window
