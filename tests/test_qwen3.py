"""config.json is read as `transformers` reads it, or refused; layers compute what those of `transformers` compute.

The network as a whole is compared in `test_llm.py`.
"""

import importlib
import json

import pytest
import torch
import transformers

from nanovllm.layers.basic import ApplyRotary, Embedding, FusedLinear, GatedMLP, Linear, RMSNorm, Rotary
from nanovllm.models.qwen3 import Qwen3ForCausalLM, read_qwen3_config
from nanovllm.plugins import find_architecture

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}

# fields that keep their names
NAMES = [
    *SHAPE,
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
]

# as Qwen published it, written by transformers 4
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(**raw):
    return read_qwen3_config({**SHAPE, **raw})


WRITTEN_BY_TRANSFORMERS_5 = pytest.mark.skipif(
    transformers.__version__.startswith("4."), reason="transformers 4 does not understand what 5 writes here"
)


# ---- config.json


def test_config_of_qwen3_0_6b():
    config = read_qwen3_config(QWEN3_0_6B)
    assert {name: getattr(config, name) for name in NAMES} == {name: QWEN3_0_6B[name] for name in NAMES}
    assert config.rope_theta == 1e6
    assert config.dtype == "bfloat16"


def check_equals_transformers(config, theirs):
    for name in NAMES:
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.rope_theta == rope_theta_of(theirs)


def rope_theta_of(theirs):
    """transformers 5 keeps it in `rope_parameters`, 4 beside it."""
    return theirs.rope_parameters["rope_theta"] if hasattr(theirs, "rope_parameters") else theirs.rope_theta


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope_theta": 5_000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 77},
        {"tie_word_embeddings": True, "attention_bias": True, "initializer_range": 0.5},
        {"dtype": "bfloat16"},
        pytest.param({"dtype": torch.float16}, marks=WRITTEN_BY_TRANSFORMERS_5),
        {"sliding_window": 128, "use_sliding_window": False},
    ],
    ids=str,
)
def test_what_transformers_writes_is_read_as_it_means_it(tmp_path, options):
    theirs = transformers.Qwen3Config(**SHAPE, **options)
    theirs.save_pretrained(tmp_path)
    config = read_qwen3_config(json.loads((tmp_path / "config.json").read_text()))
    check_equals_transformers(config, theirs)
    dtype = theirs.dtype if hasattr(theirs, "dtype") else theirs.torch_dtype
    assert config.dtype == str(dtype or "float32").removeprefix("torch.")


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
    with pytest.raises(ValueError, match="head_dim must be even, .* got 33, 32 and 32"):
        read(head_dim=33)


@pytest.mark.parametrize("hidden_act", ["gelu", "relu"])
def test_other_activations_are_refused(hidden_act):
    with pytest.raises(ValueError, match=f"hidden_act must be 'silu' or None, config.json has '{hidden_act}'"):
        read(hidden_act=hidden_act)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of num_key_value_heads, got 128, 32 and 5"):
        read(num_key_value_heads=5)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window must be False or None, .* has True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be 'full_attention', .*sliding"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type must be 'default' or None, .* 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type must be 'default' or None, .* 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type must be 'default' or None, .*llama3"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": {"rope_type": "yarn"}},
            "rope_type must be 'default' or None, .*yarn",
        ),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor must be .* has 0\.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config must be None, .* 'gptq'"),
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        read(**raw)


