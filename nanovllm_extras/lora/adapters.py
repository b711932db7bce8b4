"""`Adapters`: what a runner holds if the engine serves LoRA adapters. It has their matrices, and each rank its part.

    load      read an adapter's files, cut the matrices as the layers are cut, and pack them for the kernels
    put       put a loaded adapter into a slot, in place of another one: only then rows can have it
    add_to    the slot of each row's adapter becomes a part of the step's metadata, which the layers read
    unload    forget an adapter

With several ranks, rank 0 sends the other ranks these commands (`obey`). An adapter is a part of a sum as the weight
is: of a layer that is cut by its outputs, a rank has rows of B, and of one that is cut by its inputs, columns of A.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.layers.attention import AttentionMetadata
from nanovllm.scheduler import Step
from nanovllm_extras.kernels.adapter_rows import AdapterRows, LayerShape, Products
from nanovllm_extras.lora.adapter_file import Adapter, Matrices, read_adapter
from nanovllm_extras.lora.lora_linear import LoraLinear
from nanovllm_extras.lora.places import Names, Place, find_places
from nanovllm_extras.lora.vocabulary import (
    EMBEDDINGS,
    HEAD,
    LoraEmbedding,
    LoraHead,
    VocabularyMatrices,
    find_vocabulary,
)
from nanovllm_extras.records.adapter_metadata import adapters_of, with_adapters
from nanovllm_extras.records.loaded_adapter import LoadedAdapter
from nanovllm_extras.weights.cut import Cut

LOAD, PUT, UNLOAD = "load", "put", "unload"
Tell = Callable[[list[Any], Callable[[], int]], int]
"""Sends a command to all ranks, this one included, whose answer is the function's. Returns the least of the answers."""
Keep = Callable[[list[list[Any]]], list[list[Any]]]
"""Returns the packed matrices of an adapter where they are kept: of each place, of each projection."""
MakeProducts = Callable[[LayerShape, AdapterRows], Products]


class Ranks(Protocol):
    """What tells the other ranks (`ranks` of the runner)."""

    def command(self, order: list[Any], answer: Callable[[], int]) -> int:
        """Send a command to all ranks, of which rank 0 answers by `answer`. Returns the least of the answers."""


