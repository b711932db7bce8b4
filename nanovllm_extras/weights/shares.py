"""The part of a quantised checkpoint that a rank holds: whole tensors are read, decoded, and then cut.

A weight that is cut by rows gives each rank some of the outputs, with their scales. A weight that is cut by columns
gives each rank some of the inputs, and so some of the groups. Each rank must have whole groups: then its groups, and
those to which activations are rounded, are the groups of one rank, and only the order of sums differs.

    down_proj [32, 64], groups of 32    rank 0: inputs 0 … 31, group 0    rank 1: inputs 32 … 63, group 1
    down_proj [32, 96], groups of 32    inputs 0 … 47 are one group and a half: ValueError

With one scale for each output there are no groups of weights, so any cut is allowed. Activations are rounded in groups
that begin at the rank's first input.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from nanovllm_extras.weights.load_model import part_of_whole
from nanovllm_extras.weights.quantised_linear import QuantisedWeight


@dataclass(frozen=True)
class Share:
    """The part that one rank holds. By default it is all of the checkpoint."""

    cuts: Mapping[str, Any] = field(default_factory=dict)
    """Name of a tensor in the checkpoint -> its `Cut` (`weights/cut.py`)."""
    check: Callable[[], None] = lambda: None
    """Called before a tensor is read. It raises an error if another rank has failed."""

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the checkpoint of a tensor that has `shape` in the rank's network."""
        cut = self.cuts.get(name)
        return tuple(shape) if cut is None else cut.whole

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rank's part of a whole tensor."""
        return part_of_whole(self.cuts, name, tensor)

    def of_weight(self, name: str, weight: QuantisedWeight) -> QuantisedWeight:
        """Return the rank's part of a quantised weight: its rows, or whole groups of its columns (`check_groups`)."""
        cut = self.cuts.get(name)
        if cut is None or cut.whole == cut.part:
            return weight
        width = weight.scales.shape[1]
        of_groups = cut._replace(whole=(cut.whole[0], width), part=(cut.part[0], width))
        if cut.dim == 1 and width > 1:
            size = weight.group_size
            spans = tuple([(start // size, -(-stop // size)) for start, stop in cut.spans])
            part = cut.part[0], sum(stop - start for start, stop in spans)
            of_groups = of_groups._replace(part=part, spans=spans)
        elif cut.dim == 1:  # one scale for all inputs of an output
            of_groups = of_groups._replace(dim=0, spans=((0, cut.whole[0]),))
        zeros = None if weight.zeros is None else of_groups.of(weight.zeros)
        return replace(weight, q=cut.of(weight.q), scales=of_groups.of(weight.scales), zeros=zeros)

    def check_groups(self, name: str, group_size: int | None, is_ordered: bool) -> None:
        """Raise ValueError if the rank's inputs are not whole groups.

        group_size: the number of inputs that share a scale, or None if all do; is_ordered: whether the weight has its
        inputs in an order of their groups, which then are anywhere (GPTQ's `desc_act`)
        """
        cut = self.cuts.get(name)
        if cut is None or cut.whole == cut.part or cut.dim == 0:
            return
        num_inputs, share = cut.whole[1], cut.part[1]
        size = num_inputs // share
        is_cut = any(end % group_size and end != num_inputs for end in sum(cut.spans, ())) if group_size else False
        if not is_ordered and not is_cut:
            return
        why = f"{group_size} of them share a scale"
        if is_ordered:
            why = "those that share a scale are anywhere among them (`desc_act`, or the order of heads in a GGUF file)"
        raise ValueError(
            f"tensor_parallel_size={size} would divide the {num_inputs} inputs of {name} into {share} for each rank, "
            f"but {why}; take tensor_parallel_size=1, or a checkpoint whose groups of inputs can be divided"
        )
