"""FP8 linear layers of torchao: its recipes of dynamic scales, forward and backward.

Each operand is quantized along the sum with one scale for all of it (``tensorwise``) or one for
each row (``rowwise``, powers of two); torchao keeps encode scales, x ~ q / s. GEMMs are torch's:

    output       fast sums
    grad_input   promoted; of rowwise scales unscaled sums, rounded to bfloat16, then scaled
    grad_weight  likewise; rowwise_with_gw_hp leaves it in bfloat16: that is `torch.bf16`

`tensorwise` quantizes gradients to E5M2. `rowwise_with_gw_hp` has one scale for the weight in
grad_input. As torchao wants it, its casts are compiled by torch.compile, here once for each number
of columns and for any number of rows. The product is written where it is wanted, which
`addmm_float8_unwrapped` cannot do; what it calls, and with what, is the same. Scales of a prepared
weight are ours.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.kernels.adapters.layouts import aligned
from lokakern.problems import sums_over_samples
from lokakern.registry.libraries import Library, Package, declare, import_modules
from lokakern.registry.register import (
    FAST_KERNEL_ERR_BOUND,
    FAST_LARGEST_K,
    PROMOTED_KERNEL_ERR_BOUND,
    register,
)
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
)

LIBRARY = declare(
    Library(
        name="torchao",
        packages=(Package("torchao", ">=0.17,<1", ("torchao.float8.float8_utils",)),),
    )
)
_SM_90 = frozenset({"sm_90"})
SMALLEST_AMAX = 1e-12  # torchao.float8.float8_utils.EPS


@dataclass(frozen=True)
class Cast:
    """How a recipe quantizes one operand.

    Attributes:
        granularity: TENSOR, or ROW, whose scales are powers of two.
        form: FP8 format.
        power_of_two: Whether encode scales are rounded down to powers of two.
    """

    granularity: Granularity
    form: Format
    power_of_two: bool

    def exact(self, rows: Tensor) -> QuantizedTensor:
        """What it makes of rows ``[rows, k]``, in stock PyTorch."""
        magnitude = rows.float().abs()
        if self.granularity is Granularity.TENSOR:
            amax = magnitude.amax().view(1, 1)
        else:
            amax = magnitude.amax(dim=1, keepdim=True)
        encode = (self.form.maximum / amax.double().clamp_min(SMALLEST_AMAX)).float()
        if self.power_of_two:
            encode = torch.exp2(torch.floor(torch.log2(encode)))
        data = torch.empty(rows.shape, dtype=self.form.dtype, device=rows.device)
        numerics.cast(rows.float() * encode, data)
        return QuantizedTensor(data, encode.reciprocal(), self.granularity)


_TENSOR = Cast(Granularity.TENSOR, Format.E4M3FN, False)
_TENSOR_GRADIENT = Cast(Granularity.TENSOR, Format.E5M2, False)
_TENSOR_BY_POWER = Cast(Granularity.TENSOR, Format.E4M3FN, True)
_ROW = Cast(Granularity.ROW, Format.E4M3FN, True)


@functools.cache
def functions() -> Any:
    """The module with its casts, imported when the first kernel is launched."""
    import_modules(LIBRARY)
    return importlib.import_module("torchao.float8.float8_utils")


@functools.cache
def cast_of(cast: Cast, columns: int, turned: bool) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Torchao's cast, compiled for matrices ``[any, columns]`` whose rows lie one after the other.

    Args:
        cast: What it makes.
        columns: Of what it is given.
        turned: Whether it quantizes columns, and writes them as rows.

    Returns:
        From a matrix to rows in FP8, and to their decode scales.
    """
    theirs = functions()
    by_row = cast.granularity is Granularity.ROW
    kinds = theirs.ScalingGranularity
    kind = kinds.AXISWISE if by_row else kinds.TENSORWISE
    axis = (0 if turned else 1) if by_row else None

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = theirs.tensor_to_scale(
            x, cast.form.dtype, scaling_granularity=kind, axiswise_dim=axis,
            round_scales_to_power_of_2=cast.power_of_two,
        )  # fmt: skip
        data = theirs.to_fp8_saturated(x.to(torch.float32) * scale, cast.form.dtype)
        decode = scale.reciprocal()
        if turned:
            data = data.t().contiguous()
            decode = decode.t().contiguous() if by_row else decode
        return data, decode if by_row else decode.view(1, 1)

    compiled = torch.compile(_own_code(quantize, f"{cast.granularity.value}_{columns}"))

    def launch(x: Tensor) -> tuple[Tensor, Tensor]:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        data, decode = compiled(x)
        return data, decode

    return launch


@functools.cache
def _scaled() -> Callable[[Tensor, Tensor, Tensor], None]:
    """What torchao's slow path of row scales does to unscaled sums in bfloat16."""

    def scale(out: Tensor, a_scale: Tensor, b_scale: Tensor) -> None:
        out *= a_scale * b_scale

    return torch.compile(scale, dynamic=True)


def _own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function with a code object of its own: of one, torch.compile makes eight at most."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{name}")
    return types.FunctionType(code, globals(), code.co_name, None, function.__closure__)


