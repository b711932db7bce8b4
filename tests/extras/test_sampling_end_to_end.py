"""What requests ask for, all the way through `LLM`: seeds, log-probabilities, masks, and the model's own defaults.

Oracles: for draws, the same request in an engine of its own; for log-probabilities, `log_softmax` of a
`transformers` forward pass over the whole sequence; for greedy tokens under masks, a loop over such passes. The model
is random, the tokenizer byte-level with fewer tokens than the model's vocabulary.

Seen to fail when broken: draws from a stateful generator; the sample index left out of the hash; a request's seed that
depends on its place in the queue; log-probabilities after the temperature, off by one position, or taken twice for what
a preempted sequence computes again; prompt log-probabilities lost at the border of a chunk or a slice, or skipped by
prefix hits; each field not passed on; defaults of generation_config.json not read, or not overridden.
"""

from types import SimpleNamespace

import pytest
import torch

from nanovllm_extras import LLM, Logprob, SamplingParams
from tests.tiny_tokenizers import byte_level, copy_checkpoint

VOCAB_SIZE = 300
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def model(checkpoints):
    return checkpoints.make(num_hidden_layers=1)[1]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_level()
    assert len(tokenizer) < VOCAB_SIZE
    return tokenizer


@pytest.fixture(scope="module")
def folder(checkpoints, tokenizer, tmp_path_factory):
    return copy_checkpoint(
        checkpoints.make(num_hidden_layers=1)[0], tmp_path_factory.mktemp("end-to-end") / "model", tokenizer
    )


def make_llm(folder, **options):
    options = {"num_kv_blocks": 128, "block_size": BLOCK_SIZE, **options}
    return LLM(folder, dtype="float32", device="cpu", attention_backend="torch", **options)


@pytest.fixture(scope="module")
def llm(folder):
    """One engine for all tests that leave it as it was."""
    return make_llm(folder)


@pytest.fixture(autouse=True)
def leave_nothing_behind(request):
    yield
    if "llm" in request.fixturenames:
        assert_at_rest(request.getfixturevalue("llm"))


def assert_at_rest(llm):
    stats = llm.get_stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_kv_blocks


def ids(length, seed=0):
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(outputs):
    """For each request the tokens of its samples."""
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def params(max_tokens=12, **fields):
    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **fields})


# --- seeds -----------------------------------------------------------------------------------------------------------

SHARED = ids(13, 77)  # three prompts begin with it
REQUESTS = [
    (ids(5, 1), params(seed=1)),
    ([*SHARED, *ids(9, 2)], params(seed=2, temperature=0.7, top_k=20)),
    (ids(17, 3), params(seed=2**63 + 11, top_p=0.8, min_p=0.01)),
    ([*SHARED, *ids(4, 4)], params(seed=3, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)),
    (ids(11, 5), params(seed=4, n=3, temperature=1.3)),
    (SHARED, params(seed=5, min_tokens=6, stop_token_ids=list(range(0, VOCAB_SIZE, 12)))),
    (ids(1, 6), params(temperature=0)),
    (ids(8, 7), params(seed=6, logit_bias={7: 2.0, 9: -3.0}, bad_words=["a", "the"], logprobs=2)),
    (ids(8, 7), params(seed=7, allowed_token_ids=list(range(20, 60)))),
    (ids(6, 8), params(seed=0, n=2, top_k=5, logits_processors=[lambda output_token_ids, logits: logits * 0.7])),
]
PROMPTS, PARAMS = map(list, zip(*REQUESTS, strict=True))


@pytest.fixture(scope="module")
def alone(folder):
    """Tokens of each request when there is nothing else in the engine, nor has ever been."""
    tokens = []
    for prompt, one in REQUESTS:
        tokens += tokens_of(generate(make_llm(folder, enable_prefix_caching=False), prompt, one))
    assert len({str(sample) for samples in tokens for sample in samples}) == sum(one.n for one in PARAMS)
    return tokens


