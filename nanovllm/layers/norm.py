"""Root-mean-square layer normalisation (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x: [..., size] -> x / sqrt(mean(x²) + eps) * weight, over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))  # [size]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normalise(x, self.eps).to(x.dtype)  # rounded before the product, as transformers does


def normalise(x: Tensor, eps: float) -> Tensor:
    """x: [..., size] -> x / sqrt(mean(x²) + eps) in float32"""
    x32 = x.float()
    return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
