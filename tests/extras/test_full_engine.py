"""What the full `LLMEngine` does beyond the core's, whose suite is `tests/test_engine.py`: overlap, failures, counts.

Oracles: `transformers` greedy `generate` for the tokens of requests that are disturbed in every way, and counting by
hand, from the batches that the runner is given, for the statistics. Where only the traffic matters, a stand-in for the
runner draws random tokens and no model runs.
"""

import json
import random

import numpy as np
import pytest

from nanovllm_extras import Config, LLMEngine, RequestOutput, SamplingParams, StepOutput
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.sampling.runner_hooks import StepTokens
from tests.extras.late_runner import LateRunner
from tests.test_engine import VOCAB_SIZE, ids, tokens_of
from tests.test_engine import answer as answer
from tests.test_engine import checkpoint as checkpoint


def make_engine(folder, overlap=False, late=None, **options):
    """With overlap, tokens come as late as a device may bring them, unless `late` is False."""
    options = {"num_kv_blocks": 64, "block_size": 4, **options}
    engine = LLMEngine(Config(model=folder, device="cpu", attention_backend="torch", enable_overlap=overlap, **options))
    engine.runner.kv_cache.tensor.fill_(50.0)  # garbage that would show
    if overlap if late is None else late:
        engine.late = LateRunner(engine)
    return engine


WAYS = {"waiting": False, "overlap": True}
both_ways = pytest.mark.parametrize("overlap", WAYS.values(), ids=WAYS)


def greedy(max_tokens=8, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **fields})


def assert_at_rest(engine):
    """Nothing runs, waits or owns a block, and a step does nothing."""
    engine.settle()  # nobody asks for what may still be in flight
    stats = engine.get_stats()
    assert not engine.has_unfinished_requests()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_kv_blocks
    assert engine.scheduler.block_manager.num_used_blocks == 0
    idle = engine.step()
    assert (idle.outputs, idle.num_scheduled_tokens, idle.num_seqs) == ([], 0, 0)


def run(engine, max_steps=3000, each_step=None):
    """Step until all is done: {request_id: its last RequestOutput}. `each_step(i, step_output)` may interfere."""
    outputs = {}
    for i in range(max_steps):
        if not engine.has_unfinished_requests():
            return outputs
        result = engine.step()
        outputs.update({output.request_id: output for output in result.outputs})
        if each_step:
            each_step(i, result)
    raise AssertionError(f"not done after {max_steps} steps")


class RandomTokens:
    """Stands where the runner does: a random token for each sequence that has caught up; counts what it was given."""

    class Handle:
        def __init__(self, token_ids):
            self.token_ids = token_ids

        def wait(self):
            return StepTokens(self.token_ids, None, ())

    make_metadata = None

    def __init__(self, block_size, seed=0):
        self.block_size = block_size
        self.rng = np.random.default_rng(seed)
        self.stored = []  # per step: tokens in the blocks of the batch, a shared block once
        self.reserved = []  # per step: slots of these blocks

    def run(self, batch):
        tables, seq_lens = batch.metadata.block_tables.numpy(), batch.metadata.seq_lens.numpy()
        starts = self.block_size * np.arange(tables.shape[1])
        lens = np.clip(seq_lens[:, None] - starts, 0, self.block_size)  # [num_seqs, max_num_blocks], in tokens
        is_block = tables != 0  # the null block is padding
        fill = np.zeros(tables.max() + 1, dtype=np.int64)
        np.maximum.at(fill, tables[is_block], lens[is_block])
        self.stored.append(int(fill.sum()))
        self.reserved.append(len(np.unique(tables[is_block])) * self.block_size)
        return self.Handle(self.rng.integers(0, VOCAB_SIZE, len(batch.logits_indices)).tolist())


def engine_without_model(tmp_path, checkpoint, **options):
    """Any amount of traffic at little cost, up to 4,096 tokens a request."""
    config = json.loads((checkpoint[0] / "config.json").read_text())
    small = {"max_position_embeddings": 4096, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, **small, "num_attention_heads": 1}))
    engine = make_engine(tmp_path, load_format="dummy", **options)
    engine.runner = RandomTokens(engine.parts.block_size)
    return engine


# --- the loop ------------------------------------------------------------------------------------------------------


