"""`examples/extensions/snapkv.py`: the oracle keeps all tokens in float64, counts the votes, and reads what is kept."""

import random
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from tests.conftest import hf_greedy
from tests.extensions.naive_qwen3 import NaiveQwen3

EXTENSION = Path(__file__).parents[2] / "examples" / "extensions" / "snapkv.py"
KEPT, WINDOW, POOL = 22, 6, 3
pytestmark = pytest.mark.usefixtures("own_tables")


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    """The file with a smaller cache, for short prompts."""
    text = EXTENSION.read_text(encoding="utf-8")
    assert text.count("KEPT, WINDOW, POOL = 256, 16, 5") == 1
    file = tmp_path_factory.mktemp("snapkv") / "snapkv.py"
    file.write_text(text.replace("= 256, 16, 5", f"= {KEPT}, {WINDOW}, {POOL}"), encoding="utf-8")
    return file


class SnapRead:
    """What the oracle reads: all of the prompt, then what the votes of its window have chosen."""

    def __init__(self, num_prompt_tokens):
        self.num_prompt_tokens = num_prompt_tokens
        self.kept = {}

    def __call__(self, naive, layer, head, position):
        n = self.num_prompt_tokens
        if position < n or n <= KEPT:
            return range(position + 1), range(position + 1)
        if (layer, head) not in self.kept:
            self.kept[layer, head] = self.choose(naive, layer, head)
        read = [*self.kept[layer, head], *range(n - WINDOW, position + 1)]
        return read, read

    def choose(self, naive, layer, head):
        group = naive.config.num_attention_heads // naive.config.num_key_value_heads
        voters = [(layer, head * group + i, n) for i in range(group) for n in self.window]
        votes = [sum(float(naive.probs[voter][i]) for voter in voters) for i in range(self.window.start)]
        pooled = [max(votes[max(0, i - POOL // 2) : i + POOL // 2 + 1]) for i in range(len(votes))]
        return sorted(sorted(range(len(votes)), key=lambda i: (-pooled[i], i))[: KEPT - WINDOW])

    @property
    def window(self):
        return range(self.num_prompt_tokens - WINDOW, self.num_prompt_tokens)


@pytest.fixture(scope="module")
def answer(tiny_checkpoint):
    """Return the oracle's tokens for a prompt; both block sizes have the same ones."""
    naive, known = NaiveQwen3(tiny_checkpoint[1]), {}

    def get(prompt, max_tokens):
        key = tuple(prompt), max_tokens
        if key not in known:
            known[key] = naive.generate(prompt, max_tokens, SnapRead(len(prompt)))
        return known[key]

    return get


def prompt_of(length):
    return random.Random(length).choices(range(300), k=length)


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("block_size", [4, 11])
def test_tokens_are_those_of_the_kept_positions(tiny_checkpoint, extension, answer, block_size):
    """The prompts come in chunks, the last of which has the whole window, beside decodes of kept and whole prompts."""
    llm = LLM(tiny_checkpoint[0], extension=extension, block_size=block_size, max_num_batched_tokens=13)
    prompts = [prompt_of(length) for length in (46, 9, 35, KEPT, KEPT + 1)]
    outputs = llm.generate(prompts, greedy(10), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [answer(prompt, 10) for prompt in prompts]
    assert answer(prompts[0], 10) != hf_greedy(tiny_checkpoint[1], prompts[0], 10), "dropping tokens changes the answer"


def test_blocks_are_freed_after_the_prompt_and_a_preempted_sequence_resumes(tiny_checkpoint, extension, answer):
    llm = LLM(tiny_checkpoint[0], extension=extension, block_size=2, num_kv_blocks=39, max_num_batched_tokens=50)
    prompts = [prompt_of(length) for length in (46, 45)]
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt, greedy(24), stream=False)
    engine, tokens, blocks = llm.engine, {}, llm.engine.scheduler.block_manager
    engine.step()
    assert blocks.num_used_blocks == KEPT // 2
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = output.outputs[0].token_ids
        assert blocks.num_used_blocks == sum([len(seq.block_table) for seq in engine.scheduler.running])
        for seq in engine.scheduler.running:
            assert len(seq.block_table) <= -(-(KEPT + 24) // 2), "the output takes blocks after those that are kept"
    assert engine.stats.num_preemptions > 0
    assert blocks.num_used_blocks == 0
    assert [tokens[i] for i in range(2)] == [answer(prompt, 24) for prompt in prompts]


def test_what_it_does_not_serve_is_refused(tiny_checkpoint, extension):
    with pytest.raises(ValueError, match="max_num_batched_tokens must be at least 6"):
        LLM(tiny_checkpoint[0], extension=extension, max_num_batched_tokens=5)
    llm = LLM(tiny_checkpoint[0], extension=extension, num_kv_blocks=8)
    with pytest.raises(ValueError, match="n must be 1"):
        llm.generate([[5, 6]], SamplingParams(n=2), use_tqdm=False)
