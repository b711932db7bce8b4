"""`Isolation`: whatever one request raises in a step, the others get the tokens that they would get without it.

Oracles: `transformers` greedy `generate` for tokens; for K and V that are kept, the number of tokens that the engine
has computed, which counts what is computed twice.
"""

import contextlib
import dataclasses
import random

import pytest
import torch

from nanovllm_extras import Config, SamplingParams
from nanovllm_extras.embedding.pooling import Pooling
from nanovllm_extras.embedding.pooling_params import PoolingParams
from nanovllm_extras.execution import full_runner
from nanovllm_extras.execution.cuda_startup import CudaDevice
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.requests.prompt_logprobs import PromptLogprobs
from nanovllm_extras.sampling.logits import LogitBias
from nanovllm_extras.sampling.runner_hooks import ArrivingTokens
from tests.conftest import hf_greedy
from tests.extras.failing_request import isolating_engine

SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 16}
both_ways = pytest.mark.parametrize("overlap", [False, True], ids=["waiting", "overlap"])


@pytest.fixture(scope="module")
def answer(tiny_checkpoint):
    known = {}

    def get(prompt, max_tokens):
        key = tuple(prompt), max_tokens
        if key not in known:
            known[key] = hf_greedy(tiny_checkpoint[1], prompt, max_tokens)
        return known[key]

    return get


def make_engine(folder, overlap=False, **options):
    options = {"num_kv_blocks": 64, "block_size": 4, "attention_backend": "torch", **options}
    engine = isolating_engine(Config(model=folder, device="cpu", enable_overlap=overlap, **options))
    engine.runner.kv_cache.tensor.fill_(50.0)  # garbage that would show
    return engine


