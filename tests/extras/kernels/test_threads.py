"""Hyperthreads and efficiency cores get no threads, and threads that wait do not spin for long."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.kernels.cpu import threads
from tests.extras.kernels.processors import need_a_compiler


@pytest.fixture
def topology(tmp_path):
    """Four cores of two hyperthreads, as Linux numbers them: 0 and 4 are one core, and so on; 8 does not say."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("cpus", "num_cores"),
    [(range(8), 4), ([0, 4], 1), ([0, 1], 2), ([3], 1), ([2, 3, 6], 2), ([0, 4, 8], 2), ([8, 9], 2), ([], 1)],
)
def test_hyperthreads_of_a_core_are_one_core(topology, cpus, num_cores):
    assert threads.count_cores(cpus, topology) == num_cores


def write_devices(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


# Two performance cores of two hyperthreads and four efficiency cores, as Linux describes a laptop of Intel
HYBRID = {"cpu_core/cpus": "0-3", "cpu_atom/cpus": "4-7"} | {
    f"system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if cpu < 4 else str(cpu)
    for cpu in range(8)
}
# Four slow cores and four fast ones, of which one is faster, as an ARM processor's
CAPACITIES = {
    f"system/cpu/cpu{cpu}/cpu_capacity": capacity for cpu, capacity in enumerate(["380"] * 4 + ["870"] * 3 + ["1024"])
}


@pytest.mark.parametrize(
    ("files", "cpus", "fast", "num_cores"),
    [
        (HYBRID, range(8), range(4), 2),
        (HYBRID, [1, 2, 6], [1, 2], 2),
        (HYBRID, range(4, 8), range(4, 8), 4),  # a process that may only use efficiency cores
        (HYBRID | {"cpu_core/cpus": "0,2-3"}, range(8), [0, 2, 3], 2),
        (CAPACITIES, range(8), range(4, 8), 4),
        (CAPACITIES, range(4), range(4), 4),
        ({}, range(3), range(3), 3),  # nothing is known
        (HYBRID, [], [], 1),
    ],
)
def test_efficiency_cores_get_no_threads(tmp_path, files, cpus, fast, num_cores):
    devices = write_devices(tmp_path, files)
    found = threads.performance_cpus(cpus, devices)
    assert found == set(fast)
    assert threads.count_cores(found, devices / "system/cpu") == num_cores


@pytest.fixture
def set_threads(monkeypatch, topology):
    """Eight hyperthreads, and what torch is told."""
    told = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(threads.count_cores, "__defaults__", (topology,))
    monkeypatch.setattr(threads.performance_cpus, "__defaults__", (topology,))  # it does not say which are fast
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    monkeypatch.setattr(threads, "places", set)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return told


def test_threads_are_limited_to_cores(monkeypatch, set_threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    LLM(TINY_QWEN3, device="cpu", max_model_len=64)
    assert set_threads == [4]


@pytest.mark.parametrize(
    ("num_threads", "quota", "expected"),
    [(2, None, 2), (8, 0.2, 1), (8, 1.4, 1), (8, 1.9, 2), (8, 2.5, 3), (8, 16.0, 4)],
)
def test_threads_are_limited_to_the_quota_of_cpu_time(monkeypatch, set_threads, num_threads, quota, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    threads.limit_threads()
    assert set_threads == [expected]


def test_a_container_may_refuse_to_say_which_processors_there_are(monkeypatch, set_threads):
    def refuse(_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    threads.limit_threads()
    assert set_threads == []


def test_the_users_number_stands(monkeypatch, set_threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    threads.limit_threads()
    assert set_threads == []


@pytest.mark.slow
@pytest.mark.usefixtures("needs_a_compiler")
@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two processors of Linux")
def test_threads_workers_and_ranks_are_not_bound_to_the_processor_of_the_main_thread():
    """OpenMP binds the thread that loads it, before nanovllm is imported."""
    code = """
import os, socket, time, torch
from nanovllm_extras.kernels.cpu import threads
from nanovllm_extras.kernels.cpu.library import load_library
from nanovllm_extras.parallel.processes import start_process
print(len(os.sched_getaffinity(0)))
threads.limit_threads()
print(torch.get_num_threads())
ours, theirs = socket.socketpair()
process = start_process(theirs, (), 1)
print(len(os.sched_getaffinity(process.pid)))
environment = open(f"/proc/{process.pid}/environ").read()
process.kill(), process.wait()
torch.set_num_threads(2)
x, ids, before = torch.zeros(8, 8), torch.zeros(8, dtype=torch.int64), set(os.listdir("/proc/self/task"))
load_library(torch.float32).argmax(x.data_ptr(), ids.data_ptr(), 8, 8)
(worker,) = set(os.listdir("/proc/self/task")) - before
time.sleep(0.1)
print(len(os.sched_getaffinity(int(worker))), "BIND" in environment)
"""
    environment = {key: text for key, text in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    environment |= {"OMP_PROC_BIND": "true", "OMP_PLACES": "threads"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    cpus, quota = os.sched_getaffinity(0), threads.cpu_quota()
    most = len(cpus) if quota is None else max(1, int(quota + 0.5))
    num_threads, num_cpus = min(threads.count_cores(cpus), most), str(len(cpus))
    assert run.stdout.split() == ["1", str(num_threads), num_cpus, num_cpus, "False"], run.stderr


@pytest.mark.slow
def test_a_process_of_its_own_takes_its_cores():
    """And its waiting threads soon sleep: libgomp is told before torch loads it."""
    code = f"import os, nanovllm_extras; llm = nanovllm_extras.LLM({str(TINY_QWEN3)!r}, device='cpu', num_kv_blocks=8)"
    code += "; print(llm.engine.description); print('left behind', [name for name in os.environ if 'GOMP' in name])"
    code += "; print('pools', *{line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line})"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment["OMP_DISPLAY_ENV"] = "verbose"  # libgomp says what it has read
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    num_cores = threads.allowed_threads()
    assert num_cores is None or f" {num_cores} threads" in run.stdout
    assert "GOMP_SPINCOUNT = '2000'" in run.stderr
    assert "left behind []" in run.stdout, "programs that this one starts decide for themselves"
    # two OpenMP libraries in one process, torch's and the kernels', wait for each other's cores
    assert len(re.search("pools(.*)", run.stdout)[1].split()) == 1


class ThreadsOfOperations(TorchDispatchMode):
    """Notes how many threads PyTorch may use in each of its operations."""

    def __init__(self):
        super().__init__()
        self.seen = {}  # an operation -> numbers of threads

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        self.seen.setdefault(operation.overloadpacket.__name__, set()).add(torch.get_num_threads())
        return operation(*arguments, **(options or {}))


def test_pytorch_starts_no_threads_in_decodes_of_the_kernels():
    """OpenMP's threads would spin on the kernels' cores; in a program that imports torch first, for 4 ms each time."""
    need_a_compiler(torch.bfloat16)
    llm = LLM(TINY_QWEN3, device="cpu", max_model_len=64, attention_backend="cpu")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadsOfOperations() as operations:
            llm.generate([[i, 5] for i in range(16)], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert [operations.seen[name] for name in ("cos", "sin", "index")] == [{1}, {1}, {1}]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)
