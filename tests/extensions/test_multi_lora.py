"""`examples/extensions/multi_lora.py`: the oracle is transformers, with each adapter merged into the weights."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams
from tests.conftest import hf_greedy

EXTENSION = Path(__file__).parents[2] / "examples" / "extensions" / "multi_lora.py"
TARGETS = {
    "alice": (4, ["q_proj", "v_proj"], False),
    "bob": (16, ["k_proj", "o_proj", "gate_proj", "down_proj"], True),
    "carol": (1, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], False),
}
"""Adapter -> its rank, the projections that it changes, and whether its scale is that of rank-stabilised LoRA."""


@pytest.fixture
def merged(tiny_checkpoint, tmp_path, monkeypatch):
    """Write the adapters, and return the merged model of each."""
    monkeypatch.setenv("NANOVLLM_ADAPTERS", str(tmp_path))
    models = {None: tiny_checkpoint[1]}
    generator = torch.Generator().manual_seed(3)
    for name, (rank, targets, is_stabilised) in TARGETS.items():
        model = models[name] = copy.deepcopy(tiny_checkpoint[1])
        tensors = {}
        for path, layer in model.named_modules():
            if path.rpartition(".")[2] in targets:
                a = 0.3 * torch.randn(rank, layer.in_features, generator=generator)
                b = 0.3 * torch.randn(layer.out_features, rank, generator=generator)
                layer.weight.data += 6 / (rank**0.5 if is_stabilised else rank) * b @ a
                tensors |= {f"base_model.model.{path}.lora_{kind}.weight": t for kind, t in (("A", a), ("B", b))}
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"r": rank, "lora_alpha": 6, "use_rslora": is_stabilised, "target_modules": targets}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return models


def make_llm(folder, **options):
    return LLM(folder, extension=EXTENSION, block_size=4, num_kv_blocks=60, enforce_eager=True, **options)


def params(adapter):
    extra_args = None if adapter is None else {"adapter": adapter}
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args=extra_args)


def test_rows_of_one_batch_have_different_adapters(tiny_checkpoint, merged):
    """Chunks of at most 10 tokens: decodes and prompts of all adapters are in the same steps."""
    llm = make_llm(tiny_checkpoint[0], max_num_batched_tokens=10)
    requests = [(name, [7 + i, *range(20, 29 + i)]) for i in range(2) for name in merged]
    outputs = llm.generate([prompt for _, prompt in requests], [params(name) for name, _ in requests], use_tqdm=False)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [hf_greedy(merged[name], prompt, 8) for name, prompt in requests]
    assert len({tuple(tokens) for tokens in found[:4]}) == 4, "adapters change the answer"


def test_only_the_same_adapter_hits_the_prefix_cache(tiny_checkpoint, merged):
    llm, prompt = make_llm(tiny_checkpoint[0]), [*range(30, 43)]
    hits = []
    for name in (None, "alice", "bob", "alice", None):
        (output,) = llm.generate([prompt], params(name), use_tqdm=False)
        assert output.outputs[0].token_ids == hf_greedy(merged[name], prompt, 8)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 0, 0, 12, 12]


def test_a_request_for_an_unknown_adapter_is_refused(tiny_checkpoint, merged):
    llm = make_llm(tiny_checkpoint[0])
    with pytest.raises(ValueError, match=r"extra_args\['adapter'\] must be one of alice, bob, carol, got 'dave'"):
        llm.generate([[5, 6]], params("dave"), use_tqdm=False)
    (output,) = llm.generate([[5, 6]], params("bob"), use_tqdm=False)
    assert output.outputs[0].token_ids == hf_greedy(merged["bob"], [5, 6], 8)


@pytest.mark.parametrize(("field", "value"), [("r", 17), ("use_dora", True), ("modules_to_save", ["lm_head"])])
def test_an_adapter_that_would_be_computed_wrongly_is_refused(tiny_checkpoint, merged, tmp_path, field, value):
    file = tmp_path / "bob" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(ValueError, match=f"bob: {field} of adapter_config.json must"):
        make_llm(tiny_checkpoint[0])


def test_without_adapters_the_error_says_what_to_set(tiny_checkpoint, monkeypatch):
    monkeypatch.delenv("NANOVLLM_ADAPTERS", raising=False)
    with pytest.raises(ValueError, match="set NANOVLLM_ADAPTERS to a folder of 1 to 8 adapters, got ''"):
        make_llm(tiny_checkpoint[0])
