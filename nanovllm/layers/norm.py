"""Root-mean-square layer normalisation (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x: [..., size] -> x / sqrt(mean(x²) + eps) * weight, over the last dimension, computed in float32."""

    neutral_weight = 1.0  # changes nothing

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))  # [size]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normalised = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normalised.to(x.dtype)  # rounded before the product, as transformers does
