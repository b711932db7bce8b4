"""Read weights in MXFP4 (OCP Microscaling Formats 1.0), and widen them to the model's dtype.

32 neighbours in a row have one scale. A weight has 4 bits, and two weights are a byte, the first in its low bits:

    weight    s e e m    E2M1: (−1)^s · m / 2 if e is 0, otherwise (−1)^s · (1 + m / 2) · 2^(e − 1)
    scale     a byte b   E8M0: 2^(b − 127), and NaN if b is 255

    code           0    1    2    3    4    5    6    7     8 … 15
    value          0    0.5  1    1.5  2    3    4    6     the same, negative
"""

import math
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from nanovllm_extras.weights.load_model import BARE, Read

BLOCK_BYTES = 16  # of 32 weights with one scale
BLOCKS, SCALES = "_blocks", "_scales"  # ends of their names in a checkpoint


class Mxfp4(NamedTuple):
    """The layout of MXFP4 weights in a checkpoint: `…_blocks` and `…_scales`. All other tensors are plain."""

    def reader(self, checkpoint: Any, dtype: torch.dtype) -> Read:
        """Return a `Read` function that widens blocks. For the scales themselves it returns None."""

        def read(file: safe_open, name: str) -> Tensor | None:
            if name.endswith(SCALES):
                return None
            tensor = file.get_tensor(name)
            if not name.endswith(BLOCKS):
                return tensor
            scale_name = BARE.sub("model.", f"{name.removesuffix(BLOCKS)}{SCALES}")
            if scale_name not in checkpoint.files:
                raise ValueError(f"tensor {name} in {checkpoint.folder} is in MXFP4, but has no {scale_name}")
            scales = checkpoint.read(scale_name)
            check_tensors(f"{name} in {checkpoint.folder}", tensor, scales)
            widened = torch.empty(*scales.shape[:-1], 2 * BLOCK_BYTES * scales.shape[-1], dtype=dtype)
            for part, *stored in zip(widened, tensor, scales, strict=True):  # expert by expert, in little memory
                part.copy_(dequantise(*stored))
            return widened

        return read


def check_tensors(name: str, blocks: Tensor, scales: Tensor) -> None:
    """Raise ValueError unless there are blocks: [..., 16] bytes, and a byte of scale for each of them: [...]"""
    are_bytes = blocks.dtype == scales.dtype == torch.uint8
    if not are_bytes or blocks.shape != (*scales.shape, BLOCK_BYTES) or scales.dim() < 2:
        raise ValueError(
            f"the blocks of MXFP4 must be [..., {BLOCK_BYTES}] uint8, with scales [...] uint8; {name} is "
            f"{list(blocks.shape)} {blocks.dtype}, its scales {list(scales.shape)} {scales.dtype}"
        )


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Widen blocks: [..., groups, 16] uint8 with scales: [..., groups] uint8 -> [..., 32 * groups] float32"""
    pairs = torch.tensor([[value_of(byte & 15), value_of(byte >> 4)] for byte in range(256)])  # [256, 2] float32
    powers = torch.tensor([*(math.ldexp(1.0, byte - 127) for byte in range(255)), math.nan])  # [256] float32
    values = pairs[blocks.int()].flatten(-2)  # [..., groups, 32]
    return (values * powers[scales.int()][..., None]).flatten(-2)


def value_of(code: int) -> float:
    """Return the value of four bits in E2M1."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return math.copysign(magnitude, -1.0 if code & 8 else 1.0)


def read_mxfp4(raw: object) -> Mxfp4:
    """Read the `quantization_config` of `quant_method: mxfp4`, which has no numbers: names tell what is quantised."""
    return Mxfp4()
