"""How `cpu.c` is compiled on machines that are not this one: systems, compilers, OpenMP libraries, folders."""

import ctypes
import logging
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.kernels.cpu import library as cpu
from nanovllm_extras.kernels.cpu import library_cache, toolchain
from nanovllm_extras.kernels.cpu.library import NoLibraryError, load_library

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-O0"))  # the folders matter, and not the speed
    cpu.load_library.cache_clear()
    yield tmp_path / "nanovllm"
    cpu.load_library.cache_clear()


# ---- systems and compilers


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [("Linux", "x86_64", "-march=native -shared"), ("Linux", "aarch64", "-mcpu=native -shared"),
     ("Darwin", "arm64", "-mcpu=native -dynamiclib")],
)  # fmt: skip
def test_flags_are_those_of_the_system_and_the_processor(system, machine, expected):
    assert {*expected.split(), "-pthread"} <= set(toolchain.flags(system, machine))


def test_gcc_comes_before_clang_on_linux_and_cc_before_all(monkeypatch, tmp_path):
    for name in ("cc", "clang", "gcc"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert toolchain.find_compiler("Linux") == str(tmp_path / "gcc")
    assert toolchain.find_compiler("Darwin") == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "mine -x")
    assert toolchain.find_compiler("Linux") == "mine -x"


def test_another_system_is_refused_by_its_name(monkeypatch, fresh_cache):
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(NoLibraryError, match="for Linux and Darwin, not for Windows"):
        load_library(torch.float32)
    cpu.keep_freed_memory()  # asks nothing of a C library that is not there


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pretends to be macOS, by Linux's gcc")
@pytest.mark.usefixtures("needs_a_compiler")
def test_the_engine_computes_on_a_mac_that_is_pretended(monkeypatch, fresh_cache, tmp_path):
    """What differs on macOS, as Linux can play it: the system's name, clang's options, no affinity, no huge pages."""
    expected = LLM(TINY_QWEN3, attention_backend="torch", dtype="float32").generate("A block", GREEDY)
    clang = tmp_path / "clang"  # gcc, behind clang's options
    clang.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "args = ['-shared' if arg == '-dynamiclib' else arg for arg in sys.argv[1:] if arg != '-mcpu=native']\n"
        f"os.execv({shutil.which('gcc') or shutil.which('cc')!r}, ['gcc', *args])\n"
    )
    clang.chmod(0o755)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(cpu, "FLAGS", (*toolchain.flags("Darwin", "arm64"), "-O0"))
    monkeypatch.setattr(toolchain, "describe_processor", lambda system: "Apple M1")
    monkeypatch.setattr(cpu, "describe_processor", toolchain.describe_processor)
    monkeypatch.setenv("CC", str(clang))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    llm = LLM(TINY_QWEN3, dtype="float32")
    assert "attention_backend=cpu" in llm.engine.description
    (output,) = llm.generate("A block", GREEDY)
    assert output.outputs[0].token_ids == expected[0].outputs[0].token_ids


