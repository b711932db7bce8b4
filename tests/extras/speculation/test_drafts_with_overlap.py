"""Drafts with `enable_overlap=True`: a step after which no sequence could get drafts is followed by one launched ahead.

The oracle is the engine without either. A `LateRunner` computes no step before its tokens are awaited. A draft model
and a head follow steps whose input ids are placeholders, so their K and V show whether these were filled in: a draft
model that is the model itself must be right, and a head must draft as the reference does.

Broken by hand, and seen here: a draft model that reads placeholders, or the tokens of the step that it follows.
"""

import random
from dataclasses import replace

import pytest

from nanovllm_extras import LLMEngine, SamplingParams
from nanovllm_extras.sampling.runner_hooks import has_placeholders
from tests.extras.cuda import test_graphs
from tests.extras.failing_request import isolating_engine
from tests.extras.late_runner import LateRunner
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS
from tests.extras.models.test_qwen3_5 import GREEDY, check_all_free, make_llm
from tests.extras.speculation.test_mtp import check_draws, record_draws
from tests.extras.speculation.test_speculation import Knowing, serve, speculating
from tests.extras.test_full_engine import greedy, ids
from tests.extras.test_overlap import KINDS, visible

SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
FEW_SEQS = 2  # more of them get no drafts, and their steps overlap


