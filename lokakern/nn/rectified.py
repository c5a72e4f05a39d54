"""A linear layer in bfloat16 or float16 and the relu behind it in one launch, `torch.bf16_relu`.

Compiled code also has its gradients. In eager mode a layer that needs some runs as it is, because
an autograd function in Python would take the host longer than the launch that it saves.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, _addmm_activation, float16, is_grad_enabled, nn, strided
from torch.compiler import is_compiling, is_exporting
from torch.nn import Parameter, ReLU  # not by torch.nn: see `lokakern.nn.routed_matmul`
from torch.nn.functional import pad

from lokakern.functional.checks import is_traced
from lokakern.functional.norm_gradient import is_fast
from lokakern.nn.activations import CLASSES
from lokakern.nn.autocast import CAST, HALF, half_of
from lokakern.nn.chain_call import has_global_hooks, has_own_call, is_usual, rows_in, static_rows
from lokakern.nn.compiled_form import fuse_quantizers
from lokakern.nn.linear import (
    ALTERED,
    HELD,
    OFFLOADED,
    Linear,
    _wants_gradients,
    is_linear,
)
from lokakern.nn.routed_matmul import (
    FLOAT16,
    OPS,
    PLAIN,
    RoutedLinear,
    dtype_of,
    in_dtype,
    quantizes_at,
    route_text,
    routed_gradients,
    segments_of,
    traced_route,
)
from lokakern.types import Granularity

KERNEL = "torch.bf16_relu"
# Whether the gradients of a relu and of the bias are computed by one op.
APART, JOINED = "apart", "joined"
# Columns in 16 bytes: cuBLAS is slow where rows do not begin at multiples, and a compiler pads
# them. At k = 479 and 32768 rows an MLP took 1.31 times as long with the relu in its products.
COLUMNS = 8
# Columns of the output for each of an unaligned input that compiled code pads: the copy reads and
# writes a quarter of what the launch for the relu alone would. DLRM's first layer, 8192 x 512 x 13,
# took 16.1 us of an H200 with its relu.
NARROW = 4


def rectified_between(sequence: Iterable[nn.Module]) -> tuple[str, ...]:
    """For each module the route of products that apply the relu behind it, or ""."""
    modules = list(sequence)
    found = [PLAIN] * len(modules)
    for place, (layer, relu) in enumerate(itertools.pairwise(modules)):
        if type(relu) is nn.ReLU:
            found[place] = rectified_at(layer, modules[place + 2 : place + 3])
    return tuple(found)


def rectified_at(layer: nn.Module, readers: Sequence[nn.Module]) -> str:
    """The route of products of a layer that apply the relu behind it, or "".

    Not where the layer quantizes, nor where a reader does, whose quantizer applies the relu.
    Kernels of eager calls only do not count: at their m an eager call runs such a layer as it is.

    Args:
        layer: A module.
        readers: Modules that read what the relu returns.
    """
    if not is_linear(layer) or not _is_usual(layer):
        return PLAIN
    then = [reader._routes[0] for reader in readers if isinstance(reader, Linear)]
    return route_between(*map(traced_route, (layer._routes[0], *then)))


def _is_usual(layer: Linear) -> bool:
    if not layer.in_features:  # of such a product torch returns the bias, without relu
        return False
    k, n = layer.in_features, layer.out_features
    is_narrow = k % COLUMNS > 0 and NARROW * k <= n
    is_fit = n % COLUMNS == 0 and (k % COLUMNS == 0 or is_narrow)
    is_whole = layer.padding == (0, 0) and not layer.is_mixing
    if layer.is_held and not (is_narrow and not layer.makes_weight):
        return False
    return is_fit and is_whole and layer.bias is not None and layer.weight.dtype in CAST


def route_between(*routes: str) -> str:
    """The route of `KERNEL` at the m at which none of the routes has a kernel."""
    both = []
    for parts in zip(*map(segments_of, routes), strict=True):
        starts = sorted({start for part in parts for start, _ in part})
        both.append([
            (start, "" if any(_has_kernel(part, start) for part in parts) else KERNEL)
            for start in starts
        ])  # fmt: skip
    return route_text(Granularity.NONE, *both)


def _has_kernel(segments: Sequence[tuple[int, bool]], m: int) -> bool:
    return segments[bisect_right(segments, m, key=lambda segment: segment[0]) - 1][1]


ALWAYS = route_between(PLAIN)


def multiply_rectified(
    layer: nn.Module, relu: nn.Module | None, x: Any, route: str
) -> Tensor | None:
    """``relu(layer(x))`` in one launch, or None where both have to run.

    That is where the route has no kernel at this m, with hooks, dtypes other than one of bfloat16
    and float16 or, in compiled code, those that autocast casts to it, with unusual tensors, and in
    eager mode with gradients and where rows are not aligned: compiled code pads these.

    Args:
        layer: A layer.
        relu: The module behind it; None for a call of a function.
        x: The input.
        route: See `rectified_between`.
    """
    if not is_linear(layer) or has_own_call(layer):
        return None
    if relu is not None and (type(relu) is not ReLU or has_own_call(relu)):
        return None
    weight, bias = layer.weight, layer.bias
    if bias is None or bias.dtype is not weight.dtype:
        return None
    if is_compiling():
        if not is_usual(x) or type(weight) is not Parameter or type(bias) is not Parameter:
            return None
        m = static_rows(x)
    else:
        m = rows_in(x)
        if m < 0 or is_traced() or x.is_meta or x.layout is not strided:
            return None
        if x.dtype is not weight.dtype or x.dtype not in HALF:
            return None  # a cast weight is one more launch
        if not {type(weight), type(bias)} <= {Parameter, Tensor}:
            return None
    if x.dim() < 2 or x.shape[-1] != layer.in_features:
        return None
    if x.dim() > 2 and not x.is_contiguous():
        return None  # nn.Linear adds the bias separately, and rounds twice
    is_narrow = layer.in_features % COLUMNS > 0
    if is_narrow and not is_compiling():
        return None
    given = layer._plan, route, m, x.dtype, weight.dtype, x.device.type
    found = traced_way(layer.out_features, *given) if is_compiling() else rectifying_way(*given)
    if not found or (not is_compiling() and (FLOAT16 in found) is not (x.dtype is float16)):
        return None  # autocast would cast
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if is_compiling():
        rows = rows.half() if FLOAT16 in found else rows.bfloat16()
    if is_narrow:
        if any(found.split("\0")[1:]):
            return None  # kernels of gradients are for the columns that there are
        rows = _padded(rows)
    if is_grad_enabled() and _wants_gradients(x, weight, bias):
        if not is_compiling() or has_backward_hooks(layer):
            return None
        if relu is not None and has_backward_hooks(relu):
            return None
        y: Tensor = RectifiedLinear.apply(rows, weight, bias, *found.split("\0"))  # type: ignore[no-untyped-call]
    elif is_compiling():
        y = rectified_product(rows, weight, bias)
    else:
        y = _addmm_activation(bias, rows, weight.t())
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def rectified_product(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``relu(rows @ weight.t() + bias)`` in one launch, in the dtype of the rows; for compilers."""
    rows = _padded(rows)
    return _addmm_activation(bias.to(rows.dtype), rows, _rounded(weight, rows).t())


