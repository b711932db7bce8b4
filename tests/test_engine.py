"""The core's `LLMEngine`, step by step: requests come, advance, are aborted and fail, and nothing leaks or is lost.

Oracles: greedy `generate` of `transformers` in float32 for the tokens of requests that are disturbed in every way, one
request at a time in a large cache for sampled ones, `AutoTokenizer` for text as it grows.
"""

import random
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers

import nanovllm
from nanovllm.config import Config
from nanovllm.engine import LLMEngine
from nanovllm.one_thread import OneThread
from nanovllm.request import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm_testing.engine_traffic import MODEL, SMALL, drive, random_requests
from tests.conftest import hf_greedy
from tests.failing_runs import Failing

VOCAB_SIZE = 300  # the model's


def make_engine(folder, **options):
    options = {"num_kv_blocks": 64, "block_size": 4, "dtype": "float32", **options}
    engine = LLMEngine(Config(folder, device="cpu", attention_backend="torch", **options))
    engine.runner.kv_cache.tensor.fill_(50.0)  # garbage that would show
    return engine


@pytest.fixture(scope="module")
def checkpoint(checkpoints):
    return checkpoints.make(num_hidden_layers=1)


@pytest.fixture(scope="module")
def answer(checkpoint):
    """Greedy completion by `transformers`, each prompt once, as far as it was asked for."""
    known = {}

    def get(prompt, max_tokens):
        if len(known.get(tuple(prompt), [])) < max_tokens:
            known[tuple(prompt)] = hf_greedy(checkpoint[1], prompt, max_tokens)
        return known[tuple(prompt)][:max_tokens]

    return get


def greedy(max_tokens=8, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **fields})


def ids(length, seed=0):
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_at_rest(engine):
    """Nothing runs, waits or owns a block, and a step does nothing."""
    assert not engine.has_unfinished_requests()
    assert engine.requests == {}
    assert (engine.scheduler.running, engine.scheduler.waiting) == ([], [])
    assert engine.scheduler.block_manager.num_used_blocks == 0
    assert engine.step() == []


def run(engine, each_step=None):
    """Step until all is done: {request_id: its last RequestOutput}. `each_step(i, outputs)` may interfere."""
    last = {}
    for i in range(3000):
        if not engine.has_unfinished_requests():
            return last
        outputs = engine.step()
        last.update({output.request_id: output for output in outputs})
        if each_step:
            each_step(i, outputs)
    raise AssertionError("the engine hangs")


def tokens_of(outputs):
    return {request_id: output.outputs[0].token_ids for request_id, output in outputs.items()}


# ---- the loop


def test_step_by_step(checkpoint, answer):
    """A prompt of 10 tokens with a budget of 4: chunks of 4, 4 and 2, the last with the first token; then decodes."""
    engine = make_engine(checkpoint[0], max_num_batched_tokens=4)
    assert_at_rest(engine)
    engine.add_request("a", ids(10), greedy(3))
    assert engine.has_unfinished_requests() is True
    results, scheduled = [], []
    for _ in range(5):
        before = engine.stats.scheduled_tokens
        results.append(engine.step())
        scheduled.append(engine.stats.scheduled_tokens - before)
    assert scheduled == [4, 4, 2, 1, 1]
    assert [len(outputs) for outputs in results] == [0, 0, 1, 1, 1]
    outputs = [outputs[0] for outputs in results[2:]]
    assert all(isinstance(output, RequestOutput) for output in outputs)
    assert [output.outputs[0].token_ids for output in outputs] == [answer(ids(10), n) for n in (1, 2, 3)]
    assert [output.finished for output in outputs] == [False, False, True]
    assert [output.outputs[0].finish_reason for output in outputs] == [None, None, "length"]
    assert {(output.request_id, output.num_cached_tokens) for output in outputs} == {("a", 0)}
    assert all(output.prompt_token_ids == ids(10) for output in outputs)
    assert_at_rest(engine)


