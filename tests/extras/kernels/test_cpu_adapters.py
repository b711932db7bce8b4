"""LoRA adapters in C: each row against float64, with the matrices of its adapter, and the same bits in any batch."""

import pytest
import torch

from nanovllm_extras.kernels.adapter_rows import LayerShape
from nanovllm_extras.kernels.cpu.cpu_adapters import CpuAdapterRows, CpuProducts, in_huge_pages
from nanovllm_extras.kernels.cpu.library import DTYPES

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 8e-2}
RANKS = {1: 16, 2: 3, 3: 40, 4: 1}  # of the adapter in each slot; slot 5 is empty
SLOTS = [0, 3, 1, 1, 0, 2, 3, 4, *[2] * 70, 5, 1]  # more rows than are computed as one piece


def randn(*shape, seed, dtype, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def make(shape, dtype):
    """Return products, and (A, B) in float64 by slot and projection. The second adapter leaves out a projection."""
    rows, matrices = CpuAdapterRows(), {}
    products = CpuProducts(shape, rows, 5, dtype)
    for slot, rank in RANKS.items():
        packed = []
        for i, (start, end) in enumerate(zip(shape.columns, shape.columns[1:], strict=False)):
            a = randn(rank, shape.num_inputs, seed=10 * slot + i, dtype=dtype, scale=shape.num_inputs**-0.5)
            b = randn(end - start, rank, seed=100 * slot + i, dtype=dtype)
            is_left_out = slot == 2 and i == 1
            packed.append(None if is_left_out else products.pack(a.float(), b.float()))
            if not is_left_out:
                matrices[slot, i] = a.double(), b.double()
        products.put(slot, *in_huge_pages([packed]))
    return products, matrices


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [LayerShape(64, (0, 32)), LayerShape(98, (0, 80, 101, 1200))])
def test_each_row_has_its_own_adapter(dtype, shape):
    products, matrices = make(shape, dtype)
    products.rows.select(torch.tensor(SLOTS, dtype=torch.int32))
    x = randn(len(SLOTS), shape.num_inputs, seed=1, dtype=dtype)
    y = randn(len(SLOTS), shape.columns[-1], seed=2, dtype=dtype)
    expected, before = y.double(), y.clone()
    for row, slot in enumerate(SLOTS):
        for i, (start, end) in enumerate(zip(shape.columns, shape.columns[1:], strict=False)):
            if (slot, i) in matrices:
                a, b = matrices[slot, i]
                expected[row, start:end] += b @ (a @ x[row].double())
    products.add(x, y)
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    none = torch.tensor([slot in (0, 5) for slot in SLOTS])
    assert torch.equal(y[none], before[none])
    for row in (1, 2, 5, 7, 40):  # alone
        products.rows.select(torch.tensor([SLOTS[row]], dtype=torch.int32))
        products.add(x[row : row + 1], alone := before[row : row + 1].clone())
        assert torch.equal(alone[0], y[row])
    products.put(1, [None] * shape.num_projections)
    products.rows.select(torch.tensor([1, 0], dtype=torch.int32))
    products.add(x[:2], kept := before[:2].clone())
    assert torch.equal(kept, before[:2])
