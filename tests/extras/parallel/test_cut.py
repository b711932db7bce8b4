"""The ranks' parts are the checkpoint: each value is read by the ranks that need it, and by no other.

Oracle: the parts are put together again, and must give the tensors that they were cut from. Which query heads need
which K and V head is counted by hand. All architectures, of drawn sizes; the networks are without memory.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras import LLM, Config
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.parallel.start_ranks import RankPart
from nanovllm_extras.weights import load_model as weights
from nanovllm_extras.weights.checkpoint import read_model_config
from nanovllm_extras.weights.cut import Cut, Cutter, read_part, share_of
from nanovllm_extras.weights.load_model import Wanted, load_model, places_of_stored
from tests.conftest import examples
from tests.extras.models.architectures import ARCHITECTURES
from tests.extras.parallel.shareable import LATENT

HALF_BIASES = ("o_proj.bias", "down_proj.bias")  # of what is summed over the ranks: only rank 0 adds them


def networks(raw, size):
    """The whole network and the share of one of `size` ranks, without memory."""
    model_class, shape = find_architecture(raw)
    share = share_of(shape, size)
    backend = TorchAttention(1, 1, 16, 16)  # nothing is computed
    with torch.device("meta"):
        return model_class(shape, backend), model_class(share, backend), shape


def raw_config(name, variant, **fields):
    """config.json of an architecture under test."""
    architecture = ARCHITECTURES[name]
    fields = {**architecture.shape, **architecture.variants[variant], **fields}
    known = {key: fields[key] for key in fields if key not in ("seed", "lens", "max_model_len")}
    known = {key: known[key] for key in known if (key, known[key]) != ("head_dim", None)}
    config = architecture.config_class(**known, bos_token_id=None, eos_token_id=None)
    return {**config.to_dict(), "architectures": [architecture.class_name]}


@st.composite
def shared_networks(draw, name):
    """(config.json, number of ranks): the sizes are multiples of it, but for the vocabulary, and K and V heads"""
    variant = draw(st.sampled_from(sorted(one for one in ARCHITECTURES[name].variants if "longrope" not in one)))
    size = draw(st.sampled_from([2, 3, 4, 6, 8]))
    heads = size * draw(st.integers(1, 2))
    kv_heads = draw(
        st.sampled_from([n for n in range(1, heads + 1) if not heads % n and (not n % size or not size % n)])
    )
    fields = {
        "vocab_size": draw(st.integers(1, 50)),
        "hidden_size": 8 * heads,  # where heads share the width, three quarters of 8 may be rotated
        "intermediate_size": size * draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if name in LATENT else kv_heads,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if ARCHITECTURES[name].shape.get("head_dim"):
        fields["head_dim"] = 2 * draw(st.integers(1, 3))
    if "moe_intermediate_size" in ARCHITECTURES[name].shape:
        fields["moe_intermediate_size"] = size * draw(st.integers(1, 3))
    if "attention_bias" in ARCHITECTURES[name].shape:
        fields["attention_bias"] = draw(st.booleans())
    return raw_config(name, variant, **fields), size


class Slice:
    """As safetensors' slice of a tensor in a file. `counts` gets how many times each value has been read."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.counts = torch.zeros(tensor.shape, dtype=torch.int64)

    def get_shape(self):
        return list(self.tensor.shape)

    def __getitem__(self, index):
        self.counts[index] += 1
        return self.tensor[index]


class File:
    """As an open safetensors file, of which only slices may be read."""

    def __init__(self, network):
        generator = torch.Generator().manual_seed(0)
        places = places_of_stored(network).items()
        self.slices = {name: Slice(torch.randn(place.shape, generator=generator)) for name, place in places}

    def get_slice(self, name):
        return self.slices[name]


def pieces_of(part, cut):
    """The spans of the whole, and what the part holds of each; what is behind them must be zero."""
    start = 0
    for span in cut.spans:
        yield span, part.narrow(cut.dim, start, span[1] - span[0])
        start += span[1] - span[0]
    assert not part.narrow(cut.dim, start, part.shape[cut.dim] - start).any()


