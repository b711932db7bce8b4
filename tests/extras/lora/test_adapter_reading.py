"""Reading adapters: the oracle is PEFT, whose own change of each weight must be x A B with ours."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import TINY_QWEN3
from nanovllm_extras.lora.adapter_config import AdapterConfig
from nanovllm_extras.lora.adapter_file import read_adapter
from nanovllm_extras.lora.places import find_places
from nanovllm_extras.weights.checkpoint import read_model_config
from tests.conftest import every_second
from tests.extras.lora.peft_adapters import make_adapter


@pytest.fixture(scope="module")
def places():
    model_class, shape = read_model_config(TINY_QWEN3, None, None)
    with torch.device("meta"):
        return find_places(model_class(shape, None))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    make_adapter(folder, target_modules=["q_proj", "down_proj"])
    return folder


CONFIGS = {
    "names": {"target_modules": ["q_proj", "mlp.up_proj"]},
    "one whole name": {"target_modules": ["model.layers.1.self_attn.k_proj"], "r": 3},
    "pattern": {"target_modules": r".*layers\.[02]\..*(o_proj|gate_proj)"},
    "all-linear": {"target_modules": "all-linear", "use_rslora": True},
    "some layers": {"target_modules": ["v_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"},
    "others": {"target_modules": "all-linear", "exclude_modules": ["gate_proj", "q_proj"]},
    "ranks": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 5},
        "alpha_pattern": {"k_proj": 3, "self_attn.q_proj": 1},
    },
}


@pytest.mark.parametrize("name", every_second(CONFIGS))
def test_changes_are_those_of_peft(name, places, tmp_path):
    model = make_adapter(tmp_path, **CONFIGS[name])
    matrices = read_adapter(tmp_path, places).matrices
    expected = {
        path.removeprefix("base_model.model."): module.get_delta_weight("default")
        for path, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert matrices.keys() == expected.keys() != set()
    for path, delta in expected.items():
        torch.testing.assert_close(matrices[path].b @ matrices[path].a, delta)


REFUSED = [
    ({"use_dora": True}, "use_dora in .* must not be set.*DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save in .* must not be set"),
    ({"bias": "all"}, "bias in .* must be 'none', it is 'all'"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights in .* must not be 'loftq'"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights in .* must not be 'pissa_niter_4'"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters .* fused experts"),
    ({"peft_type": "IA3"}, "peft_type .* must be LORA, it is 'IA3'"),
    ({"r": 0}, "r must be a whole number of at least 1, it is 0"),
    ({"r": 4}, r"lora_A of .* is torch.float32 \[8, .*need \[4, "),
    ({"lora_alpha": "x"}, "lora_alpha must be a finite number"),
    ({"lora_alpha": 10**400}, "lora_alpha must be a finite number"),
    ({"lora_alpha": 1e300}, "lora_B of .*, scaled, has numbers that are not finite"),
    ({"target_modules": ["q_proj"]}, "do not name model.layers.0.mlp.down_proj, which the file has"),
    ({"target_modules": "all-linear"}, "name model.layers.0.mlp.gate_proj, which the file lacks"),
    ({"target_modules": "("}, "must be a regular expression"),
    ({"rank_pattern": 3}, "rank_pattern must be an object"),
    ({"rank_pattern": {"(?i)q_proj": 8}}, "must be a regular expression: global flags"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_configurations_are_refused_by_name(change, message, places, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    config = json.loads((saved / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path, places)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def rename(tensors, name):
    return {**{one: tensor for one, tensor in tensors.items() if one != Q}, name: tensors[Q]}


DAMAGED = [
    (lambda all_: {k: v for k, v in all_.items() if k != Q}, "has no lora_A of model.layers.0.self_attn.q_proj"),
    (lambda all_: rename(all_, Q.replace("layers.0", "layers.99")), "the model has no linear layer of that name"),
    (lambda all_: rename(all_, Q.replace("self_attn.q", "mlp.experts.3.up")), "adapters of experts are not served"),
    (lambda all_: rename(all_, Q.replace("lora_A.weight", "lora_A")), "no A or B of"),
    (lambda all_: rename(all_, Q.replace("lora_A", "lora_magnitude_vector")), "a magnitude of DoRA"),
    (lambda all_: {**all_, Q: all_[Q][:, :-1].contiguous()}, r"lora_A of .* need \[8, "),
    (lambda all_: {**all_, Q: all_[Q].to(torch.int8)}, "is torch.int8"),
    (lambda all_: {**all_, Q: all_[Q] * float("nan")}, "not finite"),
    (lambda all_: {**all_, Q: all_[Q] * 1e7}, r"not finite in torch.float16"),
    (lambda all_: {**all_, Q.replace("lora_A.weight", "lora_embedding_A"): all_[Q] + 1}, "has lora_A of .* twice"),
    (lambda all_: {}, "has no tensors"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGED)
def test_damaged_files_are_refused(change, message, places, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    tensors = load_file(saved / "adapter_model.safetensors")
    save_file(change(tensors), tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path, places, dtype=torch.float16)


def test_files_that_are_missing_or_cut_off_are_refused(places, saved, tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder with adapter_config\.json"):
        read_adapter(tmp_path, places)
    shutil.copy(saved / "adapter_config.json", tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="never read, since that may run code"):
        read_adapter(tmp_path, places)
    (tmp_path / "adapter_model.safetensors").write_bytes((saved / "adapter_model.safetensors").read_bytes()[:-8])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        read_adapter(tmp_path, places)
    with pytest.raises(ValueError, match="max_lora_rank is 4, but .* has rank 8"):
        read_adapter(saved, places, max_rank=4)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not valid JSON"):
        read_adapter(tmp_path, places)


def test_the_digest_is_of_what_is_computed(places, saved, tmp_path):
    """So adapters that compute the same share blocks, and those of which only the scale differs do not."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    config = json.loads((saved / "adapter_config.json").read_text())
    digests = []
    for change in ({}, {"lora_dropout": 0.5}, {"lora_alpha": 17}):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **change}))
        digests.append(read_adapter(tmp_path, places).digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_pattern_of_layers_may_have_groups():
    config = AdapterConfig(8, 16, ("q_proj",), layers=(1,), layers_pattern=("(layers|h)",))
    assert [config.targets(f"model.layers.{i}.self_attn.q_proj") for i in range(3)] == [False, True, False]
