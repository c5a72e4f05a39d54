"""Concatenated float32 weights of products, rounded as they are concatenated, in compiled training.

Layers on one input multiply as one (`lokakern.mods.FuseShared`), with their weights concatenated in
every step. Under autocast both products of such a layer round or quantize the concatenation, which
would be written in float32 and read once by each. Here it is written in the dtype of autocast, as
products without FP8 read it anyway: for 1536 x 123200, of DHEN, that moves 1.1 GB less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lokakern.nn.graph_edit import add, replace, value
from lokakern.nn.routed_matmul import OPS, dtype_of

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_B, _ROUTE = 1, 5  # arguments of a product


def round_concatenated(graph: fx.Graph) -> None:
    """Concatenate float32 weights in 16 bits, in the graph of forward and backward."""
    for node in list(graph.find_nodes(op="call_function", target=aten.cat.default)):
        of, parts = value(node), node.args[0]
        if of is None or of.dtype is not torch.float32 or not isinstance(parts, list | tuple):
            continue
        dtypes = _dtypes_read(node)
        if len(dtypes) != 1 or not all(map(_is_wide, parts)):
            continue
        (dtype,) = dtypes
        with graph.inserting_before(node):
            rounded = [add(graph, _CAST, part, dtype) for part in parts]
            made = add(graph, aten.cat.default, rounded, *node.args[1:])
        for cast in [x for x in node.users if x.target is _CAST]:
            replace(cast, made)
        turned = [x for x in node.users if x.target is aten.permute.default]
        node.replace_all_uses_with(made)
        for view in turned:
            view.meta["val"] = view.meta["val"].to(dtype)
        graph.erase_node(node)


def _is_wide(part: Any) -> bool:
    found = value(part)
    return found is not None and found.dtype is torch.float32


def _dtypes_read(node: fx.Node) -> set[torch.dtype]:
    """The dtypes that all readers of a weight round it to; empty if one does not, or only rounds.

    A product quantizes what it would round.
    """
    found: set[torch.dtype] = set()
    multiplied = False
    for reader in node.users:
        if reader.target is _CAST:
            found.add(reader.args[1])  # type: ignore[arg-type]
            continue
        products = list(reader.users) if reader.target is aten.permute.default else [reader]
        operand = reader if reader.target is aten.permute.default else node
        for product in products:
            if product.target is not OPS.routed_gemm.default or product.args[_B] is not operand:
                return set()
            if sum(x is operand for x in product.args) > 1:
                return set()
            found.add(dtype_of(str(product.args[_ROUTE])))
            multiplied = True
    return found if multiplied and found <= {torch.bfloat16, torch.float16} else set()
