"""`quantize`, `quantize_transpose` and `dequantize`: checks, choice of a kernel, launch."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from lokakern.errors import FormatError, ShapeError
from lokakern.functional.checks import (
    check_matrix,
    check_same_device,
    check_untraced,
    granularity_named,
    note_write,
    operand_of,
)
from lokakern.functional.traced import text_of
from lokakern.native import plain_op, recorded_op, replayed
from lokakern.problems import format_named
from lokakern.registry.register import fp8_format
from lokakern.selection.arguments import device_of
from lokakern.selection.kernel_policy import Chooser, fastest_within
from lokakern.types import Format, Granularity, Problem, QuantizedTensor, empty_data


@replayed
def quantize(
    x: Tensor,
    granularity: Granularity | str = Granularity.ROW,
    *,
    out_format: Format | str | None = None,
    power_of_two: bool = False,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize to FP8, ``x ~ data * scale``, as DESIGN.md defines, with the fastest kernel.

    Args:
        x: ``[rows, columns]``, bfloat16, float16 or float32; a GEMM sums over columns. The
            transpose of a contiguous tensor is read without a copy; outputs are row-major.
        granularity: "tensor", "row", "1x128", "128x128" or "1x32" (MX: scales are powers of two in
            one byte).
        out_format: "e4m3fn", "e5m2", "e4m3fnuz" or "e5m2fnuz"; None means the device's E4M3.
        power_of_two: Whether scales are rounded up to powers of two; not for "tensor".
        scale: A static scale for granularity "tensor", float32 with one element, from 2^-126 to
            2^125; larger values of ``x`` saturate. The result shares its memory.
        amax: For delayed scaling, with `scale`: float32 with one element, updated to the largest
            finite magnitude of ``x`` if that is larger. Set it to 0 to restart.

    Raises:
        ShapeError: ``x`` is not a matrix, or `scale` or `amax` does not have one element.
        FormatError: The dtype, format or granularity is not supported, or not with the other
            options.
        DeviceError: Tensors are on different devices.
    """
    if is_compiling():
        return _traced_quantize(x, granularity, out_format, power_of_two, scale, amax)
    options = {"power_of_two": power_of_two, "scale": scale, "amax": amax}
    return quantize_by(fastest_within(None), x, granularity, out_format, **options)


Both = tuple[QuantizedTensor, QuantizedTensor]
BothAndSums = tuple[QuantizedTensor, QuantizedTensor, Tensor]


@overload
def quantize_transpose(
    x: Tensor,
    granularity: Granularity | str = ...,
    *,
    out_format: Format | str | None = ...,
    power_of_two: bool = ...,
    scale: Tensor | None = ...,
    amax: Tensor | None = ...,
    column_sums: Literal[False] = ...,
) -> Both: ...


@overload
def quantize_transpose(
    x: Tensor,
    granularity: Granularity | str = ...,
    *,
    out_format: Format | str | None = ...,
    power_of_two: bool = ...,
    scale: Tensor | None = ...,
    amax: Tensor | None = ...,
    column_sums: Literal[True],
) -> BothAndSums: ...


@replayed
def quantize_transpose(
    x: Tensor,
    granularity: Granularity | str = Granularity.GROUP,
    *,
    out_format: Format | str | None = None,
    power_of_two: bool = False,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    column_sums: bool = False,
) -> Both | BothAndSums:
    """Quantize ``x`` and its transpose in one kernel, for the GEMMs of a backward pass.

    Args:
        x: As `quantize` takes it.
        granularity: Of both results; groups of "1x128" run along the columns of each.
        out_format: As of `quantize`.
        power_of_two: As of `quantize`.
        scale: As of `quantize`.
        amax: As of `quantize`.
        column_sums: Whether to return the column sums of ``x``: the gradient of a bias if ``x`` is
            the gradient of an output. `lokakern.sums` defines their order and error bound; all
            kernels return the same bits.

    Returns:
        `quantize` of ``x`` and of ``x.t()``, and the column sums, if any: float32 ``[columns]``.

    Raises:
        LokakernError: As `quantize`.
    """
    if is_compiling():
        return _traced_quantize_transpose(
            x, granularity, out_format, power_of_two, scale, amax, column_sums
        )
    return quantize_transpose_by(
        fastest_within(None), x, granularity, out_format,
        column_sums=column_sums, power_of_two=power_of_two, scale=scale, amax=amax,
    )  # fmt: skip


