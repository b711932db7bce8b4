"""Several ranks serve models whose layers form groups: the tokens of `transformers` in float32, and those of one rank.

Each rank has its heads of all groups. The ranks are threads of this process. By default two cases run, and compare
with one rank only; the sweep (`pytest -m slow`) takes all.
"""

import dataclasses

import pytest
import torch

from nanovllm_extras import LLM, TINY_QWEN3, Config, SamplingParams
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.kernels.cpu.cpu_decoder_layer import CpuDecoderLayer
from nanovllm_extras.parallel import messages, worker
from nanovllm_extras.parallel import start_ranks as start
from tests.extras.failing_request import isolating_engine, serve_beside_a_failing_one
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.kv_groups.test_grouped_layers import (
    FEW,
    GREEDY,
    MAX_TOKENS,
    MODELS,
    ONE_TABLE,
    SWAP,
    GroupedCheckpoints,
    blocks_of,
    is_grouped,
    logprobs,
    make_llm,
)
from tests.extras.models.hybrid_checkpoints import continue_greedily

ENGINES = {
    "one token at a time": {"max_num_batched_tokens": 1, "block_size": 4},
    "chunks": {"max_num_batched_tokens": 13, "block_size": 4},
    "preemption": {"block_size": 4, **FEW},
    "swap": {"block_size": 4, **FEW, **SWAP},
    "overlap": {"max_num_batched_tokens": 11, "block_size": 4, "enable_overlap": True},
    "overlap, swap": {"block_size": 4, "enable_overlap": True, **FEW, **SWAP},
    "cpu": {"attention_backend": "cpu", "max_num_batched_tokens": 33, "block_size": 16},
    "cpu, swap": {**FEW, **SWAP, "attention_backend": "cpu", "block_size": 16, "num_kv_blocks": 5},
}
NAMES = (*MODELS, "gemma4_e2b", "gemma4_31b", "gemma4_26b")
DEFAULT_CASES = [("smollm3", "swap"), ("smollm3", "cpu"), ("gemma4_e2b", "chunks"), ("gemma4_26b", "swap")]
SHARES = {  # (of the bytes of a block, of the number of blocks) that each of two ranks has: by default (1/2, 1)
    "smollm3": (1, 1),  # it has one head of K and V, which both ranks hold
    # one head of the two layers that see all tokens, which both ranks hold, and 2 of 4 heads of the others: a block has
    # room for two of these instead of one, so there are two groups of them instead of three
    "gemma4_31b": (1, 3 / 4),
}
SAMPLED = SamplingParams(n=2, temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    return GroupedCheckpoints(tmp_path_factory.mktemp("grouped_ranks"))


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


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(name, engine, marks=[] if (name, engine) in DEFAULT_CASES else [pytest.mark.slow])
        for i, name in enumerate(NAMES)
        for j, engine in enumerate(ENGINES)
        if (i + j) % 2 == 0 or (name, engine) in DEFAULT_CASES
    ],
)
def test_ranks_give_the_tokens_of_transformers_and_of_one(grouped, request, name, engine):
    """Prompts come twice, so prefixes are found in all groups. Samples of a prompt are forked on all ranks."""
    is_cpu, is_default, options = engine.startswith("cpu"), (name, engine) in DEFAULT_CASES, ENGINES[engine]
    ranks = request.getfixturevalue("rank_threads" if is_cpu else "quick_ranks")
    if is_cpu:
        need_a_compiler(torch.float32)
    some = slice(0, 3 if engine == "one token at a time" else 6)
    if is_default:  # few requests and fewer blocks
        some, few = (slice(0, 3), {"num_kv_blocks": 8}) if "swap" in engine else (slice(3, 5), {"num_kv_blocks": 60})
        options = {**options, **few, "max_num_batched_tokens": 13}
    folder, prompts = grouped.of(name)[0], grouped.prompts()[some]
    one = make_llm(folder, **options)
    expected = greedy_of(one, prompts) if is_default else grouped.greedy(name)[some]
    samples = samples_of(one, prompts[:1])
    with make_llm(folder, tensor_parallel_size=2, **options) as llm:
        assert is_grouped(llm)
        assert llm.engine.description.startswith("block tables: one for ")
        check_greedy(llm, prompts, expected)
        if not is_default:
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
    assert (stats.num_preemptions > 0) == (options.get("num_kv_blocks", 120) < 60)
    assert (stats.num_swaps > 0) == ("swap" in engine)
    assert stats.prefix_cache_hit_tokens > 0 or stats.num_preemptions, "few blocks are kept where preemptions are"
    assert [rank.wait(10) for rank in ranks] == [0]


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "gemma4_e2b"])
def test_drafts_of_two_ranks_change_no_token(grouped, quick_ranks, name):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "disable_by_batch_size": 8}
    prompts, options = [prompt[:12] * 3 for prompt in grouped.prompts()[2:4]], {"max_num_batched_tokens": 64}
    folder = grouped.of(name)[0]
    expected = greedy_of(make_llm(folder, **options), prompts)
    with make_llm(folder, tensor_parallel_size=2, speculative_config=drafts, **options) as llm:
        assert is_grouped(llm)
        check_greedy(llm, prompts, expected)
        assert llm.get_stats().num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "table"), [("gemma3", {}), ("gemma4_e2b", {}), ("gemma4_31b", {}), ("gemma4_e2b", ONE_TABLE)], ids=str
)
def test_each_rank_stores_its_share_of_the_blocks_of_all_groups(grouped, quick_ranks, name, table):
    options = {"num_kv_blocks": 30, "max_num_batched_tokens": 30, "kv_offloading_size": 0.01, **table}
    prompts, expected = grouped.prompts(), grouped.greedy(name)
    with make_llm(grouped.of(name)[0], tensor_parallel_size=2, **options) as llm:
        assert is_grouped(llm) == (not table)
        for some in [slice(4, 6), slice(0, 3), slice(3, 4)] * 2:
            check_greedy(llm, prompts[some], expected[some])
            assert llm.engine.parts.kv_store.saver.wait(5)
        assert llm.get_stats().kv_store.num_loaded_blocks > 0


