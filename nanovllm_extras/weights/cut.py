"""How a checkpoint is cut: which part of each tensor a rank holds.

The model files do not depend on ranks. Each rank builds the network of its share: `share_of` divides heads,
feed-forward width and vocabulary by the number of ranks. So a rank's tensors are smaller than the checkpoint's, and the
dimension in which a tensor is smaller is the one that is cut. Two ranks of a model with 4 query heads, 2 K and V heads
of size 8, a width of 32 and a feed-forward width of 64:

                   checkpoint    rank 0 holds             rank 1 holds
    q_proj          [32, 32]     rows 0 … 15              rows 16 … 31            heads 0, 1 | 2, 3
    k_proj          [16, 32]     rows 0 … 7               rows 8 … 15             head 0 | 1
    o_proj          [32, 32]     columns 0 … 15           columns 16 … 31         its products are summed over the ranks
    gate_proj       [64, 32]     rows 0 … 31              rows 32 … 63
    down_proj       [32, 64]     columns 0 … 31           columns 32 … 63         its products are summed over the ranks
    norms, routers               all                      all

With more ranks than K and V heads, several ranks hold the same head. In Gemma 4, layers with a window may have more K
and V heads than the others: each number of heads is divided by itself. Called by `start_ranks.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from nanovllm.layers.basic import Embedding, FusedLinear
from nanovllm_extras.models.groups import KVGroup
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.weights.load_model import BARE

DIVIDED = (
    *("num_attention_heads", "intermediate_size", "moe_intermediate_size"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)


def share_of(shape: NetworkConfig, size: int) -> NetworkConfig:
    """Return the network of one of `size` ranks. Raises ValueError if `size` does not divide a size of the model.

    The vocabulary need not be divided: the last rank's share is filled up with zeros.
    """
    found = {name: getattr(shape, name) for name in DIVIDED if hasattr(shape, name)}
    for name, value in found.items():
        if value % size:
            raise ValueError(f"tensor_parallel_size {size} must divide {name}, config.json has {value}")
    sizes: dict[str, Any] = {name: value // size for name, value in found.items()}
    if shape.kv_groups:
        sizes["kv_groups"] = tuple([share_of_group(group, size) for group in shape.kv_groups])
    else:
        sizes["num_key_value_heads"] = num_kv_heads_of(shape, size)
    if hasattr(shape, "vocab_size_per_layer_input"):
        sizes["vocab_size_per_layer_input"] = -(-shape.vocab_size_per_layer_input // size)
    if shape.state_shape is not None:
        if (num_channels := shape.state_shape.conv[1]) % size:
            raise ValueError(
                f"tensor_parallel_size {size} must divide the channels of the layers' convolutions, "
                f"config.json has {num_channels}"
            )
        sizes["state_shape"] = shape.state_shape.share_of(size)
    return replace(shape, **sizes, vocab_size=-(-shape.vocab_size // size))


def num_kv_heads_of(shape: NetworkConfig, size: int) -> int:
    """Return the number of K and V heads of one rank."""
    if shape.latent_rank is not None:  # one latent for all heads: each rank holds it whole
        return shape.num_key_value_heads
    return divide_heads(shape.num_key_value_heads, size)


def share_of_group(group: KVGroup, size: int) -> KVGroup:
    """Return the K and V of one rank, for layers with K and V of one shape."""
    layers = "that see all tokens" if group.options.window is None else "with a window"
    return replace(group, num_kv_heads=divide_heads(group.num_kv_heads, size, f" of the layers {layers}"))


def divide_heads(num_kv_heads: int, size: int, of_layers: str = "") -> int:
    """Return the number of K and V heads of one rank. Ranks share heads if there are more ranks than heads."""
    if num_kv_heads % size and size % num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size {size} must divide num_key_value_heads{of_layers}, or be a multiple of it, "
            f"config.json has {num_kv_heads}"
        )
    return max(1, num_kv_heads // size)


def rows_of(network: nn.Module, path: str) -> list[int]:
    """Return the numbers of rows of a layer that are cut each by itself: none if its tensors are cut as a whole."""
    layer, (parent, _, name) = network.get_submodule(path), path.rpartition(".")
    if isinstance(layer, FusedLinear):
        return [n for part, rows in layer.parts.items() for n in stacked_in(network, parent, part, rows)]
    return stacked_in(network, parent, name)


def stacked_in(network: nn.Module, parent: str, name: str, *default: int) -> list[int]:
    """Return the numbers of rows that one tensor of a checkpoint stacks, if the layer `parent` says so."""
    stacked: dict[str, tuple[int, ...]] = getattr(network.get_submodule(parent), "stacked", {})
    return list(stacked.get(name, default))


class Cut(NamedTuple):
    """A rank's part of one tensor: `spans` of its dimension `dim`, one after another."""

    whole: tuple[int, ...]  # shape of the tensor in the checkpoint
    part: tuple[int, ...]  # shape of the rank's
    dim: int
    spans: tuple[tuple[int, int], ...]  # (start, stop)

    def of(self, tensor: Any) -> torch.Tensor:
        """Return the rank's part of a whole tensor. Of a slice of a safetensors file, only this part is read.

        What the spans do not fill is zero.
        """
        pieces = [tensor[start:stop] if self.dim == 0 else tensor[:, start:stop] for start, stop in self.spans]
        if len(pieces) == 1 and pieces[0].shape == self.part:
            return pieces[0]
        part = (pieces[0] if pieces else tensor[:0]).new_zeros(self.part)
        start = 0
        for piece in pieces:
            part.narrow(self.dim, start, piece.shape[self.dim]).copy_(piece)
            start += piece.shape[self.dim]
        return part


