"""Read an adapter's folder: its configuration, and the A and B of each projection, checked against the model.

PEFT's names are those of the checkpoint between a prefix and the kind of the matrix:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     [rank, in_features]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight     [out_features, rank]
    base_model.model.model.embed_tokens.lora_embedding_A               [rank, vocab_size]
    base_model.model.model.embed_tokens.lora_embedding_B               [hidden_size, rank]

If an adapter changes embeddings or the output layer, PEFT adds a copy of the base model's table (`base_layer.weight`).
Only its shape is read: another one is that of a model with other tokens.

The file is safetensors; nothing is ever unpickled. All is checked before anything changes: each tensor has a place of
its shape, A and B come in pairs, and they are those that the configuration names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanovllm.loader import WEIGHT_DTYPES
from nanovllm_extras.lora.adapter_config import CONFIG_FILE, AdapterConfig, read_adapter_config
from nanovllm_extras.lora.places import Place, Projection
from nanovllm_extras.lora.vocabulary import EMBEDDINGS, HEAD

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
WHY_NOT = {
    "experts": "adapters of experts are not served",
    "kv_b_proj": "attention multiplies by parts of this weight, so adapters of it are not served",
    "gate": "adapters of routers are not served",
    "router": "adapters of routers are not served",
}
"""A part of a module's name -> why it has no place, if it has none."""
KINDS = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
    "base_layer.weight": "base",
}
"""The end of a tensor's name -> what it is."""
NAMES = {"A": "lora_A", "B": "lora_B", "base": "base_layer.weight"}


class Matrices(NamedTuple):
    """The change of one projection: x A^T B^T, where B has been multiplied by the scale."""

    a: Tensor  # [rank, in_features] float32
    b: Tensor  # [out_features, rank] float32


@dataclass(frozen=True)
class Adapter:
    """An adapter in host memory."""

    digest: str
    """A hash of its matrices. The blocks of a KV cache that it has computed are named by it."""
    max_rank: int
    matrices: Mapping[str, Matrices]
    """Name of the projection in the network -> its matrices."""


