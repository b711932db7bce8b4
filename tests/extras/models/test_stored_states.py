"""Qwen3.5 and LFM2 with a K/V store: the tokens of `transformers` after blocks and states were evicted and loaded.

`tests/extras/states/test_slots.py` has random traffic without a model.
"""

import dataclasses
import functools
import gc
import os

import pytest
import torch

from nanovllm_extras import LLM, Config, SamplingParams
from nanovllm_extras.kv_store.disk_tier import LENGTHS, MAGIC
from nanovllm_extras.kv_store.kv_slots import Slots
from nanovllm_extras.kv_store.memory_tier import MemoryTier
from nanovllm_extras.kv_store.share import name_of_state
from nanovllm_extras.kv_store.store import KVStore
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.sampling.logits import LogitBias
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache
from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.recording import read_recording
from tests.extras.failing_request import isolating_engine
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS, HybridCheckpoints, continue_greedily, logprobs_of
from tests.extras.models.test_qwen3_5 import GREEDY, check_all_free, check_greedy, logprobs, make_llm
from tests.extras.models.test_qwen3_5_drafts import Knowing, drafting, texts_of
from tests.extras.speculation.test_mtp import check_draws, predicting, record_draws

pytest.importorskip("transformers.models.qwen3_5")
MEMORY = {"kv_offloading_size": 0.01}
SMALL = {"num_kv_blocks": 19}  # the longest prompt fits, and not two of them


@pytest.fixture(scope="module")
def hybrids(all_hybrids):
    return all_hybrids["Qwen3_5"]


@functools.cache
def greedy(hybrids, i, variant="plain"):
    """Return the continuation of prompt `i` by `transformers`, and its log-probabilities."""
    return hybrids.greedy(variant)[i]


def in_folder(folder, **fields):
    extra = {"shared_storage_path": str(folder), "max_bytes": 1 << 26}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra, **fields}


def slow_after(cases, count):
    """Return the cases, of which only the first `count` are in the default tests."""
    return [one if i < count else pytest.param(*one, marks=pytest.mark.slow) for i, one in enumerate(cases)]


def store_of(llm):
    return llm.engine.parts.kv_store


def serve_each(llm, hybrids, order=(3, 4, 5, 3, 5), variant="plain"):
    """Serve one prompt after the other, each of which takes the blocks of those before, and check their tokens."""
    for i in order:
        check_greedy(llm, [hybrids.prompts()[i]], [greedy(hybrids, i, variant)])
        assert store_of(llm).saver.wait(5)
    return llm.get_stats().kv_store


def check_loaded(llm, stats):
    assert stats.num_loaded_states > 1
    assert stats.loaded_tokens == stats.num_loaded_blocks * store_of(llm).block_size > 40
    assert stats.num_failed_loads == stats.num_dropped_blocks == 0
    sizes = stats.num_loaded_blocks * store_of(llm).bytes_per_block, stats.num_loaded_states * bytes_of_state(llm)
    assert stats.tiers["memory"].loaded_bytes == sum(sizes)


def bytes_of_state(llm):
    return llm.engine.runner.layout.pool.bytes_per_slot


# ---- host memory


@pytest.mark.parametrize(
    ("backend", "budget", "block_size", "interval"),
    slow_after([("cpu", 13, 16, 1), ("torch", 64, 4, 0), ("torch", 13, 4, 2), ("cpu", 64, 16, 64)], 1),
)
def test_tokens_are_those_of_transformers_after_eviction(hybrids, backend, budget, block_size, interval):
    options = {"attention_backend": backend, "max_num_batched_tokens": budget, "state_snapshot_interval": interval}
    llm = make_llm(hybrids.make()[0], block_size=block_size, num_kv_blocks=80 // block_size, **options, **MEMORY)
    check_loaded(llm, serve_each(llm, hybrids))


def test_another_model_loads_its_states(tmp_path):
    """Its states are only those of convolutions."""
    hybrids = HybridCheckpoints(tmp_path, "Lfm2")
    llm = make_llm(hybrids.make()[0], **SMALL, **MEMORY)
    check_loaded(llm, serve_each(llm, hybrids))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"preemption_mode": "swap", "swap_space_bytes": 100_000},
        {"scheduling_policy": "sjf", "max_num_batched_tokens": 13, "explain_prefix_misses": True},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_options(hybrids, options):
    llm = make_llm(hybrids.make()[0], **{**SMALL, **options}, **MEMORY)
    check_loaded(llm, serve_each(llm, hybrids))
    check_greedy(llm, hybrids.prompts(), hybrids.greedy())
    check_greedy(llm, hybrids.prompts()[::-1], hybrids.greedy()[::-1])
    assert store_of(llm).saver.wait(5)