class Cutter(NamedTuple):
    """Cuts for one of `size` ranks."""

    rank: int
    size: int

    def cuts(self, whole: nn.Module, share: nn.Module) -> Iterator[tuple[str, nn.Module, str, Cut]]:
        """Yield (module's path, module of `whole`, name, cut) for each parameter. Both networks may be on `meta`.

        Layers of `share` that are quantised already have none.
        """
        shares = dict(share.named_modules(remove_duplicate=False))
        for path, module in whole.named_modules(remove_duplicate=False):
            parameters = shares[path]._parameters
            for name, parameter in module.named_parameters(recurse=False):
                if (part := parameters.get(name)) is None:
                    continue
                shapes = tuple(parameter.shape), tuple(part.shape)
                rows = rows_of(whole, path), rows_of(share, path)
                yield path, module, name, self.cut(module, shares[path], name, *shapes, rows)

    def cut(
        self,
        layer: Any,
        share: Any,
        name: str,
        whole: tuple[int, ...],
        part: tuple[int, ...],
        rows: tuple[list[int], list[int]],
    ) -> Cut:
        """Return the cut of the parameter `name`: its shape is `whole` in `layer`, and `part` in `share`.

        rows: of both layers, the numbers of rows that are cut each by itself (`rows_of`)
        """
        if isinstance(layer, Embedding):  # by vocabulary; the last ranks' rows may end behind it
            start, stop = (min((self.rank + i) * part[0], whole[0]) for i in (0, 1))
            return Cut(whole, part, 0, ((start, stop),))
        if name == "bias" and self.rank and layer.weight.shape[1] != share.weight.shape[1]:
            return Cut(whole, part, 0, ())  # the ranks' products are summed, so only rank 0 adds the bias
        dim = next((dim for dim in range(len(whole)) if whole[dim] != part[dim]), 0)
        if rows[0] and dim == 0:
            return Cut(whole, part, 0, self.spans_of_parts(*rows))
        return Cut(whole, part, dim, (self.span(whole[dim], part[dim]),))

    def span(self, whole: int, part: int) -> tuple[int, int]:
        """Return (start, stop) of the rank's part. If the parts exceed the whole, neighbouring ranks hold the same.

        >>> [Cutter(rank, 4).span(16, 8) for rank in range(4)]  # two heads of size 8, four ranks
        [(0, 8), (0, 8), (8, 16), (8, 16)]
        """
        start = self.rank * whole // self.size // part * part
        return start, start + part

    def spans_of_parts(self, wholes: list[int], parts: list[int]) -> tuple[tuple[int, int], ...]:
        """Return the spans of stacked projections (q, k and v, or gate and up), each of which is cut by itself."""
        spans, first = [], 0
        for whole, part in zip(wholes, parts, strict=True):
            start, stop = self.span(whole, part)
            spans.append((first + start, first + stop))
            first += whole
        return tuple(spans)

    def cuts_of_checkpoint(self, whole: nn.Module, share: nn.Module) -> dict[str, Cut]:
        """Return the cut of each tensor of a checkpoint, keyed by the tensor's name in the checkpoint."""
        cuts = {}
        for path, layer, name, cut in self.cuts(whole, share):
            if isinstance(layer, FusedLinear) and not getattr(layer, "is_stored_fused", False):
                ours: Any = share.get_submodule(path)
                parent, rest = path.rpartition(".")[0], cut.whole[1:]
                for part, num_rows in layer.parts.items():
                    shapes = (num_rows, *rest), (ours.parts[part], *cut.part[1:])
                    dim = 0 if shapes[0][0] != shapes[1][0] else cut.dim
                    rows = stacked_in(whole, parent, part, num_rows), stacked_in(share, parent, part, ours.parts[part])
                    sizes = ([shapes[0][dim]], [shapes[1][dim]]) if dim else rows
                    spans = self.spans_of_parts(*sizes) if cut.spans else ()
                    cuts[f"{parent}.{part}.{name}"] = Cut(*shapes, dim, spans)
            else:
                cuts[f"{path}.{name}"] = cut
        return cuts


def read_part(cuts: Mapping[str, Cut], file: safe_open, name: str) -> torch.Tensor:
    """Read only the rank's part of the tensor `name` from an open safetensors file."""
    cut, tensor = cuts.get(BARE.sub("model.", name)), file.get_slice(name)
    if cut is None:  # the network renames it, or the loader says that it is unexpected
        return file.get_tensor(name)
    if tuple(tensor.get_shape()) != cut.whole:
        raise ValueError(f"tensor {name} is {tensor.get_shape()}, the model needs {list(cut.whole)}")
    return cut.of(tensor)
