"""Checkpoints that are quantised already: `architectures.py` asks `read_format`, `choose_loader.py` asks `loader`.

Each projection that has the tensors of the format becomes a layer of `quantised_linear.py`. Other quantised
weights, such as routers and output layers, are widened to the model's dtype. All others are loaded as always.
Weights in fp8 (DeepSeek's, Qwen's) and MXFP4 (gpt-oss's) are widened to the model's dtype: no kernel here multiplies by
them.
"""

import logging
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from nanovllm.layers.linear import FusedLinear, Linear
from nanovllm.loader import allocate, checkpoint_files, fill
from nanovllm_extras.quantization.formats import READERS, Format
from nanovllm_extras.quantization.fp8_weights import KV_SCALES, Fp8, read_compressed_fp8, read_fp8
from nanovllm_extras.quantization.mxfp4 import Mxfp4, read_mxfp4
from nanovllm_extras.quantization.quantise import VECTOR, Finish
from nanovllm_extras.quantization.quantised_linear import QuantisedFusedLinear, QuantisedLinear, QuantisedWeight
from nanovllm_extras.weights import (
    BARE,
    OF_QUANTISED,
    iterate_checkpoint,
    load_model,
    places_of_stored,
    plain_tensors,
)

logger = logging.getLogger(__name__)


def read_format(field: str, raw: Any) -> Format | Fp8 | Mxfp4:
    """Parse `raw`, the value of `field` in config.json. Raises ValueError if the format is not supported."""
    given = raw if isinstance(raw, Mapping) else {}
    name = given.get("quant_method") or given.get("format") or raw
    known: dict[str, Any] = {**READERS, "fp8": read_fp8, "mxfp4": read_mxfp4}
    if field != "quantization_config" or not isinstance(name, str) or name not in known:
        raise ValueError(
            f"config.json has a {field}: the weights are quantised with {name}, which is not supported; "
            f"known are {', '.join(known)}. Take the same model in bfloat16, float16 or float32"
        )
    if name == "compressed-tensors" and given.get("format") in ("float-quantized", "naive-quantized"):
        return read_compressed_fp8(given)
    read: Callable[[Any], Format | Fp8 | Mxfp4] = known[name]
    return read(given)


def load_stored(form: Any, finish: Finish, model_class: Any, shape: Any, backend: Any, dtype: torch.dtype,
                device: torch.device, folder: Path, dummy_seed: int | None = None) -> Any:  # fmt: skip
    """Load a checkpoint of format `form`, with the arguments of `load_model`.

    Each quantised layer becomes what `finish` makes of it before the next one is loaded.
    """
    checkpoint = Checkpoint(folder)
    if isinstance(form, Fp8 | Mxfp4):
        logger.info("the checkpoint's weights in %s are widened to %s", type(form).__name__.lower(), dtype)
        return load_model(model_class, shape, backend, dtype, device, folder, read=form.reader(checkpoint, dtype))
    return load_projections(form, finish, checkpoint, model_class, shape, backend, dtype, device)


