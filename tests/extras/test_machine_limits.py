"""What a process may use of the machine, read from folders that pretend to be Linux's."""

import resource
import subprocess
import sys

import pytest
import torch

from nanovllm_extras import LLM, TINY_QWEN3
from nanovllm_extras.execution import device_setup
from nanovllm_extras.machine import machine_limits
from nanovllm_extras.machine.machine_limits import NUM_FILES, allow_open_files, cpu_quota, free_bytes
from nanovllm_extras.sampling import runner_hooks

GIB = 1 << 30
MEMINFO = "MemTotal:  8388608 kB\nMemFree:  100 kB\nMemAvailable:  4194304 kB\n"  # 4 GiB are available


def machine(folder, files, meminfo=MEMINFO):
    """Write files of `/proc` and `/sys/fs/cgroup` to a folder -> the folder"""
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return folder


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
MEMORY = {
    "no groups": ({}, 4 * GIB),
    "no limit": ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max", f"{V2}/memory.current": 9}, 4 * GIB),
    "a container": (
        {
            "proc/self/cgroup": "0::/\n",
            f"{V2}/memory.max": GIB,
            f"{V2}/memory.current": GIB // 2,
            f"{V2}/memory.stat": f"anon 5\ninactive_file {GIB // 4}\nactive_file 7\n",
        },
        GIB * 3 // 4,
    ),
    "a limit of an outer group": (
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            f"{V2}/user.slice/memory.max": 3 * GIB,
            f"{V2}/user.slice/memory.current": 2 * GIB,
            f"{V2}/user.slice/job/memory.max": "max",
            f"{V2}/user.slice/job/memory.current": 5,
        },
        GIB,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
            f"{V1}/job/memory.limit_in_bytes": 2 * GIB,
            f"{V1}/job/memory.usage_in_bytes": GIB,
            f"{V1}/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
            f"{V1}/memory.limit_in_bytes": 9223372036854771712,
            f"{V1}/memory.usage_in_bytes": 5 * GIB,
        },
        GIB * 3 // 2,
    ),
    "version 1 in a container": (
        {
            "proc/self/cgroup": "4:memory:/docker/0123\n",
            f"{V1}/memory.limit_in_bytes": GIB,
            f"{V1}/memory.usage_in_bytes": 2 * GIB,
        },
        0,
    ),
}


@pytest.mark.parametrize(("files", "expected"), MEMORY.values(), ids=MEMORY)
def test_free_memory_is_what_the_machine_and_all_groups_leave(tmp_path, files, expected):
    assert free_bytes(machine(tmp_path, files)) == expected


def test_a_limit_of_the_address_space_counts(tmp_path):
    used, limit = 1000 * resource.getpagesize(), 5 * GIB
    code = (
        "import resource, runpy, sys; from pathlib import Path\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, resource.RLIM_INFINITY))\n"
        "print(runpy.run_path(sys.argv[1])['left_of_address_space'](Path(sys.argv[2])))"
    )
    root = machine(tmp_path, {"proc/self/statm": "1000 50 5 1 0 9 0"})
    arguments = [sys.executable, "-c", code, machine_limits.__file__, str(root)]
    assert int(subprocess.run(arguments, capture_output=True, check=True).stdout) == limit - used


CPU = {
    "no limit": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000"}, None),
    "version 2": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "150000 100000\n"}, 1.5),
    "an outer group": (
        {"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/cpu.max": "100000 100000", f"{V2}/a/b/cpu.max": "200000 100000"},
        1.0,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "1:cpu,cpuacct:/job\n",
            f"{V2}/cpu,cpuacct/job/cpu.cfs_quota_us": 50000,
            f"{V2}/cpu,cpuacct/job/cpu.cfs_period_us": 100000,
            f"{V2}/cpu,cpuacct/cpu.cfs_quota_us": -1,
            f"{V2}/cpu,cpuacct/cpu.cfs_period_us": 100000,
        },
        0.5,
    ),
}


@pytest.mark.parametrize(("files", "expected"), CPU.values(), ids=CPU)
def test_the_quota_of_cpu_time_is_the_least_of_all_groups(tmp_path, files, expected):
    assert cpu_quota(machine(tmp_path, files)) == expected


# ---- the KV cache


def test_the_cache_takes_at_most_half_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(device_setup, "free_bytes", lambda: 16 << 20)
    cache = LLM(TINY_QWEN3).engine.runner.kv_cache
    assert 7 << 20 < cache.bytes_per_block * (cache.num_blocks + 1) <= 8 << 20


def test_too_little_free_memory_is_said(monkeypatch):
    monkeypatch.setattr(device_setup, "free_bytes", lambda: 1000)
    with pytest.raises(ValueError, match="500 bytes are left for the KV cache.*raise kv_cache_memory_bytes"):
        LLM(TINY_QWEN3)


def resident_bytes():
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_blocks_take_memory_when_they_are_used():
    before = resident_bytes()
    llm = LLM(TINY_QWEN3, kv_cache_memory_bytes=GIB)
    tensor = llm.engine.runner.kv_cache.tensor
    assert tensor.nbytes > GIB * 0.9
    assert resident_bytes() - before < GIB // 2
    assert not tensor[:, :, -3:].any()


def test_blocks_that_cannot_be_mapped_are_a_memory_error():
    with pytest.raises(MemoryError, match="no memory for .* blocks of KV cache.*lower kv_cache_memory_bytes"):
        runner_hooks.untouched_zeros(torch.zeros(2, 1, 1, 1 << 20), 1 << 38)


@pytest.fixture
def files_limit():
    """The limit of open files of this process, which is restored."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_is_raised_as_far_as_allowed(files_limit):
    _, hard = files_limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(NUM_FILES, hard), hard)


def test_a_limit_of_open_files_that_cannot_be_raised(files_limit, monkeypatch):
    """macOS refuses a soft limit above `kern.maxfilesperproc` although the hard limit is higher."""

    def refuse(*_):
        raise ValueError("current limit exceeds maximum limit")

    resource.setrlimit(resource.RLIMIT_NOFILE, (512, files_limit[1]))
    with monkeypatch.context() as patch:
        patch.setattr(resource, "setrlimit", refuse)
        allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512
