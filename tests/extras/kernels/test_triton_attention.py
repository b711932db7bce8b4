"""The Triton backend as far as it goes without a GPU: all kernels' tests in the interpreter, what they compile to for
real GPUs, how the work is divided, and where it may be chosen.
"""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras import LLM
from nanovllm_extras.execution.choices import select_backend
from tests.extras.kernels.conftest import KERNEL_TESTS

pytest.importorskip("triton")

from benchmarks.kernel_resources import BUILDS, GPUS, VERSIONS, compile_case, table_cases, table_of
from nanovllm.layers import triton_layers
from nanovllm_extras.kernels.cuda import (
    adapter_kernels,
    delta_chunks,
    delta_kernels,
    few_tokens,
    inverse_cdf,
    logit_weights,
    paged_attention,
    store_kv,
    truncate,
)
from nanovllm_extras.kernels.cuda import (
    cuda_quantised as quantised,
)
from nanovllm_extras.kernels.cuda import (
    norm_kernels as norm,
)
from nanovllm_extras.kernels.cuda.kernel_launch import (
    GPU,
    Launch,
    choose_chunk_splits,
    choose_splits,
    decode_launch,
    flash_attn_splits,
    prefill_launch,
)
from nanovllm_extras.kernels.cuda.triton_attention import TritonAttention

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parents[3]
MODULES = (
    *(triton_layers, adapter_kernels, delta_chunks, delta_kernels, few_tokens, inverse_cdf, logit_weights, norm),
    *(paged_attention, quantised, store_kv, truncate),
)
TABLES = {one: json.loads(table_of(one).read_text(encoding="utf-8")) for one in VERSIONS}
KERNELS = {name for module in MODULES for name in vars(module) if name.endswith("_kernel")}
FEW_TOKENS = {"norm_linear", "norm_gate_up", "add_linear"}  # what one kernel, `few_tokens_kernel`, is compiled to
QUANTISED = {f"int{bits}_{n}" for bits in (4, 8) for n in ("few", "some", "many")}  # of `quantised_linear_kernel`
PREFILLS = {"prefill", "split_prefill"}  # the same, of `prefill_kernel`
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


IS_WHOLE = os.environ.get("NANOVLLM_SWEEP") == "all"  # all GPUs, and all specialisations: some minutes more
LAUNCHED = [(120, "float32"), *[(arch, "bfloat16") for arch in (80, 90, 100) if IS_WHOLE]]
"""An RTX 5090, which has least shared memory; then A100, H100, B200. With a dtype of logits."""
SWEPT = [("--table", "90"), *[("--table", "80", "86", "89", "100", "120"), ("--quick", "90")] * IS_WHOLE]

SPILLS_LITTLE = Version(version("triton")).release[:2] in ((3, 6), (3, 9))  # on the first two; others up to 96 bytes


