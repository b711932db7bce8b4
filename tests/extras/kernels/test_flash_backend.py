"""`FlashAttention` against the float64 reference of `attention_steps.py`, and which backend is chosen where.

It runs on CPU here, on stand-ins for the library's versions 2 (`flash_attn`, 2.8) and 3 (`flash_attn_interface`) that
have their documented interfaces and are stricter about them: what they take, the libraries take.
"""

import importlib.machinery
import inspect
import itertools
import math
import sys
import types
from dataclasses import replace

import pytest
import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.execution import cuda_warm_up as warm_up
from nanovllm_extras.execution.choices import select_backend
from nanovllm_extras.kernels.cuda import flash_backend
from nanovllm_extras.kernels.cuda.flash_backend import FlashAttention
from nanovllm_extras.models.masking import PLAIN
from tests.extras.attention_options import OPTIONS
from tests.extras.attention_steps import Step, check_close

# ---- the stand-ins


def check_paged_inputs(q, k_cache, v_cache, block_table, batch_size, block_size_multiple=256):
    num_heads, head_dim = q.shape[-2:]
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert all(t.stride(-1) == 1 for t in (q, k_cache, v_cache))
    assert k_cache.shape == v_cache.shape == (num_blocks, block_size, num_kv_heads, head_dim)
    assert num_heads % num_kv_heads == 0
    assert head_dim % 8 == 0
    assert head_dim <= 256
    assert block_size % block_size_multiple == 0, "Paged KV cache block size must be divisible by 256"
    assert block_table.dtype == torch.int32
    assert block_table.stride(-1) == 1
    assert block_table.shape[0] == batch_size > 0


def gather(cache, block_row, seq_len):
    """The first `seq_len` tokens of one sequence; reads no entry of `block_row` beyond its last block."""
    size = cache.shape[1]
    assert block_row.shape[0] * size >= seq_len, "reads past the block table"
    rows = []
    for i in range(seq_len):
        rows.append(cache[int(block_row[i // size]), i % size])
    return torch.stack(rows)


def stand_in_attend(q, k, v, softmax_scale, window_size=(-1, -1), softcap=0.0, *, causal):
    """q: [n, num_heads, head_dim]; the causal mask is aligned to the bottom right corner."""
    assert causal
    n, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    before = window_size[0]  # this many tokens before itself; what no row sees is not read
    first = max(0, len(k) - n - before) if before >= 0 else 0
    k, v = (t[first:] for t in (k, v))
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))  # [seq_len, num_heads, head_dim]
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * softmax_scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    is_hidden = torch.ones(n, len(k), dtype=torch.bool).triu(len(k) - n + 1)
    if before >= 0:
        is_hidden |= torch.ones(n, len(k), dtype=torch.bool).tril(len(k) - n - before - 1)
    scores.masked_fill_(is_hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)


def check_lengths(*columns, count):
    for column in columns:
        assert column.dtype == torch.int32
        assert column.shape == (count,)
        assert column.is_contiguous()


def slices_of(cu_seqlens, max_seqlen, count):
    """The rows of each sequence."""
    check_lengths(cu_seqlens, count=count + 1)
    borders = cu_seqlens.tolist()
    assert borders[0] == 0
    assert type(max_seqlen) is int
    assert max_seqlen >= max(cu_seqlens.diff().tolist())
    return [slice(*pair) for pair in itertools.pairwise(borders)]


# keyword arguments only, and no more than are used: the real functions have many more


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, num_splits, **masking):
    batch_size, num_new, _, _ = q.shape
    check_paged_inputs(q, k_cache, v_cache, block_table, batch_size)
    check_lengths(cache_seqlens, count=batch_size)
    out = torch.empty_like(q)
    for i, seq_len in enumerate(cache_seqlens.tolist()):
        assert seq_len >= num_new
        keys, values = gather(k_cache, block_table[i], seq_len), gather(v_cache, block_table[i], seq_len)
        out[i] = stand_in_attend(q[i], keys, values, **masking)
    return out


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, **masking):
    batch_size = len(cu_seqlens_q) - 1
    rows, of_k = (slices_of(cu_seqlens_q, max_seqlen_q, batch_size), slices_of(cu_seqlens_k, max_seqlen_k, batch_size))
    assert rows[-1].stop == len(q)
    if block_table is None:
        assert k.shape == v.shape == (of_k[-1].stop, *k.shape[1:])
        assert all(t.stride(-1) == 1 for t in (q, k, v))
    else:
        check_paged_inputs(q, k, v, block_table, batch_size)
    out = torch.empty_like(q)
    for i, (own, seen) in enumerate(zip(rows, of_k, strict=True)):
        seq_len = seen.stop - seen.start
        assert 1 <= own.stop - own.start <= seq_len
        if block_table is None:
            keys, values = k[seen], v[seen]
        else:
            keys, values = gather(k, block_table[i], seq_len), gather(v, block_table[i], seq_len)
        out[own] = stand_in_attend(q[own], keys, values, **masking)
    return out


