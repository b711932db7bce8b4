"""Which processors `cpu.c` is compiled for in tests: this one, and some that are pretended."""

import contextlib
import functools
import os

import pytest
import torch

from nanovllm_extras.kernels.cpu import library as cpu
from nanovllm_extras.kernels.cpu.library import NoLibraryError, compile_and_load, load_library

DTYPES = [torch.float32, torch.bfloat16]
# Of other processors the results are tested, and not the speed: -O1 compiles in a third of the time. The sweep compiles
# as users do for the processors that they have, and all of them in `test_the_source_compiles_without_a_warning`.
QUICKLY = " -O1"
AS_USERS_DO = "" if os.environ.get("NANOVLLM_SWEEP") else QUICKLY
# the best of this processor, the same without AMX, one without AVX-512, none in particular; and AMX in plain C. Where
# it can be run: AVX-512 without products of bfloat16, and AVX2 with products of bytes.
PROCESSORS = {
    "native": "native",
    "no AMX": "native",
    "AVX2": "x86-64-v3" + AS_USERS_DO,
    "SSE": "x86-64" + QUICKLY,
    "AMX, emulated": "native -DAMX_EMULATED" + QUICKLY,
}
if "avx512_bf16" in cpu.cpu_flags():
    PROCESSORS["AVX-512"] = "native -mno-avx512bf16" + QUICKLY
if "avx_vnni" in cpu.cpu_flags():
    PROCESSORS["AVX-VNNI"] = "x86-64-v3 -mavxvnni" + AS_USERS_DO
elif {"avx512_vnni", "avx512vl"} <= set(cpu.cpu_flags()):  # the same instructions, in another encoding
    PROCESSORS["AVX-VNNI"] = "x86-64-v3 -DVNNI_OF_AVX512" + AS_USERS_DO
WITH_TILES = [
    name for name in PROCESSORS if name != "no AMX" or cpu.has_tiles()
]  # without AMX, this is the first again
DISTINCT = [name for name in WITH_TILES if name != "AVX-VNNI"]  # all that differ for cpu.c
OF_WEIGHTS = [name for name in WITH_TILES if name != "AVX-512"]  # for quantised.c
OF_K_AND_V = [name for name in OF_WEIGHTS if name in ("native", "AVX2", "AVX-VNNI", "SSE")]  # for int8_kv.c
WITHOUT_TILES = [name for name in OF_K_AND_V if name != "AVX-VNNI"]  # for code that multiplies no matrices


def in_sweeps(names, *first):
    """Return parameters (*first, name). Two processors find most faults: for the others only the sweep compiles.

    Code for quantised weights, and for K and V of 8 bits, is compiled by default for this processor alone.
    """
    by_default = ("native",) if names is OF_WEIGHTS or names is OF_K_AND_V else ("native", "no AMX", "AVX2")
    return [pytest.param(*first, name, marks=[pytest.mark.slow] * (name not in by_default)) for name in names]


def need_a_compiler(dtype):
    """Skip where there is no C compiler; where there is one, source that it refuses is a failure."""
    try:
        load_library(dtype)
    except NoLibraryError as error:
        if "there is no C compiler" not in str(error):
            raise
        pytest.skip(str(error))


@functools.cache
def load_once(command, source, why_no_tiles):
    """The library of a pretended processor: to find it again takes longer than most of its tests."""
    return compile_and_load(list(command), source, why_no_tiles)


@contextlib.contextmanager
def pretend(monkeypatch, processor):
    with monkeypatch.context() as patch:
        flags = [word for flag in cpu.FLAGS for word in flag.replace("=native", f"={PROCESSORS[processor]}").split()]
        patch.setattr(cpu, "FLAGS", tuple(flags))
        patch.setattr(
            cpu, "compile_and_load", lambda command, source, reason=None: load_once(tuple(command), source, reason)
        )
        if processor != "native":
            patch.setattr(cpu, "has_tiles", lambda: False)
            patch.setattr(cpu, "why_no_tiles_are_shown", lambda: None)
        cpu.load_library.cache_clear()
        yield
    cpu.load_library.cache_clear()
