"""Taps of a sampled step at the end of a compiled graph, where CUDA graphs hold the rest.

Probe and a watch take samples of a product's operands by ops that run in Python, which no CUDA
graph holds. Between products they cut the graph into parts, 19 for the nine layers of DLRM-DCNv2,
each replayed by itself. One op at the end reads the same tensors, and nothing is cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from lokakern.nn.graph_edit import add, bytes_of, replace, value

try:
    from torch._inductor import config
except ImportError:
    config = None  # type: ignore[assignment]

OPS = torch.ops.lokakern
aten = torch.ops.aten
# Of outputs of sites, and of their gradients, that a graph keeps to its end. Inputs are kept for
# gradients of weights anyway.
MOST_BYTES = 2**31


def tap_at_the_end(graph: fx.Graph) -> None:
    """Let one op take all samples of a graph behind everything else.

    Results and samples stay the same. A copy that the graph returns stays a tap's own, and so does
    a tap of a forward pass without gradients, as nothing else of it is read.
    """
    if config is not None and config.triton.cudagraphs and hasattr(OPS, "probe_tap"):
        _tap_operands(graph, _tap_gradients(graph))


def _tap_operands(graph: fx.Graph, kept: int) -> None:
    """Move taps of the forward pass, which a checkpoint repeats in the backward pass."""

    def fits(tap: fx.Node) -> bool:
        results = _results(tap)
        is_read = [user.args[1] for user in results] == [0, 1] and len(tap.users) == 2
        return is_read and _is_inner(results[0]) and _is_read_last(results[1])

    taps = graph.find_nodes(op="call_function", target=OPS.probe_tap.default)
    moved, _ = _moved(taps, 3, fits, kept)
    if not moved:
        return
    results = [_results(tap) for tap in moved]
    for tap, (copy, _) in zip(moved, results, strict=True):
        copy.replace_all_uses_with(tap.args[0])
        graph.erase_node(copy)
    with graph.inserting_before(_end_of(graph)):
        together = add(graph, OPS.probe_taps.default, *_columns(moved))
        numbers = [add(graph, operator.getitem, together, place) for place in range(len(moved))]
    for tap, (_, call), number in zip(moved, results, numbers, strict=True):
        replace(call, number)
        graph.erase_node(tap)


def _tap_gradients(graph: fx.Graph) -> int:
    """Move taps of the backward pass, of which one result of the graph becomes a result.

    Returns the bytes that are kept.
    """
    output = graph.output_node()
    result = _smallest(output.all_input_nodes)
    taps = graph.find_nodes(op="call_function", target=OPS.probe_tap_gradient.default)
    moved, kept = _moved(taps, 2, _is_inner, 0)
    if result is None or not moved:
        return 0
    for tap in moved:
        tap.replace_all_uses_with(tap.args[0])
    with graph.inserting_before(output):
        last = add(graph, OPS.probe_tap_gradients.default, result, *_columns(moved))
    output.replace_input_with(result, last)
    for tap in moved:
        graph.erase_node(tap)
    return kept


def _moved(
    taps: Iterable[fx.Node], site_at: int, fits: Callable[[fx.Node], bool], kept: int
) -> tuple[list[Any], int]:
    """Taps that move, in order, and bytes that are kept then; a site is an argument of a tap.

    From the last, and none past one of its site that stays: only their order tells calls of a site
    apart that a checkpoint repeats.
    """
    moved: list[Any] = []
    staying = set()
    for tap in reversed(list(taps)):
        total, site = kept + _bytes_of(tap.args[0]), tap.args[site_at]
        if total < MOST_BYTES and site not in staying and fits(tap):
            moved.insert(0, tap)
            kept = total
        else:
            staying.add(site)
    return moved, kept


def _results(tap: fx.Node) -> list[fx.Node]:
    """The copy and the number of the call, as far as they are read."""
    read = [user for user in tap.users if user.target is operator.getitem]
    return sorted(read, key=lambda user: user.args[1])  # type: ignore[arg-type, return-value]


def _columns(taps: list[fx.Node]) -> Iterator[list[Any]]:
    """The arguments of several taps, by place."""
    return (list(x) for x in zip(*(tap.args for tap in taps), strict=True))


def _end_of(graph: fx.Graph) -> fx.Node:
    """The first node that writes to inputs of the graph, or the samples of gradients, or output."""
    for target in (aten.copy_.default, OPS.probe_tap_gradients.default):
        found: list[fx.Node] = [*graph.find_nodes(op="call_function", target=target)]
        if found:
            return found[0]
    return graph.output_node()


def _is_read_last(call: fx.Node) -> bool:
    """Whether no tap of a gradient that stays in its place reads the number of a call."""
    lasts = OPS.probe_tap_gradients.default
    return all(user.op == "output" or user.target is lasts for user in call.users)


def _is_inner(copy: fx.Node) -> bool:
    """Whether the caller does not get the copy, which has memory of its own.

    What the forward pass keeps for the backward pass, the caller does not get.
    """
    output = copy.graph.output_node()
    results: Any = output.args[0]
    # Inductor names them; without names it may be any result.
    places = output.meta.get("user_visible_output_idxs", range(len(results)))
    return all(results[place] is not copy for place in places)


def _bytes_of(x: Any) -> int:
    found = value(x)
    return MOST_BYTES if found is None else bytes_of(found)


def _smallest(results: list[fx.Node]) -> fx.Node | None:
    """A result that is copied at the cost of a launch: the one with the fewest bytes."""
    found = [(bytes_of(x), node) for node in results if (x := _computed(node)) is not None]
    return min(found, key=lambda one: one[0])[1] if found else None


def _computed(node: fx.Node) -> torch.Tensor | None:
    return None if node.op == "placeholder" else value(node)