def flash_attn_3_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q=None, max_seqlen_q=None, **masking
):
    batch_size = len(cache_seqlens)
    check_paged_inputs(q, k_cache, v_cache, page_table, batch_size, block_size_multiple=1)
    check_lengths(cache_seqlens, count=batch_size)
    if cu_seqlens_q is None:
        assert max_seqlen_q is None
        assert q.shape[0] == batch_size
        parts = range(batch_size)
    else:
        parts = slices_of(cu_seqlens_q, max_seqlen_q, batch_size)
        assert parts[-1].stop == len(q)
    out = torch.empty_like(q)
    for i, (seq_len, part) in enumerate(zip(cache_seqlens.tolist(), parts, strict=True)):
        assert 1 <= len(q[part]) <= seq_len
        keys, values = gather(k_cache, page_table[i], seq_len), gather(v_cache, page_table[i], seq_len)
        out[part] = stand_in_attend(q[part], keys, values, **masking)
    return out


def install(monkeypatch, name, functions):
    """A module that `import` finds; `calls` names the functions that were called, `outputs` is what they returned."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.calls, module.outputs = [], []
    for function_name, function in functions.items():

        def noted(*args, function_name=function_name, function=function, **kwargs):
            module.calls.append(function_name)
            module.outputs.append(function(*args, **kwargs))
            return module.outputs[-1]

        setattr(module, function_name, noted)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def set_capability(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


DECODES, CHUNKS = "flash_attn_with_kvcache", "flash_attn_varlen_func"


@pytest.fixture
def flash_attn(monkeypatch):
    """Only version 2."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    return install(monkeypatch, "flash_attn", {DECODES: flash_attn_with_kvcache, CHUNKS: flash_attn_varlen_func})


