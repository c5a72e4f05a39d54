"""Element formats and granularities of scales: what decides the bytes of a quantized tensor.

Part of every kernel's digest.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

# digest: off (1x32 scales came later, see lokakern/mx.py)
from lokakern import mx

# digest: on
from lokakern.errors import FormatError

GROUP = 128  # columns under one scale of a 1x128 group, rows and columns of a 128x128 block


class Format(StrEnum):
    """An element format. ``maximum`` is its largest finite value."""

    E4M3FN = "e4m3fn"
    E5M2 = "e5m2"
    E4M3FNUZ = "e4m3fnuz"
    E5M2FNUZ = "e5m2fnuz"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    # digest: off
    FLOAT16 = "float16"  # of kernels that registry/float16.py names
    # digest: on

    @property
    def dtype(self) -> torch.dtype:
        return _FORMAT_FACTS[self][0]

    @property
    def maximum(self) -> float:
        return _FORMAT_FACTS[self][1]

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest: 2^-p for p significant bits."""
        return _FORMAT_FACTS[self][2]

    @property
    def nan_byte(self) -> int:
        """The byte a non-finite value becomes; only for the FP8 formats."""
        return _FORMAT_FACTS[self][3]

    @property
    def is_fp8(self) -> bool:
        return self.dtype.itemsize == 1

    @classmethod
    def of(cls, dtype: torch.dtype) -> Format:
        """The format of a torch dtype.

        Raises:
            FormatError: lokakern has no format for the dtype.
        """
        try:
            return _FORMAT_OF_DTYPE[dtype]
        except KeyError:
            known = ", ".join(f"torch.{f.value}" for f in (cls.BFLOAT16, cls.FLOAT32))
            # digest: off
            known += ", torch.float16"
            # digest: on
            raise FormatError(
                f"operand dtype is {dtype}; expected {known} or a torch.float8 dtype "
                "(convert with .bfloat16())"
            ) from None


_FORMAT_FACTS: dict[Format, tuple[torch.dtype, float, float, int]] = {
    Format.E4M3FN: (torch.float8_e4m3fn, 448.0, 2.0**-4, 0x7F),
    Format.E5M2: (torch.float8_e5m2, 57344.0, 2.0**-3, 0x7F),
    Format.E4M3FNUZ: (torch.float8_e4m3fnuz, 240.0, 2.0**-4, 0x80),
    Format.E5M2FNUZ: (torch.float8_e5m2fnuz, 57344.0, 2.0**-3, 0x80),
    Format.BFLOAT16: (torch.bfloat16, torch.finfo(torch.bfloat16).max, 2.0**-8, -1),
    Format.FLOAT32: (torch.float32, torch.finfo(torch.float32).max, 2.0**-24, -1),
    # digest: off
    Format.FLOAT16: (torch.float16, torch.finfo(torch.float16).max, 2.0**-11, -1),
    # digest: on
}
_FORMAT_OF_DTYPE = {facts[0]: fmt for fmt, facts in _FORMAT_FACTS.items()}


class Granularity(StrEnum):
    """Elements that share one scale: a block is 128 x 128 elements, a group 128 of one row."""

    NONE = "none"
    TENSOR = "tensor"
    ROW = "row"
    GROUP = "1x128"
    BLOCK = "128x128"
    # digest: off
    MX = "1x32"  # powers of two, one byte each
    # digest: on

    # digest: off
    @property
    def scale_dtype(self) -> torch.dtype:
        """Of scales: float32, or of 1x32 e8m0, a power of two in one byte."""
        return mx.SCALE if self is Granularity.MX else torch.float32

    # digest: on
    @property
    def suffix(self) -> str:
        """Last word of kernel names: tensor, row, group or block."""
        return self.name.lower()

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a ``[rows, columns]`` tensor; always two-dimensional."""
        groups = -(-columns // GROUP)
        match self:
            case Granularity.TENSOR:
                return (1, 1)
            case Granularity.ROW:
                return (rows, 1)
            case Granularity.GROUP:
                return (rows, groups)
            case Granularity.BLOCK:
                return (-(-rows // GROUP), groups)
            # digest: off
            case Granularity.MX:
                return mx.scale_shape(rows, columns)
            # digest: on
        raise FormatError(f"granularity {self.value!r} has no scales")

    def empty_scale(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Uninitialized float32 scales in the one memory layout every kernel reads and writes.

        ``1x128`` scales are stored row-index-fastest, so that a GEMM reads the scales of a tile's
        rows in one contiguous piece; these columns of them, and rows of ``128x128`` scales, start
        every 4 scales (16 bytes), which cuBLASLt and TMA ask for.
        """
        # digest: off
        if self is Granularity.MX:
            return mx.empty_scale(rows, columns, device)
        # digest: on
        shape = self.scale_shape(rows, columns)
        stride = self._scale_stride(*shape)
        # digest: off  an allocation alone, beside launches
        if self is Granularity.BLOCK and shape[1] == stride[0]:  # no padding: saves a launch
            return torch.empty(shape, dtype=torch.float32, device=device)
        # digest: on
        if self is Granularity.BLOCK:
            # The padding is read by 16-byte loads: allocate it, so whole rows belong to us.
            whole = torch.zeros((shape[0], stride[0]), dtype=torch.float32, device=device)
            return whole[:, : shape[1]]
        return torch.empty_strided(shape, stride, dtype=torch.float32, device=device)

    def _scale_stride(self, height: int, width: int) -> tuple[int, int]:
        # digest: off
        if self is Granularity.MX:
            return mx.scale_stride(width)
        # digest: on
        if self is Granularity.GROUP:
            return (1, -(-max(height, 1) // 4) * 4)
        if self is Granularity.BLOCK:
            return (-(-width // 4) * 4, 1)
        return (width, 1)

    def lays_out(self, scale: Tensor) -> bool:
        """Whether scales lie in memory as `empty_scale` lays them out."""
        expected = self._scale_stride(*scale.shape)
        sizes = zip(scale.shape, scale.stride(), expected, strict=True)
        empty = 0 in scale.shape
        return empty or all(size <= 1 or have == want for size, have, want in sizes)
