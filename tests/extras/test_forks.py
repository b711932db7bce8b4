"""A process that was forked after an engine was made: it has none of the threads that a step waits for."""

import asyncio
import os
import select
import signal
import warnings

import pytest

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.machine import forks
from nanovllm_extras.serve.async_llm import AsyncLLM

PARAMS = SamplingParams(temperature=0, max_tokens=2)
OPTIONS = {"num_kv_blocks": 16, "attention_backend": "torch"}


def what_is_raised_in_a_fork(function, timeout_s=60):
    """Call the function in a forked process -> the class and text of what it raises there; "hangs" after a while."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of Python warn of forks with threads
        pid = os.fork()
    if pid == 0:
        try:
            function()
            os.write(writes, b"nothing")
        except BaseException as error:
            os.write(writes, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writes)
    try:
        if not select.select([reads], [], [], timeout_s)[0]:
            os.kill(pid, signal.SIGKILL)
            return "hangs"
        return os.read(reads, 10_000).decode()
    finally:
        os.close(reads)
        os.waitpid(pid, 0)


async def first_output(llm):
    outputs = llm.generate("A block", PARAMS)
    output = await anext(outputs)
    await outputs.aclose()
    return output


@pytest.fixture(scope="module")
def llm():
    with LLM(TINY_QWEN3, **OPTIONS) as made:
        made.generate("A block", PARAMS, use_tqdm=False)
        yield made


@pytest.fixture(scope="module")
def async_llm():
    with AsyncLLM(TINY_QWEN3, **OPTIONS) as made:
        asyncio.run(first_output(made))
        yield made


USES = {
    "generate": lambda llm, _: llm.generate("A block", PARAMS, use_tqdm=False),
    "step": lambda llm, _: llm.engine.step(),
    "a new LLM": lambda *_: LLM(TINY_QWEN3, **OPTIONS),
    "a new AsyncLLM": lambda *_: AsyncLLM(TINY_QWEN3, **OPTIONS),
    "AsyncLLM.generate": lambda _, async_llm: asyncio.run(first_output(async_llm)),
    "AsyncLLM.call": lambda _, async_llm: asyncio.run(async_llm.call(int)),
    "AsyncLLM.abort_all": lambda _, async_llm: asyncio.run(async_llm.abort_all()),
    "AsyncLLM.check_health": lambda _, async_llm: asyncio.run(async_llm.check_health()),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_engine_in_a_forked_process_raises_at_once(llm, async_llm, use):
    raised = what_is_raised_in_a_fork(lambda: use(llm, async_llm))
    if use is USES["AsyncLLM.abort_all"]:  # which waits for nothing
        assert raised == "nothing"
        return
    assert raised.startswith(f"EngineDeadError: this process was forked from process {os.getpid()}")
    assert "spawn" in raised


def test_ending_an_engine_in_a_forked_process_does_not_wait(llm, async_llm):
    assert what_is_raised_in_a_fork(lambda: (llm.shutdown(), async_llm.shutdown())) == "nothing"
    assert len(llm.generate("A block", PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == 2


def test_the_first_engine_may_be_made_after_the_fork():
    forks.first_process.cache_clear()
    try:
        assert what_is_raised_in_a_fork(forks.check_process) == "nothing"
    finally:
        forks.first_process.cache_clear()
        forks.check_process()
