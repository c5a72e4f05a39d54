"""Chains across modules with forwards of their own, which the forward around them holds.

A layer in one module and the norm behind it in another, or the layers of two modules that follow
each other, such as blocks ``act(norm(fc(x)))`` in a list or an `nn.Sequential`, show in no forward
of one of them. The forward of a module around them does, if theirs are traced with it. So it is
where a chain gains that none of them has, of the innermost module around it and no further.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from lokakern.conversion.chain_spans import Span
from lokakern.conversion.tail_chains import TailSpan
from lokakern.conversion.tail_sites import found_tails
from lokakern.errors import UnsupportedError
from lokakern.nn.crossed_forward import crossed_of, graphs_of
from lokakern.nn.linear import LINEARS_OF_ANY
from lokakern.nn.raw_product import CHILD
from lokakern.nn.rectified import has_backward_hooks
from lokakern.nn.static_handoff import BoundedSequential
from lokakern.nn.tail import FoundTail
from lokakern.nn.traced_forward import looks_up

_SEQUENCES = (nn.Sequential, BoundedSequential)
_LISTS = (nn.ModuleList, nn.ModuleDict)
_BETWEEN = (nn.Linear, nn.Dropout, nn.Identity, *_SEQUENCES)
_CALL = nn.Module.__call__
ChainKey = tuple[int | str, ...]  # modules of a chain by id, and names of functions


class InlinedForward(NamedTuple):
    """Forwards that the forward of a module holds.

    Attributes:
        names: Names of their modules in it.
        tails: The layers with tails in the whole.
    """

    names: tuple[str, ...]
    tails: tuple[FoundTail, ...]


def calls_forwards(module: nn.Module) -> bool:
    """Whether modules with linear layers and a forward of their own are children of a module.

    Or in its lists and sequences. A sequence that is a child of another one is a part of that.
    """
    if type(module) not in _SEQUENCES and not _is_of_user(module):
        return False
    return any(_is_of_user(x) and _has_layers(x) for x in _within(module))


def planned_inlined(
    callers: Iterable[nn.Module],
    spans: Sequence[Span],
    plan: Callable[[nn.Module, Sequence[FoundTail]], list[TailSpan]],
    apart: Collection[int],
) -> tuple[list[Span], dict[int, InlinedForward]]:
    """The spans of a model with those across forwards, and by the id of a module what it holds.

    Args:
        callers: The modules of `calls_forwards`, the outer ones first.
        spans: Its spans without them.
        plan: The spans of a module with these tails.
        apart: Ids of modules that run crosses as chains, whose forwards are left alone.
    """
    known, found = list(spans), dict[int, InlinedForward]()
    callers = list(callers)
    of_a_row = {id(x) for m in callers if type(m) in _SEQUENCES for x in m.children()}
    forwards = _Forwards(apart)
    for module in reversed(callers):
        if type(module) in _SEQUENCES and (id(module) in of_a_row or not _is_open(module)):
            continue
        names = [] if id(module) in apart else forwards.names_in(module)
        chains = {key for span in known for key in _keys_of(span)}
        unmeasured: list[TailSpan] = []
        while names:
            tails = found_tails(module, names)
            made = plan(module, tails) if tails else []
            gained = [
                tail for span in made for tail in span.tails(())
                if _key_of(tail.names, module) not in chains
            ]  # fmt: skip
            unmeasured = unmeasured or _unmeasured(made, known)
            needed = [x for x in names if _is_in(x, (y for tail in gained for y in tail.names))]
            if needed == names:
                inner = [module, *map(module.get_submodule, names)]
                known = [*_without(known, inner, made), *made]
                for each in inner:
                    found.pop(id(each), None)
                found[id(module)] = InlinedForward(tuple(names), tuple(tails))
                break
            names = needed  # fewer guards, and the others stay as they are
        known += _unmeasured(unmeasured, known)
    return known, found


class _Forwards:
    """Which modules a forward may hold; each module is traced once."""

    def __init__(self, apart: Collection[int]) -> None:
        self._apart = apart
        self._called: dict[int, tuple[str, ...] | None] = {}

    def names_in(self, module: nn.Module) -> list[str]:
        """Names of the modules whose forwards that of a module may hold, the outer ones first."""
        names = self._names_in(module)
        times = Counter(id(module.get_submodule(name)) for name in names)
        return [name for name in names if times[id(module.get_submodule(name))] == 1]

    def _names_in(self, module: nn.Module) -> list[str]:
        found = []
        for name in self._called_once(module) or ():
            child = module.get_submodule(name)
            if self._may_be_inlined(child):
                found += [name, *(f"{name}.{x}" for x in self._names_in(child))]
        return found

    def _called_once(self, module: nn.Module) -> tuple[str, ...] | None:
        """Names of the modules that a forward calls once; None if it cannot be traced."""
        if id(module) not in self._called:
            self._called[id(module)] = _called_once(module)
        return self._called[id(module)]

    def _may_be_inlined(self, module: nn.Module) -> bool:
        if id(module) in self._apart or not _has_layers(module) or not _has_usual_call(module):
            return False
        if type(module) in _SEQUENCES:
            return calls_forwards(module) and _is_open(module)
        return _is_of_user(module) and self._called_once(module) is not None


def _called_once(module: nn.Module) -> tuple[str, ...] | None:
    try:
        graphs, _ = graphs_of(module)
    except (UnsupportedError, TypeError, ValueError):
        return None
    calls = [
        Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
        for graph in graphs
    ]
    return tuple(name for name in calls[-1] if all(times[name] <= 1 for times in calls))


def _is_of_user(module: nn.Module) -> bool:
    """Whether the class of a module is a user's, and no linear layer."""
    is_known = type(module).__module__.startswith(("torch.", "lokakern."))
    return not is_known and not isinstance(module, nn.Linear)


