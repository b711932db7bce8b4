"""Allocations in C that fail become a MemoryError, and the engine computes the step again when there is memory."""

import ctypes
import re
from ctypes import c_long

import pytest
import torch

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.kernels.cpu import library as cpu
from nanovllm_extras.kernels.cpu.cpu_layers import HugePages
from nanovllm_extras.kernels.cpu.library import load_library

GREEDY = SamplingParams(temperature=0, max_tokens=2)
REFUSES = """
#include <stdlib.h>
long num_left = -1;  // allocations that succeed before one that fails; -1: all succeed
static void *refusing_alloc(size_t alignment, size_t num_bytes) {
    return num_left-- == 0 ? NULL : aligned_alloc(alignment, num_bytes);
}
#define aligned_alloc refusing_alloc
"""


@pytest.fixture
def refusing(monkeypatch, tmp_path):
    """Libraries whose allocations fail on request: `refusing(library, i)` makes the allocation number i fail."""
    header = tmp_path / "refuse.h"
    header.write_text(REFUSES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-O0", "-include", str(header)))
    monkeypatch.setattr(cpu, "has_tiles", lambda: False)
    cpu.load_library.cache_clear()
    yield lambda library, number: setattr(c_long.in_dll(library, "num_left"), "value", number)
    cpu.load_library.cache_clear()


def tokens_of(llm):
    (output,) = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def fail_some(llm, library, refusing, numbers):
    """Make allocations fail in one run after another -> whether all runs failed. Later runs have the same tokens."""
    truth = tokens_of(llm)
    for number in numbers:
        refusing(library, number)
        try:
            if tokens_of(llm) == truth:
                return False  # there are not as many allocations
        except MemoryError:
            continue
        finally:
            refusing(library, -1)
        raise AssertionError("the tokens are others")
    assert tokens_of(llm) == truth
    return True


@pytest.mark.slow
@pytest.mark.usefixtures("needs_a_compiler")
def test_an_allocation_that_fails_in_a_layer_is_a_memory_error(refusing):
    llm = LLM(TINY_QWEN3, dtype="float32", attention_backend="cpu", num_kv_blocks=16)
    library = load_library(torch.float32)
    assert fail_some(llm, library, refusing, range(7))
    refusing(library, 0)
    with pytest.raises(MemoryError, match="CPU kernel head_linear"):
        library.head_linear(*[None] * 3, 1, 1, 16, 2)
    refusing(library, 1)
    lens, starts = (torch.tensor(values, dtype=torch.int32) for values in ([1], [0, 1]))
    with pytest.raises(MemoryError, match="CPU kernel attend_latents"):
        library.attend_latents(*[None] * 4, lens.data_ptr(), starts.data_ptr(), 1, 1, 1, 32, 16, 16, 9, 1.0, 0.0)
    refusing(library, 0)
    with pytest.raises(MemoryError, match="CPU kernel gated_delta"):
        library.gated_delta(ctypes.byref((c_long * 10)(0, 0, 0, 0, 1, 1, 16, 16, 4, 0)), *[None] * 11, 0, 0)
    experts = (c_long * 6)(0, 0, 4, 16, 16, 1)
    for number in range(2):
        refusing(library, number)
        with pytest.raises(MemoryError, match="CPU kernel mixture"):
            library.mixture(ctypes.byref(experts), *[None] * 4, 1, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_a_compiler")
@pytest.mark.parametrize(
    ("options", "source"),
    [({"quantization": "int8"}, cpu.QUANTISED), ({"kv_cache_dtype": "int8"}, cpu.INT8_KV)],
    ids=["int8", "int8 cache"],
)
def test_every_allocation_of_a_step_may_fail(refusing, options, source):
    llm = LLM(TINY_QWEN3, dtype="float32", attention_backend="cpu", num_kv_blocks=16, **options)
    library = load_library(torch.float32, source)
    assert fail_some(llm, library, refusing, range(4))
    assert not fail_some(llm, library, refusing, range(4, 1000, 9))  # up to the last one


def test_every_allocation_is_made_and_checked_by_one_function():
    allocates = re.compile(r"\b(?:malloc|calloc|realloc|aligned_alloc|posix_memalign|alloca)\(")
    sources = [path for path in [*cpu.FUNCTIONS, *cpu.HEADERS] if path.name != "allocate.h"]
    assert not [path.name for path in sources if allocates.search(path.read_text())]


def test_weights_without_memory_are_a_memory_error():
    with pytest.raises(MemoryError, match=r"no memory for \d+ bytes of packed weights"):
        HugePages(1 << 55)