def ids(length, seed=0):
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(max_tokens=8, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def run(engine):
    """Step until all is done: the last output of each request, and the error of each that has failed."""
    outputs, errors = {}, {}
    for _ in range(3000):
        if not engine.has_unfinished_requests():
            engine.settle()
            stats = engine.get_stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert stats.num_free_blocks == stats.num_kv_blocks
            assert not engine.faults.take_failures()
            return outputs, errors
        outputs |= {output.request_id: output for output in engine.step().outputs}
        errors |= engine.faults.take_failures()
    raise AssertionError("the engine hangs")


def tokens_of(outputs):
    return {request_id: output.outputs[0].token_ids for request_id, output in outputs.items()}


class Failing(Exception):
    pass


def failing_at(num_tokens):
    """A logits processor that raises when the output has this number of tokens."""

    def fail(output_token_ids, logits):
        if len(output_token_ids) == num_tokens:
            raise Failing(f"at {num_tokens} tokens")
        return logits

    return fail


PROMPTS = {"a": ids(26), "b": ids(26), "c": ids(17) + ids(5, seed=1), "d": ids(9, seed=2), "e": ids(3, seed=3)}


@pytest.mark.parametrize(("overlap", "num_tokens"), [(True, 0), (False, 1), (True, 5)])
def test_who_fails_ends_alone_and_nothing_is_computed_anew(tiny_checkpoint, answer, overlap, num_tokens):
    engine = make_engine(tiny_checkpoint[0], overlap)
    for request_id, prompt in PROMPTS.items():
        engine.add_request(request_id, prompt, greedy(10))
    engine.add_request("bad", ids(11, seed=9), greedy(10, logits_processors=[failing_at(num_tokens)]))
    outputs, errors = run(engine)
    assert list(errors) == ["bad"]
    assert isinstance(errors["bad"], Failing)
    outputs.pop("bad", None)
    assert tokens_of(outputs) == {request_id: answer(prompt, 10) for request_id, prompt in PROMPTS.items()}
    stats = engine.get_stats()
    cached = sum(output.num_cached_tokens for output in outputs.values())
    assert cached >= 24 + 16, "b and c share blocks with a"
    # the last token of a request is never computed; the request that fails computes what it has
    num_of_the_rest = sum(len(prompt) + 9 for prompt in PROMPTS.values()) - cached
    assert stats.scheduled_tokens == num_of_the_rest + 11 + num_tokens
    assert stats.num_preemptions == 0


def test_the_search_for_the_fault_runs_on_the_engines_device(tiny_checkpoint, monkeypatch):
    """On `cuda:1`, copies, events and kernels need it to be the current one, as in a step."""
    engine, inside, copied = make_engine(tiny_checkpoint[0]), [], []

    @contextlib.contextmanager
    def device_of(tensor):
        inside.append(tensor)
        try:
            yield
        finally:
            inside.pop()

    class NotingDevice(CudaDevice):
        def send(self, record):
            copied.append(len(inside))
            return record

    class NotingTokens(ArrivingTokens):
        def __init__(self, sampled):
            copied.append(len(inside))
            super().__init__(sampled)

    monkeypatch.setattr(full_runner, "ArrivingTokens", NotingTokens)
    runner = engine.runner
    sizes = (runner.backend, runner.shape, runner.max_num_batched_tokens)
    runner.device_setup = NotingDevice(engine.config, runner.device, *sizes)
    runner.device_setup.prepare(runner)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    engine.add_request("bad", ids(11), greedy(10, logits_processors=[failing_at(1)]))
    _, errors = run(engine)
    assert list(errors) == ["bad"]
    assert len(copied) > 3
    assert set(copied) == {1}


def fail(*_):
    raise Failing


BREAKAGES = {  # what raises -> the parameters of the request that makes it raise
    "a processor is built": (LogitBias, "build", greedy(10, logit_bias={3: 1.0})),
    "a reader is built": (PromptLogprobs, "build", greedy(10, prompt_logprobs=1)),
    "an embedding is built": (Pooling, "build", PoolingParams()),
    "the text of a token is made": (Request, "finish_step", greedy(10)),
    "an output is made": (Request, "make_output", greedy(10)),
}


@pytest.mark.parametrize(("overlap", "breakage"), [(i % 2 == 1, name) for i, name in enumerate(BREAKAGES)])
def test_wherever_it_fails(tiny_checkpoint, answer, monkeypatch, overlap, breakage):
    owner, method, params = BREAKAGES[breakage]
    working = getattr(owner, method)

    def broken(self, *arguments):
        if getattr(self, "request_id", "bad") == "bad":  # processors and readers are nobody else's here
            raise Failing
        return working(self, *arguments)

    monkeypatch.setattr(owner, method, classmethod(fail) if method == "build" else broken)
    engine = make_engine(tiny_checkpoint[0], overlap)
    for request_id, prompt in PROMPTS.items():
        engine.add_request(request_id, prompt, greedy(10))
        if request_id == "b":
            engine.add_request("bad", ids(11, seed=9), params)
    outputs, errors = run(engine)
    assert list(errors) == ["bad"]
    assert isinstance(errors["bad"], Failing)
    assert tokens_of(outputs) == {request_id: answer(prompt, 10) for request_id, prompt in PROMPTS.items()}


@both_ways
def test_a_step_that_cannot_be_built_is_computed_again_after_one_that_nobody_made_fail(
    tiny_checkpoint, answer, monkeypatch, overlap
):
    """The hidden states that the first step has left are not those of the second one."""
    engine = make_engine(tiny_checkpoint[0], overlap)
    engine.add_request("a", PROMPTS["a"], greedy(10))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "sample_step", fail)
        with pytest.raises(Failing):
            engine.step()
    monkeypatch.setattr(LogitBias, "build", classmethod(fail))
    engine.add_request("bad", ids(11, seed=9), greedy(10, logit_bias={3: 1.0}))
    outputs, errors = run(engine)
    assert list(errors) == ["bad"]
    assert isinstance(errors["bad"], Failing)
    assert outputs["a"].outputs[0].token_ids == answer(PROMPTS["a"], 10)


@both_ways
def test_others_keep_their_log_probabilities_of_the_prompt(tiny_checkpoint, answer, overlap):
    """A neighbour that reads its prompt in the very step that fails, in chunks, beside a request that reads its own."""
    expected = make_engine(tiny_checkpoint[0])
    expected.add_request("good", ids(23, seed=5), greedy(6, prompt_logprobs=2, logprobs=2))
    expected = run(expected)[0]["good"]
    engine = make_engine(tiny_checkpoint[0], overlap, max_num_batched_tokens=12)
    bad = greedy(10, prompt_logprobs=1, logits_processors=[failing_at(0)])
    engine.add_request("bad", ids(5, seed=9), bad)
    engine.add_request("good", ids(23, seed=5), greedy(6, prompt_logprobs=2, logprobs=2))
    outputs, errors = run(engine)
    assert list(errors) == ["bad"]
    found = outputs["good"]
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids == answer(ids(23, seed=5), 6)
    for ours, theirs in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert list(ours) == list(theirs)
        for token_id in ours:
            assert ours[token_id].logprob == pytest.approx(theirs[token_id].logprob, abs=1e-4)


