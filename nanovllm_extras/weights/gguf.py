"""Load weights from GGUF files of llama.cpp (`load_format="gguf"`). `choose_loader.py` chooses `load_gguf` for them.

The folder has config.json and a tokenizer, as usual, and one file `*.gguf`. Projections of two kinds stay quantised.
Both kinds have blocks of 32 inputs, with a scale in float16:

    Q8_0    scale, 32 × int8                    weight = scale · q
    Q4_0    scale, 16 bytes: q[j] + 16 · q[16 + j]    weight = scale · (q − 8)

Projections of other quantised kinds (Q4_K, ...) are refused by name. All other tensors (embeddings, norms, biases) are
widened to the model's dtype, whatever their kind. As in llama.cpp, the file decides whether the embeddings are tied,
not config.json: `output.weight` is the output layer if the file has it, otherwise the token embeddings are.
`gguf_tensors.py` has what llama.cpp changes in the tensors of each architecture.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.weights.gguf_tensors import ARCHITECTURES, EXPERT, Tensors
from nanovllm_extras.weights.load_layers import Kind, load_layers
from nanovllm_extras.weights.load_model import Wanted
from nanovllm_extras.weights.quantise import Finish
from nanovllm_extras.weights.quantised_linear import QuantisedWeight
from nanovllm_extras.weights.shares import Share

try:
    from gguf import (
        MODEL_ARCH_NAMES,
        MODEL_TENSOR,
        TENSOR_NAMES,
        GGMLQuantizationType,
        GGUFReader,
        dequantize,
        get_tensor_name_map,
    )
except ImportError as error:
    raise ImportError("load_format='gguf' needs the package gguf: pip install 'nanovllm[gguf]'") from error

logger = logging.getLogger(__name__)
BLOCK = 32
KEPT = {"Q8_0": 8, "Q4_0": 4}  # bits
FLOATS = ("F32", "F16", "BF16")
UNUSED = {"rope_freqs.weight"}
OF_EXPERTS = {
    "gate": MODEL_TENSOR.FFN_GATE_EXP,
    "up": MODEL_TENSOR.FFN_UP_EXP,
    "down": MODEL_TENSOR.FFN_DOWN_EXP,
}
OF_DRAFTS = {  # a head for multi-token prediction is a layer behind the others
    "mtp.fc.weight": MODEL_TENSOR.NEXTN_EH_PROJ,
    "mtp.pre_fc_norm_embedding.weight": MODEL_TENSOR.NEXTN_ENORM,
    "mtp.pre_fc_norm_hidden.weight": MODEL_TENSOR.NEXTN_HNORM,
    "mtp.norm.weight": MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
}
OF_ROUTERS = {  # ends of names here -> tensor that has it as its `.scale`
    ".router.scale": MODEL_TENSOR.FFN_GATE_INP,
    ".router.per_expert_scale": MODEL_TENSOR.FFN_DOWN_EXP,
}


def load_gguf(finish: Finish, share: Share, whole: NetworkConfig, wanted: Wanted) -> Qwen3ForCausalLM:
    """Load a network. Raises ValueError with the tensor's name if file and model do not match exactly.

    Each quantised layer becomes what `finish` makes of it before the next one is loaded. share: the rank's part;
    whole: the shape of the whole network
    """
    file, config = GgufFile(wanted.folder, whole), wanted.shape
    if config.tie_word_embeddings and file.has_own_head():
        logger.info("%s has an output layer of its own, though config.json ties it to the embeddings", file.path)
        config = replace(config, tie_word_embeddings=False)
    elif not config.tie_word_embeddings and not file.has("lm_head.weight"):
        logger.info("%s has no output.weight, so the token embeddings are the output layer", file.path)
        config = replace(config, tie_word_embeddings=True)
    model = wanted._replace(shape=config).make_empty()
    model, places = load_layers(file, model, share, finish, wanted.dtype, wanted.device)
    fill(places, file, share)
    return model


def fill(places: dict[str, Tensor], file: "GgufFile", share: Share) -> None:
    """Fill the weights that are not quantised. Tied embeddings are one tensor, or two equal ones."""
    filled = set()
    for name, place in places.items():
        if not file.has(name):
            continue
        share.check()
        tensor = file.floats(name)
        wanted = share.whole_shape(name, place.shape)
        if without_ones(tensor.shape) != without_ones(wanted):
            raise ValueError(f"tensor {name} in {file.path} is {list(tensor.shape)}, not {list(wanted)}")
        place.copy_(share.of(name, tensor.view(wanted)))
        filled.add(id(place))
    if missing := [name for name, place in places.items() if id(place) not in filled]:
        raise ValueError(f"{len(missing)} tensors are missing in {file.path}: {', '.join(missing[:5])}")
    if unknown := sorted(name for name in file.tensors.keys() - file.used if not file.is_unused(name)):
        raise ValueError(f"unexpected tensor {unknown[0]} in {file.path}: the model has no place for it")


def without_ones(shape: tuple[int, ...]) -> list[int]:
    """Return the sizes of a shape except for ones, which files leave out, as in the weights of convolutions."""
    return [size for size in shape if size != 1]


class Found(NamedTuple):
    """A tensor of the file, or the part of it that belongs to one expert."""

    kind: GGMLQuantizationType
    data: np.ndarray


class GgufFile:
    """The GGUF file of a folder: a `Source` (`load_layers.py`). config: the shape of the whole network"""

    def __init__(self, folder: Path, config: NetworkConfig) -> None:
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
        self.num_layers = config.num_hidden_layers
        self.names = get_tensor_name_map(kind, self.num_layers + 1)  # with a head that makes drafts
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.used: set[str] = set()
        self.architecture: Tensors = ARCHITECTURES[name](config)
        self.unused = {*UNUSED, *(self.stored_name(one) for one in self.architecture.unused())}

    def stored_name(self, name: str) -> str:
        """Return the name in the file. Of an expert's projection, it is the tensor of all experts.

        It may have the rows of the gate and then those of the up-projection.
        """
        name = name.replace("mtp.layers.0.", f"model.layers.{self.num_layers}.")
        if name in OF_DRAFTS:
            return f"{TENSOR_NAMES[OF_DRAFTS[name]].format(bid=self.num_layers)}.weight"
        if match := EXPERT.match(name):
            stored = f"{self.of_experts(match[1], OF_EXPERTS[match[3]])}.weight"
            both = f"{self.of_experts(match[1], MODEL_TENSOR.FFN_GATE_UP_EXP)}.weight"
            return both if stored not in self.tensors and both in self.tensors and match[3] != "down" else stored
        for end, tensor in OF_ROUTERS.items():
            if name.endswith(end):
                return f"{self.of_experts(name.removesuffix(end), tensor)}.scale"
        return str(self.names.get_name(self.architecture.table_name(name), (".weight", ".bias")))

    def of_experts(self, layer: str, tensor: MODEL_TENSOR) -> str:
        """Return the name of a tensor in the file. layer: such as "model.layers.3\""""
        return str(TENSOR_NAMES[tensor].format(bid=layer.rpartition(".")[2]))

    def is_unused(self, stored_name: str) -> bool:
        return stored_name in self.unused or self.architecture.is_unused(stored_name)

    def has(self, name: str) -> bool:
        return self.stored_name(name) in self.tensors

    def has_own_head(self) -> bool:
        """Return whether the output layer differs from the embeddings, for example because its kind is another."""
        names = "model.embed_tokens.weight", "lm_head.weight"
        if not all(self.has(name) for name in names):
            return False
        embedding, head = map(self.floats, names)
        return not torch.equal(embedding, head)

    def find(self, name: str) -> Found:
        stored = self.stored_name(name)
        if stored not in self.tensors:
            raise ValueError(f"tensor {name} ({stored}) is missing in {self.path}")
        self.used.add(stored)
        kind, data = self.tensors[stored].tensor_type, self.tensors[stored].data
        if match := EXPERT.search(name):
            data = data[int(match[2])]
            if "gate_up" in stored:
                data = np.split(data, 2)[match[3] == "up"]
        return Found(kind, data)

    def kind(self, part: str, shape: tuple[int, ...]) -> Kind | None:
        """Return how a projection is quantised if it has 8 or 4 bits. ValueError for other quantised kinds."""
        kind = self.find(f"{part}.weight").kind.name
        if kind not in KEPT and kind not in FLOATS:
            known = ", ".join([*KEPT, *FLOATS])
            raise ValueError(f"tensor {part}.weight in {self.path} is {kind}; projections can be {known}")
        if kind not in KEPT:
            return None
        order = self.order_of_inputs(part, shape[1])
        return Kind(KEPT[kind], BLOCK, None if order is None else order.numpy().tobytes())

    def weight(self, part: str, shape: tuple[int, ...]) -> QuantisedWeight:
        kind, data = self.find(f"{part}.weight")
        bits = KEPT[kind.name]
        blocks = torch.tensor(np.atleast_2d(data)).unflatten(1, (-1, 2 + BLOCK * bits // 8))  # [out, in / 32, bytes]
        scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
        if bits == 8:
            q = (blocks[..., 2:].view(torch.int8).short() + 128).to(torch.uint8)
        else:
            q = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), dim=-1)
        if (len(q), q.shape[1] * BLOCK) != shape:
            raise ValueError(
                f"tensor {part}.weight in {self.path} is {[len(q), q.shape[1] * BLOCK]}, not {list(shape)}"
            )
        rows, inputs = self.architecture.row_order(part, len(q)), self.architecture.input_order(part, shape[1])
        if rows is not None:
            q, scales = q[rows], scales[rows]
        order = self.order_of_inputs(part, shape[1])
        if inputs is not None and order is None:  # whole blocks change their places
            blocks_of_inputs = inputs[::BLOCK] // BLOCK
            q, scales = q[:, blocks_of_inputs], scales[:, blocks_of_inputs]
        return QuantisedWeight(q.flatten(1), scales.contiguous(), None, bits, BLOCK, order)

    def order_of_inputs(self, part: str, num_inputs: int) -> Tensor | None:
        """Return the input of each column, or None if blocks of 32 columns are those of 32 neighbouring inputs."""
        places = self.architecture.input_order(part, num_inputs)
        if places is None:
            return None
        starts = places[::BLOCK, None] // BLOCK * BLOCK
        is_by_blocks = bool((places.view(-1, BLOCK) == starts + torch.arange(BLOCK)).all())
        return None if is_by_blocks else places.argsort()

    def floats(self, name: str) -> Tensor:
        """Read any tensor as float32."""
        kind, data = self.find(name)
        tensor, path = torch.tensor(dequantize(data, kind)), name.removesuffix(".weight").removesuffix(".bias")
        rows, inputs = (
            self.architecture.row_order(path, len(tensor)),
            self.architecture.input_order(path, tensor.shape[-1]),
        )
        tensor = tensor if rows is None else tensor[rows]
        return self.architecture.values(name, tensor if inputs is None else tensor[:, inputs])

    def bias(self, part: str, num_outputs: int) -> Tensor:
        """Read a bias. One that the model does not have is unexpected, as any tensor that is not read."""
        return self.floats(f"{part}.bias") if num_outputs else torch.empty(0)
