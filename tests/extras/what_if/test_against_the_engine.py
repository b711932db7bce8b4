"""The proof: an engine that is started with the other options takes the steps that were predicted, one by one."""

import io
import json
import time

import pytest

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.what_if.clock import MAX_ERROR, StepCost, fit_clock
from nanovllm_extras.what_if.comparison import compare
from nanovllm_extras.what_if.journal import Journal
from nanovllm_extras.what_if.options import Options
from nanovllm_extras.what_if.recorded_run import read_run
from nanovllm_extras.what_if.requests import UNKNOWN_TOKEN
from nanovllm_extras.what_if.run import replay, simulate
from tests.conftest import every_second
from tests.extras.what_if.test_replay import events_of

BASE = {"block_size": 16, "num_kv_blocks": 64, "max_num_batched_tokens": 128, "max_num_seqs": 16, "max_model_len": 512}
OPTIONS = {"attention_backend": "torch", "enforce_eager": True, "device": "cpu", "dtype": "float32"}
NUM_TURNS = 5
PREFIX = list(range(200, 250))
PROMPTS = [PREFIX[: 10 * (i % 6)] + [300 + 7 * i + j for j in range(5 + 3 * i)] for i in range(20)]
PARAMS = [SamplingParams(temperature=0, max_tokens=8 + 5 * (i % 7), ignore_eos=True) for i in range(20)]
ASKED = [
    {"block_size": 256},  # and as many tokens in the pool: 4 blocks
    {"num_blocks": 40},
    {"num_blocks": 27},
    {"max_num_seqs": 3},
    {"block_size": 4, "num_blocks": 110, "max_num_seqs": 7, "max_num_batched_tokens": 64},
    {"max_num_batched_tokens": 40},
    {"enable_prefix_caching": False},
]


class OneStep:
    """A clock for requests that all arrive before the first step, in which no time decides anything."""

    is_good = False

    def seconds(self, num_tokens, num_context_tokens):
        return 1.0


def record(path, options):
    with LLM(TINY_QWEN3, trace=path, **{**BASE, **options}, **OPTIONS) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return read_recording(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(record(tmp_path_factory.mktemp("what_if") / "run.jsonl", {}))


@pytest.mark.parametrize("changes", every_second(ASKED), ids=str)
def test_the_engine_takes_the_predicted_steps(run, changes, tmp_path):
    options, file = run.options.changed(changes), io.StringIO()
    journal = Journal(file, options, run.model, {})
    simulate(run.requests, options, OneStep(), figures=journal)
    predicted = [json.loads(line) for line in file.getvalue().splitlines()]
    names = {"num_blocks": "num_kv_blocks"}
    real = record(tmp_path / "real.jsonl", {names.get(name, name): value for name, value in vars_of(options).items()})
    assert events_of(predicted) == events_of(real)
    base = Journal(io.StringIO(), run.options, run.model, {})
    simulate(run.requests, run.options, OneStep(), figures=base)
    assert journal.describe(False) != base.describe(False), "the option makes a difference"


def vars_of(options: Options):
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"block_size": 256}, {"num_blocks": 27}, {"max_num_seqs": 3}], ids=str)
def test_the_engine_takes_the_predicted_time(run, changes, monkeypatch, tmp_path):
    """Both engines run in turns, in processor time, and each step counts with its shortest time.

    What else the machine does makes a step longer, never shorter, and changes which steps are made not at all.
    """
    monkeypatch.setattr(time, "monotonic", time.process_time)
    options = run.options.changed(changes)
    names = {"num_blocks": "num_kv_blocks"}
    asked = {names.get(name, name): value for name, value in vars_of(options).items()}
    record(tmp_path / "first.jsonl", {})  # what is slow only once
    recorded, real = [], []
    for _ in range(NUM_TURNS):
        recorded.append(replay(read_run(record(tmp_path / "run.jsonl", {}))).costs)
        real.append(replay(read_run(record(tmp_path / "real.jsonl", asked))).costs)
    clock, costs = fit_clock(shortest(recorded)), shortest(real)
    predicted = simulate(run.requests, options, clock)
    assert clock.is_good
    assert predicted.steps == len(costs)
    seconds = [clock.seconds(cost.num_tokens, cost.num_context_tokens) for cost in costs]
    assert sum(seconds) == pytest.approx(sum([cost.seconds for cost in costs]), rel=MAX_ERROR)


def shortest(runs):
    """The costs of the steps, which are the same in each run, with the shortest time of each step."""
    return [
        StepCost(*tokens, min([step.seconds for step in steps]))
        for steps in zip(*runs, strict=True)
        for tokens in {(step.num_tokens, step.num_context_tokens) for step in steps}
    ]


def test_how_many_blocks_until_nothing_is_preempted(run, tmp_path):
    """The table's answer, and the engine's own count with this number and with one block less."""
    numbers = list(range(20, 65, 1))
    found = compare(run, [{"num_blocks": number} for number in numbers])
    counts = [one["figures"]["preemptions"] for one in found["runs"][1:]]
    enough = numbers[max(i for i, count in enumerate(counts) if count) + 1]
    for number, has_preemptions in ((enough, False), (enough - 1, True)):
        events = events_of(record(tmp_path / f"{number}.jsonl", {"num_kv_blocks": number}))
        assert any(event[0] == "preempt" for event in events) == has_preemptions


def test_a_longer_answer_than_the_recorded_one_is_unknown(tmp_path):
    """The recording's pool has cut the answer. With a larger one it ends there too, and is counted as unknown."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    path = tmp_path / "run.jsonl"
    with LLM(TINY_QWEN3, trace=path, **{**BASE, "block_size": 4, "num_kv_blocks": 4}, **OPTIONS) as llm:
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
    run = read_run(read_recording(path))
    figures = simulate(run.requests, run.options.changed({"num_blocks": 20}), OneStep())
    assert (figures.num_unknown, figures.num_cut, figures.generation_tokens) == (1, 0, 14)
    figures = simulate(run.requests, run.options.changed({"num_blocks": 2}), OneStep())
    assert (figures.num_unknown, figures.num_cut, figures.generation_tokens) == (1, 1, 6)
    assert simulate(run.requests, run.options.changed({"block_size": 1, "num_blocks": 2}), OneStep()).num_refused == 1
    assert run.requests[0].answers[0].token(14) == UNKNOWN_TOKEN