def read_adapter(
    folder: Path,
    places: list[Place],
    name_of: Callable[[str], str] = str,
    max_rank: int | None = None,
    refused: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Adapter:
    """Read an adapter for a network with these places. ValueError if it is damaged, or does not fit.

    name_of: returns the network's name of a module of the checkpoint; max_rank: the largest rank that is allowed;
    refused: more parts of names, and why they have no place; dtype: of the layers, in which all numbers must be finite
    """
    config = read_adapter_config(folder)
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        more = ". Pickled weights (adapter_model.bin) are never read, since that may run code" * pickled
        raise ValueError(f"{folder} has no {WEIGHTS_FILE}{more}")
    known = {projection.name: (projection, place.num_inputs) for place in places for projection in place.projections}
    found: dict[str, dict[str, Tensor]] = {}
    stored_names: dict[str, str] = {}
    for stored, kind, tensor in read_tensors(file):
        name = name_of(stored)
        if name not in known:
            raise ValueError(f"{file} changes {stored}: {why_no_place(stored, {**WHY_NOT, **(refused or {})})}")
        if kind in found.setdefault(name, {}):
            raise ValueError(f"{file} has {NAMES[kind]} of {stored} twice, under two names")
        stored_names[name] = stored
        found[name][kind] = tensor
    if not found:
        raise ValueError(f"{file} has no tensors")
    matrices = {
        name: read_pair(file, config, stored_names[name], pair, *known[name], max_rank, dtype)
        for name, pair in found.items()
    }
    if config.ties_vocabulary and (tied := sorted({EMBEDDINGS, HEAD} & set(found))):
        raise ValueError(
            f"ensure_weight_tying in {folder / CONFIG_FILE} must not be set for {tied[0]}: the matrices of the "
            f"embeddings would be those of the output layer, too"
        )
    check_targets(folder, config, set(stored_names.values()), set(known) - set(found))
    largest = max(len(one.a) for one in matrices.values())
    return Adapter(digest_of(matrices), largest, matrices)


def read_tensors(file: Path) -> list[tuple[str, str, Tensor]]:
    """Return (module, "A", "B" or "base", tensor) for each tensor of the file. ValueError for any other."""
    tensors = []
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                module, ending = name.rpartition(".")[0], name.rpartition(".")[2]
                kind = KINDS.get(ending)
                if ending == "weight":
                    module, _, ending = module.rpartition(".")
                    kind = KINDS.get(f"{ending}.weight")
                if kind is None or not name.startswith(PREFIX):
                    what = "a magnitude of DoRA" if "lora_magnitude" in name else "no A or B of a layer"
                    raise ValueError(f"{file} has the tensor {name}, which is {what}")
                tensors.append((module.removeprefix(PREFIX), kind, opened.get_tensor(name)))
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
    return tensors


def why_no_place(module: str, reasons: Mapping[str, str]) -> str:
    """Return why a module has no place, in words. reasons: part of a name -> reason"""
    parts = module.split(".")
    return next((why for part, why in reasons.items() if part in parts), "the model has no linear layer of that name")


def read_pair(
    file: Path,
    config: AdapterConfig,
    module: str,
    pair: Mapping[str, Tensor],
    projection: Projection,
    num_inputs: int,
    max_rank: int | None,
    dtype: torch.dtype,
) -> Matrices:
    """Return A and B of one projection in float32, B times the scale."""
    rank = config.rank_of(module)
    if max_rank is not None and rank > max_rank:
        raise ValueError(f"max_lora_rank is {max_rank}, but {file} has rank {rank} for {module}: raise max_lora_rank")
    shapes = {"A": (rank, num_inputs), "B": (projection.num_outputs, rank)}
    if "base" in pair:
        is_table = projection.name == EMBEDDINGS
        shapes["base"] = (num_inputs, projection.num_outputs) if is_table else (projection.num_outputs, num_inputs)
    for kind, shape in shapes.items():
        tensor = pair.get(kind)
        if tensor is None:
            raise ValueError(f"{file} has no {NAMES[kind]} of {module}, though it has another matrix of it")
        if tensor.dtype not in WEIGHT_DTYPES or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{NAMES[kind]} of {module} in {file} is {tensor.dtype} {list(tensor.shape)}; model and {CONFIG_FILE} "
                f"need {list(shape)} in float32, bfloat16 or float16"
            )
    matrices = Matrices(pair["A"].to(torch.float32, copy=True), pair["B"].float() * config.scale_of(module))
    for kind, tensor in zip("AB", matrices, strict=True):
        if not torch.isfinite(tensor.to(dtype)).all():
            raise ValueError(f"{NAMES[kind]} of {module} in {file}, scaled, has numbers that are not finite in {dtype}")
    return matrices


def check_targets(folder: Path, config: AdapterConfig, found: set[str], others: set[str]) -> None:
    """Raise ValueError unless the file has exactly the modules that the configuration names.

    found: modules of the file, by their names in the checkpoint; others: projections that the file does not change
    """
    if unnamed := sorted(name for name in found if not config.targets(name)):
        raise ValueError(f"{folder}: target_modules of {CONFIG_FILE} do not name {unnamed[0]}, which the file has")
    if missing := sorted(name for name in others if config.targets(name)):
        raise ValueError(f"{folder}: target_modules of {CONFIG_FILE} name {missing[0]}, which the file lacks")


def digest_of(matrices: Mapping[str, Matrices]) -> str:
    """Return a hash of an adapter's matrices, and of where they are."""
    digest = blake2b(digest_size=32)
    for name, (a, b) in sorted(matrices.items()):
        digest.update(f"{name} {len(a)} ".encode())
        digest.update(a.numpy().data)
        digest.update(b.numpy().data)
    return digest.hexdigest()