def quantize_by(
    choose: Chooser,
    x: Tensor,
    granularity: Granularity | str,
    out_format: Format | str | None,
    **options: Any,
) -> QuantizedTensor:
    """`quantize` with the kernel that ``choose`` returns."""
    problem, scale, amax = _problem_of("quantize", x, granularity, out_format, **options)
    made = _Output(x, problem, scale)
    if made.empty:
        return made.tensor()
    kernel = choose(problem, x)
    workspace = kernel.workspace(x, made.data, made.scale)
    if amax is not None:
        workspace = (amax, *workspace[1:])
    # torch.ldexp, of 1x32 scales, reads wrong addresses where another GPU is the current one
    # (torch 2.11, pytorch issue 189567).
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernel.launch(x.detach(), made.data, made.scale, workspace)
    note_write(amax)
    return made.tensor()


def quantize_transpose_by(
    choose: Chooser,
    x: Tensor,
    granularity: Granularity | str,
    out_format: Format | str | None,
    *,
    column_sums: bool = False,
    **options: Any,
) -> Both | BothAndSums:
    """`quantize_transpose` with the kernel that ``choose`` returns."""
    problem, scale, amax = _problem_of("quantize_transpose", x, granularity, out_format, **options)
    sums = None
    if column_sums:
        words = [] if problem.epilogue == "none" else [problem.epilogue]
        problem = replace(problem, epilogue="+".join([*words, "column_sums"]))
        sums = torch.empty(problem.k, dtype=torch.float32, device=x.device)
    made, turned = _Output(x, problem, scale), _Output(x.t(), problem, None)
    if made.empty:
        both = made.tensor(), turned.tensor()
        return both if sums is None else (*both, sums.zero_())
    kernel = choose(problem, x)
    outputs = (made.data, made.scale, turned.data, turned.scale, sums)
    workspace = kernel.workspace(x, *outputs)
    if amax is not None:
        workspace = (amax, *workspace[1:])
    kernel.launch(x.detach(), *outputs, workspace)
    note_write(amax)
    both = made.tensor(), turned.tensor()
    return both if sums is None else (*both, sums)


class _Output:
    """Allocated output of a quantizer."""

    __slots__ = ("data", "empty", "granularity", "scale")

    def __init__(self, x: Tensor, problem: Problem, scale: Tensor | None) -> None:
        rows, columns = x.shape
        self.granularity = problem.out_granularity
        self.data = empty_data(rows, columns, problem.out_format.dtype, x.device)
        self.empty = not (rows and columns)
        if scale is None:
            scale = self.granularity.empty_scale(rows, columns, x.device)
            if self.empty:
                scale.fill_(1.0)
        self.scale = scale

    def tensor(self) -> QuantizedTensor:
        return QuantizedTensor(self.data, self.scale, self.granularity)


def _problem_of(
    op: str,
    x: Tensor,
    granularity: Granularity | str,
    out_format: Format | str | None,
    *,
    power_of_two: bool = False,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Problem, Tensor | None, Tensor | None]:
    """The problem of a call, and its scale and amax as kernels take them."""
    check_matrix(op, "x", x)
    if Format.of(x.dtype).is_fp8:
        raise FormatError(
            f"{op}: x is {x.dtype}; expected torch.bfloat16, torch.float16 or torch.float32"
        )
    form = fp8_format(device_of(x)) if out_format is None else format_named(op, out_format)
    if not form.is_fp8:
        raise FormatError(f"{op}: out_format is {form.value!r}; expected an FP8 format")
    granularity = granularity_named(op, granularity)
    by_tensor = granularity is Granularity.TENSOR
    if power_of_two and by_tensor:
        raise FormatError(
            f"{op}: power_of_two with granularity 'tensor'; expected row, 1x128 or 128x128"
        )
    if amax is not None and scale is None:
        raise FormatError(f"{op}: amax without scale; pass scale=, too")
    # 1x32 scales are always powers of two.
    chosen = power_of_two and granularity is not Granularity.MX
    epilogue = "power_of_two" if chosen else "none"
    if scale is not None:
        if not by_tensor:
            raise FormatError(
                f"{op}: scale with granularity {granularity.value!r}; a static scale needs "
                "granularity 'tensor'"
            )
        check_same_device(op, x=x, scale=scale, amax=amax)
        scale = _single(op, "scale", scale)
        amax = None if amax is None else _single(op, "amax", amax)
        epilogue = "static" if amax is None else "delayed"
    rows, columns = x.shape
    problem = Problem(
        op=op, m=rows, n=1, k=columns, a=operand_of(x), epilogue=epilogue, out_format=form,
        out_granularity=granularity,
    )  # fmt: skip
    return problem, scale, amax


