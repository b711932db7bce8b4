"""Two machines serve what two ranks of one machine serve: the tokens of an engine of one rank, in float32.

Machine 1 is a thread of this process, and so are its ranks. They meet machine 0 by TCP only, as `test_nodes.py` does
with processes. Each rank has its own states, host memory and folder of a K/V store.
"""

import socket
import threading
from contextlib import contextmanager

import pytest

from nanovllm_extras import LLM, Config, LLMEngine
from nanovllm_extras.kv_store import share
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.parallel import nodes
from tests.extras.kv_store.test_store_parity import NGRAM, OVERLAP, TORCH, make_requests, serve, tokens_of
from tests.extras.parallel.rank_threads import RankThread
from tests.extras.parallel.test_store_of_ranks import disk, share_of_rank_1

MEMORY = {"kv_offloading_size": 400 * 2048 / 2**30}
CASES = {  # name -> (kind of model, options)
    "memory, ngram": ("Qwen3", MEMORY | NGRAM),
    "states, folder, overlap": ("Qwen3_5", {"state_snapshot_interval": 2, "num_kv_blocks": 40} | OVERLAP),
}


@pytest.fixture
def folder_of(all_hybrids, tiny_checkpoint):
    return lambda kind: tiny_checkpoint[0] if kind == "Qwen3" else all_hybrids[kind].make()[0]


@pytest.fixture
def two_machines(rank_threads, monkeypatch):
    """A function that returns an engine of two ranks, of which one is on machine 1, in a context that ends it."""
    monkeypatch.setattr(nodes, "CONNECT_S", 0.02)

    @contextmanager
    def start(folder, **options):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = {**options, "tensor_parallel_size": 2, "nnodes": 2, "master_port": port, "device": "cpu"}
        statuses = []

        def run_machine_1():
            with pytest.raises(SystemExit) as ended:
                LLM(folder, **options, node_rank=1)
            statuses.append(ended.value.code)

        thread = threading.Thread(target=run_machine_1, daemon=True)
        thread.start()
        engine = LLMEngine(Config(folder, **options))
        yield engine
        engine.runner.ranks.stop()
        thread.join(10)
        assert statuses == [0], "machine 1 ends with machine 0"
        assert [rank.wait(60) for rank in rank_threads] == [0] * len(rank_threads)

    return start


@pytest.mark.parametrize("case", [pytest.param("memory, ngram", marks=pytest.mark.slow), "states, folder, overlap"])
def test_tokens_are_those_of_one_rank(folder_of, two_machines, tmp_path, case):
    kind, options = CASES[case]
    options = TORCH | options | (disk(tmp_path / "blocks") if "folder" in case else {})
    requests = make_requests(seed=2, num_requests=12)
    expected = tokens_of(serve(LLMEngine(Config(folder_of(kind), **TORCH | {"num_kv_blocks": 60})), requests))
    with two_machines(folder_of(kind), **options) as engine:
        assert tokens_of(serve(engine, requests)) == expected
        stats = engine.get_stats()
        assert stats.num_free_blocks == stats.num_kv_blocks
    if kind != "Qwen3":
        assert stats.prefix_cache_hit_tokens > 0
        return
    assert stats.kv_store.num_loaded_blocks > 0
    assert all(one.saved_bytes > 0 == one.failures for one in stats.kv_store.tiers.values())


def test_the_least_of_all_machines_counts(folder_of, two_machines, tmp_path):
    """A block that the folder of machine 1 has lost is computed again."""
    folder, options = folder_of("Qwen3"), TORCH | disk(tmp_path / "blocks")
    requests = make_requests(seed=3, num_requests=1)
    requests = [([*range(30)], *requests[0][1:])]
    expected = tokens_of(serve(LLMEngine(Config(folder, **TORCH)), requests))
    for num_loaded in (0, 2):
        with two_machines(folder, **options) as engine:
            assert tokens_of(serve(engine, requests)) == expected
            assert engine.get_stats().kv_store.num_loaded_blocks == num_loaded
            assert engine.parts.kv_store.saver.wait(60)
        *_, third, _, _ = share_of_rank_1(tmp_path / "blocks")
        third.unlink()


def test_a_folder_that_one_rank_cannot_use_is_named_at_the_start(folder_of, rank_threads, tmp_path, monkeypatch):
    """Machine 1 may have another disk than machine 0."""

    def make_tiers(config):
        if isinstance(threading.current_thread(), RankThread):
            raise ValueError("`folder` cannot be created: it is read-only")
        return made(config)

    made = share.make_tiers
    monkeypatch.setattr(share, "make_tiers", make_tiers)
    with pytest.raises(EngineDeadError, match="rank 1: ValueError: `folder` cannot be created: it is read-only"):
        LLMEngine(Config(folder_of("Qwen3"), **TORCH, **disk(tmp_path), tensor_parallel_size=2, device="cpu"))