def test_step_by_step(checkpoint, answer):
    """A prompt of 10 tokens with a budget of 4: chunks of 4, 4 and 2, the last with the first token; then decodes."""
    engine = make_engine(checkpoint[0], max_num_batched_tokens=4)
    engine.add_request("a", ids(10), greedy(3))
    assert engine.has_unfinished_requests() is True
    assert engine.get_stats().num_waiting == 1
    results = [engine.step() for _ in range(5)]
    assert all(isinstance(result, StepOutput) for result in results)
    assert [result.num_scheduled_tokens for result in results] == [4, 4, 2, 1, 1]
    assert [result.num_prefill_tokens for result in results] == [4, 4, 2, 0, 0]
    assert [result.num_decode_tokens for result in results] == [0, 0, 0, 1, 1]
    assert [result.num_seqs for result in results] == [1] * 5
    assert [result.num_preempted for result in results] == [0] * 5
    assert [len(result.outputs) for result in results] == [0, 0, 1, 1, 1]
    outputs = [result.outputs[0] for result in results[2:]]
    assert all(isinstance(output, RequestOutput) for output in outputs)
    assert [output.outputs[0].token_ids for output in outputs] == [answer(ids(10), n) for n in (1, 2, 3)]
    assert [output.finished for output in outputs] == [False, False, True]
    assert [output.outputs[0].finish_reason for output in outputs] == [None, None, "length"]
    assert {output.request_id for output in outputs} == {"a"}
    assert all(output.prompt_token_ids == ids(10) for output in outputs)
    assert_at_rest(engine)


def test_metrics_while_a_request_advances(checkpoint):
    engine = make_engine(checkpoint[0])
    engine.add_request("a", ids(10), greedy(4))
    metrics = [engine.step().outputs[0].metrics for _ in range(4)]
    assert len({m.arrival_time for m in metrics}) == 1
    assert len({m.first_token_time for m in metrics}) == 1
    assert metrics[0].arrival_time < metrics[0].first_token_time < metrics[3].finished_time
    assert [m.finished_time for m in metrics[:3]] == [None] * 3
    assert [m.tpot for m in metrics[:3]] == [None] * 3
    assert [m.num_output_tokens for m in metrics] == [1, 2, 3, 4]
    assert metrics[3].tpot == pytest.approx((metrics[3].finished_time - metrics[3].first_token_time) / 3)


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "overlap"), [(1, 8, False), (3, 3, True), (16, 8, False), (16, 8, True), (8192, 1, True)]
)
def test_limits_of_every_step(checkpoint, answer, budget, max_num_seqs, overlap):
    """Budget and sequence limit, in what steps report and in what the model gets."""
    engine = make_engine(checkpoint[0], overlap, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    sizes = []
    model = engine.runner.model

    def recording_model(input_ids, positions, metadata, kv_cache):
        sizes.append((len(input_ids), len(metadata.seq_lens)))
        return model(input_ids, positions, metadata, kv_cache)

    recording_model.compute_logits = model.compute_logits
    engine.runner.model = recording_model
    prompts = [ids(n, seed=n) for n in (20, 1, 7, 13, 2, 30, 5)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(6))

    def check(i, result):
        assert (result.num_scheduled_tokens, result.num_seqs) == sizes[-1]
        assert 1 <= result.num_scheduled_tokens <= budget
        assert 1 <= result.num_seqs <= max_num_seqs
        assert result.num_prefill_tokens + result.num_decode_tokens == result.num_scheduled_tokens
        stats = engine.get_stats()
        assert stats.num_running <= max_num_seqs
        assert stats.steps == i + 1
        num_finished = stats.num_finished
        assert stats.num_running + stats.num_waiting + num_finished == len(prompts)

    outputs = run(engine, each_step=check)
    assert tokens_of(outputs) == {str(i): answer(prompt, 6) for i, prompt in enumerate(prompts)}
    if budget == 16 and max_num_seqs == 8:
        assert max(num_tokens for num_tokens, _ in sizes) == 16  # the budget is used, too
    assert max(num_seqs for _, num_seqs in sizes) == min(max_num_seqs, budget, len(prompts))
    assert_at_rest(engine)


# --- bad requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "exception", "says"),
    [
        pytest.param(("a", ids(5)), ValueError, ["'a'"], id="id of an unfinished request"),
        pytest.param((7, ids(5)), TypeError, ["request_id", "7"], id="id is a number"),
        pytest.param(("b", [1] * 300), ValueError, ["300", "256"], id="longer than the cache"),
        pytest.param(("b", "text"), ValueError, ["tokenizer"], id="no tokenizer"),
        pytest.param(("b", [1], {"max_tokens": 3}), TypeError, ["SamplingParams"], id="sampling_params"),
        pytest.param(("b", [1], greedy(), "high"), TypeError, ["priority", "high"], id="priority"),
    ],
)
def test_bad_requests_change_nothing(checkpoint, answer, arguments, exception, says):
    engine = make_engine(checkpoint[0])
    engine.add_request("a", ids(9), greedy(6))
    engine.step()
    before = engine.get_stats()
    with pytest.raises(exception) as info:
        engine.add_request(*arguments)
    for part in says:
        assert part in str(info.value)
    assert engine.get_stats() == before
    assert tokens_of(run(engine)) == {"a": answer(ids(9), 6)}
    assert_at_rest(engine)


