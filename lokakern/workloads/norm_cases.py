"""Cases of layers that end with a norm, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from lokakern.epilogue import norm_form
from lokakern.types import Format, Granularity, Operand, alignment_of
from lokakern.workloads.gemm_cases import LEFT_SCALES, Case, prepared_weight, quantized_output
from lokakern.workloads.gemm_gradient_cases import GRADIENTS, WIDE_RANGE

BLOCK = 256  # columns of a BlockNorm, unless a row has fewer
LAYER = "bias+layer+affine"
ROW_NORMS = ("layer+affine", "rms+affine", f"block_rms({BLOCK})")
ROW_SCALES = (Granularity.ROW, Granularity.GROUP)


def block_norm(n: int) -> str:
    """Linear, BlockNorm and hard-swish; without norm parameters, so that outputs are bounded."""
    return f"bias+block_rms({min(BLOCK, n)})+hardswish"


def gemm_norm_cases(m: int, n: int, k: int, distribution: str, fp8: Format) -> Iterator[Case]:
    """Layers with LayerNorm and with BlockNorm, in bfloat16 and in FP8.

    FP8 has rowwise or tensorwise scales. The output is bfloat16 after LayerNorm, and FP8 with a
    static scale after BlockNorm of an FP8 layer.
    """
    for epilogue in (LAYER, block_norm(n)):
        yield gemm_norm_case(m, n, k, epilogue, distribution)
    out = quantized_output(fp8, Granularity.TENSOR)
    for granularity in (Granularity.ROW, Granularity.TENSOR):
        a = Operand(fp8, granularity)
        yield gemm_norm_case(m, n, k, LAYER, distribution, a)
        yield gemm_norm_case(m, n, k, block_norm(n), distribution, a, **out)


def grouped_norm_cases(m: int, n: int, k: int, distribution: str, fp8: Format) -> Iterator[Case]:
    """The same layers with 1x128 x 128x128 scales, whose outputs are inputs of the next layer."""
    a, out = Operand(fp8, Granularity.GROUP), quantized_output(fp8, Granularity.GROUP)
    for epilogue in (LAYER, block_norm(n)):
        yield gemm_norm_case(m, n, k, epilogue, distribution, a, **out)


def chained_cases(m: int, n: int, k: int, distribution: str, fp8: Format) -> Iterator[Case]:
    """A layer with BlockNorm at each place of a chain, with all formats of input and output.

    The first layer reads bfloat16 and may quantize it. All layers but the last write FP8 with the
    scales that the next layer reads, or with a static scale.
    """
    layer = functools.partial(gemm_norm_case, m, n, k, block_norm(n), distribution)
    writes = {scales: quantized_output(fp8, scales) for scales in LEFT_SCALES}
    tensor, row, group = LEFT_SCALES
    for left, out in ((tensor, tensor), (row, row), (row, tensor), (group, group)):
        yield layer(Operand(fp8, left), **writes[out])
    for left in LEFT_SCALES:
        yield layer(Operand(fp8, left))
    for right, out in ((row, tensor), (row, row), (Granularity.BLOCK, group)):
        yield layer(b=prepared_weight(fp8, right), prepared=True, **writes[out])
    for out in (tensor, row):
        yield layer(**writes[out])


MOST_CHAIN_CASES = 11  # of a layer at one m


def chain_layer_cases(
    m: int,
    n: int,
    k: int,
    epilogue: str,
    distribution: str,
    fp8: Format,
    *,
    first: bool = True,
    later: bool = True,
    half: Format = Format.BFLOAT16,
) -> Iterator[Case]:
    """The problems of op gemm_norm by which a layer of an inference chain is chosen.

    The unquantized layer, then FP8 with rowwise scales and with 1x128 x 128x128 scales. Outputs are
    bfloat16, FP8 with the same scales and, where a norm bounds a rowwise layer's outputs, FP8 with
    a static scale.

    Args:
        m: Rows of X.
        n: Outputs.
        k: Inputs.
        epilogue: As in `Problem`, such as "bias+relu" or "bias+layer+affine+silu".
        distribution: Distribution of X.
        fp8: FP8 format of the device.
        first: Whether the layer may begin a chain: X is bfloat16, W is prepared.
        later: Whether it may follow another layer: X is FP8.
        half: What is said to be bfloat16: that, or float16.

    Raises:
        UnknownNameError: The epilogue is unknown.
        ShapeError: Blocks of its norm do not divide n.
    """
    layer = functools.partial(gemm_norm_case, m, n, k, epilogue, distribution)
    x = Operand(half, alignment=alignment_of(k * half.dtype.itemsize))
    plain = {"out_format": half}
    row, group = Granularity.ROW, Granularity.GROUP
    tensor, row_out, group_out = (quantized_output(fp8, scales) for scales in LEFT_SCALES)
    row_outputs = [plain, row_out, *([tensor] if norm_form(epilogue).is_bounded else [])]
    yield layer(x, **plain)
    if first:
        yield layer(x, **row_out)
        weight = prepared_weight(fp8, row)
        for out in row_outputs:
            yield layer(x, b=weight, prepared=True, **out)
        yield layer(x, b=prepared_weight(fp8, Granularity.BLOCK), prepared=True, **group_out)
    if later:
        for out in row_outputs:
            yield layer(Operand(fp8, row), **out)
        for out in (plain, group_out):
            yield layer(Operand(fp8, group), **out)


def gemm_norm_case(
    m: int,
    n: int,
    k: int,
    epilogue: str,
    distribution: str,
    a: Operand | None = None,
    **fields: Any,
) -> Case:
    """A GEMM with an epilogue; b is quantized like a; a of None is bfloat16."""
    return Case.of("gemm_norm", (m, n, k), distribution, a=a, epilogue=epilogue, **fields)


def norm_quantize_case(
    m: int, k: int, epilogue: str, distribution: str, fp8: Format, granularity: Granularity
) -> Case:
    """An epilogue of rows and quantization in one kernel."""
    out = quantized_output(fp8, granularity)
    return Case.of("norm_quantize", (m, k), distribution, epilogue=epilogue, **out)


def norm_quantize_cases(m: int, k: int, distribution: str, fp8: Format) -> Iterator[Case]:
    """Norms of rows with quantization: every norm, with rowwise and 1x128 scales."""
    for epilogue in ROW_NORMS:
        for granularity in ROW_SCALES:
            yield norm_quantize_case(m, k, epilogue, distribution, fp8, granularity)


def epilogue_cases(shapes: list[tuple[int, ...]], epilogue: str, fp8: Format) -> Iterator[Case]:
    """Cases of shapes from a user with an epilogue: ``(m, n, k)`` of layers, ``(m, k)`` of rows.

    Layers are bfloat16, and FP8 with bfloat16 and with FP8 outputs; rows are quantized.
    """
    for shape in shapes:
        if len(shape) == 2:
            for granularity in ROW_SCALES:
                yield norm_quantize_case(*shape, epilogue, "X1", fp8, granularity)
            continue
        m, n, k = shape
        yield gemm_norm_case(m, n, k, epilogue, "X1")
        for a in (Operand(fp8, granularity) for granularity in ROW_SCALES):
            yield gemm_norm_case(m, n, k, epilogue, "X1", a)
            out = quantized_output(fp8, a.granularity)
            yield gemm_norm_case(m, n, k, epilogue, "X1", a, **out)


BACKWARD_SHAPES = (
    (2048, 512), (2048, 1024), (8192, 256), (8192, 1024), (8192, 2048), (32768, 512),
    (32768, 1024), (32768, 2048),
)  # fmt: skip


def norm_backward_cases(m: int, k: int, fp8: Format) -> Iterator[Case]:
    """Backward passes of LayerNorm, of LayerNorm after a residual, and of BlockNorm.

    Gradients are E5M2 with 1x128 scales along both axes. The first case also has bfloat16
    gradients, for libraries that quantize in a separate kernel.
    """
    out = quantized_output(WIDE_RANGE[fp8], Granularity.GROUP)
    for epilogue in (LAYER, f"bias+residual+{LAYER.removeprefix('bias+')}+silu", block_norm(k)):
        yield Case.of("norm_backward", (m, k), GRADIENTS, epilogue=epilogue, **out)
    bfloat16 = Format.BFLOAT16
    yield Case.of("norm_backward", (m, k), GRADIENTS, epilogue=LAYER, out_format=bfloat16)


def cross_backward_case(m: int, k: int, fp8: Format, *, is_crossed: bool = True) -> Case:
    """Backward pass of a cross behind a bias, quantized with 1x128 scales both ways.

    Without the cross it is the gradient of a layer, summed for its bias.
    """
    out = quantized_output(fp8, Granularity.GROUP)
    epilogue = "bias+cross" if is_crossed else "bias"
    return Case.of("norm_backward", (m, k), GRADIENTS, epilogue=epilogue, **out)
