"""Which layers of Qwen's models see only a window of tokens."""

import pytest

from nanovllm_extras.models.qwen3_variants import Qwen3VariantDecoderLayer
from tests.extras.models.test_qwen3_variants import read


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}, [None, 4096]),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}, [4096, 4096]),
        ({"use_sliding_window": True, "sliding_window": 4096}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, [None, None]),
        (
            {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
            [7, None],
        ),
    ],
    ids=str,
)
def test_windows_of_layers(raw, windows):
    config = read(**raw)
    assert [options.window for options in config.attention_options] == windows
    assert config.widest_window == (None if None in windows else max(windows))


def test_each_layer_has_its_own_window():
    config = read(use_sliding_window=True, sliding_window=4096, max_window_layers=1)
    layers = [Qwen3VariantDecoderLayer(config, None, layer).self_attn.attention for layer in range(2)]
    assert [options.window for layer in layers for options in layer.options] == [None, 4096]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window must be an integer"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types must be .*'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types must have one entry for each of the 2 layers"),
    ],
    ids=str,
)
def test_layer_types_that_are_not_served_are_refused(raw, message):
    with pytest.raises((ValueError, TypeError), match=message):
        read(**raw)