# --- abort ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victim", "enable_prefix_caching", "overlap"),
    [("a", True, True), ("b", False, True), ("c", True, False), ("e", False, False)],
)
def test_abort_at_every_third_step(checkpoint, answer, victim, enable_prefix_caching, overlap):
    """Waiting, amid a chunked prefill, decoding, preempted: the others go on, and its prompt works when it comes again.

    `a` and `b` share 20 tokens, `e` waits for a place most of the time, and blocks are scarce.
    """
    prompts = {"a": ids(26), "b": ids(20) + ids(7, seed=1), "c": ids(9, seed=2), "d": ids(3, seed=3), "e": ids(15)}
    num_steps = 0
    states = set()
    engine = make_engine(
        checkpoint[0],
        overlap,
        num_kv_blocks=13,
        max_num_batched_tokens=6,
        max_num_seqs=4,
        enable_prefix_caching=enable_prefix_caching,
    )
    for abort_after in range(0, 1000, 3):
        engine.reset_prefix_cache()
        engine.runner.kv_cache.tensor.fill_(50.0)
        for request_id, prompt in prompts.items():
            engine.add_request(request_id, prompt, greedy(8))
        outputs = {}
        for _ in range(abort_after):
            outputs.update({output.request_id: output for output in engine.step().outputs})
        if victim in outputs and outputs[victim].finished:
            num_steps = abort_after
            engine.abort_request(victim)  # too late, and no harm
            outputs.update(run(engine))
            break
        states.add((victim in outputs, engine.get_stats().num_running))
        engine.abort_request(victim)
        engine.abort_request(victim)  # once more does nothing
        partial = tokens_of(outputs).get(victim, [])
        assert partial == answer(prompts[victim], 8)[: len(partial)]
        engine.add_request("again", prompts[victim], greedy(8))
        late = run(engine)
        assert victim not in late
        outputs.update(late)
        got = tokens_of(outputs)
        assert got["again"] == answer(prompts[victim], 8)
        for other in set(prompts) - {victim}:
            assert got[other] == answer(prompts[other], 8)
        assert_at_rest(engine)
    assert num_steps >= 12
    assert {has_output for has_output, _ in states} == {True, False}
    assert_at_rest(engine)


@both_ways
def test_abort_of_all(checkpoint, overlap):
    for num_steps in range(8):
        engine = make_engine(checkpoint[0], overlap, max_num_batched_tokens=8, num_kv_blocks=12, max_num_seqs=3)
        for i in range(5):
            engine.add_request(str(i), ids(10 + i), greedy(20))
        for _ in range(num_steps):
            engine.step()
        for i in (3, 0, 4, 1, 2):
            engine.abort_request(str(i))
        assert_at_rest(engine)


# --- a step that fails ---------------------------------------------------------------------------------------------


