"""Engines over stores that lie, are slow, raise, lose blocks or are full: each request gets its own tokens."""

import dataclasses
import gc
import json
import shutil
import threading
import time

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from nanovllm_extras import LLM, Config, SamplingParams
from nanovllm_extras.kv_store.memory_tier import MemoryTier
from nanovllm_extras.kv_store.saver import Saver
from nanovllm_extras.records.tier import Tier
from nanovllm_extras.sampling.logits import BiasRows, LogitBias
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache
from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.recording import read_recording
from tests.extras.failing_request import isolating_engine

OPTIONS = {
    "attention_backend": "torch",
    "enforce_eager": True,
    "block_size": 4,
    "num_kv_blocks": 14,
    "dtype": "float32",
}
PROMPTS = [[i * 20 + j for j in range(30)] for i in range(3)]
ORDER = [0, 1, 2, 0, 1, 0]  # each comes back after the others have taken its blocks


class Lying(MemoryTier):
    """Says that it has everything."""

    def match(self, blocks):
        super().match(blocks)
        return len(blocks) + 5


class Denying(MemoryTier):
    def match(self, blocks):
        return -1


class Slow(MemoryTier):
    def load(self, block, out):
        time.sleep(0.001)
        return super().load(block, out)

    def save(self, block, data):
        time.sleep(0.004)
        super().save(block, data)


class Forgetful(MemoryTier):
    """Loses every third block or snapshot between match and load, and scribbles on the buffer."""

    num_calls = 0

    def load(self, block, out):
        out[:] = 255
        self.num_calls += 1
        return bool(self.num_calls % 3) and super().load(block, out)


class Raising(Tier):
    name = "raising"

    def match(self, blocks):
        raise RuntimeError("no such shelf")

    load = save = failed = finished = lambda self, *_: Raising.match(self, ())


class RaisingOnLoad(MemoryTier):
    def load(self, block, out):
        raise OSError("the disk has gone")


STORES = {
    "lying": Lying(1 << 20),
    "denying": Denying(1 << 20),
    "slow": Slow(1 << 20),
    "forgetful": Forgetful(1 << 20),
    "raising": Raising(),
    "raising on load": RaisingOnLoad(1 << 20),
    "full": MemoryTier(20 * 1024),
}


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints.make(num_hidden_layers=1, hidden_size=32, intermediate_size=48, head_dim=16)[0]


def answers_of(llm, order=ORDER):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tokens = []
    for i in order:
        [output] = llm.generate([PROMPTS[i]], params, use_tqdm=False)
        tokens.append(output.outputs[0].token_ids)
        if llm.engine.parts.kv_store is not None:
            llm.engine.parts.kv_store.saver.wait(5)
    return tokens


@pytest.fixture(scope="module")
def expected(folder):
    return answers_of(LLM(folder, **OPTIONS))


@pytest.mark.parametrize("kind", STORES)
def test_a_faulty_store_changes_no_token(folder, expected, kind):
    llm = LLM(folder, kv_transfer_config={"kv_connector": STORES[kind]}, **OPTIONS)
    assert answers_of(llm) == expected
    stats = llm.get_stats()
    can_load = kind in ("lying", "slow", "forgetful", "full")
    assert (stats.kv_store.num_loaded_blocks > 0) == can_load
    assert (stats.kv_store.tiers[STORES[kind].name].failures > 0) == ("raising" in kind)
    assert (stats.kv_store.num_failed_loads > 0) == (kind in ("lying", "forgetful", "raising on load"))
    assert stats.num_free_blocks == stats.num_kv_blocks


