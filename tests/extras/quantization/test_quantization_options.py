"""`quantization`: which values are taken, and how others are refused."""

import pytest

from nanovllm_extras import Config
from nanovllm_extras.weights.quantization_options import Quantization, read_options


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("int8", Quantization("int8")),
        ("int4", Quantization("int4", 128, True)),
        ({"method": "int4", "group_size": 32}, Quantization("int4", 32)),
        ('{"method": "int8", "embeddings": false}', Quantization("int8", embeddings=False)),
        ({"method": "int8", "embeddings": "int4"}, Quantization("int8", embeddings="int4")),
    ],
)
def test_good_values(given, options):
    assert read_options(given) == options
    assert Config("a-model", quantization=given).quantization == given


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("int3", ValueError, "quantization must be one of int8, int4, awq, gptq, compressed-tensors, fp8, got 'int3'"),
        ("", ValueError, "quantization must be one of int8, int4, awq, gptq, compressed-tensors, fp8, got ''"),
        (8, TypeError, "quantization must be one of int8, int4, a dict or None, got 8"),
        (["int8"], TypeError, "a dict or None"),
        ("{", ValueError, "quantization must be a method, a dict or JSON, got '{'"),
        (
            {},
            ValueError,
            r"quantization\['method'\] must be one of int8, int4, got None",
        ),
        ({"method": "awq"}, ValueError, "got 'awq'"),
        ({"method": "int4", "group_size": 100}, ValueError, r"\['group_size'\] must be one of 32, 64, 128, got 100"),
        (
            {"method": "int4", "embeddings": 1},
            ValueError,
            r"\['embeddings'\] must be True, False, int8, int4, got 1",
        ),
        ({"method": "int4", "bits": 4}, TypeError, "no key 'bits'; legal are method, group_size, embeddings"),
    ],
)
def test_bad_values_are_named(given, error, said):
    with pytest.raises(error, match=said):
        Config("a-model", quantization=given)
