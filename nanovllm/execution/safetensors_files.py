"""The tensors of a checkpoint, one at a time, from its safetensors files: one file, or several with an index.

The files are mapped into memory, and pages that were read count as this process's until the file is closed. So a file
is opened anew after as many bytes as its largest tensor has: loading takes the memory of the weights and little more.
Nothing is ever unpickled. Called by `loader.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

INDEX_FILE = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def iterate_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of all that the folder has, mapped from disk; with a progress bar in a terminal."""
    files = checkpoint_files(folder)
    num_bytes = sum(file.stat().st_size for file in files)
    with tqdm(total=num_bytes, desc="Loading weights", unit="B", unit_scale=True, disable=None, delay=1) as bar:
        for file in files:
            for name, tensor in iterate_file(file):
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
        raise ValueError(f"{folder} holds no *.safetensors weights, the only format that is read{advice(folder)}")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing, but {INDEX_FILE} names it")
    return files


def advice(folder: Path) -> str:
    """What to do with pickled weights: to read them can run any code, so this engine never does."""
    pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
    if not pickled:
        return ""
    return (
        f". {pickled[0]} is pickled, and may run any code when it is read. If you trust its source, convert it: "
        f"python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}', dtype='auto')"
        f".save_pretrained('{folder}-safetensors')\", and copy the tokenizer's files beside it"
    )


def iterate_file(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one file, in the order in which they lie there."""
    try:
        with safe_open(file, framework="pt"):  # which checks the header
            groups = groups_of_names(file)
        for names in groups:
            with safe_open(file, framework="pt") as tensors:
                for name in names:
                    yield name, tensors.get_tensor(name)
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


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} holds no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
