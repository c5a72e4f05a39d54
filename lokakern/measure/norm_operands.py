"""Operands of the ops with a norm: what comes after the sums, and what that must write."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lokakern.epilogue import ACTIVATIONS
from lokakern.errors import MeasurementError
from lokakern.measure import operands as common
from lokakern.measure.norm_errors import norm_kernel_error
from lokakern.measure.operands import Case64, Operands, case_of
from lokakern.measure.tiled_compare import Piece, pieces_to_check
from lokakern.norm import static_scale
from lokakern.numerics import KernelError
from lokakern.problems import NORM_VECTORS, row_length
from lokakern.registry import ops
from lokakern.registry.register import Kernel, fp8_format
from lokakern.types import (
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    NormForm,
    Problem,
    QuantizedTensor,
    empty_data,
    norm_form,
)

MATRICES = ("residual", "gate", "x0", "x")  # of an epilogue, as large as the output
ROWS_FOR_A_SCALE = 2048  # of outputs whose largest makes a static scale that nothing bounds


def draw_epilogue(
    form: NormForm, rows: int, columns: int, device: torch.device, seed: int = 0
) -> NormEpilogue:
    """All that an epilogue reads, drawn normal; a weight of the norm is around 1.

    Bias and weights are float32, so that what a kernel loses is seen and not what they would.
    """
    generator = torch.Generator().manual_seed(seed)

    def vector(wanted: bool, mean: float = 0.0, deviation: float = 1.0) -> Tensor | None:
        drawn = torch.randn(columns, generator=generator)  # whether or not: the rest stays the same
        if not wanted:
            return None
        return (mean + deviation * drawn).to(NORM_VECTORS.dtype).to(device)

    def matrix(wanted: bool, place: int) -> Tensor | None:
        if not wanted:
            return None
        there = torch.Generator(device).manual_seed(seed + 1 + place)  # millions: drawn on the spot
        x = torch.randn((rows, columns), generator=there, device=device)
        return x.to(Format.BFLOAT16.dtype)

    return NormEpilogue(
        norm=form.norm,
        bias=vector(form.bias),
        norm_weight=vector(form.affine, 1.0, 0.25),
        norm_bias=vector(form.affine),
        activation=form.last if form.last in ACTIVATIONS else "none",
        residual=matrix(form.residual or form.residual_last, 0),
        residual_last=form.residual_last,
        gate=matrix(form.last == "gate", 1),
        x0=matrix(form.last == "cross", 2),
        x=matrix(form.last == "cross", 3),
    )


def rows_of(epilogue: NormEpilogue, rows: slice) -> NormEpilogue:
    """What an epilogue does to some rows."""
    given = {name: getattr(epilogue, name) for name in MATRICES}
    return epilogue._replace(**{name: x[rows] for name, x in given.items() if x is not None})


def fitting_scale(
    epilogue: NormEpilogue, columns: int, form: Format, exact: Callable[[], Tensor]
) -> float:
    """The decode scale of an FP8 output that is known beforehand.

    Args:
        epilogue: What makes the output.
        columns: Of a row.
        form: FP8.
        exact: Outputs whose largest makes the scale where no norm bounds them.
    """
    norm, last = epilogue.norm, epilogue.form.last
    if norm.kind != "none" and last in ACTIVATIONS and not epilogue.residual_last:
        return static_scale(norm, columns, form, epilogue.norm_weight, epilogue.norm_bias)
    known = exact().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return max(float(known.abs().max()) / form.maximum, 2.0**-126)


def empty_output(
    form: Format, granularity: Granularity, rows: int, columns: int, device: torch.device,
    scale: float | None = None,
) -> Tensor | QuantizedTensor:  # fmt: skip
    """What a launch of these ops writes into; with the scale where that is given."""
    if not form.is_fp8:
        return torch.empty((rows, columns), dtype=form.dtype, device=device)
    scales = granularity.empty_scale(rows, columns, device)
    if scale is not None:
        scales.fill_(scale)
    data = empty_data(rows, columns, form.dtype, device)
    return QuantizedTensor(data, scales, granularity)


def written_parts(out: Tensor | QuantizedTensor) -> tuple[Tensor, ...]:
    """The tensors of an output that a launch writes; a scale of the whole tensor is given."""
    if isinstance(out, Tensor):
        return (out,)
    if out.granularity is Granularity.TENSOR or out.scale is None:
        return (out.data,)
    return (out.data, out.scale)


def poison_output(out: Tensor | QuantizedTensor, form: Format) -> None:
    """Fill it with NaN, which no kernel leaves there of finite operands."""
    for part in written_parts(out):
        if part.dtype.itemsize == 1:
            part.view(torch.uint8).fill_(form.nan_byte)
        else:
            part.fill_(math.nan)


def rows_of_output(out: Tensor | QuantizedTensor, rows: slice) -> Tensor | QuantizedTensor:
    if isinstance(out, Tensor):
        return out[rows]
    assert out.scale is not None  # an output is quantized, or a tensor
    scale = out.scale if out.granularity is Granularity.TENSOR else out.scale[rows]
    return QuantizedTensor.packed(out.data[rows], scale, out.granularity)


class NormOperands(Operands):
    """Operands of ``gemm_norm`` and ``norm_quantize``, see `Operands`.

    What comes after the sums is part of every set. The norm runs over the whole row of outputs:
    where fewer rows of the weight were drawn than it has, the exact sums repeat with them.
    """

    def __init__(
        self,
        problem: Problem,
        distribution: str,
        device: torch.device,
        target: Device,
        *,
        cold: bool,
        seed: int = 0,
    ) -> None:
        _refuse(problem)
        self.columns_out = row_length(problem.op, (problem.m, problem.n, problem.k))
        self.form_of_norm = norm_form(problem.epilogue)
        super().__init__(problem, distribution, device, target, cold=cold, seed=seed)

    def _draw_epilogue(self, generator: torch.Generator) -> None:
        problem = self.problem
        self.drawn_epilogue = draw_epilogue(
            self.form_of_norm, problem.m, self.columns_out, self.device, self.seed
        )
        self.bias = self.drawn_epilogue.bias  # which must be finite, like the operands
        self.static_scale: float | None = None
        if problem.out_format.is_fp8 and problem.out_granularity is Granularity.TENSOR:
            self.static_scale = fitting_scale(
                self.drawn_epilogue, self.columns_out, problem.out_format, self._some_outputs
            )

    def _some_outputs(self) -> Tensor:
        """Exact outputs of the drawn rows, in their order."""
        rows = min(self.problem.m, len(self.x), ROWS_FOR_A_SCALE)
        case = self._sums(Granularity.NONE, Granularity.NONE)
        sums = self._across(case.exact[:rows]), self._across(case.magnitude[:rows])
        return ops.normalized(*sums, rows_of(self.drawn_epilogue, slice(0, rows)))[0]

    def _across(self, sums: Tensor) -> Tensor:
        """Columns of the output, of those of the distinct rows of the weight."""
        return sums if self.columns is None else sums[:, self.columns]

    def _epilogue(self) -> tuple[NormEpilogue]:
        parts: list[Any] = [x.clone() if isinstance(x, Tensor) else x for x in self.drawn_epilogue]
        return (NormEpilogue(*parts),)

    def _make_set(self, order: Tensor) -> tuple[Any, ...]:
        problem = self.problem
        out = empty_output(
            problem.out_format, problem.out_granularity, problem.m, self.columns_out, self.device,
            self.static_scale,
        )  # fmt: skip
        if problem.b is None:
            return self.x[order], out
        a: Any = self.x[order]
        if problem.a.format.is_fp8:
            left = self.quantized("x", problem.a.format, problem.a.granularity)
            a = QuantizedTensor(*self._tiled(left, order), left.granularity)
        if not problem.b.format.is_fp8:
            return a, self._weight().t(), out
        right = self.quantized("w", problem.b.format, problem.b.granularity)
        data, scale = self._tiled(right, self.columns)
        source = self._weight() if problem.prepared else None
        return a, QuantizedTensor(data, scale, right.granularity, True, source), out

    def call_of(self, kernel: Kernel, number: int) -> Callable[[], None]:
        given = *self.sets[number], *self.epilogues[number]
        return functools.partial(kernel.launch, *given, kernel.workspace(*given))

    def outputs(self, operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return written_parts(operands[-1])

    def poison(self) -> None:
        for operands in self.sets:
            poison_output(operands[-1], self.problem.out_format)

    def reference(self, kernel: Kernel) -> Case64:
        """Exact sums of the drawn rows as the kernel sees them, before anything else."""
        if kernel.quantizes:
            return self._sums(kernel.granularity, kernel.b_granularity)
        return self._sums(Granularity.NONE, Granularity.NONE)

    def _sums(self, a_granularity: Granularity, b_granularity: Granularity) -> Case64:
        """Of operands as they are given, or as a kernel quantizes them."""
        a, b = self.problem.a, self.problem.b
        key = (a_granularity, b_granularity)
        if key not in self._references:
            if b is None:
                self._references[key] = Case64(*ops.norm_rows(self.x))
            elif a.format.is_fp8:
                left = self.quantized("x", a.format, a.granularity)
                right = self.quantized("w", b.format, b.granularity)
                self._references[key] = case_of(left, right.t())
            elif a_granularity is not Granularity.NONE:
                fp8 = fp8_format(self.target)
                left = self.quantized("x", fp8, a_granularity)
                right = self.quantized("w", fp8, b_granularity)
                self._references[key] = case_of(left, right.t())
            else:
                assert self.w is not None  # an op with two operands
                self._references[key] = case_of(self.x, self.w.t())
        return self._references[key]

    def _check_set(self, kernel: Kernel, number: int) -> tuple[KernelError, str]:
        out, problem = self.sets[number][-1], self.problem
        (epilogue,) = self.epilogues[number]
        shape = (1, problem.m, self.columns_out)
        checked, rest = pieces_to_check(shape, common.CHECKED_ELEMENTS, seed=number)
        case = self.reference(kernel)
        order = self.order[number].to(self.device)
        maximum = row_p99 = 0.0
        for piece in checked:
            rows = order[piece.rows]
            sums = self._across(case.exact[rows]), self._across(case.magnitude[rows])
            exact, magnitude = ops.normalized(*sums, rows_of(epilogue, piece.rows))
            found = norm_kernel_error(
                rows_of_output(out, piece.rows), exact, magnitude, problem.out_format.unit_roundoff
            )
            maximum, row_p99 = max(maximum, found.maximum), max(row_p99, found.row_p99)
        if rest and self._all_finite():
            wrong = self._unwritten(out, rest)
            if wrong:
                return KernelError(math.inf, math.inf), wrong
        return KernelError(maximum, row_p99), ""

    def _unwritten(self, out: Tensor | QuantizedTensor, rest: list[Piece]) -> str:
        for piece in rest:
            for part in written_parts(out):
                left = part[piece.rows]
                left = left.float() if left.dtype.itemsize == 1 else left
                count = int(torch.isnan(left).sum())
                if count:
                    return (
                        f"{count} outputs or scales of rows from {piece.rows.start} were not "
                        "written or are NaN"
                    )
        return ""


def _refuse(problem: Problem) -> None:
    operands = [problem.a] if problem.b is None else [problem.a, problem.b]
    for operand, usual in zip(operands, (Layout.ROW, Layout.COLUMN), strict=False):
        if operand.layout is not usual:
            raise MeasurementError(
                f"{problem}: a norm is measured of a row-major a and a column-major b"
            )
    if problem.batch != 1 or problem.accumulate:
        raise MeasurementError(f"{problem}: a norm is measured of one product that is not added to")
    if problem.out_strided:
        raise MeasurementError(f"{problem}: outputs of a norm are measured contiguous")
    for operand in operands:
        scaled = operand.granularity is not Granularity.NONE
        if operand.format is Format.FLOAT32 or scaled is not operand.format.is_fp8:
            raise MeasurementError(
                f"{problem}: operands with a norm are measured in bfloat16, and in FP8 with scales"
            )
    quantized = [operand.format.is_fp8 for operand in operands]
    if quantized == [True] or (quantized[0] != quantized[-1] and not problem.prepared):
        raise MeasurementError(
            f"{problem}: with a norm, a is measured quantized only with b, and b alone if prepared"
        )
