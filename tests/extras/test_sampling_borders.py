"""Sampling parameters at their borders, beside a request that asks for none of it.

One to three requests with random mixes of extreme values run beside two plain ones. Each mix is either refused when it
is made, or served to its end. The oracle of the neighbours' tokens is the engine itself, when nobody else is there.
"""

import random

import pytest
import torch

from nanovllm_extras import Config, LLMEngine, SamplingParams
from tests.conftest import examples

VOCAB_SIZE = 300  # the model's; its tokenizer knows 257
LARGE = [2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63, 10**30]
TINY = [5e-324, 1e-300, 1e-45, 1e-38, 1e-8]
NEARLY_ONE = [0.99999999, 1 - 2**-53, 1 - 2**-24]
BORDERS = {
    "n": [1, 2, 3],
    "presence_penalty": [-2, 2, 5e-324],
    "frequency_penalty": [-2, 2, 5e-324],
    "repetition_penalty": [*TINY, 0.5, 2, 1e30, 1e308],
    "temperature": [0, *TINY, 0.5, 1, 100, 1e30, 3.4e38, 1e308],
    "top_p": [*TINY, 0.5, *NEARLY_ONE, 1],
    "top_k": [-1, 0, 1, 2, 20, VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 1, *LARGE],
    "min_p": [0, *TINY, 0.5, *NEARLY_ONE, 1],
    "seed": [0, 1, 2**63, 2**64 - 1],
    "stop": ["a", ["\n", "zz"], "\U0010ffff"],
    "stop_token_ids": [[0], [VOCAB_SIZE - 1], list(range(VOCAB_SIZE)), []],
    "bad_words": [["a"], ["ab", "b a"], ["\U0010ffff"]],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True, False],
    "max_tokens": [1, 2, 9],
    "min_tokens": [0, 1, 9],
    "logprobs": [0, 1, VOCAB_SIZE, -1],
    "prompt_logprobs": [0, 1, VOCAB_SIZE, -1],
    "detokenize": [False, True],
    "skip_special_tokens": [False, True],
    "spaces_between_special_tokens": [False, True],
    "truncate_prompt_tokens": [-1, 1, 5, 10**6],
    "logit_bias": [{0: -100}, {VOCAB_SIZE - 1: 100, 0: 100}, dict.fromkeys(range(VOCAB_SIZE), -100), {}],
    "allowed_token_ids": [[0], [VOCAB_SIZE - 1], list(range(VOCAB_SIZE))],
    "structured_outputs": [{"choice": ["a", "bb"]}, {"regex": "[ab]{3}"}],
}


def ids(length, seed):
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(engine):
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step().outputs}
    assert engine.get_stats().num_free_blocks == engine.get_stats().num_kv_blocks
    return outputs


def random_mix(rng):
    """The parameters, or None if they are refused."""
    names = rng.sample(sorted(BORDERS), rng.randint(1, 5))
    if rng.random() < 0.7 and "temperature" not in names:
        names.append("temperature")
    fields = {name: rng.choice(BORDERS[name]) for name in names}
    try:
        return SamplingParams(**{"max_tokens": 9, **fields})
    except ValueError:
        return None


PLAIN = {
    "greedy": SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.8, seed=11, max_tokens=8, ignore_eos=True),
}


@pytest.fixture(scope="module", params=["torch", "cpu"])
def engine(request, with_tokenizer):
    options = {"attention_backend": request.param, "enforce_eager": request.param == "torch"}
    return LLMEngine(Config(with_tokenizer, device="cpu", dtype="float32", num_kv_blocks=200, **options))


@pytest.mark.examples
def test_plain_neighbours_do_not_notice(engine):
    for name, params in PLAIN.items():
        engine.add_request(name, ids(9, seed=1), params)
    expected = {name: output.outputs[0].token_ids for name, output in run(engine).items()}
    rng = random.Random(0)
    num_served = 0
    for i in range(examples(200)):
        for name, params in PLAIN.items():
            engine.add_request(f"{name} {i}", ids(9, seed=1), params)
        mixes = [random_mix(rng) for _ in range(rng.randint(1, 3))]
        for j, params in enumerate(mixes):
            try:
                engine.add_request(f"mix {i} {j}", ids(rng.choice([1, 6, 20]), seed=j), params)
                num_served += 1
            except ValueError:  # more than this model has
                mixes[j] = None
        outputs = run(engine)
        assert {name: outputs[f"{name} {i}"].outputs[0].token_ids for name in PLAIN} == expected, mixes
        for j, params in enumerate(mixes):
            if params is not None:
                for one in outputs[f"mix {i} {j}"].outputs:
                    assert one.finish_reason in ("stop", "length", "abort")
                    assert all(0 <= token_id < VOCAB_SIZE for token_id in one.token_ids)
                    forbids = params.structured_outputs or params.bad_words or params.min_tokens
                    if params.allowed_token_ids and not forbids:
                        assert set(one.token_ids) <= set(params.allowed_token_ids), params
    assert num_served > examples(125)
