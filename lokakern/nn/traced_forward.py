"""Traced forwards: the graph of a module that calls layers, and the forward of a changed graph."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.fx.passes.tools_common import legalize_graph

from lokakern.errors import UnsupportedError

_GRAPHS: WeakKeyDictionary[Any, fx.Graph] = WeakKeyDictionary()  # of rewritten forwards


_CONSTANT = "_tensor_constant"  # attributes that fx makes of tensors in a forward
_OF_TORCH = os.path.dirname(torch.__file__) + os.sep


class _Proxy(fx.Proxy):
    """A proxy that forwards cannot ask for its type, because it is not that of a tensor."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        code = sys._getframe(1).f_code
        is_of_torch = code.co_filename.startswith(_OF_TORCH) and code.co_name != "is_tensor"
        if not is_of_torch and code.co_filename != __file__:
            raise UnsupportedError("its forward depends on the type of a tensor")
        return _Proxy


class _Tracer(fx.Tracer):
    # Else reads of buffers are constants, and writes to them happen when the forward is traced.
    proxy_buffer_attributes = True

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        super().__init__()
        self._modes, self._defaults = _modes(), defaults

    def create_args_for_root(self, *arguments: Any, **options: Any) -> tuple[Any, list[Any]]:
        function, given = super().create_args_for_root(*arguments, **options)
        for place, x in enumerate(given):
            name = str(x.node.target) if isinstance(x, fx.Proxy) else ""
            if name in self._defaults:
                self.graph.erase_node(x.node)
                given[place] = self._defaults[name]
        return function, given

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_proxy(self, *arguments: Any, **options: Any) -> fx.Proxy:
        if _modes() != self._modes:
            raise UnsupportedError("its forward changes the mode of gradients or autocast")
        return super().create_proxy(*arguments, **options)


def _modes() -> tuple[object, ...]:
    """What blocks such as ``torch.no_grad()`` change, which a graph does not show."""
    devices = ("cpu", "cuda")
    is_cast = [(torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in devices]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *is_cast


def traced(parent: nn.Module) -> fx.Graph:
    """The graph of the forward of a module, whose children are not traced.

    Raises:
        UnsupportedError: As of `traced_modes`, or the forward differs between training and
            evaluation.
    """
    training, evaluation = traced_modes(parent)
    if training.python_code("self").src != evaluation.python_code("self").src:
        raise UnsupportedError("its forward depends on whether it trains")
    return training


def traced_modes(
    parent: nn.Module, defaults: Mapping[str, Any] | None = None
) -> tuple[fx.Graph, fx.Graph]:
    """The graphs of the forward of a module in training and in evaluation.

    Args:
        parent: The module; its children are not traced.
        defaults: Arguments that have these values, and are none of the graphs.

    Raises:
        UnsupportedError: The forward cannot be traced, is not that of the class, or does what a
            graph does not show: it sets attributes of the module, asks for the type of a tensor,
            changes the mode of gradients or autocast, draws random numbers, or makes tensors.
    """
    own = vars(parent).get("forward")
    if own is not None:
        function = getattr(own, "__func__", None)
        known = None if function is None else _GRAPHS.get(function)
        if known is None or defaults:
            raise UnsupportedError(
                "torch.fx cannot trace it: it has a forward of its own, beside that of its class"
            )
        return copy.deepcopy(known), copy.deepcopy(known)
    attributes = dict(vars(parent))
    # A forward may ask its children, too.
    were_training = {m: m.training for m in parent.modules() if "training" in vars(m)}
    state, draws = random.getstate(), torch.get_rng_state()
    graphs = []
    try:
        for mode in (True, False):
            for module in were_training:
                module.training = mode
            graphs.append(_Tracer(defaults or {}).trace(parent))
    except UnsupportedError:
        raise
    except Exception as error:  # fx raises whatever a forward does with a proxy
        raise UnsupportedError(f"torch.fx cannot trace it: {error}") from error
    finally:
        for module, was_training in were_training.items():
            module.training = was_training
        written = _restore(parent, attributes)
    if written:
        raise UnsupportedError(f"its forward sets the attribute {min(written)}")
    if random.getstate() != state or not torch.equal(torch.get_rng_state(), draws):
        random.setstate(state)
        torch.set_rng_state(draws)
        raise UnsupportedError("its forward draws random numbers, which a graph would keep")
    if any(str(node.target).startswith(_CONSTANT) for graph in graphs for node in graph.nodes):
        raise UnsupportedError("its forward makes a tensor of no input, which a graph would keep")
    return graphs[0], graphs[1]


def is_traceable(parent: nn.Module) -> bool:
    """Whether the forward of a module is that of its class, or of a mod."""
    own = vars(parent).get("forward")
    return own is None or getattr(own, "__func__", None) in _GRAPHS


def _restore(parent: nn.Module, attributes: dict[str, Any]) -> list[str]:
    """Undo what tracing set in a module; the names of what its forward set."""
    own = vars(parent)
    changed = [name for name, x in attributes.items() if name not in own or own[name] is not x]
    added = own.keys() - attributes.keys()
    for name in added:
        del own[name]
    own.update((name, attributes[name]) for name in changed)
    # Constants of fx are different in each graph.
    return [*changed, *(name for name in added if not name.startswith(_CONSTANT))]


def forward_of(parent: nn.Module, graph: fx.Graph) -> Callable[..., Any]:
    """The function of a changed graph, to be a forward of its module."""
    rewritten = legalize_graph(fx.GraphModule(parent, graph))
    rewritten.recompile()
    forward: Callable[..., Any] = type(rewritten).forward
    _GRAPHS[forward] = rewritten.graph
    return forward
