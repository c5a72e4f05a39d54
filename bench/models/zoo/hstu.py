"""HSTU: sequences through pointwise attention (Zhai et al., arXiv 2402.17152).

    U, V, Q, K = split(SiLU(f1(LN(X))))
    X' = f2(LN(A V) * U) + X          A = SiLU(Q K^T) / length, by heads

Width 512 with eight heads of 64 is published; three layers and sequences of 128 are our choice.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class HSTULayer(nn.Module):
    """``[sequences, length, dim]`` to the same."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.first = nn.Linear(dim, 4 * dim)
        self.second = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        sequences, length, dim = x.shape
        by_heads = (sequences, length, self.heads, dim // self.heads)
        gate, *rest = F.silu(self.first(self.norm_in(x))).chunk(4, dim=-1)
        v, q, k = (y.reshape(by_heads).transpose(1, 2) for y in rest)
        weights = F.silu(q @ k.mT) / length
        read = (weights @ v).transpose(1, 2).flatten(2)
        return x + self.second(self.norm_out(read) * gate)  # type: ignore[no-any-return]


class HSTU(nn.Module):
    """A logit for each sequence; the batch ``[tokens, dim]`` holds sequences of equal length."""

    def __init__(self, dim: int = 512, heads: int = 8, layers: int = 3, length: int = 128) -> None:
        super().__init__()
        self.length = length
        self.layers = nn.Sequential(*(HSTULayer(dim, heads) for _ in range(layers)))
        self.head = nn.Linear(dim, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(tokens.view(-1, self.length, tokens.shape[1]))
        return self.head(x.mean(1))  # type: ignore[no-any-return]
