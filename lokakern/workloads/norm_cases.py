"""Cases of layers that end with a norm: a GEMM with what follows it, and what is not fused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lokakern.problems import make_problem
from lokakern.types import Format, Granularity, Layout, Operand
from lokakern.workloads.gemm_cases import Case

BLOCK = 256  # columns of a BlockNorm, unless a row has fewer
LAYER = "bias+layer+affine"
ROW_NORMS = ("layer+affine", "rms+affine", f"block_rms({BLOCK})")
ROW_SCALES = (Granularity.ROW, Granularity.GROUP)


def block_norm(n: int) -> str:
    """Linear, BlockNorm and hard-swish; parameter-free, so that its outputs are bounded."""
    return f"bias+block_rms({min(BLOCK, n)})+hardswish"


def gemm_norm_cases(m: int, n: int, k: int, distribution: str, fp8: Format) -> Iterator[Case]:
    """A layer with LayerNorm and one with BlockNorm, in FP8 and in bfloat16 throughout.

    FP8 has scales of rows, or one. After LayerNorm the output is bfloat16. After BlockNorm that of
    the FP8 layer is FP8 under a scale that is known before any row is.
    """
    yield gemm_norm_case(m, n, k, LAYER, distribution)
    yield gemm_norm_case(m, n, k, block_norm(n), distribution)
    for granularity in (Granularity.ROW, Granularity.TENSOR):
        a = Operand(fp8, granularity)
        yield gemm_norm_case(m, n, k, LAYER, distribution, a)
        yield gemm_norm_case(
            m, n, k, block_norm(n), distribution, a,
            out_format=fp8, out_granularity=Granularity.TENSOR,
        )  # fmt: skip


def grouped_norm_cases(m: int, n: int, k: int, distribution: str, fp8: Format) -> Iterator[Case]:
    """The same layers of 1x128 x 128x128 scales, whose outputs are the next layer's inputs."""
    for epilogue in (LAYER, block_norm(n)):
        yield gemm_norm_case(
            m, n, k, epilogue, distribution, Operand(fp8, Granularity.GROUP),
            out_format=fp8, out_granularity=Granularity.GROUP,
        )  # fmt: skip


def chained_cases(m: int, n: int, k: int, distribution: str, fp8: Format) -> Iterator[Case]:
    """A layer with BlockNorm as it stands in a chain of them: what it reads, and what it writes.

    The first layer reads bfloat16 and may quantize it; what it writes, and what all but the last
    write, is FP8 as the next layer reads it, or under a scale that is known before any row is.
    """
    tensor, row, group = Granularity.TENSOR, Granularity.ROW, Granularity.GROUP
    ways = [(tensor, tensor), (row, row), (row, tensor), (group, group)]
    for reads, writes in ways:
        out: dict[str, Any] = {"out_format": fp8, "out_granularity": writes}
        yield gemm_norm_case(m, n, k, block_norm(n), distribution, Operand(fp8, reads), **out)
    for scales in (tensor, row, group):
        yield gemm_norm_case(m, n, k, block_norm(n), distribution, Operand(fp8, scales))
    for weight, writes in ((row, tensor), (row, row), (Granularity.BLOCK, group)):
        b = Operand(fp8, weight, Layout.COLUMN)
        out = {"out_format": fp8, "out_granularity": writes}
        yield gemm_norm_case(m, n, k, block_norm(n), distribution, b=b, prepared=True, **out)
    for writes in (tensor, row):
        out = {"out_format": fp8, "out_granularity": writes}
        yield gemm_norm_case(m, n, k, block_norm(n), distribution, **out)


def gemm_norm_case(
    m: int,
    n: int,
    k: int,
    epilogue: str,
    distribution: str,
    a: Operand | None = None,
    **fields: Any,
) -> Case:
    """A GEMM with what follows it; b is quantized as a is, a is bfloat16 if it is None."""
    problem = make_problem("gemm_norm", (m, n, k), a=a, epilogue=epilogue, **fields)
    return Case(problem, distribution)


def norm_quantize_cases(m: int, k: int, distribution: str, fp8: Format) -> Iterator[Case]:
    """Rows that are normalized and quantized: every norm, with scales of rows and of 1x128."""
    for epilogue in ROW_NORMS:
        for granularity in ROW_SCALES:
            problem = make_problem(
                "norm_quantize", (m, k), epilogue=epilogue, out_format=fp8,
                out_granularity=granularity,
            )  # fmt: skip
            yield Case(problem, distribution)


def activate_case(m: int, k: int, activation: str, distribution: str, fp8: Format) -> Case:
    """Rows that are activated, and quantized with scales of their own, in one kernel."""
    problem = make_problem(
        "norm_quantize", (m, k), epilogue=activation, out_format=fp8,
        out_granularity=Granularity.ROW,
    )  # fmt: skip
    return Case(problem, distribution)


def epilogue_cases(shapes: list[tuple[int, ...]], epilogue: str, fp8: Format) -> Iterator[Case]:
    """Shapes that a user names with an epilogue: ``(m, n, k)`` of layers, ``(m, k)`` of rows.

    Layers are in bfloat16, and in FP8 with an output in bfloat16 and in FP8; rows are quantized.
    """
    for shape in shapes:
        if len(shape) == 2:
            for granularity in ROW_SCALES:
                problem = make_problem("norm_quantize", shape, epilogue=epilogue, out_format=fp8,
                                       out_granularity=granularity)  # fmt: skip
                yield Case(problem, "X1")
            continue
        m, n, k = shape
        row, group = (Operand(fp8, granularity) for granularity in ROW_SCALES)
        yield gemm_norm_case(m, n, k, epilogue, "X1")
        for a in (row, group):
            yield gemm_norm_case(m, n, k, epilogue, "X1", a)
            yield gemm_norm_case(m, n, k, epilogue, "X1", a, out_format=fp8,
                                 out_granularity=a.granularity)  # fmt: skip