class Checkpoint:
    """The tensors of a folder, by the names that the model has for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, tuple[Path, str]] = {}  # file, and name in the file
        for file, wanted in checkpoint_files(folder).items():
            with safe_open(file, framework="pt") as tensors:
                names = set(tensors.keys()) & (wanted or set(tensors.keys()))
            self.files |= {BARE.sub("model.", name): (file, name) for name in names}

    def read(self, name: str) -> Tensor:
        file, stored_name = self.files[name]
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(stored_name)


def load_projections(
    form: Format,
    finish: Finish,
    checkpoint: Checkpoint,
    model_class: Any,
    config: Any,
    backend: Any,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    with torch.device("meta"):
        model = model_class(config, backend)
    found = find_projections(form, checkpoint, model)
    for path, layer in found.items():  # without weights: their memory is never taken
        set_layer(model, path, quantised_version_of(layer))
    model = allocate(model, dtype, device)
    consumed: set[str] = set()
    for path, layer in found.items():
        quantised = model.get_submodule(path)
        parts = parts_of(path, layer)
        weights = [decode(form, checkpoint, part, layer.weight.shape[1], rows) for part, rows in parts.items()]
        quantised.quantised = joined(path, weights, device)
        biases = [read_bias(checkpoint, part, layer.bias is not None) for part in parts]
        if layer.bias is not None:
            quantised.bias.copy_(torch.cat(biases))
        set_layer(model, path, finish(quantised))
        consumed |= {f"{part}.{name}" for part in parts for name in (*form.tensors, "bias")}
    others = find_others(form, checkpoint, model)
    consumed |= {f"{path}.{name}" for path in others for name in (*form.tensors, "bias")}
    is_unused = getattr(model, "is_unused", lambda name: False)

    def read_plain(file: Any, stored_name: str) -> Tensor | None:
        name = BARE.sub("model.", stored_name)
        if name in consumed or is_unused(name) or KV_SCALES.search(name):
            return None
        if OF_QUANTISED.search(name):
            raise ValueError(f"unexpected tensor {name} in {checkpoint.folder}: the model has no such quantised layer")
        return file.get_tensor(stored_name)

    plain = plain_tensors(iterate_checkpoint(checkpoint.folder, read_plain), is_unused, checkpoint.folder)
    widened = ((f"{path}.weight", widen(form, checkpoint, path, shape)) for path, shape in others.items())
    fill(places_of_stored(model), chain(plain, widened), checkpoint.folder)
    return model


def quantised_version_of(layer: Any) -> nn.Module:
    """Return the quantised layer that replaces `layer`. Its weight is loaded later."""
    if type(layer) is Linear:
        return QuantisedLinear(None, layer.bias)
    return QuantisedFusedLinear(None, layer.bias, layer.parts)


def parts_of(path: str, layer: Any) -> dict[str, int]:
    """Return the projections of a layer: name in the checkpoint -> number of outputs."""
    if not isinstance(layer, FusedLinear) or getattr(layer, "is_stored_fused", False):
        return {path: len(layer.weight)}
    parent = path.rpartition(".")[0]
    return {f"{parent}.{part}": rows for part, rows in layer.parts.items()}


def set_layer(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)


def find_projections(form: Format, checkpoint: Checkpoint, model: nn.Module) -> dict[str, Any]:
    """Return the quantised layers by path. Raises ValueError if only a part of a layer is quantised."""
    found: dict[str, Any] = {}
    for path, layer in model.named_modules():
        if type(layer) not in (Linear, FusedLinear):
            continue
        parts = {part: f"{part}.{form.mark}" in checkpoint.files for part in parts_of(path, layer)}
        if not any(parts.values()):
            continue
        if not all(parts.values()):
            plain = ", ".join(part for part in parts if not parts[part])
            raise ValueError(f"{plain} in {checkpoint.folder} is not quantised, but what is multiplied with it is")
        if layer.weight.shape[1] % VECTOR:
            raise ValueError(f"{path} has {layer.weight.shape[1]} inputs, quantised layers need a multiple of {VECTOR}")
        found[path] = layer
    if not found:
        raise ValueError(f"config.json says {form.name}, but no projection in {checkpoint.folder} is quantised so")
    return found


def find_others(form: Format, checkpoint: Checkpoint, model: nn.Module) -> dict[str, torch.Size]:
    """Return the other quantised weights, by path, with their shapes: routers, embeddings, DeepSeek's up-projections.

    No kernel multiplies by them as they are stored, so they are widened.
    """
    return {
        path: layer.weight.shape
        for path, layer in model.named_modules()
        if isinstance(getattr(layer, "weight", None), Tensor) and f"{path}.{form.mark}" in checkpoint.files
    }


def widen(form: Format, checkpoint: Checkpoint, path: str, shape: torch.Size) -> Tensor:
    """Return a quantised weight as floats: [out, in] float32."""
    read_bias(checkpoint, path, is_wanted=False)
    return decode(form, checkpoint, path, shape[1], shape[0]).dequantised()


def decode(form: Format, checkpoint: Checkpoint, part: str, num_inputs: int, num_outputs: int) -> QuantisedWeight:
    names = [name for name in form.tensors if f"{part}.{name}" in checkpoint.files]
    if missing := [name for name in form.tensors if name not in (*names, "g_idx")]:
        raise ValueError(f"{part} in {checkpoint.folder} lacks {', '.join(missing)}")
    tensors = {name: checkpoint.read(f"{part}.{name}") for name in names}
    try:
        weight = form.decode(tensors, num_inputs)
    except ValueError as error:
        raise ValueError(f"{part} in {checkpoint.folder}: {error}") from error
    if len(weight.q) != num_outputs:
        raise ValueError(f"{part} in {checkpoint.folder} has {len(weight.q)} outputs, the model needs {num_outputs}")
    return weight


def joined(path: str, weights: list[QuantisedWeight], device: torch.device) -> QuantisedWeight:
    """Concatenate the parts of a layer along its outputs."""
    first = weights[0]
    for other in weights[1:]:
        if not equal(first.order, other.order):
            raise ValueError(f"the projections in {path} have their inputs in different orders (desc_act, g_idx)")
    zeros = [weight.zeros for weight in weights]
    if any(one is not None for one in zeros):
        half = 2 ** (first.bits - 1)
        zeros = [
            torch.full_like(weight.scales, half, dtype=torch.uint8) if weight.zeros is None else weight.zeros
            for weight in weights
        ]
    return QuantisedWeight(
        torch.cat([weight.q for weight in weights]).to(device),
        torch.cat([weight.scales for weight in weights]).to(device),
        None if zeros[0] is None else torch.cat([one for one in zeros if one is not None]).to(device),
        first.bits,
        first.group_size,
        None if first.order is None else first.order.to(device),
    )


def equal(order: Tensor | None, other: Tensor | None) -> bool:
    return order is other or (order is not None and other is not None and torch.equal(order, other))


def read_bias(checkpoint: Checkpoint, part: str, is_wanted: bool) -> Tensor:
    """Read a bias. Some tools write zeros for layers without a bias; other values raise ValueError."""
    name = f"{part}.bias"
    if name not in checkpoint.files:
        if is_wanted:
            raise ValueError(f"{name} is missing in {checkpoint.folder}")
        return torch.empty(0)
    bias = checkpoint.read(name)
    if not is_wanted and bool(bias.any()):
        raise ValueError(f"unexpected tensor {name} in {checkpoint.folder}: the model's layer has no bias")
    return bias
