"""The nouns of lokakern: formats, granularities, problems, devices, budgets, quantized tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from lokakern.errors import BudgetError, DeviceError, FormatError, ShapeError
from lokakern.formats import GROUP as GROUP
from lokakern.formats import Format as Format
from lokakern.formats import Granularity as Granularity

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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

    For ``gemm`` and ``scaled_gemm``, ``a`` is ``[m, k]`` and ``b`` is ``[k, n]``; for ``quantize``
    and ``dequantize``, ``a`` is ``[m, k]``, there is no ``b``, and n is 1.
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
            total += self.m * self.n * self.out_format.dtype.itemsize
        else:
            total += self.m * self.k * self.out_format.dtype.itemsize
            total += _scale_bytes(self.out_granularity, self.m, self.k)
        return total * self.batch

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
        words.append(f"out={out}")
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
    return 4 * math.prod(granularity.scale_shape(rows, columns))


@dataclass(frozen=True, slots=True)
class NumericsClass:
    """Formats x granularity x accumulation x output: what decides the error of a kernel.

    ``accumulation`` is ``float32``, ``promoted`` (tensor-core sums added up in float32 at least
    every 128 of k), ``fast`` (never promoted) or ``none`` (nothing is summed).
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


_SIGNATURES: dict[object, object] = {}
_MOST_SIGNATURES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """FP8 elements with their decode scales: ``x ~ data * scale``.

    Attributes:
        data: ``[rows, columns]``, an FP8 dtype, row-major; ``columns`` is the reduction axis.
            A prepared weight for which FP8 never pays holds bfloat16 or float32 and no scale.
        scale: float32, ``granularity.scale_shape(rows, columns)``; None without granularity.
        granularity: What one scale covers.
        transposed: The tensor stands for ``[columns, rows]``, as a GEMM's right operand does.
        source: The unquantized weight a prepared weight came from, ``[rows, columns]``, held by
            reference so that the unquantized kernel stays legal. None otherwise.
        budget: What a prepared weight was prepared for; the default budget of `gemm` on it.
        signature: One object for all tensors that agree in everything that decides the kernel:
            what a warm call looks up, without hashing it all again.
        transpose: Views of data and scale the other way round, as a GEMM takes its right operand;
            made once, because a view costs 0.75 us of host time.
    """

    data: Tensor
    scale: Tensor | None
    granularity: Granularity
    transposed: bool = False
    source: Tensor | None = None
    budget: ErrorBudget | None = None
    signature: object = field(init=False, repr=False)
    transpose: tuple[Tensor, Tensor | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.data.dim() != 2:
            raise ShapeError(
                f"QuantizedTensor: data is {list(self.data.shape)}; expected two dimensions"
            )
        scale = None if self.scale is None else self.scale.t()
        object.__setattr__(self, "transpose", (self.data.t(), scale))
        row_bytes = self.data.stride(0) * self.data.element_size()
        facts = (
            self.data.dtype,
            self.granularity,
            self.data.shape,
            self.data.device,
            self.transposed,
            (self.data.data_ptr() | row_bytes) & 15,
            None if self.source is None else self.source.dtype,
            self.budget,
        )
        if len(_SIGNATURES) >= _MOST_SIGNATURES:
            _SIGNATURES.clear()  # tensors made before no longer share plans with later ones
        # Only a GEMM's right operand is looked up; left ones come in every m.
        signature = _SIGNATURES.setdefault(facts, object()) if self.transposed else object()
        object.__setattr__(self, "signature", signature)
        if self.granularity is Granularity.NONE:
            if self.scale is not None:
                raise FormatError("QuantizedTensor: a scale was given but granularity is 'none'")
            return
        if self.data.dtype.itemsize != 1 or not self.data.dtype.is_floating_point:
            raise FormatError(f"QuantizedTensor: data is {self.data.dtype}; expected FP8")
        expected = self.granularity.scale_shape(*self.data.shape)
        if (
            self.scale is None
            or tuple(self.scale.shape) != expected
            or self.scale.dtype.itemsize != 4
            or not self.scale.dtype.is_floating_point
        ):
            found = (
                "no scale" if self.scale is None else f"{list(self.scale.shape)} {self.scale.dtype}"
            )
            raise ShapeError(
                f"QuantizedTensor: data {list(self.data.shape)} with granularity "
                f"{self.granularity.value!r} needs float32 scales {list(expected)}; found {found}"
            )
        if not self.data.is_contiguous() or not self.granularity.lays_out(self.scale):
            raise ShapeError(
                f"QuantizedTensor: data has strides {self.data.stride()}, scale "
                f"{self.scale.stride()}; kernels read contiguous data and scales laid out as "
                "quantize makes them: quantize again, or use QuantizedTensor.packed(...)"
            )
        if self.scale.device != self.data.device:
            raise DeviceError(
                f"QuantizedTensor: data is on {self.data.device}, scale on {self.scale.device}"
            )

    @property
    def format(self) -> Format:
        return Format.of(self.data.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.data.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @classmethod
    def packed(cls, data: Tensor, scale: Tensor, granularity: Granularity) -> QuantizedTensor:
        """From data and scales of any strides, copied into the layout that kernels read."""
        rows, columns = data.shape
        laid_out = granularity.empty_scale(rows, columns, data.device).copy_(scale)
        return cls(data.contiguous(), laid_out, granularity)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same tensor on another device."""
        data = self.data.to(device)
        scale = None
        if self.scale is not None:
            rows, columns = data.shape
            scale = self.granularity.empty_scale(rows, columns, data.device).copy_(self.scale)
        source = None if self.source is None else self.source.to(device)
        return QuantizedTensor(data, scale, self.granularity, self.transposed, source, self.budget)

    def t(self) -> QuantizedTensor:
        """The transpose; shares memory."""
        return QuantizedTensor(
            self.data, self.scale, self.granularity, not self.transposed, self.source, self.budget
        )

    def __repr__(self) -> str:
        return (
            f"QuantizedTensor({list(self.shape)}, {self.format.value}, "
            f"{self.granularity.value}, {self.device})"
        )


# The default error of a kernel is its worst over these; recipes in lokakern.bench.distributions.
REALISTIC_DISTRIBUTIONS = tuple(f"X{i}" for i in (*range(1, 11), 12, 13, 14))
REGIMES = ("graph-cold", "graph-hot", "eager")
