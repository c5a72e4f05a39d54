"""What follows a norm of blocks of columns, computed block by block.

A norm of blocks shows a row of n columns as ``[n / block, block]`` and gives the row back. What
follows elementwise, an activation and the cast to FP8 by a static scale, is then over rows, so that
Inductor computes it apart from the mean of each block, in a second kernel that reads all of the
input again: 415 us for a norm of Wukong M at 8192 samples on an H200, whose bytes take 250. The
same operators on blocks are one kernel with the mean. No bit of a result changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lokakern.nn.graph_edit import RESHAPES, add, replace, value

aten = torch.ops.aten


def keep_blocks(graph: fx.Graph) -> None:
    """Move views of normalized blocks as rows behind the elementwise operators that read them."""
    for view in list(graph.nodes):
        blocks = value(view.args[0]) if view.target in RESHAPES else None
        rows = value(view)
        if blocks is None or rows is None or blocks.dim() < 2 or 1 in blocks.shape[-2:]:
            continue
        is_merged = rows.shape == (*blocks.shape[:-2], blocks.shape[-2:].numel())
        if is_merged and _has_value_of_block(view.args[0], blocks.shape):
            _move_behind_readers(view)
    graph.eliminate_dead_code()


def _has_value_of_block(node: fx.Node, blocks: torch.Size) -> bool:
    """Whether elementwise operators that lead to a node read one value for each block."""
    of_block = (*blocks[:-1], 1)
    left, seen = [node], {node}
    while left:
        node = left.pop()
        of = value(node)
        if of is None or not _is_elementwise(node):
            continue
        if of.shape == of_block:
            return True
        if of.shape == blocks:
            found = [x for x in node.all_input_nodes if x not in seen]
            seen.update(found)
            left += found
    return False


def _is_elementwise(node: fx.Node) -> bool:
    target: Any = node.target
    if torch.Tag.pointwise not in getattr(target, "tags", ()):
        return False
    # A copy has a format of memory, for so many dimensions.
    return target is not aten.clone.default and not target._schema.is_mutable


def _move_behind_readers(view: fx.Node) -> None:
    graph, rows = view.graph, value(view)
    assert rows is not None
    moved: dict[fx.Node, Any] = {view: view.args[0]}
    left = [view]
    while left:
        for node in left.pop().users:
            of, read = value(node), node.all_input_nodes
            if node in moved or of is None or of.shape != rows.shape or not _is_elementwise(node):
                continue
            if all(x in moved for x in read):
                with graph.inserting_before(node):
                    given = fx.node.map_arg((node.args, node.kwargs), moved.__getitem__)
                    moved[node] = add(graph, node.target, *given[0], **given[1])
                left.append(node)
    for node, made in list(moved.items())[1:]:
        if any(user not in moved for user in node.users):
            with graph.inserting_before(node):
                replace(node, add(graph, aten.reshape.default, made, list(rows.shape)))
