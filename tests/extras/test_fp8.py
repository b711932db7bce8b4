"""`kv_cache_dtype="fp8"` with PyTorch's attention, against attention over K and V that were rounded before."""

import pytest
import torch

from nanovllm.layers.attention import Attention
from nanovllm_extras import LLM
from nanovllm_extras.kernels.backend import AttentionBackend
from nanovllm_extras.kernels.fp8_kv import with_fp8_cache
from nanovllm_extras.options.request_params import SamplingParams
from tests.extras.attention_steps import Step, random_lens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(2))
def test_an_fp8_cache_is_one_of_rounded_k_and_v(dtype, seed):
    """As if K and V had come rounded, to a cache in the model's dtype."""
    plain, fp8 = (
        AttentionBackend(4, 2, 32, 4, dtype),
        with_fp8_cache(AttentionBackend)(4, 2, 32, 4, dtype, kv_cache_dtype="fp8"),
    )
    step = Step(plain, random_lens(4, seed), seed, dtype)

    def rounded(x):  # to 4 significant bits, with the exponents of e4m3
        mantissa, exponent = torch.frexp(x.double())
        exponent = exponent.clamp(min=-5)  # below, numbers are as far apart as there
        return (torch.round(x.double() * 2.0 ** (4 - exponent)) * 2.0 ** (exponent - 4)).to(dtype)

    cache = step.layer_cache.to(torch.float8_e4m3fn)
    expected = Attention(plain)(
        step.q, rounded(step.k), rounded(step.v), rounded(step.layer_cache), step.batch.metadata
    )
    torch.testing.assert_close(
        Attention(fp8)(step.q, step.k, step.v, cache, step.batch.metadata), expected, rtol=0, atol=0
    )


def test_an_fp8_cache_saturates():
    backend = with_fp8_cache(AttentionBackend)(2, 2, 8, 4, kv_cache_dtype="fp8")
    cache = torch.zeros(backend.kv_cache_shape(1, 2), dtype=torch.float8_e4m3fn)[:, 0]
    k = torch.tensor([1e6, -1e6, 449.0, 447.0, 0.0, 1.0, 2.0**-9, 2.0**-11]).repeat(1, 2, 1)
    backend.store_kv(k, -k, cache, torch.tensor([5], dtype=torch.int32))
    assert cache[0, 1, 1, 0].tolist() == [448.0, -448.0, 448.0, 448.0, 0.0, 1.0, 2.0**-9, 0.0]
    assert torch.equal(cache[1].float(), -cache[0].float())


def test_blocks_of_an_fp8_cache_are_copied_and_swapped(tiny_checkpoint):
    options = {"attention_backend": "torch", "kv_cache_dtype": "fp8", "block_size": 4, "dtype": "float32"}
    few = {"num_kv_blocks": 16, "preemption_mode": "swap", "swap_space_bytes": 1 << 20}
    params = [SamplingParams(n=3, seed=i, max_tokens=9) for i in range(6)]
    prompts = [[i, 2, 3, 4, 5, 6 + i] for i in range(6)]
    outputs = []
    for more in ({}, few):
        llm = LLM(tiny_checkpoint[0], device="cpu", **options, **more)
        done = llm.generate(prompts, params, use_tqdm=False)
        outputs.append([[one.token_ids for one in output.outputs] for output in done])
    assert outputs[0] == outputs[1]
    assert llm.get_stats().num_swaps > 0
