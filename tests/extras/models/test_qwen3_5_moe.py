"""Qwen3.5 with experts: how they may be stored, and their config.

`test_qwen3_5.py` compares tokens with those of `transformers`, under all options.
"""

import json

import pytest
import transformers
from safetensors.torch import save_file

from nanovllm_extras.kernels.cpu.experts import CpuExperts
from nanovllm_extras.models.architectures import find_architecture
from tests.extras.models.hybrid_checkpoints import EXPERTS, QWEN35, make_config
from tests.extras.models.test_qwen3_5 import check_greedy, make_llm

pytest.importorskip("transformers.models.qwen3_5_moe")


@pytest.fixture(scope="module")
def hybrids(all_hybrids):
    return all_hybrids["Qwen3_5Moe"]


def test_experts_may_be_stored_one_by_one_or_together(hybrids, tmp_path):
    folder, model = hybrids.make()
    together = model.state_dict()
    assert together["model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 2 * 32, 64)
    one_by_one = {}
    for name, tensor in together.items():
        path, _, projection = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(projection)
        if not path.endswith(".experts") or parts is None:
            one_by_one[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                one_by_one[f"{path}.{i}.{part}.weight"] = rows.clone()
    assert len(one_by_one) > len(together)
    for i, weights in enumerate((together, one_by_one)):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "config.json").write_text((folder / "config.json").read_text())
        save_file(weights, tmp_path / str(i) / "model.safetensors", {"format": "pt"})
        llm = make_llm(tmp_path / str(i), attention_backend=("torch", "cpu")[i], block_size=16)
        experts = [one for one in llm.engine.runner.model.modules() if isinstance(one, CpuExperts)]
        assert len(experts) == i * QWEN35["num_hidden_layers"]
        check_greedy(llm, hybrids.prompts()[:2], hybrids.greedy()[:2])


def test_missing_fields_have_the_defaults_of_transformers():
    required = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    raw = {"architectures": ["Qwen3_5MoeForCausalLM"], **{name: QWEN35[name] for name in required}}
    shape = find_architecture(raw)[1]
    theirs = transformers.Qwen3_5MoeTextConfig(**{name: raw[name] for name in required})
    names = ("num_key_value_heads", "head_dim", "linear_num_value_heads", *EXPERTS)
    found = {**vars(shape), "shared_expert_intermediate_size": shape.intermediate_size}
    assert {name: found[name] for name in names} == {name: getattr(theirs, name) for name in names}


def test_the_architecture_with_vision_has_the_same_text():
    raw = json.loads(json.dumps(make_config("Qwen3_5Moe").to_dict()))
    flat = find_architecture({**raw, "architectures": ["Qwen3_5MoeForCausalLM"]})
    nested = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": raw, "vision_config": {}}
    assert find_architecture(nested)[1] == flat[1]
    assert issubclass(find_architecture(nested)[0], flat[0])
    with pytest.raises(ValueError, match="num_experts_per_tok must be at most the 6 experts"):
        find_architecture({**nested, "num_experts_per_tok": 7})
