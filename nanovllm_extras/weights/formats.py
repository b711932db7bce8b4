"""Decode the quantised weights of checkpoints (AWQ, GPTQ, compressed-tensors) to `QuantisedWeight`.

A format defines which tensors a projection has in the checkpoint, and what they mean. `stored.py` reads the tensors. In
all packed tensors a 32-bit word holds several small numbers, the first in its lowest bits:

    AWQ      qweight [in, out / 8]    packed along the outputs, in the order 0 2 4 6 1 3 5 7
             qzeros  [groups, out / 8]    packed in the same way; scales [groups, out]
    GPTQ     qweight [in · bits / 32, out]    packed along the inputs
             qzeros  [groups, out · bits / 32]    packed along the outputs, minus 1 except in "gptq_v2"
             scales  [groups, out]
             g_idx   [in]    the group of each input, in any order if `desc_act` is set
    compressed-tensors
      pack-quantized    weight_packed [out, in · bits / 32]    packed along the inputs; weight_scale [out, groups or 1]
                        weight_zero_point [out · bits / 32, groups or 1]    packed along the outputs, if not symmetric
      int-quantized     weight [out, in] int8, minus 128; weight_scale, weight_zero_point: as above, not packed
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanovllm_extras.weights.quantised_linear import QuantisedWeight
from nanovllm_extras.weights.quantization_options import GROUP_SIZES

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the order of the outputs in a word
ACTIVATIONS_GROUP = 128  # inputs of a token that share a scale if the weight has only one scale for each output
BITS = (4, 8)


@dataclass(frozen=True)
class Format:
    """The format of a checkpoint's weights, from config.json. `group_size` None means a scale for each output."""

    name: str
    bits: int
    group_size: int | None
    has_zeros: bool = True
    zero_offset: int = 0  # added to GPTQ's zeros

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of a projection's tensors, without the projection's own name. `g_idx` is optional."""
        if self.name in ("awq", "gptq"):
            return "qweight", "qzeros", "scales", *(["g_idx"] if self.name == "gptq" else [])
        stored = "weight_packed" if self.name == "pack-quantized" else "weight"
        more = ["weight_zero_point"] if self.has_zeros else []
        return stored, "weight_scale", *more, *(["weight_shape"] if self.name == "pack-quantized" else [])

    @property
    def mark(self) -> str:
        """Return the name of a tensor that every quantised projection has, and no other."""
        return "qweight" if self.name in ("awq", "gptq") else "weight_scale"

    def decode(self, tensors: Mapping[str, Tensor], num_inputs: int) -> QuantisedWeight:
        """Decode a projection's tensors, keyed by the names in `self.tensors`. Raises ValueError for wrong shapes."""
        q, scales, zeros = {"awq": self.awq, "gptq": self.gptq}.get(self.name, self.compressed)(tensors)
        size = self.group_size or num_inputs
        expected = (len(q), -(-num_inputs // size))
        if q.shape[1] != num_inputs or scales.shape != expected or (zeros is not None and zeros.shape != expected):
            shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
            raise ValueError(f"wrong shapes {shapes}, the model needs {num_inputs} inputs in groups of {size}")
        order = self.find_order(tensors.get("g_idx"), size)
        if order is not None:
            q = q[:, order]
        if zeros is not None and bool((zeros == 2 ** (self.bits - 1)).all()):
            zeros = None
        group_size = self.group_size or ACTIVATIONS_GROUP
        return QuantisedWeight(q.contiguous(), scales.float().contiguous(), zeros, self.bits, group_size, order)

    def awq(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        place = torch.tensor(AWQ_ORDER).argsort()
        q, zeros = (unpack(tensors[name], 4).unflatten(1, (-1, 8))[..., place] for name in ("qweight", "qzeros"))
        return q.flatten(1).T, tensors["scales"].T, zeros.flatten(1).T.contiguous()

    def gptq(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q = unpack(tensors["qweight"].T, self.bits)  # [out, in]
        zeros = unpack(tensors["qzeros"], self.bits).T + self.zero_offset
        return q, tensors["scales"].T, (zeros & 2**self.bits - 1).contiguous()

    def compressed(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        packed, scales, zeros = tensors[self.tensors[0]], tensors["weight_scale"], tensors.get("weight_zero_point")
        if self.name == "int-quantized":
            return (packed + 128).to(torch.uint8), scales, zeros if zeros is None else (zeros + 128).to(torch.uint8)
        if zeros is not None:
            zeros = unpack(zeros.T, self.bits)[:, : len(packed)].T.contiguous()
        return unpack(packed, self.bits)[:, : int(tensors["weight_shape"][1])], scales, zeros

    def find_order(self, g_idx: Tensor | None, size: int) -> Tensor | None:
        """Return the order of GPTQ's inputs that makes their groups consecutive, or None if they are consecutive."""
        if g_idx is None or torch.equal(g_idx.long(), torch.arange(len(g_idx)) // size):
            return None
        order = g_idx.argsort(stable=True)
        if not torch.equal(g_idx[order].long(), torch.arange(len(g_idx)) // size):
            raise ValueError(f"g_idx must have groups of {size} inputs each")
        return order


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack words: [n, m] int32 -> [n, m · 32 / bits] uint8. A word's lowest bits are its first number."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 2**bits - 1).to(torch.uint8).flatten(1)


# ---- config.json

AWQ_NAMES = {"bits": "w_bit", "group_size": "q_group_size"}
"""Name of a field -> its name in checkpoints of AutoAWQ and llm-awq."""


def read_awq(raw: Mapping[str, Any]) -> Format:
    check("version", str(value_of(raw, "version", "gemm")).lower(), ("gemm",))
    check("zero_point", value_of(raw, "zero_point", True), (True,))
    bits, size = (value_of(raw, name, raw.get(older)) for name, older in AWQ_NAMES.items())
    return Format("awq", check("bits", bits, (4,)), group_size(size))


def read_gptq(raw: Mapping[str, Any]) -> Format:
    form = check("checkpoint_format", value_of(raw, "checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
    check("dynamic", raw.get("dynamic") or None, (None,))
    bits = check("bits", raw.get("bits"), BITS)
    return Format("gptq", bits, group_size(raw.get("group_size")), zero_offset=form == "gptq")


def read_compressed(raw: Mapping[str, Any]) -> Format:
    name = check("format", raw.get("format"), ("pack-quantized", "int-quantized"))
    groups = list((raw.get("config_groups") or {}).values())
    check("config_groups: their number", len(groups), (1,))
    for field in ("kv_cache_scheme", "sparsity_config"):
        check(field, raw.get(field) or None, (None,))
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations")
    check("weights: type", value_of(weights, "type", "int"), ("int",))
    check("weights: actorder", weights.get("actorder"), (None, False, "weight", "static"))  # without a g_idx
    check("input_activations: dynamic", (inputs or {"dynamic": True}).get("dynamic"), (True,))
    check("input_activations: num_bits", (inputs or {"num_bits": 8}).get("num_bits"), (8,))
    strategy = check("weights: strategy", weights.get("strategy"), ("group", "channel"))
    bits = check("weights: num_bits", weights.get("num_bits"), BITS if name == "pack-quantized" else (8,))
    size = group_size(weights.get("group_size")) if strategy == "group" else None
    return Format(name, bits, size, has_zeros=not value_of(weights, "symmetric", True))


Value = TypeVar("Value")


def value_of(raw: Mapping[str, Any], name: str, default: Value) -> Value:
    """Return the value of a field, or the default if the field is absent or null."""
    return default if raw.get(name) is None else raw[name]


def group_size(value: int | None) -> int | None:
    """Check and return the group size; None for -1, which means a scale for each output."""
    return None if check("group_size", value, (*GROUP_SIZES, -1)) == -1 else value


def check(field: str, value: Any, allowed: tuple[object, ...]) -> Any:
    """Return `value` if it is allowed. Raises ValueError with the field's name otherwise."""
    if value not in allowed:
        text = " or ".join(map(repr, allowed))
        raise ValueError(f"the field {field} of a quantised checkpoint must be {text}, config.json has {value!r}")
    return value


READERS = {"awq": read_awq, "gptq": read_gptq, "compressed-tensors": read_compressed}
