"""`examples/extensions/int8_kv.py`: the oracle is attention in float64 over K and V that numpy has rounded."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nanovllm import LLM, TINY_QWEN3, SamplingParams
from nanovllm.extension import import_extension
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention
from nanovllm_testing.attention_steps import HEADS, Step, check_close, random_lens

EXTENSION = Path(__file__).parents[2] / "examples" / "extensions" / "int8_kv.py"
Int8Attention = import_extension(EXTENSION).Int8Attention


def rounded(x):
    """K or V: [num_tokens, num_kv_heads, head_dim] as 8 bits keep it, computed in float32 as the cache does."""
    numbers = x.float().numpy()
    scale = np.abs(numbers).max(-1, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.rint(numbers / scale) * scale).to(x.dtype)


class Int8Step(Step):
    def kept(self, x):
        return rounded(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_over_the_rounded_values(heads, dtype):
    """Slots without a token hold NaN, in numbers and scales."""
    for seed in range(3):
        backend = Int8Attention(*heads, 32, 4, dtype)
        step = Int8Step(backend, random_lens(4, seed), seed, dtype)
        assert not torch.equal(rounded(step.k), step.k)
        check_close(step.run(backend), step)


def test_the_error_of_each_number_is_at_most_half_a_scale():
    """Also of a vector with one large number, and of zeros, which stay zeros."""
    module, x = import_extension(EXTENSION), torch.randn(50, 2, 64)
    x[0, 0, 5], x[1] = 1000, 0
    kept = module.dequantise(module.quantise(x))
    scale = x.abs().amax(-1, keepdim=True) / 127
    assert ((kept - x).abs() <= scale * 0.501).all()
    assert (kept[1] == 0).all()


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 132 / 512), (torch.bfloat16, 132 / 256)])
def test_the_memory_of_a_block(dtype, ratio):
    """With a head_dim of 128, a vector takes 132 bytes."""
    sizes = []
    for kind in (Int8Attention, TorchAttention):
        cache = KVCache(kind(8, 4, 128, 16, dtype), 2, dtype, torch.device("cpu"))
        cache.allocate(9)
        sizes.append(cache.tensor.nbytes)
        assert cache.bytes_per_block * 10 == cache.tensor.nbytes
    assert sizes[0] == ratio * sizes[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copied_block_has_the_same_bytes(dtype):
    """Also those that are NaN as numbers of the model's dtype."""
    cache = KVCache(Int8Attention(2, 1, 32, 16, dtype), 2, dtype, torch.device("cpu"))
    cache.allocate(2)
    stored = cache.tensor.view(torch.int8)
    stored.copy_(torch.randint(-128, 128, stored.shape, generator=torch.Generator().manual_seed(0)))
    assert cache.tensor.isnan().any()
    cache.copy_blocks([(1, 2)])
    assert torch.equal(stored[:, :, 1], stored[:, :, 2])


def test_answers_stay():
    """With 10 blocks, sequences are preempted. Answers are those of a cache in float32, whose margins are wide."""
    prompts = [[{"role": "user", "content": text}] for text in ("What is a block table?", "What is a block?")]
    params, answers = SamplingParams(temperature=0, max_tokens=24), []
    for options in ({"attention_backend": "torch"}, {"extension": EXTENSION, "num_kv_blocks": 10}):
        llm = LLM(TINY_QWEN3, dtype="float32", block_size=4, **options)
        answers.append([output.outputs[0].text for output in llm.chat(prompts, params, use_tqdm=False)])
    assert llm.engine.stats.num_preemptions > 0
    assert answers[0] == answers[1]