class Failing:
    """Makes the forward passes fail of which `fails(i)` says so: as they are launched, before the model computes, after
    it, or when their tokens are awaited."""

    def __init__(self, engine, fails, when, exception=RuntimeError):
        self.model, self.run, self.fails, self.when = engine.runner.model, engine.runner.run, fails, when
        self.compute_logits = self.model.compute_logits
        self.exception = exception("the model failed")
        self.num_calls = self.num_failures = 0
        if when == "launching":
            engine.runner.run = self.fail_or_run
        elif when == "waiting":
            engine.runner.run = self.run_and_fail_later
        else:
            engine.runner.model = self

    def is_due(self):
        is_due = self.fails(self.num_calls)
        self.num_calls += 1
        self.num_failures += is_due
        return is_due

    def __call__(self, *inputs):
        is_due = self.is_due()
        if is_due and self.when == "before":
            raise self.exception
        hidden = self.model(*inputs)
        if is_due:
            raise self.exception
        return hidden

    def fail_or_run(self, batch):
        if self.is_due():
            raise self.exception
        return self.run(batch)

    def run_and_fail_later(self, batch):
        handle = self.run(batch)
        return self if self.is_due() else handle

    def wait(self):
        raise self.exception


def step_through_failures(engine):
    """Step until all is done, over all failures: {request_id: its last RequestOutput}."""
    outputs = {}
    for _ in range(3000):
        if not engine.has_unfinished_requests():
            return outputs
        try:
            result = engine.step()
        except (RuntimeError, KeyboardInterrupt):
            continue
        outputs.update({output.request_id: output for output in result.outputs})
    raise AssertionError("the engine hangs")


FAILING_PROMPTS = {
    "a": ids(26),
    "b": ids(26),
    "c": ids(17) + ids(5, seed=1),
    "d": ids(9, seed=2),
    "e": ids(3, seed=3),
}


@pytest.mark.parametrize(
    ("when", "exception", "num_kv_blocks", "budget", "overlap"),
    [
        ("launching", KeyboardInterrupt, 12, 6, True),
        ("before", RuntimeError, 12, 6, False),
        ("after", KeyboardInterrupt, 64, 8192, False),
        ("waiting", RuntimeError, 64, 8192, True),
    ],
)
def test_a_step_that_fails_loses_nothing(checkpoint, answer, when, exception, num_kv_blocks, budget, overlap):
    """Each third step fails once; blocks that the failed step was to fill are never taken for filled.

    With overlap, the step that was launched before or after it is lost with it.
    """
    for failing in range(0, 200, 3):
        engine = make_engine(checkpoint[0], overlap, num_kv_blocks=num_kv_blocks, max_num_batched_tokens=budget)
        failures = Failing(engine, lambda i, failing=failing: i == failing, when, exception)
        for request_id, prompt in FAILING_PROMPTS.items():
            engine.add_request(request_id, prompt, greedy(10))
        outputs = step_through_failures(engine)
        assert tokens_of(outputs) == {request_id: answer(p, 10) for request_id, p in FAILING_PROMPTS.items()}
        assert_at_rest(engine)
        if not failures.num_failures:
            break
    assert failing >= 10


def test_a_failed_step_keeps_its_requests(checkpoint, answer):
    """They can be aborted after a failure, and others added; a failed step is not counted."""
    engine = make_engine(checkpoint[0], max_num_batched_tokens=16)
    Failing(engine, lambda i: i in (0, 3), "before")
    for request_id, prompt in FAILING_PROMPTS.items():
        engine.add_request(request_id, prompt, greedy(10))
    with pytest.raises(RuntimeError, match="the model failed"):
        engine.step()
    stats = engine.get_stats()
    assert stats.num_running + stats.num_waiting == 5
    assert stats.steps == 0
    engine.abort_request("a")
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="the model failed"):
        engine.step()
    engine.abort_request("d")
    engine.add_request("f", FAILING_PROMPTS["a"], greedy(10))
    expected = {request_id: answer(p, 10) for request_id, p in FAILING_PROMPTS.items() if request_id not in "ad"}
    expected["f"] = answer(FAILING_PROMPTS["a"], 10)
    assert tokens_of(run(engine)) == expected
    assert_at_rest(engine)


# --- statistics and waste ------------------------------------------------------------------------------------------


def mixed_workload(engine, num_requests=32):
    """25 to 256 tokens in and out, all at once."""
    rng = random.Random(0)
    for i in range(num_requests):
        prompt = ids(rng.randint(25, 256), seed=i)
        engine.add_request(str(i), prompt, greedy(rng.randint(25, 256)), stream=False)
    return run(engine)