def _single(op: str, name: str, x: Tensor) -> Tensor:
    """A tensor of one element as kernels take it, ``[1, 1]``.

    Raises:
        ShapeError: It has more elements, or is not float32.
    """
    if x.numel() != 1 or x.dtype is not torch.float32:
        raise ShapeError(
            f"{op}: {name} is {list(x.shape)} {x.dtype}; expected one element of torch.float32"
        )
    return x.detach().view(1, 1)


@replayed
def dequantize(x: QuantizedTensor, out_format: Format | str = Format.BFLOAT16) -> Tensor:
    """``data * scale`` in float32, rounded to ``out_format``, in the orientation of ``x``.

    Raises:
        FormatError: ``out_format`` is an FP8 format, or ``x`` has no scales.
    """
    if is_compiling() and isinstance(x, QuantizedTensor) and x.scale is not None:
        given = (x.data, x.scale, x.granularity.value, text_of(out_format))
        out: Tensor = torch.ops.lokakern.dequantize(*given)
        return out.t() if x.transposed else out
    return dequantize_by(fastest_within(None), x, out_format)


def dequantize_by(choose: Chooser, x: QuantizedTensor, out_format: Format | str) -> Tensor:
    check_untraced("dequantize")
    form = format_named("dequantize", out_format)
    if form.is_fp8:
        raise FormatError(
            f"dequantize: out_format is {form.value!r}; expected bfloat16, float16 or float32"
        )
    if not isinstance(x, QuantizedTensor) or x.scale is None:
        raise FormatError(
            f"dequantize: x is {type(x).__name__}; expected a QuantizedTensor with scales"
        )
    rows, columns = x.data.shape
    out = torch.empty((rows, columns), dtype=form.dtype, device=x.device)
    if rows and columns:
        operand = replace(operand_of(x.data), granularity=x.granularity)
        problem = Problem(op="dequantize", m=rows, n=1, k=columns, a=operand, out_format=form)
        kernel = choose(problem, x.data)
        kernel.launch(x.data, x.scale, out, kernel.workspace(x.data, x.scale, out))
    return out.t() if x.transposed else out


# --- as ops of torch.compile

_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")


def _traced_words(
    op: str,
    granularity: Granularity | str,
    out_format: Format | str | None,
    power_of_two: bool,
    scale: Tensor | None,
    amax: Tensor | None,
) -> tuple[Any, ...]:
    """All but x, as ops take them, with a static scale as ``[1, 1]``."""
    if scale is None and amax is not None:
        raise FormatError(f"{op}: amax without scale; pass scale=, too")
    if scale is not None:
        scale = _single(op, "scale", scale)
    return text_of(granularity), text_of(out_format), bool(power_of_two), scale, amax


def _traced_quantize(
    x: Tensor,
    granularity: Granularity | str,
    out_format: Format | str | None,
    power_of_two: bool,
    scale: Tensor | None,
    amax: Tensor | None,
) -> QuantizedTensor:
    words = _traced_words("quantize", granularity, out_format, power_of_two, scale, amax)
    x, form, ops = x.detach(), Granularity(words[0]), torch.ops.lokakern
    if scale is not None:
        call = ops.quantize_static if amax is None else ops.quantize_delayed
        given = words if amax is not None else words[:-1]
        return QuantizedTensor(call(x, *given), words[3], form)
    data, made = ops.quantize(x, *words[:3])
    return QuantizedTensor(data, made, form)


def _traced_quantize_transpose(
    x: Tensor,
    granularity: Granularity | str,
    out_format: Format | str | None,
    power_of_two: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    column_sums: bool,
) -> Both | BothAndSums:
    words = _traced_words("quantize_transpose", granularity, out_format, power_of_two, scale, amax)
    x, form, ops = x.detach(), Granularity(words[0]), torch.ops.lokakern
    if scale is None:
        call = ops.quantize_transpose_sums if column_sums else ops.quantize_transpose
        data, made, turned, turned_scale, *sums = call(x, *words[:3])
    else:
        name = "static" if amax is None else "delayed"
        call = getattr(ops, f"quantize_transpose_{name}{'_sums' if column_sums else ''}")
        given = words if amax is not None else words[:-1]
        data, turned, turned_scale, *sums = call(x, *given)
        made = words[3]
    both = QuantizedTensor(data, made, form), QuantizedTensor(turned, turned_scale, form)
    return (*both, sums[0]) if column_sums else both


