"""Operands of ops with a norm, forward and backward, with exact results; `operands_of` any op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lokakern.epilogue import ACTIVATIONS
from lokakern.errors import MeasurementError
from lokakern.gradients import NormGradients
from lokakern.measure import operands as common
from lokakern.measure.norm_errors import norm_kernel_error
from lokakern.measure.operands import Case64, Operands, Pair, worst_of
from lokakern.measure.tiled_compare import Piece, pieces_to_check
from lokakern.norm import static_scale
from lokakern.numerics import KernelError, kernel_error
from lokakern.problems import NORM_VECTORS
from lokakern.registry import float16, ops
from lokakern.registry.norm_gradients import Gradients64, norm_gradients
from lokakern.registry.ops import NORM_OPS
from lokakern.registry.register import Kernel
from lokakern.types import (
    GROUP,
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    NormForm,
    Problem,
    QuantizedTensor,
    norm_form,
)

MATRICES = ("residual", "gate", "x0", "x")  # tensors of an epilogue in the shape of the output
ROWS_FOR_A_SCALE = 2048  # rows whose amax sets the static scale of an unbounded output


def draw_epilogue(
    form: NormForm, rows: int, columns: int, device: torch.device, seed: int = 0,
    half: Format = Format.BFLOAT16,
) -> NormEpilogue:  # fmt: skip
    """Normally distributed tensors of an epilogue; the norm's weight has mean 1.

    Matrices have the format ``half``. Bias and weights are float32, so that their rounding does not
    hide the kernel's error.
    """
    generator = torch.Generator().manual_seed(seed)

    def vector(wanted: bool, mean: float = 0.0, deviation: float = 1.0) -> Tensor | None:
        sampled = torch.randn(columns, generator=generator)  # always, so that the others stay equal
        if not wanted:
            return None
        return (mean + deviation * sampled).to(NORM_VECTORS.dtype).to(device)

    def matrix(wanted: bool, place: int) -> Tensor | None:
        if not wanted:
            return None
        # Large, so sampled on the device.
        there = torch.Generator(device).manual_seed(seed + 1 + place)
        x = torch.randn((rows, columns), generator=there, device=device)
        return x.to(half.dtype)

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


def half_of(problem: Problem) -> Format:
    """Format of the matrices of a problem with a norm: float16 if that is in it, or bfloat16."""
    return Format.FLOAT16 if float16.is_in(problem) else Format.BFLOAT16


def rows_of(epilogue: NormEpilogue, rows: slice) -> NormEpilogue:
    """The epilogue of some rows."""
    given = {name: getattr(epilogue, name) for name in MATRICES}
    return epilogue._replace(**{name: x[rows] for name, x in given.items() if x is not None})


def fitting_scale(
    epilogue: NormEpilogue, columns: int, form: Format, exact: Callable[[], Tensor]
) -> float:
    """The static descale of an FP8 output: the norm's bound, or the amax of ``exact`` outputs."""
    norm, last = epilogue.norm, epilogue.form.last
    if norm.kind != "none" and last in ACTIVATIONS and not epilogue.residual_last:
        return static_scale(norm, columns, form, epilogue.norm_weight, epilogue.norm_bias)
    known = exact().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return max(float(known.abs().max()) / form.maximum, 2.0**-126)


def written_parts(out: Tensor | QuantizedTensor) -> tuple[Tensor, ...]:
    """Tensors of an output that a launch writes; a tensorwise scale is an input."""
    if isinstance(out, Tensor):
        return (out,)
    if out.granularity is Granularity.TENSOR or out.scale is None:
        return (out.data,)
    return (out.data, out.scale)


def rows_of_output(out: Tensor | QuantizedTensor, rows: slice | Tensor) -> Tensor | QuantizedTensor:
    """The output of some rows, given as a slice or as a mask."""
    if isinstance(out, Tensor):
        return out[rows]
    assert out.scale is not None  # an output is quantized, or a tensor
    scale = out.scale if out.granularity is Granularity.TENSOR else out.scale[rows]
    return QuantizedTensor.packed(out.data[rows], scale, out.granularity)


