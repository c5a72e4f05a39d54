"""The models of the zoo by name."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lokakern.bench.models.blocks import perceptron
from lokakern.bench.models.dlrm import DLRM, SIZES
from lokakern.bench.models.zoo.architecture import Architecture, DensePart, Feature
from lokakern.bench.models.zoo.autoint import AutoInt
from lokakern.bench.models.zoo.dcnv2 import dcnv2
from lokakern.bench.models.zoo.hstu import HSTU
from lokakern.bench.models.zoo.masknet import MaskNet
from lokakern.bench.models.zoo.ple import PLE


def dlrm_dcnv2(size: str = "mlperf") -> nn.Module:
    """DLRMv2 of `lokakern.bench.models.dlrm` without its tables."""
    config = SIZES[size]
    return DensePart(DLRM(replace(config, inputs=config.inputs.capped(1))))


ZOO = {
    # As in MLPerf: 13 dense features, and 26 embeddings of 128.
    "dlrm-dcnv2": Architecture(
        dlrm_dcnv2, (Feature(13, "X7", is_learned=False), Feature(3328, "X5"))
    ),
    "dcnv2": Architecture(dcnv2, (Feature(1677, "X5"),)),
    # The tower of a user in a two-tower retrieval model: 25 embeddings of 128.
    "tower": Architecture(
        lambda: perceptron((3200, 2048, 2048, 1024), norm=True, last=1), (Feature(3200, "X5"),)
    ),
    "hstu": Architecture(HSTU, (Feature(512, "X3"),)),
    # Square layers: the largest share of GEMMs that a step can have.
    "wide": Architecture(lambda: perceptron((4096,) * 5, last=1), (Feature(4096, "X5"),)),
    "masknet": Architecture(
        MaskNet, (Feature(2176, "X7", is_learned=False), Feature(600, "X3", is_learned=False))
    ),
    "autoint": Architecture(AutoInt, (Feature(39 * 16, "X5"),)),
    "ple": Architecture(PLE, (Feature(16 * 16, "X5"),)),
}
