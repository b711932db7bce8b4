"""Gloo and shared memory against float64 arithmetic and each other; what happens to calls when a rank is gone."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import all_reduce
from nanovllm import TINY_QWEN3
from nanovllm_extras.kernels.cpu.library import load_library
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.parallel.communicator import CommunicationError, GlooCommunicator
from nanovllm_extras.parallel.meeting import make_meeting
from nanovllm_extras.parallel.shared_memory import BUFFER_BYTES, SharedMemoryCommunicator
from tests.extras.parallel.ranks import KINDS, Ranks, after, child_of, threads_of
from tests.extras.parallel.zygote import ROOT

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64]
SHAPES = [(), (1,), (0, 4), (3, 5), (2, 17, 3), (1, BUFFER_BYTES // 4 + 1), (257, 1031)]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


SIZE = 3  # ranks; engines of other tests have two


def parts_of(shape, dtype, seed=0):
    """[SIZE, *shape]: whole numbers, whose sums all dtypes can hold"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-40, 41, (SIZE, *shape), generator=generator).to(dtype)


def normal_parts(*shape, dtype, seed=0):
    return torch.randn(SIZE, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- what the collectives return


def test_collectives_of_all_dtypes_and_shapes(kind):
    def check(ranks):
        for dtype in DTYPES:
            for shape in SHAPES:
                parts = parts_of(shape, dtype)
                x = parts[ranks.rank].clone()
                assert ranks.all_reduce(x) is x
                assert torch.equal(x.double(), parts.double().sum(0)), (dtype, shape)
                x = parts[ranks.rank].clone()
                assert ranks.broadcast(x) is x
                assert torch.equal(x, parts[0]), (dtype, shape)
                if len(shape) == 2:
                    x = parts[ranks.rank].clone()
                    gathered = ranks.gather(x)
                    assert gathered is x or ranks.rank == 0
                    assert torch.equal(gathered, torch.cat(list(parts), 1) if ranks.rank == 0 else parts[ranks.rank])

    with threads_of(kind, SIZE) as (_, run):
        run(check)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_about_the_size_of_a_buffer(dtype):
    def check(ranks):
        for beyond in (-1, 0, 1):
            count = BUFFER_BYTES // dtype.itemsize + beyond
            for shape in ((count,), (2 * count,), (3, count)):
                parts = parts_of(shape, dtype)
                assert torch.equal(ranks.all_reduce(parts[ranks.rank].clone()).double(), parts.double().sum(0))
            guarded = torch.full((count + 64,), 7, dtype=dtype)
            parts = parts_of((count,), dtype)
            ranks.all_reduce(guarded[32:-32].copy_(parts[ranks.rank]))
            assert torch.equal(guarded[32:-32].double(), parts.double().sum(0))
            assert (guarded[:32] == 7).all(), "nothing before the tensor is written"
            assert (guarded[-32:] == 7).all(), "nor behind it"

    with threads_of("shared memory", SIZE, dtype) as (_, run):
        run(check)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_sum_is_rounded_once(kind, dtype):
    """The sum in float32 differs from that in float64 by less than a unit of float32, and is rounded to the dtype."""
    parts = normal_parts(4099, dtype=dtype)
    with threads_of(kind, SIZE, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32) as (_, run):
        sums = run(lambda ranks: ranks.all_reduce(parts[ranks.rank].clone()))
    exact = parts.double().sum(0)
    error = (sums[0].double() - exact).abs()
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + parts.double().abs().sum(0) * SIZE * 2.0**-24
    assert (error <= bound).all()
    assert all(torch.equal(one, sums[0]) for one in sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch_or_the_communicator(dtype):
    """A row has the same sum by itself, at any place of a tensor, and by Gloo."""
    parts = normal_parts(70, 96, dtype=dtype)

    def rows(ranks):
        own = parts[ranks.rank]
        whole = ranks.all_reduce(own.clone())
        for start, stop in ((0, 1), (3, 5), (7, 70)):
            assert torch.equal(ranks.all_reduce(own[start:stop].clone()), whole[start:stop])
        return whole

    results = []
    for kind in KINDS:
        with threads_of(kind, SIZE, dtype) as (_, run):
            results += run(rows)
    assert all(torch.equal(one, results[0]) for one in results)


def random_collectives(ranks, count, seed=0):
    """The same calls on all ranks, with pauses of their own."""
    script, pauses = random.Random(seed), random.Random(seed + 1 + ranks.rank)
    for step in range(count):
        n, m = script.choice([(1, 1), (1, 64), (7, 33), (64, 128), (3, 50_001)])
        dtype, call = script.choice(DTYPES), script.choice(["all_reduce", "all_reduce", "broadcast", "gather"])
        parts = parts_of((n, m), dtype, seed=step)
        if pauses.random() < 0.02:
            time.sleep(pauses.choice([0, 1e-4, 1e-3]))
        result = getattr(ranks, call)(parts[ranks.rank].clone())
        expected = {"all_reduce": parts.sum(0).to(dtype), "broadcast": parts[0], "gather": parts[ranks.rank]}[call]
        if call == "gather" and ranks.rank == 0:
            expected = torch.cat(list(parts), 1)
        assert torch.equal(result, expected), (step, call, n, m, dtype)


def test_many_random_collectives_in_a_row(kind):
    with threads_of(kind, SIZE) as (_, run):
        run(lambda ranks: random_collectives(ranks, 100))


@pytest.mark.slow
def test_random_collectives_of_processes(tmp_path, kind):
    ranks = Ranks(kind, SIZE, tmp_path)
    with contextlib.ExitStack() as children:
        for rank in range(1, SIZE):
            children.enter_context(child_of(ranks, rank, lambda own: random_collectives(own, 200)))
        own = ranks.join(0)
        random_collectives(own, 200)
        own.close()
        ranks.free()


def test_a_sleeper_is_woken():
    """Without that half of the rounds would take 0.1 s, until it looks again. Other programs delay a few."""

    def late(ranks):
        durations = []
        for _ in range(30):
            start = time.monotonic()
            time.sleep(0.001 * ranks.rank)
            ranks.all_reduce(torch.zeros(3))
            durations.append(time.monotonic() - start)
        return sorted(durations)[20]

    with threads_of("shared memory, asleep", 2) as (_, run):
        assert max(run(late)) < 0.09


def test_rounds_may_overflow():
    with threads_of("shared memory", SIZE) as (together, run):
        for ranks in together:
            ranks._ranks.round = ranks._posts[ranks.rank].round = 2**32 - 10
        run(lambda ranks: random_collectives(ranks, 30))
        assert together[0]._ranks.round < 1000


def test_two_engines_in_one_process(kind):
    with threads_of(kind, 2) as (_, run), threads_of(kind, 2) as (_, run_other):
        assert [x.item() for x in run(lambda ranks: ranks.all_reduce(torch.tensor([1.0 + ranks.rank])))] == [3, 3]
        assert [x.item() for x in run_other(lambda ranks: ranks.all_reduce(torch.tensor([5.0])))] == [10, 10]


# ---- a rank that is gone


ENDED_S = 30  # far more than it takes, on a busy machine too


def seconds_until_error(function):
    start = time.monotonic()
    with pytest.raises(CommunicationError):
        function()
    return time.monotonic() - start


def test_a_peer_that_is_killed_ends_the_waits_of_all(tmp_path, kind):
    ranks = Ranks(kind, SIZE, tmp_path)

    def wait(communicator):
        communicator.broadcast(torch.zeros(3))
        communicator.all_reduce(torch.zeros(3))
        os._exit(1)

    def sleep(communicator):
        communicator.broadcast(torch.zeros(3))
        time.sleep(10 * ENDED_S)

    with child_of(ranks, 2, sleep) as pid, child_of(ranks, 1, wait):
        own = ranks.join(0)
        own.broadcast(torch.zeros(3))
        with after(0.1, lambda: os.kill(pid, signal.SIGKILL)):
            assert seconds_until_error(lambda: own.all_reduce(torch.zeros(1, 3))) < ENDED_S
        for call in (own.broadcast, own.gather):
            assert seconds_until_error(lambda call=call: call(torch.zeros(1, 3))) < ENDED_S, "and of later calls"
        own.close()
        ranks.free()


def test_abort_from_another_thread(kind):
    with threads_of(kind, 2) as (together, _), after(0.1, together[0].abort):
        assert seconds_until_error(lambda: together[0].all_reduce(torch.zeros(3))) < ENDED_S
        assert seconds_until_error(lambda: together[0].all_reduce(torch.zeros(3))) < ENDED_S


def test_abort_from_another_process():
    ranks = Ranks("shared memory", 2)

    def abort(communicator):
        time.sleep(0.1)
        communicator.abort()
        time.sleep(10 * ENDED_S)

    with child_of(ranks, 1, abort):
        own = ranks.join(0)
        ranks.free()
        assert seconds_until_error(lambda: own.all_reduce(torch.zeros(3))) < ENDED_S


def test_close_ends_later_calls_and_may_be_called_twice(kind):
    with threads_of(kind, 2) as (together, run):
        run(lambda ranks: ranks.all_reduce(torch.zeros(3)))
        together[0].close()
        together[0].close()
        for call in (together[0].all_reduce, together[0].broadcast, together[0].gather, together[1].all_reduce):
            assert seconds_until_error(lambda call=call: call(torch.zeros(1, 3))) < ENDED_S


def test_who_closes_after_the_last_call_disturbs_nobody(kind):
    def all_reduce_and_close(ranks):
        x = ranks.all_reduce(torch.ones(1000))
        ranks.close()
        return x

    for _ in range(5):
        with threads_of(kind, SIZE) as (_, run):
            assert all((x == SIZE).all() for x in run(all_reduce_and_close))


# ---- refusals


def test_what_is_refused(kind):
    with threads_of(kind, 2) as (together, _):
        for call in (together[0].all_reduce, together[0].broadcast, together[0].gather):
            with pytest.raises(ValueError, match=r"x must be contiguous, got shape \(3, 2\) with strides \(1, 3\)"):
                call(torch.zeros(2, 3).T)
            with pytest.raises(ValueError, match="x must be on cpu, got a tensor on meta"):
                call(torch.zeros(3, device="meta"))


def test_ranks_and_memory_that_do_not_exist(tmp_path):
    library = load_library(torch.float32)
    fd = SharedMemoryCommunicator.allocate(2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=r"rank must be in 0 … size - 1 = 1, got"):
            SharedMemoryCommunicator(fd, rank, 2, library)
        with pytest.raises(ValueError, match=r"rank must be in 0 … size - 1 = 1, got"):
            GlooCommunicator(torch.distributed.HashStore(), rank, 2)
    with pytest.raises(ValueError, match="fd must be memory for size = 3 ranks"):
        SharedMemoryCommunicator(fd, 0, 3, library)
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        SharedMemoryCommunicator.allocate(0)
    os.close(fd)


def test_shared_memory_is_never_a_standard_stream():
    """In a process without stdin, the next file gets the number 0, which a new process would replace."""
    stdin = os.dup(0)
    try:
        os.close(0)
        fd = SharedMemoryCommunicator.allocate(2)
        assert fd > 2
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
        SharedMemoryCommunicator(fd, 0, 2, load_library(torch.float32)).close()
        os.close(fd)
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


def test_ranks_use_sockets_if_shared_memory_is_refused(monkeypatch, tmp_path, caplog):
    def refuse(_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    meeting, _ = make_meeting("shared_memory", 2, Config(TINY_QWEN3, tensor_parallel_size=2), str(tmp_path))
    assert (meeting.kind, meeting.memory) == ("gloo", -1)
    assert "Operation not permitted" in caplog.text


# ---- the benchmark


ENDS_AT_ONCE = """
import os, sys
import torch
from torch.distributed import FileStore
from nanovllm_extras.parallel.communicator import GlooCommunicator
rank = -1
for i in range(2):
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            break
    if not pids[-1]:
        break
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert statuses == [0, 0], statuses
else:
    os._exit(0)
communicator = GlooCommunicator(FileStore(f"{sys.argv[1]}/{i}", 2), rank, 2)
cores = sorted(os.sched_getaffinity(0))
for task in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(task, {cores[rank % len(cores)]})
    if task != os.getpid():
        os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
for _ in range(3):
    communicator.all_reduce(torch.ones(3, 5))
communicator.gather(torch.ones(3, 5))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sets priorities of threads")
def test_an_interpreter_that_ends_just_after_a_call(tmp_path):
    """Gloo's thread has not dropped its tensors yet: it runs only when no other thread of its core wants to."""
    command = [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_benchmark_measures_each_size(run_main):
    machine, _, header, *rows = run_main(all_reduce, "--ranks", 2, "--kilobytes", 2, 64, "--rounds", 2)
    assert "torch" in machine
    assert header.split() == ["ranks", "KB", "Gloo", "shared", "memcpy", "microseconds"]
    values = [[float(value) for value in row.split()] for row in rows]
    assert [row[:2] for row in values] == [[2, 2], [2, 64]]
    assert min(map(min, values)) > 0, "times, which on a busy machine have no order"