@pytest.mark.parametrize("budget", [1, 3, 16, 8192])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
@pytest.mark.sparse
def test_limits_of_every_step(checkpoint, answer, budget, max_num_seqs):
    """Budget and sequence limit, in what the model gets."""
    engine = make_engine(checkpoint[0], max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    sizes, compute = [], engine.runner.run

    def recording(batch):
        sizes.append((len(batch.input_ids), len(batch.metadata.seq_lens)))
        return compute(batch)

    engine.runner.run = recording
    prompts = [ids(n, seed=n) for n in (20, 1, 7, 13, 2, 30, 5)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(6))
    assert tokens_of(run(engine)) == {str(i): answer(prompt, 6) for i, prompt in enumerate(prompts)}
    assert all(1 <= num_tokens <= budget and num_seqs <= max_num_seqs for num_tokens, num_seqs in sizes)
    assert max(num_seqs for _, num_seqs in sizes) == min(max_num_seqs, budget, len(prompts))
    assert engine.stats.scheduled_tokens == sum(num_tokens for num_tokens, _ in sizes)
    assert engine.stats.steps == len(sizes)
    assert_at_rest(engine)


def test_each_step_gives_each_request_one_token(checkpoint, answer):
    """`finished` is on the last output only, nothing comes after it, and earlier outputs do not change."""
    engine = make_engine(checkpoint[0], num_kv_blocks=14, max_num_batched_tokens=9)
    prompts = {str(i): ids(3 + i, seed=i) for i in range(8)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(20))
    seen = {request_id: [] for request_id in prompts}
    run(engine, lambda i, outputs: [seen[output.request_id].append(output) for output in outputs])
    for request_id, outputs in seen.items():
        expected = answer(prompts[request_id], 20)
        assert [output.outputs[0].token_ids for output in outputs] == [expected[: i + 1] for i in range(20)]
        assert [output.finished for output in outputs] == [False] * 19 + [True]
    assert engine.stats.num_preemptions > 0
    assert_at_rest(engine)


def test_stream_false_returns_only_the_finished_output(checkpoint, answer):
    engine = make_engine(checkpoint[0])
    engine.add_request("quiet", ids(5), greedy(6), stream=False)
    engine.add_request("loud", ids(6), greedy(4))
    seen = []
    run(engine, lambda i, outputs: seen.extend(outputs))
    assert [output.request_id for output in seen] == ["loud"] * 4 + ["quiet"]
    assert seen[-1].finished
    assert seen[-1].outputs[0].token_ids == answer(ids(5), 6)


def test_counts_of_a_run(checkpoint):
    engine = make_engine(checkpoint[0], num_kv_blocks=300, max_num_batched_tokens=40)
    for i in range(10):
        engine.add_request(str(i), ids(10 + 5 * i, seed=i), greedy(5 + i))
    run(engine)
    stats = engine.stats
    num_prompt_tokens, num_output_tokens = sum(10 + 5 * i for i in range(10)), sum(5 + i for i in range(10))
    assert (stats.num_requests, stats.num_preemptions) == (10, 0)
    assert (stats.prompt_tokens, stats.generation_tokens) == (num_prompt_tokens, num_output_tokens)
    assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens) == (num_prompt_tokens, 0)
    assert stats.scheduled_tokens == num_prompt_tokens + num_output_tokens - 10  # last tokens are never computed
    assert 0 < stats.peak_used_blocks <= 300


# ---- random traffic


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_is_greedy_as_in_transformers(checkpoint, answer, seed):
    """Random budgets, limits, block sizes and tiny pools; prompts that begin alike arrive while others run."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 8])
    engine = make_engine(
        checkpoint[0],
        block_size=block_size,
        num_kv_blocks=60 // block_size,
        max_num_batched_tokens=rng.choice([1, 5, 17, 64]),
        max_num_seqs=rng.choice([3, 8]),
        enable_prefix_caching=seed != 2,
    )
    prompts = {}
    for i in range(18):
        prompts[str(i)] = ids(rng.choice([0, 4, 15, 24]), seed=7) + ids(rng.randrange(1, 14), seed=i % 9)
    arrivals, max_tokens = iter(prompts.items()), {request_id: rng.randrange(1, 12) for request_id in prompts}
    outputs, is_open = {}, True
    while is_open or engine.has_unfinished_requests():
        while is_open and rng.random() < 0.6:
            arrival = next(arrivals, None)
            is_open = arrival is not None
            if is_open:
                engine.add_request(*arrival, greedy(max_tokens[arrival[0]]))
        outputs |= {output.request_id: output for output in engine.step()}
    assert tokens_of(outputs) == {name: answer(prompt, max_tokens[name]) for name, prompt in prompts.items()}
    assert (engine.stats.prefix_cache_hit_tokens > 0) == (seed != 2)
    assert_at_rest(engine)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_tiny_pool_gives_what_one_request_at_a_time_gives(seed):
    """Several samples, stop strings and all sampling parameters, with the bundled model's tokenizer."""
    requests = list(random_requests(random.Random(seed), 12))
    engine = make_engine(MODEL, **SMALL)
    found = drive(engine, requests, random.Random(100 + seed))
    assert engine.stats.num_preemptions > 0
    assert_at_rest(engine)
    roomy = make_engine(MODEL, **{**SMALL, "num_kv_blocks": 200, "max_num_batched_tokens": 200, "block_size": 16})
    alone = [drive(roomy, [request], random.Random(0))[0] for request in requests]
    assert found == alone
    assert roomy.stats.num_preemptions == 0


# ---- text as it grows


