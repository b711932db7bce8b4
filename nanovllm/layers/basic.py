"""The layers that compute each token by itself: matrix products, normalisation, rotary positions, feed-forward network.

Weights are created empty; `loader.py` fills them. `attention.py` has the only layer in which tokens meet.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """x: [..., in_features] -> x @ weight.T + bias: [..., out_features]"""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))  # [out_features, in_features]
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None  # [out_features]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Several projections of the same input as one product: their rows are stacked in one weight.

    `parts` maps the name of each projection in the checkpoint to its number of rows, in order; the loader reads it.
    Returns one tensor [..., rows] for each part.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(x).split(tuple(self.parts.values()), dim=-1)


class Embedding(nn.Module):
    """The table of token vectors. With tied embeddings it is the output layer too, and scores each token."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))  # [vocab_size, hidden_size]

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int -> [num_tokens, hidden_size]"""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_samples, hidden_size] -> [num_samples, vocab_size]"""
        return F.linear(hidden, self.weight)


class RMSNorm(nn.Module):
    """x: [..., size] -> x / sqrt(mean(x²) + eps) * weight, over the last dimension, computed in float32.

    Root-mean-square layer normalisation (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).
    """

    neutral_weight = 1.0  # changes nothing

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))  # [size]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normalised = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normalised.to(x.dtype)  # rounded before the product, as transformers does


class Rotary(nn.Module):
    """Cosine and sine of the angles of each position, computed once a step for all layers.

    Rotary position embedding (RoFormer, Su et al. 2021, https://arxiv.org/abs/2104.09864) rotates pair i of a head,
    (x[i], x[i + head_dim/2]), by the angle position * theta^(-2i/head_dim). Then the dot product of a query and a key
    depends only on the distance between their positions.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")  # [head_dim / 2]
        self.frequencies = 1.0 / theta ** (steps / head_dim)  # [head_dim / 2] float32

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions: [num_tokens] int -> cosine and sine, [num_tokens, 1, head_dim / 2] each; 1 is for the heads"""
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None].float() * self.frequencies  # [num_tokens, head_dim / 2]
        return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


class ApplyRotary(nn.Module):
    """Rotate queries or keys by the angles of their positions. If `norm` is given, normalise each head before.

    A backend that replaces this layer can do both in one kernel.
    """

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, norm: nn.Module | None = None) -> Tensor:
        """x: [num_tokens, num_heads, head_dim] -> the same shape"""
        x = x if norm is None else norm(x)
        first, second = x.chunk(2, dim=-1)  # [num_tokens, num_heads, head_dim / 2] each
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class SiluAndMul(nn.Module):
    """The gate of SwiGLU."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up: [num_tokens, intermediate_size] -> silu(gate) * up, the same shape"""
        return F.silu(gate) * up


class GatedMLP(nn.Module):
    """x -> down(silu(gate(x)) * up(x)): the gated feed-forward network (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size})
        self.activation: nn.Module = SiluAndMul()
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape"""
        gate, up = self.gate_up_proj(x)  # [num_tokens, intermediate_size] each
        return self.down_proj(self.activation(gate, up))
