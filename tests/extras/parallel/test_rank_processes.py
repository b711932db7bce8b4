"""Ranks as the processes that they are: the tokens of one rank, and nothing left behind.

The other tests of this folder know ranks as threads: a process takes two seconds to import torch.
"""

import contextlib
import tempfile
from pathlib import Path

import pytest

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=1),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=12, top_p=0.9),
]


def answers(llm, prompts=("What is a block table?", "Hello")):
    outputs = llm.generate(list(prompts), PARAMS, use_tqdm=False)
    return [(one.token_ids, one.text) for output in outputs for one in output.outputs]


def children():
    """Processes that this one has started, and that have not been waited for."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            found.update((task / "children").read_text().split())
    return found


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """No process and no file stays when the test is over."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = children()
    yield
    assert children() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_bundled_model_with_drafts(nothing_left):
    """With the machine's best backend and communicator. How many tokens are nearly free is measured on all ranks."""
    expected = answers(LLM(TINY_QWEN3, dtype="float32", device="cpu"))
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(TINY_QWEN3, dtype="float32", device="cpu", tensor_parallel_size=2, speculative_config=drafts) as llm:
        assert ", 2 ranks (" in llm.engine.description
        assert llm.engine.scheduler.drafter.max_rows >= 1
        llm.engine.scheduler.drafter.max_rows = 0
        assert answers(llm) == expected
        assert llm.get_stats().num_draft_tokens == 0
        llm.engine.scheduler.drafter.max_rows = 64
        assert answers(llm) == expected
        assert llm.get_stats().num_draft_tokens > 0
