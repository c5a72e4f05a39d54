"""Gradients of float32 weights that no step rounds to bfloat16, in compiled training.

Autocast multiplies in bfloat16 or float16, so autograd has the gradient of a weight, or of an input
in float32, in that and copies it to float32. Here the product writes its float32 sums as they are,
those beyond 65504 of float16, too:
at 8192 samples and 512 x 123200 it takes 1.51 ms of an H200, where product and copy take 1.69.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lokakern.nn.autocast import HALF
from lokakern.nn.graph_edit import RESHAPES, behind_gradients, replace, value
from lokakern.nn.routed_matmul import OPS, kernel_at, writes_float32

try:
    from torch._inductor import config
except ImportError:
    config = None  # type: ignore[assignment]

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_IS_AMD = torch.version.hip is not None
# Sizes are multiples of it: a compiler pads others, if the product has one dtype.
MULTIPLE = 8


def write_in_float32(graph: fx.Graph) -> None:
    """Let products write the gradients of float32 weights, in the graph of forward and backward."""
    behind = behind_gradients(graph)
    quantized = OPS.quantized_weight_gradient.default
    from_saved = OPS.saved_weight_gradient.default
    is_tuned = config is not None and (config.max_autotune or config.max_autotune_gemm)
    for node in list(graph.find_nodes(op="call_function", target=_CAST)):
        if node not in behind or not _is_result(node):
            continue
        product = _product_of(node)
        of = value(product)
        if product is None or of is None or not _fits(of.device):
            continue
        with graph.inserting_before(node):
            # Templates of Inductor, where it times them, copy in their epilogue.
            if product.target is aten.mm.default and _is_aligned(product) and not is_tuned:
                op, given = aten.mm.dtype, (*product.args, torch.float32)
            elif product.target is OPS.weight_gradient.default and _is_wide(product):
                op, given = OPS.wide_weight_gradient.default, product.args
            elif product.target is quantized and writes_float32(kernel_at(str(product.args[3]), 0)):
                op, given = quantized, (*product.args[:4], True, *product.args[5:])
            elif product.target is from_saved and _is_wide(product, route=3):
                op, given = from_saved, (*product.args[:4], True)
            else:
                continue
            wide = graph.call_function(op, given)
        wide.meta["val"] = of.new_empty(of.shape, dtype=torch.float32)
        replace(node, wide)
    graph.eliminate_dead_code()


def _is_result(node: fx.Node) -> bool:
    """Whether nothing but the caller reads a node, itself or through views.

    Slices are the weights of layers that multiply as one.
    """
    views = RESHAPES | {aten.permute.default, aten.slice.Tensor}
    return all(x.op == "output" or (x.target in views and _is_result(x)) for x in node.users)


def _product_of(node: fx.Node) -> fx.Node | None:
    """The matrix in 16 bits that a node copies to float32 as it is, if nothing else reads it."""
    of, source = value(node), node.args[0]
    dims = [0, 1]
    while isinstance(source, fx.Node) and len(source.users) == 1:
        found = value(source)
        if of is None or found is None or found.dim() != 2 or found.dtype not in HALF:
            return None
        if source.target is aten.permute.default:
            places: Any = source.args[1]
            dims = [places[dim] for dim in dims]
        elif source.target not in RESHAPES or _shape_of(source.args[0]) != found.shape:
            is_same = dims == [0, 1] and of.dtype is torch.float32 and of.stride() == found.stride()
            return source if is_same else None
        source = source.args[0]
    return None


def _shape_of(x: Any) -> torch.Size | None:
    found = value(x)
    return None if found is None else found.shape


def _is_aligned(product: fx.Node) -> bool:
    shapes = [_shape_of(x) for x in product.args]
    return all(x is not None and all(size % MULTIPLE == 0 for size in x) for x in shapes)


def _is_wide(product: fx.Node, route: int = 2) -> bool:
    """Whether the kernel of a weight's gradient writes float32, too; ``route`` is an argument."""
    shape = _shape_of(product.args[0])
    name = "" if shape is None else kernel_at(str(product.args[route]), shape[0])
    return shape is not None and (not name or writes_float32(name))


def _fits(device: torch.device) -> bool:
    """Whether torch multiplies bfloat16 and float16 to float32 on a device."""
    return device.type == "cuda" and not _IS_AMD
