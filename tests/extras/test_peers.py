"""Benchmarks beside other engines: how runs are paired and summarized, and what happens where an engine is missing."""

import argparse
import builtins
import subprocess
import sys
import time

import pytest

from benchmarks import cpu
from benchmarks.common import QWEN3_06B, Workload, children_peak_bytes
from benchmarks.peers import PEERS


def run(label, workload, repeat, speed):
    return {"label": label, "workload": workload, "repeat": repeat, cpu.SPEED: speed}


RUNS = [
    run("a", "W", 0, 30.0), run("b", "W", 0, 10.0),  # 3 times as fast
    run("b", "W", 1, 5.0), run("a", "W", 1, 10.0),  # the machine was slow, for both: 2 times
    run("a", "W", 2, 32.0), run("b", "W", 2, 20.0),  # 1.6 times
    run("a", "W2", 0, 7.0), run("b", "W2", 0, 14.0),
]  # fmt: skip


def test_the_ratio_is_the_median_of_paired_ratios():
    summary = cpu.summarize(["a", "b"], RUNS)
    assert summary["W"]["ratio"] == {"a / b": 2.0}  # not 30 / 10, the ratio of medians
    assert summary["W"]["median"] == {"a": 30.0, "b": 10.0}
    assert summary["W"]["spread"] == {"a": [10.0, 32.0], "b": [5.0, 20.0]}
    assert summary["W2"]["ratio"] == {"a / b": 0.5}


def test_commands_name_engine_interpreter_and_arguments(tmp_path):
    plan = cpu.Plan(["vllm@best"], {"vllm@best": "/its/python"}, bench_args={"vllm@best": ["--enforce-eager"]})
    command = plan.command("vllm@best", "W2", tmp_path / "r.json")
    assert command[:7] == ["/its/python", "-m", "benchmarks.offline", "--engine", "vllm", "--workload", "W2"]
    assert command[-1] == "--enforce-eager"
    assert cpu.Plan(["hf"], {}).command("hf", "W", tmp_path)[0] == sys.executable


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_children_count_in_memory_and_time():
    code = "import time; x = bytearray(200 << 20); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 60
        while children_peak_bytes() < 200 << 20:
            assert time.monotonic() < deadline, "the child's memory is not counted"
            time.sleep(0.05)
        assert cpu.family_cpu_seconds(child.pid).keys() == {child.pid}
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("engine", "module"),
    [("hf", "transformers"), ("vllm", "vllm"), ("llamacpp", "llama_cpp"), ("openvino", "openvino")],
)
def test_a_missing_engine_says_what_to_do(engine, module, monkeypatch):
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == module:
            raise ImportError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for name in [name for name in sys.modules if name in ("benchmarks.llamacpp", "benchmarks.openvino")]:
        monkeypatch.delitem(sys.modules, name)
    args = argparse.Namespace(dtype="auto", model=QWEN3_06B, load_format="dummy", engine_option=[], quantization=None)
    with pytest.raises(ValueError, match=rf"--engine {engine} needs .*benchmarks/cpu_peers\.md"):
        PEERS[engine](Workload("none", [[1]], [1]), args, "cpu")


def test_other_engines_need_nothing_of_ours():
    """`benchmarks.offline` runs in environments that lack this package's dependencies."""
    names = ("nanovllm", "transformers", "xxhash")
    code = f"import sys, benchmarks.offline; sys.exit(any(name in sys.modules for name in {names}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
