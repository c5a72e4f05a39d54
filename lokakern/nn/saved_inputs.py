"""Inputs of layers that are saved for the backward pass in FP8.

The gradient of a weight, ``grad.t() @ x``, quantizes x along its columns in the backward pass, so
that autograd keeps x in 16 bits until then. Here x is quantized in the forward pass, by the same
rules, and only ``x.t()`` in FP8 is saved with its scales: about half the bytes, and the same bits
of the gradient.

A route of such a product ends in ``;saved=``, which `lokakern.convert` writes, and for one m the
granularity of what is saved. Where something else keeps x until the backward pass, FP8 would take
more memory: eager calls look whether the op that computed x keeps it, and in compiled code the
partitioner of AOTAutograd quantizes in either pass, so that what is saved has the fewest bytes.
"""

from __future__ import annotations

import functools
import operator
import re
from typing import Any

import torch
from torch import Tensor, fx, is_grad_enabled
from torch.compiler import is_compiling

from lokakern.errors import UnsupportedError
from lokakern.functional.checks import row_major
from lokakern.functional.quantize import quantize
from lokakern.functional.scaled_gemm import scaled_gemm
from lokakern.native import plain_op, recorded_op
from lokakern.nn.graph_edit import add, replace, value
from lokakern.nn.routed_matmul import (
    OPS,
    PLAIN,
    RoutedLinear,
    _adds,
    _readable,
    check_main_grad,
    dtype_of,
    kernel_at,
    kernel_here,
    multiply,
    output,
    quantize_weight,
    right_of,
    unchanged,
)
from lokakern.quantized_tensor import pitch_of
from lokakern.registry.register import Kernel, kernel_named, load_kernels
from lokakern.types import Granularity

SAVED = ";saved="
_SAVED_PART = re.compile(SAVED + r"[^;\0]*")  # up to the next part, or the next route of a plan
_COLUMNS = 128  # of an input whose bytes are compared; what one column takes hardly depends on it
BF16_BYTES = 2  # of an element that is saved as it is, in float16, too
FORMS = (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP, Granularity.BLOCK)
# Nodes of autograd that keep their results: how their names begin; and views of these.
_KEEPERS = (
    *(f"{name}Backward" for name in ("Relu", "Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Exp")),
    "ScaledDotProduct",
)
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "T")
)
_ANY_LAYOUT = (torch.Tag.flexible_layout,)  # a fixed one would copy views of what is not there yet
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
aten = torch.ops.aten


def saved(route: str) -> str:
    """A route of the weight's gradient whose input is saved in FP8; `PLAIN` has none."""
    return route and route + SAVED


def unsaved(plan: str) -> str:
    """A route, or a plan, also one of `saved_at`, whose inputs are saved as they are."""
    return _SAVED_PART.sub("", plan)


def saved_at(plan: str, form: str) -> str:
    """A route, or a plan, for one m with the granularity of what is saved."""
    return plan.replace(SAVED, SAVED + form)


def form_in(route: str) -> str:
    """The granularity that `saved_at` wrote into a route, or ""."""
    return route.partition(SAVED)[2].partition(";")[0]


@functools.lru_cache(maxsize=4096)
def saved_form(route: str, m: int) -> str:
    """The granularity in which the weight's gradient reads a saved input at m, or "".

    It is "" where nothing is quantized, a library quantizes itself, or FP8 with gaps and scales
    takes no fewer bytes than 16 bits, as of a few rows.
    """
    name = kernel_at(route, m) if m else ""
    if not name:
        return ""
    load_kernels()
    kernel = kernel_named(name)
    form = kernel.b_granularity.value if kernel.parts and kernel.b_granularity in FORMS else ""
    return form if saved_bytes(form, m, _COLUMNS) < saved_bytes("", m, _COLUMNS) else ""


def saved_bytes(form: str, m: int, k: int) -> int:
    """Bytes of ``x.t()`` in FP8 with its scales, of x ``[m, k]``; in 16 bits for the form ""."""
    if not form:
        return BF16_BYTES * m * k
    scale = Granularity(form).empty_scale(k, m, torch.device("meta"))
    return k * pitch_of(m) + scale.untyped_storage().nbytes()


