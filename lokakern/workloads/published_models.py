"""Layers of published recommendation models: the data of the suites `lrm` and `lrm-backward`.

Ids are those of the table of workloads: A DLRM, B-E Wukong (S, M, L, XL), F DCNv2 as Wukong's
authors ran it, G LoKA's examples, H public Wukongs, I-J HSTU, K RankMixer, L InterFormer. A suffix
after ``/`` distinguishes the GEMMs of one row. Distributions are those of the table; other rows
have the distribution of the previous layer's output: X8 after ReLU, SiLU or GELU, X3 after a norm,
X5 for embeddings, X9 after a product such as SwishLayerNorm's ``x * sigmoid(LN(x))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BATCHES = (256, 1024, 2048, 6144, 8192, 20480)  # samples per GPU, B, of training and ranking
BACKWARD_BATCHES = (1024, 2048, 8192, 20480)
# Sums over 160 B rows read 160 times as much: two sizes limit the time.
WIDE_GRAD_WEIGHT_BATCHES = (2048, 8192)
# An H200 takes 7 ms for this in bf16: five replays exceed the 25 ms of a candidate.
FLOP_LIMIT = 5e12

TOKENS = (15168, 24576, 36032)  # of jagged sequences: the published extremes, and a middle


@dataclass(frozen=True, slots=True)
class Layer:
    """``Y[m, n] = X[m, k] W[n, k]^T``, or a batch of such products.

    Attributes:
        ids: Ids of its rows in the table, separated by spaces.
        n: Outputs.
        k: Inputs.
        distribution: Distribution of X.
        bias: Whether it has a bias.
        m: Sizes of m that do not depend on B; else empty.
        per_sample: Rows of X for each sample, where m depends on B.
        batch: Number of products; 0 for B products.
    """

    ids: str
    n: int
    k: int
    distribution: str
    bias: bool = False
    m: tuple[int, ...] = ()
    per_sample: int = 1
    batch: int = 1

    def sizes(self, samples: Sequence[int] = BATCHES) -> list[tuple[int, int]]:
        """Batch and m for each B below the limit of FLOPs."""
        if self.batch == 0:
            found = [(size, m) for size in samples for m in self.m]
        else:
            rows = self.m or tuple(self.per_sample * size for size in samples)
            found = [(self.batch, m) for m in rows]
        return [pair for pair in found if 2 * pair[0] * pair[1] * self.n * self.k < FLOP_LIMIT]


LAYERS: tuple[Layer, ...] = (
    # DLRM v2 and v1. K = 13 and 479 also padded, to show the cost of padding.
    Layer("A1", 512, 13, "X7", bias=True),
    Layer("A1/padded", 512, 16, "X7", bias=True),
    Layer("A2 A9", 256, 512, "X8", bias=True),
    Layer("A3", 128, 256, "X8", bias=True),
    Layer("A4", 512, 3456, "X5"),
    Layer("A5", 3456, 512, "X2", bias=True),
    Layer("A6", 1024, 3456, "X5", bias=True),
    Layer("A7", 1024, 1024, "X8", bias=True),
    Layer("A8", 512, 1024, "X8", bias=True),
    Layer("A10", 1, 256, "X8"),
    Layer("A11", 27, 128, "X5", m=(27,), batch=0),
    Layer("A12", 1024, 479, "X5"),  # dense features and dot products of embeddings
    Layer("A12/padded", 1024, 480, "X5"),
    # Wukong-S. X^T Y and the linear blocks see features along k: X5's scale varies along it.
    Layer("B1", 24, 720, "X5", per_sample=160),
    Layer("B2", 24, 160, "X5", m=(720,), batch=0),
    Layer("B3", 2048, 17280, "X3"),
    Layer("B4", 2048, 2048, "X8"),
    Layer("B5", 5120, 2048, "X8"),
    Layer("B6", 32, 720, "X5", per_sample=160),
    Layer("B7", 64, 720, "X5", per_sample=160),
    Layer("B8", 24, 64, "X3", per_sample=160),
    Layer("B9", 24, 160, "X3", m=(64,), batch=0),
    Layer("B10", 2048, 1536, "X3"),
    Layer("B11", 32, 64, "X3", per_sample=160),
    Layer("B12", 2048, 10240, "X3"),
    # Wukong-M, -L, -XL.
    Layer("C1", 4096, 34560, "X3"),
    Layer("C2", 4096, 4096, "X8"),
    Layer("C3", 7680, 4096, "X8"),
    Layer("C4", 4096, 4608, "X3"),
    Layer("D1", 96, 720, "X5", per_sample=160),
    Layer("D1/product", 96, 160, "X5", m=(720,), batch=0),
    Layer("D2", 8192, 69120, "X3"),
    Layer("D3", 8192, 8192, "X8"),
    Layer("D4", 15360, 8192, "X8"),
    Layer("D5", 8192, 18432, "X3"),
    Layer("D6", 96, 192, "X3", per_sample=160),
    Layer("E1", 16384, 69120, "X3"),
    Layer("E2", 16384, 16384, "X8"),
    Layer("E3", 16384, 73728, "X3"),
    Layer("E4", 30720, 16384, "X8"),
    # DCNv2 on 720 embeddings of 160. The table says X5 or X6: the layers on the whole
    # concatenation see missing features, X6.
    Layer("F1", 512, 115200, "X6"),
    Layer("F2", 115200, 512, "X5", bias=True),
    Layer("F3", 2048, 115200, "X6"),
    Layer("F3/4096", 4096, 115200, "X6"),
    Layer("F3/16384", 16384, 115200, "X6"),
    Layer("F4", 256, 512, "X8"),
    Layer("G1", 768, 256, "X4", m=(2048,)),
    Layer("G2", 1024, 123200, "X5", m=(2048,)),
    # FuxiCTR's and TorchEasyRec's Wukong.
    Layer("H1", 8, 39, "X5", per_sample=64),
    Layer("H2", 512, 312, "X3"),
    Layer("H3", 2560, 256, "X8"),
    Layer("H4", 512, 640, "X3"),
    Layer("H5", 512, 648, "X3"),
    Layer("H5/later", 512, 768, "X3"),
    Layer("H6/out", 2048, 512, "X8"),
    Layer("H6/final", 512, 4096, "X3"),
    # HSTU. I8 is I1 at m of other sources. C rows, candidate items, follow B.
    Layer("I1 I8", 2048, 512, "X3", bias=True, m=(*TOKENS, 64896, 152710)),
    Layer("I2", 512, 1536, "X9", m=TOKENS),
    Layer("I3", 256, 512, "X5", m=TOKENS),
    Layer("I4", 512, 256, "X9", m=TOKENS),
    Layer("I5", 512, 1024, "X5"),
    Layer("I6", 512, 512, "X9"),
    Layer("I7", 512, 512, "X3"),
    Layer("I7/1", 1, 512, "X9"),
    Layer("I7/8", 8, 512, "X9"),
    # J2 is the backward pass of J1, J4 that of J3: they are in `lrm-backward`.
    Layer("J1 J2", 4096, 1024, "X3", m=(131168,)),
    Layer("J3 J4", 1024, 1024, "X9", m=(131168,)),
    # RankMixer: a feed-forward network for each token, 16 or 32 of them.
    Layer("K1/up", 3072, 768, "X3", batch=16),
    Layer("K1/down", 768, 3072, "X8", batch=16),
    Layer("K2/up", 6144, 1536, "X3", batch=32),
    Layer("K2/down", 1536, 6144, "X8", batch=32),
    # InterFormer. Gated inputs; sequences of 100 tokens of 128 (the industrial width is not
    # published: L3's heads have 128). GDPA: 1024 samples of 3 heads, 1152 of 4.
    Layer("L1/1", 512, 1024, "X10"),
    Layer("L1/2", 256, 512, "X10"),
    Layer("L1/3", 128, 256, "X10"),
    Layer("L2", 128, 128, "X10", m=(100,), batch=0),
    Layer("L3/scores", 192, 128, "X3", m=(1000,), batch=3 * 1024),
    Layer("L3/values", 128, 192, "X10", m=(1000,), batch=3 * 1024),
    Layer("L4/128", 256, 128, "X3", m=(1000,), batch=4 * 1152),
    Layer("L4/32", 256, 32, "X3", m=(1000,), batch=4 * 1152),
)

# Epilogues and groups of scaled GEMMs, on a few layers: FP8 activations between the layers of an
# MLP, DCN's cross, HSTU's SiLU, experts and heads in one launch.
FUSED_BATCHES = (2048, 20480)
RELU_TO_FP8 = ("A2", "A6", "A7", "B4")
CROSS = ("A5",)
SILU = ("I1",)
GROUPED = ("K1/up", "K1/down", "K2/up", "K2/down", "L2", "L3/scores", "L3/values", "L4/128")
# B of weight gradients accumulated in float32: short and long sums, small and large outputs.
MAIN_GRAD = {
    "A2": (2048, 8192), "A7": (2048, 8192), "B4": (2048, 8192), "C2": (2048, 8192),
    "B1": (2048,),  # sums over 327680 rows
}  # fmt: skip


def layer_named(name: str) -> Layer:
    """The layer with an id."""
    return next(layer for layer in LAYERS if name in layer.ids.split())
