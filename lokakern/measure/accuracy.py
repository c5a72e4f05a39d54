"""The Error contract: each kernel against float64, on every distribution, with three seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.build.empty_operands import empty_matrix, empty_output, launch_arguments
from lokakern.gradients import empty_gradients
from lokakern.measure.norm_errors import SUM_ROUNDOFF, norm_kernel_error
from lokakern.measure.norm_operands import (
    draw_epilogue,
    draw_normal,
    fitting_scale,
    gradients_error,
    half_of,
    parts_of,
    rows_of_output,
    written_parts,
)
from lokakern.measure.operand_cache import OperandKey, Prefetcher
from lokakern.measure.operands import Case64, case_of, poison
from lokakern.measure.tiled_compare import compare_bytes
from lokakern.measure.timing import Contender, faults_of, status_and_reason
from lokakern.problems import accuracy_problem, source_format, sums_over_samples
from lokakern.registry import float16, ops
from lokakern.registry.norm_gradients import norm_gradients
from lokakern.registry.ops import NORM_OPS
from lokakern.registry.register import Kernel, fp8_format
from lokakern.registry.schema.records import AccuracyRecord
from lokakern.triton_interpreter import is_interpreted
from lokakern.types import (
    GROUP,
    REALISTIC_DISTRIBUTIONS,
    Device,
    Epilogue,
    Format,
    Granularity,
    Problem,
    QuantizedTensor,
    Rejected,
    empty_data,
    norm_form,
)

SEEDS = (0, 1, 2)
# Operands have at most so many elements, if that leaves enough rows for the 99th percentile and its
# confidence limit (299): 2048 rows of k = 123200 on 13 distributions with 3 seeds would take an
# hour of one core. Numbers of rows are multiples of 128, which some kernels require of n.
SAMPLED_ELEMENTS = 2**23
FEWEST_ROWS = 384

# An accuracy problem, the granularities of a and b, and the accumulation.
NumericsClass = tuple[Problem, Granularity, Granularity, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kernel's error at one problem, on one distribution with one seed.

    ``stand_ins`` are other kernels of the same numerics class, which can replace it.
    """

    kernel: Kernel
    problem: Problem
    distribution: str
    seed: int
    stand_ins: tuple[Kernel, ...] = ()

    @property
    def members(self) -> tuple[Kernel, ...]:
        return (self.kernel, *self.stand_ins)

    def among(self, members: Sequence[Kernel]) -> Cell:
        """The same error, measured with the first of these kernels."""
        return replace(self, kernel=members[0], stand_ins=tuple(members[1:]))


def numerics_class(kernel: Kernel, problem: Problem, device: Device) -> NumericsClass:
    """What determines a kernel's error at a problem."""
    asked = accuracy_problem(problem, fp8_format(device))
    return asked, kernel.granularity, kernel.b_granularity, kernel.accumulation


def cells_for(
    pairs: Iterable[tuple[Kernel, Problem]],
    device: Device,
    distributions: Sequence[str] = REALISTIC_DISTRIBUTIONS,
    seeds: Sequence[int] = SEEDS,
) -> list[Cell]:
    """The errors that dispatch needs for kernels at problems that they accept.

    All kernels of a numerics class have the same error: the first by name is measured, the others
    are its stand-ins.
    """
    classes: dict[NumericsClass, dict[str, Kernel]] = {}
    for kernel, problem in pairs:
        # A kernel for one epilogue does not compute the problem without it.
        if isinstance(kernel.supports(launched_for_errors(problem, device), device), Rejected):
            continue
        key = numerics_class(kernel, problem, device)
        classes.setdefault(key, {})[kernel.name] = kernel
    cells = []
    for (problem, *_), members in classes.items():
        first, *others = (members[name] for name in sorted(members))
        cells += [
            Cell(first, problem, distribution, seed, tuple(others))
            for distribution in distributions
            for seed in seeds
        ]
    return cells


def launched_for_errors(problem: Problem, device: Device) -> Problem:
    """The problem that kernels of a problem compute where their error is measured.

    It may need other compiled kernels: those for another m, and without a bias.
    """
    asked = accuracy_problem(problem, fp8_format(device))
    if not problem.a.format.is_fp8:
        return asked
    return replace(asked, op=problem.op, a=problem.a, b=problem.b)


