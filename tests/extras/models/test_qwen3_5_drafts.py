"""Qwen3.5 with drafts gives the tokens of `transformers` in float32, and of the engine without drafts.

`Knowing` proposes what is known to follow, with some tokens changed, so right and wrong drafts of all lengths occur. By
default each option has each of its values; the sweep (`pytest -m slow`) takes all combinations.

Broken by hand, and seen here: a sequence that keeps its last slot; convolution states that are not rolled back; a draft
that reads the slot of its sequence; snapshots with rejected drafts.
"""

import itertools
import random
import shutil

import pytest
import torch
import transformers

from nanovllm_extras import LLM, Config, SamplingParams
from tests.extras.failing_request import FailingError, isolating_engine, serve_beside_a_failing_one
from tests.extras.models.hybrid_checkpoints import (
    QWEN35,
    continue_greedily,
    make_config,
    set_weights_that_matter,
)
from tests.extras.models.test_qwen3_5 import GREEDY, TINY_POOLS, check_all_free, check_greedy, logprobs, make_llm

pytest.importorskip("transformers.models.qwen3_5")


class Knowing:
    """Proposes how texts that are known go on. A draft is right with the probability `share_right`."""

    def __init__(self, texts, share_right=0.7):
        self.texts, self.share_right, self.rng = texts, share_right, random.Random(0)

    def propose(self, wanted):
        return [self.guess(seq, count) for seq, count in wanted]

    def guess(self, seq, count):
        tokens = seq.token_ids.tolist()
        following = [text[len(tokens) :][:count] for text in self.texts if text[: len(tokens)] == tokens]
        right = following[seq.sample_index % len(following)] if following else []
        return [one if self.rng.random() < self.share_right else (one + 1) % QWEN35["vocab_size"] for one in right]


@pytest.fixture(scope="module")
def hybrids(all_hybrids):
    return all_hybrids["Qwen3_5"]


def drafting(method, most=4):
    return {"method": method, "num_speculative_tokens": most, "disable_by_batch_size": 64}


def texts_of(hybrids):
    return [[*prompt, *token_ids] for prompt, (token_ids, _) in zip(hybrids.prompts(), hybrids.greedy(), strict=True)]


def make_drafting_llm(hybrids, share_right=0.7, **options):
    return make_llm(hybrids.make()[0], speculative_config=drafting(Knowing(texts_of(hybrids), share_right)), **options)


DEFAULT_CASES = [("cpu", 13, 16, "large", 0.7), ("torch", 64, 1, "tiny", 0.7), ("torch", 7, 4, "large", 1)]


def cases():
    """(backend, budget, block size, pool, share of right drafts)"""
    for case in itertools.product(["torch", "cpu"], [7, 13, 64], [1, 4, 16], ["large", "tiny"], [0, 0.7, 1]):
        if case[0] == "torch" or case[2] == 16:
            yield pytest.param(*case, marks=[] if case in DEFAULT_CASES else [pytest.mark.slow])


