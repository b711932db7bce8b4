"""Several ranks serve models whose layers form groups: the tokens and scores of one rank.

Each rank has its heads of all groups. The ranks are threads of this process. `tests/extras/kv_groups` compares one rank
with `transformers`, and `tests/extras/test_pairs.py` has drafts, a K/V store and more beside ranks.
"""

import pytest
import torch

from nanovllm_extras import SamplingParams
from nanovllm_extras.kernels.cpu.cpu_decoder_layer import CpuDecoderLayer
from nanovllm_extras.parallel import start_ranks as start
from nanovllm_extras.parallel import worker
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.kv_groups.test_grouped_layers import (
    FEW,
    GREEDY,
    MAX_TOKENS,
    ONE_TABLE,
    SWAP,
    blocks_of,
    is_grouped,
    logprobs,
    make_llm,
)
from tests.extras.models.hybrid_checkpoints import continue_greedily

CPU = {"attention_backend": "cpu", "block_size": 16}
CASES = [  # (model, options)
    ("gemma4_e2b", {"max_num_batched_tokens": 13}),
    ("smollm3", {**CPU, "max_num_batched_tokens": 13}),
    ("gemma4_26b", {**FEW, **SWAP, "num_kv_blocks": 8, "max_num_batched_tokens": 13}),
    pytest.param("gpt_oss", {"enable_overlap": True, **FEW, **SWAP, "num_kv_blocks": 8}, marks=pytest.mark.slow),
    pytest.param("gemma4_31b", {**FEW, **SWAP, **CPU, "num_kv_blocks": 5}, marks=pytest.mark.slow),
    pytest.param("gemma3", {"enable_overlap": True, "max_num_batched_tokens": 11}, marks=pytest.mark.slow),
]
SHARES = {  # (of the bytes of a block, of the number of blocks) that each of two ranks has: by default (1/2, 1)
    "smollm3": (1, 1),  # it has one head of K and V, which both ranks hold
    # one head of the two layers that see all tokens, which both ranks hold, and 2 of 4 heads of the others: a block has
    # room for two of these instead of one, so there are two groups of them instead of three
    "gemma4_31b": (1, 3 / 4),
}
SAMPLED = SamplingParams(n=2, temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)