def test_a_folder_deleted_while_the_engine_runs_is_made_again(folder, expected, tmp_path):
    extra = {"shared_storage_path": str(tmp_path / "store"), "max_bytes": 1 << 20}
    transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    llm = LLM(folder, kv_transfer_config=transfer, **OPTIONS)
    assert answers_of(llm) == expected
    shutil.rmtree(tmp_path / "store")
    llm.reset_prefix_cache()
    assert answers_of(llm) == expected
    loaded = llm.get_stats().kv_store.num_loaded_blocks
    assert list((tmp_path / "store").glob("*.kv"))
    assert answers_of(llm) == expected
    assert llm.get_stats().kv_store.num_loaded_blocks > loaded
    assert llm.get_stats().kv_store.tiers["disk"].failures == 0


def test_a_store_that_stands_still_holds_up_no_request(folder, expected):
    """Saving lags behind: its queue fills up, and blocks are dropped."""
    gate = threading.Event()

    class Stuck(MemoryTier):
        def save(self, block, data):
            gate.wait(10)
            super().save(block, data)

    llm = LLM(folder, kv_transfer_config={"kv_connector": Stuck(1 << 20)}, **OPTIONS)
    store = llm.engine.parts.kv_store
    saver = store.saver
    saver.max_pending_bytes = 10 * store.bytes_per_block
    saver.wait = lambda *_: True
    assert answers_of(llm) == expected
    assert saver._backlog.num_bytes == 10 * store.bytes_per_block
    assert llm.get_stats().kv_store.num_dropped_blocks > 0
    gate.set()
    assert Saver.wait(saver, 5)


def test_a_producer_answers_when_its_blocks_are_saved(folder):
    """The engine that decodes is asked right after the answer."""
    tier = Slow(1 << 20)
    llm = LLM(folder, kv_transfer_config={"kv_connector": tier, "kv_role": "kv_producer"}, **OPTIONS)
    llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert tier.stats.saved_bytes == 7 * llm.engine.parts.kv_store.bytes_per_block


def test_two_engines_share_a_tier(folder, expected):
    """Prefill apart from decode: one engine computes the prompts and saves them, the other loads them."""
    tier = MemoryTier(1 << 20)
    producer = LLM(folder, kv_transfer_config={"kv_connector": tier, "kv_role": "kv_producer"}, **OPTIONS)
    assert answers_of(producer) == expected
    assert producer.get_stats().kv_store.num_loaded_blocks == 0
    saved_bytes = tier.stats.saved_bytes
    consumer = LLM(folder, kv_transfer_config={"kv_connector": tier, "kv_role": "kv_consumer"}, **OPTIONS)
    assert answers_of(consumer) == expected
    assert consumer.get_stats().kv_store.loaded_tokens >= 28 * 3, (
        "all full blocks of the prompts, but for their last token"
    )
    assert tier.stats.saved_bytes == saved_bytes
    del producer
    gc.collect()
    assert tier.num_bytes, "the tier is not the engine's own"


def test_another_model_finds_nothing(checkpoints, folder):
    tier = MemoryTier(1 << 20)
    answers_of(LLM(folder, kv_transfer_config={"kv_connector": tier}, **OPTIONS))
    other, _ = checkpoints.make(seed=1, num_hidden_layers=1, hidden_size=32, intermediate_size=48, head_dim=16)
    llm = LLM(other, kv_transfer_config={"kv_connector": tier}, **OPTIONS)
    alone = answers_of(LLM(other, **OPTIONS), order=[0])
    assert answers_of(llm, order=[0]) == alone
    assert llm.get_stats().kv_store.num_loaded_blocks == 0


def new_weights(folder):
    """Add to the value projection of the last layer, in a file of a subfolder, whose size stays as it is."""
    file = folder / "shards" / "weights.safetensors"
    tensors = load_file(file)
    name = max(name for name in tensors if name.endswith("v_proj.weight"))
    save_file({**tensors, name: tensors[name] + 1}, file, metadata={"format": "pt"})
    return {}


