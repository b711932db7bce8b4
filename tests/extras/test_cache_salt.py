"""`cache_salt`: hits stay among requests with the same salt, in the pool, in a store and after a restart.

Oracle of the hits: a set of (salt, prefix). Oracle of the tokens: an engine whose requests have no salts.

Seen to fail when broken: a salt that is lost in `LLM`, in a fork or in the store's keys; a salt that only changes the
seed of the hash; a first block that is not salted if its last token is an output.
"""

import random

import pytest

from nanovllm import prefix_cache
from nanovllm_extras import LLM, SamplingParams, TokensPrompt
from nanovllm_extras.beam_search.beam_params import BeamSearchParams
from nanovllm_extras.kv_store.keys import names_of
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.recording import read_recording
from tests.conftest import examples

SIZE = 4  # of a block
PLAIN = {"attention_backend": "torch", "enforce_eager": True, "block_size": SIZE, "dtype": "float32"}
OTHERS = {"overlap": {"enable_overlap": True}, "swap": {"preemption_mode": "swap", "swap_space_bytes": 1 << 16}}
SALTS = (None, "a", "b", "a\0", "ü" * 500)
STEM = list(range(40, 60))


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints.make(num_hidden_layers=1, hidden_size=32, intermediate_size=48, head_dim=16)[0]


def ask(llm, token_ids, salt=None, **fields):
    prompt = {"prompt_token_ids": token_ids} | ({} if salt is None else {"cache_salt": salt})
    params = SamplingParams(**{"temperature": 0, "max_tokens": 5, "ignore_eos": True} | fields)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def make_requests(seed, num_requests):
    rng = random.Random(seed)
    for _ in range(num_requests):
        token_ids = STEM[: rng.randint(0, 20)] + [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        yield token_ids, rng.choice(SALTS)


@pytest.fixture(scope="module")
def truth(folder):
    """The greedy tokens of each prompt."""
    llm = LLM(folder, num_kv_blocks=400, **PLAIN)
    return lambda token_ids: ask(llm, token_ids).outputs[0].token_ids


class Hits:
    """A set of (salt, prefix): all full blocks whose K and V have been computed."""

    def __init__(self):
        self.cached = set()

    def add(self, computed, salt):
        self.cached |= {(salt, *computed[:stop]) for stop in range(SIZE, len(computed) + 1, SIZE)}

    def check(self, output, salt):
        """The output of a request has as many cached tokens as the set says; then its blocks are in the set."""
        token_ids, num_hits = output.prompt_token_ids, 0
        while (num_hits + 1) * SIZE < len(token_ids) and (salt, *token_ids[: (num_hits + 1) * SIZE]) in self.cached:
            num_hits += 1
        assert output.num_cached_tokens == num_hits * SIZE, (token_ids, salt)
        for one in output.outputs:
            self.add((token_ids + one.token_ids)[:-1], salt)


def assert_hits_stay_among_salts(llm, truth, seed):
    hits = Hits()
    for token_ids, salt in make_requests(seed, max(16, examples(80))):
        output = ask(llm, token_ids, salt)
        hits.check(output, salt)
        assert output.outputs[0].token_ids == truth(token_ids)


@pytest.mark.parametrize("kind", ["overlap", "swap"])
def test_hits_of_the_pool_stay_among_requests_with_the_same_salt(folder, truth, kind):
    assert_hits_stay_among_salts(LLM(folder, num_kv_blocks=400, **PLAIN, **OTHERS[kind]), truth, seed=1)


def test_salts_are_told_apart_if_all_hashes_of_tokens_are_equal(folder, truth, monkeypatch):
    prompt = [*STEM[:SIZE], 1]  # one block: blocks with the same hash evict each other
    expected = truth(prompt)  # by an engine that goes on with the usual hash
    monkeypatch.setattr(prefix_cache, "hash_block", lambda parent_hash, tokens: 7)
    llm = LLM(folder, num_kv_blocks=400, **PLAIN)
    hits = [ask(llm, prompt, salt, max_tokens=1).num_cached_tokens for salt in ("a", "b", "b", None, "a")]
    assert hits == [0, 0, SIZE, 0, 0]  # the newest block with a hash is the one that is found
    assert all(ask(llm, prompt, salt).outputs[0].token_ids == expected for salt in SALTS)


def test_samples_and_beams_have_the_salt_of_their_prompt(folder):
    """Their first block is only full with an output, so a fork without the salt would register it without."""
    llm = LLM(folder, num_kv_blocks=400, **PLAIN)
    hits = Hits()
    hits.check(ask(llm, [7, 8], "a", n=3, temperature=1.0, seed=1, max_tokens=8), "a")
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    (beams,) = llm.beam_search([{"prompt_token_ids": [9, 8], "cache_salt": "a"}], params)
    llm.embed({"prompt_token_ids": STEM, "cache_salt": "a"}, use_tqdm=False)
    for computed in (STEM, *(one.tokens[:-1] for one in beams.sequences)):
        hits.add(computed, "a")
    for salt, *block in sorted(hits.cached, key=len):
        for other in (None, "b", salt):
            hits.check(ask(llm, [*block, 1], other, max_tokens=1), other)


def on_disk(path):
    extra = {"shared_storage_path": str(path), "max_bytes": 1 << 24}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}