@pytest.mark.parametrize(("backend", "budget", "block_size", "pool", "share_right"), list(cases()))
def test_tokens_are_those_of_transformers(hybrids, backend, budget, block_size, pool, share_right):
    num_blocks = {"large": 480 // block_size, "tiny": {1: 76, **TINY_POOLS}[block_size]}[pool]
    llm = make_drafting_llm(hybrids, share_right, attention_backend=backend, block_size=block_size,
                            max_num_batched_tokens=budget, num_kv_blocks=num_blocks)  # fmt: skip
    check_greedy(llm, hybrids.prompts(), hybrids.greedy())
    check_greedy(llm, hybrids.prompts()[::-1], hybrids.greedy()[::-1])  # with hits
    stats = llm.get_stats()
    kept = stats.num_accepted_tokens / stats.num_draft_tokens
    assert (kept == share_right) if share_right in (0, 1) else (0 < kept < 1)
    if pool == "large":
        assert stats.prefix_cache_hit_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 13, "num_kv_blocks": 24},
        pytest.param(
            {"attention_backend": "cpu", "block_size": 16, "max_num_seqs": 3, "enable_prefix_caching": False},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_samples_are_those_without_drafts(hybrids, options):
    """Three samples of each prompt, with seeds: the same tokens and log-probabilities."""
    prompts = hybrids.prompts()[:5]
    params = [SamplingParams(n=3, temperature=1.0, seed=i, max_tokens=12, ignore_eos=True, logprobs=0,
                             repetition_penalty=1.0 + 0.1 * (i % 2)) for i in range(5)]  # fmt: skip
    plain = make_llm(hybrids.make()[0], **options).generate(prompts, params, use_tqdm=False)
    texts = [[*output.prompt_token_ids, *one.token_ids] for output in plain for one in output.outputs]
    llm = make_llm(hybrids.make()[0], speculative_config=drafting(Knowing(texts)), **options)
    for output, expected in zip(llm.generate(prompts, params, use_tqdm=False), plain, strict=True):
        for one, other in zip(output.outputs, expected.outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert logprobs(one) == pytest.approx(logprobs(other), abs=2e-4)
    assert 0 < llm.get_stats().num_accepted_tokens < llm.get_stats().num_draft_tokens
    check_all_free(llm)


@pytest.mark.parametrize(
    ("options", "share_right"),
    [
        ({"max_num_batched_tokens": 11}, 0.7),
        pytest.param({"attention_backend": "cpu", "block_size": 16}, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_conversation_finds_its_earlier_turns(hybrids, options, share_right):
    """Snapshots are every two blocks, also of outputs, where drafts are verified: the same hits as without drafts."""
    folder, model = hybrids.make()
    prompt, turns = hybrids.prompts()[2], []
    for turn in range(4):
        turns.append((prompt, continue_greedily(model, prompt)))
        prompt = [*prompt, *turns[-1][1][0], turn, 7 * turn]
    knowing = Knowing([[*prompt, *token_ids] for prompt, (token_ids, _) in turns], share_right)
    options = {"state_snapshot_interval": 2, **options}
    engines = [make_llm(folder, **options), make_llm(folder, speculative_config=drafting(knowing), **options)]
    hits = [[], []]
    for prompt, (token_ids, wanted) in turns:
        for llm, found in zip(engines, hits, strict=True):
            output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
            assert output.outputs[0].token_ids == token_ids
            assert logprobs(output.outputs[0]) == pytest.approx(wanted, abs=2e-4)
            found.append(output.num_cached_tokens)
    assert hits[0] == hits[1]
    assert hits[1][-1] > 0
    assert engines[1].get_stats().num_accepted_tokens > 0


@pytest.mark.slow
def test_a_request_that_fails_beside_drafts(hybrids):
    """Its steps run again, with the states before them. The others have drafts in these steps."""
    engine = isolating_engine(
        Config(model=hybrids.make()[0], device="cpu", dtype="float32", attention_backend="torch", block_size=4,
               num_kv_blocks=120, max_num_seqs=8, speculative_config=drafting(Knowing(texts_of(hybrids))))
    )  # fmt: skip

    tokens = serve_beside_a_failing_one(engine, hybrids.prompts(), GREEDY)
    assert tokens == [token_ids for token_ids, _ in hybrids.greedy()]
    assert engine.get_stats().num_accepted_tokens > 0


def test_failed_steps_lose_drafts_and_their_slots(hybrids):
    llm, prompts = make_drafting_llm(hybrids), hybrids.prompts()
    engine, run, turn = llm.engine, llm.engine.runner.run, itertools.count(1)

    def fail_often(batch):
        tokens = run(batch)
        if next(turn) % 5 == 0:
            raise FailingError
        return tokens

    engine.runner.run = fail_often
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    outputs = {}
    while engine.has_unfinished_requests():
        try:
            outputs |= {one.request_id: one.outputs[0].token_ids for one in engine.step().outputs}
        except FailingError:
            slots = engine.scheduler.block_manager.states
            assert slots.num_free_slots == slots.num_slots
    assert [outputs[str(i)] for i in range(len(prompts))] == [token_ids for token_ids, _ in hybrids.greedy()]
    assert engine.get_stats().num_accepted_tokens > 0
    check_all_free(llm)


def test_the_pool_has_slots_for_drafts(hybrids):
    def slots(**options):
        return make_llm(hybrids.make()[0], **options).engine.runner.layout.pool.num_slots

    assert slots(max_num_seqs=3, speculative_config=drafting("ngram", 4)) == 6 + 12
    assert slots(max_num_seqs=3, speculative_config=drafting("ngram", 4), enable_prefix_caching=False) == 3 + 12
    assert slots(max_num_seqs=30, speculative_config=drafting("ngram", 4)) == 60 + 64


def test_a_grammar_beside_drafts(tmp_path, with_tokenizer):
    """A request with a grammar gets no drafts. Its neighbour does, and both have the outputs without drafts."""
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(make_config(vocab_size=300)).eval()
    set_weights_that_matter(model)
    model.save_pretrained(tmp_path)
    for file in with_tokenizer.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    form = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"regex": "(ab|cd){4,9}"})
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = ["What is paging?", "What is it not?"]
    plain = make_llm(tmp_path).generate(prompts, [form, free], use_tqdm=False)
    knowing = Knowing([[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in plain[1:]], 0.8)
    llm = make_llm(tmp_path, speculative_config=drafting(knowing))
    found = llm.generate(prompts, [form, free], use_tqdm=False)
    assert [one.outputs[0].text for one in found] == [one.outputs[0].text for one in plain]
    assert llm.get_stats().num_accepted_tokens > 0


def test_the_kernels_give_the_bits_that_they_give_without_drafts(hybrids):
    """In bfloat16, where other roundings would change log-probabilities and tokens."""
    options = {"dtype": "bfloat16", "device": "cpu", "attention_backend": "cpu", "num_kv_blocks": 40, "max_num_seqs": 8}
    found = []
    for config in (None, drafting(Knowing(texts_of(hybrids), 0.8))):
        llm = LLM(hybrids.make()[0], speculative_config=config, **options)
        outputs = llm.generate(hybrids.prompts(), GREEDY, use_tqdm=False)
        found.append([(one.outputs[0].token_ids, logprobs(one.outputs[0])) for one in outputs])
    assert found[0] == found[1]
    assert llm.get_stats().num_accepted_tokens > 0