CONFIGS = {
    "budget 7": {"max_num_batched_tokens": 7},
    "three at a time": {"max_num_seqs": 3, "seed": 99},
    "blocks of one token": {"block_size": 1, "num_kv_blocks": 512},
    "preemption, no prefix caching": {"num_kv_blocks": 14, "enable_prefix_caching": False},
    "swapping": {"num_kv_blocks": 14, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_seeded_requests_get_the_same_tokens(folder, alone, config):
    """In a batch of others, in any configuration; in another order too, when the prefix cache knows all prompts."""
    llm = make_llm(folder, **CONFIGS[config])
    assert tokens_of(generate(llm, PROMPTS, PARAMS)) == alone
    assert tokens_of(generate(llm, PROMPTS[::-1], PARAMS[::-1])) == alone[::-1]
    stats = llm.get_stats()
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in CONFIGS[config] and "block_size" not in CONFIGS[config])
    assert (stats.prefix_cache_hit_tokens > 0) == CONFIGS[config].get("enable_prefix_caching", True)
    assert_at_rest(llm)


def test_without_seeds_the_engines_makes_a_run_repeatable(folder):
    def run(**options):
        return tokens_of(generate(make_llm(folder, **options), [ids(6)] * 6 + [ids(9, 3)], params(n=2)))

    first = run(seed=5)
    assert len({str(sample) for samples in first for sample in samples}) == 14
    assert run(seed=5) == first
    assert run(seed=5, max_num_batched_tokens=5, num_kv_blocks=24) == first
    others = [run(), run(seed=1), run(seed=6), run(seed=2**40)]
    for i, tokens in enumerate(others):
        assert all(tokens[j] != first[j] for j in range(7))
        assert tokens not in others[:i]


def test_a_request_without_a_seed_repeats_none_that_has_one(folder):
    """The numbers of the two kinds must not meet: the i-th request without a seed is not the one with seed i."""
    seeds = [params(seed=seed) for seed in range(8)]
    tokens = tokens_of(generate(make_llm(folder), [ids(6)] * 16, [*seeds, *[params()] * 8]))
    assert len({str(samples) for samples in tokens}) == 16


# --- log-probabilities -----------------------------------------------------------------------------------------------


def hf_logprobs(model, token_ids):
    """What `transformers` says of each next token: [len(token_ids), vocab_size] float64"""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].double().log_softmax(dim=-1)


def assert_position(entries, token_id, k, expected, tokenizer):
    """entries: dict from token id to Logprob; the chosen token first, then the k likeliest; expected: [vocab_size]"""
    likeliest = expected.sort(descending=True).indices.tolist()
    top = likeliest[: VOCAB_SIZE if k == -1 else k]
    assert list(entries) == [token_id, *[i for i in top if i != token_id]]
    for i, entry in entries.items():
        assert isinstance(entry, Logprob)
        assert entry.logprob == pytest.approx(float(expected[i]), abs=1e-4)
        assert entry.rank == likeliest.index(i) + 1
        assert entry.decoded_token == tokenizer.decode([i])


def assert_logprobs(output, one, model, tokenizer):
    for completion in output.outputs:
        expected = hf_logprobs(model, [*output.prompt_token_ids, *completion.token_ids])
        if one.logprobs is None:
            assert completion.logprobs is None
            assert completion.cumulative_logprob is None
        else:
            assert len(completion.logprobs) == len(completion.token_ids)
            rows = expected[len(output.prompt_token_ids) - 1 :]
            for entries, token_id, row in zip(completion.logprobs, completion.token_ids, rows, strict=False):
                assert_position(entries, token_id, one.logprobs, row, tokenizer)
            total = sum(float(row[token_id]) for row, token_id in zip(rows, completion.token_ids, strict=False))
            assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
        if one.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
            assert output.prompt_logprobs[0] is None
            targets = output.prompt_token_ids[1:]
            for entries, token_id, row in zip(output.prompt_logprobs[1:], targets, expected, strict=False):
                assert_position(entries, token_id, one.prompt_logprobs, row, tokenizer)


LOGPROB_REQUESTS = [
    (ids(9, 1), params(seed=1, logprobs=3, temperature=0.4, presence_penalty=2, logit_bias={5: 3.0})),
    ([*SHARED, *ids(7, 2)], params(seed=2, prompt_logprobs=2)),
    ([*SHARED, *ids(3, 3)], params(seed=3, logprobs=0, prompt_logprobs=0, top_k=4)),
    (ids(1, 4), params(seed=4, logprobs=1, prompt_logprobs=5)),
    (ids(15, 5), params(temperature=0, logprobs=5, prompt_logprobs=1)),
    (ids(6, 6), params(seed=6, n=3, logprobs=2, prompt_logprobs=2, allowed_token_ids=list(range(50, 90)))),
    (ids(12, 7), params(seed=7)),
    (ids(4, 8), params(max_tokens=3, seed=8, logprobs=-1, prompt_logprobs=-1)),
]

