"""Gated DeltaNet: the definition token by token, its chunks, and the layer, against `transformers` and each other."""

import itertools

import pytest
import torch

from nanovllm.batch import offsets
from nanovllm_extras.execution.state_pool import slot_tensors
from nanovllm_extras.models.gated_delta import GatedDeltaNet, advance, advance_by_chunks
from nanovllm_extras.models.layer_inputs import StateMetadata
from nanovllm_extras.models.qwen3_5 import read_qwen3_5_config
from tests.extras.models.hybrid_checkpoints import make_config, set_weights_that_matter

HEADS, KEY_DIM, VALUE_DIM = 3, 8, 5


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")


def random_inputs(num_tokens, dtype=torch.float64, decay=1.0, seed=0):
    """A state, and q, k, v, log_decay, beta of each token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    state = normal(HEADS, KEY_DIM, VALUE_DIM)
    q, k = normal(num_tokens, HEADS, KEY_DIM), normal(num_tokens, HEADS, KEY_DIM)
    k = k / k.norm(dim=-1, keepdim=True)
    v, log_decay = normal(num_tokens, HEADS, VALUE_DIM), -decay * normal(num_tokens, HEADS).abs()
    return state, (q, k, v, log_decay, normal(num_tokens, HEADS).sigmoid())


def token_by_token(state, inputs):
    """The four lines of the definition, for one head and one token at a time."""
    q, k, v, log_decay, beta = inputs
    out, state = torch.empty_like(v), state.clone()
    for t, h in itertools.product(range(len(q)), range(HEADS)):
        s = state[h] * log_decay[t, h].exp()
        w = beta[t, h] * (v[t, h] - s.T @ k[t, h])
        state[h] = s + torch.outer(k[t, h], w)
        out[t, h] = state[h].T @ q[t, h]
    return out, state


@pytest.mark.parametrize(("num_tokens", "decay"), [(1, 1.0), (64, 0.0), (64, 60.0), (130, 1e-3), (130, 1.0)])
def test_chunks_are_the_definition(num_tokens, decay):
    """In float64. A decay of 60 for each token is e^-3000 over a chunk, and its inverse is infinite."""
    state, inputs = random_inputs(num_tokens, decay=decay)
    expected = token_by_token(state, inputs)
    for chunk_len in (1, 7, 64):
        torch.testing.assert_close(advance_by_chunks(state, *inputs, chunk_len), expected, rtol=1e-9, atol=1e-9)


def test_a_decode_is_the_definition():
    state, inputs = random_inputs(1)
    others = [random_inputs(1, seed=seed) for seed in (1, 2)]
    states = torch.stack([state, *(one for one, _ in others)])  # [3, HEADS, KEY_DIM, VALUE_DIM]
    rows = [torch.cat(parts) for parts in zip(inputs, *(one for _, one in others), strict=True)]
    out, new = advance(states, *rows)
    for i, (one, tensors) in enumerate([(state, inputs), *others]):
        torch.testing.assert_close((out[i : i + 1], new[i]), token_by_token(one, tensors))


# ---- the layer


def metadata_of(chunks, num_decodes, sources=None):
    """Return the metadata of a step; a layer without K and V reads nothing else.

    chunks: for each sequence (slot, start, number of new tokens); sources: the slots that are read, if others
    """
    slots, starts, lens = (torch.tensor(column) for column in zip(*chunks, strict=True))
    cu = torch.from_numpy(offsets(lens.numpy()))
    none = torch.empty(0)
    attention = (none, none, starts + lens, cu, cu, cu, num_decodes, 0, 0, 0)
    written = slots.tolist()
    return StateMetadata(*attention, is_first=starts == 0, **slot_tensors(written, sources or written))


@pytest.fixture(scope="module")
def layers(theirs):
    """(ours, theirs, whose weights are the same, the pools of states with four slots)"""
    torch.manual_seed(0)
    config = make_config()
    reference = theirs.Qwen3_5GatedDeltaNet(config, 0).eval()
    set_weights_that_matter(reference)
    layer = GatedDeltaNet(read_qwen3_5_config(config.to_dict()))
    weights = dict(reference.named_parameters())
    projections = [weights.pop(f"{name}.weight") for name in layer.in_proj.parts]
    layer.load_state_dict({**weights, "in_proj.weight": torch.cat(projections)})
    shape = read_qwen3_5_config(config.to_dict()).state_shape
    pools = torch.full((5, *shape.conv), torch.nan), torch.full((5, *shape.recurrent), torch.nan)
    return layer.requires_grad_(False), reference, pools


@torch.no_grad()
def test_the_layer_is_that_of_transformers_however_it_is_cut(layers):
    """Three sequences in one batch: chunks of different lengths, decodes, and one that starts while others go on."""
    layer, reference, pools = layers
    inputs = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (70, 23, 9)]
    expected = [reference(x[None])[0] for x in inputs]
    slots, done, found = (3, 1, 2), [0, 0, 0], [[], [], []]
    steps = [{0: 2}, {0: 65, 1: 5}, {1: 1, 0: 1}, {0: 1, 2: 1, 1: 3}, {0: 1, 2: 1, 1: 10}, {2: 7, 1: 4}]
    for step in steps:
        order = sorted(step, key=lambda i: step[i] > 1)  # decodes first
        chunks = [(slots[i], done[i], step[i]) for i in order]
        x = torch.cat([inputs[i][done[i] : done[i] + step[i]] for i in order])
        out = layer(x, *pools, metadata_of(chunks, sum(n == 1 for n in step.values())))
        for i, rows in zip(order, out.split([step[i] for i in order]), strict=True):
            found[i].append(rows)
            done[i] += step[i]
    assert done == [len(x) for x in inputs]
    for rows, one in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(rows), one, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_padding_reaches_only_the_null_slot(layers):
    layer, _, pools = layers
    conv, recurrent = (torch.zeros_like(pool) for pool in pools)
    layer(torch.randn(3, 64), conv, recurrent, metadata_of([(2, 5, 1), (0, 3, 1), (0, 3, 1)], 3))
    for pool in (conv, recurrent):
        assert pool[2].any()
        assert not pool[[1, 3, 4]].any()
