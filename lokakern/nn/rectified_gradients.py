"""Gradients behind relus that are quantized where they are computed, in compiled training.

Both gradients of a layer in front of a relu read ``dz = g where y > 0, else 0``: that of its input
by rows, that of its weight by groups of samples. A compiler's kernel reads g and the relu's output
y, quantizes dz by rows and writes it in bfloat16, too, which a quantizer reads; a third kernel
reads y for the gradient of the next weight. `kernels/cuda/relu_backward.cu` reads g and y once for
all three: 7 bytes an element instead of 13.

A pass over the graph of forward and backward finds such gradients. Everywhere else the graph stays
as it is.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lokakern import numerics
from lokakern.functional.checks import row_major
from lokakern.native import recorded_op
from lokakern.nn.crossed_gradients import multiplies_weight, route_of
from lokakern.nn.graph_edit import (
    PARTS,
    add,
    behind_gradients,
    is_read_so,
    is_recomputed,
    is_there,
    readers,
    replace,
    same,
    value,
)
from lokakern.nn.routed_matmul import (
    CROSSED,
    FLOAT16,
    OPS,
    fp8_on,
    has_delayed,
    has_switch,
    kernel_at,
)
from lokakern.quantized_tensor import empty_data
from lokakern.registry.register import Kernel, kernel_named, load_kernels
from lokakern.sampled_check import is_checked
from lokakern.types import GROUP as SIDE
from lokakern.types import Format, Granularity, QuantizedTensor

BF16 = torch.bfloat16
ROW, GROUP, BLOCK = Granularity.ROW, Granularity.GROUP, Granularity.BLOCK
MOST_COLUMNS = 4096
# Where it was timed and faster: an H200 takes 26.8 us for 8192 x 1024, where the quantizers that it
# replaces take 21 and a compiler's kernel 15 by its bytes, and for 8192 x 512 or 2048 x 1024 as
# long as all three.
LEAST_ROWS, COLUMNS = 8192, (1024, 2048, 4096)
aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_GRADIENTS = (aten.where.self, aten.threshold_backward.default)
_COPIES = (aten.alias.default, aten.clone.default, aten.detach.default)
_ZEROS = (aten.scalar_tensor.default, aten.full.default)
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
_Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def rectified_gradient(grad: Tensor, y: Tensor, writes_output: bool) -> _Six:
    """``grad`` where ``y > 0``, else 0, in FP8, as of a relu whose output is y, and y.

    Args:
        grad: That of the output, ``[m, n]``, bfloat16, of a size that the op `takes`.
        y: The output, likewise.
        writes_output: Whether y is quantized.

    Returns:
        Data ``[m, n]`` with a scale for each row; those of the transpose, ``[n, m]``, with 1x128
        scales; those of ``y.t()`` with 128x128 scales, or one element each of no meaning.
    """
    found = _empty(grad, y, writes_output)
    made, turned, output = (
        QuantizedTensor(found[place], found[place + 1], scales)
        for place, scales in ((0, ROW), (2, GROUP), (4, BLOCK))
    )
    if _runs_on(grad.device):
        from lokakern.kernels.cuda.relu_backward import launch  # needs NVRTC's bindings

        rows = [row_major(x, apart=True) for x in (grad, y)]
        launch(rows[0], rows[1], made, turned, output if writes_output else None)
        return found
    dz = torch.where(y <= 0, torch.zeros_like(grad), grad)
    jobs = [(dz, made), (dz.t(), turned), *([(y.t(), output)] if writes_output else [])]
    for x, out in jobs:
        fp8 = Format.of(out.data.dtype)
        numerics.quantize(x, fp8, out.granularity, data=out.data, scale=out.scale)
    return found


def _empty(grad: Tensor, _y: Tensor, writes_output: bool) -> _Six:
    (m, n), device = grad.shape, grad.device
    fp8 = fp8_on(device)
    output = (n, m) if writes_output else (1, 1)
    sizes = (((m, n), ROW), ((n, m), GROUP), (output, BLOCK))
    made = [
        x
        for (rows, columns), scales in sizes
        for x in (empty_data(rows, columns, fp8, device), scales.empty_scale(rows, columns, device))
    ]
    return made[0], made[1], made[2], made[3], made[4], made[5]


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """Whether the kernel runs on a device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    from lokakern.kernels.cuda.relu_backward import runs_on

    return runs_on(device)