LOGPROB_CONFIGS = {
    "a batch": {},
    "preemption, budget 5": {"num_kv_blocks": 13, "max_num_batched_tokens": 5},
    "no prefix caching": {"enable_prefix_caching": False},
    "swapping": {"num_kv_blocks": 13, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
}


@pytest.mark.parametrize("config", LOGPROB_CONFIGS)
def test_logprobs_are_those_of_a_full_forward_pass(folder, model, tokenizer, config):
    """For outputs and prompts; a second time too, when the prefix cache knows the prompts."""
    llm = make_llm(folder, **LOGPROB_CONFIGS[config])
    prompts, wanted = map(list, zip(*LOGPROB_REQUESTS, strict=True))
    for _ in range(2):
        for output, one in zip(generate(llm, prompts, wanted), wanted, strict=True):
            assert_logprobs(output, one, model, tokenizer)
    assert (llm.get_stats().num_preemptions > 0) == ("num_kv_blocks" in LOGPROB_CONFIGS[config])


def test_prompt_logprobs_of_a_long_prompt(folder, model, tokenizer):
    """Logits of long prompts are computed in slices."""
    one = params(max_tokens=2, temperature=0, prompt_logprobs=1, logprobs=1)
    (output,) = generate(make_llm(folder, max_num_batched_tokens=200), ids(480), one)
    assert_logprobs(output, one, model, tokenizer)


def test_prompt_logprobs_see_the_whole_prompt_and_leave_it_in_the_prefix_cache(folder, model, tokenizer):
    llm = make_llm(folder)
    prompt = ids(21)
    one = params(max_tokens=2, temperature=0, prompt_logprobs=0)
    for _ in range(2):
        (output,) = generate(llm, prompt, one)
        assert output.num_cached_tokens == 0
        assert_logprobs(output, one, model, tokenizer)
    (output,) = generate(llm, prompt, params(max_tokens=2, temperature=0))
    assert output.num_cached_tokens == 20


# --- masks, biases and processors ------------------------------------------------------------------------------------


def hf_greedy_with(model, prompt, max_tokens, change):
    """Greedy tokens after `change(output so far, logits)` has changed a copy of the logits [vocab_size] in place."""
    output = []
    while len(output) < max_tokens:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].clone()
        change(output, logits)
        output.append(int(logits.argmax()))
    return output


def greedy_tokens(llm, prompt, max_tokens=10, **fields):
    return tokens_of(generate(llm, prompt, params(max_tokens, temperature=0, **fields)))[0][0]


def test_bad_words(llm, model, tokenizer):
    """Of one token and of two; the letters of the second one may come, but not in a row."""
    letters = tokenizer.convert_tokens_to_ids(list("abcdefgh"))
    plain = greedy_tokens(llm, ids(6), allowed_token_ids=letters)
    text = tokenizer.decode(plain)
    one, two = text[0], next(text[i : i + 2] for i in range(1, 9) if text[0] not in text[i : i + 2])
    words = [tokenizer.encode(one), tokenizer.encode(two)]
    assert [len(word) for word in words] == [1, 2]

    def change(output, logits):
        logits[[i for i in range(VOCAB_SIZE) if i not in letters]] = -torch.inf
        logits[words[0][0]] = -torch.inf
        if output[-1:] == words[1][:1]:
            logits[words[1][1]] = -torch.inf

    tokens = greedy_tokens(llm, ids(6), allowed_token_ids=letters, bad_words=[one, two])
    assert tokens == hf_greedy_with(model, ids(6), 10, change)
    assert tokens != plain
    assert one not in tokenizer.decode(tokens)
    assert two not in tokenizer.decode(tokens)