def script(engine, token_ids):
    """Let the engine's model say this, whatever it is given."""
    said = iter(token_ids)
    engine.runner.run = lambda batch: torch.tensor([next(said) for _ in batch.logits_indices])


def test_text_grows_by_whole_characters(with_tokenizer):
    """A character of several tokens appears when its last byte comes; the last text is the whole."""
    engine, text = make_engine(with_tokenizer), "café ☕ naïve 你好 👩‍🚀 ¡olé!"
    token_ids = transformers.AutoTokenizer.from_pretrained(with_tokenizer).encode(text)
    script(engine, token_ids)
    engine.add_request("a", "x", greedy(len(token_ids)))
    texts = []
    run(engine, lambda i, outputs: texts.append(outputs[0].outputs[0].text))
    assert texts == [text.encode()[:i].decode(errors="ignore") for i in range(1, len(token_ids) + 1)]


# ---- bad requests


@pytest.mark.parametrize(
    ("arguments", "exception", "says"),
    [
        pytest.param(("a", ids(5)), ValueError, ["'a'"], id="id of an unfinished request"),
        pytest.param((7, ids(5)), TypeError, ["request_id", "7"], id="id is a number"),
        pytest.param(("b", [1] * 300), ValueError, ["300", "256"], id="longer than the cache"),
        pytest.param(("b", "text"), ValueError, ["tokenizer"], id="no tokenizer"),
        pytest.param(("b", [1], {"max_tokens": 3}), TypeError, ["SamplingParams"], id="sampling_params"),
        pytest.param(("b", [1], greedy(stop="x")), ValueError, ["stop", "tokenizer"], id="stop needs a tokenizer"),
    ],
)
def test_bad_requests_change_nothing(checkpoint, answer, arguments, exception, says):
    engine = make_engine(checkpoint[0])
    engine.add_request("a", ids(9), greedy(6))
    engine.step()
    before = repr(engine.stats)
    with pytest.raises(exception) as info:
        engine.add_request(*arguments)
    for part in says:
        assert part in str(info.value)
    assert repr(engine.stats) == before
    assert tokens_of(run(engine)) == {"a": answer(ids(9), 6)}
    assert_at_rest(engine)


def test_parameters_that_were_spoilt_later_are_refused(checkpoint):
    """A request takes a copy of its parameters, and the copy is checked again."""
    engine, params = make_engine(checkpoint[0]), greedy(6)
    engine.add_request("a", ids(9), params)
    params.max_tokens = -1
    with pytest.raises(ValueError, match="max_tokens"):
        engine.add_request("b", ids(9), params)
    assert len(run(engine)["a"].outputs[0].token_ids) == 6


def test_an_id_may_be_used_again_when_its_request_is_over(checkpoint, answer):
    engine = make_engine(checkpoint[0])
    for length in (5, 6):
        engine.add_request("a", ids(length), greedy(3))
        assert tokens_of(run(engine)) == {"a": answer(ids(length), 3)}
    engine.add_request("a", ids(5), greedy(3))
    engine.abort_request("a")
    engine.add_request("a", ids(6), greedy(3))
    assert tokens_of(run(engine)) == {"a": answer(ids(6), 3)}


# ---- abort

PROMPTS = {"a": ids(26), "b": ids(20) + ids(7, seed=1), "c": ids(9, seed=2), "d": ids(3, seed=3), "e": ids(15)}


@pytest.mark.parametrize("victim", ["a", "c", "e"])
def test_abort_after_each_step(checkpoint, answer, victim):
    """Waiting, amid a chunked prefill, decoding, preempted: the others go on, and its prompt works when it comes again.

    `a` and `b` share 20 tokens, `e` waits for a place most of the time, and blocks are scarce.
    """
    options = {"num_kv_blocks": 13, "max_num_batched_tokens": 6, "max_num_seqs": 4}
    engine = make_engine(checkpoint[0], **options, enable_prefix_caching=victim != "c")
    has_tokens = set()
    for num_steps in range(0, 1000, 4):
        for request_id, prompt in PROMPTS.items():
            engine.add_request(request_id, prompt, greedy(12))
        outputs = {}
        for _ in range(num_steps):
            outputs |= {output.request_id: output for output in engine.step()}
        if victim in outputs and outputs[victim].finished:
            assert engine.abort_request(victim) is None, "too late"
            run(engine)
            break
        aborted = engine.abort_request(victim)
        assert engine.abort_request(victim) is None
        assert aborted.finished
        assert aborted.outputs[0].finish_reason == "abort"
        token_ids = aborted.outputs[0].token_ids
        assert token_ids == answer(PROMPTS[victim], 12)[: len(token_ids)]
        has_tokens.add(bool(token_ids))
        outputs.pop(victim, None)
        engine.add_request("again", PROMPTS[victim], greedy(12))
        outputs |= run(engine)
        expected = {request_id: answer(prompt, 12) for request_id, prompt in PROMPTS.items() if request_id != victim}
        assert tokens_of(outputs) == {**expected, "again": answer(PROMPTS[victim], 12)}
        assert_at_rest(engine)
    assert num_steps >= 12
    assert has_tokens == {True, False}
    assert_at_rest(engine)


