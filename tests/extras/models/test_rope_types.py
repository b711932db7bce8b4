"""Types of rotary embedding are read as `transformers` reads them, or refused by name; the borders of LongRoPE.

`tests/extras/models` compares whole networks for every type.
"""

import dataclasses
import json
import re

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm_extras import LLM
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.phi3 import read_phi3_config
from tests.extras.models.architectures import ARCHITECTURES, Checkpoints, longrope, rope
from tests.extras.models.test_architectures import logits_of
from tests.extras.models.test_qwen3_variants import check_equals_transformers, read
from tests.test_qwen3 import SHAPE

ORIGINAL = 64


@pytest.mark.parametrize("length", [1, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 256])
def test_longrope_changes_its_factors_behind_the_original_length(length):
    shape = {**ARCHITECTURES["phi3"].shape, "head_dim": None, **longrope(ORIGINAL)}
    config = transformers.Phi3Config(**{key: value for key, value in shape.items() if value is not None})
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
    read = read_phi3_config(config.to_dict())
    frequencies, found_factor = read.rope.frequencies(read.head_dim, length)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert found_factor == pytest.approx(factor)
    short, _ = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=1)
    assert torch.equal(expected, short) == (length <= ORIGINAL)


def test_the_default_type_by_its_older_name():
    raw = {"rope_scaling": {"type": "default"}, "rope_theta": 2e5}
    theirs = transformers.Qwen3Config.from_dict(json.loads(json.dumps({**SHAPE, **raw})))
    check_equals_transformers(read(**raw), theirs)