recorded_op(
    _LIBRARY,
    "rectified_gradient(Tensor grad, Tensor y, bool writes_output) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    rectified_gradient,
    tags=(torch.Tag.flexible_layout,),
)
torch.library.register_fake("lokakern::rectified_gradient", _empty, lib=_LIBRARY)


def takes(m: int, n: int) -> bool:
    """Whether the op takes a size."""
    return not (m % SIDE or n % SIDE) and 0 < n <= MOST_COLUMNS and m > 0


class _Gradient(NamedTuple):
    """A gradient behind a relu that the op computes.

    Attributes:
        dz: The gradient.
        grad: That of the relu's output.
        y: The relu's output.
        to_input: The product that computes the gradient of the layer's input.
        to_weight: That of its weight.
        kernels: Of both products.
    """

    dz: fx.Node
    grad: fx.Node
    y: fx.Node
    to_input: fx.Node
    to_weight: fx.Node
    kernels: tuple[Kernel, Kernel]


def quantize_behind_relus(graph: fx.Graph) -> None:
    """Let one op quantize gradients behind relus that two products read in FP8."""
    behind = behind_gradients(graph)
    for node in list(graph.nodes):
        # Forward passes select, too, and a checkpoint computes them again.
        is_gradient = node.target in _GRADIENTS and node in behind and not is_recomputed(node)
        found = _gradient_of(node) if is_gradient else None
        if found is not None:
            _quantize(graph, found)
    graph.eliminate_dead_code()


def _gradient_of(dz: fx.Node) -> _Gradient | None:
    """The gradient that a node is, or None."""
    sources, of = _relu_of(dz), value(dz)
    if sources is None or of is None or of.dim() != 2 or of.dtype is not BF16:
        return None
    (grad, y), (m, n) = sources, of.shape
    if not takes(m, n) or not _is_fast(m, n, of.device):
        return None
    for x in (grad, y):
        known = value(x)
        if known is None or known.dtype is not BF16 or known.shape != of.shape:
            return None
        if not is_read_so(x, m, n) or not is_there(x):
            return None
    products = readers(dz)
    to_input = [x for x in products if x.target is OPS.routed_gemm.default]
    to_weight = [x for x in products if x.target is OPS.weight_gradient.default]
    if len(set(products)) != 2 or not (len(to_input) == len(to_weight) == 1):
        return None
    first, second = to_input[0], to_weight[0]
    if not (_multiplies(first, dz) and _multiplies(second, dz) and multiplies_weight(first)):
        return None
    by_input, by_weight = _kernel_at(first, m), _kernel_at(second, m)
    if by_input is None or by_weight is None:
        return None
    if by_input.granularity is not ROW or by_weight.granularity is not GROUP:
        return None
    return _Gradient(dz, grad, y, first, second, (by_input, by_weight))


