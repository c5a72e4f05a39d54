"""Crosses of a model that chains may run: ``x0 * layer(x) + x``, or ``x0 * up(down(x)) + x``.

They show in the forward of the module that calls the layers, which is traced: loops over lists of
layers are then unrolled. What replaces them is in `lokakern.nn.crossed_forward`. A cross of two
layers is a span of both; a chain may run its last layer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, fx, nn

from lokakern.chain.candidates import Layer
from lokakern.conversion.chain_rivals import ChainJudge, SpanLayer
from lokakern.conversion.chain_spans import (
    ChainSites,
    FoundLayer,
    Span,
    is_usable,
    takes_once,
    words_of,
)
from lokakern.conversion.chain_verdicts import ways_at
from lokakern.conversion.chains import SpanPlan, plan_span
from lokakern.conversion.routes import Route
from lokakern.errors import UnsupportedError
from lokakern.nn.cross_pattern import FoundCross, crosses_in
from lokakern.nn.crossed_forward import Cross, graph_of
from lokakern.nn.linear import Linear, is_linear
from lokakern.nn.module_scan import shape_of
from lokakern.nn.static_handoff import is_inner, leaves
from lokakern.probe.verdicts import Verdict
from lokakern.types import NormForm

COLUMNS = 8  # kernels read x0 and x in 16 bytes: other rows would be copied
_VIEWS = ("view", "view_as", "reshape", "flatten", "unflatten", "transpose", "permute", "t")
_LISTS = (nn.ModuleList, nn.ModuleDict)  # never called themselves


@dataclass(frozen=True)
class CrossSpan(Span):
    """The layers of a cross, with their chain.

    Attributes:
        names: Names of the layers in the module.
    """

    names: tuple[str, ...] = ()

    def crosses(self, off: Collection[ChainSites]) -> list[Cross]:
        """The cross with its plan, which is "" if the chain is off; none without a chain."""
        return [
            Cross(
                self.names[chain.start : chain.stop],
                "" if self.sites_of(chain) in off else chain.text,
            )
            for chain in self.plan.chains
        ]


def calls_layers(module: nn.Module) -> bool:
    """Whether linear layers are children of a module with a forward of its own, or in its lists."""
    kind = type(module).__module__
    if kind.startswith(("torch.", "lokakern.nn.")) or isinstance(module, nn.Linear):
        return False
    return any(
        isinstance(child, nn.Linear)
        or (isinstance(child, _LISTS) and any(isinstance(x, nn.Linear) for x in child.children()))
        for child in module.children()
    )


def calls_blocks(module: nn.Module) -> bool:
    """Whether sequences are children of a module with a forward of its own, or in its lists."""
    kind = type(module).__module__
    if kind.startswith(("torch.", "lokakern.nn.")) or isinstance(module, nn.Sequential):
        return False
    children = [x for child in module.children() for x in (child, *_listed(child))]
    return any(is_inner(x) and any(isinstance(y, nn.Linear) for y in leaves(x)) for x in children)


def _listed(child: nn.Module) -> Iterator[nn.Module]:
    """The modules in a list, and in lists in it."""
    for x in child.children() if isinstance(child, _LISTS) else ():
        yield x
        yield from _listed(x)


def planned_crosses(
    modules: Iterable[nn.Module],
    names: Mapping[int, str],
    routes: Mapping[str, Route],
    judge_of: Callable[[Tensor], ChainJudge],
    verdicts: Mapping[str, Verdict] | None = None,
    graph_of: Callable[[nn.Module], fx.Graph] = graph_of,
) -> tuple[list[CrossSpan], dict[str, str]]:
    """The crosses of modules with their chains.

    Args:
        modules: Modules that call layers.
        names: Names of the layers that may be part of a chain, by id.
        routes: Routes of their outputs by name.
        judge_of: The judge of layers on the device of a weight.
        verdicts: Those of a report on outputs by name; None: errors are those of the database.
        graph_of: The graph of the forward of a module.

    Returns:
        The crosses, and reasons against others, by the names of their layers, or by the kind of a
        module whose forward cannot be traced.
    """
    spans: list[CrossSpan] = []
    left: dict[str, str] = {}
    known: dict[tuple[object, ...], SpanPlan] = {}
    for module in modules:
        if not any(id(x) in names for x in module.modules()):
            continue
        try:
            graph = graph_of(module)
        except UnsupportedError as error:
            left[f"a {type(module).__name__}"] = str(error).partition("\n")[0]
            continue
        done = set()
        for cross in crosses_in(graph, module):
            layers = [module.get_submodule(name) for name in cross.names]
            if any(id(layer) not in names for layer in layers[-1:]) or cross.names in done:
                continue
            done.add(cross.names)
            sites = tuple(names.get(id(layer), "") for layer in layers)
            judge = judge_of(shape_of(layers[-1])[3])
            found = _layers_of(layers, judge)
            ways, unsafe = ways_at(sites, verdicts, judge.device, judge.half)
            if unsafe and len(found) == 2 and sites[-1] in ways:
                left[words_of(sites[:1])] = unsafe[sites[0]]
                found = found[1:]  # the last layer may be a chain alone
            why = cross.why or ("" if found else _why_not(layers[-1])) or unsafe.get(sites[-1], "")
            if why:
                left[words_of(sites[-1:])] = why
                continue
            sites = sites[-len(found) :]
            moved = tensors_moved(cross, module)
            span = tuple(
                SpanLayer(
                    x.layer, x.eps, routes[site], tensors=moved if x is found[-1] else 0,
                    ways=ways[site],
                )
                for x, site in zip(found, sites, strict=True)
            )  # fmt: skip
            key = (span, judge)
            if key not in known:
                known[key] = plan_span(span, judge)
            kept = cross.names[-len(found) :]
            spans.append(CrossSpan(module, tuple(found), sites, known[key], kept))
    return spans, left


def tensors_moved(cross: FoundCross, module: nn.Module) -> int:
    """Tensors that are read and written less if a cross has no kernel of its own.

    That kernel reads the product, and x0 and x, and writes. If no linear layer of the module reads
    the result, a compiler may compute the cross in the kernel of its reader, which then reads one
    tensor instead of these, and nothing is written less.
    """
    reads = 2 if cross.x0 is cross.x else 3
    return tensors_of(reads, cross.sum, module)


def tensors_of(reads: int, node: fx.Node, module: nn.Module) -> int:
    """`tensors_moved` of a kernel that reads so many tensors and writes a node."""
    return reads + 1 if _is_multiplied(node, module) else reads - 1


def _is_multiplied(node: fx.Node, module: nn.Module) -> bool:
    """Whether a linear layer reads a tensor, or a view of it, also inside of another module."""
    for user in node.users:
        is_view = user.op == "call_method" and user.target in _VIEWS and user.args[0] is node
        if is_view and _is_multiplied(user, module):
            return True
        if user.op == "call_module" and user.args and user.args[0] is node:
            reader = module.get_submodule(str(user.target))
            if isinstance(reader, nn.Linear) or _begins_with_product(reader):
                return True
    return False


def _begins_with_product(module: nn.Module) -> bool:
    """Whether a linear layer of a module reads its first input, as it is or as a view."""
    if isinstance(module, nn.Sequential):
        first = next(iter(module), None)
        return isinstance(first, nn.Linear) or (first is not None and _begins_with_product(first))
    if not calls_layers(module):
        return False
    try:
        graph = graph_of(module)
    except UnsupportedError:
        return False
    given = next((node for node in graph.nodes if node.op == "placeholder"), None)
    return given is not None and _is_multiplied(given, module)


def _why_not(layer: nn.Module) -> str:
    """Why no kernel takes the last layer of a cross."""
    assert isinstance(layer, nn.Linear)  # as the pattern has it
    if layer.out_features % COLUMNS:
        return f"n is {layer.out_features}; kernels of crosses take multiples of {COLUMNS}"
    if not is_linear(layer) or not is_usable(layer):
        return "it is no plain converted layer in bfloat16 or float16"
    return "no kernel takes it"


def _layers_of(layers: list[nn.Module], judge: ChainJudge) -> list[FoundLayer]:
    """The layers of a cross that kernels take; none if they do not take the last one."""
    found: list[FoundLayer] = []
    for place, linear in reversed(list(enumerate(layers))):
        if not isinstance(linear, Linear) or not is_linear(linear) or not is_usable(linear):
            break
        last = "none" if found else "cross"
        form = NormForm(bias=linear.bias is not None, last=last)
        layer = Layer(linear.out_features, linear.in_features, str(form))
        if linear.weight.dtype is not judge.half.dtype:
            break
        if (not found and layer.n % COLUMNS) or not takes_once(
            layer, judge.device, half=judge.half
        ):
            break
        found.insert(0, FoundLayer(linear, place, place + 1, layer, form.norm.eps))
    return found
