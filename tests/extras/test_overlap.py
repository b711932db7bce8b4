"""Outputs with overlap are those without it, for every option; and what is launched, awaited and dropped when.

The oracle is the engine without overlap, which the other tests check. A `LateRunner` computes no step before its
tokens are awaited. Random traffic over the scheduler, with and without overlap, is in `test_scheduling.py`;
`test_full_engine.py` runs both ways too.

Broken by hand, and seen here or there: placeholders that are hashed for the prefix cache; blocks that are given away
while a step in flight writes to them; a token of a finished sequence that is not dropped; a placeholder that names
another row; placeholders that tokens do not replace; a failed step whose placeholders stay; sequences that need to know
their tokens but do not wait; a child that gets a placeholder before it lives; an output token's block that is never
registered because its token was not known in time.
"""

import dataclasses
import math
import random

import pytest

from nanovllm_extras import LLM, BeamSearchParams, Config, LLMEngine, SamplingParams
from tests.extras.late_runner import LateRunner
from tests.extras.test_full_engine import assert_at_rest, greedy, ids, make_engine, run, tokens_of

NUM_REQUESTS = 24
BLOCKS = {"num_kv_blocks": 48, "block_size": 4}
CONFIGURATIONS = {
    "room for all": {},
    "chunked prefill": {"max_num_batched_tokens": 9, "block_size": 4},
    "preemption": BLOCKS,
    "preemption, no prefix caching": {**BLOCKS, "enable_prefix_caching": False},
    "swap": {**BLOCKS, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
    "few sequences, blocks of 1": {"max_num_seqs": 5, "block_size": 1},
}


def alphabetic(seed, **fields):
    """Random text of the letters a to e, so that short stop strings and bad words appear in it."""
    return {"temperature": 1.0, "seed": seed, "allowed_token_ids": list(range(65, 70)), **fields}


KINDS = {
    "greedy": lambda i: {"temperature": 0.0},
    "seeded": lambda i: {"temperature": 1.0, "seed": i, **[{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}][i % 4]},
    "without a seed": lambda i: {"temperature": 0.8},
    "samples": lambda i: {"temperature": 1.0, "n": 1 + i % 4},
    "logprobs": lambda i: {"temperature": i % 2, "logprobs": 3, "prompt_logprobs": [None, 2][i % 2], "seed": i},
    "stop strings": lambda i: alphabetic(
        i, stop=["abc", "ee", "d"][i % 3 :], include_stop_str_in_output=bool(i % 2), n=1 + i % 2
    ),
    "stop tokens": lambda i: alphabetic(i, stop_token_ids=[66, 69], min_tokens=i % 5),
    "penalties": lambda i: {"temperature": 0.0, **([{"repetition_penalty": 1.3}, {"presence_penalty": 1.0}][i % 2])},
    "bad words": lambda i: alphabetic(i, bad_words=[["a"], ["ab", "cd"]][i % 2]),
    "biases": lambda i: {"temperature": 0.5, "logit_bias": {5: 4.0}, "seed": i},
    "logits processors": lambda i: {"temperature": 0.0, "logits_processors": [forbid_the_last]},
}
ALWAYS_AHEAD = ("greedy", "seeded", "without a seed", "logprobs", "stop tokens", "biases")


def forbid_the_last(output_token_ids, logits):
    if output_token_ids:
        logits[output_token_ids[-1]] = -math.inf
    return logits


def serve(folder, requests, overlap, options):
    """All that is put out for `requests`, which come two at a step; some are aborted."""
    engine = LLMEngine(Config(folder, device="cpu", dtype="float32", enable_overlap=overlap, **options))
    late = LateRunner(engine)
    rng, todo, outputs = random.Random(0), list(enumerate(requests)), {}
    while todo or engine.has_unfinished_requests():
        for i, (prompt, params) in todo[:2]:
            engine.add_request(str(i), prompt, params, stream=bool(i % 3))
        del todo[:2]
        for output in engine.step().outputs:
            assert not outputs.get(output.request_id) or not outputs[output.request_id].finished
            outputs[output.request_id] = output
        if rng.random() < 0.1:
            engine.abort_request("3")
    assert_at_rest(engine)
    return {i: visible(output) for i, output in outputs.items() if output.finished}, late, engine.get_stats()


def visible(output):
    completions = [(c.text, c.token_ids, c.finish_reason, c.stop_reason, rounded(c.logprobs)) for c in output.outputs]
    return completions, output.prompt_token_ids, rounded(output.prompt_logprobs), output.metrics.num_output_tokens


def rounded(positions):
    """Which tokens, and how likely, up to what another batch's rounding does."""
    return positions and [
        one and {i: (pytest.approx(logprob.logprob, abs=1e-4), logprob.decoded_token) for i, logprob in one.items()}
        for one in positions
    ]


CASES = [
    ("greedy", "room for all"),
    ("logprobs", "chunked prefill"),
    ("penalties", "preemption"),
    ("all kinds", "preemption, no prefix caching"),
    ("samples", "swap"),
    ("stop strings", "few sequences, blocks of 1"),
]
SLOW_CASES = [
    ("seeded", "preemption"),
    ("without a seed", "swap"),
    ("stop tokens", "chunked prefill"),
    ("bad words", "preemption"),
    ("biases", "few sequences, blocks of 1"),
    ("logits processors", "room for all"),
]


@pytest.mark.parametrize(
    ("kind", "configuration"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_outputs_are_the_same(with_tokenizer, kind, configuration):
    options, rng, stem = CONFIGURATIONS[configuration], random.Random(1), ids(20)
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = stem[: rng.choice([0, 7, 16])] + ids(rng.randint(1, 16), seed=i)
        fields = KINDS[rng.choice(list(KINDS)) if kind == "all kinds" else kind](i)
        requests.append((prompt, SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=i % 4 > 0, **fields)
                         if "min_tokens" not in fields else SamplingParams(max_tokens=12, **fields)))  # fmt: skip
    expected, waiting, _ = serve(with_tokenizer, requests, False, options)
    outputs, late, stats = serve(with_tokenizer, requests, True, options)
    assert {i: outputs[i] for i in expected if i != "3"} == {i: expected[i] for i in expected if i != "3"}
    assert outputs.keys() | {"3"} == expected.keys() | {"3"} == {str(i) for i in range(NUM_REQUESTS)}
    assert waiting.num_ahead == 0
    if kind in ALWAYS_AHEAD and not stats.num_preemptions:
        assert late.num_ahead > 0.6 * late.num_steps
    if kind in ("penalties", "logits processors"):
        assert late.num_expected_ids == 0


# ---- what happens when


def launched_and_awaited(engine, late):
    """The events of each step() until all is done."""
    events = []
    while engine.has_unfinished_requests():
        late.events.clear()
        engine.step()
        events.append(list(late.events))
    return events


def test_a_step_is_launched_before_the_one_before_it_is_awaited(tiny_checkpoint):
    """A prompt and four tokens: four steps. The last is known to be the last, so none is launched in vain."""
    engine = make_engine(tiny_checkpoint[0], True)
    late = engine.late
    engine.add_request("a", ids(5), greedy(4))
    assert launched_and_awaited(engine, late) == [
        [("launch", 0), ("launch", 1), ("wait", 0)],
        [("launch", 2), ("wait", 1)],
        [("launch", 3), ("wait", 2)],
        [("wait", 3)],
    ]
    assert_at_rest(engine)


@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len", "kv_cache"])
def test_an_end_that_is_known_in_advance_costs_no_token(tiny_checkpoint, limit):
    options = {"max_model_len": {"max_model_len": 12}, "kv_cache": {"num_kv_blocks": 3}}.get(limit, {})
    engine = make_engine(tiny_checkpoint[0], True, **options)
    engine.add_request("a", ids(5), greedy(7 if limit == "max_tokens" else 400))
    completion = run(engine)["a"].outputs[0]
    assert completion.finish_reason == "length"
    assert engine.get_stats().scheduled_tokens == 5 + len(completion.token_ids) - 1


@pytest.mark.parametrize("stop", ["token", "string"])
def test_a_stop_that_is_seen_late_costs_one_dropped_token(with_tokenizer, stop):
    """The step after it is in flight already. It brings nothing, and its blocks are kept until it has landed."""
    engine = make_engine(with_tokenizer, True)
    params = SamplingParams(max_tokens=50, **alphabetic(0))
    engine.add_request("free", ids(4), params)
    free = run(engine)["free"].outputs[0]
    length = 1 + next(i for i in range(1, 50) if free.token_ids[i] not in free.token_ids[:i])
    last = free.token_ids[length - 1]
    ends = {"token": {"stop_token_ids": [last]}, "string": {"stop": [engine.tokenizer.decode([last])]}}[stop]
    before = engine.get_stats()
    engine.add_request("a", ids(4), dataclasses.replace(params, **ends))
    results = []
    while not results or not results[-1].outputs or not results[-1].outputs[0].finished:
        results.append(engine.step())
    output = results[-1].outputs[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (free.token_ids[:length], "stop")
    assert engine.has_unfinished_requests(), "a step is in flight"
    assert engine.get_stats().num_free_blocks == engine.get_stats().num_kv_blocks, "new owners write after it"
    assert engine.get_stats().num_running == 0
    last_step = engine.step()
    assert (last_step.outputs, last_step.num_decode_tokens) == ([], 1)
    assert not engine.has_unfinished_requests()
    stats = engine.get_stats()
    assert stats.num_free_blocks == stats.num_kv_blocks
    assert stats.generation_tokens - before.generation_tokens == length, "what is dropped does not count"
    assert stats.steps - before.steps == length + 1


def test_an_aborted_requests_id_can_be_used_again_while_its_last_step_is_in_flight(tiny_checkpoint):
    expected = tokens_of(run_one(make_engine(tiny_checkpoint[0]), ids(7, seed=1)))
    for num_steps in range(1, 5):
        engine = make_engine(tiny_checkpoint[0], True)
        engine.add_request("a", ids(5), greedy(9))
        for _ in range(num_steps):
            engine.step()
        partial = engine.abort_request("a").outputs[0]
        assert (len(partial.token_ids), partial.finish_reason) == (num_steps, "abort")
        assert all(token >= 0 for token in partial.token_ids)
        assert engine.get_stats().num_free_blocks == engine.get_stats().num_kv_blocks, "new owners write later"
        assert tokens_of(run_one(engine, ids(7, seed=1))) == expected
        assert_at_rest(engine)


def run_one(engine, prompt):
    engine.add_request("a", prompt, greedy(6))
    return run(engine)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("aborted_at", [1, 2, 3])
def test_abort_in_the_middle_of_a_step(tiny_checkpoint, aborted_at, is_late):
    """By a logits processor of a request whose prompt is computed while the victim's newest token is under way."""
    engine = make_engine(tiny_checkpoint[0], True, late=is_late)
    partial = []

    def abort(output_token_ids, logits):
        if len(output_token_ids) == aborted_at - 1 and not partial:
            partial.append(engine.abort_request("victim").outputs[0].token_ids)
        return logits

    engine.add_request("victim", ids(5), greedy(20))
    engine.step()
    engine.add_request("other", ids(6), greedy(5, logits_processors=[abort]))
    done = run(engine)
    assert "victim" not in done or not done["victim"].finished
    assert partial[0] == tokens_of(run_one(make_engine(tiny_checkpoint[0]), ids(5)))["a"][: len(partial[0])]
    assert 0 < len(partial[0]) <= 5
    assert done["other"].outputs[0].token_ids == tokens_of(run_one(make_engine(tiny_checkpoint[0]), ids(6)))["a"][:5]
    assert_at_rest(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_id_of_a_request_that_is_aborted_is_free_again_after_the_step(tiny_checkpoint, overlap):
    engine = make_engine(tiny_checkpoint[0], overlap, late=False)
    refused = []

    def abort(output_token_ids, logits):
        if len(output_token_ids) == 1:
            engine.abort_request("victim")
            with pytest.raises(ValueError, match="'victim' belongs to an unfinished request"):
                engine.add_request("victim", ids(7), greedy(3))
            refused.append(len(output_token_ids))
        return logits

    engine.add_request("victim", ids(5), greedy(20))
    engine.add_request("other", ids(6), greedy(5, logits_processors=[abort]))
    while not refused:
        engine.step()
    engine.add_request("victim", ids(7), greedy(3, logprobs=1))
    done = run(engine)
    assert tokens_of(done)["victim"] == tokens_of(run_one(make_engine(tiny_checkpoint[0]), ids(7)))["a"][:3]
    assert len(done["victim"].outputs[0].logprobs) == 3
    assert_at_rest(engine)


def test_waiting_is_decided_anew_for_each_step(tiny_checkpoint):
    """While a request runs whose penalties need its newest token, each step is awaited; before and after, none."""
    engine = make_engine(tiny_checkpoint[0], True)
    late = engine.late
    engine.add_request("a", ids(5), greedy(12))
    engine.step()
    engine.step()
    assert late.num_ahead == 2
    engine.add_request("b", ids(5), greedy(4, frequency_penalty=0.5))
    num_ahead = []
    for _ in range(8):
        before = late.num_ahead
        engine.step()
        num_ahead.append(late.num_ahead - before)
    # b's prompt rides along; its three next steps wait; its last token is known to be the last
    assert num_ahead == [1, 0, 0, 0, 1, 1, 1, 1]
    run(engine)


def test_blocks_are_not_taken_from_anybody_while_a_step_is_in_flight(tiny_checkpoint):
    """Two sequences outgrow the cache: the step that needs a preemption is scheduled when the one before has landed."""
    engine = make_engine(tiny_checkpoint[0], True, num_kv_blocks=6)
    late = engine.late
    for i in range(2):
        engine.add_request(str(i), ids(6, seed=i), greedy(14))
    while engine.has_unfinished_requests():
        late.events.clear()
        if engine.step().num_preempted:
            assert late.events[0][0] == "launch", "nothing was in flight"
    assert engine.get_stats().num_preemptions > 0
    assert late.num_ahead > 10
    assert_at_rest(engine)


@pytest.mark.parametrize("num_output_tokens", [3, 4, 5])
def test_the_next_turn_of_a_chat_hits_as_many_tokens(tiny_checkpoint, num_output_tokens):
    """Blocks that output tokens fill are registered when these are known, and not lost when the request ends."""
    hits = []
    for overlap in (False, True):
        engine = make_engine(tiny_checkpoint[0], overlap)
        engine.add_request("first", ids(5), greedy(num_output_tokens))
        first = run(engine)["first"]
        engine.add_request("second", first.prompt_token_ids + first.outputs[0].token_ids + [7, 8], greedy(2))
        second = run(engine)["second"]
        hits.append((second.num_cached_tokens, second.outputs[0].token_ids))
        assert_at_rest(engine)
    assert hits[0] == hits[1]
    assert hits[0][0] == (5 + num_output_tokens - 1) // 4 * 4


# ---- the engine's users


def test_llm_leaves_nothing_in_flight(with_tokenizer):
    llm = LLM(with_tokenizer, dtype="float32", enable_overlap=True, num_kv_blocks=64, block_size=4)
    late = LateRunner(llm.engine)
    params = SamplingParams(max_tokens=30, **alphabetic(0, stop=["a"]))
    llm.generate([ids(5), ids(6)], params, use_tqdm=False)
    assert_nothing_in_flight(llm)
    stream = llm.stream(ids(5), params)
    next(stream)
    stream.close()
    assert_nothing_in_flight(llm)
    for _ in llm.stream([ids(5), ids(4)], params):
        pass
    assert_nothing_in_flight(llm)
    llm.beam_search(ids(5), BeamSearchParams(2, 4))
    assert_nothing_in_flight(llm)
    assert late.num_ahead > 5


def assert_nothing_in_flight(llm):
    assert not llm.engine.has_unfinished_requests()
    assert llm.get_stats().num_free_blocks == llm.get_stats().num_kv_blocks


def test_an_interrupted_generate_leaves_nothing_behind(tiny_checkpoint):
    llm = LLM(tiny_checkpoint[0], dtype="float32", enable_overlap=True, num_kv_blocks=64, block_size=4)
    late = LateRunner(llm.engine)
    compute, calls = late._run, []

    def interrupted(batch):
        calls.append(batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compute(batch)

    late._run = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate([ids(5), ids(6)], greedy(9), use_tqdm=False)
    assert_nothing_in_flight(llm)
    again = llm.generate([ids(5)], greedy(9), use_tqdm=False)[0]
    assert again.outputs[0].token_ids == tokens_of(run_long(make_engine(tiny_checkpoint[0])))["a"]


def run_long(engine):
    engine.add_request("a", ids(5), greedy(9))
    return run(engine)


@pytest.mark.parametrize(
    ("enable_overlap", "nth_step", "nth_call"), [(False, 1, 2), (True, 1, 3), (True, 4, 2), (False, 6, 1), (True, 7, 3)]
)
def test_an_interrupt_inside_schedule_changes_no_token(tiny_checkpoint, enable_overlap, nth_step, nth_call):
    """The half-made step has given tokens and blocks to some sequences already: all of that is taken back."""
    options = {"num_kv_blocks": 64, "block_size": 4, "enable_overlap": enable_overlap, "attention_backend": "torch"}
    requests = [([5 + i, 9, 20, 31 + i, 7], greedy(12)) for i in range(3)]

    def serve(interrupted_step):
        engine = LLMEngine(Config(tiny_checkpoint[0], device="cpu", dtype="float32", **options))
        for i, (prompt, params) in enumerate(requests):
            engine.add_request(str(i), prompt, params)
        blocks, outputs, num_steps = engine.scheduler.block_manager, {}, 0
        try_allocate = blocks.try_allocate
        while engine.has_unfinished_requests():
            num_steps += 1
            calls = iter(range(1, 100))

            def interrupted(*arguments, calls=calls):
                if next(calls) == nth_call:
                    raise KeyboardInterrupt
                return try_allocate(*arguments)

            blocks.try_allocate = interrupted if num_steps == interrupted_step else try_allocate
            try:
                outputs |= {output.request_id: output.outputs[0].token_ids for output in engine.step().outputs}
            except KeyboardInterrupt:
                assert num_steps == interrupted_step
        assert_at_rest(engine)
        return outputs

    assert serve(nth_step) == serve(None)
