"""Load weights from GGUF files of llama.cpp (`load_format="gguf"`). `stored.py` calls `load_gguf` for them.

The folder has config.json and a tokenizer, as usual, and one file `*.gguf`. Projections of two kinds stay quantised.
Both kinds have blocks of 32 inputs, with a scale in float16:

    Q8_0    scale, 32 × int8                    weight = scale · q
    Q4_0    scale, 16 bytes: q[j] + 16 · q[16 + j]    weight = scale · (q − 8)

Projections of other quantised kinds (Q4_K, ...) are refused by name. All other tensors (embeddings, norms, biases) are
widened to the model's dtype, whatever their kind. As in llama.cpp, the file decides whether the embeddings are tied,
not config.json: `output.weight` is the output layer if the file has it, otherwise the token embeddings are.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.linear import FusedLinear, Linear
from nanovllm.loader import allocate, places_of
from nanovllm_extras.quantization.quantise import Finish
from nanovllm_extras.quantization.quantised_linear import QuantisedWeight
from nanovllm_extras.quantization.stored import joined, parts_of, quantised_version_of, set_layer

try:
    from gguf import MODEL_ARCH_NAMES, GGUFReader, dequantize, get_tensor_name_map
except ImportError as error:
    raise ImportError("load_format='gguf' needs the package gguf: pip install 'nanovllm[gguf]'") from error

logger = logging.getLogger(__name__)
BLOCK = 32
KEPT = {"Q8_0": 8, "Q4_0": 4}  # bits
FLOATS = ("F32", "F16", "BF16")
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # their tensors map one to one to those of other checkpoints
UNUSED = {"rope_freqs.weight"}


def load_gguf(
    finish: Finish,
    model_class: Any,
    config: Any,
    backend: Any,
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
    dummy_seed: int | None = None,
) -> Any:
    """Load the network to `device`. Raises ValueError with the tensor's name if file and model do not match exactly.

    Each quantised layer becomes what `finish` makes of it before the next one is loaded.
    """
    file = GgufFile(folder, config)
    if config.tie_word_embeddings and file.has_own_head():
        logger.info("%s has an output layer of its own, though config.json ties it to the embeddings", file.path)
        config = replace(config, tie_word_embeddings=False)
    elif not config.tie_word_embeddings and not file.has("lm_head.weight"):
        logger.info("%s has no output.weight, so the token embeddings are the output layer", file.path)
        config = replace(config, tie_word_embeddings=True)
    with torch.device("meta"):
        model = model_class(config, backend)
    found = {path: layer for path, layer in model.named_modules() if file.keeps(path, layer)}
    for path, layer in found.items():  # the layers have no weights yet, so no memory is allocated for plain weights
        set_layer(model, path, quantised_version_of(layer))
    model = allocate(model, dtype, device)
    for path, layer in found.items():
        quantised, parts = model.get_submodule(path), parts_of(path, layer)
        quantised.quantised = joined(path, [file.quantised(part) for part in parts], device)
        if layer.bias is not None:
            quantised.bias.copy_(torch.cat([file.floats(f"{part}.bias") for part in parts]))
        set_layer(model, path, finish(quantised))
    fill(model, file)
    return model


def fill(model: nn.Module, file: "GgufFile") -> None:
    """Fill the model's parameters that are not quantised. Tied embeddings are one tensor, or two equal ones."""
    places, filled = places_of(model), set()
    for name, place in places.items():
        if not file.has(name):
            continue
        tensor = file.floats(name)
        if tensor.shape != place.shape:
            raise ValueError(f"tensor {name} in {file.path} is {list(tensor.shape)}, not {list(place.shape)}")
        place.copy_(tensor)
        filled.add(id(place))
    if missing := [name for name, place in places.items() if id(place) not in filled]:
        raise ValueError(f"{len(missing)} tensors are missing in {file.path}: {', '.join(missing[:5])}")
    if unknown := sorted(file.tensors.keys() - file.used - UNUSED):
        raise ValueError(f"unexpected tensor {unknown[0]} in {file.path}: the model has no place for it")


