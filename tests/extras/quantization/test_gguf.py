"""`load_format="gguf"`: files that the package gguf writes and quantises, read here, and what is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from tests.extras.quantization.test_stored_weights import answer, eager, weights_of
from tests.test_loader import edit_config

pytestmark = pytest.mark.slow  # the package is an extra
gguf = pytest.importorskip("gguf")

KINDS = gguf.GGMLQuantizationType
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def in_llama_cpps_order(tensor, num_heads):
    """Its Llamas rotate neighbours: of a head, the rows of both halves take turns."""
    first, second = tensor.unflatten(0, (num_heads, 2, -1)).unbind(1)
    return torch.stack((first, second), 2).flatten(0, 2)


def write(folder, of, architecture="qwen3", kind="Q8_0", kinds=lambda name: None, change=lambda tensors: None):
    """The model in `of` as one file -> what its projections mean, by the checkpoint's names"""
    shutil.copytree(of, folder)
    tensors, meanings = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    change(tensors)
    raw = json.loads((folder / "config.json").read_text())
    heads = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], raw["num_hidden_layers"])
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    for name, tensor in tensors.items():
        path, stored = name.rpartition(".")[0], tensor.float()
        num_heads = heads.get(path.rpartition(".")[2]) if architecture == "llama" else None
        if num_heads:
            stored = in_llama_cpps_order(stored, num_heads)
        wanted = KINDS[kinds(name) or (kind if path.endswith("_proj") and name.endswith("weight") else "F32")]
        data = gguf.quantize(stored.numpy(), wanted)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=wanted)
        if path.endswith("_proj") and name.endswith("weight"):
            meaning = torch.from_numpy(gguf.dequantize(data, wanted))
            if num_heads:  # back, by another way
                meaning = meaning.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            meanings[path] = meaning
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meanings


def small(architecture, config_class, model_class, folder):
    torch.manual_seed(0)
    config = config_class(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=architecture == "qwen2",
    )
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return small("llama", LlamaConfig, LlamaForCausalLM, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return small("qwen2", Qwen2Config, Qwen2ForCausalLM, tmp_path_factory.mktemp("qwen2"))


def tokens_of(llm):
    return llm.generate([[5, 7, 11, 200], [3] * 20], GREEDY, use_tqdm=False)


def answers_of(llm):
    return [output.outputs[0].token_ids for output in tokens_of(llm)]


def read(folder, **options):
    return eager(folder, load_format="gguf", **options)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_projections_mean_what_the_package_says(kind, tmp_path):
    meanings = write(tmp_path / "model", TINY_QWEN3, kind=kind)
    llm = read(tmp_path / "model")
    found = weights_of(llm)
    assert found.keys() == meanings.keys()
    for path, meaning in meanings.items():
        assert torch.equal(found[path], meaning), path


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_floats_are_those_of_the_checkpoint(kind, tmp_path):
    """The bundled weights are bfloat16, which float32 holds, and float16 nearly."""
    write(tmp_path / "model", TINY_QWEN3, kind=kind)
    assert answer(read(tmp_path / "model")) == answer(eager(TINY_QWEN3))


def test_a_llama_has_its_rows_back(llama, tmp_path):
    write(tmp_path / "floats", llama, "llama", "F32")
    expected, found = (tokens_of(llm) for llm in (eager(llama), read(tmp_path / "floats")))
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    meanings = write(tmp_path / "small", llama, "llama", "Q4_0")
    found = weights_of(read(tmp_path / "small"))
    assert all(torch.equal(found[path], meaning) for path, meaning in meanings.items())


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_biases_and_tied_embeddings(qwen2, tmp_path, kind):
    """With 8 bits the most likely token may be another: log-probabilities stay near."""
    write(tmp_path / "model", qwen2, "qwen2", kind, change=lambda tensors: tensors.pop("lm_head.weight", None))
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=300)
    both = [llm.generate([[5, 7, 11, 200]], params, use_tqdm=False)[0].outputs[0].logprobs[0] for llm in
            (eager(qwen2, max_logprobs=300), read(tmp_path / "model", max_logprobs=300))]  # fmt: skip
    differences = [abs(both[0][i].logprob - both[1][i].logprob) for i in range(300)]
    assert max(differences) < (1e-5 if kind == "F32" else 0.05)


def logits_of(llm):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    logprobs = llm.generate([[5, 7, 11, 200]], params, use_tqdm=False)[0].outputs[0].logprobs[0]
    return torch.tensor([logprobs[i].logprob for i in range(len(logprobs))])