def is_kept(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the op that computed x keeps it for its own gradient, in eager calls."""
    node: Any = x.grad_fn if x.dtype is dtype else None  # else a copy is multiplied
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(_KEEPERS)


def quantize_input(x: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Data and scales of ``x.t()`` in FP8, ``[k, m]``; of x ``[m, k]`` in 16 bits."""
    return quantize_weight(x.t(), form)


def _saved_weight_gradient(
    grad: Tensor, data: Tensor, scale: Tensor, route: str, is_wide: bool
) -> Tensor:
    """``grad.t() @ x`` from ``x.t()`` in FP8, by the kernel of a route at the number of rows.

    Args:
        grad: ``[m, n]``, of the dtype of the route.
        data: ``x.t()`` in FP8, ``[k, m]``.
        scale: Its scales.
        route: The route.
        is_wide: Whether the kernel writes float32.
    """
    kernel = _kernel_of(grad, route)
    right = right_of(data, scale, kernel.b_granularity)
    dtype = torch.float32 if is_wide else dtype_of(route)
    out = torch.empty((grad.shape[1], data.shape[0]), dtype=dtype, device=grad.device)
    left = row_major(grad, apart=True).t()
    with torch.autocast(grad.device.type, enabled=False):  # emulations multiply in float32
        kernel.launch(left, right, out, None, kernel.workspace(left, right))
    return out


def _kernel_of(grad: Tensor, route: str) -> Kernel:
    kernel = kernel_here(route, grad.shape[0], grad.device)
    assert kernel is not None  # else nothing was quantized
    return kernel


def _saved_weight_gradient_fake(
    grad: Tensor, data: Tensor, _scale: Tensor, route: str, is_wide: bool
) -> Tensor:
    dtype = torch.float32 if is_wide else dtype_of(route)
    return grad.new_empty((grad.shape[1], data.shape[0]), dtype=dtype)


def _add_saved_weight_gradient(
    main_grad: Tensor, grad: Tensor, data: Tensor, scale: Tensor, route: str
) -> None:
    """Add ``grad.t() @ x`` to float32 ``main_grad``, as `lokakern::add_weight_gradient` does.

    Raises:
        ShapeError: ``main_grad`` is not float32 ``[n, k]``.
    """
    check_main_grad(main_grad, grad.shape[1], data.shape[0])
    kernel, total = _kernel_of(grad, route), main_grad.data  # the version stays, as there
    if not _adds(kernel, grad.device):
        total.add_(_saved_weight_gradient(grad, data, scale, route, False))
        return
    right = right_of(data, scale, kernel.b_granularity)
    with torch.autocast(grad.device.type, enabled=False):  # emulations multiply in float32
        left = quantize(_readable(grad.t()), kernel.granularity)
        scaled_gemm(left, right, accumulate=True, out=total)


recorded_op(
    _LIBRARY,
    "saved_weight_gradient(Tensor grad, Tensor data, Tensor scale, str route, bool is_wide) -> "
    "Tensor",
    _saved_weight_gradient,
    tags=_ANY_LAYOUT,
)
plain_op(
    _LIBRARY,
    "add_saved_weight_gradient(Tensor(a!) main_grad, Tensor grad, Tensor data, Tensor scale, "
    "str route) -> ()",
    _add_saved_weight_gradient,
    tags=_ANY_LAYOUT,
)
torch.library.register_fake(
    "lokakern::saved_weight_gradient", _saved_weight_gradient_fake, lib=_LIBRARY
)
torch.library.register_fake("lokakern::add_saved_weight_gradient", lambda *_: None, lib=_LIBRARY)


class SavingLinear(RoutedLinear):
    """`RoutedLinear` that saves its input in FP8 for the gradient of its weight.

    More arguments: the granularity of what is saved, and ``main_grad`` of `KeepingLinear`, or None.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *others, form, main_grad = given
        x, weight, bias, data, scale, turned, turned_scale, *texts = others
        to_output, to_input, to_weight, input_scale, apart = texts
        ctx.to_input, ctx.to_weight, ctx.dtype = to_input, to_weight, weight.dtype
        ctx.main_grad = main_grad  # not saved, as other passes may write to it until the backward
        original, kept = weight, weight
        if to_input == PLAIN or (turned is not None and not kernel_at(to_input, x.shape[0])):
            kept = weight = weight.to(x.dtype)  # as in `RoutedLinear`
        elif turned is not None:
            kept = None
        ctx.save_for_backward(*quantize_input(x, form), kept, turned, turned_scale)
        if not is_compiling():
            version = None if original.is_inference() else original._version
            ctx.given = None if kept is original else (original, version)
        return output(x, weight, bias, data, scale, to_output, input_scale, apart)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grad, needs, main_grad = gradients[0], ctx.needs_input_grad, ctx.main_grad
        x, scale, weight, turned, turned_scale = ctx.saved_tensors
        is_asked = needs[1]
        is_again = is_grad_enabled() and not is_compiling()
        if is_asked and (is_again or main_grad is not None) and not is_compiling():
            try:  # torch.autograd.grad of other tensors asks for no gradient of a weight
                is_asked = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
            except RuntimeError:  # its result is the gradient of the weight
                main_grad = None
        if is_again:
            return *_gradients_again(ctx, grad, weight, is_asked), *[None] * 11
        grad_x = grad_weight = grad_bias = None
        if is_asked and main_grad is not None:  # first, as in `routed_gradients`
            OPS.add_saved_weight_gradient(main_grad, grad, x, scale, ctx.to_weight)
        elif is_asked:
            made = OPS.saved_weight_gradient(grad, x, scale, ctx.to_weight, False)
            grad_weight = made.to(ctx.dtype)
        if needs[0] and ctx.to_input == PLAIN:
            grad_x = grad @ weight
        elif needs[0]:
            grad_x = multiply(grad, weight, turned, turned_scale, None, ctx.to_input, "", False)
        if needs[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, *[None] * 11


def _gradients_again(ctx: Any, grad: Tensor, weight: Any, is_asked: bool) -> list[Any]:
    """Gradients that are differentiated again, unquantized.

    Raises:
        UnsupportedError: That of the weight is asked for, which needs the input.
    """
    if is_asked:
        raise UnsupportedError(
            "a gradient of a weight that is differentiated again (create_graph=True) needs the "
            "input of its layer, which was saved in FP8 only: ask for gradients of inputs alone "
            "(torch.autograd.grad), or convert without keep_inputs"
        )
    weight = weight if ctx.given is None else unchanged(*ctx.given)
    needs = ctx.needs_input_grad
    to_x = grad @ weight.to(grad.dtype) if needs[0] else None
    return [to_x, None, grad.sum(0) if needs[2] else None]


def quantize_in_products(graph: fx.Graph) -> None:
    """Let products quantize an input that the backward pass keeps as it is, in its graph.

    With the same bits, in one launch where the kernel has one for both operands. An input of
    several products is quantized once for all.
    """
    for product in list(
        graph.find_nodes(op="call_function", target=OPS.saved_weight_gradient.default)
    ):
        x = _input_of(product)
        if x is not None:
            grad, _, _, route, is_wide = product.args
            made = OPS.wide_weight_gradient if is_wide else OPS.weight_gradient
            with graph.inserting_before(product):
                replace(product, add(graph, made.default, grad, x, unsaved(str(route))))
    graph.eliminate_dead_code()


def _input_of(product: fx.Node) -> fx.Node | None:
    """The input ``[m, k]`` that is quantized in this graph for a product alone."""
    parts: Any = product.args[1:3]
    made = parts[0].args[0] if parts[0].target is operator.getitem else None
    if not isinstance(made, fx.Node) or made.target is not OPS.quantize_weight.default:
        return None
    if any(set(part.users) != {product} for part in parts) or len(made.users) != len(parts):
        return None
    turned: Any = made.args[0]
    is_turned = turned.target in (aten.permute.default, aten.t.default)
    return turned.args[0] if is_turned and value(turned) is not None else None
