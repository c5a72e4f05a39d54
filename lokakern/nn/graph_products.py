"""Linear products in the graphs of Dynamo: which there are, and how one is replaced by routes.

A linear product multiplies samples by a matrix that is computed from parameters alone: the weight
of an `nn.Linear`, a raw parameter, its transpose, a slice or a concatenation. It is a call of
``linear``, ``matmul``, ``mm`` or ``addmm``; or, as DCN-Mix is written, of ``matmul`` with the
matrix on the left and vectors ``[..., k, 1]`` on the right. The example value of a graph's input is
an `nn.Parameter` if the input is one; torch's own backends for DDP read it from there, too.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from lokakern.functional.checks import is_traced
from lokakern.nn.autocast import CAST, HALF
from lokakern.nn.linear import Routed, multiply_rows

_OPERANDS = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "addmm": ("input", "mat1", "mat2"),
}
_CALLS: dict[Callable[..., Any], str] = {
    nn.functional.linear: "linear",
    operator.matmul: "matmul",
    torch.matmul: "matmul",
    torch.mm: "mm",
    torch.addmm: "addmm",
}
_CHECKPOINT = "tag_activation_checkpoint"  # calls a subgraph with the operands that follow it
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")


@dataclass(frozen=True)
class Product:
    """A linear product ``x @ weight.t() + bias`` in a graph.

    Attributes:
        name: Name of the layer or parameter in the model.
        n: Outputs.
        k: Inputs.
        m: Rows of x; None if dynamic.
        has_bias: Whether a bias is added.
        is_trained: Whether a gradient may flow through it.
        is_turned: Whether the weight is the transpose of a row-major matrix ``[k, n]``.
        device: Device of the weight.
        dtype: Of the output, bfloat16 or float16 if it may be replaced.
        why_not: Why it has to stay as it is, or "".
        node: Its call.
        operands: x, the second operand and the bias, if any.
        kind: "rows" of x by a matrix ``[k, n]``, "linear", by the weight ``[n, k]``, or "columns":
            the weight by vectors ``[..., k, 1]``.
    """

    name: str
    n: int
    k: int
    m: int | None
    has_bias: bool
    is_trained: bool
    is_turned: bool
    device: torch.device
    dtype: torch.dtype
    why_not: str
    node: fx.Node
    operands: tuple[fx.Node | None, ...]
    kind: str

    def replace(self, routes: Sequence[str]) -> None:
        """Multiply by the routes of output, grad_input and grad_weight instead."""
        x, weight, bias = self.operands
        node, graph, op = self.node, self.node.graph, torch.ops.lokakern.routed_linear.default
        node.kwargs = {}
        with graph.inserting_before(node):
            if self.kind == "rows":
                weight = graph.call_method("t", (weight,))
            if self.kind == "columns":
                x = graph.call_method("squeeze", (x, -1))
                y = graph.call_function(op, (x, weight, bias, *routes, self.is_turned))
                node.op, node.target, node.args = "call_method", "unsqueeze", (y, -1)
            else:
                node.op, node.target = "call_function", op
                node.args = (x, weight, bias, *routes, self.is_turned)


def linear_products(gm: fx.GraphModule) -> list[Product]:
    """The linear products of a graph of Dynamo, and of the graphs in it."""
    return list(_products(gm, None, ""))


def _products(
    gm: fx.GraphModule, given: Sequence[str | None] | None, why_not: str
) -> Iterator[Product]:
    """Products of a graph whose inputs are made as given, see `_made_of`."""
    if any(_is_differentiated_twice(node) for node in gm.graph.nodes):
        why_not = why_not or "the graph computes second derivatives, which kernels lack"
    made_of: dict[fx.Node, str | None] = {}
    inputs = iter(given or ())
    transforms = 0
    for node in gm.graph.nodes:
        if node.op == "placeholder" and given is not None:
            made_of[node] = next(inputs, None)
        else:
            made_of[node] = _made_of(node, made_of, gm)
        if node.op not in ("call_function", "call_method"):
            continue
        called = getattr(node.target, "__name__", str(node.target))
        transforms += called.endswith("_increment_nesting") or "enter_dual_level" in called
        transforms -= called.endswith("_decrement_nesting") or "exit_dual_level" in called
        why = why_not or ("it is under torch.func or forward-mode AD" if transforms else "")
        for place, body in enumerate(node.args):
            inner = getattr(gm, str(body.target), None) if _is_attribute(body) else None
            if isinstance(inner, fx.GraphModule):
                is_checkpoint = called == _CHECKPOINT and place == 0
                operands = [_origin(x, made_of) for x in node.args[1:]] if is_checkpoint else None
                why_inside = why or ("" if is_checkpoint else f"it is inside {called}")
                yield from _products(inner, operands, why_inside)
        product = _product(node, made_of, why)
        if product is not None:
            yield product


def _is_differentiated_twice(node: fx.Node) -> bool:
    """Whether it is ``torch.autograd.grad(..., create_graph=True)``."""
    if node.target is not torch.autograd.grad:
        return False
    return True in (*node.args[4:5], node.kwargs.get("create_graph"))


def _is_attribute(x: Any) -> bool:
    return isinstance(x, fx.Node) and x.op == "get_attr"


def _origin(x: Any, made_of: dict[fx.Node, str | None]) -> str | None:
    return made_of[x] if isinstance(x, fx.Node) else ""


def _made_of(node: fx.Node, made_of: dict[fx.Node, str | None], gm: fx.GraphModule) -> str | None:
    """Name of the parameter that a value is computed from, "" of constants, None of samples."""
    if node.op == "placeholder":
        given = value(node)
        if isinstance(given, nn.Parameter):
            return _name_of(node)
        return None if isinstance(given, Tensor) else ""
    if node.op == "get_attr":  # a constant; with Inductor's option "freezing" also parameters
        is_parameter = isinstance(getattr(gm, str(node.target), None), nn.Parameter)
        names = gm.meta.get("dynamo_flat_name_to_original_fqn", {})
        return names.get(node.target, str(node.target)) if is_parameter else ""
    found = [made_of[x] for x in node.all_input_nodes]
    return None if None in found else next((x for x in found if x), "")


def _name_of(node: fx.Node) -> str:
    """Name of a parameter, from its source ``L['self']._modules['a']._parameters['weight']``."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    keys = re.findall(r"\['([^']*)'\]", name() if callable(name) else name)
    return ".".join(keys[1:] if keys[:1] in (["self"], ["fn"]) else keys) or node.name