def _relu_of(dz: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The gradient of a relu's output, and the output, of the gradient of its input.

    The output may be any tensor that is compared with 0.
    """
    given: tuple[Any, ...] = dz.args
    if dz.target is aten.threshold_backward.default:
        grad, y, threshold = given
        is_relu = threshold == 0
    else:
        below, zero, grad = given
        is_relu = below.target is aten.le.Scalar and below.args[1] == 0 and _is_zero(zero)
        y = below.args[0] if is_relu else None
    while isinstance(y, fx.Node) and y.target in _COPIES:
        y = y.args[0]
    if not (is_relu and isinstance(grad, fx.Node) and isinstance(y, fx.Node)):
        return None
    return grad, y


def _is_zero(x: Any) -> bool:
    if not isinstance(x, fx.Node) or x.target not in _ZEROS:
        return False
    fill = x.args[1] if x.target is aten.full.default else x.args[0]
    return isinstance(fill, int | float) and fill == 0 and math.copysign(1, fill) > 0


def _multiplies(product: fx.Node, dz: fx.Node) -> bool:
    """Whether a gradient, or a view of it, is the left operand of a product, and that alone."""
    is_dz = [isinstance(x, fx.Node) and same(x) is dz for x in product.args]
    return is_dz[0] and sum(is_dz) == 1


def _kernel_at(product: fx.Node, m: int) -> Kernel | None:
    """The kernel of a product at m, if its operands may be quantized elsewhere."""
    place = 5 if product.target is OPS.routed_gemm.default else 2
    route = product.args[place]
    if not isinstance(route, str) or CROSSED in route or FLOAT16 in route:
        return None
    if is_checked(route) or has_switch(route) or has_delayed(route):
        return None
    name = kernel_at(route, m)
    if not name:
        return None
    load_kernels()
    kernel = kernel_named(name)
    return kernel if kernel.parts else None


def _is_fast(m: int, n: int, device: torch.device) -> bool:
    """Whether the op was faster than what it replaces where it was timed."""
    return m >= LEAST_ROWS and n in COLUMNS and _runs_on(device)


def _quantize(graph: fx.Graph, found: _Gradient) -> None:
    """Let the op quantize a gradient, and the products read what it writes."""
    of_next = _next_gradient(found)
    with graph.inserting_before(found.dz):
        writes_output = of_next is not None
        made = add(graph, OPS.rectified_gradient.default, found.grad, found.y, writes_output)
        parts = [add(graph, operator.getitem, made, place) for place in range(6)]
    data, scale, turned, turned_scale, output, output_scale = parts
    by_input, by_weight = (route_of(kernel.name) for kernel in found.kernels)
    product = found.to_input
    with graph.inserting_before(product):
        given = (None, product.args[1], None, None, None, by_input, data, scale)
        replace(product, add(graph, OPS.routed_gemm.default, *given))
    product, op = found.to_weight, OPS.quantized_weight_gradient.default
    with graph.inserting_before(product):
        replace(product, add(graph, op, turned, turned_scale, product.args[1], by_weight, False))
    if of_next is not None:
        _read_output(of_next, parts[-1], output, output_scale)


def _next_gradient(found: _Gradient) -> fx.Node | None:
    """The gradient of a weight that reads the relu's output by blocks, if it can wait for the op.

    It is computed before: nothing but the caller may read it, through views and casts.
    """
    m = found.dz.meta["val"].shape[0]
    for reader in readers(found.y):
        kernel: Kernel | None = None
        place = 1  # of the input
        if reader.target is OPS.quantized_weight_gradient.default and len(reader.args) == 5:
            kernel = kernel_named(kernel_at(str(reader.args[3]), 0))
            place = 2
        elif reader.target is OPS.weight_gradient.default and reader is not found.to_weight:
            kernel = _kernel_at(reader, m)
        if kernel is None or kernel.b_granularity is not BLOCK or not _can_wait(reader):
            continue
        is_y = [isinstance(x, fx.Node) and same(x) is found.y for x in reader.args]
        if is_y[place] and sum(is_y) == 1:
            return reader
    return None


def _can_wait(node: fx.Node) -> bool:
    """Whether nothing but the caller reads a node, itself or through views and casts."""
    passing = (*PARTS, _CAST)
    return all(x.op == "output" or (x.target in passing and _can_wait(x)) for x in node.users)


def _read_output(product: fx.Node, behind: fx.Node, output: fx.Node, output_scale: fx.Node) -> None:
    """Let the gradient of the next weight read the relu's output in FP8, behind the op."""
    graph = product.graph
    nodes: Iterable[fx.Node] = graph.nodes
    if product in set(itertools.takewhile(lambda node: node is not behind, nodes)):
        for node in (product, *_all_readers(product)):
            behind.append(node)
            behind = node
    op, given = OPS.quantized_weight_gradient.default, tuple[Any, ...]()
    if product.target is op:
        turned, scales, _, route, is_wide = product.args
        given = (turned, scales, None, route, is_wide, output, output_scale)
    else:  # the gradient in front of it stays in bfloat16
        op = OPS.saved_weight_gradient.default
        given = (product.args[0], output, output_scale, product.args[2], False)
    with graph.inserting_before(product):
        replace(product, add(graph, op, *given))


def _all_readers(node: fx.Node) -> list[fx.Node]:
    """What reads a node, and what reads that, but the output, in the order of the graph."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        new = waiting.pop().users.keys() - found
        found |= new
        waiting += new
    return [x for x in node.graph.nodes if x in found and x.op != "output"]