@pytest.mark.slow
def test_a_request_that_fails_does_not_change_the_blocks_of_others(grouped, quick_ranks):
    folder, prompts = grouped.of("gemma3")[0], grouped.prompts()[:4]
    config = Config(model=folder, device="cpu", dtype="float32", attention_backend="torch", block_size=4,
                    num_kv_blocks=120, max_num_seqs=8, max_num_batched_tokens=16, tensor_parallel_size=2)  # fmt: skip
    engine = isolating_engine(config)

    tokens = serve_beside_a_failing_one(engine, prompts, GREEDY)
    assert tokens == [token_ids for token_ids, _ in greedy_of(make_llm(folder), prompts)]


@pytest.mark.parametrize(
    ("name", "num_caches"),
    [
        pytest.param("gemma3", 1, marks=pytest.mark.slow),
        ("gemma4_e2b", 2),
        pytest.param("gemma4_26b", 2, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_have_one_table_if_rank_0_has(grouped, quick_ranks, monkeypatch, name, num_caches):
    """There is a KV cache for each shape of K and V."""
    runners, folder, prompts = keep_runners(monkeypatch), grouped.of(name)[0], grouped.prompts()[:3]
    with make_llm(folder, tensor_parallel_size=2, **ONE_TABLE) as llm:
        assert not is_grouped(llm)
        assert [len(one.kv_caches) for one in (llm.engine.runner, *runners)] == [num_caches] * 2
        assert [one.layout.layer_groups for one in (llm.engine.runner, *runners)] == [None] * 2
        assert llm.engine.description.startswith("one block table for all layers (")
        check_greedy(llm, prompts, greedy_of(make_llm(folder), prompts))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma4_e2b"])
def test_ranks_that_are_processes(grouped, name):
    folder, prompts = grouped.of(name)[0], grouped.prompts()
    with make_llm(folder, tensor_parallel_size=2) as llm:
        assert is_grouped(llm)
        check_greedy(llm, prompts, grouped.greedy(name))


@pytest.mark.parametrize("name", ["gemma4_31b", pytest.param("gemma4_odd", marks=pytest.mark.slow)])
def test_more_ranks_than_heads_hold_the_same_ones(grouped, quick_ranks, name):
    """Four ranks. Layers that see all tokens have one head of K and V, and the others have four heads, or two."""
    (folder, model), prompt = grouped.of(name), grouped.prompts()[2]
    with make_llm(folder, tensor_parallel_size=4) as llm:
        assert [group.num_kv_heads for group in llm.engine.runner.shape.kv_groups] == [4 if "31b" in name else 2, 1]
        assert {backend.num_kv_heads for backend in llm.engine.runner.backends} == {1}
        assert f"with {4 if '31b' in name else 2} heads of 32" in llm.engine.description, "those of all ranks"
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


# ---- planted faults


def change_metadata_on_rank_1(monkeypatch, change):
    def unpack_step(header, values):
        batch = messages.unpack_step(header, values)
        return dataclasses.replace(batch, metadata=change(batch.metadata))

    monkeypatch.setattr(worker, "unpack_step", unpack_step)


def rank_1_reads_one_table(monkeypatch):
    change_metadata_on_rank_1(monkeypatch, lambda metadata: metadata.of_groups()[1])


def windows_in_another_order_on_rank_1(monkeypatch):
    change_metadata_on_rank_1(
        monkeypatch, lambda metadata: dataclasses.replace(metadata, window_tables=metadata.window_tables[::-1])
    )


def no_copies_on_rank_1(monkeypatch):
    right = ModelRunner.run

    def run(self, batch, is_replayed=None):
        if self.part.communicator.rank:
            batch.copies.clear()
        return right(self, batch, is_replayed)

    monkeypatch.setattr(ModelRunner, "run", run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [rank_1_reads_one_table, windows_in_another_order_on_rank_1, no_copies_on_rank_1],
    ids=lambda plant: plant.__name__,
)
def test_planted_faults_are_seen(grouped, quick_ranks, monkeypatch, plant):
    folder, prompts = grouped.of("gemma3")[0], grouped.prompts()
    expected = samples_of(make_llm(folder), prompts)
    plant(monkeypatch)
    with make_llm(folder, tensor_parallel_size=2) as llm:
        assert samples_of(llm, prompts) != expected


def test_models_of_one_kind_of_layer_have_one_table(quick_ranks):
    with LLM(TINY_QWEN3, device="cpu", tensor_parallel_size=2, attention_backend="torch", num_kv_blocks=20) as llm:
        runner = llm.engine.runner
        assert (len(runner.kv_caches), runner.layout.layer_groups, runner.layout.pool) == (1, None, None)
        assert not is_grouped(llm)
