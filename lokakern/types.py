"""The nouns of lokakern: formats, granularities, problems, devices, budgets, quantized tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum

from lokakern.epilogue import EPILOGUES as EPILOGUES
from lokakern.epilogue import PLAIN as PLAIN
from lokakern.epilogue import Epilogue as Epilogue
from lokakern.epilogue import NormEpilogue as NormEpilogue
from lokakern.epilogue import NormForm as NormForm
from lokakern.epilogue import norm_form as norm_form
from lokakern.errors import BudgetError
from lokakern.formats import GROUP as GROUP
from lokakern.formats import Format as Format
from lokakern.formats import Granularity as Granularity
from lokakern.quantized_tensor import QuantizedTensor as QuantizedTensor
from lokakern.quantized_tensor import empty_data as empty_data


class Layout(StrEnum):
    """Which axis of a matrix is contiguous; neither, for ``strided``."""

    ROW = "row-major"
    COLUMN = "column-major"
    STRIDED = "strided"


def alignment_of(byte_count: int) -> int:
    """Largest power of two, at most 16, that divides a number of bytes."""
    return min(16, byte_count & -byte_count) if byte_count else 16


@dataclass(frozen=True, slots=True)
class Operand:
    """How one operand lies in memory; part of a problem's identity.

    ``alignment`` is the largest power of two, at most 16, dividing the address and the stride
    of the outer axis, in bytes.
    """

    format: Format
    granularity: Granularity = Granularity.NONE
    layout: Layout = Layout.ROW
    alignment: int = 16

    def __str__(self) -> str:
        return f"{self.format}/{self.granularity}/{self.layout}/{self.alignment}"

    @classmethod
    def parse(cls, text: str) -> Operand:
        """Read what ``str`` wrote.

        Raises:
            ValueError: The text is not an operand.
        """
        form, granularity, layout, alignment = text.split("/")
        if alignment not in {"1", "2", "4", "8", "16"}:
            raise ValueError(f"operand alignment is {alignment!r}; expected 1, 2, 4, 8 or 16")
        return cls(Format(form), Granularity(granularity), Layout(layout), int(alignment))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be computed: the key of the database and the argument of ``supports``.

    For ``gemm``, ``scaled_gemm`` and ``gemm_norm``, ``a`` is ``[m, k]`` and ``b`` is ``[k, n]``;
    for the other ops ``a`` is ``[m, k]``, there is no ``b``, and n is 1. A batch of scaled GEMMs
    are the groups of `Epilogue`; m is rounded up where they have different numbers of rows. What
    ``epilogue`` says of an op with a norm is the text of a `NormForm`; of ``norm_backward`` it says
    what was done, whose bias, norm's weight and norm's bias want a gradient, and with a residual
    that an output in FP8 is wanted in bfloat16, too.
    """

    op: str
    m: int
    n: int
    k: int
    batch: int = 1
    a: Operand
    b: Operand | None = None
    prepared: bool = False
    epilogue: str = "none"
    out_format: Format = Format.BFLOAT16
    out_granularity: Granularity = Granularity.NONE
    out_strided: bool = False
    accumulate: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.m, self.n, self.k) if self.b is not None else (self.m, self.k)

    @property
    def bytes_moved(self) -> int:
        """Least traffic to memory: every operand read once, every output written once, in bytes."""
        total = self.m * self.k * self.a.format.dtype.itemsize
        total += _scale_bytes(self.a.granularity, self.m, self.k)
        if self.b is not None:
            total += self.n * self.k * self.b.format.dtype.itemsize
            total += _scale_bytes(self.b.granularity, self.n, self.k)
            out = self.m * self.n * self.out_format.dtype.itemsize
            total += 2 * out if self.accumulate else out
            if self.op == "gemm_norm":
                total += _scale_bytes(self.out_granularity, self.m, self.n)
        else:
            total += self.m * self.k * self.out_format.dtype.itemsize
            total += _scale_bytes(self.out_granularity, self.m, self.k)
        columns = self.k if self.b is None else self.n
        total += self._matrices_beside * self.m * columns * Format.BFLOAT16.dtype.itemsize
        if self.op == "norm_backward":
            total += self.m * self.k * self.a.format.dtype.itemsize
            words = self.epilogue.split("+")
            total += (("bias" in words) + 2 * ("affine" in words)) * self.k * 4
        if self.op == "quantize_transpose" or (
            self.op == "norm_backward" and self.out_format.is_fp8
        ):
            total += self.m * self.k * self.out_format.dtype.itemsize
            total += _scale_bytes(self.out_granularity, self.k, self.m)
            if self.epilogue.endswith("column_sums"):
                total += self.k * Format.FLOAT32.dtype.itemsize
        return total * self.batch

    @property
    def _matrices_beside(self) -> int:
        """How many matrices as large as the output go with an epilogue, bfloat16."""
        each = {"residual": 1, "gate": 1, "cross": 2, "residual_last": 1}
        if self.op == "norm_backward":  # which writes that of the first, and reads none
            each = {"residual": 1} if self.out_format.is_fp8 else {}
        return sum(each.get(word, 0) for word in self.epilogue.split("+"))

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k if self.b is not None else 0

    def __str__(self) -> str:
        """One line a person can read; operand details only where they are not the default."""
        words = [self.op]
        axes = ("m", "n", "k") if self.b is not None else ("m", "k")
        words += [f"{axis}={size}" for axis, size in zip(axes, self.shape, strict=True)]
        if self.batch != 1:
            words.append(f"batch={self.batch}")
        words.append(_operand_words("a", self.a, Layout.ROW))
        if self.b is not None:
            words.append(_operand_words("b", self.b, Layout.COLUMN))
        if self.prepared:
            words.append("prepared")
        if self.epilogue != "none":
            words.append(self.epilogue)
        out = self.out_format.value
        if self.out_granularity is not Granularity.NONE:
            out += f"/{self.out_granularity.value}"
        if self.out_strided:
            out += "/strided"
        words.append(f"{'accumulate' if self.accumulate else 'out'}={out}")
        return " ".join(words)