class NormOperands(Operands):
    """Operands of ``gemm_norm`` and ``norm_quantize``, see `Operands`.

    Every set has its own copy of the epilogue's tensors. A norm needs a whole row of outputs:
    where the weight repeats its sampled rows, the exact sums repeat with them.
    """

    def _check_problem(self) -> None:
        problem = self.problem
        operands = [problem.a] if problem.b is None else [problem.a, problem.b]
        quantized = [operand.format.is_fp8 for operand in operands]
        layouts = [operand.layout for operand in operands]
        conditions = {
            "with a row-major a and a column-major b": layouts
            == [Layout.ROW, Layout.COLUMN][: len(layouts)],
            "without batch and accumulation": problem.batch == 1 and not problem.accumulate,
            "with contiguous outputs": not problem.out_strided,
            "with operands in bfloat16 or scaled FP8": all(
                operand.format is not Format.FLOAT32
                and (operand.granularity is not Granularity.NONE) is operand.format.is_fp8
                for operand in operands
            ),
            "with both operands quantized, or a prepared weight": quantized != [True]
            and (quantized[0] == quantized[-1] or problem.prepared),
        }
        for condition, holds in conditions.items():
            if not holds:
                raise MeasurementError(f"{problem}: a norm is measured {condition} only")

    def _draw_epilogue(self, generator: torch.Generator) -> None:
        problem = self.problem
        self.shared_epilogue = draw_epilogue(
            norm_form(problem.epilogue), problem.m, self.columns_out, self.device, self.seed,
            half_of(problem),
        )  # fmt: skip
        self.bias = self.shared_epilogue.bias  # `_all_finite` includes it
        self.static_scale: float | None = None
        if problem.out_format.is_fp8 and problem.out_granularity is Granularity.TENSOR:
            self.static_scale = fitting_scale(
                self.shared_epilogue, self.columns_out, problem.out_format, self._some_outputs
            )

    def _some_outputs(self) -> Tensor:
        """Exact outputs of the first sampled rows."""
        rows = min(self.problem.m, len(self.x), ROWS_FOR_A_SCALE)
        case = self.reference()
        sums = self._across(case.exact[:rows]), self._across(case.magnitude[:rows])
        return ops.normalized(*sums, rows_of(self.shared_epilogue, slice(0, rows)))[0]

    def _across(self, sums: Tensor) -> Tensor:
        """Columns of the output, from those of the weight's distinct rows."""
        return sums if self.columns is None else sums[:, self.columns]

    def _make_set(self, order: Tensor) -> tuple[Any, ...]:
        given = super()._make_set(order)
        if self.static_scale is not None:
            given[-1].scale.fill_(self.static_scale)
        return given

    def outputs(self, operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return written_parts(operands[-1])

    def _exact(self, quantizing: Kernel | None) -> Case64:
        if self.problem.b is None:
            return Case64(*ops.norm_rows(self.x))
        case = super()._exact(quantizing)
        if half_of(self.problem) is Format.FLOAT16:
            return case._replace(magnitude=case.magnitude + ops.ROUNDING_TO_FLOAT16)
        return case

    def _parts(self, number: int, piece: Piece) -> list[Tensor]:
        return [part[piece.rows] for part in self.outputs(self.sets[number])]

    def _comparison(self, kernel: Kernel, number: int) -> Callable[[Piece], KernelError]:
        pair, roundoff = self._pairs(kernel, number), self.problem.out_format.unit_roundoff
        return lambda piece: norm_kernel_error(*pair(piece), roundoff)

    def _pairs(self, kernel: Kernel, number: int) -> Callable[[Piece], Pair]:
        out, (epilogue,) = self.sets[number][-1], self.epilogues[number]
        case, order = self.reference(kernel), self.order[number].to(self.device)

        def pair(piece: Piece) -> Pair:
            rows = order[piece.rows]
            sums = self._across(case.exact[rows]), self._across(case.magnitude[rows])
            exact, magnitude = ops.normalized(*sums, rows_of(epilogue, piece.rows))
            return rows_of_output(out, piece.rows), exact, magnitude

        return pair


class NormBackwardOperands(NormOperands):
    """Operands of ``norm_backward``, see `Operands`.

    Gradients are samples of the distribution. The normalized tensor is normal, with one row for
    each sampled row of gradients.
    """

    def _check_problem(self) -> None:
        problem = self.problem
        if problem.out_granularity not in (Granularity.NONE, Granularity.GROUP):
            raise MeasurementError(
                f"{problem}: measured only with unquantized outputs or FP8 with 1x128 scales"
            )
        if problem.a.layout is not Layout.ROW or problem.a.format is not half_of(problem):
            raise MeasurementError(
                f"{problem}: measured only with row-major operands in bfloat16 or float16"
            )
        super()._check_problem()

    def _draw_epilogue(self, generator: torch.Generator) -> None:
        super()._draw_epilogue(generator)
        self.shared_epilogue = self.shared_epilogue._replace(
            residual=None, residual_last=False, x=None
        )
        self.y = draw_normal(self.x, self.seed, half_of(self.problem))

    def _make_set(self, order: Tensor) -> tuple[Any, ...]:
        given = super()._make_set(order)
        given[1].copy_(self.y[order])
        return given

    def outputs(self, operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return parts_of(operands[-1])

    def _exact(self, quantizing: Kernel | None) -> Case64:
        """Exact gradients of the sampled rows."""
        exact = norm_gradients(self.x, self.y, self.shared_epilogue)
        return Case64(exact.dy, exact.size)

    def _pieces(self, number: int) -> tuple[list[Piece], list[Piece]]:
        """In tiles of 128 rows, the scale groups of the transpose."""
        m, k = self.problem.m, self.problem.k
        shape = (1, -(-m // GROUP), GROUP * k)
        checked, rest = (
            [
                replace(p, rows=slice(p.rows.start * GROUP, min(p.rows.stop * GROUP, m)))
                for p in pieces
            ]
            for pieces in pieces_to_check(shape, common.CHECKED_ELEMENTS, number)
        )
        return checked, rest

    def _parts(self, number: int, piece: Piece) -> list[Tensor]:
        return pieces_of_gradients(self.sets[number][-1], piece.rows)

    def _comparison(self, kernel: Kernel, number: int) -> Callable[[Piece], KernelError]:
        made: NormGradients = self.sets[number][-1]
        case, order = self.reference(kernel), self.order[number].to(self.device)
        sums = sums_error(made, self._sums_of(order))

        def error_of(piece: Piece) -> KernelError:
            rows = order[piece.rows]
            found = gradients_error(made, piece.rows, case.exact[rows], case.magnitude[rows])
            return worst_of(sums, found)

        return error_of

    def _sums_of(self, order: Tensor) -> Gradients64:
        """Exact column sums of a set: each sampled row counts as often as it occurs."""
        counts = torch.bincount(order, minlength=len(self.x)).double()
        return norm_gradients(self.x, self.y, self.shared_epilogue, counts)


def draw_normal(x: Tensor, seed: int = 0, half: Format = Format.BFLOAT16) -> Tensor:
    """A normal tensor with mean 1 in the shape of x: the input of the norm."""
    generator = torch.Generator(x.device).manual_seed(1 + seed)
    sampled = torch.randn(x.shape, generator=generator, device=x.device)
    return (1.0 + sampled).to(half.dtype)


def parts_of(made: NormGradients) -> tuple[Tensor, ...]:
    """Tensors of gradients that a launch writes; the first has the rows of y."""
    matrices = [x for x in made[:3] if x is not None]
    parts = [part for x in matrices for part in written_parts(x)]
    return (*parts, *([] if made.sums is None else [made.sums]))


def pieces_of_gradients(made: NormGradients, rows: slice) -> list[Tensor]:
    """Parts of the outputs that belong to rows; the first row starts a tile."""
    found = [] if made.dy is None else [made.dy[rows]]
    if made.quantized is not None and made.quantized_t is not None:
        scale, scale_t = made.quantized.scale, made.quantized_t.scale
        assert scale is not None and scale_t is not None  # FP8 has scales
        tiles = slice(rows.start // GROUP, -(-rows.stop // GROUP))
        found += [made.quantized.data[rows], scale[rows]]
        found += [made.quantized_t.data[:, rows], scale_t[:, tiles]]
    return found


def gradients_error(made: NormGradients, rows: slice, exact: Tensor, size: Tensor) -> KernelError:
    """Largest kernel error of dy in rows, over all formats that were written."""
    found = []
    pieces = pieces_of_gradients(made, rows)
    if made.dy is not None:
        roundoff = Format.BFLOAT16.unit_roundoff
        found.append(kernel_error(pieces.pop(0), exact, size, roundoff))
    if made.quantized is not None:
        roundoff, granularity = made.quantized.format.unit_roundoff, made.quantized.granularity
        for data, scale, e, s in ((*pieces[:2], exact, size), (*pieces[2:], exact.t(), size.t())):
            piece = QuantizedTensor.packed(data, scale, granularity)
            found.append(norm_kernel_error(piece, e, s, roundoff))
    return worst_of(*found)


def sums_error(made: NormGradients, exact: Gradients64) -> KernelError:
    """Kernel error of the column sums."""
    if made.sums is None:
        return KernelError(0.0, 0.0)
    return kernel_error(made.sums, exact.sums, exact.sums_size, Format.FLOAT32.unit_roundoff)


def operands_of(
    problem: Problem,
    distribution: str,
    device: torch.device,
    target: Device,
    *,
    cold: bool,
    seed: int = 0,
) -> Operands:
    """Operands of a problem of any op; arguments as of `Operands`."""
    kind = {"norm_backward": NormBackwardOperands}.get(
        problem.op, NormOperands if problem.op in NORM_OPS else Operands
    )
    return kind(problem, distribution, device, target, cold=cold, seed=seed)