@pytest.fixture
def flash_attn_3(monkeypatch):
    """Only version 3, on Hopper."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    set_capability(monkeypatch, (9, 0))
    return install(monkeypatch, "flash_attn_interface", {DECODES: flash_attn_3_with_kvcache})


def test_version_2_gathers_contiguous_rows(flash_attn, monkeypatch):
    """K and V of a layer are far apart in the cache of all layers."""
    gathered, select = [], torch.Tensor.index_select
    monkeypatch.setattr(torch.Tensor, "index_select", lambda x, *to: gathered.append((x, *to)) or select(x, *to))
    batch = warm_up.null_batch([3, 2], [3, 2], False, 1, None).metadata
    cache = torch.zeros(2, 3, 1, 256, 2, 32)  # of three layers
    FlashAttention(4, 2, 32, 256).attend(torch.zeros(5, 4, 32), cache[:, 1], batch)
    assert [(rows.is_contiguous(), dim, len(slots)) for rows, dim, slots in gathered] == [(True, 0, 5)] * 2


@pytest.mark.parametrize(("options", "num_programs"), [(PLAIN, 3 * 2), (replace(PLAIN, window=7), 3 * 4)])
def test_version_2_splits_by_the_width_of_the_tables(flash_attn, monkeypatch, options, num_programs):
    """What decides is known when a graph is recorded. With a window, heads of a group are programs of their own."""
    asked = []
    monkeypatch.setattr(flash_backend, "flash_attn_splits", lambda *shape: asked.append(shape[:3]) or 9)
    monkeypatch.setattr(flash_attn, DECODES, lambda q, *_, num_splits, **__: asked.append(num_splits) or q)
    batch = warm_up.null_batch([1] * 3, [5] * 3, True, 6, None).metadata
    FlashAttention(4, 2, 32, 256).attend(torch.zeros(3, 4, 32), torch.zeros(2, 1, 256, 2, 32), batch, options)
    assert asked == [(num_programs, 6 * 256, 32), 9]


STEPS = {
    "one token": ([(0, 1)], [DECODES]),
    "decodes": ([(255, 1), (256, 1), (3, 1), (511, 1)], [DECODES]),
    "whole prompts": ([(0, 5), (0, 256), (0, 257)], [CHUNKS]),
    "later chunks": ([(5, 4), (255, 2), (256, 20), (300, 100)], [CHUNKS]),
    "mixed": ([(40, 1), (256, 1), (0, 30), (250, 7)], [DECODES, CHUNKS]),
}


VERSIONS = pytest.mark.parametrize("version", ["flash_attn", "flash_attn_3"])


@VERSIONS
@pytest.mark.parametrize(("lens", "calls"), STEPS.values(), ids=STEPS)
def test_steps_equal_the_reference(request, version, lens, calls):
    """Version 3 has one function for both. An output of one kind is the library's own, which nobody copies."""
    library = request.getfixturevalue(version)
    shapes = [(4, 4, 16, 256), (8, 1, 64, 256)]
    shapes += [(8, 1, 16, 1), (4, 2, 16, 24)] if version == "flash_attn_3" else []
    for i, shape in enumerate(shapes):
        library.calls.clear()
        library.outputs.clear()
        backend, dtype = FlashAttention(*shape), [torch.float32, torch.bfloat16][i % 2]
        step = Step(backend, lens, dtype=dtype)
        out = step.run(backend)
        check_close(out, step)
        assert library.calls == ([DECODES] * len(calls) if version == "flash_attn_3" else calls)
        is_library_s = out.untyped_storage().data_ptr() == library.outputs[0].untyped_storage().data_ptr()
        assert is_library_s == (len(calls) == 1)


@pytest.mark.parametrize(
    ("lens", "is_paged"),
    [
        ([(0, 5), (0, 256), (0, 257)], False),
        ([(40, 1), (0, 30)], False),  # a decode reads the cache by itself
        ([(0, 256), (7, 3)], True),
        ([(5, 4)], True),
    ],
)
def test_block_tables_are_given_only_where_a_chunk_has_a_prefix(flash_attn, monkeypatch, lens, is_paged):
    """The library's kernel for them is the slower one."""
    tables = []
    function = flash_attn.flash_attn_varlen_func
    monkeypatch.setattr(
        flash_attn, CHUNKS, lambda *args, **named: tables.append(named["block_table"]) or function(*args, **named)
    )
    step = Step(FlashAttention(4, 2, 16, 256), lens)
    check_close(step.run(FlashAttention(4, 2, 16, 256)), step)
    assert [table is not None for table in tables] == [is_paged]


