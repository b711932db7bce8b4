"""Gated DeltaNet in Triton: each kernel against float64, the layer against its definition, and a whole model token for
token.

Where they run, and with what in memory: `on_device.py`.

Broken by hand, and seen here: drafts that read the tail of their own slot, a chain that ends after its first draft, a
chain that goes on with the next decode, drafts that are also computed by their own programs, and the states of drafts
in the slot of their decode.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from benchmarks import kernel_states
from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.kernels.cuda.cuda_decoder_layer import replace_layers
from nanovllm_extras.kernels.cuda.cuda_gated_delta import TritonGatedDeltaNet
from nanovllm_extras.kernels.cuda.delta_kernels import causal_conv, gated_delta, gated_norm
from nanovllm_extras.models.gated_delta import CausalConv, GatedDeltaNet, GatedRMSNorm, advance, unit_length
from nanovllm_extras.self_check.state_check import metadata_of
from tests.conftest import every_second
from tests.extras.kernels.on_device import DEVICE, DTYPES, IS_INTERPRETED, every_second_case, only_on_gpu, randn
from tests.extras.models.hybrid_checkpoints import QWEN35, HybridCheckpoints

TOLERANCES = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
HIDDEN, NUM_SLOTS = 48, 5
SIZES = [(2, 4, 16, 32, 4), (1, 1, 24, 20, 2), (3, 3, 16, 8, 6)]  # heads of keys and values, their dims, width
STEPS = [  # (slot, computed tokens, new tokens) of each sequence
    [(3, 9, 1), (1, 0, 1)],
    [(3, 10, 1), (5, 7, 21), (2, 0, 3)],
    [(2, 3, 2), (4, 0, 9)],
    [(3, 31, 1), (1, 1, 37), (5, 28, 3), (4, 9, 32), (2, 0, 70)],  # two tiles, one, and three
]

pytestmark = [] if IS_INTERPRETED else pytest.mark.gpu


def check(out, expected, dtype, times=1):
    tolerance = times * TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), expected.double(), rtol=tolerance, atol=tolerance)


# ---- single kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_channels", "width"), every_second_case([(300, 4), (40, 2), (17, 9)]))
@pytest.mark.sparse
def test_the_convolution_equals_float64(num_channels, width, dtype):
    """Chunks shorter and longer than a tile, and than the tail; sequences that begin do not see what their slot has."""
    conv = CausalConv(num_channels, width).to(DEVICE, torch.float64).requires_grad_(False)
    weight = randn(num_channels, 1, width, dtype=dtype)
    conv.weight.copy_(weight)
    tails = randn(NUM_SLOTS + 1, width - 1, num_channels, dtype=dtype, seed=1)
    for i, chunks in enumerate(STEPS):
        n = sum(new for *_, new in chunks)
        x = randn(n, num_channels + 8, dtype=dtype, seed=i)[:, :num_channels]
        before, metadata = tails.clone(), metadata_of(chunks, DEVICE)
        out = causal_conv(x, tails, weight, metadata)
        start, untouched = 0, set(range(NUM_SLOTS + 1))
        for slot, computed, new in chunks:
            tail = before[slot] if computed else torch.zeros_like(before[slot])
            rows = slice(start, start + new)
            expected, kept = conv(x[None, rows].double(), tail[None].double())
            check(out[rows], F.silu(expected[0]), dtype)
            assert torch.equal(tails[slot].double(), kept[0])
            start += new
            untouched.remove(slot)
        assert torch.equal(tails[list(untouched)], before[list(untouched)])


def make_tokens(sizes, n, dtype, seed=0):
    """What the recurrence gets of n tokens, and the layer's parameters of each head."""
    num_key_heads, num_heads, key_dim, value_dim, _ = sizes
    num_channels = 2 * num_key_heads * key_dim + num_heads * value_dim
    gates = randn(n, 2 * num_heads + 8, dtype=dtype, seed=seed + 1)
    return SimpleNamespace(
        qkv=randn(n, num_channels, dtype=dtype, seed=seed),
        b=gates[:, :num_heads],
        a=gates[:, num_heads : 2 * num_heads],
        a_log=torch.linspace(-6, 0, num_heads).to(DEVICE, dtype),
        dt_bias=torch.linspace(-1, 2, num_heads).to(DEVICE, dtype),
    )


