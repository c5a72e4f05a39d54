"""Chains across modules with forwards of their own, which the forward around them holds.

A layer in one module and the norm behind it in another, or the layers of two modules that follow
each other, such as blocks ``act(norm(fc(x)))`` in a list or an `nn.Sequential`, show in no forward
of one of them. The forward of a module around them does, if theirs are traced with it. So it is
where a chain gains that none of them has, of the innermost module around it and no further.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from lokakern.conversion.chain_spans import Span
from lokakern.conversion.tail_chains import TailSpan
from lokakern.conversion.tail_sites import found_tails
from lokakern.errors import UnsupportedError
from lokakern.nn.crossed_forward import CALL, crossed_of, graphs_of
from lokakern.nn.linear import LINEARS_OF_ANY
from lokakern.nn.raw_product import CHILD
from lokakern.nn.rectified import has_backward_hooks
from lokakern.nn.static_handoff import BoundedSequential
from lokakern.nn.tail import PASSED, FoundTail
from lokakern.nn.traced_forward import looks_up

_SEQUENCES = (nn.Sequential, BoundedSequential)
_LISTS = (nn.ModuleList, nn.ModuleDict)
_BETWEEN = (nn.Linear, nn.Dropout, nn.Identity, *_SEQUENCES)
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
    """Whether a module has others with linear layers and a forward of their own.

    As children, or in lists and sequences of them.
    """
    if type(module) not in _SEQUENCES and not _is_of_user(module):
        return False
    return any(_is_of_user(x) and _has_layers(x) for x in _within(module))


class Inlined(NamedTuple):
    """What `planned_inlined` found.

    Attributes:
        spans: The spans of the model with those across forwards.
        inner: Spans that these replace, for calls in which the outer forward runs its own code.
        forwards: By the id of a module, what its forward holds.
    """

    spans: list[Span]
    inner: list[TailSpan]
    forwards: dict[int, InlinedForward]


def planned_inlined(
    callers: Sequence[nn.Module],
    spans: Sequence[Span],
    plan: Callable[[nn.Module, Sequence[FoundTail]], list[TailSpan]],
    apart: Collection[int],
) -> Inlined:
    """The chains across forwards, with those of a model without them.

    Args:
        callers: The modules of `calls_forwards`, the outer ones first.
        spans: The spans of the model without them.
        plan: The spans of a module with these tails.
        apart: Ids of modules that run crosses as chains, whose forwards are left alone.
    """
    found = Inlined(list(spans), [], {})
    open_rows = [m for m in callers if type(m) in _SEQUENCES and _is_open(m)]
    in_rows = {id(child) for row in open_rows for child in row.children()}
    forwards = _Forwards(apart)
    own = {key for span in spans for key in _keys_of(span)}  # of forwards that hold no others
    for module in reversed(callers):
        if id(module) in apart:
            continue
        if type(module) in _SEQUENCES and (id(module) in in_rows or not _is_open(module)):
            continue
        known = own | {key for span in found.spans for key in _keys_of(span)}
        _inline(module, forwards.names_in(module), plan, own, known, found)
    return found


def _inline(
    module: nn.Module, names: Sequence[str],
    plan: Callable[[nn.Module, Sequence[FoundTail]], list[TailSpan]],
    own: set[ChainKey], known: set[ChainKey], found: Inlined,
) -> None:  # fmt: skip
    """Add to what was found the chains of a module that inlines some of these, if it gains any.

    Args:
        module: The module.
        names: Of modules that it may inline.
        plan: As of `planned_inlined`.
        own: The chains of forwards that hold no others.
        known: All chains so far.
        found: What was found so far.
    """
    missing: list[TailSpan] = []
    while names:
        tails = found_tails(module, names)
        made = plan(module, tails) if tails else []
        chains = {_key_of(tail.names, module): tail for span in made for tail in span.tails(())}
        missing = missing or _unmeasured(made)
        if chains.keys() <= known:
            break
        parts = [name for key, tail in chains.items() if key not in own for name in tail.names]
        needed = [name for name in names if any(x.startswith(f"{name}.") for x in parts)]
        if needed == names:
            _replace(module, names, made, found)
            found.forwards[id(module)] = InlinedForward(tuple(names), tuple(tails))
            break
        names = needed  # each costs guards, and others have all their chains without
    known_layers = {layer for span in found.spans for layer in span.plan.missing}
    found.spans.extend(x for x in missing if not known_layers.issuperset(x.plan.missing))


def _replace(
    module: nn.Module, names: Sequence[str], made: Sequence[TailSpan], found: Inlined
) -> None:
    """Put spans of a module in the place of those of modules that it inlines, and of its blocks."""
    sites = {site for span in made for site in span.sites}
    blocks = {site for span in made for site in span.in_blocks}
    inlined = {id(module.get_submodule(name)) for name in names}
    kept: list[Span] = []
    for span in found.spans:
        if not sites.issuperset(span.sites):
            kept.append(span)
        elif isinstance(span, TailSpan) and id(span.module) in inlined:
            found.inner.append(span)
        elif span.module is not module and blocks.isdisjoint(span.sites):
            kept.append(span)
    found.spans[:] = [*kept, *made]


def _unmeasured(spans: Iterable[TailSpan]) -> list[TailSpan]:
    """Those that measurements might make chains."""
    return [span for span in spans if not span.plan.chains and span.plan.missing]


class _Forwards:
    """Which modules a forward may hold."""

    def __init__(self, apart: Collection[int]) -> None:
        self._apart = apart
        self._called: dict[int, tuple[str, ...] | None] = {}

    def names_in(self, module: nn.Module) -> list[str]:
        """Names of the modules whose forwards that of a module may hold, the outer ones first."""
        found = {name: id(module.get_submodule(name)) for name in self._names_in(module)}
        times = Counter(found.values())
        return [name for name, known in found.items() if times[known] == 1]

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
    return kind.__call__ is CALL and not is_disabled and not looks_up(kind)


def _is_open(sequence: nn.Module) -> bool:
    """Whether a sequence does nothing for its layers that it would not do in a forward around it.

    It hands values from norms and activations to layers, and back.
    """
    neighbors = itertools.pairwise(sequence.children())
    return not any(_are_handed(x, y) or _are_handed(y, x) for x, y in neighbors)


def _are_handed(layer: nn.Module, other: nn.Module) -> bool:
    """Whether these are a layer, and a norm, an activation or another module of torch or ours."""
    is_other = not _is_of_user(other) and type(other) not in _BETWEEN
    return isinstance(layer, nn.Linear) and is_other


def _within(module: nn.Module) -> Iterator[nn.Module]:
    """Children, and those of lists and sequences."""
    for child in module.children():
        if isinstance(child, _LISTS) or type(child) in _SEQUENCES:
            yield from _within(child)
        else:
            yield child


def _key_of(names: Sequence[str], module: nn.Module) -> ChainKey:
    return tuple(
        name if name == PASSED or name.endswith("()") else id(module.get_submodule(name))
        for name in names
    )


def _keys_of(span: Span) -> Iterator[ChainKey]:
    """Each chain of forwards."""
    if isinstance(span, TailSpan):
        for tail in span.tails(()):
            yield _key_of(tail.names, span.module)