# ---- drafts


OVERLAP = {"enable_overlap": True}
DRAFTED = [  # options, and the share of right drafts
    ({**OVERLAP, "max_num_batched_tokens": 13, "state_snapshot_interval": 1}, 0.7),
    ({**OVERLAP, "preemption_mode": "swap", "swap_space_bytes": 100_000}, 1),
    ({"attention_backend": "cpu", "block_size": 16, "num_kv_blocks": 5, "state_snapshot_interval": 1}, 0.7),
]


@pytest.mark.parametrize(("options", "share_right"), slow_after(DRAFTED, 1), ids=str)
def test_tokens_with_drafts_are_those_of_transformers(hybrids, options, share_right):
    options = {**SMALL, **options, "speculative_config": drafting(Knowing(texts_of(hybrids), share_right))}
    llm = make_llm(hybrids.make()[0], **options, **MEMORY)
    check_loaded(llm, serve_each(llm, hybrids))
    check_greedy(llm, hybrids.prompts(), hybrids.greedy())
    check_greedy(llm, hybrids.prompts()[::-1], hybrids.greedy()[::-1])
    all_stats = llm.get_stats()
    assert 0 < all_stats.num_accepted_tokens <= all_stats.num_draft_tokens
    assert (all_stats.num_accepted_tokens == all_stats.num_draft_tokens) == (share_right == 1)
    check_all_free(llm)


def test_a_conversation_with_drafts_finds_its_earlier_turns_in_the_store(hybrids):
    """Blocks and snapshots of outputs are saved after the step that verifies their drafts."""
    folder, model = hybrids.make()
    prompt, turns = hybrids.prompts()[2], []
    for turn in range(3):
        turns.append((prompt, continue_greedily(model, prompt)))
        prompt = [*prompt, *turns[-1][1][0], turn, 7 * turn]
    knowing = Knowing([[*prompt, *token_ids] for prompt, (token_ids, _) in turns])
    options = {**SMALL, "state_snapshot_interval": 1}
    drafted = make_llm(folder, **options, **MEMORY, speculative_config=drafting(knowing))
    hits = []
    for llm in (make_llm(folder, **options, **MEMORY), drafted):
        hits.append([])
        for prompt, (token_ids, _) in turns:
            output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
            assert output.outputs[0].token_ids == token_ids
            hits[-1].append(output.num_cached_tokens)
            serve_each(llm, hybrids, order=(5,))  # takes all blocks of the pool
        assert llm.get_stats().kv_store.num_loaded_states > 2
    assert hits[0] == hits[1]
    assert all(hits[1][1:])
    assert drafted.get_stats().num_accepted_tokens > 0


@pytest.mark.slow
def test_a_loaded_snapshot_has_the_hidden_state_for_the_head(heads):
    """The head drafts as the reference does after K, V and state of its own were loaded."""
    folder, model, head = heads.make()
    llm = make_llm(folder, **SMALL, **MEMORY, **OVERLAP, speculative_config=predicting())
    draws = record_draws(llm.engine)
    check_loaded(llm, serve_each(llm, heads.hybrids))
    check_draws(model, head, draws)
    assert llm.get_stats().num_accepted_tokens > 0
    check_all_free(llm)


def test_engines_with_and_without_a_head_share_no_snapshots(heads):
    tier, folder = MemoryTier(1 << 22), heads.make(is_trained=False)[0]
    for config in (None, predicting(), None):
        llm = make_llm(folder, kv_transfer_config={"kv_connector": tier}, speculative_config=config, **SMALL)
        stats = serve_each(llm, heads.hybrids, order=(2,))
        assert stats.num_failed_loads == 0
    assert stats.num_loaded_states == 1, "the third engine finds what the first one has saved"
    assert tier.stats.hits == stats.num_loaded_blocks + 1


# ---- samples, salts, bytes


def test_samples_continue_a_loaded_state(hybrids):
    folder, model = hybrids.make()
    llm, prompt = make_llm(folder, **{**SMALL, "num_kv_blocks": 30}, **MEMORY), hybrids.prompts()[3]
    serve_each(llm, hybrids, order=(3, 5, 4))
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert output.num_cached_tokens == 32
    assert llm.get_stats().kv_store.num_loaded_states == 1
    for sample in output.outputs:
        assert logprobs(sample) == pytest.approx(logprobs_of(model, prompt, sample.token_ids), abs=2e-4)
    check_all_free(llm)


