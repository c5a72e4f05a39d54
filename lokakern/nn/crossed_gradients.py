"""Gradients behind a cross that are quantized where they are computed, in compiled training.

Of a cross ``x0 * z + x`` with ``z = h @ w.t() + b``, the gradient of z is ``g * x0``, which both
gradients ``(g * x0) @ w`` and ``(g * x0).t() @ h`` multiply. A compiler writes it in bfloat16 and
sums its columns for b in a kernel of its own; quantizing it then costs as much as products in FP8
save. `kernels/cuda/cross_backward.cu` reads g and x0 once, and writes the gradient in FP8 both
ways, and the sums.

A product that may read it so has a route with a mark (`routed_matmul.crossed`), which only compiled
forwards make (`lokakern.nn.compiled_form`). A pass over the graph of forward and backward finds the
factors of what two such products read. Elsewhere it takes the marks away, and the graph is as it is
without them. Other layers with large outputs have a mark, too: the kernel reads their gradient
once, without a factor, where both products would quantize it, or one would read it in bfloat16.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lokakern import numerics
from lokakern.device import current_device
from lokakern.functional.checks import row_major
from lokakern.native import recorded_op
from lokakern.nn.graph_edit import (
    CHUNK,
    RESHAPES,
    add,
    behind_gradients,
    is_read_so,
    is_there,
    is_written,
    replace,
    value,
)
from lokakern.nn.routed_matmul import (
    CROSSED,
    OPS,
    PLAIN,
    SHARED,
    crossed_kernel,
    fp8_on,
    multiply_quantized,
    route_text,
    uncrossed,
)
from lokakern.quantized_tensor import empty_data
from lokakern.registry.register import KERNELS, kernel_named, load_kernels
from lokakern.sums import column_sums
from lokakern.types import Format, Granularity, QuantizedTensor

KERNEL = "cuda.cross_backward"
MOST_TERMS = 3  # that the kernel adds
GROUP, BF16 = Granularity.GROUP, torch.bfloat16
aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
_SUMS = {"": torch.float32, "float32": torch.float32, "bfloat16": BF16}
_FLOATS = (BF16, torch.float32)
# Of products that may have a mark, the place of the route.
_ROUTES: dict[Any, int] = {OPS.routed_gemm.default: 5, OPS.weight_gradient.default: 2}


def crossed_gradient(
    terms: Sequence[Tensor], x0: Tensor | None, sums: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(sum of terms) * x0`` in FP8 with 1x128 scales, and its transpose.

    Args:
        terms: At most `MOST_TERMS`, ``[m, n]``, bfloat16.
        x0: The same; None for the sum alone.
        sums: The dtype of the sums of its columns, "float32" or "bfloat16"; "" for none.

    Returns:
        Data ``[m, n]`` with scales, those of the transpose, ``[n, m]``, and sums ``[n]``, in the
        order of `lokakern.sums`; for none one element of no meaning, as a result without elements
        would keep calls from being replayed.
    """
    data, scale, turned, turned_scale, total = _empty(terms, x0, sums)
    device = terms[0].device
    if not len(terms[0]):
        return data, scale, turned, turned_scale, total.zero_()
    made, across = QuantizedTensor(data, scale, GROUP), QuantizedTensor(turned, turned_scale, GROUP)
    if _runs_on(device):
        from lokakern.kernels.cuda.cross_backward import launch  # needs NVRTC's bindings

        rows = [row_major(x, apart=True) for x in terms]
        factor = None if x0 is None else row_major(x0, apart=True)
        launch(rows, factor, made, across, total if sums else None)
        return data, scale, turned, turned_scale, total
    values = functools.reduce(operator.add, (x.float() for x in terms))
    values = values if x0 is None else values * x0.float()
    for x, out in ((values, made), (values.t(), across)):
        numerics.quantize(x, Format.of(out.data.dtype), GROUP, data=out.data, scale=out.scale)
    if sums:
        column_sums(values, total)
    return data, scale, turned, turned_scale, total


