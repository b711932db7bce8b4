"""Outputs whose token ids, metrics and log-probabilities are made when they are read.

Oracle: the same requests, whose outputs are read at once; an output read at the end must say the same.
"""

import copy
import gc
import pickle
import weakref
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import pytest

from nanovllm_extras import LLM, CompletionOutput, Logprob, RequestOutput, RequestOutputKind, SamplingParams
from nanovllm_extras.sampling import logprobs
from nanovllm_extras.sampling.logprobs import PositionLogprobs
from tests.tiny_tokenizers import byte_level, copy_checkpoint

TOKENIZER = byte_level()
LETTERS = TOKENIZER.convert_tokens_to_ids(list("abcdefgh"))
PROMPTS = {"a": [5, 6, 7, 8], "b": [9, 10, 11], "c": [12] * 9}


@pytest.fixture(scope="module")
def folder(checkpoints, tmp_path_factory):
    return copy_checkpoint(
        checkpoints.make(num_hidden_layers=1)[0], tmp_path_factory.mktemp("lazy") / "model", TOKENIZER
    )


def make_engine(folder, num_kv_blocks=64):
    options = {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "block_size": 4}
    return LLM(folder, num_kv_blocks=num_kv_blocks, **options).engine


def params(**fields):
    return SamplingParams(**{"max_tokens": 12, "seed": 1, "temperature": 2.0, "allowed_token_ids": LETTERS, **fields})


def outputs_of(engine, read=lambda output: None, fails_at=None, **fields):
    """All outputs in their order; each is given to `read` as soon as it is there."""
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, params(**fields))
    outputs, run, num_runs = [], engine.runner.run, 0

    def run_or_fail(batch):
        nonlocal num_runs
        num_runs += 1
        if num_runs == fails_at:
            raise RuntimeError("the step failed")
        return run(batch)

    engine.runner.run = run_or_fail
    while engine.has_unfinished_requests():
        try:
            step = engine.step()
        except RuntimeError:
            continue
        outputs += step.outputs
        for output in step.outputs:
            read(output)
    engine.runner.run = run
    return outputs


def without_clock(output):
    """Its fields; of times, how many there are, and which are known."""
    said = asdict(output)
    metrics = said["metrics"]
    for name in ("arrival_time", "first_token_time", "finished_time", "scheduled_time"):
        metrics[name] = metrics[name] is not None
    metrics["token_times"] = len(metrics["token_times"])
    return said


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
@pytest.mark.parametrize(
    ("num_kv_blocks", "fails_at", "fields"),
    [
        (64, None, {}),
        (8, None, {}),  # too few for all requests: some are preempted
        (64, 5, {}),
        (64, None, {"n": 3, "stop_token_ids": LETTERS[:1]}),
        (64, None, {"stop": ["ab", "hag"], "logprobs": 1}),
    ],
    ids=["plain", "preempted", "a step fails", "three samples", "stop strings"],
)
def test_an_output_read_late_says_what_it_would_have_said(folder, kind, num_kv_blocks, fails_at, fields):
    fields = {**fields, "output_kind": kind}
    at_once: list = []
    engine = make_engine(folder, num_kv_blocks)
    outputs_of(engine, lambda output: at_once.append(without_clock(output)), fails_at, **fields)
    engine = make_engine(folder, num_kv_blocks)
    late = [without_clock(output) for output in outputs_of(engine, fails_at=fails_at, **fields)]
    assert late == at_once
    assert (engine.get_stats().num_preemptions > 0) == (num_kv_blocks == 8)


def test_copies_of_outputs_that_nobody_has_read(folder):
    """A copy is a record as any other: equal, whole, and free of the request."""
    ways = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda output: pickle.loads(pickle.dumps(output)),
        "replace": replace,
        "by hand": lambda output: type(output)(**{one.name: getattr(output, one.name) for one in fields(output)}),
    }
    for way in ways.values():
        for output in outputs_of(make_engine(folder)):
            (completion,) = output.outputs
            assert way(completion) == completion
            assert way(output) == output
            assert repr(way(output)) == repr(output)
            assert type(way(completion)) is CompletionOutput
            assert type(way(output)) is RequestOutput


