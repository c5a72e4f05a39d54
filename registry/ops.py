"""The ops: what is computed, and one float64 reference each that rounds nothing in between.

quantize      x [m, k]                     -> q, s      x ~ q * s
              (quantize_transpose: the same of x and of x.t(), and the sums of x's columns)
dequantize    q [m, k], s                  -> x         x = q * s
scaled_gemm   a [m, k], b [k, n] quantized -> d [m, n]  d = f((a.q a.s) @ (b.q b.s) + bias)
gemm          a [m, k], b [k, n]           -> d [m, n]  d = a @ b + bias
gemm_norm     a [m, k], b [k, n]           -> d [m, n]  d = g(norm(a @ b + bias))
norm_quantize x [m, k]                     -> d [m, k]  d = g(norm(x + bias)), k the length of a row
norm_backward dd, y [m, k]                 -> dy [m, k] dy = dd * d g(norm(y)) / d y

f is what `lokakern.types.Epilogue` says, g and what is added beside a bias `NormEpilogue`. A batch
is one more axis in front of a, b and d of a gemm, and the groups of a scaled GEMM; the bias stays
[n]. Operands of gemm_norm are quantized or not; its output is bfloat16, or FP8 with a scale that is
given (of the whole tensor) or made of d as `quantize` makes it (of rows, or 1x128), as is that of
norm_quantize. norm_backward writes what `lokakern.gradients.NormGradients` says: dy quantized as it
lies and transposed, or in bfloat16, or both, and sums of columns. Behind a cross, x0 * z + x, y is
x0, and dy = dd * x0 the gradient of z.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.errors import UnknownNameError
from lokakern.norm import normalize
from lokakern.registry.norm_gradients import gradient_of_rows
from lokakern.types import PLAIN, Epilogue, NormEpilogue, QuantizedTensor

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


# Value, and largest slope, of each activation.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "none": (lambda v: v, 1.0),
    "relu": (torch.relu, 1.0),
    "hardswish": (torch.nn.functional.hardswish, 1.5),
    "silu": (torch.nn.functional.silu, 1.1),
    "gelu": (torch.nn.functional.gelu, 1.13),
    "gelu_tanh": (functools.partial(torch.nn.functional.gelu, approximate="tanh"), 1.13),
}


def finished(
    exact: Tensor,
    magnitude: Tensor,
    bias: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs of exact sums, and the scale of their rounding errors, float64.

    Args:
        exact: Sums, ``[..., m, n]``.
        magnitude: Sums of absolute values.
        bias: ``[n]``.
        epilogue: What comes after it; the format of the output is not its business.
        before: What the outputs are added to.
    """
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    if epilogue.x0 is not None and epilogue.x is not None:
        x0, x = epilogue.x0.double(), epilogue.x.double()
        exact, magnitude = x0 * exact + x, x0.abs() * magnitude + x.abs()
    else:
        function, slope = ACTIVATIONS[epilogue.activation]
        exact, magnitude = function(exact), slope * magnitude
    if before is not None:
        exact, magnitude = exact + before.double(), magnitude + before.double().abs()
    return exact, magnitude


def scaled_sums(
    a: Matrix | Sequence[Matrix], b: Matrix, epilogue: Epilogue = PLAIN
) -> tuple[Tensor, Tensor]:
    """Sums of a scaled GEMM and of absolute values, float64, ``[m, n]``; 0 in rows of no group.

    Args:
        a: ``[m, k]``, or slices of it along k.
        b: ``[k, groups * n]``.
        epilogue: For its groups.
    """
    slices = [a] if isinstance(a, Tensor | QuantizedTensor) else a
    left = torch.cat([exact(x) for x in slices], dim=1)
    right = exact(b)
    n = right.shape[1] // epilogue.groups
    result = left.new_zeros((2, len(left), n))
    for group, rows in enumerate(rows_of_groups(len(left), epilogue)):
        weight = right[:, group * n : (group + 1) * n]
        result[0, rows] = left[rows] @ weight
        result[1, rows] = left[rows].abs() @ weight.abs()
    return result[0], result[1]


def rows_of_groups(m: int, epilogue: Epilogue) -> list[slice]:
    """Rows of each group."""
    if epilogue.offsets is not None:
        ends = epilogue.offsets.tolist()
    else:
        ends = [m // epilogue.groups * group for group in range(epilogue.groups + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def scaled_product(
    a: Matrix | Sequence[Matrix],
    b: Matrix,
    bias: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
    before: Tensor | None = None,
) -> Tensor:
    """What a scaled GEMM must write, float64, ``[m, n]``."""
    return finished(*scaled_sums(a, b, epilogue), bias, epilogue, before)[0]


# Nothing is summed in `norm_quantize` but statistics: 2^-24 of x, where `numerics.kernel_error`
# gives each magnitude 2^-13.
ROUNDING_OF_ROWS = 2.0**-11
# Of sums that a kernel may round to float16 before a norm: 2^-25 where they are subnormal.
ROUNDING_TO_FLOAT16 = 2.0**-12