def _empty(
    terms: Sequence[Tensor], _x0: Tensor | None, sums: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (m, n), device = terms[0].shape, terms[0].device
    fp8 = fp8_on(device)
    made = [
        x
        for rows, columns in ((m, n), (n, m))
        for x in (empty_data(rows, columns, fp8, device), GROUP.empty_scale(rows, columns, device))
    ]
    total = torch.empty(n if sums else 1, dtype=_SUMS[sums], device=device)
    return made[0], made[1], made[2], made[3], total


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """Whether `KERNEL` runs on a device."""
    load_kernels()
    kernel = KERNELS.get(KERNEL)
    return kernel is not None and kernel.runs_on(current_device(device.type, device.index or 0))


def _quantized_weight_gradient(
    turned: Tensor, scales: Tensor, x: Tensor | None, route: str, is_wide: bool,
    data: Tensor | None = None, data_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``turned @ x`` with a gradient whose transpose is in FP8; float32 if it ``is_wide``.

    x, too, may be given as the data of its transpose, with scales.
    """
    return multiply_quantized(turned, scales, x, route, data, data_scales, is_wide=is_wide)


def _quantized_weight_gradient_fake(
    turned: Tensor, _scales: Tensor, x: Tensor | None, _route: str, is_wide: bool,
    data: Tensor | None = None, _data_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    dtype = torch.float32 if is_wide else torch.bfloat16
    columns = None if data is None else data.shape[0]
    k = columns if x is None else x.shape[1]
    assert k is not None  # one of both is there
    return turned.new_empty((turned.shape[0], k), dtype=dtype)


_ANY_LAYOUT = (torch.Tag.flexible_layout,)  # a fixed one would copy views of what is not there yet
recorded_op(
    _LIBRARY,
    "crossed_gradient(Tensor[] terms, Tensor? x0, str sums) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    crossed_gradient,
    tags=_ANY_LAYOUT,
)
recorded_op(
    _LIBRARY,
    "quantized_weight_gradient(Tensor turned, Tensor scales, Tensor? x, str route, bool is_wide, "
    "Tensor? data=None, Tensor? data_scales=None) -> Tensor",
    _quantized_weight_gradient,
    tags=_ANY_LAYOUT,
)
torch.library.register_fake("lokakern::crossed_gradient", _empty, lib=_LIBRARY)
torch.library.register_fake(
    "lokakern::quantized_weight_gradient", _quantized_weight_gradient_fake, lib=_LIBRARY
)


class _Factors(NamedTuple):
    """What a gradient behind a cross is made of, with sizes and dtypes that the op takes.

    Attributes:
        terms: Of the gradient of the cross.
        x0: The other factor; None if there need be none.
    """

    terms: tuple[fx.Node, ...]
    x0: fx.Node | None


class _Readers(NamedTuple):
    """What reads a gradient in FP8, or its sums.

    Attributes:
        to_input: The products that compute gradients of layers' inputs; behind a cross one.
        to_weight: Those of weights; behind a cross one.
        sums: Those of its columns, for biases.
    """

    to_input: tuple[fx.Node, ...]
    to_weight: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]

    @property
    def grad(self) -> fx.Node:
        """The gradient as a matrix."""
        found = self.to_weight[0].args[0]
        assert isinstance(found, fx.Node)
        return found

    @property
    def first(self) -> fx.Node:
        """The first of them in the graph."""
        every = {*self.to_input, *self.to_weight, *self.sums}
        nodes: Iterable[fx.Node] = self.grad.graph.nodes
        return next(node for node in nodes if node in every)

    @property
    def before(self) -> set[fx.Node]:
        """The nodes before that one."""
        first = self.first
        return set(itertools.takewhile(lambda node: node is not first, first.graph.nodes))


def quantize_behind_crosses(graph: fx.Graph) -> None:
    """Let one op quantize what products with a mark read, in a graph of both passes."""
    marked: dict[tuple[fx.Node, bool], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in _ROUTES and CROSSED in _route_of(node):
            grad: Any = node.args[0]
            is_shared = crossed_kernel(_route_of(node)).startswith(SHARED)
            marked.setdefault((_root(grad), is_shared), []).append(node)
    for (root, is_shared), products in marked.items():
        readers = _readers_of(root, products, is_shared)
        found = None
        if readers is not None:
            found = _whole_of(readers) if is_shared else _factors_of(graph, root, readers)
        if readers is None or found is None:
            for product in products:
                _multiply_as_usual(graph, product)
        else:
            _quantize(graph, found, readers)
    graph.eliminate_dead_code()


def _route_of(product: fx.Node) -> str:
    return str(product.args[_ROUTES[product.target]])


def _root(x: fx.Node) -> fx.Node:
    """What a matrix is a view of, before autocast rounded it."""
    while x.target in RESHAPES or _is_rounded(x):
        source = x.args[0]
        if not isinstance(source, fx.Node):
            break
        x = source
    return x


def _is_rounded(x: fx.Node) -> bool:
    return x.target is _CAST and x.args[1] is BF16


def _leaves(x: fx.Node) -> Iterator[fx.Node]:
    """What reads a node through reshapes and roundings, of which it is the `_root`."""
    for user in x.users:
        if user.target in RESHAPES or _is_rounded(user):
            yield from _leaves(user)
        else:
            yield user


def _readers_of(root: fx.Node, products: list[fx.Node], is_shared: bool) -> _Readers | None:
    """The readers of a gradient; None if they are not those of one layer behind a cross.

    If it ``is_shared``, others may read it, too, and it may be that of several layers.
    """
    to_input = [x for x in products if x.target is OPS.routed_gemm.default]
    to_weight = [x for x in products if x.target is OPS.weight_gradient.default]
    shapes = {_shape_of(x.args[0]) for x in products}
    shape = next(iter(shapes))
    if not (to_input and to_weight and all(map(multiplies_weight, to_input))):
        return None
    if len(shapes) > 1 or shape is None:
        return None
    others = [x for x in dict.fromkeys(_leaves(root)) if x not in products]
    sums = [x for x in others if _is_sum_of_columns(x, shape[1])]
    if len({x.meta["val"].dtype for x in sums}) > 1:
        return None
    if not is_shared and not (len(to_input) == len(to_weight) == 1 and len(others) == len(sums)):
        return None
    if len(sums) > 1 and not is_shared:
        return None
    return _Readers(tuple(to_input), tuple(to_weight), tuple(sums))


def multiplies_weight(product: fx.Node) -> bool:
    """Whether a `routed_gemm` has nothing but a gradient and a weight that is not quantized yet."""
    _, weight, data, scale, bias, _, *others = product.args
    given = (data, scale, bias, *others)
    return weight is not None and not any(given) and not product.kwargs


def _shape_of(x: Any) -> torch.Size | None:
    found = value(x)
    return None if found is None else found.shape


def _is_sum_of_columns(x: fx.Node, columns: int) -> bool:
    """Whether a node is the sums of so many columns: a reshape may have others."""
    of = value(x)
    if of is None or of.shape != (columns,) or of.dtype not in _SUMS.values():
        return False
    if x.target is OPS.bias_gradient.default:
        return True
    return x.target is aten.sum.dim_IntList and x.args[1] in ([0], [-2])


def _whole_of(readers: _Readers) -> _Factors | None:
    """A gradient as one term; None if the op cannot read it, or not before its first reader."""
    before = readers.before
    for product in (*readers.to_weight, *readers.to_input):
        grad: Any = product.args[0]
        of = grad.meta["val"]
        is_fit = grad in before and of.dtype is BF16 and of.shape[1] % CHUNK == 0
        if is_fit and is_read_so(grad, *of.shape):
            return _Factors((grad,), None)
    return None


def _factors_of(graph: fx.Graph, root: fx.Node, readers: _Readers) -> _Factors | None:
    """The factors of a gradient; None if it is no product with the output's gradient."""
    dz = value(readers.grad)
    if root.target is not aten.mul.Tensor or root.kwargs or dz is None:
        return None
    first, second = root.args
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return None
    behind = behind_gradients(graph)
    if not _are_alike(root, first, second) or (first in behind) == (second in behind):
        return None
    m, n = dz.shape
    if dz.dtype is not BF16 or n % CHUNK:
        return None
    grad, x0 = (first, second) if first in behind else (second, first)
    before = readers.before

    def given(x: fx.Node) -> list[fx.Node]:
        return [y for y in _halves(x) if y in before and is_read_so(y, m, n)]

    terms = [
        next((y for y in given(x) if is_there(y) or _is_sum(y)), None) for x in _terms_of(grad)
    ]
    factor, known = next(iter(given(x0)), None), tuple(x for x in terms if x is not None)
    return None if factor is None or len(known) < len(terms) else _Factors(known, factor)


def _are_alike(*nodes: Any) -> bool:
    """Whether nodes are tensors of one size."""
    found = [value(x) for x in nodes]
    return all(x is not None and found[0] is not None and x.shape == found[0].shape for x in found)


def _terms_of(grad: fx.Node) -> list[fx.Node]:
    """The terms of a sum, so that nobody has to write it for this alone."""
    terms: list[fx.Node] = [grad]
    while len(terms) < MOST_TERMS:
        place = next((i for i, x in enumerate(terms) if _is_sum(x)), None)
        if place is None:
            break
        parts: Any = _copied(terms[place])[-1].args
        terms[place : place + 1] = parts
    return terms


def _copied(x: fx.Node) -> list[fx.Node]:
    """A node, and what it is a reshape of or a copy in another dtype, one after the other.

    Permutations are passed over where another one turns them back.
    """
    found, dims = [x], list[int]()  # of x in what is passed over; [] if they are the same
    while x.target in (*RESHAPES, _CAST, aten.permute.default):
        source, of = x.args[0], value(x.args[0])
        if not isinstance(source, fx.Node) or of is None or of.dtype not in _FLOATS:
            break
        if dims and x.target in RESHAPES:
            break
        if x.target is aten.permute.default:
            given: Any = x.args[1]
            places = [dim % of.dim() for dim in given]  # graphs keep negative ones
            dims = [places[dim] for dim in dims or range(of.dim())]
            dims = [] if dims == sorted(dims) else dims
        if not dims:
            found.append(source)
        x = source
    return found


def _is_sum(x: fx.Node) -> bool:
    """Whether a node is a sum of two equal sizes that only kernels of a compiler read."""
    whole = _copied(x)
    total = whole[-1]
    if total.target is not aten.add.Tensor or total.kwargs or len(total.args) != 2:
        return False
    return _are_alike(total, *total.args) and not any(map(is_written, whole))


def _halves(x: fx.Node) -> list[fx.Node]:
    """What holds the values of a node in bfloat16: itself, what it is a copy of, and copies."""
    found = [y for z in _copied(x) for y in (z, *(u for u in z.users if _is_rounded(u)))]
    return [y for y in dict.fromkeys(found) if (of := value(y)) is not None and of.dtype is BF16]


def _quantize(graph: fx.Graph, found: _Factors, readers: _Readers) -> None:
    """Let one op quantize the gradient, and the products read what it writes."""
    of = value(readers.grad)
    assert of is not None
    sums, totals = "", list(readers.sums)
    # Autograd copies a sum in bfloat16 for a bias in float32: that of the kernel is.
    users = [x for total in totals for x in total.users]
    if users and all(x.target is _CAST and x.args[1] is torch.float32 for x in users):
        totals = users
    if totals:
        sums = str(totals[0].meta["val"].dtype).removeprefix("torch.")
    with graph.inserting_before(readers.first):
        *terms, x0 = (
            x if x is None or x.meta["val"].shape == of.shape
            else add(graph, aten.view.default, x, list(of.shape))
            for x in (*found.terms, found.x0)
        )  # fmt: skip
        made = add(graph, OPS.crossed_gradient.default, terms, x0, sums)
        parts = [add(graph, operator.getitem, made, place) for place in range(5)]
    data, scale, turned, turned_scale, found_sums = parts
    for product in readers.to_input:
        with graph.inserting_before(product):
            given = (None, product.args[1], None, None, None, _kernel_of(product), data, scale)
            replace(product, add(graph, OPS.routed_gemm.default, *given))
    for product in readers.to_weight:
        with graph.inserting_before(product):
            more = (turned, turned_scale, product.args[1], _kernel_of(product), False)
            replace(product, add(graph, OPS.quantized_weight_gradient.default, *more))
    for total in totals:
        total.replace_all_uses_with(found_sums)


def _kernel_of(product: fx.Node) -> str:
    return route_of(crossed_kernel(_route_of(product)).removeprefix(SHARED))


def route_of(kernel: str) -> str:
    """The route of a kernel at every m, for operands in FP8."""
    load_kernels()
    return route_text(kernel_named(kernel).b_granularity, [(0, kernel)], [(0, kernel)])


def _multiply_as_usual(graph: fx.Graph, product: fx.Node) -> None:
    """Take the mark from a product: without it, an unquantized one is torch's."""
    place, route = _ROUTES[product.target], uncrossed(_route_of(product))
    if route != PLAIN:
        product.update_arg(place, route)
        return
    a, b = product.args[:2]
    of_a, of_b = value(a), value(b)
    assert of_a is not None
    with graph.inserting_before(product):
        if product.target is OPS.weight_gradient.default:
            a = add(graph, aten.permute.default, a, [1, 0])
        if of_b is not None and of_b.dtype is not of_a.dtype:
            b = add(graph, _CAST, b, of_a.dtype)
        replace(product, add(graph, aten.mm.default, a, b))
