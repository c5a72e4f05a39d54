"""Cases of backward passes through a norm: layers that end with one, and their gradients in FP8."""

from __future__ import annotations

from collections.abc import Iterator

from lokakern.problems import make_problem
from lokakern.types import Format, Granularity
from lokakern.workloads.gemm_cases import GRADIENTS, WIDE_RANGE, Case

BLOCK = 256  # columns of a BlockNorm, unless a row has fewer
SHAPES = (
    (2048, 512), (2048, 1024), (8192, 256), (8192, 1024), (8192, 2048), (32768, 512),
    (32768, 1024), (32768, 2048),
)  # fmt: skip


def norm_backward_cases(m: int, k: int, fp8: Format) -> Iterator[Case]:
    """Of a layer with LayerNorm and one with BlockNorm, after a residual or not.

    In E5M2 with 1x128 scales both ways; the first in bfloat16, too, as others quantize it.
    """
    layer = "bias+layer+affine"
    block = f"bias+block_rms({min(BLOCK, k)})+hardswish"
    for epilogue in (layer, f"bias+residual+{layer.removeprefix('bias+')}+silu", block):
        yield Case(make_problem("norm_backward", (m, k), epilogue=epilogue,
                                out_format=WIDE_RANGE[fp8], out_granularity=Granularity.GROUP),
                   GRADIENTS)  # fmt: skip
    yield Case(
        make_problem("norm_backward", (m, k), epilogue=layer, out_format=Format.BFLOAT16), GRADIENTS
    )
