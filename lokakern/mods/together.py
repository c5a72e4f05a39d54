"""`FuseShared` and `BatchEqual`: several small products as one.

The ``forward`` of the module that calls the layers is traced by torch.fx and written anew; its
children are not looked into. A forward that cannot be traced, or that depends on whether the module
trains, is left alone.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.tools_common import legalize_graph
from torch.nn import functional

from lokakern.errors import UnsupportedError
from lokakern.mods.editor import Editor, Mod
from lokakern.nn.adoption import resize
from lokakern.nn.linear import Linear, Routed
from lokakern.nn.module_scan import Joined
from lokakern.nn.token_mixing import mix_tokens

_PLAIN = (nn.Linear, Linear)


class FusedLinear(Joined, Routed):
    """Linear layers on one input as one product.

    Args:
        parts: The layers, as many inputs each, all with a bias or none.
    """

    makes_weight = True

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__(parts)
        self.is_mixing = all(getattr(part, "is_mixing", False) for part in parts)

    def weight(self) -> Tensor:
        """The weights one below the other."""
        return torch.cat(tuple(part.weight for part in self.parts))

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """What each layer makes of the input."""
        biases = tuple(part.bias for part in self.parts)
        bias = None if biases[0] is None else torch.cat(biases)
        held = self.held(input)
        weight = self.weight() if held is None else held
        sizes = [part.out_features for part in self.parts]
        if self.mixes(input, weight, bias):
            return tuple(y.mT for y in mix_tokens(input, weight, bias).split(sizes, -2))  # type: ignore[no-untyped-call]
        return self.product(input, weight, bias).split(sizes, -1)  # type: ignore[no-any-return, no-untyped-call]

    def product_shape(self) -> tuple[int, int, bool, Tensor]:
        """n, k, whether there is a bias, and a parameter: what `lokakern.convert` asks."""
        first = self.parts[0]
        n = sum(part.out_features for part in self.parts)
        return n, first.in_features, first.bias is not None, first.weight

    def freeze(self) -> None:
        """See `Routed`."""
        self.freeze_weight(self.weight())

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        if self.is_frozen or self.is_held:  # the parts, whose turn comes before
            self.freeze()

    def extra_repr(self) -> str:
        """Sizes, and the choice of each product."""
        n, k, _, _ = self.product_shape()
        return f"{len(self.parts)} layers, k={k}, n={n}, {self.route_words()}"


class BatchedLinear(Joined):
    """Equal linear layers on inputs of their own as one batched product.

    Args:
        parts: The layers, of one shape, all with a bias or none.
    """

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What each layer makes of its input."""
        if any(x.shape != inputs[0].shape or x.dtype != inputs[0].dtype for x in inputs):
            pairs = zip(inputs, self.parts, strict=True)
            return tuple(functional.linear(x, part.weight, part.bias) for x, part in pairs)
        first = self.parts[0]
        x = torch.stack([x.reshape(-1, first.in_features) for x in inputs])
        weights = torch.stack([part.weight for part in self.parts]).transpose(1, 2)
        bias: Tensor | None = first.bias
        if bias is None:
            y = torch.bmm(x, weights)
        else:
            biases = torch.stack([part.bias for part in self.parts]).unsqueeze(1)
            y = torch.baddbmm(biases, x, weights)
        shape = (*inputs[0].shape[:-1], first.out_features)
        return tuple(part.view(shape) for part in y.unbind(0))

    def extra_repr(self) -> str:
        """Sizes."""
        first = self.parts[0]
        return f"{len(self.parts)} layers, k={first.in_features}, n={first.out_features}"


@dataclass(frozen=True)
class FuseShared(Mod):
    """Multiply once where several linear layers read the same tensor (horizontal fusion).

    Exact: each output has the sums that it had. The input is read, and quantized, once.
    """

    is_exact = True

    def edit(self, editor: Editor) -> None:
        """See `Mod`."""
        _rewrite(self, editor, _shared, FusedLinear, "one product for all that read the tensor")


@dataclass(frozen=True)
class BatchEqual(Mod):
    """Multiply once where several linear layers of one shape read tensors of their own.

    Exact: each output has the sums that it had. A batched product is not quantized. Layers whose
    inputs differ in shape when called are multiplied one by one.
    """

    is_exact = True

    def edit(self, editor: Editor) -> None:
        """See `Mod`."""
        _rewrite(self, editor, _equal, BatchedLinear, "one batched product for all of the shape")


# Of forwards that were written here: what they are traced to.
_GRAPHS: WeakKeyDictionary[Any, fx.Graph] = WeakKeyDictionary()
Grouping = Callable[[list[fx.Node], dict[fx.Node, nn.Linear]], list[list[fx.Node]]]


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _rewrite(
    mod: Mod, editor: Editor, grouping: Grouping, make: Callable[[list[nn.Linear]], nn.Module],
    effect: str,
) -> None:  # fmt: skip
    for name, parent in editor.modules():
        if type(parent).__module__.startswith("torch."):
            continue
        inside = [m for m in parent.modules() if type(m) in _PLAIN]
        if len(inside) < 2:
            continue
        graph = graph_of(mod, editor, name, parent)
        if graph is None:
            continue
        layers = _layers(graph, parent, editor, name)
        groups = grouping(list(layers), layers)
        if not groups:
            continue
        for number, nodes in enumerate(groups):
            parts = [layers[node] for node in nodes]
            child = f"{type(make(parts)).__name__.lower()}_{number}"
            while hasattr(parent, child):
                child += "_"
            fused = make(parts)
            site = f"{name}.{child}" if name else child
            _add(editor, parent, child, fused, f"{mod} of {site}")
            _replace(graph, nodes, child, is_shared=isinstance(fused, FusedLinear))
            names = ", ".join(str(node.target) for node in nodes)
            editor.done(mod, site, names, f"{type(fused).__name__} of {len(nodes)}", effect)
        rewritten = legalize_graph(fx.GraphModule(parent, graph))
        rewritten.recompile()
        forward = type(rewritten).forward
        _GRAPHS[forward] = rewritten.graph
        editor.set(parent, "forward", MethodType(forward, parent))


