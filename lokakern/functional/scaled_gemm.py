"""`scaled_gemm`: the product of quantized operands, with an epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from lokakern.epilogue import ACTIVATIONS
from lokakern.errors import FormatError, ShapeError, UnknownNameError
from lokakern.functional.checks import (
    check_bias,
    check_matrix,
    check_out,
    check_same_device,
    check_untraced,
    checked_scale,
    note_write,
    operand_of,
)
from lokakern.functional.static_scale import check_number, output_scale, with_kept_scale
from lokakern.functional.traced import (
    budget_of_limits,
    limits_of,
    parts_of,
    text_of,
)
from lokakern.native import plain_op, recorded_op, replayed
from lokakern.problems import format_named
from lokakern.quantized_tensor import pitch_of
from lokakern.registry.register import fp8_format
from lokakern.selection.arguments import device_of
from lokakern.selection.kernel_policy import Chooser, fastest_within
from lokakern.types import (
    GROUP,
    PLAIN,
    Epilogue,
    ErrorBudget,
    Format,
    Granularity,
    Layout,
    Problem,
    QuantizedTensor,
    empty_data,
)

Quantized = QuantizedTensor | Sequence[QuantizedTensor]


def _kept_scale(given: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
    """The scale of a number in memory that nobody may write."""
    a = args[0] if args else options["a"]
    return checked_scale("scaled_gemm", given, (a if hasattr(a, "device") else a[0]).device)


@with_kept_scale(_kept_scale)
@replayed
def scaled_gemm(
    a: Quantized,
    b: QuantizedTensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    cross: tuple[Tensor, Tensor] | None = None,
    out_scale: Tensor | float | None = None,
    accumulate: bool = False,
    out: Tensor | None = None,
    out_format: Format | str | None = None,
    groups: int = 1,
    offsets: Tensor | None = None,
    budget: ErrorBudget | float | None = None,
    batch_invariant: bool = False,
) -> Tensor | QuantizedTensor:
    """Multiply quantized operands, ``f(a @ b + bias)``, with the fastest kernel.

    Args:
        a: ``[m, k]``, from `quantize`; or a list of slices along k, each with m rows and all but
            the last with a multiple of 128 columns. Slices have 1x128 scales, or share one tensor
            of scales.
        b: ``[k, n]``, from ``quantize(weight).t()``. Supported granularities: tensor x tensor, row
            x row, 1x128 x 128x128, 1x128 x 1x128, 1x32 x 1x32.
        bias: ``[n]``, dtype of the output, bfloat16 for an FP8 output.
        activation: f: one of `lokakern.epilogue.ACTIVATIONS`; "gelu_tanh" is GELU by tanh.
        cross: ``(x0, x)``: f is DCN's ``x0 * (a @ b + bias) + x``. Both ``[m, n]``, bfloat16, or
            float16 as the output, columns contiguous.
        out_scale: Static descale of an FP8 output: a number, or float32 ``[1, 1]``. Results share
            the tensor of a number: do not write to it.
        accumulate: Whether to add to the contents of ``out``, float32.
        out: Output, ``[m, n]``, columns contiguous; may be a slice.
        out_format: "bfloat16", "float16", "float32", or an FP8 format. None means the device's
            E4M3 with ``out_scale``, float32 with ``accumulate``, else bfloat16.
        groups: Number of weights in b, ``quantize(weights).t()`` of ``[groups * n, k]``; each
            multiplies ``m / groups`` rows of a.
        offsets: First row of each group and the end of the last, int32 ``[groups + 1]`` on the
            device, ascending, from 0 to m; other rows are not written.
        budget: Limits on the error against the unquantized product: the fastest kernel within it
            runs, or the most accurate one if there is none.
        batch_invariant: Use only kernels whose bits of a row do not depend on the other rows.

    Returns:
        ``[m, n]``: ``out`` if given; else a QuantizedTensor with ``out_scale`` for an FP8 format,
        and a tensor for other formats.

    Raises:
        ShapeError: Shapes do not match.
        FormatError: A granularity or format does not fit, or ``out_scale`` is not a valid scale
            (the value of a tensor is not checked).
        DeviceError: Operands are on different devices.
        UnknownNameError: The activation is unknown.
        UnsupportedError: No kernel supports these operands here.
    """
    if is_compiling():
        return _traced_scaled_gemm(
            a, b, bias, activation, cross, out_scale, accumulate, out, out_format, groups, offsets,
            budget, batch_invariant,
        )  # fmt: skip
    return scaled_gemm_by(
        fastest_within(budget), a, b, bias=bias, activation=activation, cross=cross,
        out_scale=out_scale, accumulate=accumulate, out=out, out_format=out_format, groups=groups,
        offsets=offsets, batch_invariant=batch_invariant,
    )  # fmt: skip


def scaled_gemm_by(
    choose: Chooser,
    a: Quantized,
    b: QuantizedTensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    cross: tuple[Tensor, Tensor] | None = None,
    out_scale: Tensor | float | None = None,
    accumulate: bool = False,
    out: Tensor | None = None,
    out_format: Format | str | None = None,
    groups: int = 1,
    offsets: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor | QuantizedTensor:
    """`scaled_gemm` with the kernel that ``choose`` returns."""
    check_untraced("scaled_gemm")
    slices = _checked_operands(a, b)
    first = slices[0]
    m, k = first.shape[0], b.shape[0]
    groups = _group_count(m, b, groups, offsets)
    n = b.shape[1] // groups
    form = _out_format(out_format, out_scale, accumulate, first)
    if accumulate and out is None:
        raise ShapeError("scaled_gemm: accumulate adds to out, and out is None; pass out=")
    half = torch.float16 if form is Format.FLOAT16 else torch.bfloat16
    x0, x = _checked_cross(cross, (m, n), activation, half)
    check_same_device(
        "scaled_gemm", a=first.data, b=b.data, bias=bias, out=out, offsets=offsets, x0=x0, x=x,
        out_scale=out_scale if isinstance(out_scale, Tensor) else None,
        **{f"a[{i}]": x.data for i, x in enumerate(slices) if i},
    )  # fmt: skip
    strided = check_out("scaled_gemm", out, (m, n), form.dtype)
    if form.is_fp8 and out is not None:  # rows of an FP8 output are padded
        strided = m > 1 and out.stride(0) != pitch_of(n)
    check_bias("scaled_gemm", bias, n, torch.bfloat16 if form.is_fp8 else form.dtype)
    scale = None if out_scale is None else checked_scale("scaled_gemm", out_scale, first.device)
    epilogue = PLAIN
    extra: tuple[Epilogue, ...] = ()
    if (
        activation != "none"
        or cross
        or out_scale is not None
        or accumulate
        or groups > 1
        or offsets is not None
        or batch_invariant
    ):
        epilogue = Epilogue(activation, x0, x, scale, accumulate, groups, offsets, batch_invariant)
        extra = (epilogue,)
    alignment = min(operand_of(x.data).alignment for x in slices)
    problem = Problem(
        op="scaled_gemm", m=-(-m // groups), n=n, k=k, batch=groups,
        a=replace(operand_of(first.data), granularity=first.granularity, alignment=alignment),
        b=replace(operand_of(b.data), granularity=b.granularity, layout=Layout.COLUMN),
        epilogue=epilogue.name(bias is not None), out_format=form, out_strided=strided,
        out_granularity=Granularity.TENSOR if form.is_fp8 else Granularity.NONE,
        accumulate=accumulate,
    )  # fmt: skip
    result: Tensor | QuantizedTensor | None = out
    given = out
    if out is None:
        if form.is_fp8:
            assert scale is not None  # checked above
            out = empty_data(m, n, form.dtype, first.device)
            result = QuantizedTensor(out, scale, Granularity.TENSOR)
        else:
            result = out = torch.empty((m, n), dtype=form.dtype, device=first.device)
    if m and n:
        needs = {
            "offsets": offsets is not None,
            "k_slices": len(slices) > 1,
            "batch_invariant": batch_invariant,
        }
        kernel = choose(problem, first.data, frozenset(name for name in needs if needs[name]))
        operands = (*_left(slices), *b.transpose, out, bias)
        with torch.no_grad():  # torch's emulation would differentiate bias and cross
            kernel.launch(*operands, kernel.workspace(*operands, *extra), *extra)
        note_write(given)
    assert result is not None
    return result


def _left(slices: Sequence[QuantizedTensor]) -> tuple[object, object]:
    """Data and scales of a as a launcher takes them."""
    if len(slices) == 1:
        return slices[0].data, slices[0].scale
    return tuple(x.data for x in slices), tuple(x.scale for x in slices)


def _checked_operands(a: Quantized, b: QuantizedTensor) -> Sequence[QuantizedTensor]:
    slices = [a] if isinstance(a, QuantizedTensor) else a
    listed = isinstance(slices, list | tuple)
    if not listed or not slices:
        found = "no slices" if listed else type(a).__name__
        raise FormatError(
            f"scaled_gemm: a is {found}; expected a QuantizedTensor with scales, or a list of them"
        )
    names = ["a"] if slices[0] is a else [f"a[{i}]" for i in range(len(slices))]
    for name, x in (*zip(names, slices, strict=True), ("b", b)):
        if not isinstance(x, QuantizedTensor) or x.scale is None:
            raise FormatError(
                f"scaled_gemm: {name} is {type(x).__name__}; expected a QuantizedTensor with scales"
            )
    if any(x.transposed for x in slices) or not b.transposed:
        raise ShapeError("scaled_gemm: a must be quantize(x) and b quantize(weight).t()")
    m, k = slices[0].shape[0], sum(x.shape[1] for x in slices)
    if b.shape[0] != k:
        found = f"a is {[m, k]}" if len(slices) == 1 else f"slices of a make {[m, k]}"
        raise ShapeError(f"scaled_gemm: {found} and b is {list(b.shape)}; b must be [{k}, n]")
    if k == 0:
        raise ShapeError(f"scaled_gemm: a is {[m, k]}; k must be at least 1")
    if len(slices) > 1:
        _check_slices(slices)
    return slices


def _check_slices(slices: Sequence[QuantizedTensor]) -> None:
    first = slices[0]
    for place, x in enumerate(slices):
        name = f"a[{place}]"
        if (x.format, x.granularity) != (first.format, first.granularity):
            raise FormatError(
                f"scaled_gemm: a[0] is {first.format.value}/{first.granularity.value} and {name} "
                f"{x.format.value}/{x.granularity.value}; slices must be quantized alike"
            )
        if x.shape[0] != first.shape[0]:
            raise ShapeError(
                f"scaled_gemm: a[0] has {first.shape[0]} rows and {name} {x.shape[0]}; slices are "
                "[m, some of k]"
            )
        if not x.shape[1]:
            raise ShapeError(f"scaled_gemm: {name} has no columns; leave it out")
        if place < len(slices) - 1 and x.shape[1] % GROUP:
            raise ShapeError(
                f"scaled_gemm: {name} has {x.shape[1]} columns; all slices but the last must hold "
                f"a multiple of {GROUP}"
            )
        assert x.scale is not None and first.scale is not None  # checked above
        shared = x.scale.data_ptr() == first.scale.data_ptr()
        if first.granularity is not Granularity.GROUP and not shared:
            raise FormatError(
                f"scaled_gemm: a[0] and {name} have different {first.granularity.value} scales; "
                "slices share one tensor of scales, or have 1x128 scales"
            )


def _group_count(m: int, b: QuantizedTensor, groups: int, offsets: Tensor | None) -> int:
    if offsets is not None:
        usable = isinstance(offsets, Tensor) and offsets.dim() == 1 and len(offsets) > 1
        if not usable or offsets.dtype != torch.int32 or offsets.stride(0) != 1:
            found = (
                f"{list(offsets.shape)} {offsets.dtype}"
                if isinstance(offsets, Tensor)
                else type(offsets).__name__
            )
            raise ShapeError(
                f"scaled_gemm: offsets is {found}; expected contiguous int32 [groups + 1]"
            )
        if groups not in (1, len(offsets) - 1):
            raise ShapeError(
                f"scaled_gemm: groups is {groups}, but offsets define {len(offsets) - 1}; "
                "leave groups out"
            )
        groups = len(offsets) - 1
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ShapeError(f"scaled_gemm: groups is {groups!r}; expected an integer >= 1")
    if b.shape[1] % groups or (offsets is None and m % groups):
        rows = "" if offsets is not None else f"a has {m} rows and "
        raise ShapeError(
            f"scaled_gemm: {rows}b has {b.shape[1]} columns for {groups} groups; both must be "
            "multiples of it (pass offsets= where groups have different numbers of rows)"
        )
    return groups


def _out_format(
    given: Format | str | None, out_scale: object, accumulate: bool, a: QuantizedTensor
) -> Format:
    if given is not None:
        form = format_named("scaled_gemm", given)
    elif out_scale is not None:
        form = fp8_format(device_of(a.data))
    else:
        form = Format.FLOAT32 if accumulate else Format.BFLOAT16
    if form.is_fp8 is (out_scale is None):
        need = "needs out_scale=, its decode scale" if form.is_fp8 else "takes no out_scale"
        raise FormatError(f"scaled_gemm: out_format is {form.value!r}, which {need}")
    if accumulate and form is not Format.FLOAT32:
        raise FormatError(
            f"scaled_gemm: out_format is {form.value!r}; accumulate adds to float32 only"
        )
    return form


def _checked_cross(
    cross: tuple[Tensor, Tensor] | None,
    shape: tuple[int, int],
    activation: str,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    if activation not in ACTIVATIONS:
        raise UnknownNameError(
            f"scaled_gemm: activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}"
        )
    if cross is None:
        return None, None
    if activation != "none":
        raise UnknownNameError(
            f"scaled_gemm: activation is {activation!r} and cross is given; choose one"
        )
    if not isinstance(cross, tuple | list) or len(cross) != 2:
        raise ShapeError("scaled_gemm: cross must be (x0, x)")
    for name, x in zip(("x0", "x"), cross, strict=True):
        check_matrix("scaled_gemm", name, x)
        if tuple(x.shape) != shape or x.dtype != dtype or x.stride(1) != 1 < shape[1]:
            raise ShapeError(
                f"scaled_gemm: {name} of cross is {list(x.shape)} {x.dtype} with strides "
                f"{x.stride()}; expected {list(shape)} {dtype}, columns contiguous"
            )
    return cross[0], cross[1]


# --- as ops of torch.compile

_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")


def _traced_scaled_gemm(
    a: Quantized,
    b: QuantizedTensor,
    bias: Tensor | None,
    activation: str,
    cross: tuple[Tensor, Tensor] | None,
    out_scale: Tensor | float | None,
    accumulate: bool,
    out: Tensor | None,
    out_format: Format | str | None,
    groups: int,
    offsets: Tensor | None,
    budget: ErrorBudget | float | None,
    batch_invariant: bool,
) -> Tensor | QuantizedTensor:
    op = "scaled_gemm"
    slices = [a] if isinstance(a, QuantizedTensor) else list(a)
    for name, operand in (("a", slices[0] if slices else None), ("b", b)):
        if not isinstance(operand, QuantizedTensor) or operand.scale is None:
            raise FormatError(f"{op}: {name} must be a QuantizedTensor with scales")
    left = [parts_of(op, "a", x, False) for x in slices]
    right, right_scale, _, right_form = parts_of(op, "b", b, True)
    x0, x = (None, None) if cross is None else cross
    scale = out_scale
    if isinstance(scale, Tensor):
        scale = checked_scale(op, scale.detach(), scale.device)
    elif scale is not None:
        check_number(op, scale)
        scale = output_scale(right, None, None, "", 0, "", float(scale))
    if accumulate and out is None:
        raise ShapeError("scaled_gemm: accumulate adds to out, and out is None; pass out=")
    form = text_of(out_format)
    rest = (
        right, right_scale, right_form,
        *(None if t is None else t.detach() for t in (bias, x0, x)), scale, offsets, activation,
        bool(accumulate), form, groups, limits_of(budget), bool(batch_invariant),
    )  # fmt: skip
    ops = torch.ops.lokakern
    operands: tuple[Any, ...] = left[0][:2]
    if len(slices) > 1:
        operands = [p[0] for p in left], [p[1] for p in left]
    given = (*operands, left[0][3], *rest)
    if out is not None:
        (ops.scaled_gemm_slices_out if len(slices) > 1 else ops.scaled_gemm_out)(out, *given)
        return out
    data: Tensor = (ops.scaled_gemm_slices if len(slices) > 1 else ops.scaled_gemm)(*given)
    return data if scale is None else QuantizedTensor(data, scale, Granularity.TENSOR)


def _called(out: Tensor | None, *given: Any) -> Tensor:
    """The eager call with the arguments of an op; its data."""
    (left, left_scale, left_form, right, right_scale, right_form, bias, x0, x, scale, offsets,
     activation, accumulate, out_format, groups, limits, batch_invariant) = given  # fmt: skip
    a: Quantized
    if isinstance(left, Tensor):
        a = QuantizedTensor(left, left_scale, Granularity(left_form))
    else:
        a = [
            QuantizedTensor(data, scale, Granularity(left_form))
            for data, scale in zip(left, left_scale, strict=True)
        ]
    with torch.no_grad():
        made = scaled_gemm(
            a, QuantizedTensor(right, right_scale, Granularity(right_form), True), bias=bias,
            activation=activation, cross=None if x0 is None else (x0, x), out_scale=scale,
            accumulate=accumulate, out=out, out_format=out_format or None, groups=groups,
            offsets=offsets, budget=budget_of_limits(limits), batch_invariant=batch_invariant,
        )  # fmt: skip
    return made.data if isinstance(made, QuantizedTensor) else made


def _scaled_gemm_op(*given: Any) -> Tensor:
    return _called(None, *given)


def _scaled_gemm_out_op(out: Tensor, *given: Any) -> None:
    _called(out, *given)


def _scaled_gemm_fake(*given: Any) -> Tensor:
    left, right, scale, offsets = given[0], given[3], given[9], given[10]
    out_format, groups = given[13], given[14]
    first = left if isinstance(left, Tensor) else left[0]
    if offsets is not None:
        groups = offsets.shape[0] - 1
    rows, columns = first.shape[0], right.shape[0] // groups
    if out_format:
        form = format_named("scaled_gemm", out_format)
    else:
        form = Format.BFLOAT16 if scale is None else fp8_format(device_of(first))
    if form.is_fp8:
        return empty_data(rows, columns, form.dtype, first.device)
    return torch.empty((rows, columns), dtype=form.dtype, device=first.device)


_REST = (
    "str a_granularity, Tensor b, Tensor b_scale, str b_granularity, Tensor? bias, Tensor? x0, "
    "Tensor? x, Tensor? out_scale, Tensor? offsets, str activation, bool accumulate, "
    "str out_format, SymInt groups, float[] limits, bool batch_invariant"
)
_ONE, _SLICES = "Tensor a, Tensor a_scale", "Tensor[] a, Tensor[] a_scale"
recorded_op(_LIBRARY, f"scaled_gemm({_ONE}, {_REST}) -> Tensor", _scaled_gemm_op)
plain_op(_LIBRARY, f"scaled_gemm_slices({_SLICES}, {_REST}) -> Tensor", _scaled_gemm_op)
for _name in ("scaled_gemm", "scaled_gemm_slices"):
    torch.library.register_fake(f"lokakern::{_name}", _scaled_gemm_fake, lib=_LIBRARY)
for _name, _operands in (("scaled_gemm_out", _ONE), ("scaled_gemm_slices_out", _SLICES)):
    _schema = f"{_name}(Tensor(a!) out, {_operands}, {_REST}) -> ()"
    plain_op(_LIBRARY, _schema, _scaled_gemm_out_op)
    torch.library.register_fake(f"lokakern::{_name}", lambda *_: None, lib=_LIBRARY)
