"""Checkpoints that were saved without the output layer, as Qwen3-Embedding: names without `model.`, no `lm_head`."""

import shutil
from functools import partial

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.weights.cut import Cut, read_part
from tests.conftest import hf_greedy
from tests.extras.quantization.packers import fp8, gptq, set_config
from tests.extras.serve.conftest import Client
from tests.extras.test_embedding import assert_embeddings, prompts_of
from tests.test_loader import edit_config

PROMPTS = prompts_of([1, 17, 40])
GREEDY = SamplingParams(temperature=0, max_tokens=8)
OPTIONS = {"num_kv_blocks": 30, "attention_backend": "torch", "device": "cpu"}


def bare(folder, of, keep_head=False):
    """Copy a checkpoint, with the names that `AutoModel.save_pretrained` writes, and perhaps an output layer."""
    shutil.copytree(of, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("model."): one for name, one in tensors.items() if keep_head or "lm_head" not in name}
    assert not any(name.startswith("model.") for name in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("architecture", [pytest.param("Qwen3ForCausalLM", marks=pytest.mark.slow), "Qwen3Model"])
def test_embeddings_are_those_of_transformers_and_generation_is_refused(tiny_checkpoint, tmp_path, architecture):
    folder = bare(tmp_path / "model", tiny_checkpoint[0])
    edit_config(folder, architectures=[architecture])
    llm = LLM(folder, **OPTIONS)
    assert_embeddings(llm.embed(PROMPTS, use_tqdm=False), tiny_checkpoint[1], PROMPTS, ["last"] * 3)
    for params in (None, GREEDY, SamplingParams(prompt_logprobs=1)):
        with pytest.raises(ValueError, match=r"has no lm_head, so it cannot generate text; LLM\.embed"):
            llm.generate([PROMPTS[0]], params, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_shards_that_automodel_writes(tiny_checkpoint, tmp_path):
    transformers.AutoModel.from_pretrained(tiny_checkpoint[0]).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    llm = LLM(tmp_path, **OPTIONS)
    assert_embeddings(llm.embed(PROMPTS, use_tqdm=False), tiny_checkpoint[1], PROMPTS, ["last"] * 3)


@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_names_without_a_prefix_and_an_output_layer_generate(checkpoints, tmp_path, is_tied):
    """A tied one, such as Qwen3-Embedding-0.6B, has it without a tensor of its own."""
    of, model = checkpoints.make(tie_word_embeddings=is_tied)
    llm = LLM(bare(tmp_path / "model", of, keep_head=not is_tied), **OPTIONS)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == [hf_greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("is_bare", "is_equal", "num_files"), [(False, False, 1), (True, False, 2), (False, True, 2), (True, True, 1)]
)
def test_an_output_layer_of_its_own_is_used_though_config_json_ties_the_embeddings(
    checkpoints, tmp_path, caplog, is_bare, is_equal, num_files
):
    """As in transformers, which does not tie embeddings that differ. Equal ones are one tensor."""
    of, _ = checkpoints.make(num_hidden_layers=1)
    folder = tmp_path / "model"
    bare(folder, of, keep_head=True) if is_bare else shutil.copytree(of, folder)
    edit_config(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    if is_equal:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight" if is_bare else "model.embed_tokens.weight"].clone()
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    (folder / "model.safetensors").unlink()
    parts = [tensors | head] if num_files == 1 else [tensors, head]
    for i, part in enumerate(parts):
        save_file(part, folder / f"{'model' if num_files == 1 else i}.safetensors", metadata={"format": "pt"})
    llm = LLM(folder, **OPTIONS, dtype="float32")
    model = llm.engine.runner.model
    assert (model.lm_head is model.model.embed_tokens) == is_equal
    assert ("ties the embeddings" in caplog.text) != is_equal
    for i in range(num_files):  # for transformers, a single file with the usual names
        (folder / f"{'model' if num_files == 1 else i}.safetensors").unlink()
    usual = {name if name.startswith("model.") else f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(usual | head, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == [hf_greedy(theirs, prompt, 8) for prompt in PROMPTS]


def test_an_output_layer_that_is_missing_beside_names_with_a_prefix_is_missing(broken):
    folder, tensors = broken
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 tensors are missing in .*: lm_head\.weight"):
        LLM(folder, **OPTIONS)


def test_a_tensor_under_both_names_is_compared(broken):
    folder, tensors = broken
    save_file({**tensors, "norm.weight": tensors["model.norm.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight in .* differ"):
        LLM(folder, **OPTIONS)


PACKED = {
    "gptq": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": False},
        partial(gptq, bits=8, group_size=32),
    ),
    "fp8": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}, partial(fp8, block=(32, 32))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_quantised_projections_are_found_too(tiny_checkpoint, tmp_path, name):
    """Their embeddings equal those of the same checkpoint with the usual names."""
    config, pack = PACKED[name]
    found = []
    for kind in ("bare", "usual"):
        folder = bare(tmp_path / kind, tiny_checkpoint[0])
        tensors = {}
        for key, tensor in load_file(folder / "model.safetensors").items():
            path, prefix = key.removesuffix(".weight"), "" if kind == "bare" else "model."
            parts = pack(tensor)[0] if path.endswith("_proj") else {"weight": tensor}
            tensors |= {f"{prefix}{path}.{part}": one for part, one in parts.items()}
        if kind == "usual":
            tensors["lm_head.weight"] = torch.zeros(300, 64)
        save_file(tensors, folder / "model.safetensors")
        set_config(folder, config)
        found.append([one.outputs.embedding for one in LLM(folder, **OPTIONS).embed(PROMPTS, use_tqdm=False)])
    assert found[0] == found[1]


def test_a_rank_reads_its_part_of_a_name_without_a_prefix(tmp_path):
    save_file({"norm.weight": torch.arange(8.0)}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        cut = Cut((8,), (4,), 0, ((4, 8),))
        assert read_part({"model.norm.weight": cut}, file, "norm.weight").tolist() == [4, 5, 6, 7]


@pytest.mark.slow
def test_a_server_answers_400_and_names_no_field(with_tokenizer, tmp_path):
    with AsyncLLM(bare(tmp_path / "model", with_tokenizer), **OPTIONS) as llm:
        client = Client(make_app(ServerOptions(model_names=("tiny",)), llm))
        error = client.post("/v1/completions", {"model": "tiny", "prompt": [1, 2], "temperature": 0})
        assert error.status_code == 400
        assert "no lm_head" in error.json()["error"]["message"]
        assert error.json()["error"]["param"] is None
        assert len(client.ask("/v1/embeddings", model="tiny", input=[1, 2])["data"][0]["embedding"]) == 64
