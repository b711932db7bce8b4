"""The config.json of SmolLM3 and Granite: what is left out, and what is refused by name.

`test_architectures.py` shows that what is read is computed as by `transformers`.
"""

import pytest
import transformers

from nanovllm_extras.models.architectures import find_architecture

SHAPE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 9,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def read(name, **fields):
    return find_architecture({"architectures": [f"{name}ForCausalLM"], **SHAPE, **fields})[1]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"no_rope_layer_interval": 3},
        {"no_rope_layers": [0, 1, 1, 0, 1, 0, 0, 1, 1]},
        {"no_rope_layers": [0] * 9, "use_sliding_window": True, "sliding_window": 7},
        {"use_sliding_window": True, "sliding_window": 7},
        {"sliding_window": 7},
    ],
    ids=str,
)
def test_layers_of_smollm3_are_those_of_transformers(fields):
    ours, theirs = read("SmolLM3", **fields), transformers.SmolLM3Config(**SHAPE, **fields)
    assert ours.rotated_layers == tuple(map(bool, theirs.no_rope_layers))
    windows = [theirs.sliding_window if one == "sliding_attention" else None for one in theirs.layer_types]
    assert [one.window for one in ours.attention_options] == (windows if any(windows) else [])
    assert (ours.rope.theta, ours.tie_word_embeddings) == (2e6, True)


def test_factors_of_granite_are_one_unless_the_file_has_others():
    ours, theirs = read("Granite"), transformers.GraniteConfig()
    for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert {one.scale for one in read("Granite", attention_multiplier=0.25).attention_options} == {0.25}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("SmolLM3", {"no_rope_layers": [1] * 8}, "no_rope_layers must have one entry for each of the 9 layers"),
        ("SmolLM3", {"no_rope_layers": [1] * 8 + [2]}, "no_rope_layers must be 0 or 1, config.json has 2"),
        ("SmolLM3", {"no_rope_layers": 1}, "no_rope_layers must be a list"),
        ("SmolLM3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be an integer >= 1"),
        ("SmolLM3", {"layer_types": ["linear_attention"] * 9}, "layer_types must be 'full_attention' or"),
        ("SmolLM3", {"layer_types": ["sliding_attention"] * 9}, "sliding_window must be an integer >= 1"),
        ("SmolLM3", {"hidden_act": "relu"}, "hidden_act must be"),
        ("Granite", {"residual_multiplier": "2"}, "residual_multiplier must be a finite number > 0"),
        ("Granite", {"logits_scaling": 0}, "logits_scaling must be a finite number > 0"),
        ("Granite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused_by_name(name, fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        read(name, **fields)
