"""Types of rotary embedding are read as `transformers` reads them, or refused by name; the borders of LongRoPE.

`tests/extras/models` compares whole networks for every type.
"""

import json

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.extras.models.phi3 import read_phi3_config
from tests.extras.models.architectures import ARCHITECTURES, longrope
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
