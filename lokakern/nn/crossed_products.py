"""DCN's crosses behind FP8 products, computed by the products, in the graph of a training.

The gradients of ``x0 * z + x`` need z, the product with its bias. So a compiler has the product
write z, and computes the cross in a kernel of its own that reads z, x0 and x: of an H200 38 and 55
us at 8192 x 3456 x 512. `cuda.gemm_cross_row` reads x0 and x while it multiplies, and writes z
beside the cross: nothing reads it before the backward pass. x0 is multiplied by z before z is
rounded.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lokakern.device import current_device
from lokakern.functional.checks import row_major
from lokakern.native import recorded_op
from lokakern.nn import routed_matmul
from lokakern.nn.graph_edit import RESHAPES, add, behind_gradients, is_recomputed, replace, value
from lokakern.problems import make_problem
from lokakern.quantized_tensor import ROW_BYTES
from lokakern.registry.register import KERNELS, Kernel
from lokakern.sampled_check import is_checked
from lokakern.types import Device, Format, Layout, NormEpilogue, Operand, Rejected

aten = torch.ops.aten
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
# The largest k at which `cuda.gemm_cross_row` was timed, without z. At 8192 x 1024 x 1024 it takes
# 25.5 us of an H200, and the bytes of z 5 more at the rate that it has at 3456 columns (3.2 TB/s);
# apart, the product takes 16.6 and the cross 16 (4.1 TB/s). At 8192 x 3456 x 512 these are 53.7 and
# 18, 38 and 55. At larger k the product counts more than bytes, and other kernels multiply faster.
LARGEST_K = 1024
# What shows a product; a copy is of a bias whose gradient is summed apart, and Inductor removes it.
_SHOWN = RESHAPES | {aten.clone.default}


def _crossed_product(
    a: Tensor | None, b: Tensor | None, data: Tensor | None, scale: Tensor | None,
    bias: Tensor | None, x0: Tensor, x: Tensor, route: str, left: Tensor | None = None,
    left_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``x0 * z + x``, and ``z = a @ b + bias``, by the kernel for crosses of a route at this m.

    Where there is none, z is rounded before it is multiplied, as without this op.

    Args:
        a: As of `routed_matmul.multiply`, as the other arguments; None with ``left``.
        b: ``[k, n]``; None: only ``data`` is available.
        data: FP8 data of ``b.t()``; None if it is to be quantized here.
        scale: The scales of ``data``.
        bias: ``[n]``, or None.
        x0: ``[m, n]``, of the dtype of the route.
        x: As ``x0``.
        route: The route.
        left: a in FP8.
        left_scales: The scales of ``left``.
    """
    whole = left if a is None else a
    assert whole is not None
    kernel = routed_matmul.kernel_here(route, len(whole), whole.device)
    crossing = _crossing(kernel, _here(whole)) if kernel is not None and whole.is_cuda else None
    if kernel is None or crossing is None:
        z = torch.ops.lokakern.routed_gemm(a, b, data, scale, bias, route, left, left_scales)
        return torch.addcmul(x.float(), x0.float(), z.float()).to(z.dtype), z
    operands = routed_matmul.quantized_operands(kernel, a, b, data, scale, left, left_scales)
    d, z = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    x0, x = (row_major(y, apart=True) for y in (x0, x))
    crossing.launch(*operands, d, NormEpilogue(bias=bias, x0=x0, x=x), (), z)
    return d, z


