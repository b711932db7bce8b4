"""The config.json of networks with experts, and what their checkpoints hold beside the weights.

`test_architectures.py` shows that what is read is computed as by `transformers`.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.weights.checkpoint import check_stored_weights
from tests.extras.models.architectures import ARCHITECTURES, IS_4, Checkpoints


def written(name, **fields):
    """What `transformers` writes to config.json, and some fields more; a field that is `...` is left out."""
    one = ARCHITECTURES[name]
    shape = {key: value for key, value in one.shape.items() if value is not None}
    raw = one.config_class(**shape, architectures=[one.class_name]).to_dict()
    raw = json.loads(json.dumps(raw)) | fields
    return {key: value for key, value in raw.items() if value is not ...}


def read(name, **fields):
    raw = written(name, **fields)
    check_stored_weights(raw)
    return find_architecture(raw)[1]


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts(name):
    others = {"num_experts": ..., "num_local_experts": ...}
    assert read("qwen3_moe", **{**others, name: 6}).num_experts == 6


def test_gpt_oss_has_long_contexts_unless_the_file_says_otherwise():
    """As transformers, by yarn with these numbers; and the window is that of every second layer."""
    config = read("gpt_oss", rope_theta=..., rope_parameters=..., rope_scaling=..., layer_types=...)
    theirs = transformers.GptOssConfig().rope_parameters
    assert config.rope.theta == 150_000
    assert {name: config.rope.parameters[name] for name in theirs if name != "rope_theta"} == (
        {name: value for name, value in theirs.items() if name != "rope_theta"}
    )
    assert [one.window for one in config.attention_options] == [9, None]
    assert all(one.has_sinks for one in config.attention_options)


REFUSED = [
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most the 8 experts, config.json has 9"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
    ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be"),
    ("mixtral", {"num_local_experts": -1}, "num_local_experts must be"),
    ("mixtral", {"hidden_act": "relu"}, "hidden_act must be"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func must be 'softmax', config.json has 'sigmoid'"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob must be False"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method must be 'greedy' or 'group_limited_greedy'"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}, "n_group must divide"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 2}, "topk_group hold"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": None}, "config.json lacks n_group"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads must be 4"),
    ("deepseek_v2", {"num_experts_per_tok": None}, "config.json lacks num_experts_per_tok"),
    ("deepseek_v2", {"kv_lora_rank": "32"}, "kv_lora_rank"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
    ("deepseek_v3", {"n_group": 8}, "groups of at least 2"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "hqq"}}, "quantised with hqq"),
    ("deepseek_v3", {"routed_scaling_factor": "2"}, "routed_scaling_factor"),
    ("gpt_oss", {"num_experts_per_tok": 5}, "num_experts_per_tok must be at most the 4 experts, config.json has 5"),
    ("gpt_oss", {"swiglu_limit": -1.0}, "swiglu_limit must be a finite number >= 0"),
    ("gpt_oss", {"swiglu_alpha": None}, "swiglu_alpha must be a finite number"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 2}, "layer_types must be 'full_attention' or"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window must be an integer >= 1"),
    ("gpt_oss", {"quantization_config": {"quant_method": "quark"}}, "quantised with quark"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_name(name, fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        read(name, **fields)


def test_partial_rotary_is_refused():
    place = {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}} if IS_4 else {}
    with pytest.raises(ValueError, match="partial_rotary_factor must be 1.0"):
        read("deepseek_v3", **{"partial_rotary_factor": 0.5, **place})


# ---- DeepSeek-V3's checkpoints


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    """(folder, tensors) of a small one; tests may write other tensors there."""
    folder, _ = Checkpoints(tmp_path_factory.mktemp("v3")).make("deepseek_v3", "plain")
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    return folder, tensors


def start(folder, tensors, **options):
    save_file(tensors, folder / "model.safetensors")
    return LLM(folder, device="cpu", num_kv_blocks=8, **options)


def test_layers_that_predict_further_tokens_are_passed_over(v3):
    folder, tensors = v3
    further = {"model.layers.2.eh_proj.weight": torch.ones(4, 4), "model.layers.2.mlp.gate.weight": torch.ones(2, 2)}
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with_them, without = (
        start(folder, some, dtype="float32").generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
        for some in ({**tensors, **further}, tensors)
    )
    assert with_them == without
    with pytest.raises(ValueError, match=r"unexpected tensor model\.layers\.1\.eh_proj\.weight"):
        start(folder, {**tensors, "model.layers.1.eh_proj.weight": torch.ones(4, 4)})


def test_an_expert_that_is_missing_is_named(v3):
    folder, tensors = v3
    with pytest.raises(
        ValueError, match=r"1 tensors are missing.*model\.layers\.1\.mlp\.experts\.5\.down_proj\.weight"
    ):
        start(folder, {name: t for name, t in tensors.items() if "layers.1.mlp.experts.5.down_proj" not in name})


def test_the_bias_of_experts_is_loaded_without_rounding(v3):
    folder, tensors = v3
    llm = start(folder, tensors, dtype="bfloat16")
    gate = llm.engine.runner.model.model.layers[1].mlp.gate
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(gate.e_score_correction_bias, bias)
    assert not torch.equal(bias, bias.bfloat16().float()), "rounding would show"
