"""`LLMEngine`, step by step: requests come, advance, are aborted and fail, and nothing leaks, starves or is lost.

Oracles: `transformers` greedy `generate` for the tokens of requests that are disturbed in every way, `AutoTokenizer`
for text as it grows, and counting by hand, from the batches that the runner is given, for the statistics. Where only
the traffic matters, a stand-in for the runner draws random tokens and no model runs.
"""

import json
import random
import zlib

import numpy as np
import pytest
import torch
import transformers

from nanovllm_extras import Config, LLMEngine, RequestOutput, SamplingParams, StepOutput
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.sampling.runner_hooks import StepTokens
from tests.conftest import every_second, examples, hf_greedy
from tests.extras.late_runner import LateRunner

VOCAB_SIZE = 300  # the model's


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


def tokens_of(outputs):
    return {request_id: output.outputs[0].token_ids for request_id, output in outputs.items()}


class RandomTokens:
    """Stands where the runner does: a random token for each sequence that has caught up; counts what it was given."""

    class Handle:
        def __init__(self, token_ids):
            self.token_ids = token_ids

        def wait(self):
            return StepTokens(self.token_ids, None, ())

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


def test_a_new_engine_is_idle(checkpoint):
    engine = make_engine(checkpoint[0])
    assert engine.has_unfinished_requests() is False
    assert_at_rest(engine)
    assert engine.get_stats().steps == 0


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


def test_times_of_a_step(checkpoint):
    engine = make_engine(checkpoint[0])
    engine.add_request("a", ids(10), greedy(3))
    result = engine.step()
    names = ("schedule_time_s", "build_time_s", "run_time_s", "update_time_s", "output_time_s")
    assert all(0 <= getattr(result, name) < 10 for name in names)
    assert result.run_time_s > 0


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


def test_time_in_the_queue_counts(checkpoint):
    """Two at the same time, one place: the second arrived as early, and sees its first token after the first ended."""
    engine = make_engine(checkpoint[0], max_num_seqs=1)
    for request_id in ("a", "b"):
        engine.add_request(request_id, ids(5), greedy(5))
    outputs = run(engine)
    assert outputs["a"].metrics.arrival_time <= outputs["b"].metrics.arrival_time
    assert outputs["b"].metrics.first_token_time > outputs["a"].metrics.finished_time
    assert outputs["b"].metrics.ttft > outputs["a"].metrics.ttft


def test_outputs_are_snapshots(checkpoint):
    """What a step returned does not change when the next steps run."""
    engine = make_engine(checkpoint[0])
    engine.add_request("a", ids(5), greedy(4))
    outputs = [engine.step().outputs[0] for _ in range(4)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4]
    assert [output.metrics.num_output_tokens for output in outputs] == [1, 2, 3, 4]


@pytest.mark.parametrize("budget", [1, 3, 16, 8192])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
@both_ways
@pytest.mark.sparse
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


@both_ways
def test_requests_arrive_while_others_run(checkpoint, answer, overlap):
    engine = make_engine(checkpoint[0], overlap, max_num_batched_tokens=12)
    prompts = {str(i): ids(3 + 5 * i % 17, seed=i) for i in range(10)}
    arrivals = iter(prompts.items())

    def add_one(i, result):
        if i % 2 == 0 and (arrival := next(arrivals, None)):
            engine.add_request(*arrival, greedy(9))

    add_one(0, None)
    outputs = run(engine, each_step=add_one)
    assert tokens_of(outputs) == {request_id: answer(prompt, 9) for request_id, prompt in prompts.items()}
    assert_at_rest(engine)


@both_ways
def test_every_request_advances_by_one_token_at_a_time(checkpoint, answer, overlap):
    """Each output holds one token more than the last; `finished` is on the last only, and nothing comes after it."""
    engine = make_engine(checkpoint[0], overlap, num_kv_blocks=14, max_num_batched_tokens=9)
    prompts = {str(i): ids(3 + i, seed=i) for i in range(8)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(20))
    seen = {request_id: [] for request_id in prompts}

    def check(i, result):
        assert len({output.request_id for output in result.outputs}) == len(result.outputs)
        for output in result.outputs:
            seen[output.request_id].append(output)

    run(engine, each_step=check)
    for request_id, outputs in seen.items():
        expected = answer(prompts[request_id], 20)
        assert [output.outputs[0].token_ids for output in outputs] == [expected[: i + 1] for i in range(20)]
        assert [output.finished for output in outputs] == [False] * 19 + [True]
    assert engine.get_stats().num_preemptions > 0
    assert_at_rest(engine)