def test_requests_with_different_salts_share_no_snapshot(hybrids):
    llm, prompt = make_llm(hybrids.make()[0], **SMALL, **MEMORY), hybrids.prompts()[3]
    num_cached = []
    for salt in (None, "a", "b", "a", None):
        salted = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
        [output] = llm.generate([salted], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == greedy(hybrids, 3)[0]
        num_cached.append(output.num_cached_tokens)
        serve_each(llm, hybrids, order=(5,))
    assert num_cached == [0, 0, 0, 32, 32]


def state_bytes(pool, slot):
    """Return the bytes of a snapshot: recurrent states before the inputs of convolutions."""
    parts = [states[:, slot].contiguous().view(torch.uint8).flatten() for states in (pool.recurrent, pool.conv)]
    return torch.cat(parts)


def test_a_loaded_snapshot_is_the_state_at_its_position(hybrids, monkeypatch):
    """An engine without a store computes the same chunk, and keeps the state after it in a slot: the same bytes."""
    options = {"attention_backend": "torch", "block_size": 4, "device": "cpu", "num_kv_blocks": 40, "dtype": "bfloat16"}
    params, prompt = SamplingParams(temperature=0, max_tokens=1), hybrids.prompts()[5]
    plain, llm = LLM(hybrids.make()[0], **options), LLM(hybrids.make()[0], **options, **MEMORY)
    for one in (plain, llm):
        one.generate([prompt], params, use_tqdm=False)
    [slot] = plain.engine.scheduler.block_manager.states.snapshots.values()
    expected = state_bytes(plain.engine.runner.layout.pool, slot)
    assert expected.any()
    assert store_of(llm).saver.wait(5)
    [name] = store_of(llm).names(Sequence("", prompt, params), 14, 15)
    assert torch.equal(store_of(llm).load_state(name).data, expected)

    runner, read = llm.engine.runner, []
    reset_prefix_cache(llm.engine.scheduler)  # of the pool only
    for tensor in (runner.kv_cache.tensor, runner.layout.pool.recurrent, runner.layout.pool.conv):
        tensor.fill_(float("nan"))
    forward = runner.forward

    def note(batch):
        read.append(state_bytes(runner.layout.pool, batch.copies.slots[0]))
        return forward(batch)

    monkeypatch.setattr(runner, "forward", note)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert output.num_cached_tokens == 60
    assert torch.equal(read[0], expected)


# ---- folders and shared memory


def test_a_restarted_engine_finds_snapshots_in_the_folder(hybrids, tmp_path):
    llm = make_llm(hybrids.make()[0], kv_transfer_config=in_folder(tmp_path / "kv"), **SMALL)
    serve_each(llm, hybrids, order=(3, 4, 5))
    llm.shutdown()
    del llm
    gc.collect()
    again = make_llm(hybrids.make()[0], kv_transfer_config=in_folder(tmp_path / "kv"), **SMALL, **MEMORY)
    stats = serve_each(again, hybrids, order=(3, 4, 5))
    # the last two prompts begin with the same 40 tokens: their blocks are still in the pool, and their state is not
    assert (stats.num_loaded_states, stats.loaded_tokens) == (3, 32 + 44 + 20)
    assert stats.tiers["disk"].loaded_bytes == stats.tiers["memory"].saved_bytes - bytes_computed(again, stats)
    before = again.get_stats().kv_store.tiers["disk"].loaded_bytes
    stats = serve_each(again, hybrids, order=(3, 4, 5))
    assert stats.num_loaded_states == 6
    assert stats.tiers["disk"].loaded_bytes == before, "host memory has blocks and snapshots now"


def bytes_computed(llm, stats):
    """Return the bytes that were saved to host memory because they were computed, and are in the folder, too."""
    return stats.tiers["memory"].saved_bytes - stats.tiers["disk"].loaded_bytes


def test_a_damaged_file_of_a_snapshot_is_a_miss(hybrids, tmp_path):
    """`tests/extras/kv_store/test_disk_tier.py` has other damages."""
    options = {"kv_transfer_config": in_folder(tmp_path / "kv"), "state_snapshot_interval": 2}
    llm = make_llm(hybrids.make()[0], num_kv_blocks=18, **options)  # as many as prompt 5 needs
    serve_each(llm, hybrids, order=(3, 5))
    names = store_of(llm).names(Sequence("", hybrids.prompts()[3], SamplingParams()), 0, 8)
    ends = [i for i, name in enumerate(names, 1) if store_of(llm).match([name_of_state(name)])]
    assert ends == [2, 4, 6, 8]
    path = tmp_path / "kv" / f"{name_of_state(names[-1]).key.hex()}.kv"
    data = path.read_bytes()
    assert len(data) == len(MAGIC) + LENGTHS.size + 32 + 16 + 8 + bytes_of_state(llm)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    stats = serve_each(llm, hybrids, order=(3,))
    assert (stats.num_loaded_states, stats.loaded_tokens) == (1, 24), "the snapshot before it"
    assert path.read_bytes() == data, "it was computed and saved again"


def test_another_engine_finds_snapshots_in_shared_memory(hybrids, tmp_path):
    """Prefill apart from decode: the second engine computes at most one block of each prompt."""
    extra = {"name": f"states-{tmp_path.name}-{os.getpid()}", "max_bytes": 1 << 24}
    config = {"kv_connector": "SharedMemoryConnector", "kv_connector_extra_config": extra}
    folder, prompts = hybrids.make()[0], hybrids.prompts()
    producer = make_llm(folder, kv_transfer_config={**config, "kv_role": "kv_producer"}, **SMALL)
    producer.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    consumer = make_llm(folder, kv_transfer_config={**config, "kv_role": "kv_consumer"}, **SMALL)
    for i in (5, 3, 4, 2):
        check_greedy(consumer, [prompts[i]], [greedy(hybrids, i)])
    stats = consumer.get_stats().kv_store
    assert (stats.num_loaded_states, stats.loaded_tokens) == (4, 60 + 32 + 12 + 12), "32 of the 44 are in the pool"
    assert stats.tiers["shared"].saved_bytes == 0


# ---- faulty stores


class Lying(MemoryTier):
    def match(self, blocks):
        super().match(blocks)
        return len(blocks)


class Shrinking(MemoryTier):
    """Cuts everything that is larger than a block: snapshots of another size are refused."""

    def save(self, block, data):
        super().save(block, data[: min(len(data), 4096)])


@pytest.mark.parametrize("kind", [Shrinking, pytest.param(Lying, marks=pytest.mark.slow)])
def test_a_faulty_store_changes_no_token(hybrids, kind):
    llm = make_llm(
        hybrids.make()[0], kv_transfer_config={"kv_connector": kind(1 << 22)}, state_snapshot_interval=2, **SMALL
    )
    stats = serve_each(llm, hybrids)
    assert (stats.num_loaded_states > 0) == (kind is Lying)
    assert stats.num_failed_loads > 0


def test_a_model_with_another_state_finds_nothing(hybrids):
    tier = MemoryTier(1 << 22)
    llm = make_llm(hybrids.make()[0], kv_transfer_config={"kv_connector": tier}, **SMALL)
    serve_each(llm, hybrids, order=(2,))
    other = make_llm(hybrids.make("wide convolution")[0], kv_transfer_config={"kv_connector": tier}, **SMALL)
    assert serve_each(other, hybrids, order=(2,), variant="wide convolution").tiers["memory"].hits == 0


def test_keys_depend_on_shape_and_dtype_of_states(hybrids, monkeypatch):
    """Everything else is the same. Without a change, the keys are those of another engine of this model."""
    runner = make_llm(hybrids.make()[0], **SMALL, **MEMORY).engine.runner
    pool, key = runner.layout.pool, KVStore(runner).root_key
    for change in ({"conv": (3, 96)}, {"recurrent": (4, 32, 16)}, {"num_layers": 2}, {}):
        with monkeypatch.context() as patch:
            patch.setattr(pool, "shape", dataclasses.replace(pool.shape, **change))
            assert (KVStore(runner).root_key == key) == (not change)
    monkeypatch.setattr(pool, "conv", pool.conv.bfloat16())
    assert KVStore(runner).root_key != key


# ---- failing steps


def test_failed_steps_load_and_save_nothing_wrong(hybrids, monkeypatch):
    llm = make_llm(hybrids.make()[0], **SMALL, **MEMORY)
    engine, runner = llm.engine, llm.engine.runner
    fails = iter([False, True, False, False, True, True] + [False, False, True] * 200)
    forward = runner.forward

    def broken_forward(batch):
        if next(fails):
            for tensor in (runner.kv_cache.tensor, runner.layout.pool.recurrent, runner.layout.pool.conv):
                tensor.fill_(float("nan"))  # all that was loaded for this step is lost
            raise RuntimeError("the device has gone")
        return forward(batch)

    monkeypatch.setattr(runner, "forward", broken_forward)
    for number, i in enumerate((3, 4, 5, 3, 4)):
        engine.add_request(str(number), hybrids.prompts()[i], GREEDY)
        answers = []
        while engine.has_unfinished_requests():
            try:
                answers += [one.outputs[0] for one in engine.step().outputs if one.finished]
            except RuntimeError:
                reset_prefix_cache(engine.scheduler)  # the pool is lost
        assert [one.token_ids for one in answers] == [greedy(hybrids, i)[0]]
        assert store_of(llm).saver.wait(5)
    assert llm.get_stats().kv_store.num_loaded_states > 1
    check_all_free(llm)


def test_a_step_that_runs_again_begins_from_the_loaded_state(hybrids, monkeypatch):
    """A request makes its step fail. The step is computed again without it, from the state that was loaded for it."""
    options = {"attention_backend": "torch", "block_size": 4, "num_kv_blocks": 40, "device": "cpu", "dtype": "float32"}
    engine = isolating_engine(Config(hybrids.make()[0], **options, **MEMORY))
    prompt, (expected, _) = hybrids.prompts()[3], greedy(hybrids, 3)

    def serve(**fields):
        engine.add_request("r", prompt, GREEDY)
        if fields:
            engine.add_request("bad", hybrids.prompts()[1], dataclasses.replace(GREEDY, **fields))
        answers, failures = [], {}
        while engine.has_unfinished_requests():
            answers += [one.outputs[0].token_ids for one in engine.step().outputs if one.finished]
            failures |= engine.faults.take_failures()
        assert engine.parts.kv_store.saver.wait(5)
        return answers, list(failures)

    def fail(*_):
        raise RuntimeError("this request is at fault")

    assert serve() == ([expected], [])
    reset_prefix_cache(engine.scheduler)  # of the pool only
    engine.runner.layout.pool.recurrent.fill_(50.0)  # garbage that would show
    monkeypatch.setattr(LogitBias, "build", fail)
    assert serve(logit_bias={3: 1.0}) == ([expected], ["bad"])
    assert engine.get_stats().kv_store.num_loaded_states == 1


def test_a_recording_agrees_with_itself(hybrids, tmp_path):
    path = tmp_path / "run.jsonl"
    llm = make_llm(hybrids.make()[0], trace=path, explain_prefix_misses=True, **SMALL, **MEMORY)
    stats = serve_each(llm, hybrids)
    llm.shutdown()
    lines = read_recording(path)
    check_recording(path, lines)
    loads = [event for line in lines[1:] for event in line["events"] if event[0] == "load"]
    assert sum(len(by_tier["memory"]) for *_, by_tier in loads) == stats.num_loaded_blocks > 0


# ---- conversations


def test_a_saved_conversation_counts_tokens_up_to_a_snapshot(hybrids, tmp_path):
    config = in_folder(tmp_path / "kv")
    llm = make_llm(hybrids.make()[0], kv_transfer_config=config, **SMALL)
    prompt, tokens = hybrids.prompts()[3], hybrids.prompts()[3] + greedy(hybrids, 3)[0]
    slots = Slots(store_of(llm))
    assert slots.save("a", tokens)[1:3] == (40, 0)
    serve_each(llm, hybrids, order=(3,))
    assert slots.save("a", tokens)[1:3] == (40, 32), "the snapshot is at the end of the prompt"
    llm.shutdown()
    del llm, slots
    gc.collect()
    again = make_llm(hybrids.make()[0], kv_transfer_config=config, **SMALL, **MEMORY)
    slots = Slots(store_of(again))
    assert slots.restore("a")[1:3] == (40, 32)
    tiers = again.get_stats().kv_store.tiers
    num_bytes = 8 * store_of(again).bytes_per_block + bytes_of_state(again)
    assert tiers["disk"].loaded_bytes == tiers["memory"].saved_bytes == num_bytes
    check_greedy(again, [prompt], [greedy(hybrids, 3)])
    assert again.get_stats().kv_store.tiers["disk"].loaded_bytes == num_bytes, "host memory has all of it"
    [state] = [path for path in (tmp_path / "kv").glob("*.kv") if path.stat().st_size > bytes_of_state(again)]
    state.write_bytes(b"damaged")
    fresh = Slots(store_of(make_llm(hybrids.make()[0], kv_transfer_config=config, **SMALL)))
    assert fresh.restore("a")[1:3] == (40, 0), "K and V do not suffice without the state"


# ---- options


def test_a_tier_must_hold_a_block_and_a_state(hybrids):
    with pytest.raises(ValueError, match="kv_offloading_size must hold at least one block and one state of .* bytes"):
        make_llm(hybrids.make()[0], kv_offloading_size=4096 / 2**30)