def _has_layers(module: nn.Module) -> bool:
    return any(type(x) in LINEARS_OF_ANY for x in module.modules())


def _has_usual_call(module: nn.Module) -> bool:
    """Whether a call of a module runs the forward of its class, or ours in its place, and no more.

    Nor may it be one that compilers are kept from, or multiply by parameters that are sites.
    """
    kind, crossed = type(module), crossed_of(module)
    before = vars(module).get("forward") if crossed is None else crossed.before
    if before is not None or module._compiled_call_impl is not None or CHILD in module._modules:
        return False
    if module._forward_hooks or module._forward_pre_hooks or has_backward_hooks(module):
        return False
    is_disabled = getattr(kind.forward, "_torchdynamo_disable", False)
    return kind.__call__ is _CALL and not is_disabled and not looks_up(kind)


def _is_open(sequence: nn.Module) -> bool:
    """Whether a sequence does nothing for its layers that it would not do in a forward around it.

    It hands values from norms and activations to layers, and back.
    """
    is_plain = [not _is_of_user(x) and type(x) not in _BETWEEN for x in sequence.children()]
    is_layer = [isinstance(x, nn.Linear) for x in sequence.children()]
    pairs = itertools.pairwise(zip(is_layer, is_plain, strict=True))
    return not any((a and d) or (b and c) for (a, b), (c, d) in pairs)


def _within(module: nn.Module) -> Iterator[nn.Module]:
    """Children, and those of lists and sequences."""
    for child in module.children():
        if isinstance(child, _LISTS) or type(child) in _SEQUENCES:
            yield from _within(child)
        else:
            yield child


def _key_of(names: Sequence[str], module: nn.Module) -> ChainKey:
    modules: Mapping[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    return tuple(id(modules[name]) if name in modules else name for name in names)


def _keys_of(span: Span) -> Iterator[ChainKey]:
    """Each chain of forwards."""
    if isinstance(span, TailSpan):
        for tail in span.tails(()):
            yield _key_of(tail.names, span.module)


def _unmeasured(spans: Iterable[TailSpan], known: Iterable[Span]) -> list[TailSpan]:
    """Those that a measurement of layers that no known one has may make a chain."""
    missing = {layer for span in known for layer in span.plan.missing}
    return [x for x in spans if not x.plan.chains and not missing.issuperset(x.plan.missing)]


def _is_in(name: str, names: Iterable[str]) -> bool:
    """Whether one of some names is that of a part of a module."""
    return any(x.startswith(f"{name}.") for x in names)


def _without(
    spans: Iterable[Span], modules: Sequence[nn.Module], made: Sequence[TailSpan]
) -> list[Span]:
    """Spans without those of these modules, and of their blocks, whose layers are in others now."""
    sites = {site for span in made for site in span.sites}
    blocks = {site for span in made for site in span.in_blocks}
    inner = {id(module) for module in modules}

    def is_replaced(span: Span) -> bool:
        is_inner = isinstance(span, TailSpan) and id(span.module) in inner
        return sites.issuperset(span.sites) and (is_inner or not blocks.isdisjoint(span.sites))

    return [span for span in spans if not is_replaced(span)]
