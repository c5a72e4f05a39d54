"""Checks of operands, and the problem of a call; done once for each signature."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lokakern import jit
from lokakern.errors import DeviceError, FormatError, ShapeError, UnsupportedError
from lokakern.functional.static_scale import check_number, number_scale
from lokakern.types import (
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    QuantizedTensor,
    alignment_of,
)


def operand_of(x: Tensor, prefer: Layout = Layout.ROW) -> Operand:
    """Format, layout and alignment of a matrix; ``prefer`` is the layout of a vector."""
    rows, columns = x.shape
    along_row, along_column = x.stride(1) == 1 or columns <= 1, x.stride(0) == 1 or rows <= 1
    if along_row and along_column:
        layout = prefer
    elif along_row:
        layout = Layout.ROW
    else:
        layout = Layout.COLUMN if along_column else Layout.STRIDED
    outer, count = (x.stride(0), rows) if layout is Layout.ROW else (x.stride(1), columns)
    step = outer * x.element_size() if count > 1 else 0
    return Operand(Format.of(x.dtype), Granularity.NONE, layout, alignment_of(x.data_ptr() | step))


def is_traced() -> bool:
    """Whether torch.jit.trace, torch.func or forward-mode AD records operations.

    They do not see kernels: a trace would lack them, and tangents would be lost.
    """
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


@functools.cache
def warn_once(message: str) -> None:
    """Warn, once in a process for each message."""
    warnings.warn(message, stacklevel=3)


def gemm_problem(
    a: Tensor,
    b: Tensor | QuantizedTensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    op: str = "gemm",
) -> Problem:
    """The problem of ``gemm`` on these operands; ``op`` is named in messages.

    Raises:
        ShapeError: Shapes do not match.
        FormatError: A dtype is not supported, or dtypes differ.
        DeviceError: Operands are on different devices.
    """
    check_matrix(op, "a", a)
    if not isinstance(b, QuantizedTensor):
        check_matrix(op, "b", b)
    (m, k), (rows, n) = a.shape, b.shape
    if rows != k:
        hint = "weight.t()" if isinstance(b, Tensor) else "prepared.t()"
        advice = f" (pass {hint})" if n == k else ""
        raise ShapeError(
            f"{op}: a is {list(a.shape)} and b is {list(b.shape)}; b must be [{k}, n]{advice}"
        )
    if k == 0:
        raise ShapeError(f"{op}: a is {list(a.shape)}; k must be at least 1")
    form = Format.of(a.dtype)
    quantized = "scaled_gemm" if op == "gemm" else op  # the function for quantized operands
    if form.is_fp8:
        raise FormatError(
            f"{op}: a is {form.value}; pass it unquantized, or QuantizedTensors to {quantized}"
        )
    if isinstance(b, QuantizedTensor):
        if not b.transposed:
            raise ShapeError(
                f"{op}: b is a QuantizedTensor stored [k, n]; pass quantize(weight).t() of a "
                f"[{n}, {k}] weight, or prepare_weight(weight, ...)"
            )
        unquantized = b.source if b.source is not None else b.data
        prepared = b.granularity is not Granularity.NONE
        right = Operand(b.format, b.granularity, Layout.COLUMN,
                        operand_of(b.data).alignment)  # fmt: skip
        if prepared and b.source is None:
            raise FormatError(
                f"{op}: b is quantized without its source, so no unquantized kernel can run; "
                f"use prepare_weight, or {quantized} on two QuantizedTensors"
            )
    else:
        unquantized, prepared = b, False
        right = operand_of(b, Layout.COLUMN)
    if unquantized.dtype != a.dtype:
        raise FormatError(
            f"{op}: a is {a.dtype} and b is {unquantized.dtype}; convert one to the other's dtype"
        )
    check_same_device(op, a=a, b=unquantized, bias=bias, out=out)
    strided = check_out(op, out, (m, n), a.dtype)
    check_bias(op, bias, n, a.dtype)
    return Problem(
        op="gemm", m=m, n=n, k=k, a=operand_of(a), b=right, prepared=prepared,
        epilogue="none" if bias is None else "bias", out_format=form, out_strided=strided,
    )  # fmt: skip


def check_untraced(op: str) -> None:
    """Check that nothing records operations; in every call, also where other checks are spared.

    Raises:
        UnsupportedError: See `is_traced`.
    """
    if is_traced():
        raise UnsupportedError(
            f"{op}: torch.func, torch.jit.trace and forward-mode AD cannot trace kernels: call it "
            "outside of them, or use torch.compile and backward()"
        )


def check_matrix(op: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise FormatError(f"{op}: {name} is {type(x).__name__}; expected a torch.Tensor")
    check_untraced(op)
    if x.layout is not torch.strided:
        raise FormatError(f"{op}: {name} is {x.layout}; expected a dense tensor (use .to_dense())")
    if x.dim() != 2:
        raise ShapeError(
            f"{op}: {name} is {list(x.shape)}; expected two dimensions (use .flatten(0, -2))"
        )


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not isinstance(x, Tensor):
            raise FormatError(f"{op}: {name} is {type(x).__name__}; expected a torch.Tensor")
    found = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(found.values())) > 1:
        words = ", ".join(f"{name} is on {device}" for name, device in found.items())
        raise DeviceError(f"{op}: {words}; move them to one device")


def check_out(op: str, out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Check an output tensor and return whether it is a strided slice."""
    if out is None:
        return False
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ShapeError(
            f"{op}: out is {list(out.shape)} {out.dtype}; expected {list(shape)} {dtype}"
        )
    if shape[1] > 1 and out.stride(1) != 1:
        raise ShapeError(f"{op}: out has strides {out.stride()}; its columns must be contiguous")
    if shape[0] > 1 and out.stride(0) < shape[1]:
        raise ShapeError(f"{op}: out has strides {out.stride()}; its rows overlap")
    return not out.is_contiguous()


