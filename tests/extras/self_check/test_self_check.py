"""The self-check: planted faults are found, and right text comes from the next way to compute. No false alarms.

The faults are in the C kernels, which are compiled with them, or in a function of Python's. The engine without the
self-check would give wrong text, crash or hang.
"""

import itertools
import json
import logging
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras import LLM, TINY_QWEN3, Config, SamplingParams
from nanovllm_extras.kernels.cpu import library
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.machine.own_process import SelfCheckError
from nanovllm_extras.models.window_layers import FULL, SLIDING
from nanovllm_extras.self_check import crash_test, fallbacks, networks, steps
from nanovllm_extras.self_check import runner_check as checks
from nanovllm_extras.self_check.comparison import check_rows
from nanovllm_extras.self_check.crash_test import CrashTest
from nanovllm_extras.self_check.stored_results import FOLDERS, Result, StoredResult
from tests.conftest import every_second
from tests.extras.cuda.test_core_graphs import make_engine, recorded  # noqa: F401 (a fixture)
from tests.extras.kernels.processors import PROCESSORS, pretend
from tests.extras.models.architectures import ARCHITECTURES, Checkpoints
from tests.extras.parallel.scenarios import PLANTED
from tools.count_engine import find_imports, read_files

PROMPT = "What is a block table?"
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def compiled_before(little_to_search):
    """The usual libraries, which need not be compiled again, and that they have been loaded once."""
    paths = [Path(library.load_library(dtype)._name) for dtype in library.DTYPES]
    files = [*paths, *(path.with_name(f"loaded-{path.stem}") for path in paths)]
    return [file for file in files if file.exists()]


@contextmanager
def fresh_cache_in(folder, monkeypatch, compiled_before):
    """The self-check is on, no result is stored, and the usual libraries are compiled already."""
    monkeypatch.setenv("NANOVLLM_SELF_CHECK", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    (folder / "nanovllm").mkdir(mode=0o700)
    for file in compiled_before:
        shutil.copy(file, folder / "nanovllm")
    library.load_library.cache_clear()
    yield folder / "nanovllm"
    library.load_library.cache_clear()


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path, compiled_before):
    with fresh_cache_in(tmp_path, monkeypatch, compiled_before) as folder:
        yield folder


@pytest.fixture
def nothing_checked(monkeypatch, tmp_path_factory):
    """The self-check is on, and no result is stored. Libraries are in the usual cache, with those of other tests."""
    results = tmp_path_factory.mktemp("results")
    monkeypatch.setenv("NANOVLLM_SELF_CHECK", "on")
    monkeypatch.setattr("nanovllm_extras.self_check.stored_results.cache_folder", lambda: results)


def make_llm(model=TINY_QWEN3, **options):
    return LLM(model, **{"device": "cpu", "num_kv_blocks": 40, **options})


def text_of(llm):
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.fixture(scope="module")
def right_text():
    return text_of(make_llm(attention_backend="torch", enforce_eager=True, dtype="float32"))


def way_of(llm):
    """Which of the ways to compute is in use."""
    runner = llm.engine.runner
    if type(runner.backend) is TorchAttention:
        return "PyTorch"
    return "attention only" if runner.config.enforce_eager else "C kernels"


class FailingAttention(TorchAttention):
    def attend(self, *_):
        raise RuntimeError("out of order")


# ---- no fault


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_right_passes_once_and_is_remembered(fresh_cache, monkeypatch, dtype):
    assert way_of(make_llm(dtype=dtype, self_check="strict")) == "C kernels"
    (stored,) = fresh_cache.glob("checked-*.json")
    assert json.loads(stored.read_text())["is_right"]

    def check_again(*_):
        raise SelfCheckError("checked again")

    monkeypatch.setattr(checks.SelfCheck, "begin", check_again)
    assert way_of(make_llm(dtype=dtype)) == "C kernels"
    with pytest.raises(SelfCheckError, match="checked again"):
        make_llm(dtype=dtype, max_num_seqs=7, self_check="strict")  # something that the result depends on


