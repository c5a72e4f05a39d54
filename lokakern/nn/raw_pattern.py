"""Products with parameters of no `nn.Linear` in a traced forward.

``F.linear(x, w)``, ``x @ w``, ``torch.mm``, ``torch.matmul``, ``torch.addmm`` and ``torch.matmul(w,
x)``, with w a parameter, a matrix of a parameter of more axes, or the transpose or a cast of one.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

LINEAR, MATMUL, MM, ADDMM, LEFT = "linear", "matmul", "mm", "addmm", "left"
TURNED = (MATMUL, MM, ADDMM)  # which multiply by [k, n]
HOLDERS = (nn.ParameterList, nn.ParameterDict, nn.Embedding)
_MATMUL = (operator.matmul, torch.matmul, "matmul", "__matmul__")
_MM = (torch.mm, "mm")
_ADDMM = (torch.addmm, "addmm")
_CASTS = ("to", "type_as", "bfloat16", "contiguous")
_TURNS = (torch.t, "t", torch.transpose, "transpose", "permute", torch.permute, getattr)


class Matrix(NamedTuple):
    """A matrix that is part of a module's state.

    Attributes:
        parameter: Name of the parameter in the module.
        places: Its places in the leading axes of the parameter.
        is_turned: Whether a product reads it as ``[k, n]``, and not as ``[n, k]``.
        rows: The first row and the end of a slice; None: all.
        columns: The same of columns.
    """

    parameter: str
    places: tuple[int, ...]
    is_turned: bool
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The parameter and the place, such as ``experts.0.1`` or ``uvqk.0:64``."""
        parts = [self.parameter, *map(str, self.places)]
        if self.rows or self.columns:
            spans = [f"{x[0]}:{x[1]}" if x else ":" for x in (self.rows, self.columns)]
            parts.append(",".join(spans if self.columns else spans[:1]))
        return ".".join(parts)

    def of(self, parameter: Tensor) -> Tensor:
        """The matrix of a parameter, as it is in memory."""
        for place in self.places:
            parameter = parameter[place]
        if self.rows:
            parameter = parameter[self.rows[0] : self.rows[1]]
        return parameter[:, self.columns[0] : self.columns[1]] if self.columns else parameter

    def shape_in(self, parameter: Tensor) -> tuple[int, int]:
        """N and k."""
        sizes = [
            span[1] - span[0] if span else size
            for span, size in zip((self.rows, self.columns), parameter.shape[-2:], strict=True)
        ]
        return (sizes[1], sizes[0]) if self.is_turned else (sizes[0], sizes[1])

    @property
    def key(self) -> str:
        """A name without dots, for a child of the module."""
        return self.name.replace(".", "/") + ("/t" if self.is_turned else "")


class FoundProduct(NamedTuple):
    """A product in a graph.

    Attributes:
        node: The call.
        form: One of the words above.
        matrix: The matrix.
        x: The activation.
        weight: The matrix as the call reads it.
        bias: What the call adds, or None.
    """

    node: fx.Node
    form: str
    matrix: Matrix
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


class _Laid(NamedTuple):
    """How a node is laid out of a parameter."""

    parameter: str
    places: tuple[int, ...]
    sizes: tuple[int, ...]  # of what the places leave, untransposed
    is_transposed: bool


def products_in(graph: fx.Graph, module: nn.Module) -> list[FoundProduct]:
    """The products of a traced forward, in order; those with one output or input are left out."""
    found = []
    for node in graph.nodes:
        given = _operands(node)
        if given is None:
            continue
        form, x, weight, bias = given
        laid = _laid_out(weight, module)
        if form == MATMUL and laid is None:
            form, x, weight, laid = LEFT, weight, x, _laid_out(x, module)
        if laid is None or _laid_out(x, module) is not None:
            continue
        if len(laid.sizes) == 2 and min(laid.sizes) > 1:
            # Of a parameter [n, k], F.linear and a left factor read it as it is, others transposed.
            is_turned = laid.is_transposed != (form in TURNED)
            matrix = Matrix(laid.parameter, laid.places, is_turned)
            found.append(FoundProduct(node, form, matrix, x, weight, bias))
    return found


def _operands(node: fx.Node) -> tuple[str, fx.Node, fx.Node, fx.Node | None] | None:
    """Form, x, weight and bias of a node that may be a product."""
    if node.op not in ("call_function", "call_method"):
        return None
    target, arguments, named = node.target, list(node.args), dict(node.kwargs)
    names: tuple[str, ...]
    if target is functional.linear:
        form, names = LINEAR, ("input", "weight", "bias")
    elif target in _MATMUL:
        form, names = MATMUL, ("input", "other")
    elif target in _MM:
        form, names = MM, ("input", "mat2")
    elif target in _ADDMM:
        form, names = ADDMM, ("input", "mat1", "mat2")
    else:
        return None
    arguments += [named.pop(name, None) for name in names[len(arguments) :]]
    if named or len(arguments) != len(names):  # such as alpha and beta
        return None
    bias = arguments.pop(0) if form == ADDMM else arguments.pop() if form == LINEAR else None
    x, weight = arguments
    is_bias = bias is None or isinstance(bias, fx.Node)
    if not (isinstance(x, fx.Node) and isinstance(weight, fx.Node) and is_bias):
        return None
    return form, x, weight, bias  # type: ignore[return-value]


def _laid_out(node: fx.Node, module: nn.Module) -> _Laid | None:
    """Of which parameter a node is a matrix, a transpose or a cast; None if it is computed."""
    if node.op == "get_attr":
        parameter = _parameter(module, str(node.target))
        sizes = None if parameter is None else tuple(parameter.shape)
        return None if sizes is None else _Laid(str(node.target), (), sizes, False)
    if node.op not in ("call_function", "call_method") or not node.args:
        return None
    first, *others = node.args
    if not isinstance(first, fx.Node):
        return None
    laid = _laid_out(first, module)
    if laid is None:
        return None
    if node.op == "call_method" and node.target in _CASTS:
        return laid
    if node.target is operator.getitem and not laid.is_transposed:
        return _part(laid, others[0])
    if node.target in _TURNS and not node.kwargs and _turns(node.target, others, len(laid.sizes)):
        return laid._replace(is_transposed=not laid.is_transposed)
    return None


def _part(laid: _Laid, item: Any) -> _Laid | None:
    items = item if isinstance(item, tuple) else (item,)
    if not all(type(x) is int for x in items) or len(items) > len(laid.sizes) - 2:
        return None
    places = tuple(x % size for x, size in zip(items, laid.sizes, strict=False))
    return laid._replace(places=(*laid.places, *places), sizes=laid.sizes[len(items) :])


def _turns(target: Any, arguments: list[Any], axes: int) -> bool:
    """Whether a call transposes a matrix."""
    if axes != 2:
        return False
    if target is getattr:
        return arguments[0] in ("T", "mT")
    if target in (torch.t, "t"):
        return not arguments
    first = arguments[0] if arguments else None
    order = list(first) if isinstance(first, list | tuple) else arguments
    if len(order) != 2 or not all(type(x) is int for x in order):
        return False
    order = [x % 2 for x in order]
    return order == [1, 0] or (order == [0, 1] and target in (torch.transpose, "transpose"))


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter of a module, or of a child that only holds or looks it up."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    found = owner._parameters.get(key)
    is_own = owner is module or isinstance(owner, HOLDERS)
    return found if is_own and not isinstance(found, nn.UninitializedParameter) else None