class GgufFile:
    """The GGUF file of a folder. Its methods take the tensors' names in other checkpoints."""

    def __init__(self, folder: Path, config: Any) -> None:
        files = sorted(folder.glob("*.gguf"))
        if len(files) != 1:
            names = ", ".join(file.name for file in files) or "none"
            raise ValueError(
                f"load_format='gguf' needs one file *.gguf in {folder}, there is {names}; for safetensors, take "
                f"load_format='auto'"
            )
        self.path = files[0]
        try:
            reader = GGUFReader(self.path)
        except (ValueError, IndexError, KeyError, OSError) as error:  # the reader itself checks little
            raise ValueError(f"{self.path} is not a complete GGUF file: {error}") from error
        field = reader.get_field("general.architecture")
        name = field.contents() if field else None
        if name not in ARCHITECTURES:
            raise ValueError(f"{self.path} has the architecture {name!r}, supported are {', '.join(ARCHITECTURES)}")
        kind = next(kind for kind, known in MODEL_ARCH_NAMES.items() if known == name)
        self.names = get_tensor_name_map(kind, config.num_hidden_layers)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.used: set[str] = set()
        # llama.cpp rotates neighbours instead of halves, so its Llamas have the rows of q and k in another order
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        self.heads = heads if name == "llama" else {}

    def stored_name(self, name: str) -> str:
        return str(self.names.get_name(name, (".weight", ".bias")))

    def has(self, name: str) -> bool:
        return self.stored_name(name) in self.tensors

    def has_own_head(self) -> bool:
        """Return whether the output layer differs from the embeddings, for example because its kind is another."""
        names = "model.embed_tokens.weight", "lm_head.weight"
        if not all(self.has(name) for name in names):
            return False
        embedding, head = map(self.floats, names)
        return not torch.equal(embedding, head)

    def find(self, name: str) -> Any:
        stored = self.stored_name(name)
        if stored not in self.tensors:
            raise ValueError(f"tensor {name} ({stored}) is missing in {self.path}")
        self.used.add(stored)
        return self.tensors[stored]

    def keeps(self, path: str, layer: nn.Module) -> bool:
        """Return whether a layer's weights have 8 or 4 bits in the file.

        Raises ValueError for other quantised kinds, and for different kinds in one layer.
        """
        if type(layer) not in (Linear, FusedLinear):
            return False
        kinds = {part: self.find(f"{part}.weight").tensor_type.name for part in parts_of(path, layer)}
        for part, kind in kinds.items():
            if kind not in KEPT and kind not in FLOATS:
                known = ", ".join([*KEPT, *FLOATS])
                raise ValueError(f"tensor {part}.weight in {self.path} is {kind}; projections can be {known}")
        if len(set(kinds.values()) - set(FLOATS)) + any(kind in FLOATS for kind in kinds.values()) > 1:
            raise ValueError(f"all parts of {path} in {self.path} must be floats or have one kind, they are {kinds}")
        return any(kind in KEPT for kind in kinds.values())

    def quantised(self, part: str) -> QuantisedWeight:
        """Read the quantised weight of a projection."""
        tensor = self.find(f"{part}.weight")
        bits = KEPT[tensor.tensor_type.name]
        blocks = torch.tensor(tensor.data).unflatten(1, (-1, 2 + BLOCK * bits // 8))  # [out, in / 32, bytes]
        scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
        if bits == 8:
            q = (blocks[..., 2:].view(torch.int8).short() + 128).to(torch.uint8)
        else:
            q = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), dim=-1)
        return QuantisedWeight(self.in_order(part, q.flatten(1)), self.in_order(part, scales), None, bits, BLOCK)

    def floats(self, name: str) -> Tensor:
        """Read any tensor as float32."""
        tensor = self.find(name)
        return self.in_order(name.rpartition(".")[0], torch.tensor(dequantize(tensor.data, tensor.tensor_type)))

    def in_order(self, path: str, rows: Tensor) -> Tensor:
        """Reorder the rows of a projection to the order in other checkpoints."""
        num_heads = self.heads.get(path.rpartition(".")[2])
        if num_heads is None:
            return rows
        pairs = torch.arange(len(rows)).view(num_heads, -1, 2)  # [num_heads, head_dim / 2, 2]
        return rows[pairs.transpose(1, 2).flatten()]
