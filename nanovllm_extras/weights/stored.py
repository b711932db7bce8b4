"""Load checkpoints that are quantised already. `choose_loader.py` asks `load_stored`, with what `read_format` gave.

Each projection that has the tensors of the format becomes a layer of `quantised_linear.py`. Other quantised
weights, such as routers and output layers, are widened to the model's dtype. All others are loaded as always.
Weights in fp8 (DeepSeek's, Qwen's) and MXFP4 (gpt-oss's) are widened to the model's dtype: no kernel here multiplies by
them.
"""

import logging
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from nanovllm.loader import WEIGHT_DTYPES, checkpoint_files, fill, init_dummy_weights
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras.weights.dummies import make_dummies
from nanovllm_extras.weights.formats import Format
from nanovllm_extras.weights.fp8_weights import KV_SCALES, Fp8
from nanovllm_extras.weights.load_layers import Kind, load_layers
from nanovllm_extras.weights.load_model import BARE, OF_QUANTISED, Wanted, load_model, network_tensors
from nanovllm_extras.weights.mxfp4 import Mxfp4
from nanovllm_extras.weights.quantise import Finish
from nanovllm_extras.weights.quantised_linear import QuantisedWeight
from nanovllm_extras.weights.shares import Share

Decoded = TypeVar("Decoded")

logger = logging.getLogger(__name__)


def load_stored(form: Format | Fp8 | Mxfp4, finish: Finish, share: Share, wanted: Wanted) -> Qwen3ForCausalLM:
    """Load a checkpoint of format `form`, or random weights.

    Each quantised layer becomes what `finish` makes of it before the next one is loaded. share: the rank's part
    """
    if wanted.seed is not None:
        made = make_dummies(form, finish, share, wanted.make_empty(), wanted)
        init_dummy_weights(made, wanted.seed, wanted.shape.initializer_range)
        return made
    if not isinstance(form, Fp8 | Mxfp4):
        model = wanted.make_empty()
        checkpoint = Checkpoint(wanted.folder, getattr(model, "rename_stored", None))
        return load_projections(StoredSource(form, checkpoint), finish, share, model, wanted.dtype, wanted.device)
    logger.info("the checkpoint's weights in %s are widened to %s", type(form).__name__.lower(), wanted.dtype)
    read_whole = form.reader(Checkpoint(wanted.folder), wanted.dtype)

    def read(file: safe_open, name: str) -> Tensor | None:
        share.check()
        return read_whole(file, name)

    return load_model(wanted, read, share.of)


class Checkpoint:
    """The tensors of a folder, by the names that the model has for them. rename: the model's `rename_stored`"""

    def __init__(
        self, folder: Path, rename: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]] | None = None
    ) -> None:
        self.folder, self.rename = folder, rename
        self.files: dict[str, tuple[Path, str]] = {}  # file, and name in the file
        for file, wanted in checkpoint_files(folder).items():
            with safe_open(file, framework="pt") as tensors:
                names = set(tensors.keys()) & (wanted or set(tensors.keys()))
            self.files |= {self.name_of(name): (file, name) for name in names}

    def name_of(self, stored_name: str) -> str:
        """Return the model's name of a tensor. One that holds several tensors of the model keeps its own name."""
        name = BARE.sub("model.", stored_name)
        renamed = [] if self.rename is None else [one for one, _ in self.rename(name, torch.empty(0))]
        return renamed[0] if len(renamed) == 1 else name

    def read(self, name: str) -> Tensor:
        file, stored_name = self.files[name]
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(stored_name)