@both_ways
def test_stream_false_returns_the_finished_output_alone(checkpoint, answer, overlap):
    engine = make_engine(checkpoint[0], overlap)
    engine.add_request("quiet", ids(5), greedy(6), stream=False)
    engine.add_request("loud", ids(6), greedy(4))
    seen = []
    run(engine, each_step=lambda i, result: seen.extend(result.outputs))
    assert [output.request_id for output in seen] == ["loud"] * 4 + ["quiet"]
    assert seen[-1].finished
    assert seen[-1].outputs[0].token_ids == answer(ids(5), 6)


# --- text as it grows ----------------------------------------------------------------------------------------------


def scripted(engine, token_ids):
    """The engine's model says this, whatever it is asked."""
    script = iter(token_ids)
    engine.runner = RandomTokens(engine.parts.block_size)
    engine.runner.run = lambda batch: RandomTokens.Handle([next(script) for _ in batch.logits_indices])


@pytest.mark.parametrize(
    "text",
    ["plain words, nothing else", "café ☕ naïve 你好 👩‍🚀 ¡olé!", "é", "👍🏽" * 5, "tail \ufffd \ufffd", "\n\t  "],
)
def test_text_grows_by_whole_characters(with_tokenizer, text):
    """A character of several tokens appears when its last byte comes; the last text is the whole."""
    engine = make_engine(with_tokenizer)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(with_tokenizer)
    token_ids = hf_tokenizer.encode(text)
    scripted(engine, token_ids)
    engine.add_request("a", "x", greedy(len(token_ids)))
    texts = []
    run(engine, each_step=lambda i, result: texts.append(result.outputs[0].outputs[0].text))
    assert len(texts) == len(token_ids)
    assert texts[-1] == text
    assert all(text.startswith(shorter) for shorter in texts)
    complete = len(text.encode()) == len(token_ids)
    assert complete
    for i, so_far in enumerate(texts, start=1):
        whole = text.encode()[:i].decode(errors="ignore")
        assert so_far == whole or ("\ufffd" in text and whole.startswith(so_far))


def test_texts_of_random_bytes(with_tokenizer):
    """Mostly no valid UTF-8, and ids that the tokenizer lacks: each text is a prefix of the next, the last is right."""
    engine = make_engine(with_tokenizer, num_kv_blocks=600)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(with_tokenizer)
    engine.runner = RandomTokens(engine.parts.block_size)
    for i in range(30):
        engine.add_request(str(i), "Hello", greedy(60))
    texts = {str(i): [""] for i in range(30)}

    def check(i, result):
        for output in result.outputs:
            assert output.prompt == "Hello"
            assert output.outputs[0].text.startswith(texts[output.request_id][-1])
            texts[output.request_id].append(output.outputs[0].text)

    outputs = run(engine, each_step=check)
    for request_id, output in outputs.items():
        known = [t for t in output.outputs[0].token_ids if t < len(hf_tokenizer)]
        assert len(known) < 60
        assert texts[request_id][-1] == hf_tokenizer.decode(known, skip_special_tokens=True)


def test_the_end_token_is_not_in_the_text(with_tokenizer):
    engine = make_engine(with_tokenizer)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(with_tokenizer)
    token_ids = [*hf_tokenizer.encode("Hi"), hf_tokenizer.eos_token_id]
    scripted(engine, token_ids)
    engine.add_request("a", "x", greedy(10, ignore_eos=False))
    completion = run(engine)["a"].outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("Hi", token_ids, "stop")