@pytest.mark.parametrize("changed", [False, True])
def test_an_output_layer_of_the_file_is_loaded_though_the_config_ties_it(qwen2, tmp_path, changed):
    """The oracle is the same checkpoint, whose config says that they are not tied."""
    tensors = load_file(qwen2 / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].flip(0) if changed else tensors["model.embed_tokens.weight"].clone()
    write(tmp_path / "model", qwen2, "qwen2", "F32", change=lambda tensors: tensors.update({"lm_head.weight": head}))
    shutil.copytree(qwen2, tmp_path / "untied")
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "untied" / "model.safetensors")
    edit_config(tmp_path / "untied", tie_word_embeddings=False)
    found, expected = read(tmp_path / "model", max_logprobs=300), eager(tmp_path / "untied", max_logprobs=300)
    torch.testing.assert_close(logits_of(found), logits_of(expected), rtol=1e-5, atol=1e-5)
    model = found.engine.runner.model
    assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    assert (model.lm_head is model.model.embed_tokens) == (not changed), "equal tensors take their memory once"


def test_without_an_output_layer_the_embeddings_are_tied(llama, tmp_path):
    """As in llama.cpp, though config.json says that they are not. Oracle: the same checkpoint with tied embeddings."""
    shutil.copytree(llama, tmp_path / "tied")
    tensors = load_file(llama / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "tied" / "model.safetensors")
    edit_config(tmp_path / "tied", tie_word_embeddings=True)
    write(tmp_path / "model", llama, "llama", "F32", change=lambda tensors: tensors.pop("lm_head.weight"))
    found, expected = read(tmp_path / "model"), eager(tmp_path / "tied")
    assert answers_of(found) == answers_of(expected)
    model = found.engine.runner.model
    assert model.lm_head is model.model.embed_tokens


def test_an_output_layer_of_another_kind_than_the_embeddings(tmp_path):
    """What tools write that keep it in more bits: rounded differently, but of the same weights."""
    kinds = {"model.embed_tokens.weight": "Q4_0", "lm_head.weight": "Q8_0"}
    tensors = load_file(f"{TINY_QWEN3}/model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    write(tmp_path / "model", TINY_QWEN3, kinds=kinds.get, change=lambda tensors: tensors.update(head))
    model = read(tmp_path / "model").engine.runner.model
    for name, layer in (("model.embed_tokens.weight", model.model.embed_tokens), ("lm_head.weight", model.lm_head)):
        kind = KINDS[kinds[name]]
        meaning = gguf.dequantize(gguf.quantize(head["lm_head.weight"].float().numpy(), kind), kind)
        assert torch.equal(layer.weight, torch.from_numpy(meaning))


def test_the_projections_of_a_layer_may_have_several_kinds(tmp_path):
    """Each kind is a product of its own: q in 4 bits, k in floats, v in 8 bits."""
    kinds = {"q_proj.weight": "Q4_0", "k_proj.weight": "F32"}
    meanings = write(tmp_path / "model", TINY_QWEN3, kinds=lambda name: kinds.get(name.split("attn.")[-1]))
    llm = read(tmp_path / "model")
    layer = llm.engine.runner.model.model.layers[0].self_attn.qkv_proj
    classes = [type(one).__name__ for one in layer.products]
    assert classes == ["QuantisedFusedLinear", "FusedLinear", "QuantisedFusedLinear"]
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    for part, y in zip("qkv", layer(x), strict=True):
        exact = x @ meanings[f"model.layers.0.self_attn.{part}_proj"].T
        assert (y - exact).norm() < 0.02 * exact.norm(), part
    fast = LLM(tmp_path / "model", load_format="gguf", dtype="float32", num_kv_blocks=40)
    assert answer(fast) == answer(llm)


REFUSED = {
    "another kind": ({"kind": "Q4_1"}, r"tensor model\.layers\.0\..*\.weight in .* is Q4_1; projections can be Q8_0"),
    "architecture": (
        {"architecture": "gemma3"},
        "has the architecture 'gemma3', supported are llama, qwen2, qwen3, qwen35",
    ),
    "missing": (
        {"change": lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")},
        r"tensor model\.layers\.1\.mlp\.up_proj\.weight \(blk\.1\.ffn_up\.weight\) is missing",
    ),
    "a norm is missing": (
        {"change": lambda tensors: tensors.pop("model.norm.weight")},
        r"1 tensors are missing in .*: model\.norm\.weight",
    ),
    "unexpected": (
        {"change": lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(4)})},
        r"unexpected tensor blk\.0\.ffn_up\.bias",
    ),
    "another shape": (
        {"change": lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64)})},
        r"tensor model\.norm\.weight in .* is \[64\], not \[256\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_its_name(name, tmp_path):
    options, message = REFUSED[name]
    write(tmp_path / "model", TINY_QWEN3, **options)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "model")


def test_a_folder_has_one_whole_file(tmp_path):
    with pytest.raises(ValueError, match=r"needs one file \*\.gguf in .*, there is none"):
        read(TINY_QWEN3)
    write(tmp_path / "model", TINY_QWEN3)
    file = tmp_path / "model" / "model.gguf"
    whole = file.read_bytes()
    for size in (3, 2000, len(whole) - 1000):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.gguf is not a complete GGUF file"):
            read(tmp_path / "model")
    shutil.copy(file, file.with_name("other.gguf"))
    with pytest.raises(ValueError, match=r"there is model\.gguf, other\.gguf"):
        read(tmp_path / "model")