class Adapters:
    """The adapters of one rank.

    whole, share: the whole network, and that of this rank, on the meta device; cuts: of the tensors of a checkpoint
    (`weights/cut.py`), empty for one rank; keep: where packed matrices are kept; refused: `embed_tokens` or
    `lm_head` -> why adapters of it are refused
    """

    def __init__(
        self,
        whole: nn.Module,
        share: nn.Module,
        cuts: Mapping[str, Cut],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        rows: AdapterRows,
        keep: Keep = list,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self._keep_packed = keep
        self.num_slots, self.max_rank, self.dtype, self.rows = num_slots, max_rank, dtype, rows
        self._places, self._share, self._cuts = find_places(whole), find_places(share), cuts
        self._names = Names(whole)
        self._refused = refused or {}
        self._vocabulary = [one for one in find_vocabulary(whole) if one.path.rpartition(".")[2] not in self._refused]
        self.logits_rows = AdapterRows()  # those whose logits are computed; only their slots are read
        self._of_vocabulary: list[VocabularyMatrices] = []
        self._products: list[Products] = []
        self._packed: dict[int, list[list[Any]]] = {}  # number of an adapter -> of each place, of each projection
        self._in_slot: list[int] = [0] * (num_slots + 1)  # numbers of adapters; slot 0 is none

    def wrap(self, model: nn.Module, make_products: MakeProducts) -> None:
        """Replace each linear layer of the network by a `LoraLinear` around it. The weights must be loaded."""
        for place in self._share:
            shape = shape_of(place)
            products = make_products(shape, self.rows)
            self._products.append(products)
            parent, _, name = place.path.rpartition(".")
            module = model.get_submodule(parent)
            setattr(module, name, LoraLinear(getattr(module, name), shape, self.rows, products))

    def wrap_vocabulary(self, model: Any, device: torch.device, rank: int) -> None:
        """Replace embeddings and output layer, once no layer is replaced by a faster one and the ranks have joined."""
        head, table = model.lm_head, model.model.embed_tokens  # perhaps one layer
        for place in self._vocabulary:
            is_head = place.path == HEAD
            rows = self.logits_rows if is_head else self.rows
            sizes = shape_of(place), rows, self.num_slots, self.dtype
            matrices = VocabularyMatrices(*sizes, device, is_kept=rank == 0)
            self._of_vocabulary.append(matrices)
            if is_head:
                model.lm_head = LoraHead(head, matrices)
            elif hasattr(table, "add_before_sum"):  # of several ranks
                table.add_before_sum = matrices.add_rows
            else:
                model.model.embed_tokens = LoraEmbedding(table, matrices)
        self._products += self._of_vocabulary

    def changes_vocabulary(self, metadata: AttentionMetadata) -> bool:
        """Return whether rows of a step have an adapter of the embeddings or of the output layer.

        metadata: on the host. CUDA graphs, which have been recorded without these adapters, cannot compute the step.
        """
        slots = adapters_of(metadata)
        found = [] if slots is None else slots.unique().tolist()
        return any(one.slots[slot] is not None for one in self._of_vocabulary for slot in found)

    # ---- commands

    def load(self, ranks: Ranks, number: int, folder: Path) -> Adapter:
        """Load an adapter on all ranks. Raises ValueError, and changes nothing, if one of them cannot read it."""
        adapter = self._read(folder)
        if not ranks.command([LOAD, number, str(folder), adapter.digest], lambda: self._keep(number, adapter)):
            self.unload(ranks, number)
            raise ValueError(
                f"lora_path {folder} cannot be read by all ranks, or holds another adapter for some of them"
            )
        return adapter

    def unload(self, ranks: Ranks, number: int) -> None:
        """Forget an adapter that no unfinished request has."""
        ranks.command([UNLOAD, number], lambda: self._forget(number))

    def obey(self, order: list[Any]) -> int:
        """Do what rank 0 has sent, and return the answer."""
        kind, *values = order
        if kind == LOAD:
            number, folder, digest = values
            try:
                adapter = self._read(Path(folder))
            except ValueError:  # such as a folder that this rank's machine does not have
                return 0
            return self._keep(number, adapter) if adapter.digest == digest else 0
        return self._put(*values) if kind == PUT else self._forget(*values)

    def _read(self, folder: Path) -> Adapter:
        places = [*self._places, *self._vocabulary]
        try:
            return read_adapter(folder, places, self._names.of, self.max_rank, self._refused, self.dtype)
        except OSError as error:
            raise ValueError(f"lora_path cannot be read: {error}") from error

    def _keep(self, number: int, adapter: Adapter) -> int:
        packed = []
        for whole, products in zip([*self._places, *self._vocabulary], self._products, strict=True):
            own = [adapter.matrices.get(projection.name) for projection in whole.projections]
            parts = zip(own, whole.projections, strict=True)
            packed.append([None if one is None else products.pack(*self._cut(one, to.name)) for one, to in parts])
        num_linear = len(self._places)
        self._packed[number] = [*self._keep_packed(packed[:num_linear]), *packed[num_linear:]]
        return 1

    def _put(self, slot: int, number: int) -> int:
        for packed, products in zip(self._packed[number], self._products, strict=True):
            products.put(slot, packed)
        self._in_slot[slot] = number
        return 1

    def _forget(self, number: int) -> int:
        self._packed.pop(number, None)
        for slot, one in enumerate(self._in_slot):
            if one == number and slot:
                for place, products in zip([*self._share, *self._vocabulary], self._products, strict=True):
                    products.put(slot, [None] * len(place.projections))
                self._in_slot[slot] = 0
        return 1

    def _cut(self, matrices: Matrices, name: str) -> tuple[Tensor, Tensor]:
        """Return the rank's part of A and B of a projection."""
        a, b = matrices
        if name in (EMBEDDINGS, HEAD):
            return a, b
        cut = self._cuts.get(f"{name}.weight")
        if cut is None or cut.whole == cut.part:
            return a, b
        if cut.dim == 0:
            return a, cut._replace(whole=tuple(b.shape), part=(cut.part[0], b.shape[1])).of(b)
        return cut._replace(whole=tuple(a.shape), part=(len(a), cut.part[1])).of(a), b

    # ---- a step

    def add_to(self, ranks: Ranks, step: Step, metadata: AttentionMetadata) -> AttentionMetadata:
        """Return the metadata of a step with the slots of its rows, and put the adapters there that they need."""
        chunks: list[tuple[Any, int, int]] = [*step.chunks]
        slots = np.array([getattr(seq, "adapter_slot", 0) for seq, _, _ in chunks], np.int32)  # [num_seqs]
        if not slots.any():
            return metadata
        for slot, adapter in {(seq.adapter_slot, seq.adapter) for seq, _, _ in chunks if seq.adapter_slot}:
            self.ensure(ranks, slot, adapter)
        lens = metadata.cu_seqlens_q.diff().numpy()  # [num_seqs]
        return with_adapters(metadata, torch.from_numpy(np.repeat(slots, lens)))

    def ensure(self, ranks: Ranks, slot: int, adapter: LoadedAdapter) -> None:
        """Put an adapter into a slot unless it is there. No row of a step has the adapter that was there before."""
        if self._in_slot[slot] != adapter.number:
            ranks.command([PUT, slot, adapter.number], lambda: self._put(slot, adapter.number))


def shape_of(place: Place) -> LayerShape:
    ends = [projection.first + projection.num_outputs for projection in place.projections]
    return LayerShape(place.num_inputs, (0, *ends))
