"""Engines over stores that lie, are slow, raise, lose blocks or are full: each request gets its own tokens."""

import dataclasses
import gc
import threading
import time

import numpy as np
import pytest

from nanovllm_extras import LLM, Config, SamplingParams
from nanovllm_extras.kv_store.memory_tier import MemoryTier
from nanovllm_extras.kv_store.saver import Saver
from nanovllm_extras.records.tier import Tier
from nanovllm_extras.sampling.logits import BiasRows, LogitBias
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache
from tests.extras.failing_request import isolating_engine

OPTIONS = {"attention_backend": "torch", "block_size": 4, "num_kv_blocks": 14, "dtype": "float32"}
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


@pytest.mark.parametrize("options", [{"hf_overrides": {"rope_theta": 77.0}}, {"quantization": "int8"}], ids=str)
def test_options_that_change_k_and_v_change_the_names_of_blocks(folder, expected, options):
    """`test_tiers.py` has what the files of a checkpoint change."""
    store = {"kv_transfer_config": {"kv_connector": MemoryTier(1 << 22)}}
    assert answers_of(LLM(folder, **store, **OPTIONS), order=[0]) == expected[:1]
    for is_known in (False, True):
        llm = LLM(folder, **store, **options, **OPTIONS)
        answers_of(llm, order=[0])
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

MEMORY, SIZE = {"kv_connector": "OffloadingConnector"}, {"cpu_bytes_to_use": 1 << 20}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": 0}, "kv_offloading_size must be a number of GiB above 0, got 0"),
        ({"kv_offloading_size": True}, "kv_offloading_size must be a number of GiB or None"),
        ({"kv_transfer_config": {}}, r"kv_transfer_config\['kv_connector'\] must be one of OffloadingConnector"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "got 'NixlConnector'"),
        ({"kv_transfer_config": {"connector": "x"}}, "has no key 'connector'; legal are kv_connector, kv_role"),
        ({"kv_transfer_config": 5}, "kv_transfer_config must be a dict or None, got 5"),
        ({"kv_transfer_config": {**MEMORY, "kv_role": "both"}}, r"\['kv_role'\] must be one of kv_producer"),
        (
            {"kv_transfer_config": {"kv_connector": "SharedStorageConnector"}},
            "must have the key 'shared_storage_path' for SharedStorageConnector",
        ),
        (
            {"kv_transfer_config": {**MEMORY, "kv_connector_extra_config": {"cpu_bytes_to_use": 0}}},
            r"\['cpu_bytes_to_use'\] must be",
        ),
        (
            {"kv_transfer_config": {**MEMORY, "kv_role": "kv_consumer", "kv_connector_extra_config": SIZE}},
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
    llm = LLM(folder, kv_transfer_config={**MEMORY, "kv_connector_extra_config": SIZE}, **OPTIONS)
    assert answers_of(llm) == expected
    stats = llm.get_stats()
    metrics = {(one.name, one.labels.get("tier")): one for one in llm.get_metrics()}
    assert metrics["nanovllm:kv_store_hits", "memory"].value == stats.kv_store.tiers["memory"].hits > 0
    assert metrics["nanovllm:external_prefix_cache_hits", None].value == stats.kv_store.loaded_tokens > 0
    assert metrics["nanovllm:prefix_cache_hits", None].value == stats.prefix_cache_hit_tokens
    np.testing.assert_equal(stats.kv_store.tiers["memory"].loaded_bytes, 1024 * stats.kv_store.num_loaded_blocks)
