"""Uninitialized operands of a launch, in the layouts of sweeps and of compilation ahead of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lokakern.epilogue import ACTIVATIONS
from lokakern.errors import UnsupportedError
from lokakern.gradients import empty_gradients
from lokakern.problems import (
    NORM_VECTORS,
    bias_format,
    epilogue_of,
    has_column_sums,
    is_plain,
    row_length,
)
from lokakern.registry import float16
from lokakern.registry.ops import EPILOGUE_OPS, NORM_OPS
from lokakern.registry.register import Kernel
from lokakern.types import (
    Epilogue,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Operand,
    Problem,
    QuantizedTensor,
    empty_data,
    norm_form,
)

# Arguments of a launcher before its workspace and epilogue; docs/kernels.md says what they are.
OPERANDS = {
    "quantize": ("x", "data", "scale"),
    "quantize_transpose": ("x", "data", "scale", "data_t", "scale_t", "sums"),
    "dequantize": ("data", "scale", "out"),
    "scaled_gemm": ("a", "a_scale", "b", "b_scale", "out", "bias"),
    "gemm": ("a", "b", "out", "bias"),
    "gemm_norm": ("a", "b", "out"),
    "norm_quantize": ("x", "out"),
    "norm_backward": ("dd", "y", "outputs"),
}


def named_operands(problem: Problem) -> dict[str, Tensor]:
    """Tensors of a launch by name, without memory; parts of quantized ones as ``b.scale``."""
    given = empty_operands(problem, torch.device("meta"))
    found: dict[str, Tensor] = {}
    for name, operand in zip(OPERANDS[problem.op], given, strict=True):
        found |= _tensors_of(name, operand)
    return found


def _tensors_of(name: str, operand: Any) -> dict[str, Tensor]:
    if isinstance(operand, Tensor):
        return {name: operand}
    if isinstance(operand, QuantizedTensor):
        parts = {"data": operand.data, "scale": operand.scale, "source": operand.source}
    else:
        parts = {} if operand is None else operand._asdict()  # of `NormGradients`
    return {
        inner: tensor
        for part, value in parts.items()
        for inner, tensor in _tensors_of(f"{name}.{part}", value).items()
    }


def launch_arguments(
    kernel: Kernel, operands: tuple[Any, ...], epilogue: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Arguments of a launch, with a new workspace; that of a gemm depends on a and b only."""
    if kernel.op in EPILOGUE_OPS:
        given = (*operands, *epilogue)
        return *given, kernel.workspace(*given)
    seen = operands[:2] if kernel.op == "gemm" else operands
    return *operands, kernel.workspace(*seen, *epilogue), *epilogue


def empty_operands(problem: Problem, device: torch.device) -> tuple[Any, ...]:
    """Operands and outputs of one launch, as `Kernel` documents them.

    Raises:
        UnsupportedError: A batch of scales has no defined layout, except for scaled GEMMs.
    """
    m, n, k, op, a, b = problem.m, problem.n, problem.k, problem.op, problem.a, problem.b
    batch = () if problem.batch == 1 else (problem.batch,)
    form, granularity = problem.out_format, problem.out_granularity
    if op == "scaled_gemm" and b is not None:  # groups lie below each other
        rows, columns = problem.batch * m, problem.batch * n
        data_a, data_b = _matrix((), rows, k, a, device), _matrix((), k, columns, b, device)
        scale_a = a.granularity.empty_scale(rows, k, device)
        scale_b = b.granularity.empty_scale(columns, k, device).mT
        out = empty_matrix((rows, n), form, device)
        return data_a, scale_a, data_b, scale_b, out, _bias(problem, device)
    if op in NORM_OPS:
        given: list[Any] = [_matrix((), m, k, a, device)]
        if a.granularity is not Granularity.NONE:
            given = [empty_quantized(m, k, a.format, a.granularity, device)]
        if b is not None and b.granularity is Granularity.NONE:
            given.append(_matrix((), k, n, b, device))
        elif b is not None:
            source = _matrix((), n, k, Operand(a.format), device) if problem.prepared else None
            given.append(empty_quantized(n, k, b.format, b.granularity, device, source, True))
        columns = row_length(op, (m, n, k))
        return *given, empty_output(m, columns, form, granularity, device)
    x = _matrix(batch, m, k, a, device)
    if op == "norm_backward":
        outputs = empty_gradients(problem, _norm_epilogue(problem, device), device)
        return x, _matrix((), m, k, a, device), outputs
    if op == "dequantize":
        out = torch.empty((*batch, m, k), dtype=form.dtype, device=device)
        return x, _scale(a.granularity, batch, m, k, device), out
    if b is None:  # a quantizer
        made = empty_data(m, k, form.dtype, device), _scale(granularity, batch, m, k, device)
        if op == "quantize":
            return x, *made
        turned = empty_data(k, m, form.dtype, device), granularity.empty_scale(k, m, device)
        sums = torch.empty(k, device=device) if has_column_sums(problem) else None
        return x, *made, *turned, sums
    right: Any = _matrix(batch, k, n, b, device)
    if problem.prepared:
        source = _matrix(batch, n, k, Operand(a.format), device)
        scale = None
        if b.granularity is not Granularity.NONE:
            scale = _scale(b.granularity, batch, n, k, device)
        right = QuantizedTensor(right.mT, scale, b.granularity, True, source)
    return x, right, empty_matrix((*batch, m, n), form, device), _bias(problem, device)


