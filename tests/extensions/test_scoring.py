"""`examples/extensions/scoring.py`: the oracle is transformers' log-softmax over the whole text."""

import random
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, TINY_QWEN3, SamplingParams
from nanovllm.extension import import_extension
from tests.conftest import hf_greedy

EXTENSION = Path(__file__).parents[2] / "examples" / "extensions" / "scoring.py"
score = import_extension(EXTENSION).score


def logprobs(model, prompt, continuation):
    with torch.no_grad():
        rows = model(torch.tensor([prompt + continuation])).logits[0].log_softmax(-1)
    return [float(rows[len(prompt) + i - 1, token]) for i, token in enumerate(continuation)]


def tokens_of(rng, length):
    return [rng.randrange(300) for _ in range(length)]


@pytest.mark.parametrize("budget", [512, 7], ids=["one step", "chunks"])
def test_scores_are_those_of_transformers(tiny_checkpoint, budget):
    """With 7 tokens in a step, chunks end inside prompts and continuations. The second time, more is in the cache."""
    folder, model = tiny_checkpoint
    llm, rng = LLM(folder, extension=EXTENSION, block_size=4, max_num_batched_tokens=budget), random.Random(2)
    for length in (1, 4, 5, 22):
        prompt, ends = tokens_of(rng, length), [tokens_of(rng, n) for n in (1, 3, 4, 11, 11)]
        expected = [logprobs(model, prompt, end) for end in ends]
        for _ in range(2):
            found = score(llm, prompt, ends)
            assert [len(one) for one in found] == [len(end) for end in ends]
            for one, other in zip(found, expected, strict=True):
                assert one == pytest.approx(other, abs=1e-4)
    assert llm.engine.runner.scores == {}, "nothing is left behind"


def test_continuations_share_the_prompt_in_one_pass(tiny_checkpoint):
    llm, rng = LLM(tiny_checkpoint[0], extension=EXTENSION, block_size=4), random.Random(3)
    prompt, ends = tokens_of(rng, 40), [tokens_of(rng, 3) for _ in range(6)]
    score(llm, prompt, ends)
    stats = llm.engine.stats
    # the last block of the prompt holds the row of the first scored token, so nine of ten are shared
    assert (stats.steps, stats.scheduled_tokens) == (1, 43 + 5 * 7)


def test_texts_are_ranked_and_other_requests_are_as_before(tiny_checkpoint):
    llm = LLM(TINY_QWEN3, dtype="float32", extension=EXTENSION)
    values = score(llm, "What is a block", [" table?", " banana?"])
    assert sum(values[0]) > sum(values[1])
    llm, prompt = LLM(tiny_checkpoint[0], extension=EXTENSION, block_size=4), [9, 8, 7, 6, 5]
    score(llm, prompt[:2], [prompt[2:]])
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == hf_greedy(tiny_checkpoint[1], prompt, 6)
    assert output.num_cached_tokens == 4


def test_an_empty_continuation_is_refused(tiny_checkpoint):
    with pytest.raises(ValueError, match="at least one token each"):
        score(LLM(tiny_checkpoint[0], extension=EXTENSION), [1], [[2], []])
