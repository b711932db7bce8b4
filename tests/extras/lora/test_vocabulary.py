"""Adapters of the embeddings and of the output layer: the oracle is PEFT's unmerged model in float32.

The bundled model ties its embeddings, and a copy of it has an output layer of its own.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanovllm import TINY_QWEN3
from nanovllm_extras import LLM, LoRARequest, SamplingParams
from nanovllm_extras.lora.adapter_file import read_adapter
from nanovllm_extras.lora.make_adapters import refused_by
from nanovllm_extras.lora.places import find_places
from nanovllm_extras.lora.vocabulary import find_vocabulary
from nanovllm_extras.weights.checkpoint import read_model_config
from tests.conftest import hf_greedy
from tests.extras.lora.peft_adapters import make_adapter

BOTH = {"embed_tokens", "lm_head"}
TARGETS = {"table": ["embed_tokens"], "head": ["lm_head"], "all": ["embed_tokens", "lm_head", "q_proj", "down_proj"]}
PROMPTS = [[7, *range(20, 29 + i)] for i in range(4)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)


@pytest.fixture(scope="module", params=["tied", "untied"])
def served(request, tmp_path_factory):
    """A model, its adapters, and PEFT's model of each."""
    root, base = tmp_path_factory.mktemp("vocabulary"), TINY_QWEN3
    if request.param == "untied":
        base = root / "untied"
        model = AutoModelForCausalLM.from_pretrained(TINY_QWEN3, dtype=torch.float32, tie_word_embeddings=False)
        with torch.no_grad():
            model.lm_head.weight.copy_(model.model.embed_tokens.weight.flip(1))
        model.save_pretrained(base)
        for file in TINY_QWEN3.glob("*token*"):
            shutil.copy(file, base)
    models = {
        name: make_adapter(root / name, seed, base, scale=0.5, target_modules=targets, r=4 + seed)
        for seed, (name, targets) in enumerate(TARGETS.items())
    }
    return base, root, models


def logprobs_of(model, prompt):
    with torch.no_grad():
        rows = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"max_loras": 3},
        pytest.param({"max_loras": 1, "max_num_batched_tokens": 8}, marks=pytest.mark.slow),
        pytest.param({"max_loras": 2, "attention_backend": "torch", "enforce_eager": True}, marks=pytest.mark.slow),
        pytest.param({"max_loras": 3, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"max_loras": 3, "tensor_parallel_size": 2, "enable_overlap": True}, marks=pytest.mark.slow),
        pytest.param({"max_loras": 3, "enable_overlap": True}, marks=pytest.mark.slow),
        pytest.param({"max_loras": 3, "speculative_config": NGRAM}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_and_prompt_logprobs_are_those_of_peft(options, served):
    base, root, models = served
    adapters = [None, *[LoRARequest(name, i, root / name) for i, name in enumerate(TARGETS, 1)]]
    oracles = [AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval(), *models.values()]
    with LLM(base, enable_lora=True, dtype="float32", num_kv_blocks=64, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapters)
    for output, prompt, model in zip(outputs, PROMPTS, oracles, strict=True):
        assert list(output.outputs[0].token_ids) == hf_greedy(model, prompt, 6)
        rows = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        assert [row[one].logprob for row, one in rows] == pytest.approx(logprobs_of(model, prompt), abs=2e-3)
    assert len({output.outputs[0].token_ids[-1] for output in outputs}) > 1


def change_config(folder, **fields):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))


def test_what_would_change_more_is_refused_by_name(tmp_path):
    folder = tmp_path / "all"
    make_adapter(folder, target_modules=TARGETS["all"])
    request = LoRARequest("all", 1, folder)
    with LLM(TINY_QWEN3, enable_lora=True, num_kv_blocks=16) as llm:
        change_config(folder, ensure_weight_tying=True)
        with pytest.raises(ValueError, match="ensure_weight_tying .* must not be set for lm_head"):
            llm.engine.add_lora(request)
        change_config(folder, ensure_weight_tying=False)
        tensors = load_file(folder / "adapter_model.safetensors")
        copied = [name for name in tensors if "base_layer" in name]
        assert copied, "PEFT saves the table"
        more = {name: torch.cat([tensors[name]] * 2) if name in copied else tensor for name, tensor in tensors.items()}
        save_file(more, folder / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=r"base_layer.weight of .* is torch.float32 \[4096, 256\]"):
            llm.engine.add_lora(request)
        save_file(tensors, folder / "adapter_model.safetensors")
        assert llm.engine.add_lora(request)
    shape = SimpleNamespace(has_head=False)
    for has_mtp_head, names in ((False, {"lm_head"}), (True, BOTH)):
        refused = refused_by(SimpleNamespace(config=SimpleNamespace(has_mtp_head=has_mtp_head), shape=shape))
        assert refused.keys() == names
        with pytest.raises(ValueError, match=f"changes lm_head: {refused['lm_head']}"):
            read_adapter(folder, places_of_network(), refused=refused)


def places_of_network():
    model_class, shape = read_model_config(TINY_QWEN3, None, None)
    with torch.device("meta"):
        network = model_class(shape, None)
    return [*find_places(network), find_vocabulary(network)[0]]
