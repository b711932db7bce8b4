"""The compiled Gated DeltaNet against the definition in `models/gated_delta.py`, and itself in other chunks."""

import pytest
import torch

from nanovllm_extras.kernels.cpu.cpu_gated_delta import CpuGatedDeltaNet, fuse_gated_delta
from nanovllm_extras.kernels.cpu.cpu_layers import replace_layers
from nanovllm_extras.models.gated_delta import GatedDeltaNet
from nanovllm_extras.models.qwen3_5 import Qwen3_5Config
from tests.extras.kernels.test_cpu_kernels import randn
from tests.extras.models.test_gated_delta import metadata_of

HIDDEN, NUM_SLOTS = 64, 5
SIZES = [(2, 4, 16, 32, 4), (1, 1, 32, 48, 2), (3, 3, 16, 16, 6)]  # heads of keys and values, their dims, width
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 2**-5, "atol": 2**-4}}

pytestmark = pytest.mark.usefixtures("needs_a_compiler")


def make_layers(sizes, dtype):
    """(the definition, its fast version)"""
    shape = {"vocab_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
             "num_key_value_heads": 1, "head_dim": 1}  # fmt: skip
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    linear = {f"linear_{name}": size for name, size in zip(names, sizes, strict=True)}
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = GatedDeltaNet(Qwen3_5Config(**shape, **linear, hidden_size=HIDDEN)).to(dtype).requires_grad_(False)
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.15 if "proj" in name else 0.5))
        layer.A_log.copy_(torch.empty_like(layer.A_log).uniform_(0.002, 0.4).log())  # states that remember
        pair.append(torch.nn.ModuleDict({"mixer": layer}))
    replace_layers(pair[1], dtype)
    fuse_gated_delta(pair[1], dtype)
    return pair[0]["mixer"], pair[1]["mixer"]


def make_pools(sizes, dtype):
    num_key_heads, num_heads, key_dim, value_dim, width = sizes
    conv = randn(NUM_SLOTS + 1, width - 1, 2 * num_key_heads * key_dim + num_heads * value_dim, dtype=dtype)
    return conv, randn(NUM_SLOTS + 1, num_heads, key_dim, value_dim, dtype=torch.float32, seed=2)


@pytest.mark.parametrize("sizes", SIZES)
def test_decodes_and_chunks_equal_the_definition(processor_without_tiles, dtype, sizes):
    """Decodes, a chunk longer than a tile, and sequences that begin. Each chunk is (slot, start, number of tokens)."""
    layer, fast = make_layers(sizes, dtype)
    assert isinstance(fast, CpuGatedDeltaNet)
    pools, others = make_pools(sizes, dtype), make_pools(sizes, dtype)
    for chunks in ([(3, 9, 1), (1, 0, 1)], [(3, 10, 1), (5, 7, 40), (2, 0, 3)], [(2, 3, 2)]):
        x = randn(sum(n for *_, n in chunks), HIDDEN, dtype=dtype)
        step = metadata_of(chunks, sum(n == 1 for *_, n in chunks))
        expected = layer(x, *pools, step)
        torch.testing.assert_close(fast(x, *others, step), expected, **TOLERANCE[dtype])
        for pool, other in zip(pools, others, strict=True):
            torch.testing.assert_close(other, pool, **TOLERANCE[dtype])


def test_a_token_has_the_same_bits_in_every_chunk_and_batch(processor_without_tiles, dtype):
    sizes = SIZES[0]
    _, fast = make_layers(sizes, dtype)
    x, pools = randn(77, HIDDEN, dtype=dtype), make_pools(sizes, dtype)
    whole = fast(x, *pools, metadata_of([(4, 0, 77)], 0))
    others, done = make_pools(sizes, dtype), 0
    for n in (2, 33, 1, 1, 40):
        other = randn(5, HIDDEN, dtype=dtype, seed=n)
        out = fast(torch.cat((x[done : done + n], other)), *others, metadata_of([(4, done, n), (1, 3, 5)], 0))
        assert torch.equal(out[:n], whole[done : done + n])
        done += n
    assert all(torch.equal(one[4], other[4]) for one, other in zip(pools, others, strict=True))


def test_drafts_have_the_bits_of_decodes(processor_without_tiles, dtype):
    """Slots 1 and 4 have drafts, which write to 2 and 3, and to 5. Each state and output is that of single decodes."""
    sizes = SIZES[2]
    _, fast = make_layers(sizes, dtype)
    drafted, plain = make_pools(sizes, dtype), make_pools(sizes, dtype)
    x, chunks = randn(6, HIDDEN, dtype=dtype), [(1, 5, 1), (2, 6, 1), (3, 7, 1), (0, 3, 1), (4, 8, 1), (5, 9, 1)]
    out = fast(x, *drafted, metadata_of(chunks, 6, sources=[1, 1, 2, 0, 4, 4]))
    for slot, rows in ((1, range(3)), (0, [3]), (4, [4, 5])):
        for row in rows:
            assert torch.equal(out[row], fast(x[row : row + 1], *plain, metadata_of([(slot, 9, 1)], 1))[0])
            assert all(torch.equal(one[chunks[row][0]], other[slot]) for one, other in zip(drafted, plain, strict=True))


def test_a_weak_gate_and_a_strong_decay_stay_finite(dtype):
    """softplus is the identity above 20, and a decay of e^-90 forgets everything."""
    layer, fast = make_layers(SIZES[0], dtype)
    for one in (layer, fast):
        one.in_proj = Extreme(one.in_proj)
    pools, others = make_pools(SIZES[0], dtype), make_pools(SIZES[0], dtype)
    x, step = randn(12, HIDDEN, dtype=dtype), metadata_of([(1, 4, 12)], 0)
    torch.testing.assert_close(fast(x, *others, step), layer(x, *pools, step), **TOLERANCE[dtype])
    assert all(torch.isfinite(one).all() for one in others)


class Extreme(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        qkv, z, b, a = self.layer(x)
        for gate, row in ((b, -100.0), (a, 1000.0)):
            gate[3] = row
            gate[5] = -row
        z[7] = -200.0
        return qkv, z, b, a


@pytest.mark.parametrize("sizes", [(2, 4, 16, 24, 4), (2, 2, 24, 16, 4)])
def test_heads_that_are_not_whole_vectors_run_in_pytorch(sizes):
    layer, other = make_layers(sizes, torch.float32)
    assert type(other) is GatedDeltaNet
    x, step = randn(9, HIDDEN, dtype=torch.float32), metadata_of([(1, 0, 9)], 0)
    outs = [one(x, *make_pools(sizes, torch.float32), step) for one in (layer, other)]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
