"""Types of rotary embedding are read as `transformers` reads them, or refused by name; the borders of LongRoPE.

`tests/extras/models` compares whole networks for every type.
"""

import json

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm_extras import LLM
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.phi3 import read_phi3_config
from tests.extras.models.architectures import ARCHITECTURES, Checkpoints, longrope
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


# ---- what is refused


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rope_type", ["proportional", "axial", "mrope"])
def test_unknown_rope_types_are_refused_by_name(where, rope_type):
    with pytest.raises(ValueError, match=f"rope_type '{rope_type}' is not supported, only default, .*yarn"):
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
        "architectures": [architecture.model_class.__name__]
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


@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 128])
def test_dynamic_frequencies_are_those_of_a_sequence_of_max_model_len(length):
    raw = raw_of("llama", {"type": "dynamic", "factor": 2.0})
    config = transformers.LlamaConfig.from_dict(dict(raw))
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=length)
    read = find_architecture(raw, 128)[1]
    found, factor = read.rope.frequencies(read.head_dim, length)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == 1


@pytest.mark.parametrize(
    "name",
    ["qwen3", "llama", "qwen2"]
    + [pytest.param(n, marks=pytest.mark.slow) for n in ("mistral", "qwen3_moe", "deepseek_v3")],
)
@pytest.mark.parametrize("scaled", ["yarn of Qwen", "linear", "dynamic"])
@pytest.mark.sparse
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
