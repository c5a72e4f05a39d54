"""Layers of the models of `python -m lokakern.bench model zoo`.

`LAYERS` are the data of the suite `zoo`, `CHAIN_LAYERS` those of the suite `zoo-chains`.

Layers with fewer than 16 outputs, such as logits and gates, are left out: reading X takes their
time, whatever the format of the product.
"""

from __future__ import annotations

from dataclasses import dataclass

BATCHES = (512, 2048, 8192, 32768)  # samples; of HSTU tokens
FEWEST_OUTPUTS = 16


@dataclass(frozen=True, slots=True)
class Layer:
    """``Y[m, n] = X[m, k] W[n, k]^T``, of one model.

    Attributes:
        model: The model.
        n: Outputs.
        k: Inputs.
        distribution: Distribution of X.
        count: Number of such layers in the model.
        per_sample: Rows of X for each sample.
    """

    model: str
    n: int
    k: int
    distribution: str
    count: int = 1
    per_sample: int = 1


LAYERS: tuple[Layer, ...] = (
    Layer("dlrm-dcnv2", 512, 13, "X7"),
    Layer("dlrm-dcnv2", 256, 512, "X8", count=2),
    Layer("dlrm-dcnv2", 128, 256, "X8"),
    Layer("dlrm-dcnv2", 512, 3456, "X5", count=3),
    Layer("dlrm-dcnv2", 3456, 512, "X2", count=3),
    Layer("dlrm-dcnv2", 1024, 3456, "X5"),
    Layer("dlrm-dcnv2", 1024, 1024, "X8"),
    Layer("dlrm-dcnv2", 512, 1024, "X8"),
    Layer("dcnv2", 1677, 1677, "X5", count=3),
    Layer("dcnv2", 1024, 1677, "X5"),
    Layer("dcnv2", 1024, 1024, "X8"),
    Layer("dcnv2", 512, 1024, "X8"),
    Layer("tower", 2048, 3200, "X5"),
    Layer("tower", 2048, 2048, "X8"),
    Layer("tower", 1024, 2048, "X8"),
    Layer("hstu", 2048, 512, "X3", count=3),
    Layer("hstu", 512, 512, "X9", count=3),
    Layer("wide", 4096, 4096, "X8", count=4),
    Layer("masknet", 1024, 2776, "X7", count=8),
    Layer("masknet", 2776, 1024, "X8", count=4),
    Layer("masknet", 2048, 4096, "X3"),
    Layer("masknet", 256, 2048, "X8", count=10),
    Layer("masknet", 128, 256, "X8", count=10),
    Layer("autoint", 64, 16, "X5", count=4, per_sample=39),
    Layer("autoint", 64, 64, "X8", count=8, per_sample=39),
    Layer("ple", 1024, 256, "X5", count=6),
    Layer("ple", 512, 1024, "X8", count=6),
    Layer("ple", 256, 512, "X8", count=6),
    Layer("ple", 256, 256, "X8", count=9),
    Layer("ple", 128, 256, "X8", count=11),
    Layer("ple", 64, 128, "X8", count=23),
    Layer("ple", 128, 64, "X8", count=12),
    Layer("ple", 32, 64, "X8", count=12),
    Layer("ple", 256, 32, "X8", count=2),
)


RELU, LAST = "bias+relu", "bias"
DOWN, CROSS = "none", "bias+cross"  # of a cross of low rank
LAYER_RELU, LAYER_SILU = "bias+layer+affine+relu", "bias+layer+affine+silu"


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """A layer of an ``nn.Sequential`` with what follows it there, or of a cross.

    Attributes:
        model: The model.
        n: Outputs.
        k: Inputs.
        epilogue: As in `Problem` of op gemm_norm.
        distribution: Distribution of X.
        first: Whether it begins a chain somewhere in the model.
        later: Whether it follows another layer somewhere in the model.
    """

    model: str
    n: int
    k: int
    epilogue: str
    distribution: str
    first: bool = False
    later: bool = False


FEWEST_OF_A_CHAIN = 128  # inputs and outputs
# A layer after a smaller one is first. Layers of several models are listed once for each place.
CHAIN_LAYERS: tuple[ChainLayer, ...] = (
    ChainLayer("dlrm-dcnv2", 256, 512, RELU, "X8", first=True, later=True),
    ChainLayer("dlrm-dcnv2", 128, 256, RELU, "X8", later=True),
    ChainLayer("dlrm-dcnv2", 512, 3456, DOWN, "X5", first=True),
    ChainLayer("dlrm-dcnv2", 3456, 512, CROSS, "X2", later=True),
    ChainLayer("dlrm-dcnv2", 1024, 3456, RELU, "X5", first=True),
    ChainLayer("dlrm-dcnv2", 1024, 1024, RELU, "X8", later=True),
    ChainLayer("dlrm-dcnv2", 512, 1024, RELU, "X8", later=True),
    ChainLayer("dcnv2", 1024, 1677, LAYER_SILU, "X5", first=True),
    ChainLayer("dcnv2", 1024, 1024, LAYER_SILU, "X8", later=True),
    ChainLayer("dcnv2", 512, 1024, LAYER_SILU, "X8", later=True),
    ChainLayer("tower", 2048, 3200, LAYER_RELU, "X5", first=True),
    ChainLayer("tower", 2048, 2048, LAYER_RELU, "X8", later=True),
    ChainLayer("tower", 1024, 2048, LAYER_RELU, "X8", later=True),
    ChainLayer("wide", 4096, 4096, RELU, "X8", first=True, later=True),
    ChainLayer("masknet", 1024, 2776, RELU, "X7", first=True),
    ChainLayer("masknet", 2776, 1024, LAST, "X8", later=True),
    ChainLayer("masknet", 2048, 4096, RELU, "X3", first=True),
    ChainLayer("ple", 1024, 256, RELU, "X5", first=True),
    ChainLayer("ple", 256, 256, RELU, "X8", first=True),
    ChainLayer("ple", 128, 256, RELU, "X8", first=True),
)
