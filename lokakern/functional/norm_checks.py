"""Checks of calls with a norm: their epilogue, output format and problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lokakern.epilogue import ACTIVATIONS
from lokakern.errors import FormatError, ShapeError, UnknownNameError
from lokakern.functional.checks import (
    check_matrix,
    check_out,
    check_same_device,
    checked_scale,
    gemm_problem,
    granularity_named,
    operand_of,
)
from lokakern.functional.static_scale import bound_scale
from lokakern.norm import KINDS, Norm, largest, norm_named
from lokakern.problems import format_named
from lokakern.quantized_tensor import ROW_BYTES
from lokakern.registry.float16 import has_half
from lokakern.registry.register import fp8_format
from lokakern.selection.arguments import device_of
from lokakern.types import (
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Problem,
    QuantizedTensor,
)

VECTORS = ("bias", "norm_weight", "norm_bias")  # tensors of a `NormEpilogue`
MATRICES = ("residual", "gate", "x0", "x")
Cross = tuple[Tensor, Tensor]


def epilogue_of_call(
    op: str,
    *,
    norm: str | Norm,
    eps: float | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    residual_last: bool = False,
    cross: Cross | None = None,
    **vectors: Tensor | None,
) -> NormEpilogue:
    """The epilogue of a call; `check_epilogue` checks its tensors.

    Raises:
        UnknownNameError: The norm or activation is unknown, or options exclude each other.
        ShapeError: ``cross`` does not have two elements.
        FormatError: An element of ``cross`` is not a tensor.
    """
    activation = "none" if activation is None else activation
    if activation not in ACTIVATIONS:
        raise UnknownNameError(
            f"{op}: activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)} "
            "(a sigmoid gate is gate=)"
        )
    last = {
        "activation": activation != "none",
        "gate": gate is not None,
        "cross": cross is not None,
    }
    given = [name for name, is_there in last.items() if is_there]
    if len(given) > 1:
        raise UnknownNameError(f"{op}: {' and '.join(given)} are given; choose one")
    if residual_last and residual is None:
        raise UnknownNameError(f"{op}: residual_last is True and residual is None; pass residual=")
    if cross is not None and (not isinstance(cross, tuple | list) or len(cross) != 2):
        raise ShapeError(f"{op}: cross is {type(cross).__name__}; expected (x0, x)")
    if cross is not None and not all(isinstance(x, Tensor) for x in cross):
        found = ", ".join(type(x).__name__ for x in cross)
        raise FormatError(f"{op}: cross is ({found}); expected (x0, x), both of them tensors")
    x0, x = (None, None) if cross is None else cross
    return NormEpilogue(
        norm_of(op, norm, eps), activation=activation, residual=residual,
        residual_last=bool(residual_last), gate=gate, x0=x0, x=x, **vectors,
    )  # fmt: skip


def norm_of(op: str, norm: str | Norm, eps: float | None) -> Norm:
    """The norm of a call; ``eps`` overrides that of a `Norm`.

    Raises:
        UnknownNameError: The norm is unknown.
    """
    name: Any = norm
    if isinstance(norm, Norm):
        eps = norm.eps if eps is None else eps
        name = str(norm) if isinstance(norm.kind, str) else None
    if not isinstance(name, str):
        raise UnknownNameError(
            f"{op}: norm is {norm!r}; expected a name ({', '.join(KINDS[:2])}, block_rms(n) or "
            "none) or a lokakern.norm.Norm"
        )
    try:
        found = norm_named(name, 1e-5 if eps is None else eps)
    except UnknownNameError as error:
        raise UnknownNameError(f"{op}: {error.args[0]}") from None
    if isinstance(norm, Norm) and norm[:2] != found[:2]:  # fields that are not in its name
        raise UnknownNameError(
            f"{op}: norm is {norm!r}; expected one of {', '.join(KINDS)}; only block_rms takes a "
            "block size, an int"
        )
    return found


def half_of(
    x: Tensor, out_format: Format | str | None = None, epilogue: NormEpilogue | None = None
) -> torch.dtype:
    """The dtype of what follows rows or products: float16 if they or the output are, else bfloat16.

    Args:
        x: The rows, or the left operand's elements.
        out_format: Of the output, if that is known.
        epilogue: Its tensors tell where operands and the output are FP8.
    """
    is_half = x.dtype is torch.float16 or out_format in (Format.FLOAT16, "float16")
    if epilogue is not None and is_fp8(x, out_format):
        is_half = has_half(None, None, epilogue)
    return torch.float16 if is_half else torch.bfloat16


def is_fp8(x: Tensor, out_format: Format | str | None) -> bool:
    """Whether neither the operands nor the output of a product tell the dtype of the rest."""
    return x.dtype.itemsize == 1 and isinstance(out_format, Format) and out_format.is_fp8


def shown_name(name: str) -> str:
    """Name of an epilogue's tensor in messages."""
    return f"{name} of cross" if name in ("x0", "x") else name


