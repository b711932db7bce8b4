"""A request none of whose next tokens can be sampled ends with the reason, and the requests beside it go on.

Oracle: the same requests beside nothing but requests that can go on.

Seen to fail when broken: the mark left out (the last token of the vocabulary is returned, with a normal end); the mark
not removed from the token ids; a marked token given to the next step of an overlapped engine.
"""

import asyncio
import copy
import math
import pickle

import pytest

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.engine.no_token import NO_TOKEN_REASON, NoTokenError
from nanovllm_extras.serve.async_llm import AsyncLLM

SMALL = {"num_kv_blocks": 64, "block_size": 16}
ENGINES = {
    "fast layers": {},
    "PyTorch's layers": {"attention_backend": "torch", "enforce_eager": True},
    "overlap": {"enable_overlap": True},
    "speculation": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


def forbid_all(from_token, value=-math.inf):
    return lambda output_token_ids, logits: logits + (value if len(output_token_ids) >= from_token else 0)


def bad_params(llm):
    """{what: (parameters, how many tokens come before the end)}"""
    tokenizer = llm.get_tokenizer()
    end = max(llm.engine.eos_token_ids)
    word = tokenizer.encode(" block", add_special_tokens=False)
    assert len(word) == 1
    return {
        "allowed and bad": ({"allowed_token_ids": word, "bad_words": ["block"]}, 0),
        "only the end token, which comes too early": (
            {"allowed_token_ids": [end], "min_tokens": 2, "ignore_eos": False},
            0,
        ),
        "only stop tokens, which come too early": (
            {"allowed_token_ids": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 1},
            0,
        ),
        "a function that forbids all": ({"logits_processors": [forbid_all(0)]}, 0),
        "a function that forbids all later": ({"logits_processors": [forbid_all(3)]}, 3),
        "NaN": ({"logits_processors": [forbid_all(2, math.nan)]}, 2),
    }


@pytest.fixture(scope="module", params=ENGINES)
def llm(request):
    with LLM(TINY_QWEN3, **SMALL, **ENGINES[request.param]) as llm:
        yield llm


def test_it_ends_with_the_reason_and_its_neighbours_go_on(llm):
    def params(**fields):
        fields = {"max_tokens": 8, "ignore_eos": True, "seed": 3, **fields}
        return SamplingParams(**fields)

    prompts = ["The scheduler", "A block table is", "K and V"]
    good = [params(), params(logprobs=2), params(logit_bias={5: 1.0})]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, good, use_tqdm=False)]
    bad = [(params(**fields, logprobs=1), num_tokens) for fields, num_tokens in bad_params(llm).values()]
    outputs = llm.generate(
        [*prompts, *["A block"] * len(bad), *prompts], [*good, *(one for one, _ in bad), *good], use_tqdm=False
    )
    assert [output.outputs[0].token_ids for output in [*outputs[:3], *outputs[-3:]]] == expected * 2
    for output, (_, num_tokens) in zip(outputs[3:-3], bad, strict=True):
        one = output.outputs[0]
        assert (one.finish_reason, one.stop_reason) == ("abort", NO_TOKEN_REASON)
        assert len(one.token_ids) == len(one.logprobs) == num_tokens
        assert one.text == llm.get_tokenizer().decode(one.token_ids)
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0


def test_weights_of_nan_are_told():
    with LLM(TINY_QWEN3, **SMALL, attention_backend="torch", enforce_eager=True) as llm:
        llm.engine.runner.model.model.norm.weight.data[3] = math.nan
        outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=4), use_tqdm=False)
        outputs += llm.generate(["a", "b"], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    assert [(one.outputs[0].token_ids, one.outputs[0].stop_reason) for one in outputs] == [([], NO_TOKEN_REASON)] * 4


def test_async_consumers_get_the_error():
    async def collect(stream):
        return [output async for output in stream][-1].outputs[0].token_ids

    async def run(llm):
        good = SamplingParams(max_tokens=8, temperature=0)
        bad = SamplingParams(max_tokens=8, temperature=0, logits_processors=[forbid_all(2)])
        alone = await collect(llm.generate("The scheduler", good))
        good, bad = await asyncio.gather(
            *(collect(llm.generate("The scheduler", copy.copy(one))) for one in (good, bad)), return_exceptions=True
        )
        assert good == alone
        assert isinstance(bad, NoTokenError)
        assert "no token can be sampled" in str(bad)
        assert str(pickle.loads(pickle.dumps(bad))) == str(bad)  # as a pool of processes hands it over

    with AsyncLLM(TINY_QWEN3, **SMALL) as llm:
        asyncio.run(run(llm))