@both_ways
def test_all_samples_of_a_request_end_with_it(tiny_checkpoint, answer, overlap):
    """The step that fails is the one that copies the blocks that the samples share."""
    engine = make_engine(tiny_checkpoint[0], overlap)
    own = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=9, ignore_eos=True)
    engine.add_request("good", ids(10, seed=4), own)
    engine.add_request("bad", ids(10, seed=9), dataclasses.replace(own, logits_processors=[failing_at(1)]))
    outputs, errors = run(engine)
    assert list(errors) == ["bad"]
    alone = make_engine(tiny_checkpoint[0])
    alone.add_request("good", ids(10, seed=4), own)
    expected = run(alone)[0]["good"]
    assert [one.token_ids for one in outputs["good"].outputs] == [one.token_ids for one in expected.outputs]


@pytest.mark.parametrize(("overlap", "sample"), [(False, 0), (True, 1)])
def test_a_request_ends_with_the_error_of_any_of_its_samples(tiny_checkpoint, answer, monkeypatch, overlap, sample):
    working = Request.read_token

    def broken(self, seq, *arguments):
        if seq.request_id == "bad" and seq.sample_index == sample and seq.num_output_tokens == 3:
            raise Failing
        return working(self, seq, *arguments)

    monkeypatch.setattr(Request, "read_token", broken)
    engine = make_engine(tiny_checkpoint[0], overlap)
    engine.add_request(
        "bad", ids(10, seed=9), SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=3, ignore_eos=True)
    )
    engine.add_request("good", PROMPTS["d"], greedy(10))
    outputs, errors = run(engine)
    assert [(name, type(error)) for name, error in errors.items()] == [("bad", Failing)]
    assert outputs["good"].outputs[0].token_ids == answer(PROMPTS["d"], 10)
    assert engine.get_stats().num_finished == 1


@pytest.mark.parametrize(("overlap", "failing"), [(False, (4, 5)), (True, (4,))])
def test_if_the_forward_pass_fails_nobody_is_at_fault(tiny_checkpoint, answer, overlap, failing):
    """Then the step raises, its requests wait, and go on, and may fail again."""
    engine = make_engine(tiny_checkpoint[0], overlap)
    model, calls = engine.runner.model, iter(range(1000))

    def broken(*inputs):
        if next(calls) in failing:
            raise Failing
        return model(*inputs)

    broken.compute_logits = model.compute_logits
    engine.runner.model = broken
    for request_id, prompt in PROMPTS.items():
        engine.add_request(request_id, prompt, greedy(10))
    outputs, num_failures = {}, 0
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step().outputs}
        except Failing:
            num_failures += 1
        assert not engine.faults.take_failures()
    assert num_failures == len(failing)
    assert tokens_of(outputs) == {request_id: answer(prompt, 10) for request_id, prompt in PROMPTS.items()}


@pytest.mark.parametrize(
    ("overlap", "preemption", "seed"), [(False, {}, 0), (True, SWAP, 1), (True, {}, 2), (False, SWAP, 3)]
)
def test_random_traffic_in_which_every_third_request_fails(tiny_checkpoint, answer, overlap, preemption, seed):
    """Amid preemption, swaps, prefix hits and chunks: the others' tokens are those of `transformers`."""
    rng = random.Random(seed)
    engine = make_engine(
        tiny_checkpoint[0], overlap, num_kv_blocks=14, max_num_batched_tokens=rng.choice([7, 16, 8192]), **preemption
    )
    good, bad = {}, set()
    for i in range(18):
        prompt = ids(rng.choice([4, 9, 16, 24]), seed=rng.randrange(3))
        if i % 3:
            good[str(i)] = prompt
            engine.add_request(str(i), prompt, greedy(10))
        else:
            bad.add(str(i))
            engine.add_request(str(i), prompt, greedy(10, logits_processors=[failing_at(rng.randrange(9))]))
    outputs, errors = run(engine)
    assert set(errors) == bad
    assert engine.get_stats().num_preemptions > 0
    found = tokens_of({request_id: outputs[request_id] for request_id in good})
    assert found == {request_id: answer(prompt, 10) for request_id, prompt in good.items()}
