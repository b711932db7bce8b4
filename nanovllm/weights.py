"""The weights of a checkpoint: from safetensors files to their places in a model, strictly.

Each tensor is copied straight into its place on the device, so the weights are never in memory twice. A tensor that is
missing, unexpected or of another shape is an error that names it. Nothing is ever unpickled. Called by `assembly.py`.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from nanovllm.checkpoint import read_json
from nanovllm.checks import extra
from nanovllm.layers.backends import AttentionBackend
from nanovllm.layers.linear import FusedLinear
from nanovllm.models.config import ModelConfig

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OF_QUANTISED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|input_scale)$")  # GPTQ, AWQ, FP8
INDEX_FILE = "model.safetensors.index.json"
Read = Callable[[Any, str], torch.Tensor | None]  # a tensor of an open file, a part of it, or None: not needed


def load_model(
    model_class: Any,
    config: ModelConfig,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
    dummy_seed: int | None = None,
    read: Read = safe_open.get_tensor,
) -> Any:
    """The network on `device`, with the weights of `folder`, or with random ones of seed `dummy_seed`."""
    with torch.device("meta"):  # without memory, which is then allocated once, in the right dtype on the right device
        model = model_class(config, backend)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    if dummy_seed is None:
        load_weights(model, folder, read)
    else:
        with extra("extras/dummy_weights.py", "load_format='dummy'"):
            from nanovllm.extras.dummy_weights import init_dummy_weights
        init_dummy_weights(model, dummy_seed, config.initializer_range)
    return model


def load_weights(model: nn.Module, folder: Path, read: Read = safe_open.get_tensor) -> None:
    """Copy each tensor of the checkpoint into its place; ValueError if checkpoint and model don't match exactly."""
    places = checkpoint_places(model)
    is_unused = getattr(model, "is_unused", lambda name: False)  # a network has it whose checkpoints hold more
    filled: dict[int, str] = {}
    for name, tensor in iterate_checkpoint(folder, read):
        if tensor.dtype not in PLAIN_DTYPES or OF_QUANTISED.search(name):
            raise ValueError(
                f"tensor {name} in {folder} is {str(tensor.dtype).removeprefix('torch.')}, and part of quantised "
                f"weights, though config.json names no format: take the same model in bfloat16, float16 or float32"
            )
        if name not in places:
            if is_unused(name) or name.endswith("rotary_emb.inv_freq"):  # Llama 2's, which config.json says too
                continue
            raise ValueError(
                f"unexpected tensor {name} {list(tensor.shape)} in {folder}: the model has no place for it"
            )
        place = places[name]
        if tensor.shape != place.shape:
            raise ValueError(f"tensor {name} in {folder} is {list(tensor.shape)}, the model needs {list(place.shape)}")
        twin = filled.get(id(place))  # tied embeddings have two names for one place
        if twin is not None and not torch.equal(place, tensor.to(place)):
            raise ValueError(f"tensors {twin} and {name} in {folder} differ, but config.json ties them together")
        place.copy_(tensor)
        filled[id(place)] = name
    if missing := [name for name, place in places.items() if id(place) not in filled]:
        raise ValueError(f"{len(missing)} tensors are missing in {folder}: {', '.join(missing[:5])}")


def checkpoint_places(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by name, and where it goes: a parameter, or the rows of one in a fused layer."""
    places: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, FusedLinear) and not module.is_stored_fused:
                parent = path.rpartition(".")[0]
                rows = parameter.split(tuple(module.parts.values()))
                places |= {f"{parent}.{part}.{name}": view for part, view in zip(module.parts, rows, strict=True)}
            else:
                places[f"{path}.{name}"] = parameter
    return places


# ---- safetensors files


def iterate_checkpoint(folder: Path, read: Read = safe_open.get_tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of all that the folder has, mapped from disk; with a progress bar in a terminal.

    Pages that were read count as this process's memory until their file is closed. So a file is opened anew after as
    many bytes as its largest tensor has: loading takes the memory of the weights and little more.
    """
    files = checkpoint_files(folder)
    num_bytes = sum(file.stat().st_size for file in files)
    with tqdm(total=num_bytes, desc="Loading weights", unit="B", unit_scale=True, disable=None, delay=1) as bar:
        for file in files:
            for name, tensor in iterate_file(file, read):
                yield name, tensor
                bar.update(tensor.nbytes)
        bar.update(num_bytes - bar.n)  # the headers


def checkpoint_files(folder: Path) -> list[Path]:
    """ValueError if there are none, or if one is missing."""
    if (folder / INDEX_FILE).is_file():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX_FILE} has no weight_map from tensor to file")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} holds no *.safetensors weights. Pickled ones (*.bin, *.pt) are never read, since that may run "
            f'code. If you trust them: python -c "from transformers import AutoModelForCausalLM; AutoModelForCausalLM.'
            f"from_pretrained('{folder}', dtype='auto').save_pretrained('{folder}-safetensors')\"; add the tokenizer"
        )
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing, but {INDEX_FILE} names it")
    return files


def iterate_file(file: Path, read: Read) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one file, in the order in which they lie there."""
    try:
        with safe_open(file, framework="pt"):  # which checks the header
            groups = groups_of_names(file)
        for names in groups:
            with safe_open(file, framework="pt") as tensors:
                for name in names:
                    if (tensor := read(tensors, name)) is not None:
                        yield name, tensor
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def groups_of_names(file: Path) -> list[list[str]]:
    """Names of tensors that lie side by side, so many that a group has no more bytes than the largest tensor.

    A safetensors file begins with the length of its header, in 8 bytes, and the header, which is JSON.
    """
    with open(file, "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header.pop("__metadata__", None)
    spans = sorted((*entry["data_offsets"], name) for name, entry in header.items())
    largest = max((end - start for start, end, _ in spans), default=0)
    groups: list[list[str]] = []
    first = 0
    for start, end, name in spans:
        if not groups or end - first > largest:
            groups.append([])
            first = start
        groups[-1].append(name)
    return groups
