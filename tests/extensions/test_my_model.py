"""`examples/extensions/my_model.py`: the oracle is transformers' OLMo 2, with random weights."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from nanovllm import LLM, SamplingParams
from nanovllm.extension import import_extension
from tests.conftest import hf_greedy

EXTENSION = Path(__file__).parents[2] / "examples" / "extensions" / "my_model.py"
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
VARIANTS = {
    "groups of heads": {},
    "as many heads of K and V": {"num_key_value_heads": None, "rms_norm_eps": 1e-2},
    "tied": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "biases": {"attention_bias": True},
}


def make_checkpoint(folder, **fields):
    config = transformers.Olmo2Config(**{**SHAPE, **fields}, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    model = transformers.Olmo2ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:  # not 1 and 0, so that a wrong place would show
            weight.data = 1 + 0.5 * torch.randn(weight.shape)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_transformers(tmp_path, variant):
    """Prompts in chunks of at most 9 tokens, of which two share a prefix."""
    model = make_checkpoint(tmp_path, **VARIANTS[variant])
    llm = LLM(tmp_path, extension=EXTENSION, attention_backend="torch", block_size=4, max_num_batched_tokens=9)
    prompts = [[5, 6, 7], [*range(10, 31)], [*range(10, 27), 3]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [hf_greedy(model, one, 12) for one in prompts]


def test_norms_round_where_transformers_rounds():
    own = import_extension(EXTENSION).Olmo2RMSNorm(32, 1e-5)
    theirs = transformers.models.olmo2.modeling_olmo2.Olmo2RMSNorm(32, 1e-5).bfloat16()
    x, weight = torch.randn(2, 50, 32).bfloat16()
    own.weight.data = theirs.weight.data = weight[0]
    assert torch.equal(own(x), theirs(x))


def test_missing_fields_have_the_defaults_of_transformers(tmp_path):
    model = make_checkpoint(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    required = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    raw = {name: raw[name] for name in (*required, "num_attention_heads")}
    config, defaults = import_extension(EXTENSION).read_olmo2_config(raw), transformers.Olmo2Config()
    for name in ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_bias"):
        assert getattr(config, name) == getattr(defaults, name), name
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.rope_theta == defaults.rope_parameters["rope_theta"]
    assert config.head_dim == model.model.layers[0].self_attn.head_dim
