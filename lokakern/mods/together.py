"""Mods of traced forwards: `FuseShared`, `BatchEqual` and `MixTokens`.

The ``forward`` of the module that calls the layers is traced by torch.fx; its children are not.
A forward that cannot be traced, or that depends on ``training``, is left alone.
"""

from __future__ import annotations

import functools
import itertools
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.mods.editor import Editor, Mod, site_of
from lokakern.nn.adoption import resize
from lokakern.nn.linear import LINEARS_OF_ANY, Routed
from lokakern.nn.module_scan import WATCHED, Joined, inner_layers
from lokakern.nn.token_mixing import mix_tokens
from lokakern.nn.traced_forward import forward_of, traced, writes
from lokakern.render.did_you_mean import did_you_mean

_Round = tuple[tuple[Tensor, ...], tuple[object, ...], dict[int, Tensor]]
_NOTHING: _Round = ((), (), {})


class FusedLinear(Joined, Routed):
    """Linear layers on one input as one product; all have a bias, or none has."""

    makes_weight = True

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__(parts)
        self.is_mixing = all(getattr(part, "is_mixing", False) for part in parts)
        self._round = _NOTHING
        self.changed()

    def __getstate__(self) -> dict[str, Any]:
        """Without the outputs of a call, which are of autograd."""
        return {**super().__getstate__(), "_round": _NOTHING}

    def weight(self) -> Tensor:
        """The weights, concatenated along n."""
        return torch.cat(tuple(part.weight for part in self.parts))

    def shared(self, place: int, input: Tensor) -> Tensor:
        """The output of one layer, whose turn with this input may have come before.

        The first layer that is called with an input multiplies for all. Outputs are kept until each
        was taken once, or another input or parameter, a write to one, other memory under one, or
        another mode of gradients or of autocast comes.
        """
        inputs = (input, *(p for part in self.parts for p in part.parameters()))
        if (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or any(x.is_inference() for x in inputs)
        ):
            part = self.parts[place]  # nothing tells of writes
            return functional.linear(input, part.weight, part.bias)
        device = input.device.type
        state = (
            *((x._version, x.data_ptr(), x.requires_grad) for x in inputs),
            torch.is_grad_enabled(), torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
        )  # fmt: skip
        kept, its_state, outputs = self._round
        is_same = len(kept) == len(inputs) and all(map(operator.is_, kept, inputs))
        if not is_same or its_state != state or place not in outputs:
            outputs = dict(enumerate(self(input)))
        output = outputs.pop(place)
        self._round = (inputs, state, outputs) if outputs else _NOTHING
        return output

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """The output of each layer."""
        biases = tuple(part.bias for part in self.parts)
        bias = None if biases[0] is None else torch.cat(biases)
        held = self.held(input)
        weight = self.weight() if held is None else held
        sizes = [part.out_features for part in self.parts]
        if self.mixes(input, weight, bias):
            return tuple(y.mT for y in mix_tokens(input, weight, bias).split(sizes, -2))  # type: ignore[no-untyped-call]
        return self.product(input, weight, bias).split(sizes, -1)  # type: ignore[no-any-return, no-untyped-call]

    def product_shape(self) -> tuple[int, int, bool, Tensor]:
        """n, k, whether there is a bias, and a parameter, for `lokakern.convert`."""
        first = self.parts[0]
        n = sum(part.out_features for part in self.parts)
        return n, first.in_features, first.bias is not None, first.weight

    def freeze(self) -> None:
        self.freeze_weight(self.weight())

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        if self.is_frozen or self.is_held:  # the parts, whose turn comes before
            self.freeze()

    def extra_repr(self) -> str:
        n, k, _, _ = self.product_shape()
        return f"{len(self.parts)} layers, k={k}, n={n}, {self.route_words()}"


@dataclass(frozen=True)
class _Turn:
    """The forward of a layer of a declared group."""

    fused: FusedLinear
    place: int

    def __call__(self, input: Tensor) -> Tensor:
        return self.fused.shared(self.place, input)


class BatchedLinear(Joined):
    """Linear layers of one shape as one batched product; all have a bias, or none has."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The output of each layer."""
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
        first = self.parts[0]
        return f"{len(self.parts)} layers, k={first.in_features}, n={first.out_features}"