def _crossed_product_fake(
    a: Tensor | None, b: Tensor | None, data: Tensor | None, scale: Tensor | None,
    bias: Tensor | None, x0: Tensor, x: Tensor, route: str, left: Tensor | None = None,
    left_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    d, z = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return d, z


recorded_op(
    _LIBRARY,
    "crossed_product(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, Tensor x0, "
    "Tensor x, str route, Tensor? left=None, Tensor? left_scales=None) -> (Tensor, Tensor)",
    _crossed_product,
)
torch.library.register_fake("lokakern::crossed_product", _crossed_product_fake, lib=_LIBRARY)


@functools.lru_cache(maxsize=256)
def _crossing(kernel: Kernel, device: Device) -> Kernel | None:
    """The kernel for a cross of a product with the scales of another kernel, if there is one."""
    scales = kernel.granularity, kernel.b_granularity
    for name, other in KERNELS.items():
        is_fit = (other.granularity, other.b_granularity) == scales and other.runs_on(device)
        if name.startswith("cuda.gemm_cross_") and kernel.parts and is_fit:
            return other
    return None


def _here(x: Tensor) -> Device:
    return current_device(x.device.type, x.device.index or 0)


class _Cross(NamedTuple):
    """A cross of a product in a graph.

    Attributes:
        product: The product with its bias, z.
        views: Of z, up to what is multiplied.
        x0: The factor.
        x: The other summand.
        scaled: ``x0 * z``, which only the sum reads.
        sum: The result.
    """

    product: fx.Node
    views: list[fx.Node]
    x0: fx.Node
    x: fx.Node
    scaled: fx.Node
    sum: fx.Node


def cross_in_products(graph: fx.Graph) -> None:
    """Compute crosses of FP8 products in the products, in the graph of a training."""
    op = torch.ops.lokakern.routed_gemm.default
    products = graph.find_nodes(op="call_function", target=op)
    behind = behind_gradients(graph) if products else set()
    for product in products:
        cross = None if product in behind else _cross_of(product, behind)
        if cross is not None and _takes(cross):
            _write(graph, cross)
    graph.eliminate_dead_code()


def _cross_of(product: fx.Node, behind: set[fx.Node]) -> _Cross | None:
    """The cross that alone reads a product in the forward pass."""
    z, views = product, []
    while True:
        ahead = [user for user in z.users if user not in behind]
        if len(ahead) != 1:
            return None
        if ahead[0].target not in _SHOWN:
            break
        z = ahead[0]
        views.append(z)
    scaled = ahead[0]
    x0 = _other(scaled, aten.mul.Tensor, z)
    last = next(iter(scaled.users), None)
    if x0 is None or last is None or len(scaled.users) > 1 or last in behind:
        return None
    x = _other(last, aten.add.Tensor, scaled)
    return None if x is None else _Cross(product, views, x0, x, scaled, last)


def _other(node: fx.Node, op: Any, x: fx.Node) -> fx.Node | None:
    """The other operand of a sum or a product of two tensors."""
    if node.target is not op or node.kwargs or len(node.args) != 2:
        return None
    others = [y for y in node.args if y is not x]
    return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None


def _takes(cross: _Cross) -> bool:
    """Whether a kernel for crosses runs instead of the product's at its size, and is faster."""
    a, _, _, _, bias, route, *others = cross.product.args
    is_usual = not any(others) and not any(cross.product.kwargs.values())
    if not is_usual or not isinstance(route, str):
        return False
    # What a checkpoint computes again is not kept.
    if is_recomputed(cross.product, *cross.views, cross.scaled, cross.sum):
        return False
    values = [value(y) for y in (a, cross.product, cross.x0, cross.x, cross.scaled, cross.sum)]
    if any(y is None for y in values) or is_checked(route) or routed_matmul.has_switch(route):
        return False
    left, z, *beside = (y for y in values if y is not None)
    (m, k), n = left.shape, z.shape[1]
    is_whole = all(y.shape == beside[0].shape and y.dtype is z.dtype for y in beside)
    if not is_whole or beside[0].numel() != z.numel() or k > LARGEST_K:
        return False
    if not all(_lies_in_rows(y, z) for y in beside[:2]):
        return False
    device, kernel = _here(left), routed_matmul.kernel_here(route, m, left.device)
    crossing = None if kernel is None else _crossing(kernel, device)
    if crossing is None:
        return False
    fp8 = Format.of(routed_matmul.fp8_on(left.device))
    problem = make_problem(
        "gemm_norm", (m, n, k), a=Operand(fp8, crossing.granularity),
        b=Operand(fp8, crossing.b_granularity, Layout.COLUMN),
        epilogue="cross" if bias is None else "bias+cross", out_format=Format.of(z.dtype),
    )  # fmt: skip
    return not isinstance(crossing.supports(problem, device), Rejected)


def _lies_in_rows(x: Tensor, z: Tensor) -> bool:
    """Whether rows as long as those of z are contiguous, and start at multiples of 16 bytes."""
    if x.shape == z.shape and x.stride(1) == 1 and x.stride(0) >= z.shape[1]:  # not expanded
        return x.stride(0) * x.element_size() % ROW_BYTES == 0
    return x.is_contiguous()


def _write(graph: fx.Graph, cross: _Cross) -> None:
    product, shape = cross.product, list(cross.product.meta["val"].shape)
    a, b, data, scale, bias, route = product.args[:6]
    with graph.inserting_before(cross.sum):
        x0, x = (
            y if list(y.meta["val"].shape) == shape else add(graph, aten.reshape.default, y, shape)
            for y in (cross.x0, cross.x)
        )  # fmt: skip
        op = torch.ops.lokakern.crossed_product.default
        b = b if data is None else None
        both = add(graph, op, a, b, data, scale, bias, x0, x, route)
        d, z = (add(graph, operator.getitem, both, place) for place in range(2))
        sizes = list(cross.sum.meta["val"].shape)
        shown = d if sizes == shape else add(graph, aten.reshape.default, d, sizes)
    replace(cross.sum, shown)
    graph.erase_node(cross.scaled)
    for view in reversed(cross.views):  # which came before the sum
        z.append(view)
    replace(product, z)