class LateEngine(LLMEngine):
    """Computes each step when its tokens are awaited, and not before."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.late = LateRunner(self)


def make_requests(kind="all kinds", num_requests=16):
    """The last request is the longest one, and has drafts when the others have ended."""
    rng, stem, requests = random.Random(1), ids(20), []
    for i in range(num_requests):
        prompt = stem[: rng.choice([0, 7, 16])] + ids(rng.randint(1, 16), seed=i)
        fields = KINDS[rng.choice(list(KINDS)) if kind == "all kinds" else kind](i)
        num_tokens = 40 if i == num_requests - 1 else 16 if "min_tokens" in fields else rng.randint(1, 16)
        requests.append((prompt, SamplingParams(ignore_eos=i % 4 > 0, max_tokens=num_tokens, **fields)))
    return requests


@pytest.mark.parametrize("kind", ["greedy", "all kinds"])
def test_outputs_are_those_without_either(with_tokenizer, kind):
    requests = make_requests(kind)
    plain, _ = serve(with_tokenizer, requests)
    proposer = Knowing(share_right=0.5)
    proposer.answers = {(i, one.index): one.token_ids for i, output in plain.items() for one in output.outputs}
    config = speculating(proposer, batch_size=FEW_SEQS)
    outputs, engine = serve(with_tokenizer, requests, config, LateEngine, enable_overlap=True)
    assert {i: visible(one) for i, one in outputs.items()} == {i: visible(one) for i, one in plain.items()}
    if kind == "greedy":
        assert engine.late.num_expected_ids > 10
        assert 0 < engine.get_stats().num_accepted_tokens < engine.get_stats().num_draft_tokens


def test_a_sequence_with_patience_is_not_launched_ahead(with_tokenizer):
    """Right drafts are verified step by step. Wrong ones pause for longer and longer, and steps overlap meanwhile."""
    [(prompt, params)] = requests = [(ids(9), greedy(40))]
    plain, _ = serve(with_tokenizer, requests)
    for share_right, is_ahead in ((1, False), (0, True)):
        proposer = Knowing(share_right)
        proposer.guess = lambda seq, count, right=share_right: [
            one if right else (one + 1) % 300
            for one in plain["0"].outputs[0].token_ids[seq.num_output_tokens :][:count]
        ]
        outputs, engine = serve(with_tokenizer, requests, speculating(proposer), LateEngine, enable_overlap=True)
        assert visible(outputs["0"]) == visible(plain["0"])
        stats = engine.get_stats()
        assert stats.num_accepted_tokens == share_right * stats.num_draft_tokens
        assert stats.num_draft_tokens > 3
        assert (engine.late.num_expected_ids > 10) == is_ahead


def test_an_engine_that_isolates_failures(with_tokenizer):
    """A first step that fails ahead of its time takes back the step in flight, too."""

    def fail(output_token_ids, logits):
        raise RuntimeError("planted")

    requests = [(ids(9, seed=i), greedy(20 + 10 * i)) for i in range(3)]
    plain, _ = serve(with_tokenizer, requests)
    proposer = Knowing()
    proposer.answers = {(i, 0): one.outputs[0].token_ids for i, one in plain.items()}
    planted = (ids(5), SamplingParams(max_tokens=9, logits_processors=[fail]))
    options = {"engine_class": isolating_engine, "enable_overlap": True}
    outputs, engine = serve(with_tokenizer, [*requests, planted], speculating(proposer, batch_size=2), **options)
    assert {i: visible(one) for i, one in outputs.items()} == {i: visible(one) for i, one in plain.items()}
    assert engine.faults.take_failures().keys() == {"3"}
    assert engine.get_stats().num_accepted_tokens > 0


# ---- a draft model


def itself(folder):
    return {"model": str(folder), "num_speculative_tokens": 3, "disable_by_batch_size": FEW_SEQS}


def test_a_model_that_drafts_for_itself_is_right(with_tokenizer):
    requests, options = make_requests("seeded"), {"num_kv_blocks": 22, "block_size": 4, **SWAP}
    plain, _ = serve(with_tokenizer, requests, **options)
    config = itself(with_tokenizer)
    outputs, engine = serve(with_tokenizer, requests, config, LateEngine, enable_overlap=True, **options)
    assert {i: visible(one) for i, one in outputs.items()} == {i: visible(one) for i, one in plain.items()}
    stats = engine.get_stats()
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 5
    assert engine.late.num_expected_ids > 10


def test_a_draft_model_follows_graphs_of_whole_steps(with_tokenizer, monkeypatch):
    """A graph writes its tokens to the memory from which the next step, and the draft model, read them."""
    options = {"speculative_config": itself(with_tokenizer), "enable_overlap": True, "block_size": 4}
    eager, replaying = test_graphs.make_engines(monkeypatch, with_tokenizer, **options)
    seen = []
    can_replay = replaying.runner.can_replay
    monkeypatch.setattr(
        replaying.runner, "can_replay", lambda batch: seen.append(has_placeholders(batch)) or can_replay(batch)
    )
    requests = [(ids(5 + i, seed=i), greedy(6 + 12 * (i == 2))) for i in range(4)]
    expected = test_graphs.serve(eager, requests)
    assert test_graphs.serve(replaying, requests) == expected
    assert replaying.recorder.num_replays > 5
    assert sum(seen) > 3
    for engine in (eager, replaying):
        stats = engine.get_stats()
        assert stats.num_draft_tokens == stats.num_accepted_tokens > 5


# ---- a head of the model


@pytest.mark.slow
def test_drafts_of_a_head_are_those_of_the_reference(heads):
    folder, model, head = heads.make()
    config = {"method": "mtp", "num_speculative_tokens": 3, "disable_by_batch_size": FEW_SEQS}
    llm = make_llm(folder, speculative_config=config, enable_overlap=True)
    late, draws = LateRunner(llm.engine), record_draws(llm.engine)
    prompts, expected = heads.hybrids.prompts(), heads.hybrids.greedy()
    for order in (1, -1):  # the second time prompts begin with hits
        params = [replace(GREEDY, max_tokens=MAX_TOKENS if i == 3 else 5) for i in range(len(prompts))]
        outputs = llm.generate(prompts[::order], params[::order], use_tqdm=False)
        for output, (token_ids, _), one in zip(outputs, expected[::order], params[::order], strict=True):
            assert output.outputs[0].token_ids == token_ids[: one.max_tokens]
    check_draws(model, head, draws)
    assert late.num_expected_ids > 10
    assert llm.get_stats().num_accepted_tokens > 0
    check_all_free(llm)