_KINDS = (*LINEARS_OF_ANY, FusedLinear)
# Ops with a new memory layout, and modules whose outputs have the layout of their inputs.
_ANEW = frozenset(
    ("reshape", "flatten", "contiguous", "clone", "matmul", "bmm", "einsum", "cat", "stack")
)
_ELEMENTWISE = frozenset(f"torch.nn.modules.{word}" for word in ("activation", "dropout"))


class _Joining(Mod):
    """Replaces several linear layers by one module that multiplies once."""

    is_exact = True
    kind: ClassVar[type[FusedLinear | BatchedLinear]]
    effect: ClassVar[str]

    @abstractmethod
    def calls(
        self, layers: dict[fx.Node, nn.Linear], written: dict[fx.Node, int]
    ) -> list[list[fx.Node]]:
        """Calls of layers to replace by one.

        Args:
            layers: The layers, by their calls.
            written: How many nodes before each node may write to a tensor.
        """

    def edit(self, editor: Editor) -> None:
        for name, parent, graph in _graphs(
            self, editor, lambda m: sum(type(x) in LINEARS_OF_ANY for x in m.modules()) > 1
        ):
            layers = _layers(graph, parent, editor, name)
            written = itertools.accumulate(writes(node, parent) for node in graph.nodes)
            groups = self.calls(layers, dict(zip(graph.nodes, written, strict=True)))
            for nodes in groups:
                names = ", ".join(str(node.target) for node in nodes)
                parts = [layers[node] for node in nodes]
                child = self._install(editor, parent, name, parts, names)
                _replace(graph, nodes, child, is_shared=self.kind is FusedLinear)
            if groups:
                editor.set(parent, "forward", MethodType(forward_of(parent, graph), parent))

    def _install(
        self, editor: Editor, parent: nn.Module, name: str, parts: list[nn.Linear], names: str
    ) -> str:
        """Make layers one module, a child of another one; returns the name of the child."""
        fused = self.kind(parts)
        stem = self.kind.__name__.lower()
        child = next(x for i in itertools.count() if not hasattr(parent, x := f"{stem}_{i}"))
        site = site_of(name, child)
        editor.set(parent, child, fused)
        if isinstance(fused, Routed):
            editor.do(lambda: None, functools.partial(resize, fused, (), f"{self} of {site}"))
        editor.done(self, site, names, f"{self.kind.__name__} of {len(parts)}", self.effect)
        return child


@dataclass(frozen=True)
class FuseShared(_Joining):
    """Fuse linear layers that read the same tensor into one product (horizontal fusion).

    Exact: each output has the same sums. The input is read, and quantized, once. It may be an item
    of an input that is a list or a dictionary, read by index, key or unpacking.

    Where tracing does not find such layers, because the forward branches, or they are called in
    several modules, ``groups`` declares them. The first that is called with a tensor then
    multiplies for all of its group: each layer should be called once with it, and the backward pass
    of all run at once. Nothing tells of writes in place through ``.data`` between two layers of a
    group: write under ``torch.no_grad()``. Compiled models and torch.func multiply the layers of
    declared groups apart, unquantized; so do not declare layers that tracing finds.

    Args:
        groups: Names of layers in the model, at least two in a group.
    """

    groups: Sequence[Sequence[str]] = ()
    kind, effect = FusedLinear, "one product for all that read the tensor"

    def edit(self, editor: Editor) -> None:
        for names in self.groups:
            self._declare(editor, names)
        super().edit(editor)

    def _declare(self, editor: Editor, names: Sequence[str]) -> None:
        """Fuse a declared group.

        Raises:
            UnknownNameError: The model has no such layer, or a name is given twice.
            UnsupportedError: Layers that are not plain, not alike, or parts of another group.
        """
        known: dict[str, Any] = dict(editor.model.named_modules())
        inner = inner_layers(editor.model)
        if isinstance(names, str) or len(set(names)) < 2 or len(set(names)) < len(names):
            raise UnknownNameError(f"{self}: group {names!r} needs at least two names, each once")
        for name in names:
            if name not in known:
                raise UnknownNameError(
                    f"{self}: the model has no layer {name!r}; {did_you_mean(name, known)}names "
                    "are those of named_modules"
                )
            layer = known[name]
            if type(layer) not in LINEARS_OF_ANY or id(layer) in inner or "forward" in vars(layer):
                raise UnsupportedError(
                    f"{self}: {name} is no linear layer that is called itself, but {layer!r:.80}"
                )
        layers = [known[name] for name in names]
        kinds = {(x.in_features, x.bias is None, x.weight.dtype, x.weight.device) for x in layers}
        is_changed = any(getattr(x, "padding", (0, 0)) != (0, 0) for x in layers)
        if len(kinds) > 1 or is_changed or any(getattr(x, "is_mixing", False) for x in layers):
            raise UnsupportedError(
                f"{self}: {', '.join(names)} differ in k, bias, dtype or device, or were changed"
            )
        if not all(editor.accepts(layer, name) for layer, name in zip(layers, names, strict=True)):
            return
        owner = _owner_of(names, known)
        if owner is None:
            raise UnsupportedError(
                f"{self}: {', '.join(names)} are in no module that may take a child for them, as "
                "torch's containers call all of their children; put the model into a module"
            )
        parent = known[owner]
        child = self._install(editor, parent, owner, layers, ", ".join(names))
        fused = getattr(parent, child)
        for place, layer in enumerate(layers):
            editor.set(layer, "forward", _Turn(fused, place))

    def calls(
        self, layers: dict[fx.Node, nn.Linear], written: dict[fx.Node, int]
    ) -> list[list[fx.Node]]:
        """Calls with the same input, between which nothing is written."""
        groups: dict[Any, list[fx.Node]] = {}
        for node, layer in layers.items():
            is_mixing = getattr(layer, "is_mixing", False)
            kind = (layer.bias is None, layer.weight.dtype, is_mixing)
            key = (_read(node.args[0]), written[node], *kind)
            groups.setdefault(key, []).append(node)
        return [group for group in groups.values() if len(group) > 1]