def test_hits_of_a_store_stay_among_requests_with_the_same_salt_also_after_a_restart(folder, truth, tmp_path):
    prompt, options = [*STEM, 1], PLAIN | {"kv_transfer_config": on_disk(tmp_path / "kv")}
    with LLM(folder, num_kv_blocks=16, **options) as llm:
        ask(llm, prompt, "a")
        assert llm.engine.parts.kv_store.saver.wait(5)
    with LLM(folder, num_kv_blocks=16, **options) as llm:
        for salt, num_loaded in ((None, 0), ("b", 0), ("a", 20), ("a\0", 0)):
            before = llm.get_stats().kv_store.loaded_tokens
            output = ask(llm, prompt, salt)
            assert output.outputs[0].token_ids == truth(prompt)
            assert (output.num_cached_tokens, llm.get_stats().kv_store.loaded_tokens - before) == (num_loaded,) * 2


def test_a_salt_is_not_taken_for_tokens():
    """Otherwise the blocks after a salt would be those after a block whose tokens have the same bytes."""
    after_salt = Sequence("", [66], SamplingParams())
    after_salt.cache_salt = "A\0\0\0"
    after_tokens = Sequence("", [65, 66], SamplingParams())
    salted, plain = (names_of(seq, 0, seq.num_tokens, bytes(32), 1)[-1] for seq in (after_salt, after_tokens))
    assert salted.tokens == plain.tokens
    assert salted.key != plain.key


def test_a_recording_shows_no_salt(folder, tmp_path):
    path = tmp_path / "run.jsonl"
    with LLM(folder, num_kv_blocks=16, trace=path, **PLAIN) as llm:
        for salt in ("my secret", None, "my secret"):
            ask(llm, [*STEM, 1], salt)
    check_recording(path, read_recording(path))
    assert "secret" not in path.read_text()


def test_an_explanation_shows_no_prompt_of_another_salt(folder):
    llm = LLM(folder, num_kv_blocks=64, explain_prefix_misses=True, **PLAIN)
    for token_ids, salt in (([*STEM, 1], "a"), ([*STEM[:6], 1, 2, 3], "b"), ([*STEM[:6], 1, 2, 3], None)):
        misses = ask(llm, token_ids, salt).metrics.prefix_misses
        assert [one.cause for one in misses] == ["never_seen", "partial_block"], salt
    differs = ask(llm, [*STEM[:6], 1, 2, 3], "a").metrics.prefix_misses[1]
    assert (differs.cause, differs.cached_token_ids) == ("differs", tuple(STEM[6:8]))


BAD = [("", ValueError, "not be empty"), ("\ud800", ValueError, ".*surrogate"),
       (7, TypeError, "be a str or None, got int"),
       (b"a", TypeError, "be a str or None")]  # fmt: skip


@pytest.mark.parametrize(("salt", "kind", "message"), BAD)
def test_bad_salts(folder, salt, kind, message):
    llm = LLM(folder, num_kv_blocks=16, **PLAIN)
    with pytest.raises(kind, match=f"cache_salt must {message}"):
        llm.generate({"prompt_token_ids": [1], "cache_salt": salt}, use_tqdm=False)
    assert not llm.engine.requests


def test_forms_of_vllm(folder):
    llm = LLM(folder, num_kv_blocks=16, **PLAIN)
    prompt = TokensPrompt(prompt_token_ids=[*STEM, 1], cache_salt="a")
    first, second = (llm.generate(prompt, use_tqdm=False)[0].num_cached_tokens for _ in range(2))
    assert (first, second) == (0, 20)
    assert llm.generate({"prompt_token_ids": [*STEM, 1], "cache_salt": None}, use_tqdm=False)[0].num_cached_tokens == 0
    with pytest.raises(ValueError, match="cache_salt='a' is not supported.*put it into the prompt"):
        SamplingParams(cache_salt="a")