def test_waste_under_load(tmp_path, checkpoint):
    """Under 1.2 % of the reserved slots, by the engine's own count, which is the runner's: blocks have 4 tokens.

    There are too few blocks, and budgets are small: chunks, a queue and preemptions.
    """
    engine = engine_without_model(tmp_path, checkpoint, num_kv_blocks=500, max_num_batched_tokens=64, max_num_seqs=16)
    outputs = mixed_workload(engine, num_requests=24)
    stats = engine.get_stats()
    assert len(outputs) == 24
    assert stats.num_preemptions > 0
    assert 0.004 < stats.waste < 0.012
    assert stats.waste == pytest.approx(1 - stats.kv_tokens_stored / stats.kv_slots_reserved)
    assert stats.kv_tokens_stored == sum(engine.runner.stored)
    assert stats.kv_slots_reserved == sum(engine.runner.reserved)
    assert_at_rest(engine)


def test_counts_of_a_run(tmp_path, checkpoint):
    engine = engine_without_model(tmp_path, checkpoint, num_kv_blocks=300, max_num_batched_tokens=40)
    results = []
    for i in range(10):
        engine.add_request(str(i), ids(10 + 10 * i, seed=i), greedy(5 + i))
    run(engine, each_step=lambda i, result: results.append(result))
    stats = engine.get_stats()
    num_prompt_tokens = sum(10 + 10 * i for i in range(10))
    num_output_tokens = sum(5 + i for i in range(10))
    assert stats.steps == len(results)
    assert stats.num_finished == 10
    assert stats.num_preemptions == 0
    assert (stats.prompt_tokens, stats.generation_tokens) == (num_prompt_tokens, num_output_tokens)
    assert stats.prefix_cache_query_tokens == num_prompt_tokens
    assert stats.prefix_cache_hit_tokens == 0
    # the last token of each request is never computed
    computed = num_prompt_tokens + num_output_tokens - 10
    assert sum(result.num_scheduled_tokens for result in results) == computed
    assert stats.prefill_step_tokens + stats.decode_step_tokens == computed
    assert sum(len(result.outputs) for result in results) == num_output_tokens


@both_ways
def test_a_request_that_ended_in_a_step_that_failed_is_returned_by_the_next(with_tokenizer, overlap, monkeypatch):
    """The text of one request cannot be read; the other had ended by the same step, and so had the first."""
    engine = make_engine(with_tokenizer, overlap)
    last = engine.tokenizer.encode("x")  # so that no character is left for the outputs to complete
    for name in "ab":
        engine.add_request(name, [*ids(3, seed=ord(name)), *last], greedy(3))
    read_token, calls = Request.read_token, iter(range(100))

    def broken(self, *arguments):
        if next(calls) == 4:  # `a` in the step that is the last for both
            raise RuntimeError("no text")
        return read_token(self, *arguments)

    monkeypatch.setattr(Request, "read_token", broken)
    outputs, num_failures = {}, 0
    for _ in range(20):
        try:
            outputs |= {output.request_id: output for output in engine.step().outputs if output.finished}
        except RuntimeError:
            num_failures += 1
        if not engine.has_unfinished_requests():
            break
    assert num_failures == 1
    assert sorted(outputs) == ["a", "b"]
    for output in outputs.values():
        assert len(output.outputs[0].token_ids) == 3
        assert output.outputs[0].text == engine.tokenizer.decode(output.outputs[0].token_ids)
    assert_at_rest(engine)


@both_ways
def test_a_request_that_ended_in_a_step_that_failed_can_be_aborted(with_tokenizer, overlap, monkeypatch):
    """Then nobody waits for its output: the next step returns none, and goes on with the others."""
    engine = make_engine(with_tokenizer, overlap)
    for name, length in [("a", 1), ("b", 3)]:
        engine.add_request(name, ids(4, seed=ord(name)), greedy(length))

    def broken(self, *arguments):
        raise RuntimeError("no text")

    with monkeypatch.context() as patch:
        patch.setattr(Request, "read_token", broken)
        with pytest.raises(RuntimeError, match="no text"):
            engine.step()
    assert engine.abort_request("a").request_id == "a"
    outputs = run(engine)
    assert sorted(outputs) == ["b"]
    assert len(outputs["b"].outputs[0].token_ids) == 3
    assert_at_rest(engine)
