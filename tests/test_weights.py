"""Checkpoints are read completely or refused by name.

Oracle: the `transformers` model that wrote the checkpoint, tensor by tensor. Faults are made by hand: each file, tensor
and shape once.
"""

import copy
import functools
import gc
import io
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import weights
from nanovllm.extras.checkpoint import read_model_config
from nanovllm.layers.attention import TorchAttention
from nanovllm.extras.weights import INDEX_FILE, load_model
from nanovllm.loader import places_of

CPU = torch.device("cpu")


def load(folder, dtype=torch.float32, dummy_seed=None):
    model_class, config = read_model_config(folder)
    backend = TorchAttention(config.num_attention_heads, config.num_key_value_heads, config.head_dim, 16)
    return load_model(model_class, config, backend, dtype, CPU, folder, dummy_seed)


def check_equals(model, hf_model, dtype=torch.float32):
    """Every tensor of `transformers` by its name in the checkpoint, and none besides."""
    ours, theirs = checkpoint_places(model), hf_model.state_dict()
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == dtype
        assert torch.equal(ours[name], tensor.to(dtype)), name


def save(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


# ---- good checkpoints


def test_single_file_equals_transformers(tiny_checkpoint):
    folder, hf_model = tiny_checkpoint
    assert (folder / "model.safetensors").is_file()
    check_equals(load(folder), hf_model)


def test_shards_with_an_index_equal_the_single_file(tiny_checkpoint, tmp_path):
    hf_model = tiny_checkpoint[1]
    hf_model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    check_equals(load(tmp_path), hf_model)


def test_biases_of_fused_layers_find_their_rows(checkpoints, tmp_path):
    hf_model = copy.deepcopy(checkpoints.make(attention_bias=True, num_hidden_layers=1)[1])
    with torch.no_grad():
        for name, parameter in hf_model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero
                parameter.normal_()
    hf_model.save_pretrained(tmp_path)
    assert "model.layers.0.self_attn.v_proj.bias" in load_file(tmp_path / "model.safetensors")
    check_equals(load(tmp_path), hf_model)


def test_file_of_another_name_is_found(broken, tiny_checkpoint):
    folder, _ = broken
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    check_equals(load(folder), tiny_checkpoint[1])


@pytest.mark.parametrize("kept", ["both", "model.embed_tokens.weight", "lm_head.weight"])
def test_tied_embeddings_are_one_tensor_whatever_names_the_file_has(checkpoints, tmp_path, kept):
    folder, hf_model = checkpoints.make(tie_word_embeddings=True, num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    embeddings = tensors["model.embed_tokens.weight"]
    tensors |= {"lm_head.weight": embeddings.clone()}
    if kept != "both":
        del tensors[({"model.embed_tokens.weight", "lm_head.weight"} - {kept}).pop()]
    save(tmp_path, tensors)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check_equals(model, hf_model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_are_converted_to_the_wanted_dtype(tiny_checkpoint, tmp_path, stored, dtype):
    folder, hf_model = tiny_checkpoint
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save(tmp_path, {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()})
    model = load(tmp_path, dtype)
    for name, tensor in hf_model.state_dict().items():
        assert torch.equal(checkpoint_places(model)[name], tensor.to(stored).to(dtype)), name


def test_weights_need_no_gradients(tiny_checkpoint):
    model = load(tiny_checkpoint[0])
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_loading_shows_its_progress_in_a_terminal_alone(tiny_checkpoint, tmp_path, monkeypatch, kind):
    shown = kind()
    bar = functools.partial(weights.tqdm, file=shown, mininterval=0, miniters=1)
    monkeypatch.setattr(weights, "tqdm", lambda **options: bar(**{**options, "delay": 0}))
    tiny_checkpoint[1].save_pretrained(tmp_path, max_shard_size="100KB")
    load(tmp_path)
    percents = [int(found) for found in re.findall(r"Loading weights: +(\d+)%", shown.getvalue())]
    if kind is Terminal:
        assert len(set(percents)) > 10, "it moves from tensor to tensor"
        assert percents == sorted(percents)
        assert (percents[0], percents[-1]) == (0, 100)
    else:
        assert shown.getvalue() == ""


# ---- broken checkpoints

SOME_TENSORS = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.self_attn.q_norm.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("name", SOME_TENSORS)
def test_missing_tensor_is_named(broken, name):
    folder, tensors = broken
    del tensors[name]
    save(folder, tensors)
    with pytest.raises(ValueError, match=f"1 tensors are missing .*: {name}$"):
        load(folder)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"])
def test_unexpected_tensor_is_named(broken, name):
    folder, tensors = broken
    save(folder, {**tensors, name: torch.zeros(3, 4)})
    with pytest.raises(ValueError, match=rf"unexpected tensor {name} \[3, 4\]"):
        load(folder)


@pytest.mark.parametrize("name", SOME_TENSORS)
def test_tensor_of_another_shape_is_named_with_both_shapes(broken, name):
    folder, tensors = broken
    shape = list(tensors[name].shape)
    tensors[name] = torch.cat([tensors[name], tensors[name]])
    save(folder, tensors)
    with pytest.raises(ValueError, match="the model needs") as error:
        load(folder)
    assert f"tensor {name} in {folder} is {[2 * shape[0], *shape[1:]]}, the model needs {shape}" in str(error.value)


def test_transposed_tensor_is_refused(broken):
    folder, tensors = broken
    name = "model.layers.0.mlp.down_proj.weight"
    save(folder, {**tensors, name: tensors[name].T.contiguous()})
    with pytest.raises(ValueError, match=name):
        load(folder)


def test_checkpoint_with_fewer_layers_than_its_config_says(broken):
    folder, _ = broken
    edit_config(folder, num_hidden_layers=3, layer_types=None)
    with pytest.raises(ValueError, match=r"11 tensors are missing .*model\.layers\.2\."):
        load(folder)


def test_missing_shard_is_named(tiny_checkpoint, tmp_path):
    tiny_checkpoint[1].save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name} is missing, but {INDEX_FILE} names it"):
        load(tmp_path)


def test_file_that_was_cut_off_is_named(broken):
    folder, _ = broken
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("files", [("a", "a"), ("a", "b"), ("b", "a")], ids="-".join)
def test_tied_head_that_differs_is_not_dropped_silently(checkpoints, tmp_path, files):
    """Two names of one tensor with two contents: refused, or both kept as `transformers` does (with a warning)."""
    folder, _ = checkpoints.make(tie_word_embeddings=True, num_hidden_layers=1)
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    head = torch.zeros_like(tensors["model.embed_tokens.weight"])
    parts = {file: {} for file in files}
    parts[files[0]] |= tensors
    parts[files[1]] |= {"lm_head.weight": head}
    for name, part in parts.items():
        save_file(part, tmp_path / f"{name}.safetensors", metadata={"format": "pt"})
    try:
        model = load(tmp_path)
    except ValueError as error:
        assert "lm_head.weight" in str(error)  # noqa: PT017 (both ways are right)
    else:
        assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
        assert torch.equal(model.lm_head.weight, head)


def test_folder_without_weights_is_refused(broken):
    folder, _ = broken
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors weights"):
        load(folder)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_weights_are_refused_and_not_opened(broken, tmp_path):
    folder, _ = broken
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors weights.*are never read, since that may run"):
        load(folder)
    assert not (tmp_path / "exploded").exists()


def test_the_refusal_of_pickled_weights_names_a_command_that_converts_them(broken, tiny_checkpoint):
    """The very words of the error are run."""
    folder, tensors = broken
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="If you trust them") as error:
        load(folder)
    command = re.search(r'python -c "(.*?)"', str(error.value)).group(1)
    exec(command, {})
    check_equals(load(folder.with_name(folder.name + "-safetensors")), tiny_checkpoint[1])


class Mapped(TorchDispatchMode):
    """The most bytes of files that are mapped into this process at once, while tensors are copied."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            parts = Path("/proc/self/smaps").read_text().split("VmFlags")
            sizes = [re.search(r"Rss: +(\d+)", part) for part in parts if ".safetensors" in part]
            self.num_bytes = max(self.num_bytes, sum(int(size.group(1)) << 10 for size in sizes if size))
        return out


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what is mapped")
def test_what_was_read_of_a_file_does_not_stay_in_memory(checkpoints):
    """Of 3 MB, in some dozens of tensors, hardly more than the largest is mapped at any time."""
    folder, hf_model = checkpoints.make(hidden_size=128, num_hidden_layers=7, vocab_size=1000)
    largest = max(tensor.nbytes for tensor in hf_model.state_dict().values())
    num_bytes = (folder / "model.safetensors").stat().st_size
    assert num_bytes > 5 * largest
    gc.collect()  # errors that other tests expected hold the tensor at which they were raised
    with Mapped() as mapped:
        load(folder)
    page = 64 << 10  # Linux maps some pages around the one that is asked for
    assert largest / 2 < mapped.num_bytes < 2 * largest + 4 * page


MEASURE_LOADING = """
import re, sys, torch
from pathlib import Path
from nanovllm import LLM
from nanovllm.extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm.extras.kernels.cpu.library import load_library
torch.set_num_threads(1)
torch.randn(512, 512) @ torch.randn(512, 512)  # what PyTorch imports and allocates late
torch.nn.Linear(2, 2, device="meta").to(torch.bfloat16).to_empty(device="cpu")

def read(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))

