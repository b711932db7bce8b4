"""LoRA adapters in Triton, and with a mask in PyTorch: each row against float64, with its own adapter's matrices.

Where Triton runs, and with what in memory: `on_device.py`. Matrices of adapters without rows hold NaN.
"""

import math

import pytest
import torch

from nanovllm_extras import LLM, TINY_QWEN3, LoRARequest, SamplingParams
from nanovllm_extras.kernels.adapter_rows import AdapterRows, LayerShape, MaskedProducts
from nanovllm_extras.kernels.cuda.adapter_kernels import TritonProducts
from tests.extras.kernels.on_device import DEVICE, DTYPES, IS_INTERPRETED, randn
from tests.extras.lora.peft_adapters import ALL, make_adapter

NUM_SLOTS, MAX_RANK = 5, 20
TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
SHAPES = [LayerShape(64, (0, 32)), LayerShape(96, (0, 80, 100, 180))]
RANKS = {1: 16, 2: 3, 3: 20, 4: 1, 5: 7}  # of the adapter in each slot

pytestmark = [] if IS_INTERPRETED else pytest.mark.gpu


@pytest.mark.parametrize("kind", [TritonProducts, MaskedProducts])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slots", [[1], [3, 0, 1, 3, 2, 0, 0], [2] * 40 + [0] * 3 + [4] * 20])
@pytest.mark.sparse
@pytest.mark.thinned
def test_each_row_has_its_own_adapter(kind, dtype, shape, slots):
    rows = AdapterRows()
    rows.slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    products = kind(shape, rows, NUM_SLOTS, dtype, MAX_RANK, DEVICE)
    x, y = (
        randn(len(slots), shape.num_inputs, dtype=dtype, seed=1),
        randn(len(slots), shape.columns[-1], dtype=dtype, seed=2),
    )
    before, expected = y.clone(), y.double()
    for slot, rank in RANKS.items():
        own = torch.tensor(slots, device=DEVICE) == slot
        packed = []
        for i, (start, end) in enumerate(zip(shape.columns, shape.columns[1:], strict=False)):
            a = randn(rank, shape.num_inputs, dtype=dtype, seed=10 * slot + i, scale=shape.num_inputs**-0.5)
            b = randn(end - start, rank, dtype=dtype, seed=100 * slot + i)
            if own.any() and not (slot == 2 and i == 1):  # an adapter need not change all projections
                packed.append(products.pack(a, b))
                expected[own, start:end] += x[own].double() @ a.double().T @ b.double().T
            else:
                b = b if kind is MaskedProducts else b * math.nan  # the mask is between A and B
                packed.append(None if own.any() else products.pack(a * math.nan, b))
        products.put(slot, packed)
    products.add(x, y)
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    none = rows.slots == 0
    assert torch.equal(y[none], before[none])


def test_an_engine_has_the_tokens_of_pytorch(tmp_path):
    """The layers are fused ones: decodes and prompts of adapters and none are in the same steps."""
    targets = {"a": ALL, "b": ALL, "c": ["embed_tokens", "lm_head", "q_proj"]}
    for seed, (name, modules) in enumerate(targets.items()):
        make_adapter(tmp_path / name, seed, scale=0.6, r=3 + seed, target_modules=modules)
    adapters = [LoRARequest(name, i, tmp_path / name) for i, name in enumerate(targets, 1)]
    found = []
    for backend in ("triton", "torch"):
        options = {"attention_backend": backend, "enforce_eager": backend == "torch", "max_num_batched_tokens": 20}
        llm = LLM(
            TINY_QWEN3, device=DEVICE.type, dtype="float32", num_kv_blocks=40, enable_lora=True, max_loras=3, **options
        )
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = llm.generate([[*range(9, 26)]] * 4, params, use_tqdm=False, lora_request=[None, *adapters])
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == 4
