"""InterFormer: features and a sequence exchange summaries (arXiv 2411.09852).

In a layer, X ``[n, d]`` holds a sample's features and S ``[t, d]`` its history:

    summary of X = gate(W X)                              gate(Y) = sigmoid(Y * MLP(Y))
    summary of S = gate(concat(class tokens, tokens pooled by attention, the latest tokens))
    X' = LN(interaction(concat(X, summary of S)) + X)     dot products and DCNv2's cross, summed
    S' = LN(attention(S f(summary of X)) + S)             f gives a d x d matrix per sample

The sequence begins as ``W1 (S * MLP(S))`` behind the first summary of X as class tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lokakern.bench.models.blocks import (
    PADDING,
    Batch,
    ClickModel,
    Compression,
    CrossLayer,
    Inputs,
    perceptron,
    spread_rows,
)


@dataclass(frozen=True, slots=True)
class InterFormerConfig:
    """Sizes of an InterFormer."""

    inputs: Inputs  # the features; all dense features become one embedding
    dim: int  # columns of an embedding, d
    layers: int  # number of layers
    classes: int  # class tokens, and embeddings in the summary of X
    pooled: int  # tokens pooled by attention
    latest: int  # latest tokens in the summary of S
    heads: int  # attention heads
    rank: int  # rank of the cross
    final: tuple[int, ...] = (1024, 512, 256, 128)  # hidden layers before the logit

    @property
    def summaries(self) -> int:
        """Tokens in the summary of S."""
        return self.classes + self.pooled + self.latest


def _public(tables: int, most_rows: int, history: int) -> InterFormerConfig:
    """A model of a public data set: features, lengths and head as published, the rest our own."""
    rows = spread_rows(tables, most=most_rows)[::-1]  # the table of items first
    inputs = Inputs(dense=1, rows=rows, slots=(1,) * tables, history=history)
    return InterFormerConfig(
        inputs, dim=64, layers=3, classes=4, pooled=2, latest=2, heads=4, rank=64
    )


SIZES = {
    "tiny": InterFormerConfig(
        Inputs(dense=3, rows=(50, 3, 20), slots=(1, 1, 2), history=6), dim=16, layers=2, classes=2,
        pooled=1, latest=1, heads=2, rank=8, final=(64,),
    ),
    "amazon": _public(tables=5, most_rows=63_001, history=100),
    "taobao": _public(tables=21, most_rows=846_811, history=50),
    "kuaivideo": _public(tables=8, most_rows=3_240_282, history=100),
}  # fmt: skip


class Gate(nn.Module):
    """``sigmoid(Y * MLP(Y))``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.perceptron = perceptron((dim, dim), last=dim, activation=nn.SiLU)

    def forward(self, y: Tensor) -> Tensor:
        return torch.sigmoid(y * self.perceptron(y))


