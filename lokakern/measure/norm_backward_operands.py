"""Operands of norm_backward: rows, gradients of what a norm made of them, and what comes out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lokakern.errors import MeasurementError
from lokakern.gradients import NormGradients, empty_gradients
from lokakern.measure import operands as common
from lokakern.measure.norm_errors import norm_kernel_error
from lokakern.measure.norm_operands import NormOperands, poison_output, written_parts
from lokakern.measure.operands import Case64
from lokakern.measure.tiled_compare import pieces_to_check
from lokakern.numerics import KernelError, kernel_error
from lokakern.registry.norm_gradients import Gradients64, norm_gradients
from lokakern.registry.register import Kernel
from lokakern.types import (
    GROUP,
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Problem,
    QuantizedTensor,
)

Sections = list[slice]  # of rows


class NormBackwardOperands(NormOperands):
    """Operands of ``norm_backward``, see `Operands`.

    Gradients are drawn from the distribution; what was normalized is normal, a row of its own for
    each drawn row, which repeats with it.
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
        if problem.out_granularity not in (Granularity.NONE, Granularity.GROUP):
            raise MeasurementError(f"{problem}: measured are bfloat16, and 1x128 scales")
        if problem.a.layout is not Layout.ROW or problem.a.format is not Format.BFLOAT16:
            raise MeasurementError(f"{problem}: measured are row-major bfloat16 operands")
        super().__init__(problem, distribution, device, target, cold=cold, seed=seed)

    def _draw_epilogue(self, generator: torch.Generator) -> None:
        super()._draw_epilogue(generator)
        self.drawn_epilogue = self.drawn_epilogue._replace(residual=None, residual_last=False)
        self.y = draw_normal(self.x, self.seed)

    def _make_set(self, order: Tensor) -> tuple[Any, ...]:
        outputs = empty_gradients(self.problem, self.drawn_epilogue, self.device)
        return self.x[order], self.y[order], outputs

    def call_of(self, kernel: Kernel, number: int) -> Callable[[], None]:
        given = *self.sets[number], *self.epilogues[number]
        return functools.partial(kernel.launch, *given, kernel.workspace(*given))

    def outputs(self, operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return parts_of(operands[-1])

    def poison(self) -> None:
        for operands in self.sets:
            poison_gradients(operands[-1])

    def reference(self, kernel: Kernel) -> Case64:
        """Of the drawn rows."""
        exact = norm_gradients(self.x, self.y, self.drawn_epilogue)
        return Case64(exact.dy, exact.size)

    def _check_set(self, kernel: Kernel, number: int) -> tuple[KernelError, str]:
        made: NormGradients = self.sets[number][-1]
        order = self.order[number].to(self.device)
        if "rows" not in self._references:
            self._references["rows"] = self.reference(kernel)
        case = self._references["rows"]
        worst = sums_error(made, self._sums_of(order))
        checked, rest = sections_to_check(self.problem.m, self.problem.k, number)
        for rows in checked:
            found = gradients_error(
                made, rows, case.exact[order[rows]], case.magnitude[order[rows]]
            )
            worst = KernelError(
                max(worst.maximum, found.maximum), max(worst.row_p99, found.row_p99)
            )
        if rest and self._all_finite():
            for rows in rest:
                count = sum(int(x.float().isnan().sum()) for x in pieces_of_gradients(made, rows))
                if count:
                    return KernelError(math.inf, math.inf), (
                        f"{count} outputs or scales of rows from {rows.start} were not written or "
                        "are NaN"
                    )
        return worst, ""

    def _sums_of(self, order: Tensor) -> Gradients64:
        """Exact sums of a set: of the drawn rows, each as often as it is there."""
        counts = torch.bincount(order, minlength=len(self.x)).double()
        return norm_gradients(self.x, self.y, self.drawn_epilogue, counts)


def draw_normal(x: Tensor, seed: int = 0) -> Tensor:
    """What was normalized, of the shape of x: normal around 1, bfloat16."""
    generator = torch.Generator(x.device).manual_seed(1 + seed)
    drawn = torch.randn(x.shape, generator=generator, device=x.device)
    return (1.0 + drawn).to(Format.BFLOAT16.dtype)


def parts_of(made: NormGradients) -> tuple[Tensor, ...]:
    """The tensors of gradients that a launch writes; the first has a row for each of y."""
    matrices = [x for x in made[:3] if x is not None]
    parts = [part for x in matrices for part in written_parts(x)]
    return (*parts, *([] if made.sums is None else [made.sums]))


def poison_gradients(made: NormGradients) -> None:
    """Fill them with NaN, which no kernel leaves there of finite operands."""
    for out in (made.dy, made.quantized, made.quantized_t):
        if out is not None:
            form = Format.BFLOAT16 if isinstance(out, Tensor) else out.format
            poison_output(out, form)
    if made.sums is not None:
        made.sums.fill_(math.nan)


def sections_to_check(m: int, k: int, seed: int) -> tuple[Sections, Sections]:
    """Rows that are compared, and those that are not, in tiles of 128: a scale of the transpose."""
    tiles = -(-m // GROUP)
    checked, rest = pieces_to_check((1, tiles, GROUP * k), common.CHECKED_ELEMENTS, seed)
    return tuple(  # type: ignore[return-value]
        [slice(p.rows.start * GROUP, min(p.rows.stop * GROUP, m)) for p in pieces]
        for pieces in (checked, rest)
    )


def pieces_of_gradients(made: NormGradients, rows: slice) -> list[Tensor]:
    """What of the outputs belongs to rows, which begin with a tile."""
    found = [] if made.dy is None else [made.dy[rows]]
    if made.quantized is not None and made.quantized_t is not None:
        scale, scale_t = made.quantized.scale, made.quantized_t.scale
        assert scale is not None and scale_t is not None  # FP8 has scales
        tiles = slice(rows.start // GROUP, -(-rows.stop // GROUP))
        found += [made.quantized.data[rows], scale[rows]]
        found += [made.quantized_t.data[:, rows], scale_t[:, tiles]]
    return found


def gradients_error(made: NormGradients, rows: slice, exact: Tensor, size: Tensor) -> KernelError:
    """Kernel error of dy in rows, in every form that was written."""
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
    return KernelError(max(x.maximum for x in found), max(x.row_p99 for x in found))


def sums_error(made: NormGradients, exact: Gradients64) -> KernelError:
    """Kernel error of the sums of columns."""
    if made.sums is None:
        return KernelError(0.0, 0.0)
    return kernel_error(made.sums, exact.sums, exact.sums_size, Format.FLOAT32.unit_roundoff)


def launched(
    kernel: Kernel, dd: Tensor, y: Tensor, problem: Problem, epilogue: NormEpilogue
) -> NormGradients:
    """What a kernel makes of operands, poisoned before."""
    made = empty_gradients(problem, epilogue, y.device)
    poison_gradients(made)
    given = (dd, y, made, epilogue)
    kernel.launch(*given, kernel.workspace(*given))
    return made