@dataclass(frozen=True)
class Recipe:
    """One GEMM of a recipe: both casts, and whether sums are promoted."""

    name: str
    a: Cast
    b: Cast
    fast: bool
    layouts: tuple[Layout, Layout]

    @property
    def scales_after(self) -> bool:
        return not self.fast and Granularity.ROW in (self.a.granularity, self.b.granularity)

    def quantized_as(self, which: str, rows: Tensor) -> QuantizedTensor:
        return (self.a if which == "x" else self.b).exact(rows)

    def supports(self, problem: Problem, device: Device) -> Support:
        assert problem.b is not None  # an op with two operands
        have = (problem.a.layout, problem.b.layout)
        if have != self.layouts:
            return Rejected(f"takes a {self.layouts[0].value} and b {self.layouts[1].value}")
        if problem.a.format is not Format.BFLOAT16 or problem.out_format is not Format.BFLOAT16:
            return Rejected("takes and writes bfloat16")
        if problem.prepared:
            wanted = (self.b.form, self.b.granularity)
            if not self.fast or (problem.b.format, problem.b.granularity) != wanted:
                return Rejected(
                    f"multiplies weights in E4M3 with scales of the {self.b.granularity.value}, in "
                    "the forward pass"
                )
            if problem.b.alignment < 16:
                return Rejected("rows of b must start at multiples of 16 bytes")
        elif problem.b.format is not Format.BFLOAT16:
            return Rejected(f"quantizes bfloat16, not {problem.b.format.value}")
        if self.fast and problem.k > FAST_LARGEST_K:
            return Rejected(f"sums without promotion up to k={FAST_LARGEST_K}; k={problem.k}")
        if problem.k % 16 or problem.n % 16:
            return Rejected(f"n and k must be multiples of 16; n={problem.n}, k={problem.k}")
        if sums_over_samples(problem) and problem.m % 16:
            return Rejected(f"m must be a multiple of 16; m={problem.m}")
        if problem.out_strided:
            return Rejected("writes contiguous outputs only")
        return ACCEPTED

    def launch(
        self, a: Tensor, b: Any, out: Tensor, bias: Tensor | None, _workspace: tuple[Tensor, ...]
    ) -> None:
        data, scale = _quantized(self.a, a)
        if type(b) is QuantizedTensor:
            b_data, b_scale = b.data, b.scale
        else:
            b_data, b_scale = _quantized(self.b, b.t())
        assert b_scale is not None  # of a prepared weight
        weight, b_scale = b_data.t(), b_scale.t()
        with aligned(out) as target:
            if self.scales_after:
                one = torch.ones((), device=out.device)
                torch._scaled_mm(
                    data, weight, one, one, None, None, out.dtype, self.fast, out=target
                )
                _scaled()(target, scale, b_scale)
            else:
                torch._scaled_mm(
                    data, weight, scale, b_scale, bias, None, out.dtype, self.fast, out=target
                )


def _quantized(cast: Cast, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[rows, k]``, which lie so or transposed, quantized along k."""
    if rows.stride(1) == 1:
        return cast_of(cast, rows.shape[1], False)(rows)
    return cast_of(cast, rows.shape[0], True)(rows.t())


_OUTPUT = (Layout.ROW, Layout.COLUMN)
_GRAD_INPUT = (Layout.ROW, Layout.ROW)
_GRAD_WEIGHT = (Layout.COLUMN, Layout.ROW)
_RECIPES = (
    Recipe("tensorwise_fast", _TENSOR, _TENSOR, True, _OUTPUT),
    Recipe("tensorwise_grad_input", _TENSOR_GRADIENT, _TENSOR, False, _GRAD_INPUT),
    Recipe("tensorwise_grad_weight", _TENSOR_GRADIENT, _TENSOR, False, _GRAD_WEIGHT),
    Recipe("rowwise_fast", _ROW, _ROW, True, _OUTPUT),
    Recipe("rowwise_grad_input", _ROW, _ROW, False, _GRAD_INPUT),
    Recipe("rowwise_grad_weight", _ROW, _ROW, False, _GRAD_WEIGHT),
    Recipe("rowwise_with_gw_hp_grad_input", _ROW, _TENSOR_BY_POWER, False, _GRAD_INPUT),
)
for _recipe in _RECIPES:
    _sums = "fast" if _recipe.fast else "promoted"
    register(
        "gemm",
        name=_recipe.name,
        architectures=_SM_90,
        granularity=_recipe.a.granularity,
        b_granularity=_recipe.b.granularity,
        accumulation=f"{_sums}+rounded+torchao" if _recipe.scales_after else f"{_sums}+torchao",
        supports=_recipe.supports,
        kernel_err_bound=FAST_KERNEL_ERR_BOUND if _recipe.fast else PROMOTED_KERNEL_ERR_BOUND,
        epilogues=frozenset({"none", "bias"} if not _recipe.scales_after else {"none"}),
        quantized_as=_recipe.quantized_as,
    )(functools.partial(Recipe.launch, _recipe))