def norm_sums(a: Matrix, b: Matrix) -> tuple[Tensor, Tensor]:
    """Sums of gemm_norm and of absolute values, float64, ``[m, n]``: what `normalized` takes."""
    return product(a, b), magnitude(a, b)


def norm_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of norm_quantize and the scale of their rounding errors: what `normalized` takes."""
    rows = exact(x)
    return rows, rows.abs() * ROUNDING_OF_ROWS


def normalized(exact: Tensor, magnitude: Tensor, epilogue: NormEpilogue) -> tuple[Tensor, Tensor]:
    """Outputs of exact sums that are normalized, and the scale of their rounding errors, float64.

    The format of the output is not its business.

    Args:
        exact: Sums, or rows, ``[m, n]``.
        magnitude: The scale of their rounding errors.
        epilogue: All that is done to them.
    """
    if epilogue.bias is not None:
        bias = epilogue.bias.double()
        exact, magnitude = exact + bias, magnitude + bias.abs()
    residual = None if epilogue.residual is None else epilogue.residual.double()
    if residual is not None and not epilogue.residual_last:
        exact, magnitude = exact + residual, magnitude + residual.abs()
    magnitude = _norm_magnitude(exact, magnitude, epilogue)
    exact = normalize(exact, epilogue.norm, epilogue.norm_weight, epilogue.norm_bias)
    if epilogue.gate is not None:
        gate = epilogue.gate.double()
        exact, magnitude = gate * torch.sigmoid(exact), 0.25 * gate.abs() * magnitude
    elif epilogue.x0 is not None and epilogue.x is not None:
        x0, x = epilogue.x0.double(), epilogue.x.double()
        exact, magnitude = x0 * exact + x, x0.abs() * magnitude + x.abs()
    else:
        function, slope = ACTIVATIONS[epilogue.activation]
        exact, magnitude = function(exact), slope * magnitude
    if residual is not None and epilogue.residual_last:
        exact, magnitude = exact + residual, magnitude + residual.abs()
    return exact, magnitude


def _norm_magnitude(exact: Tensor, magnitude: Tensor, epilogue: NormEpilogue) -> Tensor:
    """How errors of as much as ``magnitude`` pass a norm, to first order.

    With r the reciprocal deviation, ``dz = r (dy - mean(dy)) - z mean(z r dy)``, and by Cauchy and
    Schwarz ``|mean(z r dy)| <= r sqrt(mean(dy^2))``, because ``mean(z^2) <= 1``.
    """
    norm, columns = epilogue.norm, exact.shape[-1]
    through = magnitude
    if norm.kind != "none" and columns:
        blocks = (*exact.shape[:-1], -1, norm.span(columns))
        y, m = exact.reshape(blocks), magnitude.reshape(blocks)
        if norm.kind == "layer":
            y, m = y - y.mean(-1, keepdim=True), m + m.mean(-1, keepdim=True)
        reciprocal = torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.eps)
        share = magnitude.reshape(blocks).square().mean(-1, keepdim=True).sqrt()
        through = (reciprocal * (m + (y * reciprocal).abs() * share)).reshape(exact.shape)
        through = torch.nan_to_num(through, nan=0.0)  # of an infinite row, whose z are NaN or 0
    if epilogue.norm_weight is not None:
        through = through * epilogue.norm_weight.double().abs()
    return through if epilogue.norm_bias is None else through + epilogue.norm_bias.double().abs()


def normalized_product(a: Matrix, b: Matrix, epilogue: NormEpilogue) -> Tensor:
    """What gemm_norm must write, float64, ``[m, n]``."""
    return normalized(*norm_sums(a, b), epilogue)[0]


def normalized_rows(x: Tensor, epilogue: NormEpilogue) -> Tensor:
    """What norm_quantize must write, float64, ``[m, k]``."""
    return normalized(*norm_rows(x), epilogue)[0]


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("quantize", ("m", "k"), "x ~ q * s", exact),
        Op("quantize_transpose", ("m", "k"), "x ~ q * s, x.t() ~ q_t * s_t", exact),
        Op("dequantize", ("m", "k"), "x = q * s", exact),
        Op(
            "scaled_gemm",
            ("m", "n", "k"),
            "d = f((a.q a.s) @ (b.q b.s) + bias)",
            scaled_product,
        ),
        Op("gemm", ("m", "n", "k"), "d = a @ b + bias", product),
        Op("gemm_norm", ("m", "n", "k"), "d = g(norm(a @ b + bias))", normalized_product),
        Op("norm_quantize", ("m", "k"), "d = g(norm(x + bias)) ~ q * s", normalized_rows),
        Op("norm_backward", ("m", "k"), "dy = dd * d g(norm(y)) / d y ~ q * s", gradient_of_rows),
    )
}
NORM_OPS = frozenset({"gemm_norm", "norm_quantize"})  # whose last operand is a `NormEpilogue`
EPILOGUE_OPS = NORM_OPS | {"norm_backward"}  # whose problems say a `NormForm`


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
