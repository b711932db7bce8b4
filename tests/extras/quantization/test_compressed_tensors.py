"""What compressed-tensors itself writes is read as it reads it."""

import pytest
import torch

from nanovllm_extras.weights.formats import read_compressed
from nanovllm_extras.weights.fp8_weights import read_compressed_fp8
from tests.extras.quantization.packers import of_compressed

pytestmark = pytest.mark.slow
SHAPES = [(64, 128), (40, 256), (17, 96)]
SCHEMES = [
    ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}),
    ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
]


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("compressed_tensors", reason="needs the extra `formats`")


def compressed(library, name, weights, weight):
    """-> the tensors that the library stores, and the weight that it makes of them"""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    if args.strategy == "block":
        rows, columns = args.block_structure
        counts = [-(-size // step) for size, step in zip(weight.shape, (rows, columns), strict=True)]
        scale, zero = torch.rand(counts) / 100 + 0.01, None
    else:
        groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(name)
    stored = compressor.compress({key: one for key, one in state.items() if one is not None}, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


@pytest.mark.parametrize(("name", "weights"), SCHEMES, ids=str)
def test_integers(library, name, weights):
    for shape in SHAPES:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.2
        stored, expected = compressed(library, name, weights, weight)
        form = read_compressed(of_compressed(name, **weights))
        assert set(form.tensors) == set(stored), "no tensor is missed"
        torch.testing.assert_close(form.decode(stored, shape[1]).dequantised(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strategy", [{"strategy": "channel"}, {"strategy": "block", "block_structure": [32, 64]}])
def test_floats(library, strategy):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, **strategy}
    for shape in SHAPES:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        stored, expected = compressed(library, "float-quantized", weights, weight)
        form = read_compressed_fp8(of_compressed("float-quantized", **weights))
        widened = form.widened("weight", stored["weight"], stored["weight_scale"])
        torch.testing.assert_close(widened, expected.float(), rtol=1e-6, atol=1e-6)
