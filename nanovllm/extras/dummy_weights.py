"""`load_format="dummy"`: random weights from a seed, for a folder that holds only config.json.

Speed does not depend on the values of weights, so benchmarks need no checkpoint. Called by `weights.py`.
"""

import torch
from torch import nn

from nanovllm.layers.norm import RMSNorm


def init_dummy_weights(model: nn.Module, seed: int, std: float) -> None:
    """Set random weights of standard deviation `std`, neutral norms and zero biases. They depend only on `seed`."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            init_dummy_weight(module, name, parameter, std, generator)


def init_dummy_weight(
    module: nn.Module, name: str, tensor: torch.Tensor, std: float, generator: torch.Generator
) -> None:
    """Fill `tensor`: the parameter `name` of a module, or a tensor of its shape."""
    if isinstance(module, RMSNorm):
        tensor.fill_(getattr(module, "neutral_weight", 1.0))  # what changes nothing
    elif name == "bias":
        tensor.zero_()
    else:
        tensor.normal_(0, std, generator=generator)
