"""A checkpoint in Hugging Face's layout: its JSON files, its tokenizer, its weights.

Each tensor is copied straight to its place on the device, so the weights are never in memory twice. A tensor that is
missing, unexpected or of another shape is an error that names it. No code of a checkpoint is run: nothing is unpickled.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.checks import check_token_ids
from nanovllm.layers.basic import FusedLinear, RMSNorm

Network = TypeVar("Network", bound=nn.Module)

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
TINY_QWEN3 = Path(__file__).parent / "assets" / "tiny-qwen3"
"""The bundled model: a Qwen3 of 3.5 million parameters that explains how this engine works."""


def find_folder(model: str | Path) -> Path:
    """Return the folder of a checkpoint. ValueError if there is none."""
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"model must be a folder on this machine that holds a config.json, got {str(model)!r}; "
                         f"nanovllm_extras.LLM takes hub ids too")  # fmt: skip
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object. ValueError if it does not."""
    if not path.is_file():
        raise ValueError(f"{path.parent} holds no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def load_tokenizer(folder: Path) -> Any:
    """Return the `transformers` tokenizer of `folder`, or None if it has none.

    `transformers` checks all of config.json on the way. A fault there is not the tokenizer's, and the model's reader
    reports it, or an option corrects it: then only the model's type counts. ValueError if there is no other way.
    """
    if not (folder / "vocab.json").is_file() and not any(folder.glob("tokenizer[._]*")):
        return None
    from transformers import AutoConfig, AutoTokenizer  # late: it takes longer than the rest of the engine together

    load = partial(AutoTokenizer.from_pretrained, folder, local_files_only=True, trust_remote_code=False)
    try:
        return load()
    except Exception as error:  # the libraries that read its files raise any kind
        file = folder / "config.json"
        config = read_json(file) if file.is_file() else {}
        with suppress(Exception):
            return load(config=AutoConfig.for_model(config["model_type"]))
        message = f"the tokenizer in {folder} (tokenizer.json, …) cannot be loaded: {error}"
        raise ValueError(with_pointers(message, folder)) from error


def with_pointers(message: str, folder: Path) -> str:
    """Add the names of pointers of Git LFS to an error: a clone without Git LFS has them instead of large files."""
    small = [file for file in sorted(folder.iterdir()) if file.is_file() and file.stat().st_size < 1024]
    found = [file.name for file in small if file.read_bytes().startswith(b"version https://git-lfs.github.com")]
    return f"{message}; run `git lfs pull` in {folder}, where {', '.join(found)} are pointers" if found else message


def read_eos_token_ids(folder: Path, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence tokens of generation_config.json (else config.json), and the tokenizer's."""
    files = [folder / name for name in ("generation_config.json", "config.json")]
    return find_eos_token_ids({str(file): read_json(file) for file in files if file.is_file()}, tokenizer, vocab_size)


def find_eos_token_ids(sources: Mapping[str, Mapping[str, Any]], tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence tokens of the first of the named `sources` that has any, and the tokenizer's."""
    found: set[int] = set() if getattr(tokenizer, "eos_token_id", None) is None else {tokenizer.eos_token_id}
    for name, fields in sources.items():
        eos = fields.get("eos_token_id")
        if eos is not None:
            eos = eos if isinstance(eos, list) else [eos]
            check_token_ids(f"{name}: eos_token_id", [one for one in eos if one != -1])
            found |= set(eos)
            break
    return frozenset(token_id for token_id in found if 0 <= token_id < vocab_size)


# ---- the weights


def allocate(model: Network, dtype: torch.dtype, device: torch.device) -> Network:
    """Allocate the weights of a network on the meta device, where tensors take no memory. They have no values yet."""
    return model.to(dtype).to_empty(device=device).eval().requires_grad_(False)


def init_dummy_weights(model: nn.Module, seed: int, std: float) -> None:
    """Set random weights of standard deviation `std`, neutral norms and zero biases. They depend only on `seed`.

    Speed does not depend on the values of weights, so a benchmark needs no checkpoint (`load_format="dummy"`).
    """
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            init_dummy_weight(module, name, parameter, std, generator)


def init_dummy_weight(
    module: nn.Module, name: str, tensor: torch.Tensor, std: float, generator: torch.Generator
) -> None:
    """Fill `tensor`: the parameter `name` of a module, or a tensor of its shape."""
    if isinstance(module, RMSNorm):
        tensor.fill_(module.neutral_weight)
    elif name == "bias":
        tensor.zero_()
    else:
        tensor.normal_(0, std, generator=generator)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy each tensor of the checkpoint to its place. ValueError unless checkpoint and model match exactly."""
    fill(places_of(model), iterate_checkpoint(folder), folder)


def fill(places: dict[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]], source: Path) -> None:
    """Copy named tensors to the places of the same names. ValueError unless both are the same set of names."""
    filled: dict[int, str] = {}
    for name, tensor in tensors:
        if name not in places:
            raise ValueError(f"unexpected tensor {name} {list(tensor.shape)} in {source}: the model has no place")
        place = places[name]
        if tensor.dtype not in WEIGHT_DTYPES or tensor.shape != place.shape:
            raise ValueError(f"tensor {name} in {source} is {tensor.dtype} {list(tensor.shape)}, the model needs "
                             f"{list(place.shape)} in float32, bfloat16 or float16")  # fmt: skip
        twice = filled.get(id(place))  # tied embeddings have two names for one place
        if twice is not None and not torch.equal(place, tensor.to(place)):
            raise ValueError(f"tensors {twice} and {name} in {source} differ, but config.json ties them together: set "
                             f"tie_word_embeddings to false there, or use nanovllm_extras.LLM")  # fmt: skip
        place.copy_(tensor)
        filled[id(place)] = name
    if missing := [name for name, place in places.items() if id(place) not in filled]:
        raise ValueError(f"{len(missing)} tensors are missing in {source}: {', '.join(missing[:5])}")


def places_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the place of every tensor by its name in a checkpoint: a parameter, or some rows of a fused one."""
    places: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, FusedLinear):
                parent = path.rpartition(".")[0]
                rows = parameter.split(tuple(module.parts.values()))
                places |= {f"{parent}.{part}.{name}": view for part, view in zip(module.parts, rows, strict=True)}
            else:
                places[f"{path}.{name}"] = parameter
    return places


def iterate_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of everything in the folder's safetensors files, mapped from disk."""
    for file, names in checkpoint_files(folder).items():
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    if names is None or name in names:
                        yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            message = f"{file} is not a whole safetensors file: {error}"
            raise ValueError(with_pointers(message, file.parent)) from error


def checkpoint_files(folder: Path) -> Mapping[Path, set[str] | None]:
    """Return the safetensors files of a folder, each with the names of its tensors that count; None is all of them.

    `model.safetensors` comes before an index, as in transformers. An index says which file holds each tensor, and what
    else is in these files, such as older copies, does not count. ValueError if there are no files, or one is missing.
    """
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: None}
    if not (folder / INDEX_FILE).is_file():
        plain = sorted(folder.glob("*.safetensors"))
        if not plain:
            raise ValueError(f"{folder} holds no *.safetensors weights. Pickled ones (*.bin, *.pt) are never read, "
                             f"since that may run code. If you trust them, load them with transformers and "
                             f"call save_pretrained (docs/models.md has the command)")  # fmt: skip
        return dict.fromkeys(plain)
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or {type(name) for name in weight_map.values()} != {str}:
        raise ValueError(f"{folder / INDEX_FILE} has no weight_map from tensor to file")
    files = {folder / name: set[str]() for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        files[folder / name].add(tensor)
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing, but {INDEX_FILE} names it")
    return files