def test_logits_processors_run_in_order_and_for_each_sample(llm):
    seen = []

    def note(output_token_ids, logits):
        seen.append(tuple(output_token_ids))
        return logits + 1

    def forbid(output_token_ids, logits):
        return logits.index_fill(0, torch.tensor(range(100)), -torch.inf)

    def allow_one(output_token_ids, logits):
        return torch.where(logits == -torch.inf, 50.0, -torch.inf)

    ((first, second),) = tokens_of(
        generate(llm, ids(6), params(6, seed=2, n=2, logits_processors=[note, forbid, allow_one]))
    )
    assert first != second
    assert {*first, *second} <= set(range(100))
    assert sorted(seen) == sorted(tuple(tokens[:i]) for tokens in (first, second) for i in range(6))


def test_a_processor_that_fails_takes_its_call_along_and_nothing_else(llm):
    def fail(output_token_ids, logits):
        if len(output_token_ids) == 2:
            raise ZeroDivisionError
        return logits

    expected = tokens_of(generate(llm, ids(9), params(seed=3)))
    with pytest.raises(ZeroDivisionError):
        generate(llm, [ids(6), ids(9)], [params(seed=2, logits_processors=[fail]), params(seed=3)])
    assert_at_rest(llm)
    assert tokens_of(generate(llm, ids(9), params(seed=3))) == expected


def test_truncation_and_penalties_reach_the_sampler(llm):
    """Each field changes the tokens of a long draw, and neutral values do not."""
    plain = tokens_of(generate(llm, ids(6), params(40, seed=4)))
    for fields, changes in [
        ({"presence_penalty": 2.0}, True),
        ({"frequency_penalty": 2.0}, True),
        ({"repetition_penalty": 3.0}, True),
        ({"top_k": 2}, True),
        ({"top_p": 0.2}, True),
        ({"min_p": 0.9}, True),
        ({"logit_bias": {5: 100.0}}, True),
        ({"allowed_token_ids": [3, 50, 51]}, True),
        ({"top_k": 10**6, "top_p": 1.0}, False),
    ]:
        assert (tokens_of(generate(llm, ids(6), params(40, seed=4, **fields))) != plain) == changes, fields


# --- when to end -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ending(folder, model, tmp_path_factory):
    """A model whose greedy answer to `prompt` ends with an end token at index `end`, and names another end token."""
    prompt = ids(9)
    answer = hf_greedy_with(model, prompt, 20, lambda output, logits: None)
    end = next(i for i in range(6, 20) if answer[i] not in answer[:i])
    target = tmp_path_factory.mktemp("ending") / "model"
    llm = make_llm(copy_checkpoint(folder, target, eos_token_id=[298, answer[end]]))
    return SimpleNamespace(llm=llm, prompt=prompt, answer=answer, end=end, eos=answer[end])


def finish(llm, prompt, one):
    (output,) = generate(llm, prompt, one)
    (completion,) = output.outputs
    return completion.token_ids, completion.finish_reason, completion.stop_reason


def test_min_tokens_masks_both_kinds_of_stop_token(ending, model):
    """They are not chosen before; from then on they are again, and end the request."""
    answer, end = ending.answer, ending.end
    fields, stops = {"ignore_eos": False, "stop_token_ids": [answer[3]]}, [298, ending.eos, answer[3]]
    for min_tokens in (1, 4, end + 1, 15):

        def change(output, logits, min_tokens=min_tokens):
            if len(output) < min_tokens:
                logits[stops] = -torch.inf

        expected = hf_greedy_with(model, ending.prompt, 20, change)
        last = next((i for i, token_id in enumerate(expected) if token_id in stops), 19)
        tokens, reason, _ = finish(
            ending.llm, ending.prompt, params(20, temperature=0, min_tokens=min_tokens, **fields)
        )
        assert tokens == expected[: last + 1]
        assert reason == ("stop" if expected[last] in stops else "length")
        assert len(tokens) > min_tokens or len(tokens) == 20


def test_min_tokens_where_an_end_token_is_beyond_the_vocabulary(folder, tmp_path):
    """Some checkpoints name end tokens that the network has no row for: those never come, and hurt nobody."""
    llm = make_llm(copy_checkpoint(folder, tmp_path / "model", eos_token_id=[VOCAB_SIZE + 9, 298]))
    without = make_llm(copy_checkpoint(folder, tmp_path / "without", eos_token_id=[298]))
    one = params(5, temperature=0, min_tokens=3, ignore_eos=False)
    assert finish(llm, ids(6), one) == finish(without, ids(6), one)


