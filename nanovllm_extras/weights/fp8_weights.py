"""Read weights in 8-bit floats (e4m3), and widen them to the model's dtype.

A weight is [out, in] float8_e4m3fn. It is multiplied by its scale: one number for the tensor, [out, 1] for outputs, or
[out / 128, in / 128] for blocks of 128 × 128.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nanovllm_extras.weights.load_model import BARE, Read

SCALES = (".weight_scale_inv", ".weight_scale", ".input_scale")
KV_SCALES = re.compile(r"\.((q|k|v|kv|prob)_scale|output_scale)$")
"""Scales for a cache of K and V in fp8, which this engine does not use: its own caches need none, or compute them."""


@dataclass(frozen=True)
class Fp8:
    """The layout of fp8 weights in a checkpoint.

    `block`: the rows and columns that share a scale, or None for one scale for each output or for the whole tensor.
    """

    block: tuple[int, int] | None
    scale_name: str

    def reader(self, checkpoint: Any, dtype: torch.dtype) -> Read:
        """Return a `Read` function that widens fp8 tensors. For the scales themselves it returns None."""

        def read(file: safe_open, name: str) -> Tensor | None:
            if name.endswith(SCALES) or KV_SCALES.search(name):
                return None
            tensor = file.get_tensor(name)
            if tensor.dtype != torch.float8_e4m3fn:
                return tensor
            scale_name = BARE.sub("model.", f"{name.removesuffix('weight')}{self.scale_name}")
            if scale_name not in checkpoint.files:
                raise ValueError(f"tensor {name} in {checkpoint.folder} is float8_e4m3fn, but has no {scale_name}")
            return self.widened(name, tensor, checkpoint.read(scale_name)).to(dtype)

        return read

    def widened(self, name: str, weight: Tensor, scale: Tensor) -> Tensor:
        """Multiply weight: [out, in] by its scale -> [out, in] float32"""
        rows, columns = self.block or (1, weight.shape[1])
        blocks = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        if scale.numel() == 1 and (self.block is None or blocks == (1, 1)):
            return weight.float() * scale.float().view(1, 1)
        if tuple(scale.shape) != blocks:
            raise ValueError(f"the scale of {name} is {list(scale.shape)}, the weight needs {list(blocks)}")
        spread = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return weight.float() * spread[: weight.shape[0], : weight.shape[1]]


def read_fp8(raw: Mapping[str, Any]) -> Fp8:
    """Read the `quantization_config` of `quant_method: fp8`."""
    check_format("fmt", raw.get("fmt") or "e4m3")
    block = raw.get("weight_block_size")
    return Fp8(None, "weight_scale") if block is None else Fp8(as_block(block), "weight_scale_inv")


def read_compressed_fp8(raw: Mapping[str, Any]) -> Fp8:
    """Read the `quantization_config` of compressed-tensors with `format: float-quantized`."""
    groups = list((raw.get("config_groups") or {}).values())
    blocks = {str((group.get("weights") or {}).get("block_structure")) for group in groups}
    if len(blocks) > 1:
        raise ValueError(f"the config_groups of a quantised checkpoint must have one block_structure, got {blocks}")
    block = (groups[0].get("weights") or {}).get("block_structure") if groups else None
    return Fp8(None if block is None else as_block(block), "weight_scale")


def check_format(field: str, value: object) -> None:
    if value != "e4m3":
        raise ValueError(f"the field {field} of a quantised checkpoint must be 'e4m3', config.json has {value!r}")


def as_block(value: object) -> tuple[int, int]:
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(one, int) and one > 0 for one in value)):
        raise ValueError(f"the block size of a quantised checkpoint must be [rows, columns], config.json has {value!r}")
    return value[0], value[1]