def rectifying_way(
    plan: str, route: str, m: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: str
) -> str:
    """`APART` with the dtype, and routes of both gradients; "" where the modules have to run.

    It reads the state of autocast and global hooks, which Dynamo guards. ``m`` is -1 if it is
    dynamic.
    """
    is_at = quantizes_at((route,), m) if m >= 0 else _is_at_any(route)
    half = half_of(dtype, weight_dtype, device)
    if not is_at or half is None:
        return ""
    if torch._C._are_functorch_transforms_active() or not are_calls_plain():
        return ""
    if is_exporting() and is_grad_enabled():
        return ""  # what is exported may be trained, and torch has no derivative of the product
    flags, _, to_output, *gradients = plan.split("\0") if plan else ("", "", PLAIN, PLAIN, PLAIN)
    is_quantized = quantizes_at((to_output,), m) if m >= 0 else to_output != PLAIN
    # Of narrow rows a copy of the weight may be held, which only the layer itself multiplies by.
    if (ALTERED in flags and HELD not in flags) or OFFLOADED in flags or is_quantized:
        return ""
    if any(gradients) and dtype_of(plan) is not half:
        return ""  # kernels are for the other dtype
    return "\0".join((in_dtype(APART, half), *gradients))


def traced_way(columns: int, *given: Any) -> str:
    """`rectifying_way` as a constant for compilers, with `JOINED` for `APART` where that holds."""
    fuse_quantizers()  # and the call of the product
    plan, *others = given
    found = rectifying_way("\0".join(map(traced_route, plan.split("\0"))), *others)
    return found.replace(APART, JOINED, 1) if found and is_fast(columns, given[-1]) else found