def _quantize_op(
    x: Tensor, granularity: str, out_format: str, power_of_two: bool, scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> Any:  # fmt: skip
    made = quantize(
        x, granularity, out_format=out_format or None, power_of_two=power_of_two, scale=scale,
        amax=amax,
    )  # fmt: skip
    return (made.data, made.scale) if scale is None else made.data


def _quantize_fake(
    x: Tensor, granularity: str, out_format: str, _power_of_two: bool, scale: Tensor | None = None,
    _amax: Tensor | None = None,
) -> Any:  # fmt: skip
    data, made = _empty_output(x, granularity, out_format)
    return (data, made) if scale is None else data


def _quantize_transpose_op(
    column_sums: bool, x: Tensor, granularity: str, out_format: str, power_of_two: bool,
    scale: Tensor | None = None, amax: Tensor | None = None,
) -> Any:  # fmt: skip
    made, turned, *sums = quantize_transpose_by(
        fastest_within(None), x, granularity, out_format or None, column_sums=column_sums,
        power_of_two=power_of_two, scale=scale, amax=amax,
    )  # fmt: skip
    own = () if scale is not None else (made.scale,)
    return (made.data, *own, turned.data, turned.scale, *sums)


def _quantize_transpose_fake(
    column_sums: bool, x: Tensor, granularity: str, out_format: str, _power_of_two: bool,
    scale: Tensor | None = None, _amax: Tensor | None = None,
) -> Any:  # fmt: skip
    data, made = _empty_output(x, granularity, out_format)
    turned = _empty_output(x.t(), granularity, out_format)
    sums = (x.new_empty(x.shape[1], dtype=torch.float32),) if column_sums else ()
    return (data, *(() if scale is not None else (made,)), *turned, *sums)


def _empty_output(x: Tensor, granularity: str, out_format: str) -> tuple[Tensor, Tensor]:
    """Data and scales as `_Output` allocates them."""
    form = format_named("quantize", out_format) if out_format else fp8_format(device_of(x))
    rows, columns = x.shape
    scales = granularity_named("quantize", granularity)
    data = empty_data(rows, columns, form.dtype, x.device)
    return data, scales.empty_scale(rows, columns, x.device)


def _dequantize_op(data: Tensor, scale: Tensor, granularity: str, out_format: str) -> Tensor:
    return dequantize(QuantizedTensor(data, scale, Granularity(granularity)), out_format)


def _dequantize_fake(data: Tensor, _scale: Tensor, _granularity: str, out_format: str) -> Tensor:
    return torch.empty(
        data.shape, dtype=format_named("dequantize", out_format).dtype, device=data.device
    )


_QUANTIZER = "Tensor x, str granularity, str out_format, bool power_of_two"


def _define() -> None:
    """Ops for dynamic, static and delayed scales, which differ in what they return and write."""
    for suffix, scale, made in (
        ("", "", "Tensor, "),
        ("_static", ", Tensor scale", ""),
        ("_delayed", ", Tensor scale, Tensor(a!) amax", ""),
    ):
        result = f"({made}Tensor)" if made else "Tensor"
        ops = [(f"quantize{suffix}", result, _quantize_op, _quantize_fake)] + [
            (
                f"quantize_transpose{suffix}{'_sums' if sums else ''}",
                f"(Tensor, {made}Tensor, Tensor{', Tensor' if sums else ''})",
                functools.partial(_quantize_transpose_op, sums),
                functools.partial(_quantize_transpose_fake, sums),
            )
            for sums in (False, True)
        ]
        for name, results, call, fake in ops:
            define = recorded_op if suffix != "_delayed" else plain_op
            define(_LIBRARY, f"{name}({_QUANTIZER}{scale}) -> {results}", call)
            torch.library.register_fake(f"lokakern::{name}", fake, lib=_LIBRARY)


_define()
recorded_op(
    _LIBRARY,
    "dequantize(Tensor data, Tensor scale, str granularity, str out_format) -> Tensor",
    _dequantize_op,
)
torch.library.register_fake("lokakern::dequantize", _dequantize_fake, lib=_LIBRARY)