def greedy_of(llm, prompts):
    """For each prompt: its continuation, and the log-probability of each of its tokens."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, logprobs(output.outputs[0])) for output in outputs]


def check_greedy(llm, prompts, expected):
    for (token_ids, scores), (wanted_ids, wanted) in zip(greedy_of(llm, prompts), expected, strict=True):
        assert token_ids == wanted_ids
        assert scores == pytest.approx(wanted, abs=2e-4)
    assert blocks_of(llm).num_used_blocks == 0


def samples_of(llm, prompts):
    outputs = llm.generate(prompts, SAMPLED, use_tqdm=False)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_ranks_give_the_tokens_of_one(grouped, request, name, options):
    """Prompts come twice, so prefixes are found in all groups. Samples of a prompt are forked on all ranks."""
    is_cpu, options = "attention_backend" in options, {"num_kv_blocks": 60, **options}
    ranks = request.getfixturevalue("rank_threads" if is_cpu else "quick_ranks")
    if is_cpu:
        need_a_compiler(torch.float32)
    is_tight, folder = options["num_kv_blocks"] < 60, grouped.of(name)[0]
    prompts = grouped.prompts()[:3] if is_tight else grouped.prompts()[3:5]
    one = make_llm(folder, **options)
    expected, samples = greedy_of(one, prompts), samples_of(one, prompts[:1])
    with make_llm(folder, tensor_parallel_size=2, **options) as llm:
        assert is_grouped(llm)
        assert llm.engine.description.startswith("block tables: one for ")
        check_greedy(llm, prompts, expected)
        check_greedy(llm, prompts[::-1], expected[::-1])
        assert samples_of(llm, prompts[:1]) == samples
        stats, runner = llm.get_stats(), llm.engine.runner
        num_fused = sum(isinstance(module, CpuDecoderLayer) for module in runner.model.modules())
    assert len(runner.kv_caches) == 1, "blocks of all groups have the same size"
    assert num_fused == (4 if is_cpu and name == "smollm3" else 0)
    whole, (of_bytes, of_blocks) = one.engine.runner.kv_cache, SHARES.get(name, (1 / 2, 1))
    assert runner.kv_cache.bytes_per_block == of_bytes * whole.bytes_per_block
    assert runner.kv_cache.num_blocks == of_blocks * whole.num_blocks
    assert stats.num_window_blocks > 0
    assert (stats.num_preemptions > 0) == is_tight
    assert (stats.num_swaps > 0) == is_tight
    assert stats.prefix_cache_hit_tokens > 0 or stats.num_preemptions, "few blocks are kept where preemptions are"
    assert [rank.wait(60) for rank in ranks] == [0]


def keep_runners(monkeypatch):
    """Return a list that will have the runners of all ranks above 0."""
    runners, start_worker = [], worker.start_worker

    def keep(*arguments):
        runner, communicator = start_worker(*arguments)
        runners.append(runner)
        return runner, communicator

    monkeypatch.setattr(worker, "start_worker", keep)
    return runners


def test_all_ranks_have_as_many_blocks(grouped, quick_ranks, monkeypatch):
    """Each rank finds other free memory. All of them take the least, and have as many blocks for each group."""
    runners = keep_runners(monkeypatch)

    def free_bytes(self, runner):
        return 200_000 if runner.part.communicator.rank else 300_000

    monkeypatch.setattr(start.Device, "free_bytes", free_bytes)
    folder, prompts = grouped.of("smollm3")[0], grouped.prompts()[1:3]
    with make_llm(folder, tensor_parallel_size=2, num_kv_blocks=None) as llm:
        caches = [runner.kv_cache for runner in (llm.engine.runner, *runners)]
        assert [runner.layout.layer_groups.num_groups for runner in runners] == [4]
        size = 2 * 4 * 32 * 4  # K and V, of one layer, for four tokens, of one head of 32 numbers in float32
        assert [cache.bytes_per_block for cache in caches] == [size] * 2
        assert [cache.num_blocks for cache in caches] == [4 * (200_000 // (4 * size) - 1)] * 2
        check_greedy(llm, prompts, greedy_of(make_llm(folder), prompts))


@pytest.mark.parametrize(("name", "num_caches"), [("gemma3", 1), ("gemma4_e2b", 2)])
def test_all_ranks_have_one_table_if_rank_0_has(grouped, quick_ranks, monkeypatch, name, num_caches):
    """As beside a draft model, which only rank 0 has. There is a KV cache for each shape of K and V."""
    runners, folder, prompts = keep_runners(monkeypatch), grouped.of(name)[0], grouped.prompts()[:3]
    drafts = {"model": str(grouped.of("gemma3")[0]), "num_speculative_tokens": 2, "disable_by_batch_size": 8}
    options = {"speculative_config": drafts} if name == "gemma3" else ONE_TABLE
    with make_llm(folder, tensor_parallel_size=2, **options) as llm:
        runners = [llm.engine.runner, *runners]
        assert not is_grouped(llm)
        assert [len(one.kv_caches) for one in runners] == [num_caches] * 2
        assert [one.layout.layer_groups for one in runners] == [None] * 2
        assert llm.engine.description.startswith("one block table for all layers (")
        check_greedy(llm, prompts, greedy_of(make_llm(folder), prompts))


def test_more_ranks_than_heads_hold_the_same_ones(grouped, quick_ranks):
    """Four ranks. Layers that see all tokens have one head of K and V, and the others have four heads."""
    (folder, model), prompt = grouped.of("gemma4_31b"), grouped.prompts()[2]
    with make_llm(folder, tensor_parallel_size=4) as llm:
        assert [group.num_kv_heads for group in llm.engine.runner.shape.kv_groups] == [4, 1]
        assert {backend.num_kv_heads for backend in llm.engine.runner.backends} == {1}
        assert "with 4 heads of 32" in llm.engine.description, "those of all ranks"
        check_greedy(llm, [prompt], [continue_greedily(model, prompt, MAX_TOKENS)])


@pytest.mark.slow
def test_each_rank_has_its_rows_of_the_layers_own_embeddings(grouped, quick_ranks, monkeypatch):
    """Of random weights. The 210 rows of four ranks are filled up with two rows of zeros."""
    folder, prompts, dummy = grouped.of("gemma4_e2b")[0], grouped.prompts()[2:4], {"load_format": "dummy"}
    runners, one = keep_runners(monkeypatch), make_llm(folder, **dummy)
    with make_llm(folder, tensor_parallel_size=4, **dummy) as llm:
        tokens = [token_ids for token_ids, _ in greedy_of(llm, prompts)]
        runners.append(llm.engine.runner)
    assert tokens == [token_ids for token_ids, _ in greedy_of(one, prompts)]
    shares = {runner.part.communicator.rank: runner for runner in runners}
    tables = [shares[rank].model.model.embed_tokens_per_layer.inner.weight for rank in range(4)]
    whole = one.engine.runner.model.model.embed_tokens_per_layer.weight
    assert torch.equal(torch.cat(tables), torch.cat([whole, whole.new_zeros(2, 7 * 16)]))