def _is_at_any(route: str) -> bool:
    return all(name for part in segments_of(route) for _, name in part)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of the backward pass."""
    return len(module._backward_hooks) + len(module._backward_pre_hooks) > 0


def has_global_backward_hooks() -> bool:
    """Whether every call of a module has a hook of the backward pass."""
    module = nn.modules.module
    return bool(module._global_backward_hooks or module._global_backward_pre_hooks)


def are_calls_plain() -> bool:
    """Whether calls of modules have no hooks, and are those of torch, which others may replace."""
    of = nn.modules
    if has_global_hooks() or has_global_backward_hooks():
        return False
    methods = (
        *((kind.forward, of.activation) for kind in CLASSES),
        *((kind.forward, of.normalization) for kind in (nn.LayerNorm, nn.RMSNorm)),
        (nn.ReLU.__call__, of.module), (nn.Module._call_impl, of.module),
    )  # fmt: skip
    return all(getattr(method, "__globals__", None) is vars(file) for method, file in methods)


def _padded(rows: Tensor) -> Tensor:
    """Rows with zeros up to a multiple of `COLUMNS`."""
    missing = -rows.shape[1] % COLUMNS
    return pad(rows, (0, missing)) if missing else rows


def _rounded(weight: Tensor, rows: Tensor) -> Tensor:
    """A weight in the dtype of rows, with zeros for columns that only these have."""
    rounded, missing = weight.to(rows.dtype), rows.shape[1] - weight.shape[1]
    return pad(rounded, (0, missing)) if missing else rounded


class RectifiedLinear(RoutedLinear):
    """`RoutedLinear` with an unquantized output and a relu; only for compiled graphs.

    Rows of the input may be padded with zeros.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, how: str, to_input: str, to_weight: str
    ) -> Tensor:
        ctx.to_input, ctx.to_weight, ctx.dtype = to_input, to_weight, weight.dtype
        ctx.is_joined = how.startswith(JOINED)
        ctx.columns = weight.shape[1]
        rounded = _rounded(weight, x)
        y = _addmm_activation(bias.to(x.dtype), x, rounded.t())
        kept = rounded if to_input == PLAIN else weight
        # A copy, which Inductor removes: Dynamo does not notice that a module writes to y later.
        ctx.save_for_backward(x, kept, y.clone(), bias)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, y, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if ctx.is_joined and needs[2]:
            given = (gradients[0], y, bias, None, None, "none", "relu", 0.0)
            grad, sums = OPS.norm_gradient(*given)
            to_x, to_weight, _ = routed_gradients(ctx, grad, x, weight, None, None, sums_bias=False)
            return to_x, _cut(to_weight, ctx.columns), sums[0], None, None, None
        grad = torch.ops.aten.threshold_backward(gradients[0], y, 0)
        to_x, to_weight, to_bias = routed_gradients(ctx, grad, x, weight, None, None)
        to_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_x, _cut(to_weight, ctx.columns), to_bias, None, None, None


def _cut(gradient: Tensor | None, columns: int) -> Tensor | None:
    is_padded = gradient is not None and gradient.shape[1] != columns
    return gradient[:, :columns] if is_padded else gradient  # type: ignore[index]
