"""Tails: the norm and the activation that a forward calls behind a linear layer.

In chains of inference a residual may be added before the norm or at the end, and instead of the
activation a gate be multiplied: ``norm(layer(x) + x)``, ``x + relu(norm(layer(x)))``,
``gate * sigmoid(norm(layer(x)))``. Such a tail is *wide*: it reads matrices beside. And a *block*,
an `nn.Sequential` of whole layers, stands for these layers with their tails. Identities and dropout
are passed over in chains: where dropout is active in a call, the modules run one by one.

They show in the graph of the forward, where `lokakern.nn.crossed_forward` replaces the layer and
its tail by a call of `run_tail`. In inference this call may run all three as a chain
(`lokakern.nn.chain_call`). In compiled code it has the relu in the product
(`lokakern.nn.rectified`) or its gradients from one op (`lokakern.nn.joined`), as modules of one
`nn.Sequential` have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.nn.functional import gelu, hardswish, relu, silu

from lokakern.epilogue import NormForm
from lokakern.nn.activations import APPLY, GELUS, activation_of, module_of
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.chain_call import (
    Keeper,
    Noted,
    Part,
    call_again,
    call_parts,
    has_no_launch,
    has_own_call,
    is_idle_at,
    is_part,
    is_plain_call,
    layers_at,
    rows_in,
    static_rows,
    words_of_plan,
)
from lokakern.nn.cross_pattern import PRODUCTS, SUMS, pairs
from lokakern.nn.joined import (
    NORMS,
    count_joined,
    joined_at,
    multiply_joined,
    read_by,
)
from lokakern.nn.linear import LINEARS_OF_ANY, is_linear
from lokakern.nn.rectified import has_backward_hooks, multiply_rectified, rectified_at
from lokakern.nn.static_handoff import BoundedSequential, leaves, passes_on
from lokakern.nn.traced_forward import in_place_add, writes

# Calls of activations that are no modules, by name; "_" is behind those that write to their input.
_FUNCTIONS: dict[Any, str] = {
    relu: "relu", torch.relu: "relu", "relu": "relu", torch.relu_: "relu_", "relu_": "relu_",
    hardswish: "hardswish", silu: "silu", gelu: "gelu",
}  # fmt: skip
_OF_FUNCTION = "()"  # behind the name
_SIGMOIDS = (torch.sigmoid, functional.sigmoid, "sigmoid")
# In a wide tail, each before the matrix that it reads.
_ADD, _ADD_IN_PLACE, _MUL = "add()", "add_()", "mul()"
_COMBINING = (_ADD, _ADD_IN_PLACE, _MUL)
_IN_PLACE_SUMS = (in_place_add, "add_")
_NAMES: dict[str, tuple[object, ...]] = {
    _ADD: SUMS, _ADD_IN_PLACE: _IN_PLACE_SUMS, _MUL: PRODUCTS, "sigmoid()": _SIGMOIDS,
}  # fmt: skip
NORMS_OF_TAILS = (*NORMS, BlockRMSNorm)
_SEQUENCES = (nn.Sequential, BoundedSequential)
_NORM = "norm"
_NO_LAYER = ""  # in the place of a first layer, of blocks that became empty
PASSED = "~"  # in names, for an identity or a dropout: what it is shows in the graph
# Modules whose functions call none that they are given.
_PURE = (
    "torch", "torch.functional", "torch.nn.functional", "torch._tensor", "torch._jit_internal",
    "_operator", "operator", "math", "builtins",
)  # fmt: skip
_FUNCTION_TYPES = (FunctionType, BuiltinFunctionType)


class Tail(NamedTuple):
    """A layer with its tail that runs by a plan.

    Attributes:
        names: Names of the layer, the norm and the activation in the module, the latter two if they
            are there; of a function "relu()"; or of the layer and an `nn.Sequential` that begins
            with them; of a wide one also "add()", "add_()", "sigmoid()" and "mul()"; of a block its
            own; "~" where an identity or a dropout is passed over. Of a chain of several layers
            those of all.
        rectified: The route of products that apply a relu, or "".
        joined: What is behind the layer whose gradients one op computes, or "".
        chain: The plan of a chain (`lokakern.nn.chain_plan`) of the layer and its tail, or "".
    """

    names: tuple[str, ...]
    rectified: str
    joined: str
    chain: str = ""

    @property
    def plan(self) -> str:
        """What `run_tail` reads."""
        plans = self[1:4]
        return "\0".join(plans) if any(plans) else ""

    def layers(self, modules: Mapping[str, nn.Module]) -> list[nn.Module | None]:
        """The layers of the chain, whatever they are by now; none without one.

        Args:
            modules: By name.
        """
        found: list[nn.Module | None] = []
        rest = [name for name in self.names if name != PASSED]
        words = words_of_plan(self.chain) if self.chain else []
        while rest and len(found) < len(words):
            module = modules.get(rest[0])
            if type(module) in _SEQUENCES:
                found += _linears_in(module)
                rest = rest[1:]
            else:
                found.append(module)
                rest = rest[1 + len(_kinds_of(words[len(found) - 1])) :]
        return found


def _linears_in(sequence: nn.Module | None) -> Iterator[nn.Linear]:
    """The layers of a block in order, as often as they are in it, whatever hooks it has by now."""
    for module in sequence._modules.values() if sequence is not None else ():
        if isinstance(module, nn.Linear):
            yield module
        elif type(module) in _SEQUENCES:
            yield from _linears_in(module)


class FoundTail(NamedTuple):
    """A layer with its tail in a graph, or several that follow each other, see `joined_run`.

    Attributes:
        layer: The call of the layer, or of a block.
        behind: The calls of its tail; each reads the one before, which nothing else reads, and of a
            wide one some read a matrix beside.
        passed: Those of them that return their input, or do so in evaluation.
    """

    layer: fx.Node
    behind: tuple[fx.Node, ...]
    passed: frozenset[fx.Node] = frozenset()

    @property
    def end(self) -> fx.Node:
        """The last call."""
        return self.behind[-1] if self.behind else self.layer

    @property
    def names(self) -> tuple[str, ...]:
        """As of `Tail`."""
        return (str(self.layer.target), *map(self._name_of, self.behind))

    @property
    def is_wide(self) -> bool:
        """Whether it reads matrices beside."""
        return any(_name_of(node) in _COMBINING for node in self.behind)

    @property
    def modules(self) -> list[str]:
        """Names of all modules that it calls."""
        return [str(x.target) for x in (self.layer, *self.behind) if x.op == "call_module"]

    @property
    def passed_modules(self) -> list[str]:
        """Names of the modules that it passes over."""
        return [str(x.target) for x in self.behind if x in self.passed and x.op == "call_module"]

    @property
    def modules_between(self) -> list[str]:
        """Names of modules that are called between the layer and the end, but not by the tail."""
        ours, node, found = {self.layer, *self.behind}, self.layer, list[str]()
        while node is not self.end:
            if node not in ours and node.op == "call_module":
                found.append(str(node.target))
            node = node.next
        return found

    @property
    def arguments(self) -> list[str | fx.Node]:
        """Names of the tail with the matrices that it reads.

        They are as of `Tail`, but for modules that are passed over their own, and none for
        functions that are.
        """
        found: list[str | fx.Node] = []
        for before, node in zip((self.layer, *self.behind), self.behind, strict=False):
            if node in self.passed and node.op != "call_module":
                continue
            found.append(_name_of(node))
            if found[-1] in _COMBINING:
                found.append(next(x for x in node.all_input_nodes if x is not before))
        return found

    def _name_of(self, node: fx.Node) -> str:
        return PASSED if node in self.passed else _name_of(node)


def planned_tails(
    found: Sequence[FoundTail], module: nn.Module, *, has_relus: bool, is_joined: bool
) -> list[Tail]:
    """The tails of a module by the rules for modules of one `nn.Sequential`.

    Args:
        found: Those in its graphs.
        module: The module.
        has_relus: Whether products may apply relus.
        is_joined: Whether one op may compute gradients.
    """
    planned = []
    found = [tail for tail in found if tail.behind and not (tail.is_wide or tail.passed)]
    for names in dict.fromkeys(tail.names for tail in found):
        alike = [tail for tail in found if tail.names == names]
        layer = module.get_submodule(names[0])
        norm, activation = _parts(alike[0], module)
        rectified = joined = ""
        if has_relus and norm is None and activation == "relu":
            rectified = rectified_at(layer, [x for tail in alike for x in _readers(tail, module)])
        if is_joined:
            joined = joined_at(layer, norm, activation)
            after = [_after(tail, module, count_joined(joined) - 1) for tail in alike if joined]
            joined = read_by([x for some in after for x in some] if all(after) else [], joined)
        planned.append(Tail(names, rectified, joined))
    return planned


def run_tail(plan: str, x: Tensor, layer: nn.Module, *behind: nn.Module | str | Tensor) -> Tensor:
    """The output of a layer and its tail, by a plan where it holds.

    What is behind has each matrix that a wide tail reads after the name of its call. In eager mode
    the plan is a chain: anything else would take the host longer than it saves.
    """
    calls, beside = _split(behind)
    if plan:
        done = _run_chain(plan, x, layer, calls, beside)
        if done is None and is_compiling() and not beside:
            done = _run_planned(plan, x, layer, calls)
        if done is not None:
            return done
    y: Tensor = layer(x)
    rest = iter(beside)
    for each in calls:
        if not isinstance(each, str):
            y = each(y)
        elif each == _ADD:
            y = y + next(rest)
        elif each == _ADD_IN_PLACE:
            y += next(rest)
        elif each == _MUL:
            y = y * next(rest)
        else:
            y = _apply(each, y)
    return y


def _split(
    behind: Sequence[nn.Module | str | Tensor],
) -> tuple[tuple[nn.Module | str, ...], tuple[Tensor, ...]]:
    """The calls behind a layer, and the matrices that they read."""
    calls: list[Any] = []
    beside: list[Any] = []
    is_read = False
    for each in behind:
        (beside if is_read else calls).append(each)
        is_read = not is_read and isinstance(each, str) and each in _COMBINING
    return tuple(calls), tuple(beside)


def can_run(tail: Tail, module: nn.Module) -> bool:
    """Whether the chain of a tail computes what the modules and functions of its names do."""
    return bool(parts_of(tail, module))


def parts_of(tail: Tail, module: nn.Module) -> list[Part]:
    """The parts of the chain of a tail; none if the modules and functions are others."""
    modules = [
        name if name.endswith(_OF_FUNCTION) else module.get_submodule(name)
        for name in tail.names if name != PASSED
    ]  # fmt: skip
    if not tail.chain:
        return []
    return _chain_parts(_flat(modules, in_call=False), words_of_plan(tail.chain))


def modules_behind(names: Sequence[str], parent: nn.Module) -> list[nn.Module] | None:
    """The norm and activation behind a layer, by the names of a tail, of functions one alike.

    None if a sequence is behind it, of which a chain would run a part.
    """
    behind: list[nn.Module] = []
    names = [name for name in names if name != PASSED]
    for name, after in itertools.pairwise((*names[1:], "")):
        if name in _COMBINING or after == _MUL:  # a sigmoid before it
            continue
        if name.endswith(_OF_FUNCTION):
            behind.append(_module_of(name))
        else:
            behind.append(parent.get_submodule(name))
    return None if any(type(x) in _SEQUENCES for x in behind) else behind


def beside_in(names: Sequence[str]) -> NormForm:
    """What a wide tail of one layer reads beside, by its names."""
    behind = [name for name in names[1:] if name != PASSED]
    if not behind:  # the last layer of a run
        return NormForm()
    sums = (_ADD, _ADD_IN_PLACE)
    is_first = behind[0] in sums
    last = "gate" if _MUL in behind else "none"
    is_last = behind[-1] in sums and not is_first
    return NormForm(residual=is_first, last=last, residual_last=is_last)


def _run_chain(
    plan: str, x: Tensor, layer: nn.Module, behind: Sequence[nn.Module | str],
    beside: tuple[Tensor, ...],
) -> Tensor | None:  # fmt: skip
    """`run_tail` by a chain, or None where there is none that holds."""
    _, _, *chains = plan.split("\0")  # those of earlier versions have two words
    chain = chains[0] if chains else ""
    if not chain:
        return None
    first, *rest = _flat([layer, *behind])
    keeper = None
    if not is_compiling():
        is_idle = is_idle_at(chain, rows_in(x))
        if type(plan) is Noted:
            plan.is_idle &= is_idle
        if is_idle or isinstance(first, str) or not is_linear(first):
            return None
        among = tuple([each for each in rest if not isinstance(each, str)])
        found, _ = call_again(first, x, chain, among, beside)
        if found is not None:
            return found
        keeper = Keeper(first, among, 0, len(among))
    elif has_no_launch(chain, static_rows(x)):
        return None
    words = layers_at(x, chain)
    parts = _chain_parts([first, *rest], words)
    return call_parts(x, chain, words, parts, beside, keeper) if parts else None


def _flat(calls: Sequence[nn.Module | str], *, in_call: bool = True) -> list[nn.Module | str]:
    """Calls with those of the modules of blocks instead of blocks, without what is passed over."""
    found: list[nn.Module | str] = []
    for each in calls:
        if isinstance(each, str):
            found.append(each)
        else:
            found += [module for module in leaves([each]) if not passes_on(module, in_call)]
    return found or [_NO_LAYER]


def _chain_parts(modules: Sequence[nn.Module | str], words: Sequence[list[str]]) -> list[Part]:
    """Layers with their tails as parts of a chain; none if they are not what its words say."""
    parts: list[Part] = []
    rest = list(modules)
    for known in words:
        kinds = _kinds_of(known)
        if len(rest) < 1 + len(kinds):
            return []
        layer, *behind = rest[: 1 + len(kinds)]
        rest = rest[1 + len(kinds) :]
        if isinstance(layer, str) or not is_linear(layer):
            return []
        norm = None
        for kind, each in zip(kinds, behind, strict=True):
            if kind == _NORM:
                if isinstance(each, str) or type(each) not in NORMS_OF_TAILS:
                    return []
                norm = each
            elif not _applies(each, kind):
                return []
        part: Part = (layer, norm, known[6])
        if not is_part(part, known):
            return []
        parts.append(part)
    return [] if rest else parts


def _kinds_of(words: list[str]) -> list[str]:
    """What a layer of a plan calls behind the product, in order."""
    last = words[6].split("+")
    found = ["add"] if last[0] == "residual" else []
    found += [_NORM] if words[3] != "none" else []
    for word in last:
        if word == "gate":
            found += ["sigmoid", "mul"]
        elif word == "residual_last":
            found.append("add")
        elif word not in ("residual", "none"):
            found.append(word)
    return found


def _module_of(function: str) -> nn.Module:
    name = function.removesuffix(_OF_FUNCTION).removesuffix("_")
    return nn.Sigmoid() if name == "sigmoid" else module_of(name)


def _applies(activation: nn.Module | str, name: str) -> bool:
    """Whether a module without hooks, or a function, is an activation, or another call."""
    if isinstance(activation, str):
        return activation.removesuffix(_OF_FUNCTION).removesuffix("_") == name
    found = "sigmoid" if type(activation) is nn.Sigmoid else activation_of(activation)
    return found == name and is_plain_call(activation)


def _run_planned(
    plan: str, x: Tensor, layer: nn.Module, behind: Sequence[nn.Module | str]
) -> Tensor | None:
    """`run_tail` by a plan, or None where the modules have to run."""
    rectified, joined, *_ = plan.split("\0")
    if not rectified and not joined:
        return None
    modules = [each for each in behind if not isinstance(each, str)]
    sequence = modules[0] if modules and isinstance(modules[0], nn.Sequential) else None
    if sequence is not None:
        modules = list(sequence._modules.values())
        least = count_joined(joined or "none relu") - 1
        if type(sequence) not in _SEQUENCES or len(modules) < least:
            return None
        if has_own_call(sequence) or has_backward_hooks(sequence):
            return None
    done, end = None, 1
    if rectified:
        done = multiply_rectified(layer, modules[0] if modules else None, x, rectified)
    if done is None and joined:
        end = count_joined(joined) - 1
        done = multiply_joined([layer, *modules[:end]], x, joined)
    if done is None or sequence is None:
        return done
    if type(sequence) is BoundedSequential:
        return sequence.run_compiled(done, end)
    for module in modules[end:]:
        done = module(done)
    return done


def _apply(function: str, y: Tensor) -> Tensor:
    is_in_place = function.endswith("_()")
    if function == "sigmoid()":
        return torch.sigmoid(y)
    if function.startswith("relu"):
        return relu(y, inplace=is_in_place)
    if function.startswith("silu"):
        return silu(y, inplace=is_in_place)
    if function.startswith("gelu"):
        return APPLY[function.removesuffix(_OF_FUNCTION)](y)
    return hardswish(y, inplace=is_in_place)


def tails_in(graph: fx.Graph, parent: nn.Module) -> list[FoundTail]:
    """The layers of a graph with their tails, and with wide ones, and its blocks.

    Those are left out where something comes between that may write to a tensor, because a tail
    moves to the place of its layer.
    """
    layers = [node for node in graph.nodes if _called(node, parent) in LINEARS_OF_ANY]
    found = [FoundTail(layer, _behind(layer, parent)) for layer in layers]
    wide = [_linked(layer, _widely_behind(layer, parent), parent) for layer in layers]
    taken: set[fx.Node] = set()
    for tail in sorted(wide, key=lambda tail: -len(tail.behind)):  # two may share a sum
        if taken.isdisjoint(tail.behind):
            found.append(tail)
            taken.update(tail.behind)
    passing = [_linked(x, _behind(x, parent, is_passed=_is_passed), parent) for x in layers]
    found += [tail for tail in passing if tail.passed]
    blocks = [FoundTail(node, ()) for node in graph.nodes if _is_block(node, parent)]
    passing = [_linked(x.layer, (), parent) for x in blocks]
    with_tails = [x for x in found if x.behind and joined_run([x], parent) is not None]
    return [*with_tails, *blocks, *(tail for tail in passing if tail.passed)]


def _linked(layer: fx.Node, behind: tuple[fx.Node, ...], parent: nn.Module) -> FoundTail:
    """A layer with its tail; with what is passed over behind it, if another layer reads that."""
    if behind or _is_block(layer, parent):
        more, reader = _past(behind[-1] if behind else layer, parent)
        if reader is not None and _is_layer_or_block(reader, parent):
            behind = (*behind, *more)
    return FoundTail(layer, behind, frozenset(x for x in behind if _is_passed(x, parent)))


def _is_layer_or_block(node: fx.Node, parent: nn.Module) -> bool:
    return _called(node, parent) in LINEARS_OF_ANY or _is_block(node, parent)


def _is_block(node: fx.Node, parent: nn.Module) -> bool:
    """Whether a node calls an `nn.Sequential` that begins with a linear layer."""
    if _called(node, parent) not in _SEQUENCES:
        return False
    first = next(iter(leaves([parent.get_submodule(str(node.target))])), None)
    return type(first) in LINEARS_OF_ANY


def runs_of(found: Sequence[FoundTail], parent: nn.Module) -> list[list[FoundTail]]:
    """Layers with their tails that follow each other in a graph, alone ones, too.

    So do blocks. A layer without a tail may be the last one. A tail that is an `nn.Sequential` ends
    a run, and is none of it.
    """
    tails = {
        tail.layer: tail for tail in found
        if all(_called(node, parent) not in _SEQUENCES for node in tail.behind)
    }  # fmt: skip
    nexts: dict[fx.Node, FoundTail] = {}
    for layer, tail in tails.items():
        reader = _reader(tail.end)
        if reader is not None and (reader in tails or _called(reader, parent) in LINEARS_OF_ANY):
            nexts[layer] = tails.get(reader, FoundTail(reader, ()))
    followers = {tail.layer for tail in nexts.values()}
    runs = []
    for layer, tail in tails.items():
        if layer not in followers:
            runs.append([tail])
            while runs[-1][-1].layer in nexts:
                runs[-1].append(nexts[runs[-1][-1].layer])
    return runs


def joined_run(run: Sequence[FoundTail], parent: nn.Module) -> FoundTail | None:
    """Layers of a run as one; None where something comes between that may write to a tensor."""
    nodes = [node for tail in run for node in (tail.layer, *tail.behind)]
    node, ours = nodes[0], set(nodes)
    while node is not nodes[-1]:
        if node not in ours and not _may_follow(node, parent):
            return None
        node = node.next
    return FoundTail(nodes[0], tuple(nodes[1:]), frozenset().union(*(x.passed for x in run)))


def wanted_tails(
    graph: fx.Graph, parent: nn.Module, names: Collection[tuple[str, ...]]
) -> list[FoundTail]:
    """The tails of a graph, and runs of them, that have these names."""
    found = [
        FoundTail(node, behind, frozenset(x for x in behind if _is_passed(x, parent)))
        for node in graph.nodes if _is_layer_or_block(node, parent)
        for wanted in names
        if wanted[0] == node.target and (behind := _followed(node, wanted[1:], parent))
    ]  # fmt: skip
    return [tail for tail in found if joined_run([tail], parent) is not None]


def _followed(layer: fx.Node, names: Sequence[str], parent: nn.Module) -> tuple[fx.Node, ...]:
    """The calls behind a layer that have these names; none without them."""
    behind: list[fx.Node] = []
    for name in names:
        end = behind[-1] if behind else layer
        if name == PASSED:
            reader = _reader(end)
            if reader is None or not _is_passed(reader, parent):
                return ()
            behind.append(reader)
            continue
        reader = _reader(end) or _summed(end) or _combined(end, PRODUCTS)
        if reader is None or _name_of(reader) != name or not _may_be_behind(reader, parent):
            return ()
        behind.append(reader)
    return tuple(behind)


def _may_be_behind(node: fx.Node, parent: nn.Module) -> bool:
    """Whether a node may be a part of a tail, or the next layer."""
    kind = _called(node, parent)
    if kind in _SEQUENCES:
        begins = _first(parent.get_submodule(str(node.target)))
        return begins != (None, "none") or _is_block(node, parent)
    is_known = kind in NORMS_OF_TAILS or kind in LINEARS_OF_ANY or _is_sigmoid(node, parent)
    return is_known or bool(_activation(node, parent)) or _name_of(node) in _COMBINING


def _behind(
    layer: fx.Node, parent: nn.Module,
    is_passed: Callable[[fx.Node, nn.Module], bool] = lambda *_: False,
) -> tuple[fx.Node, ...]:  # fmt: skip
    """The calls of a norm and an activation behind a layer, and of what is passed over."""
    passed, reader = _past(layer, parent, is_passed)
    if reader is None:
        return ()
    kind = _called(reader, parent)
    if kind in NORMS_OF_TAILS:
        more, last = _past(reader, parent, is_passed)
        if last is None or not _activation(last, parent):
            return (*passed, reader)
        return (*passed, reader, *more, last)
    if kind in _SEQUENCES:
        norm, activation = _first(parent.get_submodule(str(reader.target)))
        return () if passed or (norm is None and activation == "none") else (reader,)
    return (*passed, reader) if _activation(reader, parent) else ()


def _widely_behind(layer: fx.Node, parent: nn.Module) -> tuple[fx.Node, ...]:
    """The calls of a wide tail behind a layer; none without one."""
    behind: list[fx.Node] = []

    def end() -> fx.Node:
        return behind[-1] if behind else layer

    def take(*nodes: fx.Node | None) -> bool:
        found = [node for node in nodes if node is not None]
        if len(found) == len(nodes):
            behind.extend(found)
        return len(found) == len(nodes)

    def take_sum() -> bool:
        passed, _ = _past(end(), parent)
        return take(*passed, _summed((end(), *passed)[-1]))

    has_residual = take_sum()
    passed, reader = _past(end(), parent)
    if reader is not None and _called(reader, parent) in NORMS_OF_TAILS and take(*passed, reader):
        passed, reader = _past(end(), parent)
    is_gated = False
    if reader is not None and _activation(reader, parent):
        take(*passed, reader)
    elif reader is not None and _is_sigmoid(reader, parent):
        more, _ = _past(reader, parent)
        product = _combined((reader, *more)[-1], PRODUCTS)
        is_gated = take(*passed, reader, *more, product)
    has_residual = has_residual or take_sum()
    return tuple(behind) if has_residual or is_gated else ()


def _is_passed(node: fx.Node, parent: nn.Module) -> bool:
    """Whether a node returns its input, in evaluation at least, with this module or function."""
    if _called(node, parent) is not None:
        return passes_on(parent.get_submodule(str(node.target)), in_call=False)
    if node.op != "call_function" or node.target is not functional.dropout:
        return False
    # fx has all options by name.
    rate, is_training = node.kwargs.get("p"), node.kwargs.get("training")
    return is_training is False or (isinstance(rate, int | float) and rate == 0)


def _past(
    node: fx.Node, parent: nn.Module,
    is_passed: Callable[[fx.Node, nn.Module], bool] = _is_passed,
) -> tuple[list[fx.Node], fx.Node | None]:  # fmt: skip
    """What is passed over behind a value, each the only reader of the one before, and the next."""
    passed: list[fx.Node] = []
    reader = _reader(node)
    while reader is not None and is_passed(reader, parent):
        passed.append(reader)
        reader = _reader(reader)
    return passed, reader


def _is_sigmoid(node: fx.Node, parent: nn.Module) -> bool:
    if node.op in ("call_function", "call_method"):
        return node.target in _SIGMOIDS and not node.kwargs
    return _called(node, parent) is nn.Sigmoid


def _combined(node: fx.Node, targets: tuple[object, ...]) -> fx.Node | None:
    """The only reader of a value, if it adds another one of the forward, or multiplies with it."""
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    others = [x for own, x in pairs(reader, targets) if own is node and x is not node]
    return reader if others and others[0].op != "get_attr" else None


def _summed(node: fx.Node) -> fx.Node | None:
    """The only reader of a value of ours, if it adds another one of the forward.

    In place, too: nothing else reads the tensor that it writes to.
    """
    reader = _combined(node, SUMS) or _combined(node, _IN_PLACE_SUMS)
    is_written = reader is not None and reader.args[0] is node
    return reader if is_written or reader is None or reader.target in SUMS else None


def follow_sums_in_place(graph: fx.Graph, parent: nn.Module) -> None:
    """Let what reads a layer or a norm behind ``y.add_(x)`` read this sum, which is y."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in places:
        written = node.args[0] if node.target in _IN_PLACE_SUMS and node.args else None
        if not isinstance(written, fx.Node):
            continue
        if _called(written, parent) in (*LINEARS_OF_ANY, *NORMS_OF_TAILS):
            for user in list(written.users):
                if places[user] > places[node]:
                    user.replace_input_with(written, node)