@dataclass(frozen=True)
class BatchEqual(_Joining):
    """Batch linear layers of one shape on different tensors into one product.

    Exact: each output has the same sums. A batched product is not quantized. Layers whose inputs
    differ in shape at a call are multiplied one by one.
    """

    kind, effect = BatchedLinear, "one batched product for all of the shape"

    def calls(
        self, layers: dict[fx.Node, nn.Linear], written: dict[fx.Node, int]
    ) -> list[list[fx.Node]]:
        """Greedily, in order: a call joins the first group of its shape it does not depend on."""
        before: dict[fx.Node, set[fx.Node]] = {}  # layers that a node depends on
        for node in next(iter(layers)).graph.nodes if layers else ():
            inputs = node.all_input_nodes
            before[node] = layers.keys() & set(inputs).union(*(before[x] for x in inputs))

        def depend(group: list[fx.Node], other: list[fx.Node]) -> bool:
            return any(not before[node].isdisjoint(other) for node in group)

        groups: dict[Any, list[list[fx.Node]]] = {}
        for node, layer in layers.items():
            if getattr(layer, "is_mixing", False):
                continue
            key = (layer.weight.shape, layer.bias is None, layer.weight.dtype, written[node])
            same = groups.setdefault(key, [])
            free = next((group for group in same if not depend([node], group)), [])
            if not free:
                same.append(free)
            free.append(node)
        found: list[list[fx.Node]] = []
        for group in (g for same in groups.values() for g in same if len(g) > 1):
            # Two groups must not depend on each other.
            if not any(depend(group, other) and depend(other, group) for other in found):
                found.append(group)
        return found


@dataclass(frozen=True)
class MixTokens(Mod):
    """Multiply across tokens without copies: ``linear(x.transpose(1, 2))`` as ``weight @ x``.

    Exact, but for the order of sums. Saves transposing copies of x, the output and their gradients,
    and slow kernels where the number of tokens is no multiple of 8. Differentiable once, backward.

    Applies to layers called with the transpose of a tensor ``[batch, tokens, d]``; their output has
    the layout of the input of each call. `lokakern.convert` leaves them unquantized, because no FP8
    kernel reads operands across rows. Exclude with a filter layers whose ``transpose(1, 2)`` is of
    a tensor of four dimensions, which tracing does not show.
    """

    is_exact = True

    def edit(self, editor: Editor) -> None:
        for name, parent, graph in _graphs(self, editor, _calls_linear):
            for node in graph.nodes:
                if node.op == "call_module" and node.args and _is_transposed(node.args[0]):
                    self._mark(editor, site_of(name, node.target), parent, node)

    def _mark(self, editor: Editor, site: str, parent: nn.Module, call: fx.Node) -> None:
        layer: Any = parent.get_submodule(str(call.target))
        if type(layer) not in _KINDS or not editor.accepts(layer, site):
            return
        if getattr(layer, "is_mixing", False) or getattr(layer, "padding", (0, 0)) != (0, 0):
            return
        before = type(layer).__name__
        if any(getattr(layer, "_routes", ())):
            editor.left(self, site, before, "it is converted to FP8: apply Mods before convert")
        elif _is_viewed(parent, call):
            why = "its output is taken by view, which needs rows in memory: use reshape"
            editor.left(self, site, before, why)
        else:
            editor.set_of_linear(layer, "is_mixing", True)
            effect = "nothing is transposed to be multiplied"
            editor.done(self, site, f"{before} of x.mT", "W @ x", effect)