@pytest.mark.parametrize("name", ["llama", "phi3", "deepseek_v3"])
@pytest.mark.parametrize(("other", "usual"), [("su", "longrope"), ("mrope", "default")])
def test_other_names_of_types(name, other, usual):
    raw = raw_of(name, None)
    size = raw.get("qk_rope_head_dim") or 32
    numbers = {"short_factor": [1.0 + i for i in range(size // 2)], "long_factor": [2.0 + i for i in range(size // 2)],
               "factor": 2.0, "original_max_position_embeddings": 32}  # fmt: skip
    numbers = {"mrope_section": [8, 4, 4]} if other == "mrope" else numbers
    for key, where in (("rope_type", "rope_scaling"), ("type", "rope_parameters")):
        found, expected = (find_architecture({**raw, where: {key: one, **numbers}})[1] for one in (other, usual))
        for length in (16, 64):
            for ours, theirs in zip(*(one.rope.frequencies(size, length) for one in (found, expected)), strict=True):
                assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
        assert dataclasses.replace(found, rope=None) == dataclasses.replace(expected, rope=None)


def test_llama_rotates_a_part_of_each_head_as_phi3_does(tmp_path):
    """transformers has no Llama that does. The weights are those of Phi-3, with its fused ones in parts."""
    fields = {**ARCHITECTURES["phi3"].shape, "head_dim": None, **rope("default", 300.0, partial_rotary_factor=0.75)}
    config = transformers.Phi3Config(**{key: value for key, value in fields.items() if key != "head_dim"})
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(config).eval()
    tensors = {}
    for key, tensor in model.state_dict().items():
        path, _, layer = key.rpartition(".mlp." if ".mlp." in key else ".self_attn.")
        if layer == "qkv_proj.weight":
            parts = zip("qkv", tensor.split((64, 32, 32)), strict=True)
            tensors |= {f"{path}.self_attn.{one}_proj.weight": part for one, part in parts}
        elif layer == "gate_up_proj.weight":
            parts = zip(("gate", "up"), tensor.chunk(2), strict=True)
            tensors |= {f"{path}.mlp.{one}_proj.weight": part for one, part in parts}
        else:
            tensors[key] = tensor
    save_file({key: one.contiguous() for key, one in tensors.items()}, tmp_path / "model.safetensors")
    raw = {key: value for key, value in fields.items() if value is not None} | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    prompt = [(7 * i * i + 3) % 200 for i in range(50)]
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    for backend in ("torch", "cpu"):
        options = {"dtype": "float32", "attention_backend": backend, "num_kv_blocks": 20, "block_size": 16}
        llm = LLM(tmp_path, max_model_len=64, device="cpu", **options)
        torch.testing.assert_close(logits_of(llm, prompt), expected, rtol=1e-4, atol=2e-4)


# ---- what is refused


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rope_type", ["proportional", ["yarn"]])
def test_unknown_rope_types_are_refused_by_name(where, rope_type):
    with pytest.raises(ValueError, match=f"rope_type {re.escape(repr(rope_type))} is not supported, only default, .*"):
        read(**{where: {"rope_type": rope_type, "factor": 2.0}})


@pytest.mark.parametrize("lacking", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_parameter_that_a_rope_type_lacks_is_named(lacking):
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    del llama3[lacking]
    with pytest.raises(ValueError, match=f"rope_type 'llama3' needs {lacking}"):
        read(rope_scaling=llama3)


def test_llama3_factors_in_the_wrong_order_are_refused():
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}
    with pytest.raises(ValueError, match="high_freq_factor must be > low_freq_factor"):
        read(rope_scaling=llama3)


def test_a_theta_that_would_be_lost_is_refused():
    """As after adding Qwen's advice for long contexts to a file that transformers 5 wrote."""
    with pytest.raises(ValueError, match="would lose its rope_theta 1000000"):
        read(
            rope_parameters={"rope_type": "default", "rope_theta": 1000000},
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        )


# ---- longer contexts than max_position_embeddings


SCALED = {  # of a model of 64 positions: what config.json says -> the longest sequence, as vLLM derives it
    "yarn of Qwen": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    "yarn of a longer file": ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 48}, 96),
    "yarn of another original": ({"rope_type": "yarn", "factor": 2.5}, 160),
    "linear": ({"rope_type": "linear", "factor": 3.0}, 192),
    "dynamic": ({"type": "dynamic", "factor": 2.0}, 128),
    "longrope": ({"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 8.0}, 64),
    "none": (None, 64),
}


def raw_of(name, scaling):
    """A config.json of transformers 4 with `rope_scaling`, as the model's card has it."""
    architecture = ARCHITECTURES[name]
    shape = {**architecture.shape, "max_position_embeddings": 64, "rope_theta": 10000.0, "rope_scaling": scaling}
    return {key: value for key, value in shape.items() if value is not None or key == "q_lora_rank"} | {
        "architectures": [architecture.class_name]
    }


@pytest.mark.parametrize("scaled", SCALED)
def test_the_longest_sequence_is_the_one_that_vllm_derives(scaled):
    scaling, longest = SCALED[scaled]
    raw = raw_of("llama", scaling)
    assert find_architecture(raw, longest)[1].max_position_embeddings == longest
    by_default = 64 if scaled == "dynamic" else longest  # which would rotate short sequences otherwise
    assert find_architecture(raw)[1].max_position_embeddings == by_default
    if scaled not in ("none", "longrope"):  # there the runner checks it
        with pytest.raises(ValueError, match=f"max_model_len must be at most {longest}, .* got {longest + 1}"):
            find_architecture(raw, longest + 1)


def test_a_gemma_3_config_has_the_length_after_scaling():
    raw = raw_of("gemma3", {"rope_type": "linear", "factor": 8.0})
    assert find_architecture(raw)[1].max_position_embeddings == 64


def test_a_factor_that_leaves_no_position_is_refused():
    with pytest.raises(ValueError, match="at most 0, the max_position_embeddings 64 times the factor 0.01"):
        find_architecture(raw_of("llama", {"rope_type": "linear", "factor": 0.01}))


@pytest.mark.parametrize("length", [63, 65, 128])
def test_dynamic_frequencies_are_those_of_a_sequence_of_max_model_len(length):
    raw = raw_of("llama", {"type": "dynamic", "factor": 2.0})
    config = transformers.LlamaConfig.from_dict(dict(raw))
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=length)
    read = find_architecture(raw, 128)[1]
    found, factor = read.rope.frequencies(read.head_dim, length)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == 1


@pytest.mark.parametrize(
    ("name", "scaled"),
    [
        *[("llama", "yarn of Qwen"), ("qwen3", "linear"), ("qwen2", "dynamic")],
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("mistral", "linear"), ("qwen3_moe", "dynamic"), ("deepseek_v3", "yarn of Qwen"))
        ),
    ],
)
def test_logits_of_a_prompt_that_is_longer_than_the_original_length(tmp_path, name, scaled):
    """transformers computes `max_model_len` tokens, so `dynamic` has the same theta there."""
    scaling, longest = SCALED[scaled]
    folder, model = Checkpoints(tmp_path).make(name, next(iter(ARCHITECTURES[name].variants)))
    raw = raw_of(name, scaling)
    (folder / "config.json").write_text(json.dumps(raw))
    model = ARCHITECTURES[name].model_class.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = [(7 * i * i + 3) % 200 for i in range(longest)]
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0, :-1]
    options = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True, "num_kv_blocks": 40}
    llm = LLM(folder, max_model_len=longest, block_size=16, device="cpu", **options)
    torch.testing.assert_close(logits_of(llm, prompt[:-1]), expected, rtol=1e-4, atol=2e-4)
