"""Traced forwards: the graph of a module that calls layers, and the forward of a changed graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx, nn
from torch.fx.passes.tools_common import legalize_graph

from lokakern.errors import UnsupportedError

_GRAPHS: WeakKeyDictionary[Any, fx.Graph] = WeakKeyDictionary()  # of rewritten forwards


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def traced(parent: nn.Module) -> fx.Graph:
    """The graph of the forward of a module, whose children are not traced.

    Raises:
        UnsupportedError: The forward cannot be traced, differs between training and evaluation, or
            is not that of the class.
    """
    own = vars(parent).get("forward")
    if own is not None:
        function = getattr(own, "__func__", None)
        known = None if function is None else _GRAPHS.get(function)
        if known is None:
            raise UnsupportedError(
                "torch.fx cannot trace it: it has a forward of its own, beside that of its class"
            )
        return copy.deepcopy(known)
    was_training, attributes = parent.training, set(vars(parent))
    graphs = []
    try:
        for mode in (True, False):
            parent.training = mode  # not of its children, which are not traced
            graphs.append(_Tracer().trace(parent))
    except Exception as error:  # fx raises whatever a forward does with a proxy
        raise UnsupportedError(f"torch.fx cannot trace it: {error}") from error
    finally:
        parent.training = was_training
        for name in vars(parent).keys() - attributes:
            if name.startswith("_tensor_constant"):  # of fx, different in each graph
                delattr(parent, name)
    codes = [graph.python_code("self").src for graph in graphs]
    if codes[0] != codes[1]:
        raise UnsupportedError("its forward depends on whether it trains")
    return graphs[0]


def forward_of(parent: nn.Module, graph: fx.Graph) -> Callable[..., Any]:
    """The function of a changed graph, to be a forward of its module."""
    rewritten = legalize_graph(fx.GraphModule(parent, graph))
    rewritten.recompile()
    forward: Callable[..., Any] = type(rewritten).forward
    _GRAPHS[forward] = rewritten.graph
    return forward