@pytest.mark.parametrize("name", ARCHITECTURES)
@given(st.data())
@settings(max_examples=examples(16), deadline=None, derandomize=True)
@pytest.mark.examples
def test_the_parts_together_are_the_checkpoint(name, data):
    raw, size = data.draw(shared_networks(name))
    whole, share, shape = networks(raw, size)
    file = File(whole)
    shapes = {name: tuple(place.shape) for name, place in places_of_stored(share).items()}
    joined = {name: torch.full_like(one.tensor, torch.nan) for name, one in file.slices.items()}
    for rank in range(size):
        cuts = Cutter(rank, size).cuts_of_checkpoint(whole, share)
        assert set(cuts) >= set(file.slices)
        for name in file.slices:
            part = read_part(cuts, file, name)
            assert part.shape == shapes[name]
            for (start, stop), piece in pieces_of(part, cuts[name]):
                joined[name].narrow(cuts[name].dim, start, stop - start).copy_(piece)
    for name, one in file.slices.items():
        assert torch.equal(joined[name], one.tensor), name
        assert (one.counts == times_read(name, one.tensor.shape, shapes[name], size, shape)).all(), name


def times_read(name, whole, part, size, shape):
    """How many ranks need each value: [number of rows, or 1, 1]"""
    if name.endswith(HALF_BIASES) and "kv_a" not in name:
        return 1
    if ".qkv_proj." in name:  # Phi-3's q, k and v in one tensor
        kv_rows = shape.num_key_value_heads * shape.head_dim
        repeats = max(1, size // shape.num_key_value_heads)
        rows = [1] * (whole[0] - 2 * kv_rows) + [repeats] * (2 * kv_rows)
        return torch.tensor(rows)[:, None]
    if ".k_proj." in name or ".v_proj." in name:
        return max(1, size // shape.num_key_value_heads)
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return 1
    return size if whole == part else 1


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 4, 2), (12, 1, 6), (6, 6, 3), (16, 2, 8)])
def test_each_query_head_finds_its_keys(heads, kv_heads, size):
    """Query head h attends to K and V head h // (heads / kv_heads), in the whole network and in each share."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": 96}
    whole, share, shape = networks(raw_config("qwen3", "biases", **sizes), size)
    ours = share_of(shape, size)
    for rank in range(size):
        cuts = Cutter(rank, size).cuts_of_checkpoint(whole, share)
        held = {
            part: [start // shape.head_dim for start in rows_of(cuts[f"model.layers.1.self_attn.{part}.weight"])][
                :: shape.head_dim
            ]
            for part in ("q_proj", "k_proj", "v_proj")
        }
        group, own_group = heads // kv_heads, ours.num_attention_heads // ours.num_key_value_heads
        assert held["q_proj"] == list(range(rank * heads // size, (rank + 1) * heads // size))
        for i, head in enumerate(held["q_proj"]):
            assert held["k_proj"][i // own_group] == held["v_proj"][i // own_group] == head // group


def rows_of(cut):
    return [row for start, stop in cut.spans for row in range(start, stop)]


def test_a_part_of_several_spans_and_zeros():
    cut = Cut((6, 2), (5, 2), 0, ((1, 3), (4, 5)))
    rows = torch.arange(12.0).view(6, 2)
    assert cut.of(rows).tolist() == [[2, 3], [4, 5], [8, 9], [0, 0], [0, 0]]
    columns = Cut((2, 6), (2, 3), 1, ((0, 1), (4, 6)))
    assert columns.of(rows.view(2, 6)).tolist() == [[0, 4, 5], [6, 10, 11]]


# ---- files


class CountingFile:
    """An open safetensors file that counts the bytes that are read of it."""

    num_bytes = 0

    def __init__(self, file):
        self._file = file

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def get_slice(self, name):
        return CountingSlice(self._file.get_slice(name))

    def __getattr__(self, name):
        return getattr(self._file, name)


class CountingSlice:
    def __init__(self, tensor):
        self._tensor = tensor

    def get_shape(self):
        return self._tensor.get_shape()

    def __getitem__(self, index):
        taken = self._tensor[index]
        CountingFile.num_bytes += taken.nbytes
        return taken


@pytest.fixture
def num_bytes_read(monkeypatch):
    """A function: how many bytes `load` has read of files."""
    safe_open = weights.safe_open
    monkeypatch.setattr(weights, "safe_open", lambda *args, **options: CountingFile(safe_open(*args, **options)))

    def read(load):
        CountingFile.num_bytes = 0
        load()
        return CountingFile.num_bytes

    return read


def share_from(folder, rank, size, dummy_seed=None, dtype=torch.float32):
    """The network of one rank, as the rank makes it, and the two networks without memory."""
    model_class, shape = read_model_config(Path(folder), {})
    backend = TorchAttention(1, 1, 16, 16)
    runner = ModelRunner.__new__(ModelRunner)
    runner.config = Config(folder, load_format="auto" if dummy_seed is None else "dummy", seed=dummy_seed or 0)
    runner.part = RankPart(SimpleNamespace(rank=rank, size=size), False)
    runner.model_class, runner.whole_shape, runner.shape = model_class, shape, runner.part.share_of(shape)
    runner.backends = (backend,)
    runner.backend, runner.dtype, runner.device, runner.folder = backend, dtype, torch.device("cpu"), Path(folder)
    return runner.make_model(), shape, model_class, backend


@pytest.mark.parametrize("name", ["llama", "phi3", "deepseek_v2"])
def test_a_rank_reads_only_its_part_of_a_file(shareable, num_bytes_read, name):
    variant = {"llama": "biases", "phi3": "plain", "deepseek_v2": "plain"}[name]
    folder, _ = shareable.make(name, variant, 3)
    for rank in range(3):
        loaded = []
        read = num_bytes_read(lambda rank=rank, loaded=loaded: loaded.append(share_from(folder, rank, 3)[0]))
        held = sum(parameter.nbytes for parameter in loaded[0].parameters())
        # 271 tokens are 91, 91 and 89; biases behind a sum are rank 0's
        unread = 4 * 2 * 2 * loaded[0].lm_head.weight.shape[1] if rank == 2 else 0
        if rank and name == "llama":
            unread += sum(p.nbytes for n, p in loaded[0].named_parameters() if n.endswith(HALF_BIASES))
        assert read == held - unread


def test_experts_in_one_tensor_are_split_and_then_cut(shareable):
    folder, _ = shareable.make("gpt_oss", "clamped", 3)
    whole = share_from(folder, 0, 1)[0]
    for rank in range(3):
        share = share_from(folder, rank, 3)[0]
        for path, module, name, cut in Cutter(rank, 3).cuts(whole, share):
            assert torch.equal(getattr(share.get_submodule(path), name), cut.of(getattr(module, name))), (path, name)


def test_a_tensor_of_another_shape_is_named(shareable, rank_threads):
    """By rank 0, or by the rank that finds it before."""
    folder, _ = shareable.make("llama", "plain", 2)
    message = r"q_proj.weight is \[192, 192\], the model needs \[144, 192\]"
    with pytest.raises((ValueError, EngineDeadError), match=message):
        LLM(folder, tensor_parallel_size=2, attention_backend="torch", hf_overrides={"head_dim": 24}, device="cpu")


# ---- dummy weights


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dummy_weights_are_those_of_one_rank(shareable, name):
    dtype = torch.bfloat16 if len(name) % 2 else torch.float32
    variant = "biases" if "biases" in ARCHITECTURES[name].variants else next(iter(ARCHITECTURES[name].variants))
    folder, _ = shareable.make(name, variant, 1)
    for rank in range(3):
        share, shape, model_class, backend = share_from(folder, rank, 3, 7, dtype)
        if not rank:
            whole = load_model(Wanted(model_class, shape, backend, dtype, torch.device("cpu"), Path(folder), 7))
            assert sum(1 for p in whole.parameters() if p.dim() == 2 and p.std() > 0) > 9
        for path, module, parameter, cut in Cutter(rank, 3).cuts(whole, share):
            part = getattr(share.get_submodule(path), parameter)
            assert part.dtype == getattr(module, parameter).dtype
            assert torch.equal(part, cut.of(getattr(module, parameter))), (path, parameter)
