"""Times and errors of op gemm_norm made by hand, for chains in conversions."""

from __future__ import annotations

from typing import Any

from lokakern.chain.candidates import Chain, Layer
from lokakern.types import Format, Granularity, Problem
from tests.support.measurements import H200, accuracy, time

NONE, ROW = Granularity.NONE, Granularity.ROW
SEPARATE = "torch.bf16+cuda.norm_quantize"
FUSED = "cuda.gemm_norm_row"
QUANTIZING = f"cuda.quantize_row+{FUSED}"
# The layers of `chained_models.tower`.
WIDE = Layer(1024, 512, "bias+relu")
NARROW = Layer(512, 1024, "bias+layer+affine+relu")


def layer_problem(
    layer: Layer, m: int, reads: Granularity, weight: Granularity, writes: Granularity,
    half: Format = Format.BFLOAT16,
) -> Problem:  # fmt: skip
    """The problem of a layer in a chain."""
    return Chain((layer,), m, H200, (), None, half=half).problem(0, reads, weight, writes)


def plain_rows(layer: Layer, m: int, us: float) -> list[Any]:
    """The time of an unquantized layer."""
    return [time(SEPARATE, layer_problem(layer, m, NONE, NONE, NONE), us)]


def fp8_rows(
    layer: Layer, m: int, us: float, *, quantizer: float = 2.0, row_err: float = 0.04,
    is_judged: bool = True,
) -> list[Any]:  # fmt: skip
    """Times of a layer with rowwise scales: of FP8 and of bfloat16 input and output.

    With ``is_judged`` also errors, which are those of every m.
    """
    rows = []
    for writes in (NONE, ROW):
        for name, reads, more in ((FUSED, ROW, 0.0), (QUANTIZING, NONE, quantizer)):
            problem = layer_problem(layer, m, reads, ROW, writes)
            rows.append(time(name, problem, us + more))
            # An FP8 output adds its own rounding.
            worse = 0.005 if writes is ROW else 0.0
            rows += [accuracy(name, problem, row_err + worse)] if is_judged else []
    return rows


def half_errors(layer: Layer, row_err: float = 0.04) -> list[Any]:
    """Errors with rowwise scales of a layer in float16."""
    rows = []
    for writes in (NONE, ROW):
        for name, reads in ((FUSED, ROW), (QUANTIZING, NONE)):
            problem = layer_problem(layer, 512, reads, ROW, writes, Format.FLOAT16)
            rows.append(accuracy(name, problem, row_err + 0.005 * (writes is ROW)))
    return rows


def layer_rows(
    layer: Layer, plain: dict[int, float], fp8: dict[int, float], **fields: float
) -> list[Any]:
    """Times of a layer by m, unquantized and with rowwise scales, and errors."""
    rows = [row for m, us in plain.items() for row in plain_rows(layer, m, us)]
    for place, (m, us) in enumerate(fp8.items()):
        rows += fp8_rows(layer, m, us, is_judged=not place, **fields)
    return rows


def both(plain: dict[int, float], fp8: dict[int, float], **fields: float) -> list[Any]:
    """As `layer_rows`, of the two layers `WIDE` and `NARROW`."""
    return [row for x in (WIDE, NARROW) for row in layer_rows(x, plain, fp8, **fields)]