def test_abort_of_all_after_each_step(checkpoint):
    """Several samples too: before and after they share the prompt's blocks."""
    for num_steps in range(8):
        engine = make_engine(checkpoint[0], max_num_batched_tokens=8, num_kv_blocks=12, max_num_seqs=4)
        for i in range(5):
            engine.add_request(str(i), ids(10 + i), SamplingParams(n=1 + i % 3, seed=i, max_tokens=20))
        for _ in range(num_steps):
            engine.step()
        for i in (3, 0, 4, 1, 2):
            engine.abort_request(str(i))
        assert_at_rest(engine)


# ---- a step that fails


@pytest.mark.parametrize(("exception", "when"), [(RuntimeError, "before"), (KeyboardInterrupt, "after")])
def test_a_step_that_fails_drops_all_requests(checkpoint, answer, exception, when):
    """Each third step fails: the engine is empty, no block is taken for filled, and the next requests are served."""
    for nth in range(1, 100, 3):
        engine = make_engine(checkpoint[0], num_kv_blocks=13, max_num_batched_tokens=6, max_num_seqs=4)
        failing = Failing(engine, nth, exception, when)
        for request_id, prompt in PROMPTS.items():
            engine.add_request(request_id, prompt, greedy(10))
        for _ in range(nth - 1):
            engine.step()
        if not engine.has_unfinished_requests():
            break
        with pytest.raises(exception):
            engine.step()
        assert_at_rest(engine)
        engine.runner.run = failing.run
        if nth % 4 == 1:
            for request_id, prompt in PROMPTS.items():
                engine.add_request(request_id, prompt, greedy(10))
            assert tokens_of(run(engine)) == {name: answer(prompt, 10) for name, prompt in PROMPTS.items()}
            assert_at_rest(engine)
    assert nth > 10


PACKAGE = str(Path(nanovllm.__file__).parent)
STEP = LLMEngine.step.__code__  # before tests/conftest.py wraps it


class InterruptedStep:
    """Replaces `engine.step`: raises KeyboardInterrupt before the nth line that runs inside of it, and counts lines."""

    def __init__(self, engine, nth=None):
        self.step, self.nth, self.num_lines = engine.step, nth, 0
        engine.step = self

    def __call__(self):
        previous = sys.gettrace()
        sys.settrace(self.trace)
        try:
            return self.step()
        finally:
            sys.settrace(previous)

    def trace(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code is LLMEngine.on_failure.__code__:
            return None
        if event == "line" and code is not STEP:
            self.num_lines += 1
            if self.num_lines == self.nth:
                self.nth = None
                raise KeyboardInterrupt
        return self.trace


def test_an_interrupt_while_a_step_gives_the_engine_back_leaves_it_free(checkpoint, monkeypatch):
    """Between two lines of the context manager that would have set the thread's use back."""

    @contextmanager
    def step(one_thread):
        one_thread._thread, one_thread.is_stepping = threading.get_ident(), True
        yield
        raise KeyboardInterrupt

    engine = make_engine(checkpoint[0])
    engine.add_request("a", [1, 2, 3], greedy(4))
    with monkeypatch.context() as patch:
        patch.setattr(OneThread, "step", step)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.one_thread.state == (None, False)
    assert_at_rest(engine)


def test_an_interrupt_at_any_line_of_a_step_drops_all_requests(checkpoint, answer):
    options = {"num_kv_blocks": 13, "max_num_batched_tokens": 6, "max_num_seqs": 4}
    counted = make_engine(checkpoint[0], **options)
    engine = make_engine(checkpoint[0], **options)

    def serve(engine, params):
        for request_id, prompt in PROMPTS.items():
            engine.add_request(request_id, prompt, params)
        return tokens_of(run(engine))

    lines, step = InterruptedStep(counted), engine.step
    serve(counted, greedy(6))
    rng, expected = random.Random(0), {name: answer(prompt, 6) for name, prompt in PROMPTS.items()}
    assert lines.num_lines > 5000
    for i, nth in enumerate(rng.sample(range(1, lines.num_lines // 2), 40)):
        InterruptedStep(engine, nth)
        with pytest.raises(KeyboardInterrupt):
            serve(engine, greedy(6))
        engine.step = step
        assert_at_rest(engine)
        if i % 6 == 0:
            assert serve(engine, greedy(6)) == expected
            assert_at_rest(engine)