def test_a_list_that_a_user_changes_is_the_users_own(folder):
    def change(output):
        output.outputs[0].token_ids.append(-1)
        output.metrics.token_times.clear()

    for output in outputs_of(make_engine(folder), change):
        num_tokens = output.metrics.num_output_tokens
        assert output.outputs[0].token_ids[num_tokens:] == [-1]
        assert output.outputs[0].token_ids.count(-1) == 1


def test_other_names_are_no_fields(folder):
    output = outputs_of(make_engine(folder))[0]
    for record in (output, output.outputs[0]):
        with pytest.raises(AttributeError, match="has no attribute 'txet'"):
            record.txet  # noqa: B018
    assert not hasattr(CompletionOutput(0, "", [], None, None), "_recipe")


def test_a_finished_output_keeps_no_request(folder):
    engine = make_engine(folder)
    requests = []

    def note(output):
        requests.extend(weakref.ref(request) for request in engine.requests.values())

    outputs = [output for output in outputs_of(engine, note) if output.finished]
    gc.collect()
    assert len(outputs) == len(PROMPTS)
    assert {ref() for ref in requests} == {None}


# ---- log-probabilities

ROW = (-2.5, 4, [-0.5, -1.0, -1.5, -2.0], [7, 3, 9, 1])  # the chosen token's value and rank, the likeliest
TIED = (-1.0, 2, [-0.5, -1.0, -1.0], [7, 3, 9])  # token 9 is as likely as 3
NAMES = SimpleNamespace(text_of=lambda token_id: f"<{token_id}>")


@pytest.mark.parametrize(
    ("row", "token_id", "k", "expected"),
    [
        (ROW, 5, 2, {5: (-2.5, 4), 7: (-0.5, 1), 3: (-1.0, 2)}),
        (ROW, 5, 0, {5: (-2.5, 4)}),
        (ROW, 5, -1, {5: (-2.5, 4), 7: (-0.5, 1), 3: (-1.0, 2), 9: (-1.5, 3), 1: (-2.0, 4)}),
        (ROW, 5, 9, {5: (-2.5, 4), 7: (-0.5, 1), 3: (-1.0, 2), 9: (-1.5, 3), 1: (-2.0, 4)}),
        (TIED, 9, 3, {9: (-1.0, 2), 7: (-0.5, 1), 3: (-1.0, 2)}),  # the chosen token's own rank, not its place
        (TIED, 7, 1, {7: (-1.0, 2)}),
    ],
)
def test_a_position_is_a_dict_of_the_chosen_token_and_the_likeliest(row, token_id, k, expected):
    found = PositionLogprobs(row, token_id, k, NAMES)
    made = {i: Logprob(value, rank, f"<{i}>") for i, (value, rank) in expected.items()}
    assert found == made
    assert made == found
    assert found != {**made, 8: Logprob(0.0, 1, "<8>")}
    assert list(found) == list(made)
    assert list(found.items()) == list(made.items())
    assert repr(found) == repr(made)
    assert len(found) == len(made)
    assert found.get(8) is None
    assert 8 not in found
    with pytest.raises(KeyError):
        found[8]
    for way in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        assert type(way(found)) is dict
        assert list(way(found).items()) == list(made.items())
    assert [one.decoded_token for one in PositionLogprobs(row, token_id, k, None).values()] == [None] * len(made)


def test_no_object_is_made_before_it_is_read(folder, monkeypatch):
    made = []
    monkeypatch.setattr(logprobs, "Logprob", lambda *values: made.append(values) or Logprob(*values))
    outputs = outputs_of(make_engine(folder), logprobs=3, prompt_logprobs=2)
    assert len(outputs) > 30
    assert made == []
    (completion,) = outputs[-1].outputs
    last = completion.token_ids[-1]
    assert completion.logprobs[-1][last].rank >= 1
    assert len(made) == 1
