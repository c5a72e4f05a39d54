"""Types of lokakern: formats, granularities, problems, devices, budgets, quantized tensors."""

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
    """The contiguous axis of a matrix; none for ``strided``."""

    ROW = "row-major"
    COLUMN = "column-major"
    STRIDED = "strided"


def alignment_of(byte_count: int) -> int:
    """Largest power of two, at most 16, that divides a number of bytes."""
    return min(16, byte_count & -byte_count) if byte_count else 16


@dataclass(frozen=True, slots=True)
class Operand:
    """Format and memory layout of an operand; part of a problem's identity.

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
        """Parse the text of ``str``.

        Raises:
            ValueError: The text is not an operand.
        """
        form, granularity, layout, alignment = text.split("/")
        if alignment not in {"1", "2", "4", "8", "16"}:
            raise ValueError(f"operand alignment is {alignment!r}; expected 1, 2, 4, 8 or 16")
        return cls(Format(form), Granularity(granularity), Layout(layout), int(alignment))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A computation: the key of the database and the argument of ``supports``.

    For ``gemm``, ``scaled_gemm`` and ``gemm_norm``, ``a`` is ``[m, k]`` and ``b`` is ``[k, n]``;
    for other ops ``a`` is ``[m, k]``, there is no ``b``, and n is 1. The batch of a scaled GEMM is
    the number of groups of `Epilogue`; m is rounded up if groups have different numbers of rows.
    For an op with a norm ``epilogue`` is the text of a `NormForm`; for ``norm_backward`` that of
    the forward pass, with the vectors that need a gradient, and "residual" if an FP8 output is also
    needed in bfloat16.
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
        """Least memory traffic in bytes: each operand read once, each output written once."""
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
        """Number of bfloat16 matrices of an epilogue with the size of the output."""
        each = {"residual": 1, "gate": 1, "cross": 2, "residual_last": 1}
        if self.op == "norm_backward":  # which writes dy in bfloat16, and reads none
            each = {"residual": 1} if self.out_format.is_fp8 else {}
        return sum(each.get(word, 0) for word in self.epilogue.split("+"))

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k if self.b is not None else 0

    def __str__(self) -> str:
        """One readable line, without default details of operands."""
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
    """Formats, granularities, accumulation and output format, which determine a kernel's error.

    ``accumulation`` is ``float32``, ``promoted`` (tensor-core sums are added in float32 at least
    every 128 of k), ``fast`` (never promoted) or ``none`` (no sums). With sums that are rounded to
    bfloat16 before the norm it is ``rounded`` (float32) or ``promoted+rounded``. With operands that
    a library quantizes differently it has the library's name: ``fast+torchao``.
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
    """A GPU or CPU type, not an individual device."""

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
    """Software versions and power limit of a measurement; "unknown" if unknown."""

    driver: str = "unknown"
    toolkit: str = "unknown"
    torch: str = "unknown"
    triton: str = "unknown"
    libraries: str = "none"
    power_cap_w: str = "unknown"


@dataclass(frozen=True, slots=True)
class Accepted:
    """A kernel supports the problem."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A kernel does not support the problem, with the reason."""

    reason: str


Support = Accepted | Rejected
ACCEPTED = Accepted()


@dataclass(frozen=True)
class ErrorBudget:
    """The largest accepted error; all given limits must hold.

    Errors are relative to a float64 product of the *unquantized* operands (DESIGN.md, Error
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
        if not self._hash:  # cached, because every warm look-up hashes the budget
            object.__setattr__(self, "_hash", hash(tuple(self.limits.items())))
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return _budget_of, (self.limits,)  # hashes of text differ between processes

    @property
    def limits(self) -> dict[str, float]:
        """The given limits by name."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if f.init)
        return {name: value for name, value in values if value is not None}

    @classmethod
    def of(cls, budget: ErrorBudget | float) -> ErrorBudget:
        """An ErrorBudget; a number is a limit on ``row_err``.

        Raises:
            BudgetError: The argument is neither a valid number nor an ErrorBudget.
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


# The default error of a kernel is the worst on these, see lokakern.workloads.distributions.
REALISTIC_DISTRIBUTIONS = tuple(f"X{i}" for i in (*range(1, 11), 12, 13, 14))
REGIMES = ("graph-cold", "graph-hot", "eager")  # of timings
# Of choices in a model that torch.compile compiles: timed as the default regime of the device, but
# for padding of activations, which the compiler does in the kernels that write them.
COMPILED = "compiled"
# The same in a CUDA graph, where the host makes no call.
COMPILED_GRAPH = "compiled-graph"
CHOICE_REGIMES = (*REGIMES, COMPILED, COMPILED_GRAPH)
COMPILER_PADS = (COMPILED, COMPILED_GRAPH)
