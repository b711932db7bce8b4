"""`examples/extensions/streaming_llm.py`: the oracle keeps all tokens in float64, and reads those inside the cache."""

import random
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.extension import import_extension
from tests.conftest import hf_greedy
from tests.extensions.naive_qwen3 import NaiveQwen3

EXTENSION = Path(__file__).parents[2] / "examples" / "extensions" / "streaming_llm.py"
streaming = import_extension(EXTENSION)
SIZE = 2  # tokens in a block: a window of 16 tokens, after 2 sinks
pytestmark = pytest.mark.usefixtures("own_tables")


def sinks_and_window(naive, layer, head, position):
    """Read the sinks and the window, numbered from 0 as they are in the cache."""
    begin = (position // SIZE - streaming.WINDOW + 1) * SIZE
    kept = [i for i in range(position + 1) if i < streaming.SINKS * SIZE or i >= begin]
    return kept, range(len(kept))


@pytest.fixture(scope="module")
def answer(tiny_checkpoint):
    """Return the oracle's tokens for a prompt; several tests have the same ones."""
    naive, known = NaiveQwen3(tiny_checkpoint[1]), {}

    def get(prompt, max_tokens):
        if tuple(prompt) not in known:
            known[tuple(prompt)] = naive.generate(prompt, max_tokens, sinks_and_window)
        return known[tuple(prompt)]

    return get


def prompt_of(length):
    return random.Random(length).choices(range(300), k=length)


def serve(llm, prompts, max_tokens):
    """Return the tokens of each prompt, and the most blocks that one sequence owned between two steps."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt, params, stream=False)
    tokens, most = {}, 0
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            tokens[int(output.request_id)] = output.outputs[0].token_ids
        blocks = llm.engine.scheduler.block_manager
        owned = [set(seq.block_table) - {0} for seq in llm.engine.scheduler.running]
        assert all(blocks.num_owners(block_id) for own in owned for block_id in own)
        assert blocks.num_used_blocks == len(set().union(*owned)), "what left the windows is free"
        most = max([most, *map(len, owned)])
    assert blocks.num_used_blocks == 0
    return [tokens[i] for i in range(len(prompts))], most


def test_tokens_are_those_of_sinks_and_a_window(tiny_checkpoint, answer):
    """Prompts in chunks and decodes in one batch, with a pool that is smaller than the longest text."""
    llm = LLM(tiny_checkpoint[0], extension=EXTENSION, block_size=SIZE, num_kv_blocks=24, max_num_batched_tokens=9)
    prompts = [prompt_of(length) for length in (70, 3, 5, 33)]
    tokens, most = serve(llm, prompts, 25)
    assert tokens == [answer(prompt, 25) for prompt in prompts]
    assert llm.engine.stats.num_preemptions > 0, "a preempted text is computed again under the same mask"
    assert len(prompts[0]) > 24 * SIZE
    assert most <= streaming.MAX_BLOCKS


def test_memory_is_bounded(tiny_checkpoint, answer):
    """The longest chunks fill the bound exactly; a long text decodes with the sinks and the window."""
    llm = LLM(tiny_checkpoint[0], extension=EXTENSION, block_size=SIZE, num_kv_blocks=streaming.MAX_BLOCKS)
    prompt = prompt_of(70)
    assert serve(llm, [prompt[:69]], 1)[1] == streaming.SINKS + streaming.WINDOW + streaming.CHUNK - 1
    tokens, most = serve(llm, [prompt], 25)  # begins with cached blocks
    assert tokens == [answer(prompt, 25)]
    assert most <= streaming.MAX_BLOCKS
    decoding, most = serve(llm, [prompt[:3]], 60)
    assert most == streaming.SINKS + streaming.WINDOW
    assert decoding[0][:12] == hf_greedy(tiny_checkpoint[1], prompt[:3], 12), "a short text is as without a window"


def test_samples_share_the_blocks_of_a_long_prompt(tiny_checkpoint):
    """Samples by top_k 1 are greedy, so each of them has the oracle's tokens."""
    llm = LLM(tiny_checkpoint[0], extension=EXTENSION, block_size=SIZE, num_kv_blocks=60)
    prompt = prompt_of(41)
    params = SamplingParams(n=3, top_k=1, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    expected = NaiveQwen3(tiny_checkpoint[1]).generate(prompt, 6, sinks_and_window)
    assert [sample.token_ids for sample in output.outputs] == [expected] * 3
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0


def test_the_oracle_without_a_window_is_the_model(tiny_checkpoint):
    prompt = prompt_of(20)
    assert NaiveQwen3(tiny_checkpoint[1]).generate(prompt, 5) == hf_greedy(tiny_checkpoint[1], prompt, 5)