POSIX = """
#pragma once
#include <stddef.h>
#define INFINITY __builtin_inff()
#define CLOCK_MONOTONIC 6
struct timespec { long tv_sec, tv_nsec; };
int clock_gettime(int, struct timespec *), sched_yield(void);
typedef struct { long signature; char rest[56]; } *pthread_t, pthread_mutex_t, pthread_cond_t, pthread_attr_t;
#define PTHREAD_MUTEX_INITIALIZER {0x32AAABA7, {0}}
#define PTHREAD_COND_INITIALIZER {0x3CB0B1BB, {0}}
enum { PTHREAD_CREATE_DETACHED = 2 };
int pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int pthread_atfork(void (*)(void), void (*)(void), void (*)(void));
int pthread_mutex_lock(pthread_mutex_t *), pthread_mutex_unlock(pthread_mutex_t *);
int pthread_cond_wait(pthread_cond_t *, pthread_mutex_t *), pthread_cond_broadcast(pthread_cond_t *);
int pthread_attr_init(pthread_attr_t *), pthread_attr_destroy(pthread_attr_t *);
int pthread_attr_setstacksize(pthread_attr_t *, size_t), pthread_attr_setdetachstate(pthread_attr_t *, int);
void *aligned_alloc(size_t, size_t), *malloc(size_t), *calloc(size_t, size_t), free(void *);
void *memcpy(void *, const void *, size_t), *memset(void *, int, size_t);
float sqrtf(float), rintf(float), expf(float), log1pf(float);
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", cpu.FUNCTIONS, ids=lambda source: source.name)
def test_clang_compiles_the_source_for_a_mac(tmp_path, source):
    """Apple's headers are not to be had: these are the functions that the sources take of them, and no more."""
    if not shutil.which("clang"):
        pytest.skip("there is no clang")
    (tmp_path / "posix.h").write_text(POSIX)
    for name in ("math", "stdlib", "string", "time", "sched", "pthread"):
        (tmp_path / f"{name}.h").write_text('#include "posix.h"\n')
    flags = [flag for flag in toolchain.flags("Darwin", "arm64") if flag not in ("-dynamiclib", "-mcpu=native")]
    target = ["--target=arm64-apple-macos14", "-mcpu=apple-m1", "-ffreestanding", "-nostdlibinc", f"-I{tmp_path}"]
    strict = ["-Wall", "-Wextra", "-Werror"]
    command = ["clang", *flags, *target, *strict, "-DBFLOAT16", "-c", str(source), "-o", str(tmp_path / "cpu.o")]
    subprocess.run(command, check=True)
    assert (tmp_path / "cpu.o").read_bytes()[:8] == bytes.fromhex("cffaedfe0c000001")  # Mach-O of 64 bits, arm64


# ---- OpenMP


@pytest.mark.parametrize("name", ["torch/lib/libgomp.so.1", "torch.libs/libgomp-a49a47f9.so.1.0.0"])
def test_torchs_openmp_is_found_where_wheels_keep_it(tmp_path, name):
    """The second is that of torch 2.9 for ARM."""
    (tmp_path / "torch").mkdir()
    assert toolchain.openmp_of_torch(tmp_path / "torch") is None
    library = tmp_path / name
    library.parent.mkdir(exist_ok=True)
    library.touch()
    assert toolchain.openmp_of_torch(tmp_path / "torch") == library


# ---- folders


def foreign(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o777)


def read_only(folder, monkeypatch):
    compile_to = library_cache.compile_to

    def refuse(where, *args):
        if where == folder:
            raise OSError(30, "Read-only file system", str(where))
        return compile_to(where, *args)

    monkeypatch.setattr(library_cache, "compile_to", refuse)


def without_execution(folder, monkeypatch):
    load = ctypes.CDLL.__init__

    def refuse(library, name, *args, **kwargs):
        if Path(str(name)).parent == folder:
            raise OSError(f"{name}: failed to map segment from shared object")
        load(library, name, *args, **kwargs)

    monkeypatch.setattr(ctypes.CDLL, "__init__", refuse)


def no_home(folder, monkeypatch):
    def refuse():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", refuse)


REASONS = {
    foreign: "other users can write to .*nanovllm: run chmod 700",
    read_only: "Read-only file system",
    without_execution: "failed to map segment",
    no_home: "Could not determine home directory",
}


@pytest.mark.usefixtures("needs_a_compiler")
@pytest.mark.parametrize(
    "spoil",
    [
        foreign,
        *(pytest.param(spoil, marks=pytest.mark.slow) for spoil in (no_home, without_execution, read_only)),
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_without_a_cache_folder_the_kernels_stay(fresh_cache, monkeypatch, caplog, tmp_path, spoil):
    """Compiled to a private folder, which is gone afterwards; nothing that others could have changed is loaded."""
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(private))
    spoil(fresh_cache, monkeypatch)
    with caplog.at_level(logging.WARNING):
        library = load_library(torch.float32)
    x = torch.tensor([[1.0, 3.0, 2.0]])
    index = torch.empty(1, dtype=torch.int64)
    library.argmax(x.data_ptr(), index.data_ptr(), 1, 3)
    assert index.item() == 1
    assert not list(private.iterdir())
    (record,) = caplog.records
    assert "for this process only" in record.getMessage()
    assert re.search(REASONS[spoil], record.getMessage())


@pytest.mark.usefixtures("needs_a_compiler")
def test_without_any_folder_the_reason_is_said(fresh_cache, monkeypatch):
    fresh_cache.write_text("in the way")
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    with pytest.raises(NoLibraryError, match="could not be compiled and loaded: .*/no/such/folder"):
        load_library(torch.float32)
