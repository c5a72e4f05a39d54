"""Layers whose norm and activation a forward calls: where they may run as one (`lokakern.nn.tail`).

They show in the forward of the module that calls them, which is traced. One that cannot be traced
is left alone, without a reason: most modules have nothing to gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from lokakern.errors import UnsupportedError
from lokakern.nn.autocast import CAST
from lokakern.nn.crossed_forward import children_of, crossed_of, graphs_of
from lokakern.nn.linear import LINEARS_OF_ANY
from lokakern.nn.static_handoff import is_inner, leaves
from lokakern.nn.tail import FoundTail, tails_in
from lokakern.nn.traced_forward import looks_up


def found_tails(module: nn.Module, inlined: Sequence[str] = ()) -> list[FoundTail]:
    """The layers with tails in the forward of a module, in training or in evaluation.

    Args:
        module: The module.
        inlined: Names of modules in it whose forwards are parts of its own.
    """
    parts = [module, *map(module.get_submodule, inlined)]
    found_in = [x for part in parts for x in children_of(part) if x is not None]
    children = {id(child) for child in found_in}
    layers = [x for x in leaves(found_in) if isinstance(x, nn.Linear) and type(x) in LINEARS_OF_ANY]
    if not any(layer.weight.dtype in CAST for layer in layers):
        return []
    # A user who keeps a forward from compilers does not want another one to be compiled. A mod
    # whose forward was replaced could not be undone before this conversion. And a trace does not
    # show what a class makes up for names.
    kind, crossed = type(module), crossed_of(module)
    before = vars(module).get("forward") if crossed is None else crossed.before
    is_disabled = getattr(kind.forward, "_torchdynamo_disable", False)
    if before is not None or is_disabled or looks_up(kind):
        return []
    try:
        graphs, _ = graphs_of(module, inlined)
    except (UnsupportedError, TypeError, ValueError):  # also of a forward without a signature
        return []
    found = [tail for graph in graphs for tail in tails_in(graph, module)]
    # A forward is guarded against other children, and not against others of these.
    return [
        tail for tail in found
        if all(id(module.get_submodule(name)) in children for name in tail.modules)
    ]  # fmt: skip


def called_apart(modules: Iterable[nn.Module]) -> set[int]:
    """Ids of sequences that a forward does not call, but sequences that are their children.

    Of a forward that cannot be traced this is not known.
    """
    found: set[int] = set()
    for module in modules:
        if isinstance(module, nn.Sequential):
            continue
        nested = {name: x for name, x in _contained(module, "") if any(map(is_inner, x))}
        if not nested:
            continue
        try:
            graphs, _ = graphs_of(module)
        except (UnsupportedError, TypeError, ValueError):
            continue
        called = {str(x.target) for graph in graphs for x in graph.nodes if x.op == "call_module"}
        owners = {owner for target in called for owner in _owners_of(target)}
        found |= {
            id(x) for name, x in nested.items()
            if name in owners and called.isdisjoint((name, *_owners_of(name)))
        }  # fmt: skip
    return found


def _contained(module: nn.Module, before: str) -> Iterator[tuple[str, nn.Sequential]]:
    """Names of the sequences that a forward may call, or parts of: also in lists and sequences."""
    for name, child in module.named_children():
        if is_inner(child):
            yield before + name, child
        if is_inner(child) or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _contained(child, f"{before}{name}.")


def _owners_of(name: str) -> Iterator[str]:
    """Names of what a child is in."""
    while name := name.rpartition(".")[0]:
        yield name