def check_epilogue(
    op: str, epilogue: NormEpilogue, rows: int, columns: int, half: torch.dtype = torch.bfloat16
) -> None:
    """Check the tensors of an epilogue, and the blocks of the norm.

    Args:
        op: Name for messages.
        epilogue: The epilogue.
        rows: Of the output.
        columns: Of the output.
        half: Dtype of the matrices, and of vectors that are not float32: bfloat16 or float16.

    Raises:
        ShapeError: A tensor does not fit, or blocks do not divide the columns.
        FormatError: A dtype is not supported, or dtypes differ.
    """
    try:
        epilogue.norm.span(columns)
    except ShapeError as error:
        raise ShapeError(f"{op}: {error}") from None
    found: dict[str, torch.dtype] = {}
    for name in VECTORS:
        x = getattr(epilogue, name)
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise FormatError(f"{op}: {name} is {type(x).__name__}; expected a torch.Tensor")
        if x.layout is not torch.strided:
            raise FormatError(f"{op}: {name} is {x.layout}; expected a dense tensor")
        if x.dtype not in (half, torch.float32):
            raise FormatError(f"{op}: {name} is {x.dtype}; expected {half} or torch.float32")
        if tuple(x.shape) != (columns,) or (columns > 1 and x.stride(0) != 1):
            raise ShapeError(
                f"{op}: {name} is {list(x.shape)} with strides {x.stride()}; expected [{columns}], "
                "contiguous"
            )
        found[name] = x.dtype
    if len(set(found.values())) > 1:
        words = ", ".join(f"{name} is {dtype}" for name, dtype in found.items())
        raise FormatError(f"{op}: {words}; convert them to one dtype")
    for name in MATRICES:
        x = getattr(epilogue, name)
        if x is None:
            continue
        shown = shown_name(name)
        check_matrix(op, shown, x)
        contiguous = x.stride(1) == 1 or columns <= 1
        if tuple(x.shape) != (rows, columns) or x.dtype != half or not contiguous:
            raise ShapeError(
                f"{op}: {shown} is {list(x.shape)} {x.dtype} with strides {x.stride()}; expected "
                f"{[rows, columns]} {half}, columns contiguous"
            )


def is_aligned(x: Tensor) -> bool:
    """Whether a vector, or every row of a matrix, starts at a multiple of 16 bytes."""
    row_bytes = x.stride(0) * x.element_size() if x.dim() == 2 and x.shape[0] > 1 else 0
    return not (x.data_ptr() | row_bytes) & ROW_BYTES - 1


def aligned_epilogue(epilogue: NormEpilogue) -> NormEpilogue:
    """The epilogue with copies of unaligned tensors, as kernels read 16 bytes at once."""
    moved: dict[str, Any] = {}
    for name in (*VECTORS, *MATRICES):
        x = getattr(epilogue, name)
        if x is not None and not is_aligned(x):
            moved[name] = _aligned_copy(x)
    return epilogue._replace(**moved) if moved else epilogue


