"""Models whose layers form groups give the tokens of `transformers`, whatever is scheduled, shared, copied or freed.

The oracle recomputes all tokens for each new one, without a cache. Long outputs leave the window of 9 tokens behind.
`test_grouped_blocks.py` tests the decisions, and `tests/extras/test_pairs.py` has drafts, a K/V store and more.
"""

import functools
import random
from collections import Counter

import pytest

from nanovllm_extras import LLM, Config, SamplingParams
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.records.full_observer import Observer
from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.trace.replay import Replay
from tests.extras.models.architectures import Checkpoints
from tests.extras.models.gemma4_checkpoints import EXPERTS, FULL, K_IS_V, NOT_SHARED, WINDOW, make_gemma4
from tests.extras.models.hybrid_checkpoints import continue_all, continue_greedily, logprobs_of

MODELS = {  # one group with a window; three, of which the last has one layer of two; and one
# whose layers are computed by one call of C each
    "gpt_oss": ("plain", {"num_hidden_layers": 4, "layer_types": [WINDOW, FULL] * 2}),
    "gemma3": ("plain", {"num_hidden_layers": 7, "layer_types": [*[WINDOW] * 3, FULL, *[WINDOW] * 2, FULL]}),
    "smollm3": ("windows", {"num_hidden_layers": 4, "layer_types": [WINDOW, WINDOW, FULL, WINDOW],
                            "no_rope_layers": [1, 0, 1, 1]}),
}  # fmt: skip
HEADS = {**K_IS_V, **NOT_SHARED, "hidden_size_per_layer_input": 0}  # one of 64 in layers that see all tokens
GEMMAS = {  # two layers with a window take as much as one that sees all; two that see all as much as one with a window;
    # a block that only layers with a window fill; and two layers that see all take as much as three with a window
    "gemma4_e2b": {"layer_types": [*[WINDOW] * 4, FULL, WINDOW, FULL], "num_kv_shared_layers": 2},
    "gemma4_31b": {**HEADS, "num_key_value_heads": 4, "layer_types": [WINDOW, WINDOW, FULL, WINDOW, FULL]},
    "gemma4_26b": {**HEADS, **EXPERTS, "num_key_value_heads": 4, "layer_types": [WINDOW, WINDOW, FULL]},
    "gemma4_odd": {**HEADS, "global_head_dim": 96, "layer_types": [WINDOW, WINDOW, FULL, WINDOW, FULL]},
}
MAX_TOKENS = 20
LENS = (1, 7, 16, 33, 48, 61)
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
ONE_TABLE = {"disable_hybrid_kv_cache_manager": True}
FEW = {"num_kv_blocks": 16, "max_num_batched_tokens": 30}


class GroupedCheckpoints(Checkpoints):
    """Each model is made once, as are the continuations that `transformers` computes without a cache."""

    @functools.cache  # noqa: B019 (lives as long as the module's tests)
    def of(self, name):
        if name in GEMMAS:
            return make_gemma4(self._root / name, num_hidden_layers=len(GEMMAS[name]["layer_types"]), **GEMMAS[name])
        variant, others = MODELS[name]
        return Checkpoints.make.__wrapped__(self, name, variant, **others)  # lists cannot be cached

    def prompts(self):
        """Random tokens; the last two prompts begin with the same 40."""
        rng = random.Random(0)
        prompts = [[rng.randrange(200) for _ in range(n)] for n in LENS]
        prompts[-1][:40] = prompts[-2][:40]
        return prompts

    @functools.cache  # noqa: B019
    def greedy(self, name):
        return continue_all(self.of(name)[1], self.prompts(), MAX_TOKENS)


def make_llm(folder, **options):
    options = {"attention_backend": "torch", "block_size": 4, "num_kv_blocks": 120, "max_num_seqs": 8, **options}
    return LLM(folder, dtype="float32", device="cpu", **options)


def blocks_of(llm):
    return llm.engine.scheduler.block_manager


def is_grouped(llm):
    return getattr(blocks_of(llm), "num_groups", 1) > 1  # the core's has one table


def logprobs(completion):
    rows = zip(completion.token_ids, completion.logprobs, strict=True)
    return [row[token_id].logprob for token_id, row in rows]


def check_greedy(llm, prompts, expected):
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, (token_ids, wanted) in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == token_ids
        assert logprobs(output.outputs[0]) == pytest.approx(wanted, abs=2e-4)
    assert blocks_of(llm).num_used_blocks == 0