@pytest.mark.parametrize(
    ("module", "name", "function"),
    [
        ("flash_attn", DECODES, flash_attn_with_kvcache),
        ("flash_attn", CHUNKS, flash_attn_varlen_func),
        ("flash_attn_interface", DECODES, flash_attn_3_with_kvcache),
    ],
)
def test_stand_in_has_the_signatures_of_the_library(module, name, function):
    real = inspect.signature(getattr(pytest.importorskip(module), name)).parameters
    named = {*inspect.signature(function).parameters, *inspect.signature(stand_in_attend).parameters}
    assert named - {"masking"} <= {"q", "k", "v", *real}


@VERSIONS
def test_windows_and_soft_caps_are_arguments_of_the_library(request, version):
    request.getfixturevalue(version)
    for options in OPTIONS.values():
        backend = FlashAttention(4, 2, 16, 256)
        step = Step(backend, [(40, 1), (256, 1), (0, 30), (250, 7), (600, 3)], options=options)
        check_close(step.run(backend), step)
        assert FlashAttention.why_not_options(options, CPU, torch.bfloat16, 16) is None


@pytest.mark.parametrize("options", [OPTIONS["window"], OPTIONS["soft-cap"]], ids=["window", "soft-cap"])
@VERSIONS
def test_a_build_without_windows_or_soft_caps_is_passed_by(monkeypatch, request, version, options):
    """One that ignores them, as their switches in C++ do; one that refuses them; one that has no such arguments."""
    library = request.getfixturevalue(version)
    for name in [name for name in (DECODES, CHUNKS) if hasattr(library, name)]:
        function = getattr(library, name)

        def ignores(*args, function=function, window_size=None, softcap=None, **kwargs):
            return function(*args, **kwargs)

        monkeypatch.setattr(library, name, ignores)
    assert "built without that" in FlashAttention.why_not_options(options, CPU, torch.float32, 16)
    for failure in (RuntimeError("head size 16 is not compiled"), TypeError("unexpected argument 'softcap'")):

        def refuses(*args, failure=failure, **kwargs):
            raise failure

        for name in (DECODES, CHUNKS):
            monkeypatch.setattr(library, name, refuses, raising=False)
        reason = FlashAttention.why_not_options(options, CPU, torch.float32, 16)
        assert str(failure) in reason
        assert "cannot compute" in reason
    backend_class, line = select_backend("auto", CPU, torch.float32, 16, None, "auto", [options])
    is_served = (
        backend_class is TorchAttention or backend_class.why_not_options(options, CPU, torch.float32, 16) is None
    )
    assert is_served, line


@VERSIONS
def test_a_build_without_a_head_dim_is_passed_by(monkeypatch, request, version):
    library = request.getfixturevalue(version)
    assert FlashAttention.why_not_options(PLAIN, CPU, torch.float32, 96) is None

    def refuses(*args, **kwargs):
        raise RuntimeError("This build has no headdim 96")

    for name in (DECODES, CHUNKS):
        monkeypatch.setattr(library, name, refuses, raising=False)
    assert "head_dim of 96: This build" in FlashAttention.why_not_options(PLAIN, CPU, torch.float32, 96)
    assert FlashAttention.why_not_options(PLAIN, CPU, torch.float32, 128) is None  # every build has it


# ---- what is chosen, and what is refused

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def choose(name, device, dtype, head_dim=64, block_size=None):
    return select_backend(name, device, dtype, head_dim, block_size)[0]


def test_what_is_chosen_where_it_is_installed(flash_attn):
    for dtype in (torch.bfloat16, torch.float16):
        assert choose("flash_attn", CUDA, dtype) is choose("auto", CUDA, dtype) is FlashAttention
        assert choose("torch", CUDA, dtype, 20, 1) is choose("torch", CPU, dtype, 20, 1) is TorchAttention
    for block_size in (FlashAttention.default_block_size, 512):
        assert choose("flash_attn", CUDA, torch.bfloat16, 256, block_size) is FlashAttention


