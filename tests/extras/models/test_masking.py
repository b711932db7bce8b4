"""Windows, soft-caps, sinks and scales in PyTorch, against the float64 reference of `attention_steps.py`."""

import pytest

from nanovllm.layers.attention import TorchAttention
from tests.extras.attention_options import OPTIONS, SINKS
from tests.extras.attention_steps import Step, check_close, random_lens


@pytest.mark.parametrize("options", [*OPTIONS.values(), *SINKS.values()], ids=[*OPTIONS, *SINKS])
@pytest.mark.parametrize("seed", range(2))
def test_windows_and_soft_caps_equal_the_reference(options, seed):
    backend = TorchAttention(4, 2, 16, [4, 16][seed])
    step = Step(backend, random_lens(16, seed), seed, options=options)
    check_close(step.run(backend), step)