class Interaction(nn.Module):
    """Dot products and a cross of embeddings, each mapped to ``[batch, count, d]`` and summed."""

    def __init__(self, n: int, count: int, config: InterFormerConfig) -> None:
        super().__init__()
        self.shape = (count, config.dim)
        self.dots = nn.Linear(n * n, count * config.dim)
        self.cross = CrossLayer(n * config.dim, config.rank)
        self.compression = Compression(n, count)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        dots = self.dots((x @ x.mT).flatten(1)).unflatten(1, self.shape)
        return dots + self.compression(self.cross(flat, flat).view_as(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Multi-head self-attention of at most ``length`` tokens with rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)
        # Tables take 75 us on an H200 at a batch of 8192; computing cosines, sines and powers for
        # each element takes 293 us.
        half = dim // heads // 2
        angle = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos(), persistent=False)  # [length, half]
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        """Attend to the tokens of ``[batch, t, d]`` that are present ``[batch, t]``."""
        parts = _by_head(self.inputs(x), 3, self.heads)
        mask = present[:, None, None, :]
        # torch's default, the cuDNN kernel, is slower on an H200 at 54 tokens and heads of 16:
        # 933 us instead of 562, including the positions.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            found = F.scaled_dot_product_attention(
                self._turned(parts[0]), self._turned(parts[1]), parts[2], attn_mask=mask
            )
        return self.output(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _turned(self, x: Tensor) -> Tensor:
        """Rotate the halves of each head by angles proportional to the position."""
        half = x.shape[-1] // 2
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Pool(nn.Module):
    """Multi-head attention of a few learned queries to tokens."""

    def __init__(self, dim: int, heads: int, queries: int) -> None:
        super().__init__()
        self.heads = heads
        self.learned = nn.Parameter(torch.randn(queries, dim) * dim**-0.5)
        self.inputs = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        """``[batch, queries, d]`` of tokens as in `Attention`; each sample has at least one."""
        parts = _by_head(self.inputs(x), 2, self.heads)
        key, value = parts[0], parts[1]
        query = self.learned.to(key.dtype).view(-1, self.heads, key.shape[-1]).transpose(0, 1)
        # Attention kernels compute whole tiles of queries, and there are only two: this takes
        # 234 us on an H200, scaled_dot_product_attention 417 us or more.
        scores = query @ key.mT * key.shape[-1] ** -0.5
        weight = scores.masked_fill(~present[:, None, None, :], -torch.inf).softmax(-1)
        found = weight.to(value.dtype) @ value
        return self.output(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _by_head(parts: Tensor, count: int, heads: int) -> Tensor:
    """``[batch, t, count * d]`` as ``[count, batch, heads, t, d / heads]``."""
    found = parts.view(parts.shape[0], parts.shape[1], count, heads, -1)
    return found.permute(2, 0, 3, 1, 4)


class InterFormerLayer(nn.Module):
    """Maps features ``[batch, n, d]`` and tokens ``[batch, t, d]`` to the same shapes."""

    def __init__(self, n: int, config: InterFormerConfig) -> None:
        super().__init__()
        self.config, dim = config, config.dim
        self.pool = Pool(dim, config.heads, config.pooled)
        self.sequence_gate = Gate(dim)
        self.interaction = Interaction(n + config.summaries, n, config)
        self.feature_norm = nn.LayerNorm(dim)
        self.generator = nn.Linear(config.classes * dim, dim * dim)
        self.attention = Attention(dim, config.heads, config.classes + config.inputs.history)
        self.sequence_norm = nn.LayerNorm(dim)

    def summarize(self, s: Tensor, present: Tensor) -> Tensor:
        """``[batch, summaries, d]`` of the sequence."""
        tokens = [
            s[:, : self.config.classes],
            self.pool(s, present).to(s.dtype),
            s[:, -self.config.latest :],
        ]
        return self.sequence_gate(torch.cat(tokens, dim=1))  # type: ignore[no-any-return]

    def forward(
        self, x: Tensor, s: Tensor, present: Tensor, summary: Tensor
    ) -> tuple[Tensor, Tensor]:
        found = torch.cat([x, self.summarize(s, present).to(x.dtype)], dim=1)
        weight = self.generator(summary.flatten(1)).unflatten(1, (s.shape[-1], -1))
        personal = s.to(weight.dtype) @ weight
        return (
            self.feature_norm(self.interaction(found) + x),
            self.sequence_norm(self.attention(personal, present) + s),
        )


class InterFormer(ClickModel):
    """A logit for each sample."""

    layers: nn.ModuleList

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__(config)
        n, dim = 1 + len(config.inputs.rows), config.dim
        self.bottom = nn.Linear(config.inputs.dense, dim)
        self.mask = perceptron((dim, dim), last=dim, activation=nn.SiLU)
        self.unify = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(InterFormerLayer(n, config) for _ in range(config.layers))
        # One summary of X before each layer, and one after all.
        self.compressions = nn.ModuleList(
            nn.Sequential(Compression(n, config.classes), Gate(dim))
            for _ in range(config.layers + 1)
        )
        self.head = perceptron(
            ((config.classes + config.summaries) * dim, *config.final), last=1, activation=nn.SiLU
        )

    def embed(self, batch: Batch) -> tuple[Tensor, ...]:
        """Bags ``[batch, tables, dim]``, history ``[batch, t, dim]``, and its mask."""
        return self.tables(batch), self.tables.sequence(batch), batch.history != PADDING

    def interact(self, dense: Tensor, *embedded: Tensor) -> Tensor:
        bags, history, present = embedded
        x = self.join(dense, bags)
        s = self.unify(history * self.mask(history))
        summary = self.compressions[0](x)
        s = torch.cat([summary.to(s.dtype), s], dim=1)
        present = torch.cat([present.new_ones(summary.shape[:2]), present], dim=1)
        last = None
        for layer, compression in zip(self.layers, self.compressions[1:], strict=True):
            last = layer
            x, s = layer(x, s, present, summary)
            summary = compression(x)
        assert isinstance(last, InterFormerLayer)  # there is at least one layer
        found = torch.cat([summary, last.summarize(s, present).to(summary.dtype)], dim=1)
        return self.head(found.flatten(1)).squeeze(1)  # type: ignore[no-any-return]
