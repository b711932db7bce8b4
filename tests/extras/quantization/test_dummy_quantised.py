"""`load_format="dummy"` with a checkpoint that is quantised: random numbers in the layers that it would have.

The oracle is the same engine with the checkpoint's weights: the same layers, with the same shapes and dtypes.
"""

import pytest
import torch

from nanovllm_extras.kernels.cpu.cpu_quantised import QuantisedProduct
from tests.conftest import every_second
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.quantization.packed_models import Models, greedy_of, make_llm, write_packed
from tests.extras.quantization.packers import write
from tests.extras.quantization.test_stored_weights import FLOATS, FORMATS


def tensors_of(llm):
    """Return shape and dtype of each tensor of each layer, and the bits and groups of quantised ones."""
    model, found = llm.engine.runner.model, {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[name] = (tuple(tensor.shape), tensor.dtype)
    for path, layer in model.named_modules():
        if hasattr(layer, "quantised"):
            one = layer.quantised
            zeros = None if one.zeros is None else (tuple(one.zeros.shape), one.zeros.dtype)
            found[path] = (type(layer), tuple(one.q.shape), one.q.dtype, tuple(one.scales.shape), zeros, one.bits)
    return found


@pytest.mark.parametrize(
    "name", every_second(["pack-quantized, zeros", "gptq, 8 bits", "fp8 in blocks", "int-quantized"])
)
def test_layers_are_those_of_the_checkpoint(tmp_path, name):
    write(tmp_path / "model", *{**FORMATS, **FLOATS}[name])
    stored = make_llm(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    dummy = make_llm(tmp_path / "model", load_format="dummy")
    assert tensors_of(dummy) == tensors_of(stored)
    assert greedy_of(dummy, [[5, 7, 11]])[0][0]


@pytest.mark.parametrize("kind", ["Gemma4", pytest.param("Qwen3_5", marks=pytest.mark.slow)])
def test_models_of_any_kind(tmp_path_factory, tmp_path, kind):
    folder = Models(tmp_path_factory.mktemp("models")).make(kind)[0]
    write_packed(tmp_path / "model", folder, "pack-quantized")
    (tmp_path / "model" / "model.safetensors").unlink()
    greedy_of(make_llm(tmp_path / "model", load_format="dummy"), [[5, 7, 11]])


def test_weights_depend_on_the_seed_and_have_the_models_deviation(tmp_path):
    write(tmp_path / "model", *FORMATS["pack-quantized, zeros"])
    (tmp_path / "model" / "model.safetensors").unlink()
    found = []
    for seed in (3, 3, 4):
        llm = make_llm(tmp_path / "model", load_format="dummy", seed=seed)
        layer = llm.engine.runner.model.model.layers[1].mlp.down_proj
        found.append(layer.quantised.dequantised())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    deviation = llm.engine.runner.shape.initializer_range
    assert float(found[0].std()) == pytest.approx(deviation, rel=0.02)
    assert float(found[0].mean()) == pytest.approx(0, abs=0.01 * deviation)


def test_kernels_multiply_by_random_weights(tmp_path):
    need_a_compiler(torch.float32)
    write(tmp_path / "model", *FORMATS["awq"])
    (tmp_path / "model" / "model.safetensors").unlink()
    fast, plain = (
        make_llm(tmp_path / "model", load_format="dummy", attention_backend=backend) for backend in ("cpu", "torch")
    )
    assert any(isinstance(layer, QuantisedProduct) for layer in fast.engine.runner.model.modules())
    (_, ours), (_, theirs) = (greedy_of(llm, [[5, 7, 11]])[0] for llm in (fast, plain))
    assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