def _reader(node: fx.Node) -> fx.Node | None:
    """The only reader of a value, if it reads nothing else."""
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    return reader if reader.args == (node,) else None


def _called(node: fx.Node, parent: nn.Module) -> type[nn.Module] | None:
    """The class of the module that a node calls with one tensor."""
    if node.op != "call_module" or node.kwargs or len(node.args) != 1:
        return None
    is_tensor = isinstance(node.args[0], fx.Node)
    return type(parent.get_submodule(str(node.target))) if is_tensor else None


def _activation(node: fx.Node, parent: nn.Module) -> str:
    """The name of the activation that a node applies, or ""."""
    if _called(node, parent) is None:
        return _function_of(node).removesuffix("_")
    return activation_of(parent.get_submodule(str(node.target)))


def _function_of(node: fx.Node) -> str:
    """The name of a function or method in `_FUNCTIONS` that a node calls, or ""."""
    name = _FUNCTIONS.get(node.target, "") if node.op in ("call_function", "call_method") else ""
    options = dict(node.kwargs)
    if name == "gelu":  # has no inplace
        how = options.pop("approximate", "none")
        return GELUS.get(how, "") if isinstance(how, str) and not options else ""
    is_in_place = options.pop("inplace", False)
    if not name or options or type(is_in_place) is not bool:
        return ""
    return f"{name}_" if is_in_place and not name.endswith("_") else name