def _owner_of(names: Sequence[str], known: Mapping[str, nn.Module]) -> str | None:
    """The innermost module around some layers that is none of torch's; None without one."""
    paths = [name.split(".")[:-1] for name in names]
    levels = map(set, zip(*paths, strict=False))
    common = [*itertools.chain(*itertools.takewhile(lambda words: len(words) == 1, levels))]
    for length in range(len(common), -1, -1):
        owner = ".".join(common[:length])
        if not type(known[owner]).__module__.startswith("torch."):
            return owner
    return None


def _read(node: Any) -> Any:
    """A node, or the path by which it reads an item: each read is a node of its own."""
    if isinstance(node, fx.Node) and node.target is operator.getitem:
        container, item = node.args
        if isinstance(item, str | int):
            return _read(container), item
    return node


def _calls_linear(parent: nn.Module) -> bool:
    """Whether a linear layer is a child, or in a list, which is never called itself."""
    lists = (nn.ModuleList, nn.ModuleDict)
    children = parent.children()
    return any(_calls_linear(c) if isinstance(c, lists) else type(c) in _KINDS for c in children)


def _name_of(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _is_viewed(parent: nn.Module, call: fx.Node) -> bool:
    """Whether a view is taken of a tensor with the layout of an output, by columns."""
    waiting, seen = list(call.users), set()
    while waiting:
        user = waiting.pop()
        name = _name_of(user)
        if user.op == "call_method" and name in ("view", "view_as"):
            return True
        is_module = user.op == "call_module"
        kind = type(parent.get_submodule(name)).__module__ if is_module else ""
        if (kind in _ELEMENTWISE if is_module else name not in _ANEW) and user not in seen:
            seen.add(user)
            waiting += user.users
    return False


def _is_transposed(node: Any) -> bool:
    """Whether a node transposes the last two of three dimensions, as far as tracing shows."""
    if not isinstance(node, fx.Node) or node.op not in ("call_method", "call_function"):
        return False
    if node.target is getattr:
        return node.args[1] == "mT"
    name, rest = _name_of(node), node.args[1:]
    found: Any = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
    places = [place % 3 for place in found if isinstance(place, int)]
    if name in ("transpose", "swapaxes", "swapdims"):
        return sorted(places) == [1, 2]
    return name == "permute" and places == [0, 2, 1]


def _graphs(
    mod: Mod, editor: Editor, has_site: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module, fx.Graph]]:
    """Modules that may have sites of a mod, with their graphs; others are reported."""
    for name, parent in editor.modules():
        if type(parent).__module__.startswith("torch.") or not has_site(parent):
            continue
        try:
            graph = traced(parent)
        except UnsupportedError as error:
            editor.left(mod, name, type(parent).__name__, str(error))
        else:
            yield name, parent, graph


def _layers(
    graph: fx.Graph, parent: nn.Module, editor: Editor, name: str
) -> dict[fx.Node, nn.Linear]:
    """Calls of plain linear layers that are called once, with one tensor, and in no own way."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    targets: list[Any] = [parent.get_submodule(str(node.target)) for node in calls]
    found: dict[fx.Node, nn.Linear] = {}
    for node, module in zip(calls, targets, strict=True):
        is_plain = type(module) in LINEARS_OF_ANY and getattr(module, "padding", (0, 0)) == (0, 0)
        is_plain = is_plain and "forward" not in vars(module)  # as of a declared group
        is_hooked = module._forward_hooks or module._forward_pre_hooks or module in WATCHED
        is_once = sum(other is module for other in targets) == 1
        is_simple = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
        is_free = is_plain and is_once and is_simple and not is_hooked
        if is_free and editor.accepts(module, site_of(name, node.target)):
            found[node] = module
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
