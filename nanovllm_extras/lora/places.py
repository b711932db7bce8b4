"""Where adapters can change a network: its linear layers, and the names of their projections.

    qkv_proj of nanovllm       q_proj, k_proj and v_proj of PEFT: rows of one weight, each with an A and a B of its own
    o_proj                     one projection of the same name

Experts and routers have no places: an adapter that names them is refused by that name. The layers of a head that only
makes drafts have none either, since a draft changes no output. `vocabulary.py` has embeddings and the output layer.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.layers.basic import FusedLinear, Linear
from nanovllm_extras.weights.load_model import BARE


class Projection(NamedTuple):
    """One projection of a linear layer: `num_outputs` columns of the layer's output, from `first` on."""

    name: str  # of the module in the checkpoint
    first: int
    num_outputs: int


class Place(NamedTuple):
    """A linear layer of a network."""

    path: str
    num_inputs: int
    projections: tuple[Projection, ...]


def find_places(network: nn.Module) -> list[Place]:
    """Return the linear layers that adapters can change. network: as its class makes it, perhaps on the meta device"""
    return [
        Place(path, layer.weight.shape[1], tuple(projections_of(path, layer)))
        for path, layer in network.named_modules()
        if type(layer) in (Linear, FusedLinear) and ".experts." not in path and not path.startswith("mtp.")
    ]


def projections_of(path: str, layer: Any) -> Iterator[Projection]:
    """Yield the projections of a linear layer, in the order of its outputs."""
    if not isinstance(layer, FusedLinear) or getattr(layer, "is_stored_fused", False):
        yield Projection(path, 0, len(layer.weight))
        return
    parent, first = path.rpartition(".")[0], 0
    for part, num_outputs in layer.parts.items():
        yield Projection(f"{parent}.{part}", first, num_outputs)
        first += num_outputs


class Names:
    """The names of modules in checkpoints, as the network has them. network: perhaps with a `rename_stored`"""

    def __init__(self, network: nn.Module) -> None:
        self._rename: Callable[[str, Tensor], Any] | None = getattr(network, "rename_stored", None)

    def of(self, module: str) -> str:
        """Return the network's name of the module that a checkpoint calls `module`."""
        weight = BARE.sub("model.", f"{module}.weight")
        if self._rename is not None:
            renamed = [name for name, _ in self._rename(weight, torch.empty(1, 1, device="meta"))]
            weight = renamed[0] if len(renamed) == 1 else weight
        return weight.removesuffix(".weight")
