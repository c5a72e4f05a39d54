"""Quantized tensors: FP8 data and scales in the one memory layout that kernels read and write."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from lokakern.errors import DeviceError, FormatError, ShapeError
from lokakern.formats import Format, Granularity

if TYPE_CHECKING:
    from lokakern.types import ErrorBudget

ROW_BYTES = 16  # every row of FP8 data starts at a multiple of: TMA reads no others
LINE_BYTES = 128  # of a cache line, and of a row of a tile
LONG_ROW_BYTES = 512  # longer rows start at cache lines: that is at most a quarter more memory


def pitch_of(columns: int) -> int:
    """Bytes from one row of FP8 data to the next.

    Where rows need gaps, they start at cache lines: a tile's row that starts within one takes two.
    On an H200, 8192 x 1677 x 1677 takes 75.9 us with rows every 1680 bytes, 53.1 us every 1792.
    """
    if not columns % ROW_BYTES:
        return columns
    unit = LINE_BYTES if columns > LONG_ROW_BYTES else ROW_BYTES
    return -(-columns // unit) * unit


def empty_data(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized FP8 data as every kernel reads and writes it, ``[rows, columns]``.

    Rows start every `pitch_of` bytes.
    """
    pitch = pitch_of(columns)
    if pitch == columns:
        return torch.empty((rows, columns), dtype=dtype, device=device)
    return torch.empty((rows, pitch), dtype=dtype, device=device)[:, :columns]


def lays_out_data(data: Tensor) -> bool:
    """Whether FP8 data lie as `empty_data` lays them out, or one row right after the other."""
    rows, columns = data.shape
    if columns > 1 and data.stride(1) != 1:
        return False
    return rows <= 1 or columns == 0 or data.stride(0) in (columns, pitch_of(columns))


_SIGNATURES: dict[object, object] = {}
_MOST_SIGNATURES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """FP8 elements with their decode scales: ``x ~ data * scale``.

    Attributes:
        data: ``[rows, columns]``, an FP8 dtype, as `empty_data` lays it out or contiguous;
            ``columns`` is the reduction axis. A prepared weight for which FP8 never pays holds
            bfloat16 or float32 and no scale.
        scale: ``granularity.scale_shape(rows, columns)``, float32, or of 1x32 scales
            ``granularity.scale_dtype``; None without granularity.
        granularity: What one scale covers.
        transposed: The tensor stands for ``[columns, rows]``, as a GEMM's right operand does.
        source: The unquantized weight a prepared weight came from, ``[rows, columns]``, held by
            reference so that the unquantized kernel stays legal. None otherwise.
        budget: What a prepared weight was prepared for; the default budget of `gemm` on it.
        padded: A copy of the unquantized weight with rows and columns added to multiples of 8, for
            the kernel `torch.bf16_padded`. None where `prepare_weight` made none.
    """

    data: Tensor
    scale: Tensor | None
    granularity: Granularity
    transposed: bool = False
    source: Tensor | None = None
    budget: ErrorBudget | None = None
    padded: Tensor | None = None
    _signature: object = field(init=False, repr=False)
    _transpose: tuple[Tensor, Tensor | None] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.data.dim() != 2:
            raise ShapeError(
                f"QuantizedTensor: data is {list(self.data.shape)}; expected two dimensions"
            )
        object.__setattr__(self, "_signature", None)
        if is_compiling():
            return  # the op that reads it checks it, on tensors with addresses
        if self.granularity is Granularity.NONE:
            if self.scale is not None:
                raise FormatError("QuantizedTensor: a scale was given but granularity is 'none'")
            return
        if self.data.dtype.itemsize != 1 or not self.data.dtype.is_floating_point:
            raise FormatError(f"QuantizedTensor: data is {self.data.dtype}; expected FP8")
        expected = self.granularity.scale_shape(*self.data.shape)
        dtype = self.granularity.scale_dtype
        if self.scale is None or tuple(self.scale.shape) != expected or self.scale.dtype != dtype:
            found = (
                "no scale" if self.scale is None else f"{list(self.scale.shape)} {self.scale.dtype}"
            )
            raise ShapeError(
                f"QuantizedTensor: data {list(self.data.shape)} with granularity "
                f"{self.granularity.value!r} needs scales {list(expected)} {dtype}; found {found}"
            )
        if not lays_out_data(self.data) or not self.granularity.lays_out(self.scale):
            raise ShapeError(
                f"QuantizedTensor: data has strides {self.data.stride()}, scale "
                f"{self.scale.stride()}; kernels read data and scales laid out as quantize makes "
                "them: quantize again, or use QuantizedTensor.packed(...)"
            )
        if self.scale.device != self.data.device:
            raise DeviceError(
                f"QuantizedTensor: data is on {self.data.device}, scale on {self.scale.device}"
            )

    @property
    def signature(self) -> object:
        """One object for all tensors that agree in everything that decides the kernel.

        A warm call looks it up, without hashing it all again.
        """
        if self._signature is None:
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
            object.__setattr__(self, "_signature", _SIGNATURES.setdefault(facts, object()))
        return self._signature

    @property
    def transpose(self) -> tuple[Tensor, Tensor | None]:
        """Views of data and scale the other way round, as a GEMM takes its right operand.

        Made once, because a view costs 0.75 us of host time.
        """
        if self._transpose is None:
            scale = None if self.scale is None else self.scale.t()
            object.__setattr__(self, "_transpose", (self.data.t(), scale))
        assert self._transpose is not None
        return self._transpose

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
        return cls(_laid_out(data, data.device), laid_out, granularity)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same tensor on another device."""
        if self.scale is None:
            data, scale = self.data.to(device), None
        else:
            data = _laid_out(self.data, device)
            rows, columns = data.shape
            scale = self.granularity.empty_scale(rows, columns, data.device).copy_(self.scale)
        source = None if self.source is None else self.source.to(device)
        padded = None if self.padded is None else self.padded.to(device)
        return QuantizedTensor(
            data, scale, self.granularity, self.transposed, source, self.budget, padded
        )

    def __setstate__(self, state: list[Any]) -> None:
        """As it was saved, with rows laid out anew where an earlier version laid them otherwise."""
        for each, value in zip(fields(self), state, strict=True):
            object.__setattr__(self, each.name, value)
        object.__setattr__(self, "_signature", None)  # not the one object of tensors like this
        if self.scale is not None and not lays_out_data(self.data):
            object.__setattr__(self, "data", _laid_out(self.data, self.data.device))
            object.__setattr__(self, "_transpose", None)

    def t(self) -> QuantizedTensor:
        """The transpose; shares memory."""
        return QuantizedTensor(
            self.data, self.scale, self.granularity, not self.transposed, self.source, self.budget,
            self.padded,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"QuantizedTensor({list(self.shape)}, {self.format.value}, "
            f"{self.granularity.value}, {self.device})"
        )


def _laid_out(data: Tensor, device: torch.device | str) -> Tensor:
    """A copy as `empty_data` lays it out, unless it lies so."""
    moved = data.to(device)
    rows, columns = data.shape
    if moved.stride(1) == 1 and moved.stride(0) == pitch_of(columns):
        return moved
    padded = empty_data(rows, columns, data.dtype, moved.device)
    padded.view(torch.uint8).copy_(moved.view(torch.uint8))
    return padded