CPU = {"attention_backend": "cpu", "block_size": 16}
TIGHT_CPU = {**CPU, **SWAP, "num_kv_blocks": 5, "max_num_batched_tokens": 30}
CASES = [  # (model, options)
    ("gpt_oss", {**CPU, "num_kv_blocks": 6, "max_num_batched_tokens": 64}),
    ("gemma3", {**SWAP, **FEW}),
    ("smollm3", {"block_size": 1, "num_kv_blocks": 480, "max_num_batched_tokens": 64}),
    ("gemma4_e2b", {"enable_overlap": True, **FEW, "max_num_batched_tokens": 11}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("gemma4_26b", TIGHT_CPU),
            ("smollm3", TIGHT_CPU),
            ("gemma4_31b", {"max_num_batched_tokens": 7}),
            ("gemma4_odd", {**CPU, "num_kv_blocks": 30}),
            ("gemma4_e2b", {**SWAP, **FEW, "enable_overlap": True}),
        ]
    ),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_tokens_are_those_of_transformers(grouped, name, options):
    llm, prompts, expected = make_llm(grouped.of(name)[0], **options), grouped.prompts(), grouped.greedy(name)
    assert is_grouped(llm)
    check_greedy(llm, prompts, expected)
    assert llm.get_stats().num_window_blocks > 0
    stats = llm.get_stats()
    is_tight = options.get("num_kv_blocks", 120) < 30
    assert (stats.num_preemptions > 0) == is_tight
    assert (stats.num_swaps > 0) == ("swap_space_bytes" in options)
    check_greedy(llm, prompts[::-1], expected[::-1])
    if not is_tight:  # each prompt finds its own full blocks, and the last one those of the other
        size = options.get("block_size", 4)
        assert llm.get_stats().prefix_cache_hit_tokens >= sum((n - 1) // size * size for n in LENS)


@pytest.mark.parametrize(
    ("name", "options"), [("gemma3", {"num_kv_blocks": 30}), ("gemma4_e2b", {"max_num_batched_tokens": 7})], ids=str
)
def test_samples_share_the_blocks_of_all_groups(grouped, name, options):
    """The oracle: the log-probabilities of `transformers`. Seen to fail if the blocks of one group are not copied."""
    folder, model = grouped.of(name)
    llm, prompts = make_llm(folder, **options), grouped.prompts()[1:4:2]
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
        for sample in output.outputs:
            assert logprobs(sample) == pytest.approx(logprobs_of(model, prompt, sample.token_ids), abs=2e-4)
    assert blocks_of(llm).num_used_blocks == 0


# ---- memory


@pytest.mark.parametrize(
    ("name", "num_groups", "unused"), [("gpt_oss", 2, 0), pytest.param("gemma4_26b", 3, 1 / 6, marks=pytest.mark.slow)]
)
def test_a_pool_of_the_same_size_holds_longer_sequences(grouped, name, num_groups, unused):
    """Beyond the window, a block takes a half or a third of what it takes in one table."""
    folder = grouped.of(name)[0]
    sizes = {"block_size": 4, "num_kv_blocks": 20, "max_num_batched_tokens": 4, "max_model_len": 160}
    many, one_table = make_llm(folder, **sizes), make_llm(folder, **sizes, **ONE_TABLE)
    of_groups, of_one = (
        sum(cache.bytes_per_block for cache in llm.engine.runner.kv_caches) for llm in (many, one_table)
    )
    assert of_groups * num_groups * (1 - unused) == pytest.approx(of_one)
    assert (blocks_of(many).num_blocks, blocks_of(one_table).num_blocks) == (20 * num_groups, 20)
    assert blocks_of(one_table).capacity == 80
    most = (num_groups - 1) * 4
    assert blocks_of(many).capacity == 4 * (20 * num_groups - most), "3 + 1 blocks for a window of 9 and chunks of 4"
    params = SamplingParams(temperature=0, max_tokens=130, ignore_eos=True)
    output = many.generate([[7] * 10], params, use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 130
    stats = many.get_stats()
    assert stats.peak_used_blocks <= 35 + most
    assert stats.num_window_blocks == (num_groups - 1) * ((138 - 8) // 4), "all that the last token does not see"
    assert stats.num_preemptions == 0
    assert 0 <= stats.waste < 0.2
    cut = one_table.generate([[7] * 10], params, use_tqdm=False)[0].outputs[0]
    assert (len(cut.token_ids), cut.stop_reason) == (71, "kv_cache")
    assert output.token_ids[:71] == cut.token_ids


def test_memory_is_that_of_whole_blocks(grouped):
    """Two layers of three groups, and room for a seventh layer that no group has: K and V of 2 heads of 32 numbers."""
    of_block = 16 * 2 * 2 * 2 * 32 * 4
    for backend in ("torch", "cpu"):
        options = {"attention_backend": backend, "block_size": 16, "num_kv_blocks": None}
        llm = make_llm(grouped.of("gemma3")[0], kv_cache_memory_bytes=10 * 4 * of_block + 1, **options)
        cache = llm.engine.runner.kv_cache
        assert cache.bytes_per_block == of_block
        assert cache.num_blocks == 9 * 4
        assert llm.get_stats().num_kv_blocks == llm.get_stats().num_free_blocks == 36


@pytest.mark.parametrize(("name", "table"), [("gemma3", {}), ("gemma4_e2b", {}), ("gemma4_e2b", ONE_TABLE)], ids=str)
def test_layers_read_the_newest_allocation(grouped, name, table):
    """Their views of the KV cache are kept between steps, but not beyond the tensors of which they are."""
    llm, (_, model) = make_llm(grouped.of(name)[0], **table), grouped.of(name)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for num_blocks in (120, 120, 60):
        caches = llm.engine.runner.kv_caches
        for cache in caches:
            cache.allocate(num_blocks)
        llm.reset_prefix_cache()
        expected = continue_greedily(model, [3, 4, 5, 6], 4)[0]
        assert llm.generate([[3, 4, 5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids == expected
        layout = llm.engine.runner.layout
        _, layers = layout.inputs_of(None, None)
        storages = {layers[:, i].untyped_storage().data_ptr() for i in range(len(layout.layers.places))}
        assert storages == {cache.tensor.untyped_storage().data_ptr() for cache in caches}
        assert all(cache.tensor[:, :, 1:].any() for cache in caches), "the step has written to them"


# ---- what has one table


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (ONE_TABLE, "disable_hybrid_kv_cache_manager is set"),
        ({"max_model_len": 9}, "no sequence is longer than the window"),
    ],
    ids=str,
)
def test_other_options_have_one_table_and_the_description_says_so(grouped, options, reason):
    folder, model = grouped.of("gpt_oss")
    llm = make_llm(folder, **options)
    assert not is_grouped(llm)
    assert llm.engine.description.startswith("one block table for all layers (")
    assert reason in llm.engine.description
    prompts = [[3, 4, 5, 6]]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    tokens = llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids
    assert tokens == continue_greedily(model, prompts[0], 5)[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt_oss", {}), pytest.param("gemma4_31b", {**SWAP, "enable_overlap": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_recorded_engine_has_the_groups_that_it_has_without(grouped, tmp_path, name, options):
    """Its tokens are those of `transformers`, and what is replayed is what its block manager has at the end."""
    options = {**FEW, "explain_prefix_misses": True, **options}
    with make_llm(grouped.of(name)[0], trace=tmp_path / "run.jsonl", **options) as llm:
        assert is_grouped(llm)
        check_greedy(llm, grouped.prompts(), grouped.greedy(name))
        check_greedy(llm, grouped.prompts()[-1:], grouped.greedy(name)[-1:])
        manager, stats, shape = blocks_of(llm), llm.get_stats(), llm.engine.runner.layout.layer_groups
    lines = read_recording(tmp_path / "run.jsonl")
    check_recording(tmp_path / "run.jsonl", lines)
    header, events = lines[0], [event for line in lines[1:] for event in line["events"]]
    assert (header["num_groups"], header["group_window"]) == (manager.num_groups, 9)
    assert header["config"]["layers_of_groups"] == shape.num_layers
    assert len(shape.places) == sum(shape.num_layers)
    replay = Replay(header)
    for event in events:
        replay.apply(event)
    assert list(replay.free) == list(manager._free)
    assert replay.window_blocks == manager.blocks_beside().keys()
    assert replay.cached.keys() == manager.prefix_cache._by_id.keys() | replay.window_blocks
    assert sum(len(event[2]) for event in events if event[0] == "give_back") == stats.num_window_blocks > 0
    assert sum(event[0] == "preempt" for event in events) == stats.num_preemptions > 0
    misses = stats.prefix_cache_query_tokens - stats.prefix_cache_hit_tokens
    assert sum(stats.prefix_cache_miss_tokens.values()) == misses
    assert sum(miss["end"] - miss["start"] for event in events if event[0] == "miss" for miss in event[2]) == misses


def test_an_observer_sees_all_groups(grouped):
    class Watcher(Observer):
        def __init__(self):
            self.blocks = Counter()

        def on_take_block(self, seq, block_id, is_evicted):
            self.blocks[0] += 1

        def on_take_in_group(self, seq, group, place, block_id, is_evicted):
            self.blocks[group] += 1

    watcher = Watcher()
    config = Config(str(grouped.of("gemma3")[0]), device="cpu", num_kv_blocks=20, block_size=4)
    engine = LLMEngine(config, watcher)
    engine.add_request("A", {"prompt_token_ids": [5] * 9}, SamplingParams(max_tokens=1))
    engine.step()
    assert watcher.blocks == dict.fromkeys(range(4), 3)
    engine = LLMEngine(config, Observer())  # which overrides none of the events
    engine.add_request("A", {"prompt_token_ids": [5] * 9}, SamplingParams(max_tokens=1))
    engine.step()
    assert engine.get_stats().num_failed_observers == 0
