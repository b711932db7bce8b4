"""`nanovllm check`: what it prints, with and without Rich, and its exit status."""

import builtins
import io
import json
import re
import sys
import weakref
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from nanovllm_extras import TINY_QWEN3, LLMEngine
from nanovllm_extras.cli import check_command, machine_report, way_report
from nanovllm_extras.cli.commands import run_command
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from tests.extras.self_check.test_self_check import (  # noqa: F401 (fixtures)
    compiled_before,
    fresh_cache,
    fresh_cache_in,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def quick(monkeypatch, fresh_cache):  # noqa: F811
    monkeypatch.setattr(way_report, "SECONDS", 0.05)
    monkeypatch.setattr(machine_report, "NUM_BYTES", 1 << 22)


@pytest.fixture(scope="module")
def right(tmp_path_factory, compiled_before):  # noqa: F811
    """(status, report, stored results of the self-check, how many engines started) of one run without a fault."""
    started = []

    def start(*arguments, **options):
        assert all(engine() is None for engine in started), "an engine is freed before the next one starts"
        engine = LLMEngine(*arguments, **options)
        engine.runner.itself = engine  # it is freed also if it is part of a cycle: a GPU has no memory for two
        started.append(weakref.ref(engine))
        return engine

    fresh = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch, fresh_cache_in(fresh, patch, compiled_before) as folder:
        patch.setattr(way_report, "LLMEngine", start)
        patch.setattr(way_report, "SECONDS", 0.05)
        patch.setattr(machine_report, "NUM_BYTES", 1 << 22)
        printed = io.StringIO()
        with redirect_stdout(printed):
            status = run_command(["check", "--json", "--device", "cpu"])
        stored = {path.name: path.read_text() for path in folder.glob("checked-*.json")}
    return status, json.loads(printed.getvalue()), stored, len(started)


def json_of(capsys, *arguments):
    status = run_command(["check", "--json", "--device", "cpu", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_all_ways_are_right(right):
    status, report, _, num_started = right
    assert status == 0
    assert num_started == 3
    assert [(way["name"], way["result"]) for way in report["ways"]] == [
        ("C kernels", "right"),
        ("C kernels for attention only", "right"),
        ("PyTorch", "right"),
    ]
    assert all(way["tokens_per_s"] > 0 and way["weights_gb_per_s"] > 0 for way in report["ways"])
    assert all(way["kv_cache_tokens"] > 1000 for way in report["ways"])
    assert "PyTorch on cpu" in report["ways"][2]["reason"]
    versions = {name: version for name, version, _ in report["packages"]}
    assert torch.__version__.startswith(versions["torch"])  # which may lack the name of the build
    assert report["machine"]["GPU"] == "none that PyTorch can use" or torch.cuda.is_available()
    assert report["memory_gb_per_s"] > 0


@pytest.mark.slow
def test_a_wrong_way_gives_status_1_also_if_it_was_right_before(right, monkeypatch, capsys, fresh_cache):  # noqa: F811
    """Results of earlier starts do not count."""
    stored = right[2]
    assert len(stored) == 2
    for name, text in stored.items():
        assert json.loads(text)["is_right"]
        (fresh_cache / name).write_text(text)
    argmax = CpuAttention.argmax
    monkeypatch.setattr(CpuAttention, "argmax", lambda self, logits: argmax(self, logits).roll(1))
    status, report = json_of(capsys)
    assert status == 1
    assert [way["result"] for way in report["ways"]] == ["wrong", "wrong", "right"]
    assert "greedy draws" in report["ways"][0]["reason"]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_way_with_a_runner_of_its_own_is_checked_and_measured(monkeypatch, is_right):
    """As the core's flash-attn on CUDA."""
    if not is_right:
        argmax = CpuAttention.argmax
        monkeypatch.setattr(CpuAttention, "argmax", lambda self, logits: argmax(self, logits).roll(1))
    options = {"device": "cpu", "attention_backend": "cpu", "num_kv_blocks": 64}
    way = way_report.measure_way("another way", options, ModelRunner, TINY_QWEN3)
    assert way.result == ("right" if is_right else "wrong")
    if is_right:
        assert way.tokens_per_s > 0
        assert way.kv_cache_tokens % 64 == 0
    else:
        assert "greedy draws" in way.reason


def test_the_class_of_a_machine_is_in_the_words_of_the_page_of_figures(right):
    """Flags as Linux shows them on the processors of docs/performance.md, and on two others."""
    amx = "avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8"
    flags = {amx: "AMX", "avx2 avx512f avx512_bf16": "AVX-512", "fma avx2": "AVX2"}
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for text, name in flags.items():
        described = machine_report.instruction_class(text.split())
        assert f"| **{name}** | two cores, {described} |" in page
    assert machine_report.instruction_class(["avx2", "avx512f"]) == "AVX-512, no bfloat16 instructions"
    assert machine_report.instruction_class(["fp", "asimd"]) == "NEON, no bfloat16 instructions"
    assert machine_report.instruction_class(["asimd", "bf16"]) == "NEON, bfloat16 instructions"
    assert re.fullmatch(r"\d+ cores, .* instructions", right[1]["machine"]["class"])


def test_without_a_compiler_ways_are_not_available(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    status, report = json_of(capsys)
    assert status == 0
    assert [way["result"] for way in report["ways"]] == ["not available", "not available", "right"]
    assert all("there is no C compiler" in way["reason"] for way in report["ways"][:2])
    assert report["machine"]["C compiler"] == "none: install gcc, for the C kernels"


@pytest.mark.parametrize("has_rich", [True, False])
def test_tables(right, monkeypatch, capsys, has_rich):
    ways = [way_report.WayReport(**way) for way in right[1]["ways"]]
    monkeypatch.setattr(check_command, "measure_ways", lambda model, options: ways)  # as in `right`
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(machine_report, "version_of", lambda name: None if name in ("flash-attn", "ray") else "1.2")
    import_module = builtins.__import__

    def without_rich(name, *arguments, **keywords):
        if name.startswith("rich"):
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return import_module(name, *arguments, **keywords)

    if not has_rich:
        monkeypatch.setattr(builtins, "__import__", without_rich)
    assert run_command(["check", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert ("┃" in printed) == has_rich
    for text in ("pip install 'nanovllm[cuda]'", "pip install 'nanovllm[ray]'", "C kernels for attention only", "GB/s"):
        assert text in printed
    assert printed.count("right") >= 3


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_all_packages_of_pyproject_are_looked_for():
    """But for those that only developers need."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {**project["optional-dependencies"], "always": project["dependencies"]}
    for developers in ("train", "browser", "docs", "formats", "lm-eval", "test", "sweep"):
        del extras[developers]
    found = {name: command for name, _, command in machine_report.describe_packages()}
    for extra, requirements in extras.items():
        for name in (re.match(r"[\w-]+", one)[0] for one in requirements if not one.startswith("nanovllm")):
            assert name in found
            is_of_several_extras = name in ("uvloop", "rich", "httpx", "hypothesis")
            assert is_of_several_extras or machine_report.OPTIONAL.get(name, "always") == extra
    assert found["ray"] in ("", "pip install 'nanovllm[ray]'")


def test_bad_arguments_are_named(capsys, tmp_path):
    for arguments, message in (
        (["--model", str(tmp_path)], "holds no config.json"),
        (["--model", ""], "--model: must not be empty"),
        (["--device", "tpu"], "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
    ):
        with pytest.raises(SystemExit) as ended:
            run_command(["check", *arguments])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