# --- generation_config.json ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.1}, {"min_p": 0.1, "repetition_penalty": 1.1}),
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": None, "top_k": None, "pad_token_id": 0, "bos_token_id": 5, "transformers_version": "5"}, {}),
    ],
)
def test_defaults_of_the_model(folder, tmp_path, config, expected):
    llm = make_llm(copy_checkpoint(folder, tmp_path / "model", **config))
    assert llm.get_default_sampling_params() == SamplingParams(**expected)


def test_the_models_defaults_are_used_without_params_and_overridden_by_them(folder, tmp_path):
    fields = {"temperature": 0.5, "top_k": 7, "top_p": 0.9}
    llm = make_llm(copy_checkpoint(folder, tmp_path / "model", max_new_tokens=9, eos_token_id=None, **fields))
    plain = make_llm(folder)
    by_default = llm.generate(ids(7), use_tqdm=False)
    assert tokens_of(by_default) == tokens_of(generate(plain, ids(7), SamplingParams(max_tokens=9, **fields)))
    assert len(by_default[0].outputs[0].token_ids) == 9
    # a SamplingParams replaces them all: its own defaults are vLLM's
    seeded = SamplingParams(seed=3)
    assert tokens_of(generate(llm, ids(7), seeded)) == tokens_of(generate(plain, ids(7), seeded))
    assert len(generate(llm, ids(7), seeded)[0].outputs[0].token_ids) == 16


# --- what this model cannot do ---------------------------------------------------------------------------------------

BEYOND = [
    ({"stop_token_ids": [5, VOCAB_SIZE]}, ["stop_token_ids", "299", "got 300"]),
    ({"allowed_token_ids": [VOCAB_SIZE + 41]}, ["allowed_token_ids", "299", "got 341"]),
    ({"logit_bias": {5: 1.0, VOCAB_SIZE: 1.0}}, ["logit_bias", "299", "got 300"]),
    ({"logprobs": VOCAB_SIZE + 1}, ["logprobs", "300", "got 301"]),
    ({"prompt_logprobs": 10**6}, ["prompt_logprobs", "300", "got 1000000"]),
]


@pytest.mark.parametrize(("fields", "says"), BEYOND)
def test_beyond_the_vocabulary(llm, fields, says):
    """Refused before anything is queued, by `generate`, `stream` and `add_request`, in the last place too."""
    before = llm.get_stats()
    good, bad = params(), SamplingParams(**fields)
    for call in (
        lambda: generate(llm, ids(5), bad),
        lambda: generate(llm, [ids(5)] * 3, [good, good, bad]),
        lambda: llm.stream([ids(5)] * 2, [good, bad]),
        lambda: llm.engine.add_request("x", ids(5), bad),
    ):
        with pytest.raises(ValueError, match=r"must") as info:
            call()
        for part in says:
            assert part in str(info.value)
        assert llm.get_stats() == before


def test_the_last_token_of_the_vocabulary_is_legal_everywhere(llm):
    last = VOCAB_SIZE - 1
    fields = {"stop_token_ids": [last], "allowed_token_ids": [last], "logit_bias": {last: 1.0}}
    one = SamplingParams(logprobs=VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE, top_k=VOCAB_SIZE, seed=1, **fields)
    (output,) = generate(llm, ids(5), one)
    (completion,) = output.outputs
    assert (completion.token_ids, completion.stop_reason) == ([last], last)
    assert len(completion.logprobs[0]) == len(output.prompt_logprobs[1]) == VOCAB_SIZE


def test_text_is_needed_for_stop_strings_and_bad_words(tiny_checkpoint):
    llm = make_llm(tiny_checkpoint[0])
    for fields in ({"stop": "a"}, {"bad_words": ["a"]}):
        with pytest.raises(ValueError, match=r"tokenizer"):
            generate(llm, ids(5), params(**fields))
    (output,) = generate(llm, ids(5), params(3, temperature=0, logprobs=1))
    assert output.outputs[0].text == ""
    assert [entry.decoded_token for entry in output.outputs[0].logprobs[0].values()] == [None]
    assert_at_rest(llm)
