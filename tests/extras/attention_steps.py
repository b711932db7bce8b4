"""Steps as in `nanovllm_testing/attention_steps.py`, for layers with options and caches that keep something else."""

from dataclasses import replace

import torch

from nanovllm_extras.models.masking import MaskedAttention
from nanovllm_testing import attention_steps
from nanovllm_testing.attention_steps import HEADS as HEADS
from nanovllm_testing.attention_steps import attend_with_loops as attend_with_loops
from nanovllm_testing.attention_steps import check_close as check_close
from nanovllm_testing.attention_steps import random_lens as random_lens
from nanovllm_testing.attention_steps import shared_step as shared_step


class Step(attention_steps.Step):
    """Of a layer that attends with `options`, an `AttentionOptions`, or as the core's does."""

    def __init__(self, backend, lens, seed=0, dtype=torch.float32, options=None, device="cpu"):
        asked = {}
        if options is not None:
            sinks = torch.randn(backend.num_heads, generator=torch.Generator().manual_seed(seed))
            options = replace(options, sinks=3 * sinks.to(device) if options.has_sinks else None)
            asked = {name: value for name, value in vars(options).items() if name != "has_sinks"}
        self.options = () if options is None else (options,)
        super().__init__(backend, lens, seed, dtype, device, **asked)

    def make_layer(self, backend):
        return MaskedAttention(backend, *self.options) if self.options else super().make_layer(backend)


class LatentStep(Step):
    """Of a backend whose cache holds latents (`latent_attention.py`): the first `rank` channels are the values."""

    def __init__(self, backend, lens, seed=0, dtype=torch.float32):
        self.rank = backend.rank
        super().__init__(backend, lens, seed, dtype)

    def values_of(self, k, normal):
        return k[..., : self.rank]


class Int8Step(Step):
    """Of a backend that keeps K and V in 8 bits (`int8_kv.py`): the largest number of a vector becomes 127."""

    def empty_cache(self, shape, dtype):
        return torch.full(shape, -1, dtype=torch.int8)  # four of these bytes are a scale that is NaN

    def kept(self, x):
        largest = x.float().abs().amax(-1, keepdim=True)
        numbers = (x.float() * (torch.tensor(127.0) / largest)).round()  # in float32, as there: near a half it matters
        return numbers.double() * (largest / 127).double()