def _aligned_copy(x: Tensor) -> Tensor:
    pitch = -(-x.shape[-1] * x.element_size() // ROW_BYTES) * ROW_BYTES // x.element_size()
    return x.new_empty((*x.shape[:-1], pitch))[..., : x.shape[-1]].copy_(x)


def out_kind(
    op: str,
    out_format: Format | str | None,
    out_granularity: Granularity | str | None,
    out_scale: Tensor | float | str | None,
    x: Tensor,
    quantizes: bool,
) -> tuple[Format, Granularity]:
    """Format and granularity of an output.

    Args:
        op: Name for messages.
        out_format: None means the device's E4M3 if another argument implies scales, else the
            dtype of ``x`` if that is float16, else bfloat16.
        out_granularity: None means "tensor" with ``out_scale``, else "row".
        out_scale: Any valid or invalid value.
        x: The left operand's elements.
        quantizes: Whether the op always quantizes.

    Raises:
        FormatError: The arguments exclude each other.
    """
    scaled = out_granularity is not None or out_scale is not None or quantizes
    if out_format is not None:
        form = format_named(op, out_format)
    else:
        form = fp8_format(device_of(x)) if scaled else Format.of(half_of(x))
    if not form.is_fp8:
        if form not in (Format.BFLOAT16, Format.FLOAT16) or quantizes:
            halves = "'bfloat16', 'float16' or "
            wanted = f"{'' if quantizes else halves}an FP8 format"
            raise FormatError(f"{op}: out_format is {form.value!r}; expected {wanted}")
        if scaled:
            raise FormatError(
                f"{op}: out_format is {form.value!r}, which has no scales; leave out_granularity "
                "and out_scale out, or ask for an FP8 format"
            )
        return form, Granularity.NONE
    if out_granularity is None:
        out_granularity = Granularity.ROW if out_scale is None else Granularity.TENSOR
    granularity = granularity_named(op, out_granularity)
    if granularity in (Granularity.BLOCK, Granularity.MX):
        raise FormatError(
            f"{op}: granularity is {granularity.value!r}; expected tensor, row or 1x128"
        )
    if (granularity is Granularity.TENSOR) is (out_scale is None):
        raise FormatError(
            f"{op}: granularity is {granularity.value!r} and out_scale is "
            f"{'not given' if out_scale is None else 'given'}; granularity 'tensor', and no other, "
            "needs out_scale: a number, a tensor, or 'static'"
        )
    return form, granularity


def check_bounded(op: str, norm: str, *, gate: object, cross: object, residual_last: bool) -> None:
    """Check that a norm bounds the output.

    Raises:
        FormatError: It does not.
    """
    unbounded = {
        "norm 'none'": norm == "none",
        "gate": gate is not None,
        "cross": cross is not None,
        "residual_last": residual_last,
    }
    reasons = [name for name, is_there in unbounded.items() if is_there]
    if reasons:
        raise FormatError(
            f"{op}: out_scale is 'static', but with {' and '.join(reasons)} the output is not "
            "bounded; pass a number or a tensor, or a granularity with dynamic scales"
        )


def static_scale_of(
    op: str, epilogue: NormEpilogue, columns: int, form: Format, device: torch.device
) -> Tensor:
    """`lokakern.norm.static_scale` of an epilogue, on the device, in memory that nobody may write.

    Raises:
        FormatError: The output is not bounded.
    """
    check_bounded(
        op, epilogue.norm.kind, gate=epilogue.gate, cross=epilogue.x0,
        residual_last=epilogue.residual is not None and epilogue.residual_last,
    )  # fmt: skip
    bound = largest(epilogue.norm, columns)
    return bound_scale(bound, form, epilogue.norm_weight, epilogue.norm_bias, device)


def scale_of(
    op: str,
    out_scale: Tensor | float | str,
    epilogue: NormEpilogue,
    columns: int,
    form: Format,
    device: torch.device,
) -> Tensor:
    """The static scale of the output, float32 ``[1, 1]``.

    Raises:
        FormatError: It is not a valid scale, or the output is not bounded.
        ShapeError: It is a tensor with another shape or dtype.
    """
    if isinstance(out_scale, str):
        if out_scale != "static":
            raise FormatError(
                f"{op}: out_scale is {out_scale!r}; expected a number, a tensor, or 'static'"
            )
        return static_scale_of(op, epilogue, columns, form, device)
    return checked_scale(op, out_scale, device)


def _tensors_of(epilogue: NormEpilogue, out_scale: object) -> dict[str, Tensor | None]:
    """Tensors by their names in messages."""
    found = {"out_scale": out_scale if isinstance(out_scale, Tensor) else None}
    for name in (*VECTORS, *MATRICES):
        found[shown_name(name)] = getattr(epilogue, name)
    return found


def gemm_norm_problem(
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor,
    epilogue: NormEpilogue,
    out: Tensor | None,
    kind: tuple[Format, Granularity],
    out_scale: Tensor | float | str | None,
) -> Problem:
    """The problem of ``gemm_norm`` on these operands.

    Raises:
        ShapeError: Shapes do not match.
        FormatError: A format does not fit.
        DeviceError: Operands are on different devices.
    """
    op = "gemm_norm"
    if isinstance(a, QuantizedTensor):
        problem = _quantized_problem(a, b)
        left = a.data
    else:
        check_matrix(op, "a", a)
        if a.dtype not in (torch.bfloat16, torch.float16):
            raise FormatError(
                f"{op}: a is {a.dtype}; expected torch.bfloat16 (convert with .bfloat16()), "
                "torch.float16 or a QuantizedTensor"
            )
        problem = gemm_problem(a, b, op=op)
        left = a
    form, granularity = kind
    half = half_of(left, form, epilogue)
    if left is a and not form.is_fp8 and form.dtype is not left.dtype:
        raise FormatError(
            f"{op}: a is {left.dtype} and out_format {form.value!r}; leave out_format out, or "
            "convert a"
        )
    check_epilogue(op, epilogue, problem.m, problem.n, half)
    if form.is_fp8 and out is not None:
        raise FormatError(f"{op}: out is given and the output is {form.value}; out is for {half}")
    if out is not None:
        check_matrix(op, "out", out)
    strided = check_out(op, out, (problem.m, problem.n), half)
    check_same_device(op, a=left, out=out, **_tensors_of(epilogue, out_scale))
    return replace(
        problem, op=op, epilogue=epilogue.name(), out_format=form, out_granularity=granularity,
        out_strided=strided,
    )  # fmt: skip


def _quantized_problem(a: QuantizedTensor, b: Tensor | QuantizedTensor) -> Problem:
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, QuantizedTensor) or x.scale is None:
            found = "a QuantizedTensor without scales" if x is a else type(x).__name__
            raise FormatError(
                f"gemm_norm: a is a QuantizedTensor and {name} is {found}; expected both quantized "
                "(b is quantize(weight).t()), or a unquantized"
            )
    assert isinstance(b, QuantizedTensor)  # checked above
    if a.transposed or not b.transposed:
        raise ShapeError("gemm_norm: a must be quantize(x) and b quantize(weight).t()")
    (m, k), (rows, n) = a.shape, b.shape
    if rows != k or k == 0:
        raise ShapeError(
            f"gemm_norm: a is {[m, k]} and b is {list(b.shape)}; b must be [{k}, n], k at least 1"
        )
    check_same_device("gemm_norm", a=a.data, b=b.data)
    return Problem(
        op="gemm_norm", m=m, n=n, k=k,
        a=replace(operand_of(a.data), granularity=a.granularity),
        b=replace(operand_of(b.data), granularity=b.granularity, layout=Layout.COLUMN),
    )  # fmt: skip


def norm_quantize_problem(
    x: Tensor,
    epilogue: NormEpilogue,
    kind: tuple[Format, Granularity],
    out_scale: Tensor | float | str | None,
) -> Problem:
    """The problem of ``norm_quantize``; raises as `gemm_norm_problem`."""
    op = "norm_quantize"
    rows, columns = x.shape
    check_epilogue(op, epilogue, rows, columns, half_of(x))
    check_same_device(op, x=x, **_tensors_of(epilogue, out_scale))
    return Problem(
        op=op, m=rows, n=1, k=columns, a=operand_of(x), epilogue=epilogue.name(),
        out_format=kind[0], out_granularity=kind[1],
    )  # fmt: skip
