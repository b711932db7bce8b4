"""Load weights as the core does, with a progress bar, in little memory, and from checkpoints that hold more."""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from nanovllm.layers.attention import TorchAttention
from nanovllm.loader import (
    WEIGHT_DTYPES,
    allocate,
    checkpoint_files,
    fill,
    init_dummy_weights,
    places_of,
    with_pointers,
)
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras.models.network_config import NetworkConfig

logger = logging.getLogger(__name__)
OF_QUANTISED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|input_scale)$")  # GPTQ, AWQ, FP8
BARE = re.compile(r"^(model\.language_model\.|(?=(layers|embed_tokens|norm)\.))")  # other starts than `model.`
Read = Callable[[safe_open, str], torch.Tensor | None]  # a tensor of an open file, a part of it, or None: not needed


class Wanted(NamedTuple):
    """The network that a loader makes, where it goes, and where its weights come from."""

    model_class: type[Qwen3ForCausalLM]
    shape: NetworkConfig
    backend: TorchAttention  # or one for each shape of K and V (`execution/cached_layers.py`)
    dtype: torch.dtype
    device: torch.device
    folder: Path
    seed: int | None = None  # of random weights, which replace those of the folder

    def make_empty(self) -> Qwen3ForCausalLM:
        """Return the network on the meta device."""
        with torch.device("meta"):
            return self.model_class(self.shape, self.backend)


def load_model(
    wanted: Wanted,
    read: Read = safe_open.get_tensor,
    part_of: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
) -> Qwen3ForCausalLM:
    """Load a network whose weights are not quantised.

    `part_of` returns the part of a tensor that the network needs, if `read` has not cut it already.
    """
    model = allocate(wanted.make_empty(), wanted.dtype, wanted.device)
    if wanted.seed is None and hasattr(wanted.model_class, "load_weights"):  # `OwnNetwork`
        wanted.model_class.load_weights(model, wanted.folder)
    elif wanted.seed is None:
        load_weights(model, wanted.folder, read, part_of)
    else:
        init_dummy_weights(model, wanted.seed, wanted.shape.initializer_range)
    return model


def load_weights(
    model: nn.Module, folder: Path, read: Read, part_of: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """Copy each tensor of the checkpoint to its place. ValueError unless checkpoint and model match exactly."""
    fill(places_of_stored(model), network_tensors(model, folder, read, part_of), folder)


def network_tensors(
    model: nn.Module, folder: Path, read: Read, part_of: Callable[[str, torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint by the names that the network has for them, each cut by `part_of`."""
    is_unused = getattr(model, "is_unused", lambda name: False)  # a network has it whose checkpoints hold more
    rename = getattr(model, "rename_stored", None)  # and this if their tensors hold several of the network's
    for stored_name, tensor in plain_tensors(iterate_checkpoint(folder, read), is_unused, folder):
        for name, one in [(stored_name, tensor)] if rename is None else rename(stored_name, tensor):
            yield name, part_of(name, one)


def part_of_whole(cuts: Mapping[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank's part of a tensor that was read as a whole. Any other is a part already, or it does not fit.

    cuts: name of a tensor -> its `Cut` (`weights/cut.py`); without an entry, the rank has all of it
    """
    cut = cuts.get(name)
    part: torch.Tensor = tensor if cut is None or tuple(tensor.shape) != cut.whole else cut.of(tensor)
    return part


def places_of_stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the core's places. Layers that are fused in the checkpoint too have one under their own name."""
    places = places_of(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if getattr(module, "is_stored_fused", False):
            parent = path.rpartition(".")[0]
            for name, parameter in module.named_parameters(recurse=False):
                for part in module.parts:
                    del places[f"{parent}.{part}.{name}"]
                places[f"{path}.{name}"] = parameter
    return places


def plain_tensors(
    tensors: Iterator[tuple[str, torch.Tensor]], is_unused: Callable[[str], bool], folder: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that the network needs. ValueError for a part of quantised weights."""
    for name, tensor in tensors:
        if tensor.dtype not in WEIGHT_DTYPES or OF_QUANTISED.search(name):
            raise ValueError(
                f"tensor {name} in {folder} is {str(tensor.dtype).removeprefix('torch.')}, and part of quantised "
                f"weights, though config.json names no format: take the same model in bfloat16, float16 or float32"
            )
        if not is_unused(name) and not name.endswith("rotary_emb.inv_freq"):  # Llama 2's, which config.json has too
            yield name, tensor


# ---- safetensors files


def iterate_checkpoint(folder: Path, read: Read = safe_open.get_tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each entry in the folder, mapped from disk; show a progress bar in a terminal.

    Pages that were read count as this process's memory until their file is closed. So a file is opened again after as
    many bytes as its largest tensor has: loading takes the memory of the weights and little more.
    """
    files = checkpoint_files(folder)
    num_bytes = sum(file.stat().st_size for file in files)
    is_off = sys.stderr is None or getattr(sys.stderr, "closed", False) or None  # None: unless it is a terminal
    with tqdm(total=num_bytes, desc="Loading weights", unit="B", unit_scale=True, disable=is_off, delay=1) as bar:
        for file, names in files.items():
            for name, tensor in iterate_file(file, names, read):
                yield name, tensor
                bar.update(tensor.nbytes)
        bar.update(num_bytes - bar.n)  # the headers


def iterate_file(file: Path, wanted: set[str] | None, read: Read) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one file in the order of the file: those that an index says are there, or all."""
    try:
        with safe_open(file, framework="pt") as tensors:  # which checks the header
            unwanted = set() if wanted is None else set(tensors.keys()) - wanted
        if unwanted:
            logger.info("%s: %d tensors are not read, such as %s: the index names another file, or none, for them",
                        file, len(unwanted), min(unwanted))  # fmt: skip
        groups = groups_of_names(file, unwanted)
        for names in groups:
            with safe_open(file, framework="pt") as tensors:
                for name in names:
                    if (tensor := read(tensors, name)) is not None:
                        yield BARE.sub("model.", name), tensor
    except SafetensorError as error:
        message = f"{file} is not a whole safetensors file: {error}"
        raise ValueError(with_pointers(message, file.parent)) from error


def groups_of_names(file: Path, unwanted: set[str]) -> list[list[str]]:
    """Group the names of neighbouring tensors, so that no group has more bytes than the largest tensor.

    A safetensors file begins with the length of its header, in 8 bytes, and the header, which is JSON.
    """
    with open(file, "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header.pop("__metadata__", None)
    spans = sorted((*entry["data_offsets"], name) for name, entry in header.items() if name not in unwanted)
    largest = max((end - start for start, end, _ in spans), default=0)
    groups: list[list[str]] = []
    first = 0
    for start, end, name in spans:
        if not groups or end - first > largest:
            groups.append([])
            first = start
        groups[-1].append(name)
    return groups
