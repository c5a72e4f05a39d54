"""Products with parameters of no `nn.Linear` in a traced forward.

``F.linear(x, w)``, ``x @ w``, ``torch.mm``, ``torch.matmul``, ``torch.addmm``, ``torch.matmul(w,
x)`` and ``torch.einsum`` of the same, with w a parameter, a matrix of a parameter of more axes, or
a slice, the transpose or a cast of one.
"""

from __future__ import annotations

import itertools
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
_CASTS = ("to", "type_as", "bfloat16", "half", "contiguous")
_SPLITS = (torch.split, torch.chunk, "split", "chunk")
_NARROW = (torch.narrow, "narrow")
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
        form: One of the words above, or the equation of an einsum.
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
    sizes: tuple[int, ...]  # of what places and slices leave, untransposed
    is_transposed: bool
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def axis(self, axis: int) -> int:
        """The place in ``sizes`` of an axis of the node."""
        axis %= len(self.sizes)
        return 1 - axis if self.is_transposed else axis  # which has two

    def cut(self, axis: int, start: int, stop: int) -> _Laid | None:
        """A slice along an axis of the node; None if it is not one of the matrix."""
        axis = self.axis(axis)
        if (start, stop) == (0, self.sizes[axis]):
            return self
        if axis < len(self.sizes) - 2 or start >= stop:
            return None
        sizes = (*self.sizes[:axis], stop - start, *self.sizes[axis + 1 :])
        is_row = axis == len(self.sizes) - 2
        first, _ = (self.rows if is_row else self.columns) or (0, 0)
        span = (first + start, first + stop)
        if is_row:
            return self._replace(sizes=sizes, rows=span)
        return self._replace(sizes=sizes, columns=span)


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
            is_turned = laid.is_transposed != reads_turned(form)
            matrix = Matrix(laid.parameter, laid.places, is_turned, laid.rows, laid.columns)
            found.append(FoundProduct(node, form, matrix, x, weight, bias))
    return found


def reads_turned(form: str) -> bool:
    """Whether a product of a form multiplies by ``[k, n]``."""
    roles = roles_of(form)
    return form in TURNED if roles is None else roles[1]


def roles_of(equation: str) -> tuple[int, bool, str] | None:
    """Of an equation of einsum the place of the weight, whether it is ``[k, n]``, and axes of x.

    None if it is another form, or not ``x @ w`` or ``x @ w.t()``, where k is the last axis of x and
    n the last one of the output.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow or len(operands) != 2 or not output:
        return None
    place = int(output[-1] in operands[1])
    x, weight = operands[1 - place], operands[place]
    k, n = x[-1:], output[-1]
    is_product = len({*x.replace("...", ".")}) == len(x.replace("...", ".")) and n not in x
    if not is_product or output != x[:-1] + n or weight not in (k + n, n + k):
        return None
    return place, weight == k + n, x


def _operands(node: fx.Node) -> tuple[str, fx.Node, fx.Node, fx.Node | None] | None:
    """Form, x, weight and bias of a node that may be a product."""
    if node.op not in ("call_function", "call_method"):
        return None
    target, arguments, named = node.target, list(node.args), dict(node.kwargs)
    names: tuple[str, ...]
    if target is torch.einsum:
        return None if named else _of_einsum(*arguments)
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


def _of_einsum(form: Any, *operands: Any) -> tuple[str, fx.Node, fx.Node, None] | None:
    roles = roles_of(form) if isinstance(form, str) else None
    if roles is None or len(operands) != 2 or not all(isinstance(x, fx.Node) for x in operands):
        return None
    return form, operands[1 - roles[0]], operands[roles[0]], None


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
    is_call = first.op in ("call_function", "call_method")
    if node.target is operator.getitem and is_call and first.target in _SPLITS:
        return _chunk(first, others[0], module)
    laid = _laid_out(first, module)
    if laid is None:
        return None
    if node.op == "call_method" and node.target in _CASTS:
        return laid
    if node.target is operator.getitem:
        return _part(laid, others[0])
    if node.target in _NARROW:
        axis, start, length = _given(node, ("dim", "start", "length"))
        if not all(type(x) is int for x in (axis, start, length)):
            return None
        start %= laid.sizes[laid.axis(axis)]
        return laid.cut(axis, start, start + length)
    if node.target in _TURNS and not node.kwargs and _turns(node.target, others, len(laid.sizes)):
        return laid._replace(is_transposed=not laid.is_transposed)
    return None


def _given(node: fx.Node, names: tuple[str, ...]) -> list[Any]:
    """Arguments of a call behind its first, by place or by name; None where there is none."""
    found = list(node.args[1:])
    return found + [node.kwargs.get(name) for name in names[len(found) :]]


def _part(laid: _Laid, item: Any) -> _Laid | None:
    """What an item of a tensor is: places in leading axes, then slices of the matrix."""
    items = list(item) if isinstance(item, tuple) else [item]
    gap = len(laid.sizes) - len(items)
    if ... in items:
        place = items.index(...)
        items[place : place + 1] = [slice(None)] * (gap + 1)
    if not all(type(x) is int or _is_slice(x) for x in items) or len(items) > len(laid.sizes):
        return None
    count = next((n for n, x in enumerate(items) if type(x) is not int), len(items))
    places, slices = items[:count], items[count:]
    if count > len(laid.sizes) - 2 or any(type(x) is int for x in slices):
        return None
    places = [x % size for x, size in zip(places, laid.sizes, strict=False)]
    found: _Laid | None = laid._replace(
        places=(*laid.places, *places), sizes=laid.sizes[len(places) :]
    )
    for axis, x in enumerate(slices):
        if found is not None:
            start, stop, _ = x.indices(found.sizes[found.axis(axis)])
            found = found.cut(axis, start, stop)
    return found


def _is_slice(item: Any) -> bool:
    if not isinstance(item, slice) or item.step not in (None, 1):
        return False
    return all(x is None or type(x) is int for x in (item.start, item.stop))


def _chunk(node: fx.Node, place: Any, module: nn.Module) -> _Laid | None:
    """A part of a call of `_SPLITS`."""
    whole = node.args[0] if node.args else None
    laid = _laid_out(whole, module) if isinstance(whole, fx.Node) else None
    is_chunk = node.target in (torch.chunk, "chunk")
    size, axis = _given(node, ("chunks" if is_chunk else "split_size", "dim"))
    axis = 0 if axis is None else axis
    if laid is None or type(place) is not int or type(axis) is not int:
        return None
    total = laid.sizes[laid.axis(axis)]
    if type(size) is int and size > 0:
        size = -(-total // size) if is_chunk else size
        ends = [min(end, total) for end in range(size, total + size, size)]
    elif isinstance(size, list | tuple) and all(type(x) is int for x in size):
        ends = list(itertools.accumulate(size))
    else:
        return None
    if not -len(ends) <= place < len(ends) or ends[-1] != total:
        return None
    place %= len(ends)
    return laid.cut(axis, ends[place - 1] if place else 0, ends[place])


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