class StoredSource:
    """A checkpoint whose weights are decoded to `QuantisedWeight`: a `Source` (`load_layers.py`)."""

    def __init__(self, form: Format, checkpoint: Checkpoint) -> None:
        self.form, self.checkpoint = form, checkpoint
        self.loaded: set[str] = set()  # names of tensors

    def is_quantised(self, part: str) -> bool:
        return f"{part}.{self.form.mark}" in self.checkpoint.files

    def kind(self, part: str, shape: tuple[int, ...]) -> Kind | None:
        if not self.is_quantised(part):
            return None
        order = None
        if "g_idx" in self.form.tensors and f"{part}.g_idx" in self.checkpoint.files:
            size = self.form.group_size or shape[1]
            found = self.decoding(part, lambda: self.form.find_order(self.checkpoint.read(f"{part}.g_idx"), size))
            order = None if found is None else found.numpy().tobytes()
        return Kind(self.form.bits, self.form.group_size, order)

    def weight(self, part: str, shape: tuple[int, ...]) -> QuantisedWeight:
        names = [name for name in self.form.tensors if f"{part}.{name}" in self.checkpoint.files]
        if missing := [name for name in self.form.tensors if name not in (*names, "g_idx")]:
            raise ValueError(f"{part} in {self.checkpoint.folder} lacks {', '.join(missing)}")
        self.loaded |= {f"{part}.{name}" for name in names}
        tensors = {name: self.checkpoint.read(f"{part}.{name}") for name in names}
        weight = self.decoding(part, lambda: self.form.decode(tensors, shape[1]))
        if len(weight.q) != shape[0]:
            raise ValueError(
                f"{part} in {self.checkpoint.folder} has {len(weight.q)} outputs, the model needs {shape[0]}"
            )
        return weight

    def decoding(self, part: str, decode: Callable[[], Decoded]) -> Decoded:
        """Call `decode`, and name the projection in its errors."""
        try:
            return decode()
        except ValueError as error:
            raise ValueError(f"{part} in {self.checkpoint.folder}: {error}") from error

    def floats(self, name: str) -> Tensor:
        if name not in self.checkpoint.files:
            raise ValueError(f"{name} is missing in {self.checkpoint.folder}")
        self.loaded.add(name)
        tensor = self.checkpoint.read(name)
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"{name} in {self.checkpoint.folder} is {tensor.dtype}, but lacks {self.form.mark}")
        return tensor

    def bias(self, part: str, num_outputs: int) -> Tensor:
        """Read a bias. Some tools write zeros for layers without a bias; other values raise ValueError."""
        name = f"{part}.bias"
        if num_outputs:
            return self.floats(name)
        if name in self.checkpoint.files and bool(self.floats(name).any()):
            raise ValueError(f"unexpected tensor {name} in {self.checkpoint.folder}: the model's layer has no bias")
        return torch.empty(0)


def load_projections(
    source: StoredSource,
    finish: Finish,
    share: Share,
    model: Qwen3ForCausalLM,
    dtype: torch.dtype,
    device: torch.device,
) -> Qwen3ForCausalLM:
    """Return the network on `device`. model: on the meta device"""
    form, checkpoint = source.form, source.checkpoint
    model, places = load_layers(source, model, share, finish, dtype, device)
    if not source.loaded:
        raise ValueError(f"config.json says {form.name}, but no projection in {checkpoint.folder} is quantised so")
    # no kernel multiplies by other quantised weights as they are stored: routers, embeddings, up-projections of latents
    others = [name.removesuffix(".weight") for name in places if source.is_quantised(name.removesuffix(".weight"))]
    source.loaded |= {f"{path}.{name}" for path in others for name in (*form.tensors, "bias")}
    is_unused = getattr(model, "is_unused", lambda name: False)

    def read_plain(file: safe_open, stored_name: str) -> Tensor | None:
        share.check()
        name = checkpoint.name_of(stored_name)
        if name in source.loaded or is_unused(BARE.sub("model.", stored_name)) or KV_SCALES.search(name):
            return None
        if OF_QUANTISED.search(name):
            raise ValueError(f"unexpected tensor {name} in {checkpoint.folder}: the model has no such quantised layer")
        return file.get_tensor(stored_name)

    plain = network_tensors(model, checkpoint.folder, read_plain, share.of)
    widened = ((f"{path}.weight", widen(source, share, path, places[f"{path}.weight"].shape)) for path in others)
    fill(places, chain(plain, widened), checkpoint.folder)
    return model


def widen(source: StoredSource, share: Share, path: str, shape: tuple[int, ...]) -> Tensor:
    """Return the rank's part of a quantised weight as floats: `shape` float32."""
    name = f"{path}.weight"
    source.bias(path, 0)
    return share.of(name, source.weight(path, share.whole_shape(name, shape)).dequantised())