def sampled_rows(rows: int, k: int, kernel: Kernel | None = None) -> int:
    """Rows of an operand that are sampled to measure an error, of those a problem has.

    Triton's interpreter gets the fewest: 2048 x 512 x 512 takes it 3.2 s, 384 x 384 x 512 0.8 s.
    """
    if kernel is not None and is_interpreted():
        # Nothing says what a plugin's kernel is written in.
        is_plugin = any(module.startswith("python:") for module in kernel.modules)
        if is_plugin or "triton." in kernel.name:
            return min(rows, FEWEST_ROWS)
    return min(rows, max(FEWEST_ROWS, SAMPLED_ELEMENTS // k // GROUP * GROUP))


class _GroupKey(NamedTuple):
    """The key of cells that are measured on the same operands.

    They are measured in this order, so that a sweep that ends early has every distribution.
    """

    seed: int
    distribution: str
    k: int
    m: int
    n: int  # 0 without a second operand
    sums_over_samples: bool

    @property
    def operands(self) -> list[OperandKey]:
        """X ``[m, k]`` and w ``[n, k]``; their transposes where samples run along k."""
        found = []
        for rows, is_weight in ((self.m, False), (self.n, True)):
            shape = (self.k, rows) if self.sums_over_samples else (rows, self.k)
            if rows:
                found.append(OperandKey(self.distribution, *shape, self.seed, is_weight))
        return found


def measure_cells(
    cells: Sequence[Cell],
    torch_device: torch.device,
    device: Device,
    begin: Callable[[int, bool], bool],
    done: Callable[[int, AccuracyRecord], None],
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Measure cells, grouped by operands, which a thread pool samples a few groups ahead.

    Args:
        cells: Cells to measure.
        torch_device: Where.
        device: The device type there.
        begin: Called with a cell's index and True before its kernel is launched, and with False
            before its group's operands are needed; returns False to stop.
        done: Called with a cell's index and its record.
        alive: Called while the function waits for operands.

    Raises:
        DeviceLostError: The kernel of the last cell left the device unusable.
    """
    groups: dict[_GroupKey, list[int]] = {}
    for place, cell in enumerate(cells):
        problem = cell.problem
        n = 0 if problem.b is None else sampled_rows(problem.n, problem.k, cell.kernel)
        m, along_k = sampled_rows(problem.m, problem.k, cell.kernel), sums_over_samples(problem)
        key = _GroupKey(cell.seed, cell.distribution, problem.k, m, n, along_k)
        groups.setdefault(key, []).append(place)
    ordered = sorted(groups)
    pool = ThreadPoolExecutor(max_workers=max(1, min(torch.get_num_threads(), 16)))
    try:
        operands = Prefetcher(pool, [key.operands for key in ordered], alive)
        for place, key in enumerate(ordered):
            operands.start(place)
            if not begin(groups[key][0], False):
                return
            try:
                (x, digest), *others = map(operands.get, key.operands)
                x, w = x.to(torch_device), None
                for w, other in others:
                    w, digest = w.to(torch_device), f"{digest[:8]}{other[:8]}"
                if key.sums_over_samples:
                    x, w = x.t(), None if w is None else w.t()
                group = _Group(x, w, device, digest)
            except Exception as error:  # mostly memory; another group may fit
                status, reason = status_and_reason(error)
                for cell_place in groups[key]:
                    cell = cells[cell_place]
                    done(cell_place, AccuracyRecord(status=status, reason=reason, seed=cell.seed,
                                                    rows=0))  # fmt: skip
            else:
                for cell_place in groups[key]:
                    if not begin(cell_place, True):
                        return
                    done(cell_place, group.measure(cells[cell_place]))
            operands.free(place)
    finally:
        pool.shutdown(cancel_futures=True)


class _Product(NamedTuple):
    """Operands of a kernel with two, and exact products in float64.

    Attributes:
        given: a and b, quantized if the kernel multiplies quantized operands.
        reference: Exact product of the unquantized operands.
        exact: Exact product of the operands that the kernel multiplies.
        shares: Shares of a that quantizing flushed and saturated.
    """

    given: tuple[Any, Any]
    reference: Case64
    exact: Case64
    shares: tuple[float, float] = (0.0, 0.0)


class _Group:
    """Cells on the same operands: references and exact quantizations are computed once."""

    def __init__(self, x: Tensor, w: Tensor | None, device: Device, digest: str) -> None:
        self.wide_x, self.wide_w, self.device, self.digest = x, w, device, digest
        self._cache: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def x(self, form: Format) -> Tensor:
        return self._once(("x", form), lambda: self.wide_x.to(form.dtype))  # type: ignore[no-any-return]

    def w(self, form: Format, n: int = 0) -> Tensor:
        """The weight ``[n, k]``, with the sampled rows repeated up to at least n rows."""
        assert self.wide_w is not None  # asked for by ops with two operands only
        wide = self.wide_w
        w: Tensor = self._once(("w", form), lambda: wide.to(form.dtype))
        return w if len(w) >= n else w[torch.arange(n, device=w.device) % len(w)]

    def quantized(
        self, which: str, source: Format, form: Format, granularity: Granularity, n: int = 0
    ) -> QuantizedTensor:
        def make() -> QuantizedTensor:
            operand = self.x(source) if which == "x" else self.w(source, n)
            return numerics.quantize(operand, form, granularity)

        return self._once((which, source, form, granularity, n), make)  # type: ignore[no-any-return]

    def product(self, cell: Cell) -> _Product:
        problem, kernel = cell.problem, cell.kernel
        assert problem.b is not None  # an op with two operands
        n = problem.n if problem.op == "gemm_norm" else 0  # norms need all columns
        source = source_format(problem) if problem.a.format.is_fp8 else problem.a.format
        x, w = self.x(source), self.w(source, n)
        given: tuple[Any, Any] = x, w.t()
        reference = self._once(("plain", source, n), lambda: case_of(*given))
        if kernel.granularity is Granularity.NONE and kernel.quantized_as is None:
            return _Product(given, reference, reference)
        forms = (fp8_format(self.device),) * 2
        if problem.a.format.is_fp8:
            forms = (problem.a.format, problem.b.format)
        key: Any = (source, *forms, kernel.granularity, kernel.b_granularity, n)
        if kernel.quantized_as is not None:
            left, right = kernel.quantized_as("x", x), kernel.quantized_as("w", w)
            key = (source, kernel.quantized_as, n)
        else:
            left = self.quantized("x", source, forms[0], kernel.granularity)
            right = self.quantized("w", source, forms[1], kernel.b_granularity, n)
        exact = self._once(key, lambda: case_of(left, right.t()))
        shares = numerics.flushed_and_saturated_shares(x, left)
        return _Product(given if kernel.quantizes else (left, right.t()), reference, exact, shares)

    def measure(self, cell: Cell) -> AccuracyRecord:
        """The record of a cell; an exception of its kernel becomes the status.

        Raises:
            DeviceLostError: Its kernel left the device unusable.
        """
        contender = Contender(cell.kernel.name, ())
        found: list[AccuracyRecord] = []
        with faults_of(contender, self.wide_x.device):
            found.append(self._measure(cell))
        if found:
            return found[0]
        status, reason = contender.status, contender.reason
        return AccuracyRecord(status=status, reason=reason, seed=cell.seed, rows=len(self.wide_x))

    def _measure(self, cell: Cell) -> AccuracyRecord:
        if cell.kernel.op in ("gemm", "scaled_gemm"):
            return self._gemm(cell)
        if cell.kernel.op in NORM_OPS:
            return self._norm(cell)
        if cell.kernel.op == "norm_backward":
            return self._norm_backward(cell)
        return self._dequantize(cell) if cell.kernel.op == "dequantize" else self._quantize(cell)

    def _gemm(self, cell: Cell) -> AccuracyRecord:
        kernel, form, product = cell.kernel, cell.problem.out_format, self.product(cell)
        given, exact = product.given, product.exact.exact
        out_scale: Tensor | None = None
        extra: tuple[Epilogue, ...] = ()
        out = empty_matrix(tuple(exact.shape), form, exact.device)
        poison((out,), form.nan_byte)
        if kernel.op == "scaled_gemm":
            left, right = given
            given = (left.data, left.scale, *right.transpose)
            if form.is_fp8:  # under a scale that fits the outputs, as a static scale should
                largest = exact.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
                out_scale = (largest.clamp_min(1e-30) / form.maximum).float().view(1, 1)
                extra = (Epilogue(out_scale=out_scale),)
        kernel.launch(*launch_arguments(kernel, (*given, out, None), extra))
        error = numerics.kernel_error(out, *product.exact, form.unit_roundoff, out_scale)
        value = out if out_scale is None else out.double() * out_scale
        return self._judged(cell, value, product.reference.exact, error, product.shares)

    def _norm(self, cell: Cell) -> AccuracyRecord:
        """The error after the norm and the rest of the problem's epilogue."""
        problem, kernel = cell.problem, cell.kernel
        half = half_of(problem)
        x = self.x(half)
        form, granularity = problem.out_format, problem.out_granularity
        columns = problem.k if problem.b is None else problem.n
        given_form = norm_form(problem.epilogue)
        epilogue = draw_epilogue(given_form, len(x), columns, x.device, half=half)
        given: tuple[Any, ...] = (x,)
        shares = (0.0, 0.0)
        if problem.b is None:
            exact, size = ops.normalized(*ops.norm_rows(x), epilogue)
            reference = exact
        else:
            given, unquantized, sums, shares = self.product(cell)
            rounding = ops.ROUNDING_TO_FLOAT16 if half is Format.FLOAT16 else 0.0
            exact, size = ops.normalized(sums.exact, sums.magnitude + rounding, epilogue)
            reference = exact
            if sums is not unquantized:
                reference, _ = ops.normalized(*unquantized, epilogue)
        out = empty_output(len(x), columns, form, granularity, x.device)
        poison(written_parts(out), form.nan_byte)
        if isinstance(out, QuantizedTensor):
            assert out.scale is not None  # FP8 has scales
            if granularity is Granularity.TENSOR:
                out.scale.fill_(fitting_scale(epilogue, columns, form, lambda: exact))
        kernel.launch(*launch_arguments(kernel, (*given, out), (epilogue,)))
        value = out if isinstance(out, Tensor) else numerics.dequantize(out, torch.float64)
        rows = torch.ones(len(x), dtype=torch.bool, device=x.device)
        if problem.b is not None and half is Format.FLOAT16:  # some kernels round sums to it
            largest = sums.exact.abs() + SUM_ROUNDOFF * sums.magnitude
            for more in (epilogue.bias, None if epilogue.residual_last else epilogue.residual):
                largest = largest if more is None else largest + more.abs()
            overflows = (largest > half.maximum).any(dim=1)
            rows = value.isfinite().all(dim=1) | ~overflows
        kept = out if bool(rows.all()) else rows_of_output(out, rows)
        error = norm_kernel_error(kept, exact[rows], size[rows], form.unit_roundoff)
        return self._judged(cell, value, reference, error, shares)

    def _norm_backward(self, cell: Cell) -> AccuracyRecord:
        """The error of dy as the next GEMM reads it, for sampled gradients."""
        problem, half = cell.problem, half_of(cell.problem)
        dd = self.x(half)
        epilogue = draw_epilogue(
            norm_form(problem.epilogue), len(dd), problem.k, dd.device, half=half
        )
        y = draw_normal(dd, half=half)
        made = empty_gradients(replace(problem, m=len(dd)), epilogue, dd.device)
        poison(parts_of(made), problem.out_format.nan_byte)
        cell.kernel.launch(*launch_arguments(cell.kernel, (dd, y, made), (epilogue,)))
        exact = norm_gradients(dd, y, epilogue)
        error = gradients_error(made, slice(0, len(dd)), exact.dy, exact.size)
        value, shares = made.dy, (0.0, 0.0)
        if made.quantized is not None:
            value = numerics.dequantize(made.quantized, torch.float64)
            shares = numerics.flushed_and_saturated_shares(exact.dy.float(), made.quantized)
        assert value is not None  # one or the other is written
        return self._judged(cell, value, exact.dy, error, shares)

    def _judged(
        self,
        cell: Cell,
        value: Tensor,
        reference: Tensor,
        error: numerics.KernelError,
        shares: tuple[float, float],
        reason: str = "",
    ) -> AccuracyRecord:
        """The record of a dequantized output; a reason makes it wrong."""
        errors = numerics.measure_errors(value, reference)
        status = "wrong"
        is_right = error.maximum <= (bound := cell.kernel.bound_at(cell.problem))
        if errors.nonfinite_unexpected_count and not reason:
            reason = f"{errors.nonfinite_unexpected_count} outputs are not finite and should be"
            if is_right and float16.is_in(cell.problem):  # no fault of the kernel's
                status, half = "error", Format.FLOAT16
                reason = (
                    f"{errors.nonfinite_unexpected_count} of {value.numel()} outputs overflow "
                    f"{half}, up to {half.maximum:g}"
                )
                if cell.problem.op == "gemm_norm":
                    reason += ", or the sums of their rows do, before the norm"
        elif not is_right and not reason:
            reason = f"kernel_err {error.maximum:.3g} > {bound:g}"
        return AccuracyRecord(
            status=status if reason else "ok",
            reason=reason,
            seed=cell.seed,
            rows=value.shape[0],
            errors=errors,
            kernel_err=error.maximum,
            kernel_err_row_p99=error.row_p99,
            flushed_share=shares[0],
            saturated_share=shares[1],
            operand_digest=self.digest,
        )

    def _quantize(self, cell: Cell) -> AccuracyRecord:
        problem, kernel = cell.problem, cell.kernel
        x = self.x(problem.a.format)
        form, granularity = problem.out_format, kernel.granularity
        expected, made = [], []
        by_power = "power_of_two" in kernel.epilogues
        for source in (x, x.t()) if kernel.op == "quantize_transpose" else (x,):
            if source is x and not by_power:
                exact = self.quantized("x", problem.a.format, form, granularity)
            else:
                exact = numerics.quantize(source, form, granularity, power_of_two_scale=by_power)
            rows, columns = source.shape
            data = empty_data(rows, columns, form.dtype, x.device)
            scale = granularity.empty_scale(rows, columns, x.device)
            poison((data, scale), 0xA5)
            expected.append(exact)
            made.append((data, scale))
        (data, scale), fitting = made[0], expected[0].scale
        if not kernel.epilogues & {"none", "power_of_two"} and fitting is not None:
            scale.copy_(fitting)  # static and delayed scales are inputs
        outputs: list[Tensor | None] = [out for pair in made for out in pair]
        if kernel.op == "quantize_transpose":
            outputs.append(None)  # sums of columns are not quantized
        kernel.launch(x, *outputs, kernel.workspace(x, *outputs))
        reason = "".join(
            compare_bytes(*pair, exact.data, exact.scale)
            for pair, exact in zip(made, expected, strict=True)
        )
        found = QuantizedTensor(data, scale, kernel.granularity)
        value = numerics.dequantize(found, torch.float64)
        error = numerics.KernelError(*[math.inf if reason else 0.0] * 2)
        shares = numerics.flushed_and_saturated_shares(x, found)
        return self._judged(cell, value, x.to(torch.float64), error, shares, reason)

    def _dequantize(self, cell: Cell) -> AccuracyRecord:
        problem, kernel, source = cell.problem, cell.kernel, source_format(cell.problem)
        quantized = self.quantized("x", source, problem.a.format, problem.a.granularity)
        form, shape = problem.out_format, tuple(quantized.data.shape)
        out = empty_matrix(shape, form, self.wide_x.device)
        poison((out,), form.nan_byte)
        given = (quantized.data, quantized.scale, out)
        kernel.launch(*launch_arguments(kernel, given, ()))
        exact = ops.exact(quantized)
        reference = self.x(source).to(torch.float64)
        shares = numerics.flushed_and_saturated_shares(self.x(source), quantized)
        size = torch.zeros_like(exact)
        error = numerics.kernel_error(out, exact, size, form.unit_roundoff)
        return self._judged(cell, out, reference, error, shares)
