"""Suites: named lists of problems, each with the distribution it is timed under."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lokakern.errors import UnknownNameError
from lokakern.problems import make_problem
from lokakern.registry.register import fp8_format
from lokakern.types import Device, Format, Granularity, Layout, Operand, Problem, alignment_of

PREPARED_FORMS = (Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK)


@dataclass(frozen=True, slots=True)
class Case:
    """A problem and the input distribution it is timed under."""

    problem: Problem
    distribution: str


@dataclass(frozen=True, slots=True)
class Suite:
    """A named list of cases; formats follow the device (fnuz on CDNA 3)."""

    name: str
    title: str
    build: Callable[[Format], Iterable[Case]]

    def cases(self, device: Device) -> list[Case]:
        return list(dict.fromkeys(self.build(fp8_format(device))))


def gemm_cases(
    m: int, n: int, k: int, distribution: str, fp8: Format, *, bias: bool = False
) -> Iterator[Case]:
    """One GEMM of a model as every op on its way: whole, prepared, and its parts."""
    yield from whole_gemm_cases(m, n, k, distribution, fp8, bias=bias)
    yield from scaled_gemm_cases(m, n, k, distribution, fp8)
    for granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP):
        yield quantize_case(m, k, granularity, distribution, fp8)


def whole_gemm_cases(
    m: int, n: int, k: int, distribution: str, fp8: Format, *, bias: bool = False
) -> Iterator[Case]:
    """A GEMM from unquantized operands, and from a weight prepared in each form."""
    fields = {"epilogue": "bias"} if bias else {}
    yield Case(make_problem("gemm", (m, n, k), **fields), distribution)
    for granularity in PREPARED_FORMS:
        weight = Operand(fp8, granularity, Layout.COLUMN, alignment_of(k))
        yield Case(make_problem("gemm", (m, n, k), b=weight, prepared=True, **fields), distribution)


def scaled_gemm_cases(m: int, n: int, k: int, distribution: str, fp8: Format) -> Iterator[Case]:
    for granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP):
        a = Operand(fp8, granularity, Layout.ROW, alignment_of(k))
        yield Case(make_problem("scaled_gemm", (m, n, k), a=a), distribution)


def quantize_case(m: int, k: int, granularity: Granularity, distribution: str, fp8: Format) -> Case:
    problem = make_problem("quantize", (m, k), out_format=fp8, out_granularity=granularity)
    return Case(problem, distribution)


def dequantize_case(
    m: int, k: int, granularity: Granularity, distribution: str, fp8: Format
) -> Case:
    operand = Operand(fp8, granularity, Layout.ROW, alignment_of(k))
    return Case(make_problem("dequantize", (m, k), a=operand), distribution)


def shape_cases(shapes: Sequence[tuple[int, ...]], fp8: Format) -> Iterator[Case]:
    """Everything about shapes a user names: ``(m, n, k)`` for GEMMs, ``(m, k)`` for quantizing."""
    for shape in shapes:
        m, k = shape[0], shape[-1]
        if len(shape) == 3:
            yield from gemm_cases(m, shape[1], k, "X1", fp8)
            continue
        for granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP):
            yield quantize_case(m, k, granularity, "X1", fp8)
            yield dequantize_case(m, k, granularity, "X1", fp8)
        yield quantize_case(m, k, Granularity.BLOCK, "X1", fp8)
        yield dequantize_case(m, k, Granularity.BLOCK, "X1", fp8)


def _smoke(fp8: Format) -> Iterator[Case]:
    for m in (512, 2048):
        yield from gemm_cases(m, 256, 256, "X1", fp8)
    yield quantize_case(256, 256, Granularity.BLOCK, "X1", fp8)
    yield dequantize_case(512, 256, Granularity.ROW, "X1", fp8)


# m x (n, k): small and large batches of the layer sizes of recommendation models.
ANCHOR_M = (2048, 8192, 32768)
ANCHOR_N_K = (
    (128, 128), (256, 256), (512, 512), (1024, 1024), (2048, 2048),
    (256, 1024), (1024, 256), (512, 2048), (2048, 512),
)  # fmt: skip


def _anchors(fp8: Format) -> Iterator[Case]:
    for m in ANCHOR_M:
        for n, k in ANCHOR_N_K:
            yield from gemm_cases(m, n, k, "X1", fp8)
            yield from whole_gemm_cases(m, n, k, "X1", fp8, bias=True)
            yield quantize_case(n, k, Granularity.BLOCK, "X1", fp8)
            yield dequantize_case(m, k, Granularity.ROW, "X1", fp8)
    for granularity in (Granularity.TENSOR, Granularity.GROUP, Granularity.BLOCK):
        yield dequantize_case(8192, 1024, granularity, "X1", fp8)
    for n, k in ((512, 512), (1024, 1024), (2048, 2048)):
        wide = Operand(Format.FLOAT32, Granularity.NONE, Layout.ROW)
        yield Case(make_problem("gemm", (8192, n, k), a=wide), "X1")


# (n, k, distribution of the input, bias): layers of published models. DLRM-v2 (bottom, DCN,
# over), Wukong-S and -M, TorchEasyRec's Wukong, HSTU's input and task layers, LoKA's example.
LRM_LAYERS = (
    (512, 16, "X7", True), (256, 512, "X2", True), (128, 256, "X8", True),
    (512, 3456, "X5", False), (3456, 512, "X2", True), (1024, 3456, "X5", True),
    (1024, 1024, "X8", True), (512, 1024, "X8", True),
    (2048, 1536, "X3", False), (2048, 2048, "X8", False), (5120, 2048, "X8", False),
    (4096, 4608, "X3", False), (4096, 4096, "X8", False),
    (768, 256, "X4", False), (512, 648, "X3", False), (512, 312, "X3", False),
    (2048, 512, "X3", True), (512, 1536, "X9", False),
    (256, 512, "X5", True), (512, 256, "X5", True),
)  # fmt: skip
LRM_BATCHES = (1024, 2048, 8192, 20480)


def _lrm(fp8: Format) -> Iterator[Case]:
    for n, k, distribution, bias in LRM_LAYERS:
        for m in LRM_BATCHES:
            yield from gemm_cases(m, n, k, distribution, fp8, bias=bias)


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("smoke", "one small GEMM at two m: seconds on a CPU", _smoke),
        Suite("anchors", "27 GEMM shapes measured against today's libraries", _anchors),
        Suite("lrm", "layers of published recommendation models", _lrm),
    )
}


def suite_named(name: str) -> Suite:
    """The suite of that name.

    Raises:
        UnknownNameError: There is none.
    """
    try:
        return SUITES[name]
    except KeyError:
        raise UnknownNameError(
            f"suite {name!r} is unknown; expected one of {', '.join(SUITES)}"
        ) from None
