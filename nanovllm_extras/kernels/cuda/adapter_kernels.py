"""LoRA adapters in Triton: y += x A^T B^T, where each row of x has the A and B of its own adapter. One kernel, twice.

    down    t = x A^T     [num_tokens, num_projections * max_rank]
    up      y += t B^T    [num_tokens, num_outputs]

Each program computes some outputs of 16 rows with the weight of one slot, and only those rows whose adapter is in this
slot. A program without such rows ends at once. So the rows are grouped by adapter on the device: the grid follows from
shapes, the host decides nothing, and CUDA graphs can record the launches. Only the weights of adapters that have rows
are read.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_extras.kernels.adapter_rows import DeviceProducts, LayerShape

ROWS = 16  # of a tensor core's product
OUTPUTS = 64  # of one program
TILE = 64  # inputs at a time


@triton.jit(do_not_specialize=["num_tokens"])
def slot_product_kernel(
    out_ptr,  # [num_tokens, …], rows `out_stride` apart
    x_ptr,  # [num_tokens, …], rows `x_stride` apart
    weight_ptr,  # [num_slots, num_outputs, NUM_INPUTS]
    slots_ptr,  # [num_tokens] int32: 0 for none
    blocks_ptr,  # [num_blocks, 3] int32: first output, end of the outputs, first input of x
    num_tokens,
    num_outputs,
    out_stride,
    x_stride,
    NUM_INPUTS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute one block of outputs of the rows that have the adapter of one slot.

    Grid: (num_tokens / ROWS, rounded up; num_blocks; num_slots).
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.program_id(2)
    is_own = tl.load(slots_ptr + rows, mask=rows < num_tokens, other=0) == slot + 1
    if tl.sum(is_own.to(tl.int32), 0) == 0:
        return
    block = blocks_ptr + 3 * tl.program_id(1)
    outputs = tl.load(block) + tl.arange(0, OUTPUTS)
    is_output = outputs < tl.load(block + 1)
    columns = tl.arange(0, TILE)
    x_places = x_ptr + rows.to(tl.int64)[:, None] * x_stride + tl.load(block + 2)  # [ROWS, 1]
    weight_places = weight_ptr + (slot.to(tl.int64) * num_outputs + outputs)[:, None] * NUM_INPUTS  # [OUTPUTS, 1]
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, NUM_INPUTS, TILE):
        is_input = start + columns < NUM_INPUTS
        x = tl.load(x_places + start + columns[None, :], mask=is_own[:, None] & is_input[None, :], other=0.0)
        weight = tl.load(
            weight_places + start + columns[None, :], mask=is_output[:, None] & is_input[None, :], other=0.0
        )
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    places = out_ptr + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    is_place = is_own[:, None] & is_output[None, :]
    if IS_ADDED:
        acc = acc.to(dtype).to(tl.float32) + tl.load(places, mask=is_place, other=0.0).to(tl.float32)
    tl.store(places, acc.to(dtype), mask=is_place)


class TritonProducts(DeviceProducts):
    """The products of one linear layer by the kernel."""

    def __init__(self, shape: LayerShape, *sizes: Any) -> None:
        super().__init__(shape, *sizes)
        num_ranks = self.a.shape[1]
        down = [(first, num_ranks, 0) for first in range(0, num_ranks, OUTPUTS)]
        up = [
            (first, end, i * self.rank)
            for i, (start, end) in enumerate(shape.spans)
            for first in range(start, end, OUTPUTS)
        ]
        self.down, self.up = (torch.tensor(blocks, dtype=torch.int32, device=self.a.device) for blocks in (down, up))

    def add(self, x: Tensor, y: Tensor) -> None:
        x = x.contiguous()
        t = x.new_empty(len(x), self.a.shape[1])  # rows without an adapter are neither written nor read
        self._launch(t, x, self.a, self.down, is_added=False)
        self._launch(y, t, self.b, self.up, is_added=True)

    def _launch(self, out: Tensor, x: Tensor, weight: Tensor, blocks: Tensor, is_added: bool) -> None:
        assert self.rows.slots is not None
        num_tokens, (num_slots, num_outputs, num_inputs) = len(x), weight.shape
        if not num_tokens:
            return
        slot_product_kernel[(triton.cdiv(num_tokens, ROWS), len(blocks), num_slots)](
            out,
            x,
            weight,
            self.rows.slots,
            blocks,
            num_tokens,
            num_outputs,
            out.stride(0),
            x.stride(0),
            NUM_INPUTS=num_inputs,
            IS_ADDED=is_added,
            ROWS=ROWS,
            OUTPUTS=OUTPUTS,
            TILE=min(TILE, max(16, triton.next_power_of_2(num_inputs))),
            num_warps=4,
        )
