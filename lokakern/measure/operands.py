"""Operands of a measurement: many cold copies, with exact references and checks of outputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.build.empty_operands import empty_operands, launch_arguments
from lokakern.device import l2_bytes
from lokakern.errors import MeasurementError
from lokakern.measure.operand_cache import cached_digest, device_operand, operand_plan
from lokakern.measure.tiled_compare import (
    Piece,
    compare_bytes,
    compare_sums,
    pieces_to_check,
    product_of_piece,
)
from lokakern.measure.timing import MOST_CALLED
from lokakern.measure.wrong_elements import Compared, wrong_words
from lokakern.numerics import KernelError
from lokakern.problems import (
    bias_format,
    epilogue_of,
    is_plain,
    scaling_of,
    source_format,
    sums_over_samples,
)
from lokakern.registry import ops
from lokakern.registry.register import Kernel, fp8_format
from lokakern.types import (
    GROUP,
    PLAIN,
    Device,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    QuantizedTensor,
)

CHECKED_ELEMENTS = 2**24  # outputs that are compared after timing; at least one set
CHECKED_SETS = MOST_CALLED  # a tiny problem has a thousand

INCORRECT = KernelError(math.inf, math.inf)
QUANTIZERS = ("quantize", "quantize_transpose")
GIVEN_SCALES = ("static", "delayed")

# Ops whose faults are located elsewhere (bytes of quantizers), or that have several outputs.
UNLOCATED = (*QUANTIZERS, "norm_backward")

Expectation = Callable[[Piece], tuple[Tensor, Tensor]]
# An output, its exact values and their magnitudes.
Pair = tuple[Any, Tensor, Tensor]


class Case64(NamedTuple):
    """Exact product, and product of magnitudes, of the sampled rows, float64."""

    exact: Tensor
    magnitude: Tensor


class Operands:
    """Operand sets on which a problem's candidates are timed.

    Each set has its own copy of every operand, scale and output, so that a replay over all sets
    finds nothing in the cache. The rows of x repeat the sampled rows in a different order in each
    set; where a GEMM sums over samples (gradients of weights), both operands repeat theirs along k
    in the same order. The rows of a weight repeat in one order.

    With ``accumulate``, outputs start as `before`. An FP8 output has a static scale that fits the
    sampled rows. Both are the same in every set.

    Args:
        problem: The problem.
        distribution: Name of the input distribution.
        device: Torch device.
        target: The device type, which determines the FP8 format.
        cold: Whether the sets exceed twice the last-level cache; else there is one set.
        seed: Seed of all random values.

    Raises:
        MeasurementError: The problem is not measurable (strided operands, quantized batches).
        ShapeError: m is 0.
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
        self.problem = problem
        self._check_problem()
        self.seed = seed
        self.device = device
        self.target = target
        self.along_k = sums_over_samples(problem)
        form = problem.a.format
        self.form = source_format(problem) if form.is_fp8 else form
        plan = operand_plan(problem, distribution, seed)
        self.x = device_operand(plan.x, plan.x_rows, self.form, device)
        self.w: Tensor | None = None
        self.digest = cached_digest(plan.x, plan.x_rows, self.form)
        self.columns: Tensor | None = None  # row of w of each output column, where they differ
        if plan.w is not None:
            self.w = device_operand(plan.w, plan.w_rows, self.form, device)
            other = cached_digest(plan.w, plan.w_rows, self.form)
            self.digest = f"{self.digest[:8]}{other[:8]}"
            if not self.along_k and (problem.batch > 1 or problem.n > plan.w_rows):
                self.w, self.columns = _repeated(self.w, problem.batch, problem.n)
        generator = torch.Generator().manual_seed(seed + 1)
        # The amax that delayed scaling updates, by kernel and set.
        self._amax: dict[tuple[str, int], Tensor] = {}
        self._quantized: dict[Any, QuantizedTensor] = {}
        self._references: dict[Any, Case64] = {}
        set_bytes = max(problem.bytes_moved, 1)
        count = math.ceil(2 * l2_bytes() / set_bytes) if cold else 1
        total = problem.batch * (problem.k if self.along_k else problem.m)
        self.bias: Tensor | None = None
        self.shared_epilogue: Any = None  # the same in every set
        self.before: Tensor | None = None
        self.out_scale: Tensor | None = None
        self._draw_epilogue(generator)
        # Rows that share a scale stay together; others have a new order in every set.
        fixed = problem.a.granularity is Granularity.BLOCK
        self.order = [
            torch.arange(total) % plan.x_rows
            if fixed
            else self._random_order(plan.x_rows, total, generator)
            for _ in range(count)
        ]
        self.sets = [self._make_set(order.to(device)) for order in self.order]
        # Arguments of a launcher after its workspace, for each set.
        self.epilogues = [self._epilogue() for _ in self.sets]

    def _check_problem(self) -> None:
        """Raise a `MeasurementError` for a problem without operands here."""
        problem = self.problem
        operands = [problem.a] if problem.b is None else [problem.a, problem.b]
        if any(operand.layout is Layout.STRIDED for operand in operands):
            raise MeasurementError(f"{problem}: operands strided along both axes are not measured")
        if problem.op != "gemm" or problem.prepared:
            if problem.batch != 1 and problem.op != "scaled_gemm":
                raise MeasurementError(
                    f"{problem}: batches are measured with unquantized gemm and scaled_gemm only"
                )
            usual = [Layout.ROW, Layout.COLUMN]
            if problem.prepared or problem.op in QUANTIZERS:  # unquantized a has either layout
                usual[0] = problem.a.layout
            if any(x.layout is not want for x, want in zip(operands, usual, strict=False)):
                raise MeasurementError(
                    f"{problem}: quantized operands are measured with a row-major and b "
                    "column-major"
                )

    def _draw_epilogue(self, generator: torch.Generator) -> None:
        """Sample the tensors of the epilogue, which are the same in every set."""
        problem = self.problem
        if problem.epilogue.startswith("bias"):
            bias = torch.randn(problem.n, generator=generator)
            self.bias = bias.to(bias_format(problem).dtype).to(self.device)
        if problem.accumulate:
            self.before = self._normal(2, Format.FLOAT32)
        if is_plain(problem):
            return
        x0 = x = None
        if problem.epilogue.endswith("cross"):
            x0, x = (self._normal(place, source_format(problem)) for place in (0, 1))
        if problem.out_format.is_fp8:
            self.out_scale = self._fitting_scale()
        self.shared_epilogue = epilogue_of(problem, x0, x, self.out_scale)

    def _normal(self, place: int, form: Format) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(3 * self.seed + place)
        shape = (self.problem.batch * self.problem.m, self.problem.n)
        return torch.randn(shape, generator=generator, device=self.device).to(form.dtype)

    def _fitting_scale(self) -> Tensor:
        """Static descale of an FP8 output, from the amax of the sampled rows' products."""
        exact = self.reference().exact
        largest = float(exact.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())
        scale = largest / self.problem.out_format.maximum if largest else 1.0
        return torch.full((1, 1), scale, dtype=torch.float32, device=self.device)

    def _epilogue(self) -> tuple[Any, ...]:
        """A copy of the epilogue, if launchers take one."""
        if self.shared_epilogue is None:
            return ()
        parts: list[Any] = [x.clone() if isinstance(x, Tensor) else x for x in self.shared_epilogue]
        return (type(self.shared_epilogue)(*parts),)

    @staticmethod
    def _random_order(rows: int, total: int, generator: torch.Generator) -> Tensor:
        pieces = [torch.randperm(rows, generator=generator) for _ in range(-(-total // rows))]
        return torch.cat(pieces)[:total]

    def _source(self, which: str) -> Tensor:
        """The sampled rows ("x") or the weight ("w")."""
        source = self.x if which == "x" else self.w
        assert source is not None  # "w" is asked for by ops with two operands only
        return source

    def quantized(self, which: str, form: Format, granularity: Granularity) -> QuantizedTensor:
        """The sampled rows ("x") or the weight ("w"), exactly quantized."""
        power_of_two = self.problem.op in QUANTIZERS and scaling_of(self.problem) == "power_of_two"
        key = (which, form, granularity)
        if key not in self._quantized:
            self._quantized[key] = numerics.quantize(
                self._source(which), form, granularity, power_of_two_scale=power_of_two
            )
        return self._quantized[key]

    def quantized_by(self, kernel: Kernel, which: str, rows: Tensor) -> QuantizedTensor:
        """Rows of x or w as a quantizing kernel of op gemm has to quantize them."""
        form = fp8_format(self.target)
        granularity = kernel.granularity if which == "x" else kernel.b_granularity
        given = which == "w" and self.problem.prepared
        if kernel.quantized_as is not None and not given:
            return kernel.quantized_as(which, rows)
        if rows is self._source(which):
            return self.quantized(which, form, granularity)
        return numerics.quantize(rows, form, granularity)

    def _write_rows(
        self, which: str, target: Any, operand: Operand, index: Tensor | None = None
    ) -> None:
        """Write rows of "x" or "w" at an index, None for all rows, into an operand of a set.

        The operand is a tensor, a QuantizedTensor, or its data and scales.
        """
        if isinstance(target, Tensor):
            source = self._source(which)
            target.copy_((source if index is None else source[index]).view(target.shape))
            return
        if isinstance(target, QuantizedTensor):
            if target.source is not None:
                self._write_rows(which, target.source, operand, index)
            target = target.data, target.scale
        quantized = self.quantized(which, operand.format, operand.granularity)
        assert quantized.scale is not None  # made by `quantized`
        if index is None:
            index = torch.arange(len(quantized.data), device=self.device)
        data, scale = target
        data.view(torch.uint8).copy_(quantized.data.view(torch.uint8)[index])
        match operand.granularity:
            case Granularity.TENSOR:
                scale.copy_(quantized.scale)
            case Granularity.BLOCK:
                scale.copy_(quantized.scale[index[::GROUP] // GROUP])
            case _:
                scale.copy_(quantized.scale[index])

    def _make_set(self, order: Tensor) -> tuple[Any, ...]:
        """Arguments of one launch; see `Kernel` for their order."""
        problem = self.problem
        given = empty_operands(problem, self.device)
        if self.along_k:
            assert problem.b is not None  # an op with two operands
            self._write_rows("x", given[0].mT, problem.a, order)
            self._write_rows("w", given[1], problem.b, order)
        elif problem.op == "scaled_gemm":
            assert problem.b is not None  # an op with two operands
            self._write_rows("x", given[:2], problem.a, order)
            self._write_rows("w", (given[2].t(), given[3].t()), problem.b, self.columns)
        else:
            left = given[:2] if problem.op == "dequantize" else given[0]
            self._write_rows("x", left, problem.a, order)
            if problem.b is not None:
                right = given[1].mT if isinstance(given[1], Tensor) else given[1]
                self._write_rows("w", right, problem.b, self.columns)
        if problem.op in QUANTIZERS and scaling_of(problem) in GIVEN_SCALES:
            # One that fits, as static scales should.
            fitting = self.quantized("x", problem.out_format, problem.out_granularity).scale
            given[2].copy_(fitting)
        if self.before is not None:
            given[4].copy_(self.before)
        if self.bias is not None and problem.op in ("gemm", "scaled_gemm"):
            given[-1].copy_(self.bias)
        return given

    def call_of(self, kernel: Kernel, number: int) -> Callable[[], None]:
        """A launch on one set, with a workspace of its own."""
        given = self.sets[number]
        arguments = launch_arguments(kernel, given, self.epilogues[number])
        if self.problem.epilogue == "delayed":
            self._amax[kernel.name, number] = arguments[len(given)][0]
        return functools.partial(kernel.launch, *arguments)

    def outputs(self, operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Tensors that a launch writes."""
        if self.problem.op in QUANTIZERS:
            given = scaling_of(self.problem) in GIVEN_SCALES
            outputs = operands[1], *operands[3 if given else 2 :]
            return tuple(out for out in outputs if out is not None)
        return (operands[2],) if self.problem.op in ("gemm", "dequantize") else (operands[4],)

    def fingerprint(self) -> list[int]:
        """Byte sums of the inputs of the first and the last set, which kernels must not change."""
        sums = []
        for number in (0, -1):
            operands = self.sets[number]
            written = {id(out) for out in self.outputs(operands)}
            extra = [x for epilogue in self.epilogues[number] for x in epilogue]
            for operand in (*operands, *extra):
                parts = [operand]
                if isinstance(operand, QuantizedTensor):
                    parts = [operand.data, operand.scale, operand.source]
                sums += [_byte_sum(x) for x in parts
                         if isinstance(x, Tensor) and id(x) not in written]  # fmt: skip
        return sums

    def poison(self) -> None:
        """Fill outputs with values that no kernel may leave; reset accumulators and amax."""
        for amax in self._amax.values():
            amax.zero_()
        for operands in self.sets:
            for out in self.outputs(operands):
                if self.before is not None:
                    out.copy_(self.before)
                else:  # quantizers may also write NaN
                    nan = self.problem.out_format.nan_byte
                    poison((out,), 0xA5 if self.problem.op in QUANTIZERS else nan)

    def reference(self, kernel: Kernel | None = None) -> Case64:
        """Exact result of the sampled rows as a kernel reads them, before bias and epilogue.

        Without a kernel that quantizes, of the operands that are given. Outputs repeat it, so its
        size is bounded by the number of sampled rows.
        """
        key: Any = None
        if kernel is not None and kernel.quantizes:
            key = (kernel.granularity, kernel.b_granularity, kernel.quantized_as)
        if key not in self._references:
            self._references[key] = self._exact(kernel if key else None)
        return self._references[key]

    def _exact(self, quantizing: Kernel | None) -> Case64:
        a, b = self.problem.a, self.problem.b
        if b is None:
            exact = ops.exact(self.quantized("x", a.format, a.granularity))
            return Case64(exact, torch.zeros_like(exact))
        assert self.w is not None  # an op with two operands
        if a.format.is_fp8:
            left = self.quantized("x", a.format, a.granularity)
            right = self.quantized("w", b.format, b.granularity)
        elif quantizing is not None:
            left = self.quantized_by(quantizing, "x", self.x)
            right = self.quantized_by(quantizing, "w", self.w)
        else:
            return case_of(self.x, self.w.t())
        return case_of(left, right.t())

    def _expectation(self, kernel: Kernel, number: int) -> Expectation:
        """A function of a piece of a set's output to its exact values and magnitudes."""
        problem = self.problem
        if self.along_k:
            # Sets sum over different samples, so that the reference is computed for each.
            a, b = self.sets[number][:2]
            if kernel.quantizes:
                a = self.quantized_by(kernel, "x", a)
                b = self.quantized_by(kernel, "w", b.t()).t()
            return functools.partial(product_of_piece, a, b)
        case = self.reference(kernel)
        rows = self.order[number].to(self.device).view(problem.batch, -1)

        def gather(piece: Piece) -> tuple[Tensor, Tensor]:
            index: Any = rows[piece.batch, piece.rows]
            if self.columns is not None:
                across = self.columns.view(problem.batch, problem.n)[piece.batch]
                index = (index[:, :, None], across[:, None, :])
            return case.exact[index].flatten(0, 1), case.magnitude[index].flatten(0, 1)

        return gather

    def check(self, kernel: Kernel) -> tuple[KernelError, str]:
        """Largest kernel error over the outputs, and the reason why they are incorrect, or "".

        Of an output larger than CHECKED_ELEMENTS the first, the last and random pieces are
        compared; the others are only searched for elements that were not written. ``row_p99`` is
        the largest over the pieces.
        """
        worst = KernelError(0.0, 0.0)
        checked = 0
        for number, operands in enumerate(self.sets[:CHECKED_SETS]):
            if checked and checked >= CHECKED_ELEMENTS:
                break
            checked += self.outputs(operands)[0].numel()
            if self.problem.op in QUANTIZERS:
                wrong = self._check_bytes(operands, self.order[number].to(self.device))
                wrong = wrong or self._check_amax(kernel, number)
                if wrong:
                    return INCORRECT, wrong
                continue
            found, unwritten = self._check_set(kernel, number)
            worst = worst_of(worst, found)
            if unwritten:
                return INCORRECT, unwritten
        bound = kernel.bound_at(self.problem)
        if worst.maximum > bound:
            return worst, f"kernel_err {worst.maximum:.3g} > {bound:g}"
        return worst, ""

    def _check_set(self, kernel: Kernel, number: int) -> tuple[KernelError, str]:
        checked, rest = self._pieces(number)
        error_of = self._comparison(kernel, number)
        worst = worst_of(*map(error_of, checked))
        if rest and self._all_finite():  # then all float64 sums are finite, too
            for piece in rest:
                count = sum(map(nan_count, self._parts(number, piece)))
                if count:
                    return INCORRECT, (
                        f"{count} outputs of batch {piece.batch.start}, rows from "
                        f"{piece.rows.start}, were not written or are NaN"
                    )
        return worst, ""

    @property
    def columns_out(self) -> int:
        """Columns of the output."""
        return self.problem.k if self.problem.b is None else self.problem.n

    def _pieces(self, number: int) -> tuple[list[Piece], list[Piece]]:
        """Pieces of a set's output to compare, and the others."""
        shape = (self.problem.batch, self.problem.m, self.columns_out)
        return pieces_to_check(shape, CHECKED_ELEMENTS, seed=number)

    def _parts(self, number: int, piece: Piece) -> list[Tensor]:
        """Tensors that a launch writes in one piece of a set's output."""
        (out,) = self.outputs(self.sets[number])
        return [piece.of(out if out.dim() == 3 else self._by_group(out))]

    def _comparison(self, kernel: Kernel, number: int) -> Callable[[Piece], KernelError]:
        """A function of a piece of a set's output to its kernel error."""
        pair = self._pairs(kernel, number)
        roundoff = self.problem.out_format.unit_roundoff
        return lambda piece: numerics.kernel_error(*pair(piece), roundoff, self.out_scale)

    def _pairs(self, kernel: Kernel, number: int) -> Callable[[Piece], Pair]:
        """A function of a piece of a set's output to it, its exact values and magnitudes."""
        expected = self._expectation(kernel, number)

        def pair(piece: Piece) -> Pair:
            (out,) = self._parts(number, piece)
            return out.flatten(0, 1), *self._finished(*expected(piece), number, piece)

        return pair

    def wrong_elements(self, kernel: Kernel) -> str:
        """Where outputs are wrong, in words; "" if none is, or of an op without one output."""
        if self.problem.op in UNLOCATED:
            return ""
        for number in range(min(len(self.sets), CHECKED_SETS)):
            pair = self._pairs(kernel, number)
            for pieces in self._pieces(number)[0]:
                for batch in range(pieces.batch.start, pieces.batch.stop):
                    piece = replace(pieces, batch=slice(batch, batch + 1))
                    compared = self._dequantized(*pair(piece))
                    bound = kernel.bound_at(self.problem)
                    words = wrong_words(compared, bound, piece.rows.start)
                    if words:
                        return f"in batch {batch} {words}" if self.problem.batch > 1 else words
        return ""

    def _dequantized(self, out: Any, exact: Tensor, magnitude: Tensor) -> Compared:
        form, scale = self.problem.out_format, 1.0
        if isinstance(out, QuantizedTensor):
            assert out.scale is not None  # FP8 has scales
            found, scale = numerics.dequantize(out, torch.float64), float(out.scale.max())
        else:
            found = out.double()
            if self.out_scale is not None:  # saturates
                scale = float(self.out_scale)
                found, exact = (
                    found * scale,
                    exact.clamp(-form.maximum * scale, form.maximum * scale),
                )
        smallest = torch.finfo(form.dtype).smallest_normal * form.unit_roundoff * 2 * scale
        slack = 2.0**-13 * magnitude.nan_to_num(posinf=0.0) + smallest
        return Compared(found, exact, slack, form.unit_roundoff)

    def _by_group(self, x: Tensor) -> Tensor:
        """Rows ``[batch * m, n]`` as ``[batch, m, n]``."""
        strides = (x.stride(0), x.stride(1))
        shape = (self.problem.batch, self.problem.m, x.shape[1])
        return x.as_strided(shape, (self.problem.m * strides[0], *strides))

    def _finished(
        self, exact: Tensor, magnitude: Tensor, number: int, piece: Piece
    ) -> tuple[Tensor, Tensor]:
        """The exact epilogue of one piece of a set's output."""
        epilogue = self.epilogues[number][0] if self.epilogues[number] else PLAIN
        before = self.before
        if epilogue.x0 is not None and epilogue.x is not None:
            x0, x = (piece.of(self._by_group(y)).flatten(0, 1) for y in (epilogue.x0, epilogue.x))
            epilogue = epilogue._replace(x0=x0, x=x)
        if before is not None:
            before = piece.of(self._by_group(before)).flatten(0, 1)
        return ops.finished(exact, magnitude, self.bias, epilogue, before)

    def _all_finite(self) -> bool:
        given = [x for x in (self.x, self.w, self.bias) if x is not None]
        return all(bool(torch.isfinite(x).all()) for x in given)

    def _check_bytes(self, operands: tuple[Any, ...], index: Tensor) -> str:
        x, data, scale, *turned = operands
        granularity = self.problem.out_granularity
        power_of_two = scaling_of(self.problem) == "power_of_two"
        exact = functools.partial(
            numerics.quantize, out_format=self.problem.out_format, granularity=granularity,
            power_of_two_scale=power_of_two,
        )  # fmt: skip
        if turned:
            expected = exact(x.t())
            data_t, scale_t, sums = turned
            wrong = compare_bytes(data_t, scale_t, expected.data, expected.scale)
            if wrong:
                return f"transposed: {wrong}"
            wrong = "" if sums is None else compare_sums(sums, x)
            if wrong:
                return wrong
        if granularity is Granularity.BLOCK:  # rows share scales: quantize them in their order
            expected = exact(x)
            exact_data, exact_scale = expected.data, expected.scale
        else:
            expected = self.quantized("x", self.problem.out_format, granularity)
            exact_data = expected.data.view(torch.uint8)[index]
            assert expected.scale is not None  # made by `quantized`
            per_row = granularity is not Granularity.TENSOR
            exact_scale = expected.scale[index] if per_row else expected.scale
        return compare_bytes(data, scale, exact_data, exact_scale)

    def _check_amax(self, kernel: Kernel, number: int) -> str:
        if self.problem.epilogue != "delayed":
            return ""
        found = float(self._amax[kernel.name, number])
        x = self.x.float()  # every set holds all of its rows
        exact = float(torch.where(torch.isfinite(x), x.abs(), 0.0).amax())
        return "" if found == exact else f"amax is {found}, not {exact}"


def worst_of(*errors: KernelError) -> KernelError:
    return KernelError(max(e.maximum for e in errors), max(e.row_p99 for e in errors))


def poison(parts: Iterable[Tensor], byte: int) -> None:
    """Fill outputs with NaN, FP8 and its scales in one byte with a given byte."""
    for part in parts:
        if part.dtype.itemsize == 1:
            part.view(torch.uint8).fill_(byte)
        else:
            part.fill_(math.nan)


def nan_count(x: Tensor) -> int:
    return int((x.float() if x.dtype.itemsize == 1 else x).isnan().sum())


def case_of(left: Any, right: Any) -> Case64:
    return Case64(ops.product(left, right), ops.magnitude(left, right))


def _byte_sum(x: Tensor) -> int:
    whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    return int(whole.sum(dtype=torch.int64))


def _repeated(w: Tensor, batch: int, n: int) -> tuple[Tensor, Tensor]:
    """Distinct rows of a weight with more rows than were sampled, and the index of each row.

    A scale covers up to 128 rows, so the rows after the last whole block are appended as distinct
    rows: then quantizing the distinct rows quantizes the weight.
    """
    index = torch.arange(batch * n, device=w.device) % len(w)
    rest = batch * n % GROUP
    if rest:
        w = torch.cat([w, w[index[-rest:]]])
        index[-rest:] = torch.arange(len(w) - rest, len(w), device=w.device)
    return w, index
