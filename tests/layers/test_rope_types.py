"""Frequencies of LongRoPE are those of `transformers`, on both sides of the original length.

`tests/models` compares whole networks for every type; here are the borders.
"""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.layers.rope_types import rope_frequencies
from nanovllm.models.phi3 import read_phi3_config
from tests.models.architectures import ARCHITECTURES, longrope

ORIGINAL = 64


@pytest.mark.parametrize("length", [1, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 256])
def test_longrope_changes_its_factors_behind_the_original_length(length):
    shape = {**ARCHITECTURES["phi3"].shape, "head_dim": None, **longrope(ORIGINAL)}
    config = transformers.Phi3Config(**{key: value for key, value in shape.items() if value is not None})
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
    read = read_phi3_config(config.to_dict())
    frequencies, found_factor = rope_frequencies(read.rope, read.head_dim, length)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert found_factor == pytest.approx(factor)
    short, _ = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=1)
    assert torch.equal(expected, short) == (length <= ORIGINAL)