def test_auto_says_why_it_passes_the_better_ones_by(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    backend_class, line = select_backend("auto", CPU, torch.float16, 64, None)
    assert backend_class is TorchAttention
    assert line.startswith("attention_backend=torch; not flash_attn: it needs a CUDA device")
    assert "not cpu: " in line


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": CPU}, "needs a CUDA device and float16 or bfloat16, got cpu and torch.bfloat16"),
        ({"dtype": torch.float32}, "needs a CUDA device and float16 or bfloat16, got cuda:0 and torch.float32"),
        ({"head_dim": 20}, "head_dim must be a multiple of 8 up to 256, it is 20"),
        ({"head_dim": 264}, "head_dim must be a multiple of 8 up to 256, it is 264"),
        ({"block_size": 384}, "block_size must be a multiple of 256, got 384"),
    ],
)
def test_flash_attn_is_refused_where_it_cannot_run(flash_attn, changed, message):
    wanted = {"name": "flash_attn", "device": CUDA, "dtype": torch.bfloat16, **changed}
    with pytest.raises(ValueError, match=f"attention_backend='flash_attn' cannot be used .*{message}"):
        choose(**wanted)
    assert choose(**{**wanted, "name": "auto"}) is not FlashAttention


@pytest.mark.parametrize(
    ("capability", "instructions"),
    [((9, 0), "flash-attn 3"), ((8, 0), "flash-attn 2"), ((8, 9), "flash-attn 2"), ((10, 0), "flash-attn 2")],
)
def test_version_3_is_taken_on_hopper_alone(flash_attn, flash_attn_3, monkeypatch, capability, instructions):
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    set_capability(monkeypatch, capability)
    backend = FlashAttention(4, 2, 16, 256)
    assert backend.instructions == instructions
    step = Step(backend, [(3, 1)])
    backend.attend(step.q, step.layer_cache, step.batch.metadata)
    assert (bool(flash_attn.calls), bool(flash_attn_3.calls)) == (instructions[-1] == "2", instructions[-1] == "3")
    is_taken = FlashAttention.why_not(CUDA, torch.bfloat16, 64, 16) is None
    assert is_taken == (instructions == "flash-attn 3")


def test_version_3_takes_any_block_size_on_hopper_only(flash_attn_3, monkeypatch):
    for block_size in (None, 1, 24, 256):
        assert choose("auto", CUDA, torch.bfloat16, 64, block_size) is FlashAttention
    set_capability(monkeypatch, (8, 0))
    with pytest.raises(ValueError, match="needs the package flash-attn: pip install"):
        choose("flash_attn", CUDA, torch.bfloat16)


def test_version_2_is_refused_on_older_gpus(flash_attn, monkeypatch):
    set_capability(monkeypatch, (7, 5))
    with pytest.raises(ValueError, match=r"capability 8.0 or later \(Ampere\), this one has 7.5"):
        choose("flash_attn", CUDA, torch.bfloat16)


def test_flash_attn_is_refused_where_it_is_not_installed(monkeypatch):
    for version in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, version, None)
    with pytest.raises(ValueError, match="needs the package flash-attn"):
        choose("flash_attn", CUDA, torch.bfloat16)


def test_a_flash_attn_that_cannot_be_imported_is_passed_by(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with pytest.raises(ValueError, match="the package flash-attn cannot be imported: undefined symbol"):
        choose("flash_attn", CUDA, torch.bfloat16)
    assert choose("auto", CUDA, torch.bfloat16) is not FlashAttention


def test_a_version_3_that_cannot_be_imported_is_passed_by(flash_attn, monkeypatch, tmp_path, caplog):
    set_capability(monkeypatch, (9, 0))
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    assert choose("auto", CUDA, torch.bfloat16) is FlashAttention
    with caplog.at_level("INFO"):
        assert FlashAttention(4, 2, 16, 256).instructions == "flash-attn 2"
    assert "flash-attn 2, not 3: it cannot be imported: undefined symbol" in caplog.text
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert choose("auto", CUDA, torch.bfloat16) is not FlashAttention
