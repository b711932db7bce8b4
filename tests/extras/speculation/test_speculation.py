"""Outputs with drafts are those without, for every option; and what statistics say of drafts.

The oracle is the engine without speculation, which the other tests check. `Knowing` proposes what that engine has
answered, with some tokens changed: so right and wrong drafts of all lengths occur. Random traffic over the scheduler is
in `test_speculative_scheduler.py`.

Broken by hand, and seen here: a row that draws with the random number of another position; penalties that do not see
the drafts before their row; a stop string completed by a draft; log-probabilities of another row; drafts for a grammar.
"""

import random

import pytest

from nanovllm_extras import LLM, TINY_QWEN3, BeamSearchParams, Config, LLMEngine, SamplingParams
from nanovllm_extras.engine.invariants import check_invariants
from tests.conftest import every_second
from tests.extras.failing_request import isolating_engine
from tests.extras.full_fake_kv_cache import check_stored
from tests.extras.test_full_engine import assert_at_rest, greedy, ids
from tests.extras.test_overlap import CONFIGURATIONS, KINDS, visible

KINDS_WITHOUT_DRAFTS = ("logits processors",)
NUM_REQUESTS = 16


class Planted(Exception):
    pass


class Knowing:
    """Proposes what is known to follow, with `share_right` of the tokens."""

    def __init__(self, share_right=0.8):
        self.answers = {}  # (request id, sample) -> token ids
        self.share_right = share_right
        self.num_proposed = 0

    def propose(self, wanted):
        return [self.guess(seq, count) for seq, count in wanted]

    def guess(self, seq, count):
        rng = random.Random(f"{seq.request_id} {seq.sample_index} {seq.num_known_tokens}")
        answer = self.answers.get((seq.request_id, seq.sample_index), [])
        drafts = answer[seq.num_output_tokens :][: rng.randint(0, count)]
        self.num_proposed += len(drafts)
        return [i if rng.random() < self.share_right else rng.randrange(300) for i in drafts]


def speculating(proposer, num_drafts=4, batch_size=256):
    return {"method": proposer, "num_speculative_tokens": num_drafts, "disable_by_batch_size": batch_size}


def serve(folder, requests, speculative_config=None, engine_class=LLMEngine, **options):
    """The last output of each request; they come two at a step. Blocks are counted after each step."""
    options = {"dtype": "float32", "device": "cpu", **options}
    engine = engine_class(Config(folder, speculative_config=speculative_config, **options))
    todo, outputs = list(enumerate(requests)), {}
    while todo or engine.has_unfinished_requests():
        for i, (prompt, params) in todo[:2]:
            engine.add_request(str(i), prompt, params, stream=bool(i % 3))
        del todo[:2]
        for output in engine.step().outputs:
            outputs[output.request_id] = output
        seqs = [seq for request in engine.requests.values() for seq in request.seqs]
        check_invariants(engine)
        check_stored(engine.scheduler.block_manager, engine.scheduler.running)
        assert engine._ahead is not None or all(seq.num_tokens == seq.num_known_tokens for seq in seqs)
    assert_at_rest(engine)
    return outputs, engine


def assert_same_outputs(folder, requests, **options):
    """Returns statistics of the engine that speculates, and what was proposed."""
    plain, _ = serve(folder, requests, **options)
    proposer = Knowing()
    proposer.answers = {(i, one.index): one.token_ids for i, output in plain.items() for one in output.outputs}
    outputs, engine = serve(folder, requests, speculating(proposer), **options)
    assert {i: visible(one) for i, one in outputs.items()} == {i: visible(one) for i, one in plain.items()}
    assert len(outputs) == len(requests)
    return engine.get_stats(), proposer


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("kind", every_second(["all kinds", *KINDS]))
@pytest.mark.sparse
@pytest.mark.thinned
def test_outputs_are_the_same(with_tokenizer, kind, options):
    rng, stem = random.Random(1), ids(20)
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = stem[: rng.choice([0, 7, 16])] + ids(rng.randint(1, 16), seed=i)
        fields = KINDS[rng.choice(list(KINDS)) if kind == "all kinds" else kind](i)
        lengths = {"max_tokens": 16} if "min_tokens" in fields else {"max_tokens": rng.randint(1, 16)}
        requests.append((prompt, SamplingParams(ignore_eos=i % 4 > 0, **lengths, **fields)))
    stats, proposer = assert_same_outputs(with_tokenizer, requests, **options)
    if kind in KINDS_WITHOUT_DRAFTS:
        assert proposer.num_proposed == stats.num_draft_tokens == 0
    elif not options:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens <= proposer.num_proposed