def row_major(x: Tensor, apart: bool = False) -> Tensor:
    """A row-major matrix with aligned rows; a copy if x is not.

    ``apart`` allows gaps between rows, as in a slice.
    """
    columns, item = x.shape[1], x.element_size()
    step = item * columns
    mask = min(step & -step, 16) - 1
    pitch = x.stride(0)
    fits = apart and pitch > columns and not item * pitch & mask
    if x.stride(1) != 1 or not (fits or pitch == columns):
        x = x.contiguous()  # such as an expanded gradient
    return x.clone() if x.data_ptr() & mask else x


def note_write(given: Tensor | None) -> None:
    """Tell autograd, and a recording, of a launch that wrote to a tensor of the caller, if any."""
    if given is None:
        return
    if jit.recorder is not None:
        jit.recorder.wrote(given)
    if not given.is_inference():  # which has no version
        torch.autograd.graph.increment_version(given)


def check_bias(op: str, bias: Tensor | None, n: int, dtype: torch.dtype) -> None:
    if bias is None:
        return
    if tuple(bias.shape) != (n,) or bias.dtype != dtype:
        raise ShapeError(f"{op}: bias is {list(bias.shape)} {bias.dtype}; expected [{n}] {dtype}")
    if n > 1 and bias.stride(0) != 1:
        raise ShapeError(f"{op}: bias has stride {bias.stride(0)}; it must be contiguous")


def checked_scale(op: str, given: Tensor | float, device: torch.device) -> Tensor:
    """A static descale of the output, float32 ``[1, 1]``; the value of a tensor is not read.

    That of a number is in memory that nobody may write.
    """
    if not isinstance(given, Tensor):
        check_number(op, given)
        return number_scale(float(given), device)
    if given.numel() != 1 or given.dtype != torch.float32:
        raise ShapeError(
            f"{op}: out_scale is {list(given.shape)} {given.dtype}; expected float32 [1, 1]"
        )
    return given if given.dim() == 2 else given.reshape(1, 1)  # a view costs 0.75 us


def granularity_named(op: str, value: Granularity | str) -> Granularity:
    try:
        found = Granularity(value)
    except ValueError:
        found = Granularity.NONE
    if found is Granularity.NONE:
        known = ", ".join(g.value for g in Granularity if g is not Granularity.NONE)
        raise FormatError(f"{op}: granularity is {value!r}; expected one of {known}")
    return found
