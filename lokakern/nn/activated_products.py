"""Activations behind FP8 products of a compiled graph, computed by the products.

Where a library or a kernel of ours reads ``f(a @ b + bias)``, Inductor writes it in a kernel of its
own, which reads the product and writes as much again: 25 us of an H200 at 8192 x 2048, where the
product over k = 512 takes 20. The FP8 GEMMs of this library apply relu and silu to their sums,
which are float32 still. Where only Inductor's kernels read f, they compute it as they load the
product, and it is left to them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lokakern.device import current_device
from lokakern.nn import routed_matmul
from lokakern.nn.graph_edit import RESHAPES, add, replace, value
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS
from lokakern.sampled_check import is_checked
from lokakern.types import Format, Operand, Rejected

try:
    from torch._inductor import config
except ImportError:
    config = None  # type: ignore[assignment]

aten, prims = torch.ops.aten, torch.ops.prims
_CAST = prims.convert_element_type.default
_PARTS = RESHAPES | {
    operator.getitem, aten.expand.default, aten.permute.default, aten.select.int, aten.slice.Tensor,
    aten.split.Tensor, aten.split_with_sizes.default, aten.squeeze.dim, aten.t.default,
    aten.transpose.int, aten.unsqueeze.default,
}  # fmt: skip
_PRODUCTS = {aten.addmm.default, aten.baddbmm.default, aten.bmm.default, aten.mm.default}


def activate_in_products(graph: fx.Graph) -> None:
    """Compute relu and silu of FP8 products in the products, in a graph of an inference."""
    if config is not None and getattr(config, "emulate_precision_casts", False):
        return  # which asks for products that are rounded before they are activated
    for product in list(
        graph.find_nodes(op="call_function", target=torch.ops.lokakern.routed_gemm.default)
    ):
        shaped = product
        while len(shaped.users) == 1 and next(iter(shaped.users)).target in RESHAPES:
            shaped = next(iter(shaped.users))
        found = _activation_of(shaped)
        if found is None:
            continue
        activation, last = found
        if not (_is_written(last) and _takes(product, activation)):
            continue
        a, _, data, scale, bias, route = product.args[:6]
        with graph.inserting_before(product):
            op = torch.ops.lokakern.activated_product.default
            made = add(graph, op, a, data, scale, bias, route, activation)
        with graph.inserting_before(last):
            shape = list(last.meta["val"].shape)
            is_whole = shape == list(made.meta["val"].shape)
            replace(last, made if is_whole else add(graph, aten.reshape.default, made, shape))
    graph.eliminate_dead_code()


def _takes(product: fx.Node, activation: str) -> bool:
    """Whether the kernel of a product at its size is a GEMM of ours with such an epilogue."""
    a, _, data, scale, bias, route, *others = product.args
    is_usual = not any(others) and not any(product.kwargs.values())
    if not is_usual or data is None or scale is None or not isinstance(route, str):
        return False
    left, out = value(a), value(product)
    if left is None or out is None or is_checked(route) or routed_matmul.has_switch(route):
        return False
    (m, k), n = left.shape, out.shape[1]
    if not routed_matmul.form_of_left(route, m, k):
        return False
    kernel = routed_matmul.kernel_here(route, m, left.device)
    if kernel is None:
        return False
    gemm = KERNELS[kernel.parts[-1]]
    device = current_device(left.device.type, left.device.index or 0)
    problem = make_problem(
        "scaled_gemm", (m, n, k), a=Operand(Format.of(routed_matmul.fp8_on(left.device)),
        gemm.granularity), epilogue="bias+" * (bias is not None) + activation,
        out_format=Format.of(out.dtype),
    )  # fmt: skip
    return not isinstance(gemm.supports(problem, device), Rejected)


def _activation_of(y: fx.Node) -> tuple[str, fx.Node] | None:
    """The activation that alone reads a product, and its node in the dtype of the product."""
    if len(y.users) != 1:
        return None
    (user,) = y.users
    if user.target is aten.relu.default:
        return "relu", user
    if user.target is aten.silu.default:
        return "silu", user
    if user.target is not _CAST or user.args[1] is not torch.float32:
        return None
    last = next((x for x in user.users if _is_silu(x, user)), None)
    if last is None or len(last.users) != 1:
        return None
    (rounded,) = last.users
    is_rounded = rounded.target is _CAST and rounded.args[1] is y.meta["val"].dtype
    # Nothing else reads the product, or what silu is made of.
    inner = {user, last}
    left = [last.args[1]]
    while left:
        node = left.pop()
        if isinstance(node, fx.Node) and node not in inner:
            inner.add(node)
            left += node.args
    is_own = all(reader in inner for node in inner - {last} for reader in node.users)
    return ("silu", rounded) if is_rounded and is_own else None


def _is_silu(node: fx.Node, x: fx.Node) -> bool:
    """Whether it is ``x / (1 + exp(-x))`` or ``x * sigmoid(x)``, as torch decomposes silu."""
    if len(node.args) != 2 or node.args[0] is not x or node.kwargs:
        return False
    if node.target is aten.div.Tensor:
        return _is_one_more_than_exp_of_minus(node.args[1], x)
    return node.target is aten.mul.Tensor and _is_sigmoid(node.args[1], x)


def _is_sigmoid(node: Any, x: fx.Node) -> bool:
    if _is(node, aten.mul.Tensor) and node.args[1] == 1:
        node = node.args[0]
    if _is(node, aten.reciprocal.default):
        return _is_one_more_than_exp_of_minus(node.args[0], x)
    return _is(node, aten.sigmoid.default) and node.args[0] is x


def _is_one_more_than_exp_of_minus(node: Any, x: fx.Node) -> bool:
    if not _is(node, aten.add.Tensor) or node.args[1] != 1 or node.kwargs:
        return False
    exp: Any = node.args[0]
    if not _is(exp, aten.exp.default) or not _is(exp.args[0], aten.neg.default):
        return False
    return exp.args[0].args[0] is x


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _is_written(last: fx.Node) -> bool:
    """Whether something other than Inductor's kernels reads a node, or a part of it."""
    for reader in last.users:
        is_ours = getattr(reader.target, "namespace", "") == "lokakern"
        if is_ours or reader.target in _PRODUCTS or reader.op == "output":
            return True
        if reader.target in _PARTS and _is_written(reader):
            return True
    return False
