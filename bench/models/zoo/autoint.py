"""AutoInt: self-attention among the fields of a sample (Song et al., arXiv 1810.11921).

    X' = ReLU(softmax(Q K^T) V + W X)          Q, K and V are products of X, by heads

Sizes are those of featureRec/run_criteo.sh in DeepGraphLearning/RecommenderSystems on GitHub: 39
fields of Criteo, embeddings of 16, three layers of two heads and 64 columns.
"""

from __future__ import annotations

from torch import Tensor, nn


class FieldAttention(nn.Module):
    """``[batch, fields, k]`` to ``[batch, fields, n]``."""

    def __init__(self, k: int, n: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.residual = (
            nn.Linear(k, n, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        made = (self.query(x), self.key(x), self.value(x))
        q, k, v = (y.view(*y.shape[:2], self.heads, -1).transpose(1, 2) for y in made)
        read = ((q @ k.mT).softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
        return (read + self.residual(x)).relu()  # type: ignore[no-any-return]


class AutoInt(nn.Module):
    """Embeddings ``[batch, fields * dim]`` to a logit ``[batch, 1]``."""

    def __init__(
        self, fields: int = 39, dim: int = 16, layers: int = 3, width: int = 64, heads: int = 2
    ) -> None:
        super().__init__()
        self.fields = fields
        self.layers = nn.Sequential(
            *(FieldAttention(dim if layer == 0 else width, width, heads) for layer in range(layers))
        )
        self.head = nn.Linear(fields * width, 1)

    def forward(self, embedded: Tensor) -> Tensor:
        x = self.layers(embedded.view(len(embedded), self.fields, -1))
        return self.head(x.flatten(1))  # type: ignore[no-any-return]