def value(node: fx.Node) -> Any:
    """The example of a value: a fake tensor, a size or others."""
    return node.meta.get("example_value")


def _product(node: fx.Node, made_of: dict[fx.Node, str | None], why_not: str) -> Product | None:
    """The product of a call, or None if it is none."""
    kind = node.target if node.op == "call_method" else _CALLS.get(node.target)  # type: ignore[arg-type]
    if kind not in _OPERANDS:
        return None
    names = _OPERANDS[kind]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    first, second = ("mat1", "mat2") if kind == "addmm" else names[:2]
    x, weight = given.get(first), given.get(second)
    bias = given.get("input" if kind == "addmm" else "bias")
    if not (isinstance(x, fx.Node) and isinstance(weight, fx.Node)):
        return None
    a, b, y = value(x), value(weight), value(node)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and isinstance(y, Tensor)):
        return None
    is_columns = kind == "matmul" and a.dim() == 2 and b.dim() > 2
    if is_columns:
        if not isinstance(b.shape[-1], int) or b.shape[-1] != 1:
            return None
        x, weight, a, b = weight, x, b, a
    name = made_of[weight]
    if not name or a.dim() < 2 or b.dim() != 2:
        return None
    form = "columns" if is_columns else "linear" if kind == "linear" else "rows"
    right = b.t() if form == "rows" else b
    n, k = right.shape
    m = prod(a.shape[:-2] if is_columns else a.shape[:-1])
    added = value(bias) if isinstance(bias, fx.Node) else None
    if not why_not and (len(node.args) > len(names) or set(given) - set(names)):
        why_not = "it has other arguments than its operands"
    elif not why_not:
        why_not = _why_not(node, [a, b, y, *([] if added is None else [added])])
        if made_of[x]:
            why_not = why_not or "both operands are made of parameters"
        if added is not None and list(added.shape) != [n]:
            why_not = why_not or f"it adds {list(added.shape)}; expected a bias [{n}]"
    return Product(
        name.removesuffix(".weight"), n, k, m if isinstance(m, int) else None, bias is not None,
        y.requires_grad, right.stride(0) == 1 and right.stride(1) != 1, b.device, y.dtype,
        why_not, node,
        (x, weight, bias if isinstance(bias, fx.Node) else None), form,
    )  # fmt: skip


def _why_not(node: fx.Node, values: Sequence[Tensor]) -> str:
    kinds = {type(x).__name__ for x in values} - {"FakeTensor", "Parameter"}
    if kinds or any(x.layout is not torch.strided for x in values):
        return f"its operands are {', '.join(sorted(kinds)) or 'sparse'}; expected dense tensors"
    sizes = [*values[1].shape]
    if not all(isinstance(size, int) and size for size in sizes):
        return f"its weight is {sizes}; expected known sizes"
    if not (values[1].is_contiguous() or values[1].t().is_contiguous()):
        return "its weight has gaps: kernels would copy it first, and times are without that"
    a, b, y, *_ = (x.dtype for x in values)
    if y not in HALF or not {x.dtype for x in values} <= CAST:
        return f"it multiplies {a} by {b}; kernels need bfloat16 or float16, or autocast to it"
    stack = list(node.meta.get("nn_module_stack", {}).values())
    module = stack[-1][1] if stack else None
    if isinstance(module, type) and issubclass(module, Routed):
        return "convert chose its kernels"
    return ""


def _routed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    to_output: str,
    to_input: str,
    to_weight: str,
    is_turned: bool,
) -> Tensor:
    """``x @ weight.t() + bias`` by routes; AOTAutograd traces what this calls, see `linear`."""
    if is_traced():
        return nn.functional.linear(x, weight, bias)
    operands = (x, weight) if bias is None else (x, weight, bias)
    way = "inference"
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        way = "turned" if is_turned else "training"
    parts = (None, None, None, None)
    # Of rows nobody asks whether they are contiguous, which may be unknown where x has more dims.
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = multiply_rows(rows, weight, bias, parts, (to_output, to_input, to_weight), "", way)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


_LIBRARY.define(
    "routed_linear(Tensor x, Tensor weight, Tensor? bias, str to_output, str to_input, "
    "str to_weight, bool is_turned) -> Tensor"
)
_LIBRARY.impl("routed_linear", _routed_linear, "CompositeImplicitAutograd")