@pytest.mark.parametrize(
    ("raw", "exception"),
    [
        ({"vocab_size": "100"}, TypeError),
        ({"num_hidden_layers": 0}, ValueError),
        ({"head_dim": 1.5}, TypeError),
        ({"rope_theta": -1.0}, ValueError),
        ({"rms_norm_eps": "small"}, TypeError),
        ({"tie_word_embeddings": "yes"}, TypeError),
        ({"attention_bias": 1}, TypeError),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_named(raw, exception):
    with pytest.raises(exception, match=f"config.json: {next(iter(raw))} must be "):
        read(**raw)


def test_the_network_is_found_by_its_name():
    assert find_architecture(QWEN3_0_6B) is Qwen3ForCausalLM


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
def test_other_architectures_are_refused(architectures):
    with pytest.raises(ValueError, match="architectures must name one of .*Qwen3ForCausalLM.*, got") as error:
        find_architecture({**QWEN3_0_6B, "architectures": architectures})
    assert str(architectures) in str(error.value)


# ---- layers


@pytest.fixture(scope="module")
def oracle():
    """The layers of `transformers`, which take a second to import."""
    return importlib.import_module("transformers.models.qwen3.modeling_qwen3")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 1e-2), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)])
def test_rms_norm_equals_transformers(oracle, dtype, eps):
    ours, theirs = RMSNorm(48, eps), oracle.Qwen3RMSNorm(48, eps)
    weight = normal(48, seed=1)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    for scale in (1e-3, 1.0, 300.0):
        x = normal(5, 3, 48, dtype=dtype) * scale
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("head_dim", "theta", "dtype", "tolerance"),
    [(8, 1e4, torch.float32, 1e-6), (64, 1e6, torch.bfloat16, 2**-7), (128, 1e6, torch.float16, 2**-10)],
)
def test_rotary_equals_transformers(oracle, head_dim, theta, dtype, tolerance):
    config = transformers.Qwen3Config(**{**SHAPE, "head_dim": head_dim}, rope_theta=theta)
    positions = torch.tensor([0, 1, 2, 17, 1023, 4096, 40_959], dtype=torch.int32)
    q, k = normal(7, 4, head_dim, dtype=dtype), normal(7, 2, head_dim, seed=1, dtype=dtype)
    cos, sin = oracle.Qwen3RotaryEmbedding(config)(q, positions[None].long())
    theirs = oracle.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    cos, sin = Rotary(head_dim, theta)(positions, dtype)
    assert cos.shape == sin.shape == (7, 1, head_dim // 2)
    for ours, their in zip((q, k), theirs, strict=True):
        turned = ApplyRotary()(ours, cos, sin)
        assert turned.dtype == dtype
        torch.testing.assert_close(turned, their[0].transpose(0, 1), rtol=tolerance, atol=tolerance)


def test_mlp_equals_transformers(oracle):
    theirs = oracle.Qwen3MLP(transformers.Qwen3Config(**SHAPE))
    ours = GatedMLP(32, 48)
    with torch.no_grad():
        ours.gate_up_proj.weight.copy_(torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight]))
        ours.down_proj.weight.copy_(theirs.down_proj.weight)
        x = normal(6, 32)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_linear_equals_its_parts_one_by_one(bias):
    parts = {"q_proj": 8, "k_proj": 4, "v_proj": 6}
    fused = FusedLinear(16, parts, bias)
    x, outs, start = normal(5, 16, seed=9), [], 0
    with torch.no_grad():
        for i, (name, rows) in enumerate(parts.items()):
            single = Linear(16, rows, bias)
            for parameter_name, parameter in single.named_parameters():
                parameter.copy_(normal(*parameter.shape, seed=i))
                getattr(fused, parameter_name)[start : start + rows] = parameter
            outs.append(single(x))
            start += rows
            expected = x.double() @ single.weight.double().T + (single.bias.double() if bias else 0)
            torch.testing.assert_close(outs[-1].double(), expected, rtol=1e-5, atol=1e-5, msg=name)
        assert [out.shape[-1] for out in fused(x)] == [8, 4, 6]
        for out, expected in zip(fused(x), outs, strict=True):
            torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_an_embedding_is_a_table_and_scores_its_tokens():
    table = Embedding(11, 8)
    with torch.no_grad():
        table.weight.copy_(normal(11, 8))
        assert torch.equal(table(torch.tensor([3, 0, 3], dtype=torch.int32)), table.weight[[3, 0, 3]])
        hidden = normal(4, 8, seed=1)
        torch.testing.assert_close(table.logits(hidden), hidden @ table.weight.T)