def advance_exactly(tokens, state, sizes):
    """Advance one sequence token by token in float64. Returns the outputs, and the new state."""
    num_key_heads, num_heads, key_dim, value_dim, _ = sizes
    q, k, v = tokens.qkv.double().split((num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim), 1)
    group, outputs = num_heads // num_key_heads, []
    q, k = (unit_length(t.unflatten(1, (-1, key_dim))).repeat_interleave(group, 1) for t in (q, k))
    beta = tokens.b.double().sigmoid()
    log_decay = -tokens.a_log.double().exp() * F.softplus(tokens.a.double() + tokens.dt_bias.double())
    rows = (q * key_dim**-0.5, k, v.unflatten(1, (-1, value_dim)), log_decay, beta)
    for t in range(len(tokens.qkv)):
        out, state = advance(state[None], *(row[t : t + 1] for row in rows))
        outputs.append(out[0])
        state = state[0]
    return torch.stack(outputs), state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", every_second(SIZES[:2]))
@pytest.mark.sparse
def test_the_recurrence_equals_float64(sizes, dtype):
    num_key_heads, num_heads, key_dim, value_dim, _ = sizes
    states = randn(NUM_SLOTS + 1, num_heads, key_dim, value_dim, seed=2)
    for i, chunks in enumerate(STEPS):
        n = sum(new for *_, new in chunks)
        tokens, before = make_tokens(sizes, n, dtype, seed=i), states.clone()
        gates = (tokens.b, tokens.a, tokens.a_log, tokens.dt_bias)
        out = gated_delta(tokens.qkv, *gates, states, num_key_heads, metadata_of(chunks, DEVICE))
        start, untouched = 0, set(range(NUM_SLOTS + 1))
        for slot, computed, new in chunks:
            rows, state = slice(start, start + new), before[slot].double() * bool(computed)
            of_chunk = SimpleNamespace(**vars(tokens))
            of_chunk.qkv, of_chunk.b, of_chunk.a = tokens.qkv[rows], tokens.b[rows], tokens.a[rows]
            expected, last = advance_exactly(of_chunk, state, sizes)
            check(out[rows], expected, dtype)
            check(states[slot], last, dtype)
            start += new
            untouched.remove(slot)
        assert torch.equal(states[list(untouched)], before[list(untouched)])


@pytest.mark.slow
@pytest.mark.parametrize("decay", [-9.0, 1.0], ids=["kept", "usual"])
def test_keys_that_repeat_are_corrected_exactly(decay):
    """Where all keys are equal, the powers of a tile's matrix are larger than 10^8, and cancel each other."""
    sizes = (1, 1, 16, 16, 4)
    tokens = make_tokens(sizes, 64, torch.float32)
    tokens.qkv[:, :32] = tokens.qkv[:1, :32]
    tokens.b.fill_(20.0)  # a strength of one
    tokens.a_log.fill_(decay)
    gates, states = (tokens.b, tokens.a, tokens.a_log, tokens.dt_bias), randn(2, 1, 16, 16, seed=2)
    expected, last = advance_exactly(tokens, states[1].double(), sizes)
    out = gated_delta(tokens.qkv, *gates, states, 1, metadata_of([(1, 5, 64)], DEVICE))
    check(out, expected, torch.float32)
    check(states[1], last, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "size"), [(4, 32), (1, 128), (3, 24)])
