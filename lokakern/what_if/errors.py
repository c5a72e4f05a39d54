"""Errors of products in each format, on every distribution: measured as a sweep does, emulated.

`errors.json` holds the bounds that dispatch would compare with a budget: the largest upper 95 %
limit of three seeds. ``python scripts/measure_what_if.py`` writes it. Nothing there is a row of the
database, because nothing there was timed.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.device import current_device
from lokakern.errors import MeasurementError, UnknownNameError
from lokakern.measure.accuracy import cells_for, measure_cells
from lokakern.problems import make_problem
from lokakern.registry import ops
from lokakern.registry.digests import kernel_digest
from lokakern.registry.register import ANY, Kernel
from lokakern.registry.schema.records import AccuracyRecord
from lokakern.selection.candidates import LIMIT_COLUMNS
from lokakern.selection.dispatcher import OUTSIDE
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    ErrorBudget,
    NormEpilogue,
    QuantizedTensor,
)
from lokakern.what_if.formats import FORMATS, WhatIf
from lokakern.workloads.distributions import DISTRIBUTIONS

FILE = Path(__file__).with_name("errors.json")
N = 512  # of another n >= 256 errors differ by at most 13 % (`selection.candidates.WIDE`)
SUMS = (128, 512, 2048, 8192)  # k
DIGITS = 4  # of a stored bound
EMULATED = "emulated"  # language of kernels that are formats


def _gemm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out: Tensor,
    _bias: None,
    _workspace: tuple[Tensor, ...],
) -> None:
    out.copy_(numerics.dequantize(a) @ numerics.dequantize(b))


def _gemm_norm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out: Tensor,
    epilogue: NormEpilogue,
    _workspace: tuple[Tensor, ...],
) -> None:
    y = numerics.dequantize(a) @ numerics.dequantize(b)
    out.copy_(ops.normalized(y.double(), torch.zeros_like(y, dtype=torch.float64), epilogue)[0])


@functools.cache
def kernel_of(form: WhatIf, op: str = "gemm") -> Kernel:
    """A format as a kernel that is not registered, so that nothing times or chooses it."""
    launches: dict[str, Callable[..., None]] = {"gemm": _gemm, "gemm_norm": _gemm_norm}
    return Kernel(
        name=f"{EMULATED}.{form.name}", op=op, language=EMULATED, modules=(), launch=launches[op],
        architectures=ANY, accumulation="float32", quantized_as=form.quantized_as,
    )  # fmt: skip


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file.

    Attributes:
        format: What it is.
        digest: Of the casts.
        limits: Names of errors.
        sums: Each k.
        errors: By format, distribution and k: a bound for each limit, but for sqnr_db the least.
    """

    format: Literal["lokakern what-if errors 1"]
    digest: str
    limits: list[str]
    sums: list[int]
    errors: dict[str, dict[str, list[list[float]]]]


class Bounds(NamedTuple):
    """Errors of a format.

    Attributes:
        errors: By limit; empty if they are not known.
        worst: The distribution of the largest row_err.
    """

    errors: dict[str, float]
    worst: str

    def why_not(self, budget: ErrorBudget) -> str:
        """Why it is not within a budget; "" if it is."""
        if not self.errors:
            return f"errors are not known: {self.worst}"
        for limit, allowed in budget.limits.items():
            found = self.errors[limit]
            if found < allowed if limit == "sqnr_db" else found > allowed:
                sign = "<" if limit == "sqnr_db" else ">"
                return f"{limit} {found:.4f} {sign} {allowed:g}"
        return ""


@functools.cache
def table() -> Table:
    """The shipped file."""
    return msgspec.json.decode(FILE.read_bytes(), type=Table)


def bounds(form: str, k: int, distributions: Sequence[str] | None = None) -> Bounds:
    """Errors of a format over distributions, by the worse of the measured k on both sides of k.

    Args:
        form: A key of `FORMATS`.
        k: Length of the sums.
        distributions: Names; None means all realistic ones. One that `Probe` found to be like none
            of them is not known.

    Raises:
        UnknownNameError: The errors of a distribution were not emulated.
    """
    held = table()
    by_name = held.errors[form]
    last = len(held.sums) - 1
    below, above = bisect.bisect_right(held.sums, k) - 1, bisect.bisect_left(held.sums, k)
    near = {max(below, 0), min(above, last)}
    worst: Bounds = Bounds({}, "")
    for name in distributions or REALISTIC_DISTRIBUTIONS:
        if name.partition(":")[0] == OUTSIDE:
            return Bounds({}, name)
        if name not in by_name:
            raise UnknownNameError(
                f"errors of formats were not emulated on distribution {name!r}; expected one of "
                f"{', '.join(by_name)}"
            )
        for values in (by_name[name][at] for at in near):
            found = dict(zip(held.limits, values, strict=True))
            if not worst.errors or found["row_err"] > worst.errors["row_err"]:
                worst = worst._replace(worst=name)
            worst = worst._replace(errors=_worse(worst.errors, found))
    return worst


def _worse(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {
        limit: (min if limit == "sqnr_db" else max)(one.get(limit, value), value)
        for limit, value in other.items()
    }


def digest() -> str:
    """Of the casts, and of all that they import."""
    return kernel_digest("what if", ("python:lokakern.what_if.formats",))


def measure(
    forms: Sequence[str] = tuple(FORMATS),
    distributions: Sequence[str] = tuple(DISTRIBUTIONS),
    sums: Sequence[int] = SUMS,
    step: Callable[[str], None] = lambda _text: None,
) -> Table:
    """Emulate products of formats on the CPU, with three seeds.

    Raises:
        MeasurementError: An emulation is wrong.
    """
    kernels = [kernel_of(FORMATS[name]) for name in forms]
    device = current_device("cpu")
    cells = [
        cell
        for kernel in kernels
        for k in sums
        for cell in cells_for([(kernel, make_problem("gemm", (2048, N, k)))], device, distributions)
    ]
    found: dict[tuple[str, str, int], dict[str, float]] = {}

    def keep(place: int, record: AccuracyRecord) -> None:
        cell = cells[place]
        where = f"{cell.kernel.name} k={cell.problem.k} {cell.distribution} seed {cell.seed}"
        if record.status != "ok" or record.errors is None:
            raise MeasurementError(f"{where}: {record.status}: {record.reason}")
        key = (cell.kernel.name.partition(".")[2], cell.distribution, cell.problem.k)
        values = {limit: getattr(record.errors, column) for limit, column in LIMIT_COLUMNS.items()}
        values["sqnr_db"] = -20 * math.log10(values["sqnr_db"])
        found[key] = _worse(found.get(key, {}), values)
        step(where)

    measure_cells(cells, torch.device("cpu"), device, lambda *_: True, keep)
    errors = {
        form: {
            name: [
                [float(f"{value:.{DIGITS}g}") for value in found[form, name, k].values()]
                for k in sums
            ]
            for name in distributions
        }
        for form in forms
    }
    return Table("lokakern what-if errors 1", digest(), list(LIMIT_COLUMNS), list(sums), errors)
