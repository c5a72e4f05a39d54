"""Relus behind FP8 products of a compiled graph, computed by the products.

Where a library or a kernel of ours reads ``relu(a @ b + bias)``, Inductor writes it in a kernel of
its own, which reads the product and writes as much again: 25 us of an H200 at 8192 x 2048, where
the product over k = 512 takes 20. The FP8 GEMMs of this library have the relu in their epilogue.
Where only Inductor's kernels read it, such as those that quantize, they compute it as they load the
product, and it is left to them, but for concatenations along columns, to which the product may
write (`lokakern.nn.inductor`). In training the gradient of the next weight reads it, too. Silu is
left alone: its exponential takes the epilogue 35 us more, and its gradient needs the product.
"""

from __future__ import annotations

import torch
from torch import fx

from lokakern.device import current_device
from lokakern.nn import routed_matmul
from lokakern.nn.graph_edit import (
    RESHAPES,
    add,
    is_recomputed,
    is_written,
    joins_columns,
    replace,
    value,
)
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS
from lokakern.sampled_check import is_checked
from lokakern.types import Format, Operand, Rejected

aten = torch.ops.aten


def rectify_in_products(graph: fx.Graph) -> None:
    """Compute relus of FP8 products in the products."""
    for product in list(
        graph.find_nodes(op="call_function", target=torch.ops.lokakern.routed_gemm.default)
    ):
        shaped = product
        while len(shaped.users) == 1 and next(iter(shaped.users)).target in RESHAPES:
            shaped = next(iter(shaped.users))
        last = next(iter(shaped.users), None)
        if last is None or last.target is not aten.relu.default or len(shaped.users) > 1:
            continue
        if is_recomputed(product, shaped, last) or not (_is_read(last) and _takes(product)):
            continue
        with graph.inserting_before(product):
            op = torch.ops.lokakern.rectified_product.default
            a, b, data, *others = product.args[:6]
            made = add(graph, op, a, b if data is None else None, data, *others)
        with graph.inserting_before(last):
            shape = list(last.meta["val"].shape)
            is_whole = shape == list(made.meta["val"].shape)
            replace(last, made if is_whole else add(graph, aten.reshape.default, made, shape))
    graph.eliminate_dead_code()


def _is_read(relu: fx.Node) -> bool:
    """Whether something other than Inductor's kernels reads a relu, or a concatenation alone.

    Where the product cannot write to that, the relu takes no launch of its own in either place.
    """
    return is_written(relu) or (len(relu.users) == 1 and joins_columns(next(iter(relu.users))))


def _takes(product: fx.Node) -> bool:
    """Whether the kernel of a product at its size is a GEMM of ours with a relu."""
    a, _, _, _, bias, route, *others = product.args
    is_usual = not any(others) and not any(product.kwargs.values())
    if not is_usual or not isinstance(route, str):
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
        gemm.granularity), epilogue="bias+relu" if bias is not None else "relu",
        out_format=Format.of(out.dtype),
    )  # fmt: skip
    return not isinstance(gemm.supports(problem, device), Rejected)