@pytest.mark.sparse
def test_the_gated_norm_equals_float64_and_rounds_as_the_layer_does(num_heads, size, dtype):
    norm = GatedRMSNorm(size, 1e-6).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.copy_(randn(size, dtype=dtype, seed=1) + 1)
    x, gate = randn(7, num_heads, size, dtype=dtype), 4 * randn(7, num_heads * size + 8, dtype=dtype)[:, :-8]
    gate[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    heads = gate.unflatten(1, (-1, size))
    x64 = x.double()
    normed = x64 / (x64.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    like_layer = norm(x, heads)
    out = gated_norm(x, gate, norm.weight, norm.eps)
    assert out is x
    check(out, normed * F.silu(heads.double()), dtype)
    if dtype != torch.float32:
        assert (out == like_layer).float().mean() >= 0.99


# ---- the layer


def make_layers(sizes, dtype):
    """(the definition, its fast version, which shares its weights)"""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    linear = {f"linear_{name}": size for name, size in zip(names, sizes, strict=True)}
    layer = GatedDeltaNet(SimpleNamespace(hidden_size=HIDDEN, rms_norm_eps=1e-5, **linear)).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        scale = 0.15 if "proj" in name else 0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + ("norm" in name))
    layer.A_log.uniform_(-6, -1, generator=generator)  # states that remember
    layer = layer.to(DEVICE, dtype)
    holder = torch.nn.ModuleDict({"mixer": layer})
    replace_layers(holder, None, 64)
    return layer, holder["mixer"]


def make_pools(sizes, dtype, num_slots=NUM_SLOTS):
    num_key_heads, num_heads, key_dim, value_dim, width = sizes
    conv = randn(num_slots + 1, width - 1, 2 * num_key_heads * key_dim + num_heads * value_dim, dtype=dtype)
    return conv, randn(num_slots + 1, num_heads, key_dim, value_dim, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", every_second(SIZES[:2]))
@pytest.mark.sparse
def test_the_fast_version_equals_the_layer(sizes, dtype):
    layer, fast = make_layers(sizes, dtype)
    assert type(fast) is TritonGatedDeltaNet
    assert {one.data_ptr() for one in fast.parameters()} == {one.data_ptr() for one in layer.parameters()}
    pools, others = make_pools(sizes, dtype), make_pools(sizes, dtype)
    for i, chunks in enumerate(STEPS):
        x = randn(sum(n for *_, n in chunks), HIDDEN, dtype=dtype, seed=i)
        metadata = metadata_of(chunks, DEVICE)
        check(fast(x, *others, metadata), layer(x, *pools, metadata), dtype)
        for pool, other in zip(pools, others, strict=True):
            check(other, pool, dtype)


def drafted_step(num_drafts, prompts):
    """Return the chunks of a step with drafts, and the slots that they read.

    num_drafts: of each decode; prompts: (computed tokens, new tokens) of each chunk
    """
    chunks, sources = [], []
    for i, count in enumerate(num_drafts):
        for j in range(count + 1):
            sources.append(len(chunks) + (j == 0))
            chunks.append((len(chunks) + 1, i % 3 + j, 1))  # some sequences begin
    for computed, new in prompts:
        chunks.append((len(chunks) + 1, computed, new))
        sources.append(len(chunks))
    return chunks, sources


def shuffle_slots(chunks, sources, seed):
    """Give each slot another number. One of them is not used."""
    order = [0, *(torch.randperm(len(chunks) + 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()]
    return [(order[slot], *rest) for slot, *rest in chunks], [order[slot] for slot in sources]


@contextmanager
def independent_programs():
    """Check that no program of a launch reads or writes what another one writes: on a GPU they run at the same time."""
    if not IS_INTERPRETED:
        yield
        return
    builder, launches = interpreter.interpreter_builder, []
    set_grid_dim, load, store = builder.set_grid_dim, builder.create_masked_load, builder.create_masked_store

    def note(kind, pointers, mask):  # launches[-1]: (reads, writes), the programs of each address
        for address in pointers.data[mask.data].tolist():
            launches[-1][kind].setdefault(address, set()).add(builder.grid_idx)

    def begin(*sizes):
        launches.append(({}, {}))
        set_grid_dim(*sizes)

    def note_load(pointers, mask, *rest):
        note(0, pointers, mask)
        return load(pointers, mask, *rest)

    def note_store(pointers, value, mask, *rest):
        note(1, pointers, mask)
        return store(pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_dim", begin)
        patch.setattr(builder, "create_masked_load", note_load)
        patch.setattr(builder, "create_masked_store", note_store)
        yield
    assert any(writes for _, writes in launches)
    for reads, writes in launches:
        assert all(len(programs | reads.get(address, programs)) == 1 for address, programs in writes.items())


def check_drafts(sizes, num_drafts, prompts, dtype, seed=0):
    """Compare a step with the definition, which computes decodes with their drafts and prompts one after the other."""
    layer, fast = make_layers(sizes, dtype)
    chunks, sources = shuffle_slots(*drafted_step(num_drafts, prompts), seed)
    pools = make_pools(sizes, dtype, num_slots=len(chunks) + 1)
    others = [pool.clone() for pool in pools]
    nd = len(chunks) - len(prompts)
    x = randn(sum(n for *_, n in chunks), HIDDEN, dtype=dtype, seed=seed)
    expected = [layer(x[:nd], *pools, metadata_of(chunks[:nd], DEVICE, sources[:nd]))] if nd else []
    if prompts:
        expected.append(layer(x[nd:], *pools, metadata_of(chunks[nd:], DEVICE)))
    with independent_programs():
        out = fast(x, *others, metadata_of(chunks, DEVICE, sources))
    check(out, torch.cat(expected), dtype)
    for pool, other in zip(pools, others, strict=True):
        check(other, pool, dtype)


@pytest.mark.parametrize("dtype", every_second(DTYPES))
def test_drafts_read_the_state_of_the_row_before(dtype):
    check_drafts(SIZES[1], [2, 0, 1], [], dtype)
    check_drafts(SIZES[1], [0, 3], [(4, 2)], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES[::2])
@given(
    num_drafts=st.lists(st.integers(0, 9), max_size=4),
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(2, 37)), max_size=2),
    seed=st.integers(0, 1000),
)
@settings(max_examples=8, deadline=None)
def test_chains_of_drafts_equal_the_layer(sizes, num_drafts, prompts, seed):
    """Chains longer than a tile and than the tail, between plain decodes, and before chunks of prompts."""
    if num_drafts or prompts:
        check_drafts(sizes, num_drafts, prompts, torch.float32, seed)


@pytest.mark.parametrize("dtype", every_second(DTYPES))
def test_a_token_has_the_same_bits_in_every_chunk_and_batch(dtype):
    sizes = SIZES[0]
    layer, fast = make_layers(sizes, dtype)
    fast.in_proj = by_rows(layer.in_proj)  # a product of PyTorch's may depend on the number of rows
    fast.out_proj = torch.nn.Identity()
    x, pools = randn(30, HIDDEN, dtype=dtype), make_pools(sizes, dtype)
    whole = fast(x, *pools, metadata_of([(4, 0, 30)], DEVICE))
    others, done = make_pools(sizes, dtype), 0
    for n in (2, 13, 1, 1, 13):
        other = randn(5, HIDDEN, dtype=dtype, seed=n)
        metadata = metadata_of([(4, done, n), (1, 3, 5)], DEVICE)
        out = fast(torch.cat((x[done : done + n], other)), *others, metadata)
        assert torch.equal(out[:n], whole[done : done + n])
        done += n
    assert all(torch.equal(one[4], other[4]) for one, other in zip(pools, others, strict=True))


def by_rows(linear):
    def forward(x):
        columns = zip(*(linear(row[None]) for row in x), strict=True)
        return torch.cat([torch.cat(rows) for rows in columns], dim=1).split(tuple(linear.parts.values()), dim=1)

    module = torch.nn.Module()
    module.forward = forward
    return module


@pytest.mark.parametrize("dtype", every_second(DTYPES))
def test_a_weak_gate_and_a_strong_decay_stay_finite(dtype):
    """softplus is the identity above 20, and a decay of e^-90 forgets everything."""
    layer, fast = make_layers(SIZES[0], dtype)
    parts = layer.in_proj

    def extreme(x):
        qkv, z, b, a = parts(x)
        for gate, row in ((b, -100.0), (a, 1000.0)):
            gate[3], gate[5] = row, -row
        qkv[4], z[7] = 0.0, -200.0
        return qkv, z, b, a

    layer.in_proj = fast.in_proj = torch.nn.Module()
    layer.in_proj.forward = extreme
    pools, others = make_pools(SIZES[0], dtype), make_pools(SIZES[0], dtype)
    x, metadata = randn(12, HIDDEN, dtype=dtype), metadata_of([(1, 4, 12)], DEVICE)
    check(fast(x, *others, metadata), layer(x, *pools, metadata), dtype, times=5)  # PyTorch's has larger errors here
    assert all(torch.isfinite(one).all() for one in others)


def test_padding_reaches_only_the_null_slot():
    _, fast = make_layers(SIZES[0], torch.float32)
    pools = [torch.zeros_like(pool) for pool in make_pools(SIZES[0], torch.float32)]
    fast(randn(3, HIDDEN), *pools, metadata_of([(2, 5, 1), (0, 3, 1), (0, 3, 1)], DEVICE))
    for pool in pools:
        assert pool[2].any()
        assert not pool[[1, 3, 4, 5]].any()


def test_heads_that_no_thread_can_hold_are_left_alone():
    layer, other = make_layers((1, 1, 136, 16, 4), torch.float32)
    assert other is layer


# ---- the engine


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    pytest.importorskip("transformers.models.qwen3_5")
    return HybridCheckpoints(tmp_path_factory.mktemp("hybrids"))


@pytest.mark.slow
def test_tokens_are_those_of_transformers(hybrids):
    """Chunks, mixed steps, prefix hits by snapshots, and preemption."""
    options = {"num_kv_blocks": 6, "max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 80}
    folder, _ = hybrids.make()
    llm = LLM(folder, dtype="float32", device=DEVICE.type, attention_backend="triton", block_size=16, **options)
    kinds = [type(getattr(layer, "linear_attn", None)) for layer in llm.engine.runner.model.model.layers]
    types = QWEN35["layer_types"]
    assert kinds == [TritonGatedDeltaNet if kind == "linear_attention" else type(None) for kind in types]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    chosen = [4, 3, 3]
    outputs = llm.generate([hybrids.prompts()[i] for i in chosen], params, use_tqdm=False)
    for i, output in zip(chosen, outputs, strict=True):
        token_ids, logprobs = hybrids.greedy()[i]
        assert output.outputs[0].token_ids == token_ids[:4]
        assert output.outputs[0].cumulative_logprob == pytest.approx(sum(logprobs[:4]), abs=1e-3)
    assert llm.get_stats().num_preemptions > 0
    assert llm.get_stats().prefix_cache_hit_tokens > 0


# ---- the benchmark

SMALL = kernel_states.StateSizes(num_key_heads=1, num_heads=2, key_dim=16, value_dim=16)
SMALL_WORK = {"2 decodes": [1, 1], "1 x 20": [20]}


@pytest.mark.slow
def test_benchmark_checks_and_measures():
    """Its own code, on what the interpreter can bear; the figures mean nothing here."""

    def call_once(function):
        function()
        return 1e-6

    rows = list(kernel_states.measure_states(SMALL, torch.float16, DEVICE, call_once, 1e9, SMALL_WORK))
    assert [row["work"] for row in rows] == list(SMALL_WORK)
    assert {row[name] for row in rows for name in ("us", "conv us", "delta us", "norm us")} == {1.0}
    num_bytes = 2 * 2 * 2 * 16 * 16 * 4 + (64 + 2 * 2 + 2 * 16) * 2 * 2  # two states, read and written; two tokens
    assert rows[0]["GB/s"] == round(num_bytes / 1e-6 / 1e9, 1)
    assert rows[0]["eager us"] == 1.0


# ---- on a GPU: real sizes, no host waits


@only_on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [16, 32])
def test_real_sizes_equal_the_layer(num_heads, dtype):
    sizes = (16, num_heads, 128, 128, 4)
    layer, fast = make_layers(sizes, dtype)
    pools, others = make_pools(sizes, dtype), make_pools(sizes, dtype)
    decodes = [(1, 300, 1), (2, 70, 1)]
    for chunks, sources in (
        ([(1, 0, 300), (2, 0, 70)], None),
        ([*decodes, (3, 0, 65), (4, 5, 2)], None),
        ([*decodes, (3, 71, 1), (4, 72, 1)], [1, 2, 2, 3]),
    ):
        x = randn(sum(n for *_, n in chunks), HIDDEN, dtype=dtype)
        metadata = metadata_of(chunks, DEVICE, sources)
        expected, out = layer(x, *pools, metadata), fast(x, *others, metadata)
        assert ((out - expected).norm(dim=-1) <= TOLERANCES[dtype] * expected.norm(dim=-1)).all()
        assert (others[1][1:5] - pools[1][1:5]).norm() <= TOLERANCES[dtype] * pools[1][1:5].norm()


@only_on_gpu
def test_the_host_waits_for_nothing():
    layer, fast = make_layers(SIZES[0], torch.float32)
    pools, chunks = make_pools(SIZES[0], torch.float32), [(1, 0, 1), (3, 1, 1), (2, 3, 9)]
    x, metadata = randn(11, HIDDEN), metadata_of(chunks, DEVICE, [1, 1, 2])
    fast(x, *pools, metadata)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast(x, *pools, metadata)
    finally:
        torch.cuda.set_sync_debug_mode("default")
