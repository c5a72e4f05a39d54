"""The ops: what is computed, and one float64 reference each that rounds nothing in between.

quantize      x [m, k]                     -> q, s      x ~ q * s
              (quantize_transpose: the same of x and of x.t())
dequantize    q [m, k], s                  -> x         x = q * s
scaled_gemm   a [m, k], b [k, n] quantized -> d [m, n]  d = (a.q a.s) @ (b.q b.s) + bias
gemm          a [m, k], b [k, n]           -> d [m, n]  d = a @ b + bias

A batch is one more axis in front of a, b and d of a gemm; its bias stays [n].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.errors import UnknownNameError
from lokakern.types import QuantizedTensor

Matrix = Tensor | QuantizedTensor


@dataclass(frozen=True, slots=True)
class Op:
    """A mathematical contract.

    Attributes:
        name: What ``dispatch`` is asked for.
        axes: Names of the sizes, in the order of a shape.
        formula: One line.
        reference: Operands to the exact output, float64.
    """

    name: str
    axes: tuple[str, ...]
    formula: str
    reference: Callable[..., Tensor]


def exact(x: Matrix) -> Tensor:
    """An operand's exact value, float64, in its logical orientation."""
    if isinstance(x, QuantizedTensor):
        return numerics.dequantize(x, torch.float64)
    return x.to(torch.float64)


def product(a: Matrix, b: Matrix, bias: Tensor | None = None) -> Tensor:
    """``a @ b + bias`` in float64, ``[m, n]`` or ``[batch, m, n]``."""
    result = exact(a) @ exact(b)
    return result if bias is None else result + bias.to(torch.float64)


def magnitude(a: Matrix, b: Matrix, bias: Tensor | None = None) -> Tensor:
    """``|a| @ |b| + |bias|`` in float64: the scale of rounding errors of a sum."""
    result = exact(a).abs() @ exact(b).abs()
    return result if bias is None else result + bias.to(torch.float64).abs()


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("quantize", ("m", "k"), "x ~ q * s", exact),
        Op("quantize_transpose", ("m", "k"), "x ~ q * s, x.t() ~ q_t * s_t", exact),
        Op("dequantize", ("m", "k"), "x = q * s", exact),
        Op("scaled_gemm", ("m", "n", "k"), "d = (a.q a.s) @ (b.q b.s) + bias", product),
        Op("gemm", ("m", "n", "k"), "d = a @ b + bias", product),
    )
}


def op_named(name: str) -> Op:
    """The op of that name.

    Raises:
        UnknownNameError: There is none.
    """
    try:
        return OPS[name]
    except KeyError:
        raise UnknownNameError(
            f"op {name!r} is unknown; expected one of {', '.join(sorted(OPS))}"
        ) from None
