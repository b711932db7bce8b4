"""The K/V store with two ranks: the tokens of an engine without a store, even if one rank has lost its share."""

import os
import socket
import time
from hashlib import blake2b

import pytest

from nanovllm_extras import LLM, Config, LLMEngine, SamplingParams
from nanovllm_extras.parallel import rank, worker
from nanovllm_extras.parallel.messages import receive
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache
from tests.extras.kv_store.test_store_parity import OVERLAP, TORCH, make_requests, serve, tokens_of

TWO = {"tensor_parallel_size": 2}
PROMPT = list(range(30))  # 7 full blocks
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def disk(folder, role="kv_both", max_bytes=1 << 20):
    extra = {"shared_storage_path": folder, "max_bytes": max_bytes}
    connector = {"kv_connector": "SharedStorageConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return {"kv_transfer_config": connector}


def test_tokens_are_those_without_a_store(tiny_checkpoint, quick_ranks, tmp_path):
    """Host memory has room for 20 blocks of both ranks, and the folder for about 50."""
    requests = make_requests(seed=1, num_requests=12)
    expected = serve(LLMEngine(Config(tiny_checkpoint[0], **TORCH)), requests)
    memory, folder = {"kv_offloading_size": 40 * 2048 / 2**30}, disk(tmp_path / "blocks", max_bytes=100 * 2200)
    engine = LLMEngine(Config(tiny_checkpoint[0], **TORCH, **TWO, **OVERLAP, **memory, **folder))
    assert tokens_of(serve(engine, requests)) == tokens_of(expected)
    stats = engine.get_stats()
    assert stats.kv_store.num_loaded_blocks > 0
    assert all(one.saved_bytes > 0 == one.failures for one in stats.kv_store.tiers.values())
    assert stats.num_free_blocks == stats.num_kv_blocks


# ---- a rank that has lost its share


def damage(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def share_of_rank_1(folder):
    """The files of rank 1, the oldest first: a batch of blocks is saved from its end."""
    names = {path.stem for path in folder.glob("*.kv")}
    of_rank_1 = {blake2b(bytes.fromhex(name), key=b"rank 1", digest_size=32).hexdigest() for name in names} & names
    assert len(of_rank_1) * 2 == len(names) > 0
    return sorted((folder / f"{name}.kv" for name in of_rank_1), key=lambda path: path.stat().st_mtime_ns)


def until(condition, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_block_that_one_rank_has_lost_is_computed_and_saved_again(tiny_checkpoint, rank_threads, tmp_path):
    folder = tmp_path / "blocks"
    [expected] = LLM(tiny_checkpoint[0], **TORCH).generate([PROMPT], PARAMS, use_tqdm=False)
    with LLM(tiny_checkpoint[0], **TORCH, **TWO, **disk(folder, "kv_producer")) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=1), use_tqdm=False)  # answered when all ranks have saved
    *_, third, _, _ = share_of_rank_1(folder)
    damage(third)
    with LLM(tiny_checkpoint[0], **TORCH, **TWO, **disk(folder)) as llm:
        for num_loaded in (2, 7):
            before = llm.get_stats().kv_store.num_loaded_blocks
            [output] = llm.generate([PROMPT], PARAMS, use_tqdm=False)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.num_cached_tokens == 4 * num_loaded
            stats = llm.get_stats().kv_store
            assert stats.num_loaded_blocks - before == num_loaded
            assert stats.num_failed_loads == 1
            until(lambda: len(list(folder.glob("*.kv"))) == 16)  # both ranks have saved 8
            reset_prefix_cache(llm.engine.scheduler)  # of the pool only


# ---- the end of a rank


def test_what_waits_is_saved_before_the_process_ends(tmp_path, monkeypatch):
    ours, theirs = socket.socketpair()
    saved = tmp_path / "saved"

    def save():
        time.sleep(0.05)
        saved.touch()

    def work(driver, on_ready, at_exit):
        on_ready()
        at_exit(save)
        driver.sendall(b"x")
        receive(driver, 1)  # raises: rank 0 closes the socket

    monkeypatch.setattr(worker, "work", work)
    if (child := os.fork()) == 0:
        try:
            ours.close()
            rank.main([str(theirs.detach()), str(os.getppid()), ""])
        finally:
            os._exit(9)
    theirs.close()
    with ours:
        assert ours.recv(1) == b"x"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert saved.exists()


@pytest.mark.slow
def test_processes_save_what_is_left_when_the_engine_ends(tiny_checkpoint, tmp_path):
    """And another engine finds all of it."""
    folder, options = tmp_path / "blocks", {"block_size": 4, "dtype": "float32", "device": "cpu"}
    [expected] = LLM(tiny_checkpoint[0], **options).generate([PROMPT], PARAMS, use_tqdm=False)
    for num_loaded in (0, 7):
        with LLM(tiny_checkpoint[0], **options, **TWO, **disk(folder)) as llm:
            [output] = llm.generate([PROMPT], PARAMS, use_tqdm=False)
            assert llm.get_stats().kv_store.num_loaded_blocks == num_loaded
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert len(share_of_rank_1(folder)) == 8
