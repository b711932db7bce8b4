"""Random quantised weights (`load_format="dummy"`), for benchmarks of a model whose checkpoint is quantised.

Each projection has random integers of the format's bits, in its groups. Their scales give weights the standard
deviation that random floats have. Weights in fp8 and MXFP4 are widened when they are loaded, so theirs are floats.
"""

import torch
from torch import Tensor

from nanovllm.loader import allocate
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras.weights.formats import ACTIVATIONS_GROUP, Format
from nanovllm_extras.weights.fp8_weights import Fp8
from nanovllm_extras.weights.load_layers import Kind, load_layers
from nanovllm_extras.weights.load_model import Wanted
from nanovllm_extras.weights.mxfp4 import Mxfp4
from nanovllm_extras.weights.quantise import VECTOR, Finish
from nanovllm_extras.weights.quantised_linear import QuantisedWeight
from nanovllm_extras.weights.shares import Share


def make_dummies(
    form: Format | Fp8 | Mxfp4, finish: Finish, share: Share, model: Qwen3ForCausalLM, wanted: Wanted
) -> Qwen3ForCausalLM:
    """Return the network with random quantised layers. All other weights have no values yet.

    form: a format of `stored.py`; model: on the meta device. The values depend only on the seed, not on the ranks.
    """
    if not isinstance(form, Format):
        return allocate(model, wanted.dtype, wanted.device)
    assert wanted.seed is not None
    source = Dummies(form, wanted.seed, wanted.shape.initializer_range, wanted.device)
    return load_layers(source, model, share, finish, wanted.dtype, wanted.device)[0]


class Dummies:
    """A `Source` of random numbers."""

    def __init__(self, form: Format, seed: int, std: float, device: torch.device) -> None:
        self.form, self.std, self.device = form, std, device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def kind(self, part: str, shape: tuple[int, ...]) -> Kind | None:
        return None if shape[1] % VECTOR else Kind(self.form.bits, self.form.group_size)

    def weight(self, part: str, shape: tuple[int, ...]) -> QuantisedWeight:
        form, half = self.form, 2 ** (self.form.bits - 1)
        q = torch.randint(1, 2 * half, shape, dtype=torch.uint8, device=self.device, generator=self.generator)
        num_groups = -(-shape[1] // (form.group_size or shape[1]))
        deviation = ((half**2 - half) / 3) ** 0.5  # of 1 … 2 · half - 1
        scales = torch.full((shape[0], num_groups), self.std / deviation, device=self.device)
        zeros = torch.full_like(scales, half, dtype=torch.uint8) if form.has_zeros else None
        return QuantisedWeight(q, scales, zeros, form.bits, form.group_size or ACTIVATIONS_GROUP)

    def floats(self, name: str) -> Tensor:
        raise NotImplementedError  # either all projections of an input are quantised or none

    def bias(self, part: str, num_outputs: int) -> Tensor:
        return torch.zeros(num_outputs)