def empty_epilogue(
    problem: Problem, device: torch.device
) -> tuple[()] | tuple[Epilogue] | tuple[NormEpilogue]:
    """The epilogue argument of a launch, if its kernel takes one."""
    if problem.op in EPILOGUE_OPS:
        return (_norm_epilogue(problem, device),)
    if is_plain(problem):
        return ()
    cross = None
    if problem.epilogue.endswith("cross"):
        shape = (problem.batch * problem.m, problem.n)
        cross = torch.empty(shape, dtype=bias_format(problem).dtype, device=device)
    scale = torch.empty((1, 1), device=device) if problem.out_format.is_fp8 else None
    return (epilogue_of(problem, cross, cross, scale),)


def empty_matrix(shape: tuple[int, ...], form: Format, device: torch.device) -> Tensor:
    """A row-major output; rows of FP8 are padded."""
    if form.is_fp8:
        rows, columns = shape[-2:]
        return empty_data(rows, columns, form.dtype, device)
    return torch.empty(shape, dtype=form.dtype, device=device)


def empty_output(
    rows: int, columns: int, form: Format, granularity: Granularity, device: torch.device
) -> Tensor | QuantizedTensor:
    """An output of an op with a norm."""
    if form.is_fp8:
        return empty_quantized(rows, columns, form, granularity, device)
    return empty_matrix((rows, columns), form, device)


def empty_quantized(
    rows: int,
    columns: int,
    form: Format,
    granularity: Granularity,
    device: torch.device,
    source: Tensor | None = None,
    transposed: bool = False,
) -> QuantizedTensor:
    scale = granularity.empty_scale(rows, columns, device)
    data = empty_data(rows, columns, form.dtype, device)
    return QuantizedTensor(data, scale, granularity, transposed, source)


def _norm_epilogue(problem: Problem, device: torch.device) -> NormEpilogue:
    form = norm_form(problem.epilogue)
    columns = row_length(problem.op, (problem.m, problem.n, problem.k))
    half = torch.float16 if float16.is_in(problem) else torch.bfloat16
    matrix = torch.empty((problem.m, columns), dtype=half, device=device)
    vector = torch.empty(columns, dtype=NORM_VECTORS.dtype, device=device)
    x0 = x = None
    if form.last == "cross":  # two tensors, as a sweep has: where x0 is x, a program reads it once
        x0, x = matrix, torch.empty_like(matrix)
    return NormEpilogue(
        form.norm,
        vector if form.bias else None,
        vector if form.affine else None,
        vector if form.affine else None,
        form.last if form.last in ACTIVATIONS else "none",
        matrix if form.residual or form.residual_last else None,
        form.residual_last,
        matrix if form.last == "gate" else None,
        x0,
        x,
    )


def _bias(problem: Problem, device: torch.device) -> Tensor | None:
    if not problem.epilogue.startswith("bias"):
        return None
    return torch.empty(problem.n, dtype=bias_format(problem).dtype, device=device)


def _matrix(
    batch: tuple[int, ...], rows: int, columns: int, operand: Operand, device: torch.device
) -> Tensor:
    if operand.layout is Layout.COLUMN:
        return _matrix(batch, columns, rows, replace(operand, layout=Layout.ROW), device).mT
    if operand.format.is_fp8 and not batch:
        return empty_data(rows, columns, operand.format.dtype, device)
    strided = operand.layout is Layout.STRIDED
    shape = (*batch, rows, 2 * columns if strided else columns)
    x = torch.empty(shape, dtype=operand.format.dtype, device=device)
    return x[..., ::2] if strided else x


def _scale(
    granularity: Granularity, batch: tuple[int, ...], rows: int, columns: int, device: torch.device
) -> Tensor:
    if batch:
        raise UnsupportedError(f"no layout is defined for {granularity.value} scales of a batch")
    return granularity.empty_scale(rows, columns, device)
