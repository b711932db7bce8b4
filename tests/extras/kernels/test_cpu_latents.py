"""What only latent attention in C does: the scale of a layer, and the projections to and from latents."""

import pytest
import torch

from nanovllm_extras.kernels.cpu.cpu_latent_attention import CpuLatentAttention, CpuUpProjection, replace_up_projections
from nanovllm_extras.models.latent_attention import UpProjection
from nanovllm_extras.models.masking import AttentionOptions
from tests.extras.attention_steps import LatentStep
from tests.extras.kernels.test_cpu_kernels import filled, randn

pytestmark = pytest.mark.usefixtures("needs_a_compiler")


def check(out, expected):
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_scale_of_the_layer_is_taken(dtype):
    backend = CpuLatentAttention(4, 1, 48, 16, dtype, rank=32)
    step = LatentStep(backend, [(4, 7)], dtype=dtype)
    step.run(backend)
    out = backend.attend(step.q * 2, step.layer_cache, step.batch.metadata, AttentionOptions(scale=backend.scale / 2))
    check(out, step.expected)


def test_up_projections_equal_the_definition_and_themselves_in_other_batches(processor, dtype):
    model = torch.nn.ModuleDict({"up": filled(UpProjection(3, 24, 20, 32), dtype)})
    exact = filled(UpProjection(3, 24, 20, 32), dtype).double()
    replace_up_projections(model)
    fast = model["up"]
    assert isinstance(fast, CpuUpProjection)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    for name, size in (("absorb", 24), ("values", 32)):
        for num_tokens in (1, 5, 70):
            x = randn(num_tokens, 3, size, dtype=dtype)
            found = getattr(fast, name)(x)
            torch.testing.assert_close(found.double(), getattr(exact, name)(x.double()), rtol=tolerance, atol=tolerance)
            for row in range(0, num_tokens, 23):
                assert torch.equal(getattr(fast, name)(x[row : row + 1])[0], found[row])