def _add(editor: Editor, parent: nn.Module, child: str, fused: nn.Module, what: str) -> None:
    def remove() -> None:
        delattr(parent, child)
        if isinstance(fused, Routed):
            resize(fused, (), what)

    editor.do(lambda: parent.add_module(child, fused), remove)


def graph_of(mod: Mod, editor: Editor, name: str, parent: nn.Module) -> fx.Graph | None:
    """The graph of a forward; None, and the reason in the report, where there is none."""
    try:
        graph = _traced(parent)
        why = "its forward depends on whether it trains" if graph is None else ""
    except Exception as error:  # fx raises whatever a forward does with a proxy
        graph, why = None, f"torch.fx cannot trace it: {error}"
    if why:
        editor.left(mod, name, type(parent).__name__, why)
    return graph


def _traced(parent: nn.Module) -> fx.Graph | None:
    """The graph of a forward; None where it is another in training than in evaluation.

    Raises:
        UnsupportedError: The object has a forward of its own that is not of here.
    """
    own = vars(parent).get("forward")
    if own is not None:
        known = _GRAPHS.get(getattr(own, "__func__", None))
        if known is None:
            raise UnsupportedError("it has a forward of its own, beside that of its class")
        return copy.deepcopy(known)
    was_training = parent.training
    graphs = []
    try:
        for mode in (True, False):
            parent.training = mode  # of itself only: children are not looked into
            graphs.append(_Tracer().trace(parent))
    finally:
        parent.training = was_training
    codes = [graph.python_code("self").src for graph in graphs]
    return graphs[0] if codes[0] == codes[1] else None


def _layers(
    graph: fx.Graph, parent: nn.Module, editor: Editor, name: str
) -> dict[fx.Node, nn.Linear]:
    """Calls of plain linear layers that are called once, with one tensor."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    targets = [parent.get_submodule(str(node.target)) for node in calls]
    found: dict[fx.Node, nn.Linear] = {}
    for node, module in zip(calls, targets, strict=True):
        site = f"{name}.{node.target}" if name else str(node.target)
        once = sum(other is module for other in targets) == 1
        simple = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
        hooks = module._forward_hooks or module._forward_pre_hooks
        if (
            type(module) in _PLAIN
            and once
            and simple
            and not hooks
            and editor.accepts(module, site)
        ):
            assert isinstance(module, nn.Linear)  # as its type is
            if getattr(module, "padding", (0, 0)) == (0, 0):
                found[node] = module
    return found


def _shared(nodes: list[fx.Node], layers: dict[fx.Node, nn.Linear]) -> list[list[fx.Node]]:
    groups: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        layer = layers[node]
        is_mixing = getattr(layer, "is_mixing", False)
        key = (node.args[0], layer.bias is None, layer.weight.dtype, is_mixing)
        groups.setdefault(key, []).append(node)
    return [group for group in groups.values() if len(group) > 1]


def _equal(nodes: list[fx.Node], layers: dict[fx.Node, nn.Linear]) -> list[list[fx.Node]]:
    """Greedily, in order: a call joins the first group of its shape none of which it depends on."""
    before = {node: _ancestors(node) for node in nodes}
    groups: dict[Any, list[list[fx.Node]]] = {}
    for node in nodes:
        layer = layers[node]
        if getattr(layer, "is_mixing", False):
            continue
        key = (layer.weight.shape, layer.bias is None, layer.weight.dtype)
        for group in groups.setdefault(key, []):
            if not before[node] & set(group):
                group.append(node)
                break
        else:
            groups[key].append([node])
    found: list[list[fx.Node]] = []
    for group in (g for same in groups.values() for g in same if len(g) > 1):
        # Two groups must not wait for each other: a call of this one for that, and the other way.
        if not any(_wait(group, other, before) and _wait(other, group, before) for other in found):
            found.append(group)
    return found


def _wait(group: list[fx.Node], other: list[fx.Node], before: dict[fx.Node, set[fx.Node]]) -> bool:
    return any(before[node] & set(other) for node in group)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return found


def _replace(graph: fx.Graph, nodes: list[fx.Node], child: str, *, is_shared: bool) -> None:
    inputs = nodes[0].args if is_shared else tuple(node.args[0] for node in nodes)
    with graph.inserting_before(nodes[0]):
        call = graph.call_module(child, inputs)
    for place, node in enumerate(nodes):
        with graph.inserting_after(call):
            item = graph.call_function(operator.getitem, (call, place))
        node.replace_all_uses_with(item)
        graph.erase_node(node)