@pytest.mark.parametrize("seed", range(3))
def test_any_traffic_on_the_kernels(seed):
    """The bundled model in bfloat16, whose C kernels compute a row without regard to the others: the same bits."""
    rng = random.Random(seed)
    words = ["block", "table", "paged", "attention", "what", "is", "the", "of", "prefix", "cache", "vLLM"]
    kinds = [KINDS[kind] for kind in KINDS if kind not in ("stop tokens", "stop strings", "bad words")]
    requests = []
    for i in range(8):
        fields = rng.choice(kinds)(i) | rng.choice(
            [{}, {"stop": ["e", " th", "KV cache"][i % 3 :]}, {"bad_words": ["the"]}]
        )
        prompt = " ".join(rng.choices(words, k=rng.randint(1, 20)))
        requests.append((prompt, SamplingParams(max_tokens=rng.randint(1, 40), **fields)))
    options = rng.choice(
        [{}, {"num_kv_blocks": 24}, {"max_num_batched_tokens": 16}, {"long_prefill_token_threshold": 3}]
    )
    assert_same_outputs(TINY_QWEN3, requests, dtype="auto", **options)


def test_an_engine_that_isolates_failures(with_tokenizer):
    """One request raises in each step; its neighbours have drafts, and go on."""

    def fail(output_token_ids, logits):
        raise RuntimeError("planted")

    requests = [(ids(9, seed=i), greedy(20)) for i in range(3)]
    plain, _ = serve(with_tokenizer, requests)
    proposer = Knowing()
    proposer.answers = {(i, 0): one.outputs[0].token_ids for i, one in plain.items()}
    planted = (ids(5), SamplingParams(max_tokens=9, logits_processors=[fail]))
    outputs, engine = serve(with_tokenizer, [*requests, planted], speculating(proposer), isolating_engine)
    assert {i: visible(one) for i, one in outputs.items()} == {i: visible(one) for i, one in plain.items()}
    assert engine.faults.take_failures().keys() == {"3"}
    assert engine.get_stats().num_accepted_tokens > 0


def test_a_failed_step_loses_drafts_and_nothing_else(with_tokenizer):
    requests = [(ids(9, seed=i), SamplingParams(seed=i, max_tokens=20, ignore_eos=True)) for i in range(3)]
    plain, _ = serve(with_tokenizer, requests)
    proposer = Knowing()
    proposer.answers = {(i, 0): one.outputs[0].token_ids for i, one in plain.items()}
    config = Config(with_tokenizer, dtype="float32", device="cpu", speculative_config=speculating(proposer))
    engine, outputs = LLMEngine(config), {}
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    run, turn, num_failures = engine.runner.run, 0, 0

    def fail_often(batch):
        nonlocal turn
        turn += 1
        if turn % 3 == 0:
            raise Planted
        return run(batch)

    engine.runner.run = fail_often
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step().outputs}
        except Planted:
            num_failures += 1
        assert all(seq.num_tokens == seq.num_known_tokens for one in engine.requests.values() for seq in one.seqs)
    assert {i: visible(one) for i, one in outputs.items()} == {i: visible(one) for i, one in plain.items()}
    assert engine.get_stats().num_accepted_tokens > 0
    assert num_failures > 2


def test_requests_that_get_no_drafts():
    """A grammar and a beam search keep a state; the request beside them speculates."""
    proposer = Knowing()
    llm = LLM(TINY_QWEN3, speculative_config=speculating(proposer))
    plain = LLM(TINY_QWEN3)
    form = SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": "(ab|cd){4,9}"})
    expected = plain.generate("What is paging?", form, use_tqdm=False)[0].outputs[0].text
    beams = plain.beam_search("What is paging?", BeamSearchParams(2, 8))[0].sequences
    proposer.answers = {(str(i), j): [5] * 99 for i in range(2) for j in range(9)}
    assert llm.generate("What is paging?", form, use_tqdm=False)[0].outputs[0].text == expected
    assert llm.beam_search("What is paging?", BeamSearchParams(2, 8))[0].sequences == beams
    assert proposer.num_proposed == 0


def test_statistics_and_metrics(with_tokenizer):
    requests = [(ids(9), greedy(21))]
    plain, _ = serve(with_tokenizer, requests)
    proposer = Knowing(share_right=1)
    proposer.answers = {("0", 0): plain["0"].outputs[0].token_ids}
    _, engine = serve(with_tokenizer, requests, speculating(proposer))
    stats = engine.get_stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens == proposer.num_proposed > 0
    assert 0 < stats.num_drafts <= stats.num_draft_tokens <= 4 * stats.num_drafts
    assert stats.generation_tokens == 21
    assert stats.steps == 21 - stats.num_accepted_tokens
    assert stats.scheduled_tokens == 9 + 20, "each token is computed once if all drafts are right"
