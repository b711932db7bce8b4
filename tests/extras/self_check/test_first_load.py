"""Libraries that crash or hang when they are loaded: the PyTorch layers serve, and the process lives.

The libraries are real: a "compiler" builds them from a few lines of C. Each engine starts in a process of its own,
because the library would end it without the first load elsewhere.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from nanovllm_extras.machine import own_process
from nanovllm_extras.machine.own_process import LoadError
from tests.core_alone import ROOT
from tests.extras.kernels.processors import need_a_compiler

COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec cc --version
for last; do :; done
exec cc -shared -fPIC -o "$last" {source}
"""
CONSTRUCTOR = "__attribute__((constructor)) static void start(void) {{ {} }}\n"
FAULTS = {  # C, and how the message names it
    "an illegal instruction": (CONSTRUCTOR.format("__builtin_trap();"), "crash: .* by SIG(ILL|TRAP)"),
    "a null pointer": (CONSTRUCTOR.format("*(volatile int *)0 = 1;"), "crash: .* by SIG(SEGV|BUS)"),
    "a hang": (CONSTRUCTOR.format("for (volatile int i = 0;; i++);"), "hang: .* within 1 s"),
    "an illegal instruction in the first call": (
        "const char *instructions(void) { __builtin_trap(); }\n",
        "crash: .* by SIG(ILL|TRAP)",
    ),
}
RUN = """
import json, logging, os, sys
import nanovllm, nanovllm_extras
from nanovllm_extras.machine import own_process
from nanovllm_extras.machine.own_process import LoadError

class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

lines = []
logging.getLogger("nanovllm").addHandler(Lines(logging.WARNING))
logging.getLogger("nanovllm_extras").addHandler(Lines(logging.WARNING))
own_process.TIMEOUTS["cpu"] = 1.0
options = {"device": "cpu", "num_kv_blocks": 40, "dtype": "float32"}
module = {"core": nanovllm, "extras": nanovllm_extras}[sys.argv[1]]
found = {}

def answer(name, **more):
    try:
        llm = module.LLM(module.TINY_QWEN3, **options, **more)
    except Exception as error:
        found[name] = [type(error).__name__, str(error)]
        return
    params = module.SamplingParams(temperature=0, max_tokens=12)
    text = llm.generate("What is a block table?", params, use_tqdm=False)[0].outputs[0].text
    found[name] = [type(llm.engine.runner.backend).__name__, text]
    found["description"] = found.get("description", llm.engine.description)

answer("auto")
found["lines"] = lines[:]
answer("torch", attention_backend="torch", enforce_eager=True)
answer("cpu", attention_backend="cpu")
os.environ["NANOVLLM_SELF_CHECK"] = "strict"
answer("strict")
print(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def _needs_kernels():
    need_a_compiler(torch.float32)


def plant(folder, text):
    """Return the environment in which kernels are compiled from `text`."""
    source, compiler = folder / "fault.c", folder / "compiler"
    source.write_text(text)
    compiler.write_text(COMPILER.format(source=source))
    compiler.chmod(0o755)
    return {"CC": str(compiler), "XDG_CACHE_HOME": str(folder), "NANOVLLM_SELF_CHECK": "on"}


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("an illegal instruction", "core"),
        pytest.param("a hang", "extras", marks=pytest.mark.slow),
        pytest.param("an illegal instruction in the first call", "core", marks=pytest.mark.slow),
        pytest.param("a null pointer", "extras", marks=pytest.mark.slow),
    ],
)
def test_pytorch_serves_if_the_library_ends_who_loads_it(tmp_path, name, package):
    text, reason = FAULTS[name]
    done = subprocess.run(
        [sys.executable, "-c", RUN, package], cwd=ROOT, env={**os.environ, **plant(tmp_path, text)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["auto"] == found["torch"]
    assert found["auto"][0] == "TorchAttention"
    (line,) = found["lines"]
    for said in (line, found["description"], found["cpu"][1], found["strict"][1]):
        assert re.search(reason, said), said
    assert "delete this file to compile it again" in line
    assert found["cpu"][0] == ("ValueError" if package == "core" else "SelfCheckError")
    assert found["strict"][0] == ("RuntimeError" if package == "core" else "SelfCheckError")


# ---- what is remembered

RIGHT = """
long element_bytes(void) { return 4; }
const char *instructions(void) { return "none"; }
void *join_team(void *team) { return team; }
"""


@pytest.fixture
def started(monkeypatch):
    """The commands of all processes of their own."""
    commands = []

    class Recorded(own_process.CrashTest):
        def __init__(self, command, timeout):
            commands.append(command)
            super().__init__(command, timeout)

    monkeypatch.setattr(own_process, "CrashTest", Recorded)
    return commands


def load_as_a_new_process(path):
    own_process.why_not_loaded.cache_clear()
    own_process.load_elsewhere_first(path)


def test_another_process_loads_a_library_once_for_each_start_of_the_machine(tmp_path, monkeypatch, started):
    (tmp_path / "right.c").write_text(RIGHT)
    path = tmp_path / "right.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(tmp_path / "right.c")], check=True)
    for _ in range(3):
        load_as_a_new_process(path)
    assert len(started) == 1
    monkeypatch.setattr(own_process, "this_machine", lambda: "another")
    for _ in range(3):
        load_as_a_new_process(path)
    assert len(started) == 2


def test_a_failure_is_tried_again_by_another_process_but_not_by_the_same(tmp_path, started):
    text, reason = FAULTS["an illegal instruction"]
    (tmp_path / "wrong.c").write_text(text)
    path = tmp_path / "wrong.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(tmp_path / "wrong.c")], check=True)
    for _ in range(2):
        own_process.why_not_loaded.cache_clear()
        for _ in range(2):
            with pytest.raises(LoadError, match=reason):
                own_process.load_elsewhere_first(path)
    assert len(started) == 2


def test_where_nothing_can_be_stored_or_started_the_engine_loads_the_library(tmp_path, monkeypatch):
    """As it does for a file that cannot be loaded at all, whose error the engine's own load reports."""
    load_as_a_new_process(tmp_path / "no such folder" / "right.so")
    monkeypatch.setattr(own_process.sys, "executable", "/no/such/program")
    load_as_a_new_process(tmp_path / "right.so")