@functools.cache
def run_job(*arguments, interpret="0"):
    """In a process of its own: triton reads TRITON_INTERPRET once, when it is imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": interpret}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.skipif(
    Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4"),
    reason="the interpreter of Triton 3.6 needs NumPy before 2.4",
)
def test_kernels_in_the_interpreter():
    """In one process for all files, since it takes seconds to begin."""
    files = [f"tests/extras/kernels/{name}" for name in KERNEL_TESTS]
    done = run_job("pytest", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow", *files, interpret="1")
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


# ---- what the kernels compile to


def may_spill(arch, kernel=""):
    """Bytes of a thread. A few before a loop are nothing (a register of `norm_gate_up`); hundreds would be slow."""
    return 8 if arch in (80, 90) and SPILLS_LITTLE and kernel != "split_prefill" else 96


def test_the_tables_of_resources_have_all_kernels_and_gpus():
    """`python -m benchmarks.kernel_resources --table --write` writes it, in a minute or two."""
    cases = [case for arch in GPUS for case in table_cases(arch)]
    for table in TABLES.values():
        assert list(table["rows"]) == list(map(str, cases))
        spilled = {case: row[1] for case, row in table["rows"].items() if row[1] > 96}
        assert list(spilled) == (["split_prefill sm_89 bfloat16+fp8 head_dim 128 block_size 16"] if spilled else [])
    assert {case.kernel for case in cases} == set(BUILDS)


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=pytest.mark.slow) for case in SWEPT],
    ids=lambda param: " ".join(param),
)
def resources(request):
    """What `benchmarks.kernel_resources` compiles: by default, `test_what_is_launched_compiles` makes the same claims.

    One dict for each kernel of the table, or for each specialisation but float16, which differs in a type only."""
    which, *arches = request.param
    done = run_job("benchmarks.kernel_resources", which, "--json", "--arch", *arches)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_kernels_hardly_spill(resources):
    assert len(resources) >= len(KERNELS)
    for used in resources:
        kernel, arch, *_ = used["case"].split()
        assert used["spill_bytes"] <= may_spill(int(arch.removeprefix("sm_")), kernel), used


def test_resources_are_those_of_the_table(resources):
    """Registers, spills, shared memory: what they cost a GPU shows without one."""
    installed = next((table for table in TABLES.values() if table["triton"] == version("triton")), None)
    if installed is None:
        pytest.skip(f"there is no table of Triton {version('triton')}: write it")
    columns, table = installed["columns"], installed["rows"]
    found = {used["case"]: [used[name] for name in columns] for used in resources}
    assert found.keys() & table.keys()
    assert {case: row for case, row in found.items() if case in table and row != table[case]} == {}


def test_programs_fit_a_multiprocessor(resources):
    """Two at least, so that one computes while the other waits; but prefill and truncate have warps enough for that.

    Products of few tokens have many tiles on their way instead: two programs where shared memory is as large as an
    H100's, one where it is smaller or where numbers take twice as much.
    """
    for used in resources:
        kernel, arch, dtype = used["case"].split()[:3]
        is_large = kernel in FEW_TOKENS and (arch, dtype) != ("sm_90", "bfloat16")
        least = 1 if is_large or kernel in {*PREFILLS, "truncate"} else 2
        assert used["programs"] >= least, used


def test_all_kernels_are_compiled(resources):
    compiled = {used["case"].split()[0] for used in resources}
    assert compiled == set(BUILDS)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "logits_dtype"), LAUNCHED)
def test_what_is_launched_compiles(arch, logits_dtype):
    """The interpreter takes all arguments and options, the compiler does not. Spills and programs: as below."""
    done = run_job("tests.extras.kernels.launched_kernels", str(arch), logits_dtype)
    assert done.returncode == 0, done.stderr[-5000:]
    launched = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {used["kernel"] for used in launched} == KERNELS
    assert [used for used in launched if used["spill_bytes"] > may_spill(arch)] == []
    assert max(used["shared_bytes"] for used in launched) <= GPUS[arch].shared_memory
    if arch == 90:
        full = {"prefill_kernel", "truncate_kernel"}  # with warps enough in one program
        assert [used for used in launched if used["programs"] < 2 and used["kernel"] not in full] == []


# ---- how the work is divided


@given(num_programs=st.integers(1, 100_000), max_len=st.integers(1, 1 << 20))
def test_splits_fill_the_gpu_and_are_not_tiny(num_programs, max_len):
    gpu = GPU()
    num_splits, min_split_len = choose_splits(num_programs, max_len, gpu)
    assert num_splits >= 1
    assert min_split_len % 128 == 0, "a multiple of every tile"
    assert (num_splits - 1) * min_split_len < max_len, "the last one would be empty for every length"
    assert num_splits == 1 or num_programs * num_splits <= 16 * gpu.num_multiprocessors + num_programs
    if num_splits * min_split_len < max_len and num_programs < 2 * gpu.num_multiprocessors:
        assert num_programs * num_splits >= 2 * gpu.num_multiprocessors


def test_splits_of_well_known_cases():
    gpu = GPU(num_multiprocessors=132)
    assert choose_splits(8, 32_768, gpu) == (33, 128)  # one sequence, 8 K and V heads
    assert choose_splits(8, 256, gpu) == (2, 128)
    assert choose_splits(256 * 8, 1024, gpu) == (1, 4096)
    assert choose_splits(40 * 8, 32_768, gpu) == (6, 4096)
    assert choose_chunk_splits(8, 32_768, gpu) == (16, 512)  # 50 new tokens of one sequence, 8 K and V heads
    assert choose_chunk_splits(8, 1000, gpu) == (1, 512)
    assert choose_chunk_splits(8 * 17, 32_768, gpu) == (1, 512)  # 1,024 new tokens


def test_splits_of_flash_attn_by_the_width_of_the_tables():
    """In a graph the tables are as wide as the longest sequence allowed, and contexts are mostly shorter."""
    gpu = GPU(num_multiprocessors=132)
    splits = {n: flash_attn_splits(8 * n, 40_960, 128, gpu) for n in (1, 2, 4, 8, 16, 26, 27, 256)}  # sequences
    assert splits == {1: 64, 2: 64, 4: 33, 8: 16, 16: 8, 26: 5, 27: 0, 256: 0}  # its own choice: 30 15 8 4 2 1 1 1
    assert flash_attn_splits(8, 1024, 128, gpu) == 8, "a tile of tokens each"
    assert flash_attn_splits(8, 1024, 64, gpu) == 4
    assert flash_attn_splits(8, 100, 256, gpu) == 2


SHARED_MEMORY = [64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024]
TYPES = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float8_e4m3fn)]


def test_launches_are_powers_of_two_that_hold_a_group():
    for group, head_dim, types, memory in itertools.product(
        [1, 3, 4, 16, 64], [16, 64, 128, 256, 512], TYPES, SHARED_MEMORY
    ):
        for choose in (decode_launch, prefill_launch):
            launch = choose(group, head_dim, *types, GPU(132, memory))
            assert launch.rows >= max(16, group)
            for n in (launch.rows, launch.tile, launch.num_warps):
                assert n & (n - 1) == 0
            assert 128 % launch.tile == 0, "splits are whole tiles"
            assert launch.num_stages >= 1


def test_launches_of_well_known_cases():
    bf16, fp8, small = torch.bfloat16, torch.float8_e4m3fn, GPU(128, 99 * 1024)  # an RTX 4090
    # two tiles are loaded while one is computed with: 98,816 bytes. Heads of 256 would take 102,656
    assert prefill_launch(4, 128, bf16, bf16, small) == Launch(128, 64, 8, num_stages=5)
    assert prefill_launch(4, 256, bf16, bf16, small) == Launch(64, 32, 8, num_stages=3)
    assert prefill_launch(4, 512, bf16, bf16, small) == Launch(32, 32, 8, num_stages=3)
    assert prefill_launch(4, 128, bf16, bf16, GPU()) == Launch(128, 64, 8, num_stages=5)
    assert decode_launch(4, 128, bf16, bf16, small) == Launch(16, 64, 4, num_stages=3)
    # over an fp8 cache, tiles of more tokens, which take fewer instructions each
    assert decode_launch(4, 128, bf16, fp8, small) == Launch(16, 128, 4, num_stages=3)
    assert decode_launch(4, 128, bf16, fp8, GPU()) == Launch(16, 128, 4, num_stages=5)


def test_tiles_of_few_tokens_fit_shared_memory():
    dtypes = (torch.bfloat16, torch.float32)
    for num_inputs, dtype, is_gated, memory in itertools.product(
        (64, 192, 1024, 3072), dtypes, (False, True), SHARED_MEMORY
    ):
        launch = few_tokens.choose_launch(num_inputs, dtype, is_gated, GPU(132, memory))
        assert num_inputs % launch.tile == 0
        loaded = (32 + 16 * is_gated) * launch.tile * dtype.itemsize
        assert 1 <= launch.num_stages <= max(1, memory // loaded)


def test_many_tiles_of_few_tokens_are_on_their_way():
    wanted = [few_tokens.choose_launch(1024, torch.bfloat16, is_gated, GPU()) for is_gated in (False, True)]
    assert [(launch.tile, launch.num_stages) for launch in wanted] == [(256, 6), (256, 3)]


def test_every_multiprocessor_has_a_program_of_a_quantised_product():
    """With 17 to 64 tokens the tile is as large as that allows, and with more it does not depend on their number."""
    launches = {n: quantised.choose_launch(32, n, GPU()) for n in (1024, 4096, 6144, 24_576, 151_936)}
    assert {n: launch.tile for n, launch in launches.items()} == {1024: 16, 4096: 16, 6144: 32, 24_576: 64, 151_936: 64}
    assert all(launch.rows == 64 for launch in launches.values())
    assert launches[1024].num_stages > launches[151_936].num_stages
    assert {quantised.choose_launch(n, 4096, GPU()).tile for n in (1, 16, 17, 64)} == {16}
    assert {quantised.choose_launch(n, 1024, GPU()) for n in (65, 128, 5000)} == {launches[151_936]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4_few", "norm_linear"])
def test_loops_wait_for_no_load(name):
    """On an H100, compiled: all that they read is requested some turns ahead (`cp.async`)."""
    case = next(case for case in table_cases(90) if case.kernel == name)
    ptx = compile_case(case)[0].asm["ptx"]
    loops = [ptx]  # the few turns of `norm_linear` are unrolled
    if name in QUANTISED:
        loops = re.findall(
            r"^(?=(\$L__BB0_\d+):)((?:.(?!^\$L__BB))*?bra(?:\.uni)?\s+\1;)", ptx, re.DOTALL | re.MULTILINE
        )
        loops = [body for _, body in loops]
    assert loops
    for body in loops:
        assert "cp.async" in body
        assert "ld.global" not in body


# ---- where it may be chosen


def choose(name, device, dtype=torch.bfloat16, head_dim=128, block_size=None, kv_cache_dtype="auto"):
    return select_backend(name, device, dtype, head_dim, block_size, kv_cache_dtype)[0]


def test_auto_is_triton_on_cuda_without_flash_attn(monkeypatch):
    dtype = torch.bfloat16
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    assert choose("auto", CUDA, dtype) is choose("auto", CUDA, torch.float16) is TritonAttention
    assert choose("triton", CUDA, torch.float32) is TritonAttention
    assert choose("auto", CUDA, torch.float32) is TorchAttention
    assert choose("auto", CUDA, dtype, head_dim=80) is TorchAttention
    assert choose("auto", CUDA, dtype, head_dim=512) is TritonAttention
    assert choose("auto", CUDA, dtype, head_dim=1024) is TorchAttention
    assert choose("auto", CUDA, dtype, block_size=24) is TorchAttention
    assert choose("auto", CUDA, kv_cache_dtype="fp8") is TritonAttention
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose("auto", CUDA, dtype) is TorchAttention
    with pytest.raises(ValueError, match="needs the package triton"):
        choose("triton", CUDA)


@pytest.mark.parametrize("head_dim", [8, 96, 1024])
def test_other_head_dims_are_refused(head_dim):
    with pytest.raises(ValueError, match=rf"'triton' cannot be used .*head_dim .* it is {head_dim}\); take .*'torch'"):
        choose("triton", CUDA, head_dim=head_dim)


def test_cpu_is_refused_unless_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ValueError, match="'triton' .* needs a CUDA device, got cpu .*TRITON_INTERPRET=1.* take .*'torch'"
    ):
        choose("triton", CPU, torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("triton", CPU, torch.float32) is TritonAttention
    assert choose("auto", CPU, torch.float32) is not TritonAttention


@pytest.mark.parametrize("missing", ["compiler", "CC", "header"])
def test_triton_is_refused_where_it_cannot_build_what_launches_kernels(monkeypatch, tmp_path, missing):
    """As in a slim container: `auto` serves with PyTorch's attention, and says what to install."""
    for variable in ("CC", "CPATH", "C_INCLUDE_PATH", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    if missing == "compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        reason = "triton needs a C compiler, and there is no gcc or clang: install gcc, or set CC"
    elif missing == "CC":
        monkeypatch.setenv("CC", "no-such-compiler")
        reason = "triton needs a C compiler, and there is no no-such-compiler"
    else:
        monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
        reason = f"triton needs Python's headers, and there is no {tmp_path}/Python.h: install python3-dev"
    with pytest.raises(ValueError, match=re.escape(reason)):
        choose("triton", CUDA)
    backend_class, reasons = select_backend("auto", CUDA, torch.bfloat16, 128)
    assert backend_class is TorchAttention
    assert reason in reasons
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter launches nothing
    assert choose("triton", CUDA) is TritonAttention


@pytest.mark.parametrize("block_size", [8, 24])
def test_block_sizes_are_refused(block_size):
    with pytest.raises(ValueError, match=rf"power of two and at least 16, got {block_size}\)"):
        choose("triton", CUDA, block_size=block_size)


def test_who_has_an_fp8_cache(tiny_checkpoint):
    for name in ("auto", "torch"):
        engine = LLM(tiny_checkpoint[0], device="cpu", attention_backend=name, kv_cache_dtype="fp8").engine
        assert isinstance(engine.runner.backend, TorchAttention)
        assert engine.runner.kv_cache.tensor.dtype == torch.float8_e4m3fn
        assert ("not cpu: it has no fp8 KV cache" in engine.description) == (name == "auto")


def test_older_gpus_get_pytorchs_attention_or_no_fp8_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert choose("triton", CUDA) is TritonAttention
    with pytest.raises(ValueError, match=r"'triton' with kv_cache_dtype='fp8' .* capability 8.9 .* this one has 8.0"):
        choose("triton", CUDA, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match=r"'auto' .* 8.9 .* not torch: .* slow.*'torch', or kv_cache_dtype='auto'"):
        choose("auto", CUDA, kv_cache_dtype="fp8")
    assert choose("torch", CUDA, kv_cache_dtype="fp8") is TorchAttention
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ValueError, match=r"'triton' cannot be used .* 8.0 or later \(Ampere\), this one has 7.5"):
        choose("triton", CUDA)
    assert choose("auto", CUDA) is TorchAttention