def _name_of(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    for name, targets in _NAMES.items():
        if node.target in targets:
            return name
    return _function_of(node) + _OF_FUNCTION


def _parts(tail: FoundTail, parent: nn.Module) -> tuple[nn.Module | None, str]:
    """The norm of a tail, if any, and its activation, or "none"."""
    first, *others = tail.behind
    kind = _called(first, parent)
    if kind in _SEQUENCES:
        return _first(parent.get_submodule(str(first.target)))
    if kind in NORMS_OF_TAILS:
        norm = parent.get_submodule(str(first.target))
        return norm, _activation(others[0], parent) if others else "none"
    return None, _activation(first, parent)


def _first(sequence: nn.Module) -> tuple[nn.Module | None, str]:
    """The norm that a sequence begins with, if it does, and the activation, or "none"."""
    modules = list(sequence.children())
    norm = modules.pop(0) if modules and type(modules[0]) in NORMS else None
    return norm, activation_of(modules[0]) or "none" if modules else "none"


def _readers(tail: FoundTail, parent: nn.Module) -> Iterator[nn.Module]:
    """The modules that read the relu of a tail."""
    end = tail.behind[-1]
    if _called(end, parent) in _SEQUENCES:
        yield from list(parent.get_submodule(str(end.target)).children())[1:2]
        return
    for reader in end.users:
        if reader.op == "call_module":
            module = parent.get_submodule(str(reader.target))
            yield next(module.children(), module) if type(module) in _SEQUENCES else module


def _after(tail: FoundTail, parent: nn.Module, count: int) -> list[nn.Module]:
    """All modules that read what so many modules behind a layer return; [] if others do, too."""
    end = tail.behind[-1]
    if _called(end, parent) in _SEQUENCES:
        after = list(parent.get_submodule(str(end.target)).children())[count:]
        if after:
            return after[:1]
    found = []
    for reader in end.users:
        if _called(reader, parent) is None:
            return []
        module = parent.get_submodule(str(reader.target))
        found.append(next(module.children(), module) if type(module) in _SEQUENCES else module)
    return found


def _may_follow(node: fx.Node, parent: nn.Module) -> bool:
    """Whether a node may run behind a tail that it ran before: it is known to write to nothing."""
    if writes(node, parent):
        return False
    if node.op == "call_module":
        called = parent.get_submodule(str(node.target))
        return all(map(_is_known_pure, called.modules()))
    return node.op != "call_function" or _is_of_torch(node.target)


def _is_known_pure(module: nn.Module) -> bool:
    """Whether a module runs no code of a user, who may write to a tensor there."""
    is_known = type(module).__module__.startswith(("torch.nn.modules.", "lokakern.nn."))
    functions = [x for x in vars(module).values() if isinstance(x, _FUNCTION_TYPES)]
    is_plain = is_known and is_plain_call(module) and all(map(_is_of_torch, functions))
    return is_plain and getattr(module, "max_norm", None) is None  # which embeddings write


def _is_of_torch(function: Any) -> bool:
    """Whether a function is one of Python or torch that calls none of a user."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    name = getattr(function, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return False
    module = getattr(function, "__module__", None)
    if module is None:  # such as torch.relu
        return isinstance(function, BuiltinFunctionType | BuiltinMethodType)
    return module in _PURE or module.startswith(("torch._C", "lokakern."))
