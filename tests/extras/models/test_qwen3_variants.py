"""config.json of all kinds of Qwen3 is read as `transformers` reads it, or refused.

`tests/test_qwen3.py` has the plain ones, which the core reads. The network as a whole is compared in `test_parity.py`.
"""

import json

import pytest
import transformers

from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.qwen3_variants import Qwen3VariantForCausalLM, read_qwen3_config
from tests.test_qwen3 import NAMES as CORE_NAMES
from tests.test_qwen3 import SHAPE, WRITTEN_BY_TRANSFORMERS_5, rope_theta_of

NAMES = [*CORE_NAMES, "hidden_act", "initializer_range"]


def read(**raw):
    return read_qwen3_config({**SHAPE, **raw})


def check_equals_transformers(config, theirs):
    for name in NAMES:
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.qkv_bias == config.o_bias == theirs.attention_bias
    assert config.rope.theta == config.rope_theta == rope_theta_of(theirs)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"rope_theta": 1000000},
        {"rope_scaling": None, "rope_theta": 2e5},
        {"rope_parameters": {"rope_theta": 3e5, "rope_type": "default"}},
        pytest.param({"rope_parameters": {"rope_theta": 3e5}, "rope_theta": 7.0}, marks=WRITTEN_BY_TRANSFORMERS_5),
        pytest.param({"rope_parameters": {"rope_type": "default"}, "rope_theta": 2e5}, marks=WRITTEN_BY_TRANSFORMERS_5),
        {"num_key_value_heads": None},
        {"num_key_value_heads": None, "num_attention_heads": 6},
        {"num_key_value_heads": None, "num_attention_heads": 64},
        {"layer_types": ["full_attention"] * 2},
    ],
    ids=str,
)
def test_config_that_leaves_something_out_means_what_it_means_to_transformers(raw):
    theirs = transformers.Qwen3Config.from_dict(json.loads(json.dumps({**SHAPE, **raw})))
    check_equals_transformers(read(**raw), theirs)


@pytest.mark.parametrize("name", SHAPE)
def test_missing_field_is_named(name):
    with pytest.raises(ValueError, match=f"config.json lacks {name}$"):
        read_qwen3_config({key: value for key, value in SHAPE.items() if key != name})


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="must be even, it is 33"):
        read(head_dim=33)


def test_partial_rotary_is_refused():
    with pytest.raises(ValueError, match=r"partial_rotary_factor.*0\.5"):
        read(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})


@pytest.mark.parametrize("hidden_act", ["gelu", "relu"])
def test_other_activations_are_refused(hidden_act):
    with pytest.raises(ValueError, match=f"hidden_act must be 'silu' or .*, config.json has '{hidden_act}'"):
        read(hidden_act=hidden_act)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of num_key_value_heads, config.json has 32 and 5"):
        read(num_key_value_heads=5)


@pytest.mark.parametrize(
    ("raw", "network"),
    [
        ({}, Qwen3ForCausalLM),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}, Qwen3ForCausalLM),
        ({"use_sliding_window": True, "max_window_layers": 1}, Qwen3VariantForCausalLM),
        ({"hidden_act": "gelu_pytorch_tanh"}, Qwen3VariantForCausalLM),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, Qwen3VariantForCausalLM),
    ],
    ids=str,
)
def test_the_core_computes_what_it_can(raw, network):
    """With the rotary positions of the file: the core's network reads `rope_theta`, the others `rope`."""
    found, config = find_architecture({"architectures": ["Qwen3ForCausalLM"], **SHAPE, "rope_theta": 2e5, **raw})
    assert found is network
    assert config.rope_theta == config.rope.theta == 2e5