def _operand_words(name: str, operand: Operand, usual: Layout) -> str:
    text = f"{name}={operand.format.value}"
    if operand.granularity is not Granularity.NONE:
        text += f"/{operand.granularity.value}"
    if operand.layout is not usual:
        text += f"/{operand.layout.value}"
    if operand.alignment != 16:
        text += f"/align{operand.alignment}"
    return text


def _scale_bytes(granularity: Granularity, rows: int, columns: int) -> int:
    if granularity is Granularity.NONE:
        return 0
    return granularity.scale_dtype.itemsize * math.prod(granularity.scale_shape(rows, columns))


@dataclass(frozen=True, slots=True)
class NumericsClass:
    """Formats x granularity x accumulation x output: what decides the error of a kernel.

    ``accumulation`` is ``float32``, ``promoted`` (tensor-core sums added up in float32 at least
    every 128 of k), ``fast`` (never promoted) or ``none`` (nothing is summed). Of sums that are
    rounded to bfloat16 before they are normalized: ``rounded`` for float32, ``promoted+rounded``.
    Of operands that a library quantized in its own way, its name: ``fast+torchao``.
    """

    a_format: Format
    a_granularity: Granularity
    b_format: Format
    b_granularity: Granularity
    accumulation: str
    out_format: Format

    def __str__(self) -> str:
        a = f"{self.a_format}/{self.a_granularity}"
        b = f"{self.b_format}/{self.b_granularity}"
        return f"{a} x {b} -> {self.out_format}, {self.accumulation}"


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU (or CPU) *type*, never one specimen."""

    vendor: str
    product: str
    architecture: str
    compute_units: int
    memory_gib: int
    partition: str = "none"

    @property
    def is_gpu(self) -> bool:
        return self.vendor in {"nvidia", "amd"}

    def __str__(self) -> str:
        return self.product


@dataclass(frozen=True, slots=True)
class Environment:
    """The software and power limit a measurement was made under; unknown is "unknown"."""

    driver: str = "unknown"
    toolkit: str = "unknown"
    torch: str = "unknown"
    triton: str = "unknown"
    libraries: str = "none"
    power_cap_w: str = "unknown"


@dataclass(frozen=True, slots=True)
class Accepted:
    """A kernel takes the problem."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A kernel does not take the problem, and why."""

    reason: str


Support = Accepted | Rejected
ACCEPTED = Accepted()


@dataclass(frozen=True)
class ErrorBudget:
    """The largest error a caller accepts; every limit given must hold.

    All are measured against a float64 product of the *unquantized* operands (DESIGN.md, Error
    contract). ``row_err``: root mean square over rows of ``min(e, 1)``, e a row's relative L2
    error. ``row_p99``: 99th percentile of e. ``rel_err``: relative L2 error of the whole output.
    ``sqnr_db``: *least* accepted signal to quantization noise, dB. ``mean_rel_err``: mean of
    ``|out - ref| / |ref|``. ``mean_shift``: ``|mean(out - ref)| / rms(ref)``.

    Raises:
        BudgetError: A limit is negative, NaN or infinite, or no limit is given.
    """

    row_err: float | None = None
    row_p99: float | None = None
    rel_err: float | None = None
    sqnr_db: float | None = None
    mean_rel_err: float | None = None
    mean_shift: float | None = None
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        given = self.limits
        if not given:
            names = ", ".join(f.name for f in fields(self) if f.init)
            raise BudgetError(f"ErrorBudget() has no limit; give at least one of {names}")
        for name, value in given.items():
            usable = isinstance(value, (int, float)) and math.isfinite(value)
            if not usable or (value < 0 and name != "sqnr_db"):
                raise BudgetError(
                    f"budget {name} is {value!r}; expected a finite number, zero or larger "
                    "(0.06 admits E4M3 GEMMs, None means the unquantized kernel)"
                )

    def __hash__(self) -> int:
        if not self._hash:  # computed once: a budget is part of every warm look-up
            object.__setattr__(self, "_hash", hash(tuple(self.limits.items())))
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return _budget_of, (self.limits,)  # a hash of text differs between processes

    @property
    def limits(self) -> dict[str, float]:
        """The limits that were given, by name."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if f.init)
        return {name: value for name, value in values if value is not None}

    @classmethod
    def of(cls, budget: ErrorBudget | float) -> ErrorBudget:
        """A bare number is a limit on ``row_err``.

        Raises:
            BudgetError: Neither a number nor an ErrorBudget, or not usable as one.
        """
        if isinstance(budget, ErrorBudget):
            return budget
        if isinstance(budget, bool) or not isinstance(budget, (int, float)):
            raise BudgetError(
                f"budget is {budget!r}; expected a number (a limit on row_err) or an ErrorBudget"
            )
        return cls(row_err=float(budget))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.limits.items())


def _budget_of(limits: dict[str, float]) -> ErrorBudget:
    return ErrorBudget(**limits)


# The default error of a kernel is its worst over these; recipes in
# lokakern.workloads.distributions.
REALISTIC_DISTRIBUTIONS = tuple(f"X{i}" for i in (*range(1, 11), 12, 13, 14))
REGIMES = ("graph-cold", "graph-hot", "eager")