# --- bad requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "exception", "says"),
    [
        pytest.param(("a", ids(5)), ValueError, ["'a'"], id="id of an unfinished request"),
        pytest.param((7, ids(5)), TypeError, ["request_id", "7"], id="id is a number"),
        pytest.param(("b", []), ValueError, ["empty"], id="empty"),
        pytest.param(("b", [300]), ValueError, ["300", "299"], id="outside the vocabulary"),
        pytest.param(("b", [1] * 512), ValueError, ["512", "511"], id="too long"),
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


def test_an_id_may_be_used_again_when_its_request_is_over(checkpoint, answer):
    engine = make_engine(checkpoint[0])
    for length in (5, 6):
        engine.add_request("a", ids(length), greedy(3), priority=1)
        assert tokens_of(run(engine)) == {"a": answer(ids(length), 3)}
    engine.add_request("a", ids(5), greedy(3))
    engine.abort_request("a")
    engine.add_request("a", ids(6), greedy(3))
    assert tokens_of(run(engine)) == {"a": answer(ids(6), 3)}


# --- abort ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victim", "enable_prefix_caching"),
    [("a", True), ("b", True), ("b", False), ("c", True), ("d", False), ("e", True)],
)
@both_ways
@pytest.mark.sparse
@pytest.mark.examples
def test_abort_at_every_step(checkpoint, answer, victim, enable_prefix_caching, overlap):
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
    for abort_after in range(0, 1000, 3 // examples(3)):  # each third step by default
        engine.reset_prefix_cache()
        engine.runner.kv_cache.tensor.fill_(50.0)
        for request_id, prompt in prompts.items():
            engine.add_request(request_id, prompt, greedy(12))
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
        assert partial == answer(prompts[victim], 12)[: len(partial)]
        engine.add_request("again", prompts[victim], greedy(12))
        late = run(engine)
        assert victim not in late
        outputs.update(late)
        got = tokens_of(outputs)
        assert got["again"] == answer(prompts[victim], 12)
        for other in set(prompts) - {victim}:
            assert got[other] == answer(prompts[other], 12)
        assert_at_rest(engine)
    assert num_steps > 12
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


def test_abort_of_an_unknown_request_is_nothing(checkpoint, answer):
    engine = make_engine(checkpoint[0])
    engine.add_request("a", ids(5), greedy(3))
    engine.abort_request("nobody")
    assert tokens_of(run(engine)) == {"a": answer(ids(5), 3)}


# --- order and fairness --------------------------------------------------------------------------------------------


def test_first_come_first_served(tmp_path, checkpoint):
    engine = engine_without_model(tmp_path, checkpoint, num_kv_blocks=1000, max_num_batched_tokens=50, max_num_seqs=4)
    for i in range(30):
        engine.add_request(str(i), ids(1 + 37 * i % 90, seed=i), greedy(5))
    first_seen = []

    def check(i, result):
        for output in result.outputs:
            if len(output.outputs[0].token_ids) == 1:
                first_seen.append(int(output.request_id))

    outputs = run(engine, each_step=check)
    assert len(outputs) == 30
    times = [outputs[str(i)].metrics.first_token_time for i in range(30)]
    assert times == sorted(times)
    assert_at_rest(engine)


def test_a_long_prompt_among_a_stream_of_short_ones(tmp_path, checkpoint):
    """Two short requests arrive each step, more than can be served, and the long one still gets through."""
    engine = engine_without_model(tmp_path, checkpoint, num_kv_blocks=400, max_num_batched_tokens=24, max_num_seqs=8)
    num_added = 0
    for step in range(400):
        for _ in range(2):
            engine.add_request(f"short-{num_added}", ids(12, seed=num_added), greedy(4))
            num_added += 1
        if step == 5:
            engine.add_request("long", ids(1000, seed=7), greedy(10))
        outputs = {output.request_id: output for output in engine.step().outputs}
        if "long" in outputs and outputs["long"].finished:
            break
    else:
        raise AssertionError("the long prompt starves")
    # before it: at most 12 short requests of 15 tokens; itself: 1,009 tokens; beside it: some decodes in each step
    assert step < 150
    assert engine.get_stats().num_waiting > 0


def test_a_long_prompt_when_blocks_are_scarce(tmp_path, checkpoint):
    """The same with a cache that holds the long request and little more: the short ones must not take its blocks."""
    engine = engine_without_model(tmp_path, checkpoint, num_kv_blocks=110, max_num_batched_tokens=24, max_num_seqs=8)
    engine.add_request("long", ids(400, seed=7), greedy(36))
    for step in range(400):
        for i in range(2):
            engine.add_request(f"short-{step}-{i}", ids(12, seed=2 * step + i), greedy(30))
        outputs = {output.request_id: output for output in engine.step().outputs}
        if "long" in outputs and outputs["long"].finished:
            break
    else:
        raise AssertionError("the long prompt starves")
    assert step < 100


def test_decodes_go_on_while_prompts_keep_arriving(tmp_path, checkpoint):
    """Once it decodes, a request gets a token in every single step, whatever arrives."""
    engine = engine_without_model(tmp_path, checkpoint, num_kv_blocks=4000, max_num_batched_tokens=32, max_num_seqs=16)
    for i in range(3):
        engine.add_request(f"first-{i}", ids(5, seed=i), greedy(60))
    engine.step()
    for step in range(59):
        engine.add_request(f"prompt-{step}", ids(300, seed=step), greedy(5))
        result = engine.step()
        lens = {output.request_id: len(output.outputs[0].token_ids) for output in result.outputs}
        assert [lens.get(f"first-{i}") for i in range(3)] == [step + 2] * 3
        assert result.num_scheduled_tokens == 32  # and the prompts get all the rest
        assert result.num_decode_tokens >= 3


@both_ways
def test_several_prompts_are_chunked_in_one_run(checkpoint, answer, overlap):
    """Not only the first of a batch can be cut: three prompts in a row, each over several steps."""
    engine = make_engine(checkpoint[0], overlap, max_num_batched_tokens=11)
    prompts = {str(i): ids(25, seed=i) for i in range(3)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(4))
    scheduled = []
    outputs = run(engine, each_step=lambda i, result: scheduled.append(result.num_scheduled_tokens))
    assert tokens_of(outputs) == {request_id: answer(prompt, 4) for request_id, prompt in prompts.items()}
    assert scheduled[:6] == [11] * 6  # no step is left half empty while a prompt waits


@both_ways
def test_the_oldest_is_never_preempted(checkpoint, answer, overlap):
    """Blocks run out, the newest go: the oldest request gets its token in each step."""
    engine = make_engine(checkpoint[0], overlap, num_kv_blocks=12)
    prompts = {str(i): ids(6, seed=i) for i in range(6)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(40))
    first = []
    num_preempted = 0

    def check(i, result):
        nonlocal num_preempted
        num_preempted += result.num_preempted
        first.extend(i for output in result.outputs if output.request_id == "0")

    outputs = run(engine, each_step=check)
    assert first == list(range(40))
    assert tokens_of(outputs) == {request_id: answer(prompt, 40) for request_id, prompt in prompts.items()}
    assert num_preempted == engine.get_stats().num_preemptions > 0
    assert_at_rest(engine)


def test_admission_does_not_reserve_max_tokens(tmp_path, checkpoint):
    """Eight requests that may each fill the whole cache run together from the first step on."""
    engine = engine_without_model(tmp_path, checkpoint, num_kv_blocks=64)
    for i in range(8):
        engine.add_request(str(i), ids(8, seed=i), greedy(240))
    assert engine.step().num_seqs == 8
    assert engine.get_stats().num_running == 8
    outputs = run(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs.values()] == [240] * 8
    assert_at_rest(engine)


@both_ways
def test_one_that_fills_the_cache_alone_and_those_who_wait_for_it(checkpoint, answer, overlap):
    """12 blocks of 4: `greedy` ends when 48 tokens are stored; preempted neighbours come back and get their own."""
    engine = make_engine(checkpoint[0], overlap, num_kv_blocks=12)
    engine.add_request("greedy", ids(10), greedy(400))
    for i in range(4):
        engine.add_request(str(i), ids(7, seed=i + 1), greedy(15))
    outputs = run(engine)
    completion = outputs["greedy"].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("length", "kv_cache")
    assert completion.token_ids == answer(ids(10), 39)
    for i in range(4):
        assert outputs[str(i)].outputs[0].token_ids == answer(ids(7, seed=i + 1), 15)
        assert outputs[str(i)].outputs[0].stop_reason is None
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
    ("when", "exception"),
    [
        ("launching", KeyboardInterrupt),
        ("before", RuntimeError),
        ("after", KeyboardInterrupt),
        ("waiting", RuntimeError),
    ],
)
@pytest.mark.parametrize(("num_kv_blocks", "budget"), [(64, 8192), (12, 6)])
@both_ways
@pytest.mark.sparse
@pytest.mark.examples
@pytest.mark.thinned
def test_a_step_that_fails_loses_nothing(checkpoint, answer, when, exception, num_kv_blocks, budget, overlap):
    """Each step in turn fails once; blocks that the failed step was to fill are never taken for filled.

    With overlap, the step that was launched before or after it is lost with it.
    """
    for failing in range(0, 200, 3 // examples(3)):  # each third step by default
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


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
@both_ways
def test_many_steps_fail(checkpoint, answer, seed, overlap):
    """Half of all steps fail at random, several in a row, amid preemption; later prompts share what is cached."""
    rng = random.Random(seed)
    engine = make_engine(checkpoint[0], overlap, num_kv_blocks=13, max_num_batched_tokens=rng.choice([5, 16, 8192]))
    failures = Failing(engine, lambda i: rng.random() < 0.5, "before")
    for round_ in range(2):
        for request_id, prompt in FAILING_PROMPTS.items():
            engine.add_request(request_id, prompt, greedy(10))
        outputs = step_through_failures(engine)
        assert tokens_of(outputs) == {request_id: answer(p, 10) for request_id, p in FAILING_PROMPTS.items()}, round_
        assert_at_rest(engine)
    assert failures.num_failures > 10


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


# --- hash collisions -----------------------------------------------------------------------------------------------

COLLISIONS = {
    "all alike": lambda *_: 0,
    "the parent is ignored": lambda *args: zlib.crc32(bytes(args[-1])),
    "the tokens are ignored": lambda *args: 1 + zlib.crc32(str(args[0]).encode()) if args[0] else 1,
    "one bit": lambda *args: zlib.crc32(bytes(args[-1])) & 1,
}


@pytest.mark.parametrize("name", every_second(COLLISIONS))
def test_a_hash_collision_never_serves_another_prompts_blocks(checkpoint, answer, monkeypatch, name):
    """Prompts of few different blocks in every order, under bad hashes; A+X, B+Y, then B+X first of all."""
    num_calls = 0

    def bad_hash(*args):
        nonlocal num_calls
        num_calls += 1
        return COLLISIONS[name](*args)

    monkeypatch.setattr("nanovllm.prefix_cache.hash_block", bad_hash)
    rng = random.Random(0)
    a, b, x, y = blocks = [ids(4, seed=i) for i in range(4)]
    prompts = [a + x + [1], b + y + [1], b + x + [1], x + [1], y + x + [1], a + x + [1]]
    for _ in range(20):
        prompts.append(sum((rng.choice(blocks) for _ in range(rng.randrange(1, 4))), []) + [1])
    assert answer(prompts[2], 4) != answer(prompts[0], 4)
    for num_kv_blocks, batch_size in ((200, 1), (12, 1), (30, 4)):
        engine = make_engine(checkpoint[0], num_kv_blocks=num_kv_blocks)
        for start in range(0, len(prompts), batch_size):
            some = {str(i): prompt for i, prompt in enumerate(prompts[start : start + batch_size])}
            for request_id, prompt in some.items():
                engine.add_request(request_id, prompt, greedy(4))
            assert tokens_of(run(engine)) == {request_id: answer(p, 4) for request_id, p in some.items()}
            assert_at_rest(engine)
        if name == "the parent is ignored":
            assert engine.get_stats().prefix_cache_hit_tokens > 0
    assert num_calls > 100


# --- statistics and waste ------------------------------------------------------------------------------------------


def mixed_workload(engine, num_requests=32, shared_prefix=0):
    """100 to 1,024 tokens in and out, all at once."""
    rng = random.Random(0)
    for i in range(num_requests):
        prompt = ids(shared_prefix, seed=99) + ids(rng.randint(100, 1024) - shared_prefix, seed=i)
        engine.add_request(str(i), prompt, greedy(rng.randint(100, 1024)), stream=False)
    return run(engine)


def test_waste_of_blocks_of_16(tmp_path, checkpoint):
    """Under 1.2 % of the reserved slots, by the engine's own count, which is the runner's."""
    engine = engine_without_model(tmp_path, checkpoint, block_size=16, num_kv_blocks=4096)
    mixed_workload(engine)
    stats = engine.get_stats()
    waste = 1 - stats.kv_tokens_stored / stats.kv_slots_reserved
    assert 0.004 < waste < 0.012
    assert stats.waste == pytest.approx(waste)
    assert stats.kv_tokens_stored == sum(engine.runner.stored)
    assert stats.kv_slots_reserved == sum(engine.runner.reserved)
    assert_at_rest(engine)


def test_waste_of_blocks_of_256(tmp_path, checkpoint):
    """About 12 %: half a block of each sequence."""
    engine = engine_without_model(tmp_path, checkpoint, block_size=256, num_kv_blocks=256)
    mixed_workload(engine)
    stats = engine.get_stats()
    assert 0.08 < stats.waste < 0.16
    assert stats.kv_tokens_stored == sum(engine.runner.stored)
    assert stats.kv_slots_reserved == sum(engine.runner.reserved)


def test_waste_under_load(tmp_path, checkpoint):
    """The same with too few blocks and small budgets: chunks, a queue and preemptions do not raise it over 1.2 %."""
    engine = engine_without_model(
        tmp_path, checkpoint, block_size=16, num_kv_blocks=500, max_num_batched_tokens=256, max_num_seqs=16
    )
    outputs = mixed_workload(engine, num_requests=24)
    stats = engine.get_stats()
    assert len(outputs) == 24
    assert stats.num_preemptions > 0
    assert 0.004 < stats.waste < 0.012
    assert_at_rest(engine)


def test_shared_blocks_count_once(tmp_path, checkpoint):
    """A common prefix of 96 tokens is six blocks, however many share them."""
    engine = engine_without_model(tmp_path, checkpoint, block_size=16, num_kv_blocks=4096)
    mixed_workload(engine, num_requests=12, shared_prefix=96)
    stats = engine.get_stats()
    assert stats.prefix_cache_hit_tokens == 11 * 96
    assert stats.kv_tokens_stored == sum(engine.runner.stored)
    assert stats.kv_slots_reserved == sum(engine.runner.reserved)


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


@pytest.mark.parametrize("seed", range(4))
def test_blocks_in_use_are_what_the_sequences_need(tmp_path, checkpoint, seed):
    """After each step, whatever arrives and is aborted: the blocks of its batch, without those of finished requests."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    engine = engine_without_model(
        tmp_path,
        checkpoint,
        block_size=block_size,
        num_kv_blocks=480 // block_size,
        max_num_batched_tokens=rng.choice([7, 50, 8192]),
        max_num_seqs=rng.choice([3, 20]),
        enable_prefix_caching=False,
    )
    alive = set()
    for step in range(400):
        if step < 200 and rng.random() < 0.4:
            engine.add_request(str(step), ids(rng.randint(1, 120), seed=step), greedy(rng.randint(1, 80)))
            alive.add(str(step))
        if alive and rng.random() < 0.05:
            victim = rng.choice(sorted(alive))
            engine.abort_request(victim)
            alive.remove(victim)
        engine.runner.reserved.clear()
        result = engine.step()
        num_used = sum(engine.runner.reserved) // block_size
        for output in result.outputs:
            if output.finished:
                alive.remove(output.request_id)
                # K and V of the last token are never computed
                num_stored = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
                num_used -= -(-num_stored // block_size)
        stats = engine.get_stats()
        assert stats.num_running + stats.num_waiting == len(alive)
        assert stats.num_kv_blocks - stats.num_free_blocks == num_used
    run(engine)
    assert_at_rest(engine)


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