before = read("VmRSS")
is_eager = sys.argv[2] == "torch"
llm = LLM(sys.argv[1], device="cpu", attention_backend=sys.argv[2], num_kv_blocks=4, enforce_eager=is_eager)
print(read("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory a process had")
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_loading_takes_the_memory_of_the_weights_and_of_the_largest_tensor(tmp_path, backend):
    """Growth over the imported process, for 250 MB of weights, below weights + largest tensor + 10 %."""
    shape = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 8, "head_dim": 64}
    config = transformers.Qwen3Config(**shape, vocab_size=20_000, num_hidden_layers=3, num_key_value_heads=8)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_LOADING, str(tmp_path), backend], capture_output=True, text=True, check=True
    )
    growth = int(done.stdout) << 10
    assert weights / 2 < growth < 1.1 * (weights + largest), f"{growth:,} for {weights:,}, the largest {largest:,}"


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": {}}], ids=str)
def test_index_without_a_weight_map_is_named(broken, content):
    folder, _ = broken
    (folder / INDEX_FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{INDEX_FILE}|safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.layers.0.mlp.up_proj.weight", lambda weight: weight.to(torch.float8_e4m3fn)),
        ("model.layers.0.mlp.up_proj.weight", lambda weight: weight.to(torch.int8)),
        ("model.layers.0.mlp.up_proj.qweight", lambda weight: weight.to(torch.int32)),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", lambda weight: weight[:1, :1].clone()),
    ],
    ids=["fp8", "int8", "GPTQ", "scale"],
)
def test_quantised_tensors_are_refused_where_the_config_says_nothing(broken, name, change):
    """The first two would fit, and be converted as if they were plain numbers."""
    folder, tensors = broken
    save(folder, {**tensors, name: change(tensors["model.layers.0.mlp.up_proj.weight"])})
    with pytest.raises(ValueError, match=rf"tensor {name} .* part of quantised weights, .*bfloat16"):
        load(folder)


def test_frequencies_that_old_checkpoints_hold_are_passed_over(broken, tiny_checkpoint):
    """Llama 2's on the hub have them in each layer; `transformers` passes over them too."""
    folder, tensors = broken
    save(folder, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    check_equals(load(folder), tiny_checkpoint[1])


# ---- dummy weights


def test_dummy_weights_are_the_same_for_the_same_seed_and_no_other(tiny_checkpoint, tmp_path):
    shutil.copy(tiny_checkpoint[0] / "config.json", tmp_path)  # nothing else is there, nor needed
    first, again, other = (checkpoint_places(load(tmp_path, dummy_seed=seed)) for seed in (3, 3, 4))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert torch.equal(tensor, other[name]) == name.endswith("norm.weight"), name


def test_dummy_weights_have_the_spread_of_the_config(checkpoints):
    folder, _ = checkpoints.make(attention_bias=True, num_hidden_layers=1)  # initializer_range 0.2
    for name, tensor in checkpoint_places(load(folder, dummy_seed=0)).items():
        if name.endswith("norm.weight"):
            assert (tensor == 1).all(), name
        elif name.endswith("bias"):
            assert (tensor == 0).all(), name
        else:
            assert 0.18 < tensor.std() < 0.22, name
