"""PyTorch's defaults that a program has set do not change the engine, nor does the engine change them."""

import asyncio
from contextlib import contextmanager, nullcontext

import pytest
import torch

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=4, logprobs=2),
    "sampled": SamplingParams(temperature=1, top_p=0.9, seed=1, max_tokens=4, repetition_penalty=1.1, bad_words=["a"]),
}


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
        assert torch.get_default_device() == torch.device(device)
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS = {
    "meta": lambda: default_device("meta"),
    "a device of a with block": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def results(llm):
    outputs = llm.generate(["A block table", [5, 6, 7]], list(PARAMS.values()), use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in outputs]


@pytest.fixture(scope="module")
def truth():
    found = {}
    for backend in ("auto", "torch"):
        llm = LLM(TINY_QWEN3, dtype="float32", device="cpu", attention_backend=backend, num_kv_blocks=16)
        found[backend] = results(llm)
    return found


@pytest.mark.parametrize(
    ("name", "backend", "when"),
    [
        ("meta", "auto", "start"),
        ("meta", "torch", "step"),
        ("a device of a with block", "torch", "start"),
        ("float64", "torch", "start"),
        ("float64", "auto", "step"),
        ("bfloat16", "auto", "start"),
        ("autocast", "torch", "step"),
    ],
)
def test_defaults_change_nothing(truth, name, backend, when):
    defaults = DEFAULTS[name]
    with defaults() if when == "start" else nullcontext():
        llm = LLM(TINY_QWEN3, dtype="float32", device="cpu", attention_backend=backend, num_kv_blocks=16)
    with defaults():
        assert results(llm) == truth[backend]


async def last_outputs(llm):
    found = []
    for params in (*PARAMS.values(), SamplingParams(max_tokens=2, structured_outputs={"choice": ["yes", "no"]})):
        async for output in llm.generate("A block table", params):
            last = output
        found.append(last.outputs[0].token_ids)
    return found


@pytest.mark.parametrize("defaults", [DEFAULTS["meta"], DEFAULTS["float64"]], ids=["meta", "float64"])
def test_an_async_llm_has_no_other_defaults(defaults):
    with AsyncLLM(TINY_QWEN3, dtype="float32", device="cpu", num_kv_blocks=16) as llm:
        truth = asyncio.run(last_outputs(llm))
        with defaults():
            assert asyncio.run(last_outputs(llm)) == truth
