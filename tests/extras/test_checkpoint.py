"""What is beside the weights of a checkpoint, with extras: hub ids, formats by name, another tokenizer.

Faults are made by hand, each once. Nothing here touches the network.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

import nanovllm
from nanovllm.loader import read_eos_token_ids
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.weights.checkpoint import (
    load_tokenizer,
    read_default_sampling_params,
    read_model_config,
    resolve_model,
)
from tests.extras.test_weights import load_with_extras as load
from tests.hub_cache import put_into_cache
from tests.test_loader import check_equals, edit_config
from tests.test_loader import tokenizer_folder as tokenizer_folder

# ---- config.json


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], ["Gemma3ForConditionalGeneration"], [], None])
def test_other_architectures_are_refused(broken, architectures):
    folder, _ = broken
    edit_config(folder, architectures=architectures)
    with pytest.raises(ValueError, match="is not supported; supported: .*LlamaForCausalLM.*Qwen3ForCausalLM") as error:
        load(folder)
    assert str(architectures) in str(error.value)


def test_code_in_a_checkpoint_is_not_run_and_the_refusal_says_so(broken):
    folder, _ = broken
    edit_config(folder, architectures=["Own"], auto_map={"AutoModelForCausalLM": "own.Own"})
    with pytest.raises(ValueError, match="never run: trust_remote_code does not exist here"):
        load(folder)


@pytest.mark.parametrize(
    ("field", "settings", "name"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ("quantization_config", {"quant_method": "hqq"}, "hqq"),
        ("compression_config", {"format": "marlin-24"}, "marlin-24"),
        ("quantization_config", {"bits": 4}, "{'bits': 4}"),
    ],
    ids=str,
)
def test_quantised_checkpoints_are_refused_by_the_name_of_their_format(broken, field, settings, name):
    """Also where all tensors would fit, as here."""
    folder, _ = broken
    edit_config(folder, **{field: settings})
    with pytest.raises(ValueError, match=f"{field}: the weights are quantised with {re.escape(name)}, .*bfloat16"):
        load(folder)


def test_an_empty_quantization_config_is_no_quantisation(broken, tiny_checkpoint):
    folder, _ = broken
    edit_config(folder, quantization_config=None)
    check_equals(load(folder), tiny_checkpoint[1])


# ---- from a name to a folder


def test_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path.name}' holds no config.json"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "../nothing", "a/b/c", "~/none", Path("nothing")])
def test_path_that_is_not_there_is_named(model):
    with pytest.raises(ValueError, match="is not a folder on this machine, nor a hub id") as error:
        resolve_model(model)
    assert repr(str(model)) in str(error.value)


@pytest.mark.parametrize("hub_id", ["some-org/Some-Model.1", "model"])
def test_hub_id_is_found_in_the_cache_when_offline(hub_cache, tiny_checkpoint, hub_id):
    folder, hf_model = tiny_checkpoint
    snapshot = put_into_cache(hub_cache, hub_id, folder)
    found = resolve_model(hub_id)
    assert found.samefile(snapshot)
    check_equals(load(found), hf_model)


def test_hub_id_that_is_not_in_the_cache_is_named_when_offline(hub_cache):
    with pytest.raises(ValueError, match="model 'org/unknown' is neither a folder on this machine nor available"):
        resolve_model("org/unknown")


def test_hub_id_without_a_config_is_refused(hub_cache, tiny_checkpoint):
    put_into_cache(hub_cache, "org/half", tiny_checkpoint[0], ["model.safetensors"])
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model_config(resolve_model("org/half"))


# ---- tokenizer


def test_tokenizer_of_another_folder_is_read(tiny_checkpoint, tokenizer_folder):
    tokenizer = load_tokenizer(Config(tiny_checkpoint[0], tokenizer=tokenizer_folder), tiny_checkpoint[0])
    assert tokenizer.encode("b a b", add_special_tokens=False) == [2, 1, 2]


# ---- files of a wrong kind


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["2", [2, "3"], 2.0, True, {"id": 2}, -2])
def test_an_end_token_of_a_wrong_kind_is_named_with_its_file(broken, file, value):
    folder, _ = broken
    path = folder / file
    raw = json.loads(path.read_text()) if path.exists() and file == "config.json" else {}
    path.write_text(json.dumps({**raw, "eos_token_id": value}))
    if file == "config.json":
        (folder / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises((TypeError, ValueError), match=rf"{file}: eos_token_id\[\d\] must be an integer >= 0, got"):
        read_eos_token_ids(folder, None, 300)


def test_an_end_token_of_minus_one_is_none(broken):
    (broken[0] / "generation_config.json").write_text('{"eos_token_id": [-1, 7]}')
    assert read_eos_token_ids(broken[0], None, 300) == {7}


GIVEN = {"eos_token_id": [30, 31]}
END_TOKENS = {  # generation_config.json of the model, that of another folder, config.json, options -> the end tokens
    "the model's": ({"eos_token_id": 5}, GIVEN, {"eos_token_id": 6}, {}, {5}),
    "another folder's": ({"eos_token_id": 5}, GIVEN, {"eos_token_id": 6}, {"generation_config": "other"}, {30, 31}),
    "a folder's without any": ({"eos_token_id": 5}, {}, {"eos_token_id": 6}, {"generation_config": "other"}, {6}),
    "vllm reads no parameters": ({"eos_token_id": 5}, {}, {}, {"generation_config": "vllm"}, {5}),
    "overridden": ({"eos_token_id": 5}, {}, {}, {"override_generation_config": GIVEN}, {30, 31}),
    "overridden by null": (GIVEN, {}, {"eos_token_id": 6}, {"override_generation_config": {"eos_token_id": None}}, {6}),
    "in another folder, overridden": (
        {},
        {"eos_token_id": 5},
        {},
        {"generation_config": "other", "override_generation_config": GIVEN},
        {30, 31},
    ),
    "hf_overrides": ({}, {}, {"eos_token_id": 6}, {"hf_overrides": GIVEN}, {30, 31}),
    "hf_overrides below a file": ({"eos_token_id": 5}, {}, {}, {"hf_overrides": GIVEN}, {5}),
    "nested hf_overrides": ({}, {}, {}, {"hf_overrides": {"text_config": GIVEN}}, {30, 31}),
}


@pytest.mark.parametrize("name", END_TOKENS)
def test_the_end_tokens_are_those_of_the_files_and_options_that_are_chosen(broken, tmp_path, name):
    folder, _ = broken
    generation, others, fields, options, expected = END_TOKENS[name]
    other = tmp_path / "other"
    other.mkdir()
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (other / "generation_config.json").write_text(json.dumps(others))
    edit_config(folder, **{"eos_token_id": None, **fields})
    if options.get("generation_config") == "other":
        options = {**options, "generation_config": other}
    llm = LLM(folder, load_format="dummy", num_kv_blocks=8, dtype="float32", device="cpu", **options)
    assert llm.engine.eos_token_ids == expected
    assert llm.engine.input_processor.eos_token_ids == expected


@pytest.mark.parametrize("method", ["generation_config", "override_generation_config"])
def test_an_answer_ends_at_an_end_token_of_the_chosen_folder(broken, tmp_path, method):
    folder, _ = broken
    options = {"num_kv_blocks": 8, "dtype": "float32", "device": "cpu"}
    params = SamplingParams(temperature=0, max_tokens=8)
    [whole] = LLM(folder, **options).generate([[1, 2, 3]], params, use_tqdm=False)
    end = whole.outputs[0].token_ids[3]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    value = tmp_path if method == "generation_config" else {"eos_token_id": end}
    [output] = LLM(folder, **options, **{method: value}).generate([[1, 2, 3]], params, use_tqdm=False)
    num_tokens = whole.outputs[0].token_ids.index(end) + 1
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (
        whole.outputs[0].token_ids[:num_tokens],
        "stop",
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"override_generation_config": {"eos_token_id": "2"}}, "override_generation_config"),
        ({"generation_config": "other"}, "other/generation_config.json"),
    ],
)
def test_an_end_token_of_a_wrong_kind_is_named_with_its_option(broken, tmp_path, options, name):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"eos_token_id": "2"}')
    if "generation_config" in options:
        options = {"generation_config": tmp_path / "other"}
    with pytest.raises(TypeError, match=rf"{name}: eos_token_id\[0\] must be an integer"):
        LLM(broken[0], load_format="dummy", num_kv_blocks=8, device="cpu", **options)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ["linear", ["linear"], 2.0, True])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_a_field_that_must_be_an_object_is_named(broken, architecture, field, value):
    edit_config(broken[0], architectures=[architecture], **{field: value})
    with pytest.raises(ValueError, match=f"cannot be served: config.json: {field} must be an object such as .*, got"):
        read_model_config(broken[0])


@pytest.mark.parametrize("field", ["architectures", "layer_types", "mlp_only_layers"])
@pytest.mark.parametrize("value", ["Qwen3ForCausalLM", 5, {}])
def test_a_field_that_must_be_a_list_is_named(broken, field, value):
    edit_config(broken[0], **{"architectures": ["Qwen3MoeForCausalLM"], field: value})
    with pytest.raises(ValueError, match=f"config.json: {field} must be a list"):
        read_model_config(broken[0])


BOTH = pytest.mark.parametrize("make", [nanovllm.LLM, LLM], ids=["core", "extras"])


@BOTH
@pytest.mark.parametrize("text", ["{", "[]", "", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_named_with_its_folder(tokenizer_folder, tmp_path, make, text):
    folder = tmp_path / "broken"
    shutil.copytree(tokenizer_folder, folder)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=f"the tokenizer in {folder} .*tokenizer.json.* cannot be loaded: "):
        make(folder)


@BOTH
def test_a_broken_config_is_not_reported_as_the_tokenizers_fault(tmp_path, make):
    folder = shutil.copytree(TINY_QWEN3, tmp_path / "broken")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=f"^{folder}/config.json is not valid JSON"):
        make(folder)


@BOTH
@pytest.mark.parametrize("names", [["model.safetensors"], ["tokenizer.json"], ["model.safetensors", "tokenizer.json"]])
def test_files_that_git_lfs_did_not_fetch_are_named(tmp_path, make, names):
    folder = shutil.copytree(TINY_QWEN3, tmp_path / "clone")
    for name in names:
        (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n")
    (folder / "unused.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    found = ", ".join([*names, "unused.bin"])
    with pytest.raises(ValueError, match=f"run `git lfs pull` in {folder}, where {found} are pointers"):
        make(folder)


def test_a_sentencepiece_model_is_a_tokenizer_and_its_error_is_told(tiny_checkpoint, tmp_path):
    shutil.copy(tiny_checkpoint[0] / "config.json", tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not one")
    with pytest.raises(ValueError, match=f"the tokenizer in {tmp_path} .* cannot be loaded: "):
        load_tokenizer(Config(tmp_path), tmp_path)


@pytest.mark.parametrize("values", [{"top_p": 0.0}, {"temperature": -1}, {"max_new_tokens": "5"}, {"top_k": 1.5}])
@pytest.mark.parametrize("is_overridden", [False, True])
def test_default_parameters_that_are_not_allowed_are_named_with_their_file(broken, values, is_overridden):
    folder, _ = broken
    (folder / "generation_config.json").write_text(json.dumps({} if is_overridden else values))
    config = Config(folder, override_generation_config=values if is_overridden else None)
    name = {"max_new_tokens": "max_tokens"}.get(next(iter(values)), next(iter(values)))
    with pytest.raises(ValueError, match=f"from generation_config.json of {folder}.*: {name} must be"):
        read_default_sampling_params(config, folder)
