"""Weights as extras load them: all that the core's loader does, with a progress bar, in little memory, and dummy ones.

`tests/test_loader.py` has the tests of both loaders.
"""

import functools
import gc
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.layers.attention import TorchAttention
from nanovllm.loader import places_of
from nanovllm_extras.weights import load_model as weights
from nanovllm_extras.weights.checkpoint import read_model_config
from nanovllm_extras.weights.load_model import Wanted, load_model
from tests.core_alone import ROOT
from tests.test_loader import (  # noqa: F401 (with the fixture `load` below)
    check_equals,
    save,
    test_a_single_file_comes_before_an_index,
    test_a_tensor_that_is_not_in_the_file_that_the_index_names_is_missing,
    test_bad_json_is_named,
    test_biases_of_fused_layers_find_their_rows,
    test_checkpoint_with_fewer_layers_than_its_config_says,
    test_each_tensor_is_read_from_the_file_that_the_index_names,
    test_file_of_another_name_is_found,
    test_file_that_was_cut_off_is_named,
    test_folder_without_weights_is_refused,
    test_index_without_a_weight_map_is_named,
    test_missing_shard_is_named,
    test_missing_tensor_is_named,
    test_pickled_weights_are_refused_and_not_opened,
    test_shards_with_an_index_equal_the_single_file,
    test_single_file_equals_transformers,
    test_tensor_of_another_shape_is_named_with_both_shapes,
    test_tied_embeddings_are_one_tensor_whatever_names_the_file_has,
    test_tied_head_that_differs_is_not_dropped_silently,
    test_unexpected_tensor_is_named,
    test_weights_are_converted_to_the_wanted_dtype,
)

CPU = torch.device("cpu")


def load_with_extras(folder, dtype=torch.float32, dummy_seed=None):
    model_class, config = read_model_config(folder)
    backend = TorchAttention(config.num_attention_heads, config.num_key_value_heads, config.head_dim, 16)
    return load_model(Wanted(model_class, config, backend, dtype, CPU, folder, dummy_seed))


@pytest.fixture
def load():
    return load_with_extras


def test_the_refusal_of_pickled_weights_points_to_a_command_that_converts_them(broken, tiny_checkpoint, load):
    """The very words of the page are run."""
    folder, tensors = broken
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="If you trust them.*docs/models.md"):
        load(folder)
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    command = re.search(r'python -c "(.*?)"', page).group(1)
    exec(command.replace("MODEL", str(folder)), {})
    check_equals(load(folder.with_name(folder.name + "-safetensors")), tiny_checkpoint[1])


def test_a_model_does_not_train(tiny_checkpoint, load):
    assert not load(tiny_checkpoint[0]).training


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_loading_shows_its_progress_in_a_terminal_alone(tiny_checkpoint, tmp_path, monkeypatch, kind, load):
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


class Mapped(TorchDispatchMode):
    """The most bytes of a folder's files that are mapped into this process at once, while tensors are copied."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.num_bytes = folder, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            parts = Path("/proc/self/smaps").read_text().split("VmFlags")
            sizes = [re.search(r"Rss: +(\d+)", part) for part in parts if str(self.folder) in part]
            self.num_bytes = max(self.num_bytes, sum(int(size.group(1)) << 10 for size in sizes if size))
        return out


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what is mapped")
def test_what_was_read_of_a_file_does_not_stay_in_memory(checkpoints, load):
    """Of 3 MB, in some dozens of tensors, hardly more than the largest is mapped at any time."""
    folder, hf_model = checkpoints.make(hidden_size=128, num_hidden_layers=7, vocab_size=1000)
    largest = max(tensor.nbytes for tensor in hf_model.state_dict().values())
    num_bytes = (folder / "model.safetensors").stat().st_size
    assert num_bytes > 5 * largest
    gc.collect()  # errors that other tests expected hold the tensor at which they were raised
    with Mapped(folder) as mapped:
        load(folder)
    page = 64 << 10  # Linux maps some pages around the one that is asked for
    assert largest / 2 < mapped.num_bytes < 2 * largest + 4 * page


MEASURE_LOADING = """
import re, sys, torch
from pathlib import Path
from nanovllm_extras import LLM
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.kernels.cpu.library import load_library
torch.set_num_threads(1)
torch.randn(512, 512) @ torch.randn(512, 512)  # what PyTorch imports and allocates late
torch.nn.Linear(2, 2, device="meta").to(torch.bfloat16).to_empty(device="cpu")

def read(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))

before = read("VmRSS")
llm = LLM(sys.argv[1], device="cpu", attention_backend="cpu", num_kv_blocks=4)
print(read("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory a process had")
def test_loading_takes_the_memory_of_the_weights_and_of_the_largest_tensor(tmp_path):
    """Growth over the imported process, for 250 MB of weights, below weights + largest tensor + 10 %."""
    shape = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 8, "head_dim": 64}
    config = transformers.Qwen3Config(**shape, vocab_size=20_000, num_hidden_layers=3, num_key_value_heads=8)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_LOADING, str(tmp_path)], capture_output=True, text=True, check=True
    )
    growth = int(done.stdout) << 10
    assert weights / 2 < growth < 1.1 * (weights + largest), f"{growth:,} for {weights:,}, the largest {largest:,}"


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
def test_quantised_tensors_are_refused_where_the_config_says_nothing(broken, name, change, load):
    """The first two would fit, and be converted as if they were plain numbers."""
    folder, tensors = broken
    save(folder, {**tensors, name: change(tensors["model.layers.0.mlp.up_proj.weight"])})
    with pytest.raises(ValueError, match=rf"tensor {name} .* part of quantised weights, .*bfloat16"):
        load(folder)


def test_frequencies_that_old_checkpoints_hold_are_passed_over(broken, tiny_checkpoint, load):
    """Llama 2's on the hub have them in each layer; `transformers` passes over them too."""
    folder, tensors = broken
    save(folder, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    check_equals(load(folder), tiny_checkpoint[1])


# ---- dummy weights


def test_dummy_weights_are_the_same_for_the_same_seed_and_no_other(tiny_checkpoint, tmp_path, load):
    shutil.copy(tiny_checkpoint[0] / "config.json", tmp_path)  # nothing else is there, nor needed
    first, again, other = (places_of(load(tmp_path, dummy_seed=seed)) for seed in (3, 3, 4))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert torch.equal(tensor, other[name]) == name.endswith("norm.weight"), name


def test_dummy_weights_have_the_spread_of_the_config(checkpoints, load):
    folder, _ = checkpoints.make(attention_bias=True, num_hidden_layers=1)  # initializer_range 0.2
    for name, tensor in places_of(load(folder, dummy_seed=0)).items():
        if name.endswith("norm.weight"):
            assert (tensor == 1).all(), name
        elif name.endswith("bias"):
            assert (tensor == 0).all(), name
        else:
            assert 0.18 < tensor.std() < 0.22, name
