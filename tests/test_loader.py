"""A checkpoint is read completely, or refused by name: its folder, its JSON files, its tokenizer, its weights.

Oracle: the `transformers` model that wrote the checkpoint, tensor by tensor. Faults are made by hand: each file, tensor
and shape once.
"""

import copy
import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nanovllm.layers.attention import TorchAttention
from nanovllm.loader import (
    INDEX_FILE,
    find_folder,
    load_tokenizer,
    load_weights,
    places_of,
    read_eos_token_ids,
    read_json,
)
from nanovllm.plugins import find_architecture
from tests.conftest import examples


@pytest.fixture
def load():
    """A function from a folder to a model with its weights. `tests/extras/test_weights.py` has another one."""

    def load_in_core(folder, dtype=torch.float32):
        raw = read_json(folder / "config.json")
        model_class = find_architecture(raw)
        config = model_class.read_config(raw)
        backend = TorchAttention(config.num_attention_heads, config.num_key_value_heads, config.head_dim, 16)
        with torch.device("meta"):
            model = model_class(config, backend)
        model = model.to(dtype).to_empty(device="cpu").requires_grad_(False)
        load_weights(model, folder)
        return model

    return load_in_core


def check_equals(model, hf_model, dtype=torch.float32):
    """Every tensor of `transformers` by its name in the checkpoint, and none besides."""
    ours, theirs = places_of(model), hf_model.state_dict()
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


def test_single_file_equals_transformers(tiny_checkpoint, load):
    folder, hf_model = tiny_checkpoint
    assert (folder / "model.safetensors").is_file()
    check_equals(load(folder), hf_model)


def test_shards_with_an_index_equal_the_single_file(tiny_checkpoint, tmp_path, load):
    hf_model = tiny_checkpoint[1]
    hf_model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    check_equals(load(tmp_path), hf_model)


@pytest.mark.examples
def test_each_tensor_is_read_from_the_file_that_the_index_names(tiny_checkpoint, tmp_path, load):
    """Other files of the folder hold older copies of some tensors, tensors of other models, or are not in the index."""
    folder, hf_model = tiny_checkpoint
    tensors = load_file(folder / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    files = ("a.safetensors", "b.safetensors", "c.safetensors")

    @settings(max_examples=examples(20), deadline=None, derandomize=True, database=None)
    @given(st.randoms(use_true_random=False))
    def check(random):
        index = {name: random.choice(files) for name in tensors}
        contents = {file: {"another.weight": torch.ones(2, 2)} for file in files}
        for name, tensor in tensors.items():
            contents[index[name]][name] = tensor
            for file in random.sample(files, random.randrange(3)):
                contents[file].setdefault(name, random.choice((tensor + 1, torch.zeros(3), tensor)))
        contents["d.safetensors"] = {name: tensor + 2 for name, tensor in tensors.items()}
        for file, content in contents.items():
            save_file(content, tmp_path / file)
        (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": index}))
        check_equals(load(tmp_path), hf_model)

    check()


def test_a_single_file_comes_before_an_index(broken, tiny_checkpoint, load):
    """As in transformers. The index may be left over from another form of the checkpoint, with shards or without."""
    folder, tensors = broken
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "old.safetensors")}))
    check_equals(load(folder), tiny_checkpoint[1])
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "old.safetensors")
    check_equals(load(folder), tiny_checkpoint[1])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check_equals(load(folder), theirs)


def test_a_tensor_that_is_not_in_the_file_that_the_index_names_is_missing(broken, load):
    folder, tensors = broken
    save_file(tensors, folder / "a.safetensors")
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    index = dict.fromkeys(tensors, "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "c.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {**index, "lm_head.weight": "c.safetensors"}}))
    with pytest.raises(ValueError, match=r"1 tensors are missing .*: lm_head\.weight"):
        load(folder)


def test_biases_of_fused_layers_find_their_rows(checkpoints, tmp_path, load):
    hf_model = copy.deepcopy(checkpoints.make(attention_bias=True, num_hidden_layers=1)[1])
    with torch.no_grad():
        for name, parameter in hf_model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero
                parameter.normal_()
    hf_model.save_pretrained(tmp_path)
    assert "model.layers.0.self_attn.v_proj.bias" in load_file(tmp_path / "model.safetensors")
    check_equals(load(tmp_path), hf_model)


def test_file_of_another_name_is_found(broken, tiny_checkpoint, load):
    folder, _ = broken
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    check_equals(load(folder), tiny_checkpoint[1])


@pytest.mark.parametrize("kept", ["both", "model.embed_tokens.weight", "lm_head.weight"])
def test_tied_embeddings_are_one_tensor_whatever_names_the_file_has(checkpoints, tmp_path, kept, load):
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


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16)],
)
def test_weights_are_converted_to_the_wanted_dtype(tiny_checkpoint, tmp_path, stored, dtype, load):
    folder, hf_model = tiny_checkpoint
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save(tmp_path, {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()})
    model = load(tmp_path, dtype)
    for name, tensor in hf_model.state_dict().items():
        assert torch.equal(places_of(model)[name], tensor.to(stored).to(dtype)), name


# ---- broken checkpoints

SOME_TENSORS = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.norm.weight",
]


@pytest.mark.parametrize("name", SOME_TENSORS)
def test_missing_tensor_is_named(broken, name, load):
    folder, tensors = broken
    del tensors[name]
    save(folder, tensors)
    with pytest.raises(ValueError, match=f"1 tensors are missing .*: {name}$"):
        load(folder)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"])
