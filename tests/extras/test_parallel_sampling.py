"""n samples of one prompt: the prompt is computed once, its blocks are shared, and nothing else changes.

The oracle of each sample is itself under other circumstances: by itself, with other blocks, budgets and preemptions.
Blocks are counted against n separate requests.
"""

import pytest
import torch

from nanovllm_extras import LLM, SamplingParams

PARAMS = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(300, (n,), generator=generator).tolist() for n in (1, 3, 16, 17, 40)]


@pytest.fixture(scope="module")
def expected(tiny_checkpoint, prompts):
    return samples(LLM(tiny_checkpoint[0], dtype="float32"), prompts, PARAMS)


def samples(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        assert [completion.index for completion in output.outputs] == list(range(params.n))
    assert llm.get_stats().num_free_blocks == llm.get_stats().num_kv_blocks
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


ENGINES = {
    "blocks of 1": {"block_size": 1},
    "budget 7": {"max_num_batched_tokens": 7},
    "preemption without prefix caching": {"num_kv_blocks": 30, "block_size": 4, "enable_prefix_caching": False},
    "swap": {"num_kv_blocks": 30, "block_size": 4, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_samples_do_not_depend_on_the_engine(tiny_checkpoint, prompts, expected, options):
    """Seen to fail without copy-on-write, and with a fork that forgets the partial block."""
    llm = LLM(tiny_checkpoint[0], dtype="float32", **options)
    assert samples(llm, prompts, PARAMS) == expected
    stats = llm.get_stats()
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)
    assert (stats.num_swaps > 0) == ("preemption_mode" in options)


def test_samples_differ_and_the_first_is_that_of_a_single_request(tiny_checkpoint, prompts, expected):
    llm = LLM(tiny_checkpoint[0], dtype="float32")
    single = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    for prompt, some in zip(prompts, expected, strict=True):
        assert len({tuple(tokens) for tokens in some}) == 4
        assert samples(llm, [prompt], single)[0][0] == some[0]


def test_blocks_of_eight_samples_against_eight_requests(tiny_checkpoint):
    """Prompt of 100 tokens in blocks of 16, 20 tokens out: 6 full blocks shared, 2 for each one's own tokens.

    Eight requests on their own own 8 blocks each.
    """
    prompt = list(range(100))
    together = LLM(tiny_checkpoint[0], dtype="float32", enable_prefix_caching=False)
    params = SamplingParams(n=8, temperature=1.0, max_tokens=20, ignore_eos=True)
    samples(together, [prompt], params)
    apart = LLM(tiny_checkpoint[0], dtype="float32", enable_prefix_caching=False)
    samples(apart, [prompt] * 8, SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True))
    assert together.get_stats().peak_used_blocks == 6 + 8 * 2
    assert apart.get_stats().peak_used_blocks == 8 * 8
    assert together.get_stats().scheduled_tokens == 100 + 8 * 19, "the prompt is computed once"


@pytest.mark.parametrize(
    ("n", "max_num_seqs", "options"),
    [(4, 3, {}), (7, 2, {"enable_overlap": True}), (5, 1, {}), (6, 3, {"num_kv_blocks": 8, "block_size": 4})],
)
def test_more_samples_than_sequences(tiny_checkpoint, n, max_num_seqs, options):
    """They run one after the other, as many as there is room for, and are those of a larger engine."""
    few = LLM(tiny_checkpoint[0], dtype="float32", max_num_seqs=max_num_seqs, **options)
    many = LLM(tiny_checkpoint[0], dtype="float32")
    params = SamplingParams(n=n, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
    prompts = [[1, 2, 3, 4, 5], [7]]
    expected, got = (llm.generate(prompts, params, use_tqdm=False) for llm in (many, few))
    assert [[one.token_ids for one in output.outputs] for output in got] == [
        [one.token_ids for one in output.outputs] for output in expected
    ]
    assert [[one.index for one in output.outputs] for output in got] == [list(range(n))] * 2
    stats = few.get_stats()
    assert (stats.num_requests, stats.prompt_tokens, stats.num_free_blocks) == (2, 6, stats.num_kv_blocks)

    few.engine.add_request("r", [1, 2, 3], params)
    few.engine.step()
    (output, unknown) = few.engine.abort_request(["r", "unknown"])
    assert ([one.finish_reason for one in output.outputs], unknown) == (["abort"] * n, None)
    few.engine.settle()
    assert not few.engine.has_unfinished_requests()
    assert few.get_stats().num_free_blocks == stats.num_kv_blocks