CHANGES = {  # of a checkpoint or of the options -> the options of the next engine
    "weights in a subfolder": new_weights,
    "hf_overrides": lambda folder: {"hf_overrides": {"rope_theta": 77.0}},
    "quantization": lambda folder: {"quantization": {"method": "int4", "embeddings": False}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_k_and_v_changes_the_names_of_blocks(checkpoints, tmp_path, change):
    shutil.copytree(checkpoints.make(num_hidden_layers=2, initializer_range=0.3)[0], tmp_path, dirs_exist_ok=True)
    files = sorted(tmp_path.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for file in [*files, *tmp_path.glob("*.index.json")]:
        file.unlink()
    (tmp_path / "shards").mkdir()
    save_file(tensors, tmp_path / "shards" / "weights.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, "shards/weights.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    store = {"kv_transfer_config": {"kv_connector": MemoryTier(1 << 22)}}
    first = answers_of(LLM(tmp_path, **store, **OPTIONS), order=[0])
    options = CHANGES[change](tmp_path)
    alone = answers_of(LLM(tmp_path, **options, **OPTIONS), order=[0])
    assert alone != first
    for is_known in (False, True):
        llm = LLM(tmp_path, **store, **options, **OPTIONS)
        assert answers_of(llm, order=[0]) == alone
        assert (llm.get_stats().kv_store.num_loaded_blocks > 0) == is_known


def test_a_reset_of_the_prefix_cache_forgets_the_store(folder, expected):
    llm = LLM(folder, kv_offloading_size=1e-3, **OPTIONS)
    answers_of(llm)
    llm.reset_prefix_cache()
    before = llm.get_stats().kv_store.num_loaded_blocks
    assert answers_of(llm, order=[0]) == expected[:1]
    assert llm.get_stats().kv_store.num_loaded_blocks == before
    answers_of(llm, order=[1, 2, 0])
    assert llm.get_stats().kv_store.num_loaded_blocks > before, "what was saved since is found"


def test_a_failed_step_loads_and_saves_nothing_wrong(folder, expected, monkeypatch):
    llm = LLM(folder, kv_offloading_size=1e-3, **OPTIONS)
    runner, fails = llm.engine.runner, iter([False, True, False, False, True, True] + [False] * 1000)
    forward = runner.forward

    def broken_forward(batch):
        if next(fails):
            runner.kv_cache.tensor.fill_(float("nan"))  # all that was loaded for this step is lost
            raise RuntimeError("the device has gone")
        return forward(batch)

    monkeypatch.setattr(runner, "forward", broken_forward)
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tokens = []
    for number, i in enumerate(ORDER):
        engine.add_request(str(number), PROMPTS[i], params)
        while engine.has_unfinished_requests():
            try:
                tokens += [one.outputs[0].token_ids for one in engine.step().outputs if one.finished]
            except RuntimeError:
                engine.reset_prefix_cache()  # the pool is lost
        engine.parts.kv_store.saver.wait(5)
    assert tokens == expected


@pytest.mark.parametrize(("owner", "method"), [(LogitBias, "build"), (BiasRows, "apply")])
def test_a_request_that_fails_its_step_costs_the_others_no_loaded_block(folder, expected, monkeypatch, owner, method):
    """The engine looks for the request at fault, and computes the step again: loaded blocks are still there."""
    engine = isolating_engine(Config(folder, kv_offloading_size=1e-3, **OPTIONS | {"num_kv_blocks": 24}))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def serve(prompt, **fields):
        engine.add_request("r", prompt, params)
        if fields:
            engine.add_request("bad", PROMPTS[1][:5], dataclasses.replace(params, **fields))
        answers, failures = [], {}
        while engine.has_unfinished_requests():
            answers += [one.outputs[0].token_ids for one in engine.step().outputs if one.finished]
            failures |= engine.faults.take_failures()
        engine.parts.kv_store.saver.wait(5)
        return answers, failures

    def fail(*_):
        raise RuntimeError("this request is at fault")

    assert serve(PROMPTS[0]) == (expected[:1], {})
    reset_prefix_cache(engine.scheduler)  # of the pool only
    engine.runner.kv_cache.tensor.fill_(50.0)  # garbage that would show
    monkeypatch.setattr(owner, method, classmethod(fail) if method == "build" else fail)
    answers, failures = serve(PROMPTS[0], logit_bias={3: 1.0})
    assert (answers, list(failures)) == (expected[:1], ["bad"])
    assert engine.get_stats().kv_store.num_loaded_blocks == 7


def test_a_recording_of_loaded_blocks_agrees_with_itself(folder, expected, tmp_path):
    path = tmp_path / "run.jsonl"
    llm = LLM(folder, kv_offloading_size=1e-3, trace=path, **OPTIONS)
    assert answers_of(llm) == expected
    num_loaded = llm.get_stats().kv_store.num_loaded_blocks
    llm.shutdown()
    lines = read_recording(path)
    check_recording(path, lines)
    loads = [event for line in lines[1:] for event in line["events"] if event[0] == "load"]
    assert {tier for *_, by_tier in loads for tier in by_tier} == {"memory"}
    assert sum(len(by_tier["memory"]) for *_, by_tier in loads) == num_loaded > 0


def test_the_thread_ends_with_the_engine(folder):
    llm = LLM(folder, kv_offloading_size=1e-3, **OPTIONS)
    answers_of(llm, order=[0])
    [thread] = [one for one in threading.enumerate() if one.name == "kv-store-saver" and one.is_alive()][-1:]
    tier = llm.engine.parts.kv_store.tiers.tiers[0]
    assert tier.num_bytes
    llm.shutdown()
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    assert not tier.num_bytes, "the engine's own tiers are closed"


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": 0}, "kv_offloading_size must be a number of GiB above 0, got 0"),
        ({"kv_offloading_size": True}, "kv_offloading_size must be a number of GiB or None"),
        ({"kv_transfer_config": {}}, r"kv_transfer_config\['kv_connector'\] must be one of OffloadingConnector"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "got 'NixlConnector'"),
        ({"kv_transfer_config": {"connector": "x"}}, "has no key 'connector'; legal are kv_connector, kv_role"),
        ({"kv_transfer_config": 5}, "kv_transfer_config must be a dict or None, got 5"),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "both"}},
            r"kv_transfer_config\['kv_role'\] must be one of kv_producer",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "SharedStorageConnector"}},
            "must have the key 'shared_storage_path' for SharedStorageConnector",
        ),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "OffloadingConnector",
                    "kv_connector_extra_config": {"cpu_bytes_to_use": 0},
                }
            },
            r"\['cpu_bytes_to_use'\] must be",
        ),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_consumer",
                    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
                }
            },
            "must be 'kv_both' for OffloadingConnector",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Config("model", **options)


def test_a_tier_smaller_than_a_block_is_refused(folder):
    with pytest.raises(ValueError, match="kv_offloading_size must hold at least one block of 1024 bytes, got 10"):
        LLM(folder, kv_offloading_size=10 / 2**30, **OPTIONS)


def test_the_memory_tier_by_the_connectors_name(folder, expected):
    extra = {"cpu_bytes_to_use": 1 << 20}
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    llm = LLM(folder, kv_transfer_config=config, **OPTIONS)
    assert answers_of(llm) == expected
    stats = llm.get_stats()
    metrics = {(one.name, one.labels.get("tier")): one for one in llm.get_metrics()}
    assert metrics["nanovllm:kv_store_hits", "memory"].value == stats.kv_store.tiers["memory"].hits > 0
    assert metrics["nanovllm:external_prefix_cache_hits", None].value == stats.kv_store.loaded_tokens > 0
    assert metrics["nanovllm:prefix_cache_hits", None].value == stats.prefix_cache_hit_tokens
    np.testing.assert_equal(stats.kv_store.tiers["memory"].loaded_bytes, 1024 * stats.kv_store.num_loaded_blocks)