def test_unexpected_tensor_is_named(broken, name, load):
    folder, tensors = broken
    save(folder, {**tensors, name: torch.zeros(3, 4)})
    with pytest.raises(ValueError, match=rf"unexpected tensor {name} \[3, 4\]"):
        load(folder)


@pytest.mark.parametrize("name", SOME_TENSORS)
def test_tensor_of_another_shape_is_named_with_both_shapes(broken, name, load):
    folder, tensors = broken
    shape = list(tensors[name].shape)
    tensors[name] = torch.cat([tensors[name], tensors[name]])
    save(folder, tensors)
    with pytest.raises(ValueError, match="the model needs") as error:
        load(folder)
    given = [2 * shape[0], *shape[1:]]
    assert f"tensor {name} in {folder} is torch.float32 {given}, the model needs {shape}" in str(error.value)


def test_checkpoint_with_fewer_layers_than_its_config_says(broken, load):
    folder, _ = broken
    edit_config(folder, num_hidden_layers=3, layer_types=None)
    with pytest.raises(ValueError, match=r"11 tensors are missing .*model\.layers\.2\."):
        load(folder)


def test_missing_shard_is_named(tiny_checkpoint, tmp_path, load):
    tiny_checkpoint[1].save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name} is missing, but {INDEX_FILE} names it"):
        load(tmp_path)


def test_file_that_was_cut_off_is_named(broken, load):
    folder, _ = broken
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("files", [("a", "a"), ("a", "b"), ("b", "a")], ids="-".join)
def test_tied_head_that_differs_is_not_dropped_silently(checkpoints, tmp_path, files, load):
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


def test_folder_without_weights_is_refused(broken, load):
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


def test_pickled_weights_are_refused_and_not_opened(broken, tmp_path, load):
    folder, _ = broken
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(
        ValueError, match=r"holds no \*\.safetensors weights.*never read, since that may run.*docs/models.md"
    ):
        load(folder)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "content", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"lm_head.weight": 3}}], ids=str
)
def test_index_without_a_weight_map_is_named(broken, content, load):
    folder, _ = broken
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{INDEX_FILE}|safetensors"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_tensors_are_refused(broken, load, dtype):
    """They would fit, and be converted as if they were plain numbers."""
    folder, tensors = broken
    name = "model.layers.0.mlp.up_proj.weight"
    save(folder, {**tensors, name: tensors[name].to(dtype)})
    with pytest.raises(ValueError, match=f"tensor {name} .* is {dtype} .* in float32, bfloat16 or float16"):
        load(folder)


# ---- folder and JSON files


@pytest.mark.parametrize("file", ["config.json", INDEX_FILE])
@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not valid JSON"), ("", "is not valid JSON"), ("[1]", "must hold a JSON object, got list")],
)
def test_bad_json_is_named(broken, file, content, message, load):
    folder, _ = broken
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=f"{file} {message}"):
        load(folder)


def test_home_is_expanded(tiny_checkpoint, monkeypatch):
    folder = tiny_checkpoint[0]
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find_folder(f"~/{folder.name}") == folder


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "~/none", Path("nothing"), "org/a-model", "tests"])
def test_folder_without_a_config_is_refused(model):
    with pytest.raises(ValueError, match="must be a folder on this machine that holds a config.json, got") as error:
        find_folder(model)
    assert repr(str(model)) in str(error.value)


def test_a_json_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} holds no config.json"):
        read_json(tmp_path / "config.json")


# ---- end tokens and tokenizer


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {5, 6}),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, {5}),
        ({"eos_token_id": 0}, {"eos_token_id": 7}, {0}),
        ({}, {"eos_token_id": 7}, {7}),
        ({"eos_token_id": None}, {"eos_token_id": [7, 8]}, {7, 8}),
        (None, {"eos_token_id": 7}, {7}),
        (None, {"eos_token_id": None}, set()),
        (None, {}, set()),
    ],
)
def test_end_tokens_are_those_of_the_generation_config_or_else_of_the_config(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_token_ids(tmp_path, None, vocab_size=300) == expected


def test_the_end_token_of_the_tokenizer_is_one_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [7, 300]}))
    tokenizer = SimpleNamespace(eos_token_id=3)
    assert read_eos_token_ids(tmp_path, tokenizer, vocab_size=301) == {3, 7, 300}
    assert read_eos_token_ids(tmp_path, tokenizer, vocab_size=300) == {3, 7}, "300 is no token of the model"
    tokenizer.eos_token_id = None
    assert read_eos_token_ids(tmp_path, tokenizer, vocab_size=300) == {7}


def test_model_without_tokenizer_files_has_none(tiny_checkpoint):
    assert load_tokenizer(tiny_checkpoint[0]) is None


@pytest.fixture
def tokenizer_folder(broken):
    """The tiny checkpoint with a tokenizer of four words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder, _ = broken
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder)
    return folder


def test_tokenizer_is_read(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    assert tokenizer.encode("b a b", add_special_tokens=False) == [2, 1, 2]
    assert tokenizer.eos_token_id == 3


def test_code_of_a_checkpoint_is_not_run(tokenizer_folder, tmp_path):
    file = tokenizer_folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    file.write_text(json.dumps(settings))
    (tokenizer_folder / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'run')!r}).touch()\n"
        "from transformers import PreTrainedTokenizerFast as Evil\n"
    )
    try:
        load_tokenizer(tokenizer_folder)
    except ValueError as error:
        assert "trust_remote_code" in str(error)  # noqa: PT017 (it may also load without that code)
    assert not (tmp_path / "run").exists()