QUANTISED = [
    {"dtype": "float32"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4", "block_size": 64},
]
SMALL_CACHES = [{"dtype": dtype, "kv_cache_dtype": "int8"} for dtype in ("bfloat16", "float32")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_false_alarm(nothing_checked, monkeypatch, tmp_path, name):
    """Over all architectures, dtypes, quantised weights and caches."""
    checkpoints, architecture = Checkpoints(tmp_path), ARCHITECTURES[name]
    monkeypatch.setattr(checks, "start_crash_test", lambda *_: CrashTest([sys.executable, "-c", ""], 60))
    first = list(ARCHITECTURES).index(name)
    for i, variant in enumerate(list(architecture.variants)[: architecture.num_default], start=first):
        folder, _ = checkpoints.make(name, variant)
        for options in (QUANTISED[i % len(QUANTISED)], SMALL_CACHES[i % 2]):
            if "deepseek" in name and "kv_cache_dtype" in options:
                continue
            options = {**checkpoints.engine_options(name, variant), **options, "self_check": "strict"}
            make_llm(folder, **options)


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_no_false_alarm_on_other_processors(nothing_checked, monkeypatch, processor):
    dtype, options = "bfloat16", {"quantization": "int8"}
    if list(PROCESSORS).index(processor) % 2:
        dtype, options = "float32", {"quantization": "int4", "kv_cache_dtype": "int8"}
    with pretend(monkeypatch, processor):
        assert way_of(make_llm(dtype=dtype, self_check="strict", **options)) == "C kernels"


def test_it_can_be_switched_off(fresh_cache, monkeypatch):
    monkeypatch.setattr(checks.SelfCheck, "begin", lambda *_: pytest.fail("checked"))
    make_llm(self_check="off")
    monkeypatch.setenv("NANOVLLM_SELF_CHECK", "off")
    make_llm()
    monkeypatch.setenv("NANOVLLM_SELF_CHECK", "sometimes")
    with pytest.raises(ValueError, match="NANOVLLM_SELF_CHECK must be one of on, strict, off, got 'sometimes'"):
        make_llm()
    with pytest.raises(ValueError, match="self_check must be one of on, off, strict, got 'no'"):
        make_llm(self_check="no")
    make_llm(attention_backend="torch", enforce_eager=True)  # nothing to check


# ---- faults in C


def with_fault(fault, function):
    return lambda text: re.sub(rf"(\b(?:int|void) {function}\([^;{{]*\) {{)", rf"\1 {fault}", text)


FAULTS = {  # file, change, and the way to compute that is right
    "the last token of a block is missed": (
        "kv_cache.h",
        lambda text: text.replace(
            "slot = slots[token];", "slot = slots[token]; if (slot % c->block_size == c->block_size - 1) continue;"
        ),
        "PyTorch",
    ),
    "the fused layer has another epsilon": (
        "cpu.c",
        with_fault("((struct layer *)l)->eps = 0.5f;", "decoder_layer"),
        "attention only",
    ),
    "an illegal instruction": ("attention.h", with_fault("__builtin_trap();", "attend"), "PyTorch"),
    "a hang": ("attention.h", with_fault("for (volatile int i = 0;; i++);", "attend"), "PyTorch"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (i > 0)) for i, name in enumerate(FAULTS)]
)
def test_faults_in_the_kernels_are_found(fresh_cache, monkeypatch, tmp_path, caplog, right_text, name):
    file, change, expected = FAULTS[name]
    folder = tmp_path / "kernels"
    folder.mkdir()
    for path in (library.SOURCE, library.QUANTISED, library.INT8_KV, *library.HEADERS):
        text = path.read_text()
        if path.name == file:
            assert change(text) != text
            text = change(text)
        (folder / path.name).write_text(text)
    source = folder / library.SOURCE.name
    monkeypatch.setattr(library, "HEADERS", sorted(folder.glob("*.h")))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O0"))
    monkeypatch.setitem(library.FUNCTIONS, source, library.FUNCTIONS[library.SOURCE])
    compile_and_load = library.compile_and_load
    monkeypatch.setattr(library, "compile_and_load", lambda command, _, *rest: compile_and_load(command, source, *rest))
    monkeypatch.setattr(crash_test, "TIMEOUTS", {"cpu": 0.5 if name == "a hang" else 2.0})
    with caplog.at_level(logging.WARNING):
        llm = make_llm(dtype="float32")
    assert way_of(llm) == expected
    assert text_of(llm) == right_text
    said = [record.message for record in caplog.records if "the self-check of C kernels has failed" in record.message]
    kind = {"an illegal instruction": "crash: .* by SIG(ILL|TRAP)", "a hang": "hang: "}.get(name, "wrong result: ")
    assert re.search(kind, said[0])
    assert "please report it with the output of `nanovllm check`" in said[0]
    first, *_, last = llm.engine.description.split("; ")
    assert re.match(f"not C kernels: the self-check has failed: {kind}", first)
    assert " on cpu" in last
    with pytest.raises(SelfCheckError, match="the self-check of C kernels has failed"):
        make_llm(dtype="float32", self_check="strict")
    with pytest.raises(SelfCheckError, match="the self-check of C kernels has failed"):
        make_llm(dtype="float32", attention_backend="cpu")


# ---- kinds of layers


def plant(monkeypatch, change):
    """Let `change` work on the model when its fast layers are in place."""
    replace_layers = CpuAttention.make_fast

    def replace_and_change(self, model, max_model_len):
        replace_layers(self, model, max_model_len)
        change(model)

    monkeypatch.setattr(CpuAttention, "make_fast", replace_and_change)


class Wrong(torch.nn.Module):
    """A layer that is a little off."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *arguments):
        y = self.layer(*arguments)
        return y + 0.1 * y.roll(1, -1)


KINDS = {  # architecture, variant, fields, and the first layer of each kind
    "experts here and there": ("qwen3_moe", "every second layer", {"num_hidden_layers": 4}, [0, 1]),
    "windows": ("gemma3", "plain", {"num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]}, [0, 2]),
}


@pytest.mark.parametrize("name", every_second(KINDS))
def test_each_kind_of_layer_is_compared_however_large_it_is(fresh_cache, monkeypatch, tmp_path, name):
    architecture, variant, fields, firsts = KINDS[name]
    folder, _ = Checkpoints.make.__wrapped__(Checkpoints(tmp_path), architecture, variant, **fields)
    options = {"dtype": "float32", "self_check": "strict"}
    make_llm(folder, **options)
    monkeypatch.setattr(networks, "MAX_PARAMETERS", 1)
    for i, first in enumerate(firsts):
        with monkeypatch.context() as patch:

            def make_wrong(model, first=first):
                model.model.layers[first] = Wrong(model.model.layers[first])

            plant(patch, make_wrong)
            with pytest.raises(SelfCheckError, match=re.escape(f"wrong result: layers [{first}]: ")):
                make_llm(folder, max_num_seqs=2 + i, **options)


def test_layers_are_run_together_if_they_are_small(monkeypatch):
    layers = torch.nn.ModuleList(torch.nn.Linear(size, 10, bias=False) for size in (1, 1, 2, 3, 30, 1))
    for most, expected in ((10_000, [[0, 2, 3, 4, 5]]), (60, [[0, 2, 3], [4]]), (1, [[0], [2], [3], [4]])):
        monkeypatch.setattr(networks, "MAX_PARAMETERS", most)
        assert networks.choose_layers(layers) == expected


@pytest.mark.parametrize(("where", "dtype"), [("layers", "bfloat16"), ("scores of experts", "float32")])
def test_faults_of_experts_are_found(fresh_cache, monkeypatch, tmp_path, dtype, where):
    """Rounding may let a token have other experts, but a fault is not rounding."""
    folder, _ = Checkpoints(tmp_path).make("qwen3_moe", "plain")

    class RolledExperts(Wrong):
        def forward(self, x, expert_ids, weights):
            return self.layer(x, expert_ids, weights.roll(1, 1))

    class RolledRouter(Wrong):
        def forward(self, x):
            scores = self.layer(x)
            scores[0] = scores[0].roll(1)  # of one token
            return scores

    def change(model):
        mlp = model.model.layers[-1].mlp
        if where == "layers":
            mlp.experts = RolledExperts(mlp.experts)
        else:
            mlp.gate = RolledRouter(mlp.gate)

    make_llm(folder, dtype=dtype, self_check="strict")
    plant(monkeypatch, change)
    with pytest.raises(SelfCheckError, match=f"wrong result: {where}"):
        make_llm(folder, dtype=dtype, self_check="strict", max_num_seqs=3)


# ---- faults elsewhere


def test_a_sampler_off_by_one_row_is_found(fresh_cache, monkeypatch, caplog, right_text):
    argmax = CpuAttention.argmax
    monkeypatch.setattr(CpuAttention, "argmax", lambda self, logits: argmax(self, logits).roll(1))
    with caplog.at_level(logging.WARNING):
        llm = make_llm(dtype="float32")
    assert "wrong result: greedy draws: " in caplog.text
    assert way_of(llm) == "PyTorch"
    assert text_of(llm) == right_text
    caplog.clear()
    monkeypatch.setattr(CpuAttention, "argmax", argmax)
    with caplog.at_level(logging.WARNING):
        llm = make_llm(dtype="float32")
    assert way_of(llm) == "PyTorch"  # the kernels are not run again
    assert llm.engine.description.startswith("not C kernels: the self-check has failed: wrong result: greedy draws: ")
    assert re.search(r"found on \d{4}-\d\d-\d\d; delete .*/checked-\w+\.json to check again", caplog.text)


def test_nan_from_an_empty_slot_is_found(fresh_cache, monkeypatch, caplog, right_text):
    """Other requests may have left it there, and a weight of 0 does not keep it out of a sum."""
    attend = CpuAttention.attend

    def attend_to_all(self, q, layer_cache, *arguments):
        return attend(self, q, layer_cache, *arguments) + 0 * layer_cache.flatten()[-1]

    monkeypatch.setattr(CpuAttention, "attend", attend_to_all)
    with caplog.at_level(logging.WARNING):
        llm = make_llm(dtype="float32")
    assert "wrong result: attention: 39 of 39 rows differ from PyTorch's by up to inf" in caplog.text
    assert way_of(llm) == "PyTorch"
    assert text_of(llm) == right_text


def test_an_exception_in_a_replacement_is_found(fresh_cache, monkeypatch, caplog):
    def fail(self, model, max_model_len):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(CpuAttention, "make_fast", fail)
    with caplog.at_level(logging.WARNING):
        assert way_of(make_llm()) == "attention only"
    assert "the self-check of C kernels has failed: RuntimeError: no such kernel; please report" in caplog.text
    monkeypatch.undo()
    monkeypatch.setenv("NANOVLLM_SELF_CHECK", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh_cache.parent))
    assert way_of(make_llm()) == "C kernels"  # an exception does no harm, so it is not remembered


def test_memory_that_is_missing_is_not_a_fault(fresh_cache, monkeypatch):
    def fail(self, model, max_model_len):
        raise MemoryError("no memory")

    monkeypatch.setattr(CpuAttention, "make_fast", fail)
    with pytest.raises(MemoryError, match="no memory"):
        make_llm()
    assert not list(fresh_cache.glob("checked-*"))


@pytest.mark.slow
def test_a_damaged_result_is_checked_again(fresh_cache):
    make_llm()
    (stored,) = fresh_cache.glob("checked-*.json")
    for content in ("", '{"is_right": true}'):
        stored.write_text(content)
        make_llm()
        assert json.loads(stored.read_text())["is_right"]


@pytest.mark.slow
def test_a_change_of_what_the_check_calls_leads_to_a_new_check():
    """Options and records compute nothing."""
    files = read_files(Path(checks.__file__).parents[2])
    calls = [one for one in find_imports(files) if one.source.startswith("nanovllm_extras.self_check.")]
    folders = {files[one.target].folder for one in calls if one.kind != "types"}
    assert folders - {"nanovllm_extras/options", "nanovllm_extras/records"} <= set(FOLDERS)


def test_without_a_cache_folder_every_start_checks(fresh_cache, monkeypatch):
    monkeypatch.setattr("nanovllm_extras.self_check.stored_results.cache_folder", lambda: Path("/proc/no such folder"))
    seen = []
    monkeypatch.setattr(StoredResult, "write", lambda self, result: seen.append(result))
    for _ in range(2):
        make_llm()
    assert seen == [Result(True), Result(True)]


def test_a_process_that_fails_is_quoted():
    def reason(code, timeout=60.0):
        test = CrashTest([sys.executable, "-I", "-S", "-c", code], timeout)
        with pytest.raises(SelfCheckError) as error:
            test.wait()
        return str(error.value)

    failed = "import sys; print('RuntimeError: status 2', file=sys.stderr); sys.exit(3)"
    assert reason(failed).endswith(": RuntimeError: status 2")
    assert "by SIGILL" in reason("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert "did not return within 0.2 s" in reason("import time; time.sleep(60)", 0.2)


@pytest.mark.slow
def test_a_limit_of_time_begins_with_each_line():
    """Time to import and to compile is not that of the kernels."""
    sleeps = "import time; print({0}, flush=True); time.sleep({1}); print(60, flush=True)"
    CrashTest([sys.executable, "-I", "-S", "-c", sleeps.format(60, 1.5)], 1000.0).wait()
    test = CrashTest([sys.executable, "-I", "-S", "-c", sleeps.format(1, 60)], 1000.0)
    with pytest.raises(SelfCheckError, match="did not return within 1 s"):
        test.wait()


def test_kernels_of_a_gpu_have_fifteen_seconds(capsys):
    attention = ["nanovllm.layers.attention.TorchAttention", (4, 2, 32, 16), "auto"]
    crash_test.call_kernels(attention, None, ["nanovllm.sampler.sample_tokens", 300], "float32", "cpu")
    limits = [int(line) for line in capsys.readouterr().out.splitlines()]
    assert limits == [15, 120] * (len(limits) // 2)
    assert len(limits) == 2 * 5, "three steps, the logits, the draws"


def test_a_process_that_ends_for_another_reason_says_nothing_of_the_kernels():
    for code in ("raise MemoryError", "import os; os.kill(os.getpid(), 9)", "import no_such_module"):
        CrashTest([sys.executable, "-I", "-S", "-c", code], 20.0).wait()
    CrashTest(["/no/such/program"], 20.0).wait()


@pytest.mark.slow
def test_all_kernels_that_are_used_are_called_in_the_process(fresh_cache, monkeypatch):
    """Also those of 8 and 4 bits, and from files that are deleted, as where no folder can be written to."""
    commands = []

    class Recorded(CrashTest):
        def __init__(self, command, timeout):
            commands.append(command)
            super().__init__(command, timeout)

    monkeypatch.setattr(crash_test, "CrashTest", Recorded)
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O0"))
    monkeypatch.setattr(library, "cache_folder", lambda: Path("/proc/no such folder"))
    options = {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}
    assert way_of(make_llm(**options)) == "C kernels"
    sizes, *paths = json.loads(commands[0][-1])
    assert len(set(paths)) == 3
    assert all(path.startswith("/proc/") for path in paths)
    for i in range(3):  # another library lacks the functions
        command = [*commands[0][:-1], json.dumps([sizes, *paths[:i], "libm.so.6", *paths[i + 1 :]])]
        done = subprocess.run(command, capture_output=True, check=False, text=True)
        assert "undefined symbol" in done.stderr


@pytest.mark.slow
def test_a_hang_is_not_remembered(fresh_cache, monkeypatch):
    monkeypatch.setattr(
        checks, "start_crash_test", lambda *_: CrashTest([sys.executable, "-c", "while True: pass"], 0.2)
    )
    assert way_of(make_llm()) == "PyTorch"
    assert not list(fresh_cache.glob("checked-*"))


@pytest.mark.parametrize("memory", ["none to allocate", "too little that is free"])
def test_without_memory_for_a_comparison_it_is_left_out(fresh_cache, monkeypatch, caplog, memory):
    if memory == "none to allocate":  # for which PyTorch raises a RuntimeError
        monkeypatch.setattr(checks, "in_wider_dtype", lambda *_: torch.empty(1 << 55))
    else:
        monkeypatch.setattr(checks, "free_bytes", lambda: 1 << 20)
    with caplog.at_level(logging.WARNING):
        assert way_of(make_llm()) == "C kernels"
    message = (
        "you tried to allocate" if memory == "none to allocate" else "a copy of layers takes [0-9]+ of 1048576 bytes"
    )
    assert re.search(f"a part of the self-check is left out, for which there is no memory: .*{message}", caplog.text)
    assert not list(fresh_cache.glob("checked-*"))


@pytest.mark.slow
def test_the_attention_of_a_gpu_is_called_in_a_process_of_its_own():
    """Its command, run here with the CPU's backend."""
    attention = ["nanovllm_extras.kernels.cpu.cpu_attention.CpuAttention", [4, 2, 32, 16], "auto"]
    arguments = [attention, None, ["nanovllm.sampler.sample_tokens", 300], "float32", "cpu"]
    crash_test.call_kernels(*arguments)
    attention[0] = "tests.extras.self_check.test_self_check.FailingAttention"
    command = [sys.executable, "-m", "nanovllm_extras.self_check.crash_test", json.dumps(arguments)]
    with pytest.raises(SelfCheckError, match="RuntimeError: out of order"):
        CrashTest(command, 120).wait()


# ---- the chain, the steps, the comparison


def test_each_way_is_tried_in_turn(monkeypatch, caplog):
    seen = []

    def make(config, folder, begin_check):
        seen.append((config.attention_backend, config.enforce_eager))
        raise SelfCheckError("broken")

    with caplog.at_level(logging.WARNING), pytest.raises(SelfCheckError, match="the self-check of PyTorch has failed"):
        fallbacks.start(make, Config("model", device="cpu"), Path("model"))
    assert seen == [("auto", False), ("cpu", True), ("torch", True)]
    assert caplog.text.count("broken; please report it") == 2


def test_a_description_begins_with_what_has_failed_in_a_few_words():
    """The engine's last part is what computes, so a reason has one part."""
    reasons = [
        "wrong result: 3 rows differ; rounding explains 0.01",
        "crash: by SIGSEGV\nand more; found on 2026-11-26",
    ]

    def make(config, folder, begin_check):
        if reasons:
            raise SelfCheckError(reasons.pop(0))
        return SimpleNamespace(description="attention_backend=torch; PyTorch on cpu")

    runner = fallbacks.start(make, Config("model", device="cpu"), Path("model"))
    assert runner.description.split("; ") == [
        "not C kernels: the self-check has failed: wrong result: 3 rows differ",
        "not C kernels for attention only: the self-check has failed: crash: by SIGSEGV",
        "attention_backend=torch",
        "PyTorch on cpu",
    ]


def test_a_wrong_rank_lets_all_ranks_take_the_next_way(fresh_cache, monkeypatch):
    """The error of another rank comes as text."""
    kinds = [EngineDeadError("rank 1: SelfCheckError: wrong result"), EngineDeadError("rank 1: killed")]

    def make(config, folder, begin_check):
        raise kinds.pop(0)

    with pytest.raises(EngineDeadError, match="killed"):
        fallbacks.start(make, Config("model", device="cpu"), Path("model"))
    assert not kinds


def test_the_steps_have_what_may_go_wrong():
    for block_size, max_model_len in itertools.product([1, 4, 16, 256], [16, 40, 5000]):
        batches, num_blocks = steps.make_steps(block_size, max_model_len, [5, 6, 7])
        written = set()
        for batch in batches:
            metadata, starts = batch.metadata, batch.metadata.cu_seqlens_q.tolist()
            assert set(batch.input_ids.tolist()) <= {5, 6, 7}
            assert int(metadata.seq_lens.max()) <= max_model_len
            assert int(metadata.block_tables.max()) < num_blocks
            slots = metadata.slot_mapping.tolist()
            assert not written & set(slots)
            assert min(slots) >= block_size, "none in the null block"
            written |= set(slots)
            for i, length in enumerate(metadata.seq_lens.tolist()):  # all that is read has been written
                table = metadata.block_tables[i].tolist()
                assert {table[p // block_size] * block_size + p % block_size for p in range(length)} <= written
                assert starts[i] < starts[i + 1]
        assert [batch.metadata.num_decodes for batch in batches] == [0, 1, 4]
        assert len({*batches[2].metadata.seq_lens.tolist()}) >= 3
        firsts = batches[2].metadata.block_tables[:, 0].tolist()
        assert (len(set(firsts)) < 4) == (block_size + 5 <= max_model_len - 2), "a shared block"


def test_comparison():
    exact = torch.randn(10, 64, dtype=torch.float64)
    plain = exact * (1 + 1e-6 * torch.randn(10, 64))
    check_rows("what", exact * (1 + 3e-6), plain, exact, torch.float32)
    for wrong in (exact.roll(1, 0), exact * torch.nan, exact * 1.001, exact[:5]):
        with pytest.raises(SelfCheckError, match="what"):
            check_rows("what", wrong, plain, exact, torch.float32)
    broken = torch.where(torch.arange(10)[:, None] == 3, torch.nan, plain)  # PyTorch's is NaN there, too
    check_rows("what", broken, broken, exact, torch.float32)
    check_rows("what", broken, broken * torch.nan, exact, torch.float32)


# ---- several ranks


@pytest.mark.slow
def test_each_rank_checks_its_share(fresh_cache, caplog):
    with caplog.at_level(logging.WARNING):
        llm = make_llm(tensor_parallel_size=2, dtype="float32", self_check="strict")
    assert way_of(llm) == "C kernels"
    assert len(text_of(llm)) > 10
    llm.shutdown()
    assert list(fresh_cache.glob("checked-*.json"))


@pytest.mark.slow
def test_if_one_rank_fails_all_ranks_start_again(fresh_cache, monkeypatch, tmp_path, caplog):
    fault = {"processor": "load", "kind": "self-check", "mark": str(tmp_path / "mark")}
    monkeypatch.setenv("NANOVLLM_TEST_FAULT", json.dumps(fault))
    monkeypatch.setenv("PYTHONPATH", str(PLANTED))
    with caplog.at_level(logging.WARNING), pytest.raises(SelfCheckError, match="PyTorch has failed: rank 1: .*planted"):
        make_llm(tensor_parallel_size=2)
    for way in ("C kernels", "C kernels for attention only"):
        assert f"the self-check of {way} has failed: rank 1: SelfCheckError: planted; please" in caplog.text
