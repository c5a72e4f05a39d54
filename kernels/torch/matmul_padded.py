"""Unquantized matrix products of operands that are padded with zeros to aligned sizes.

    d[m, n] = sum_k a[m, k] * b[k, n] + bias[n]

cuBLAS and hipBLASLt have their fastest bfloat16 kernels where every row starts at a multiple of 16
bytes, that is of 8 elements. An axis is padded if an operand or the output is contiguous along it,
as torch.compile does (`torch._inductor.fx_passes.pad_mm`), except m and n of 1. Zeros along k add
nothing to a sum. What lies in added rows of a and columns of b reaches no output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lokakern.problems import padded_sizes
from lokakern.registry.register import register
from lokakern.types import ACCEPTED, Device, Format, Problem, QuantizedTensor, Rejected, Support

ALIGNMENT = 8  # elements of 16 bits


def _supports(problem: Problem, _device: Device) -> Support:
    operands = [problem.a] if problem.prepared else [problem.a, problem.b]
    if any(x is None or x.format is not Format.BFLOAT16 for x in operands):
        return Rejected("takes bfloat16 operands")
    if problem.out_format is not Format.BFLOAT16:
        return Rejected(f"writes bfloat16, not {problem.out_format.value}")
    if padded_sizes(problem) == (problem.m, problem.n, problem.k):
        return Rejected(f"sizes are multiples of {ALIGNMENT}: nothing to pad")
    return ACCEPTED


def _up(size: int, least: int = 2) -> int:
    return size if size < least else -(-size // ALIGNMENT) * ALIGNMENT


def _matrix(b: Tensor | QuantizedTensor) -> Tensor:
    """The unquantized right operand."""
    if not isinstance(b, QuantizedTensor):
        return b
    return (b.data if b.source is None else b.source).t()


def _sizes(a: Tensor, b: Tensor, is_prepared: bool) -> tuple[int, int, int]:
    """m, n and k of the padded product, as `padded_sizes` of its problem."""
    (m, k), n = a.shape, b.shape[1]
    is_column_major = _is_column_major(a)
    pads_k = not is_column_major or is_prepared or b.stride(0) == 1
    return _up(m) if is_column_major else m, _up(n), _up(k, 1) if pads_k else k


def _is_column_major(x: Tensor) -> bool:
    return x.stride(0) == 1 and x.stride(1) != 1


def _room(x: Tensor, rows: int, columns: int) -> Tensor:
    """An empty matrix in the layout of x."""
    if _is_column_major(x):
        return x.new_empty((columns, rows)).t()
    return x.new_empty((rows, columns))


def _fill(x: Tensor, wide: Tensor, pads_rows: bool) -> Tensor:
    """Write x, and zeros along k: in added rows of b, and in added columns of a."""
    rows, columns = x.shape
    wide[:rows, :columns].copy_(x)
    zeros = wide[rows:, :columns] if pads_rows else wide[:rows, columns:]
    if zeros.numel():
        zeros.zero_()
    return wide


def pad_weight(weight: Tensor) -> Tensor:
    """A weight ``[n, k]`` as this kernel reads it, for `QuantizedTensor.padded`; a copy."""
    n, k = weight.shape
    return _fill(weight, _room(weight, _up(n), _up(k, 1)), pads_rows=False)


def _workspace(a: Tensor, b: Tensor | QuantizedTensor) -> tuple[Tensor, ...]:
    """Room for what is padded, in this order: a, b, the output and the bias.

    A prepared weight is padded once: by `prepare_weight`, or here.
    """
    right = _matrix(b)
    m, n, k = _sizes(a, right, isinstance(b, QuantizedTensor))
    rows, columns = right.shape
    made = [] if a.shape == (m, k) else [_room(a, m, k)]
    if (rows, columns) != (k, n):
        if isinstance(b, QuantizedTensor):
            made.append((pad_weight(right.t()) if b.padded is None else b.padded).t())
        else:
            made.append(_room(right, k, n))
    if (a.shape[0], columns) != (m, n):
        made.append(a.new_empty((m, n)))
    if columns != n:
        made.append(a.new_empty(n))
    return tuple(made)


def _multiply(
    a: Tensor,
    b: Tensor | QuantizedTensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: tuple[Tensor, ...],
) -> None:
    room = list(workspace)
    left, right = a, _matrix(b)
    m, n, k = _sizes(a, right, isinstance(b, QuantizedTensor))
    if a.shape != (m, k):
        left = _fill(a, room.pop(0), pads_rows=False)
    if right.shape != (k, n):
        wide = room.pop(0)
        right = wide if isinstance(b, QuantizedTensor) else _fill(right, wide, pads_rows=True)
    product = out if out.shape == (m, n) else room.pop(0)
    if bias is None:
        torch.mm(left, right, out=product)
    else:
        if len(bias) != n:  # what is added to unread columns does not matter
            wide = room.pop(0)
            wide[: len(bias)].copy_(bias)
            bias = wide
        torch.addmm(bias, left, right, out=product)
    if product is not out:
        out.copy_(product[: out.shape[0], : out.shape[1]])


# Of its aligned rows only long sums are split, see `Kernel.bound_at`: the bound of torch.bf16.
register(
    "gemm",
    name="bf16_padded",
    accumulation="float32",
    supports=_supports,
    workspace=_workspace,
    odd_kernel_err_bound=17.0,
    pads=True,
)(_multiply)
