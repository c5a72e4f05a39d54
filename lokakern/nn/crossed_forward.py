"""Forwards with crosses as chains, ``x0 * layer(x) + x`` of DCN in one op, and with raw products.

A module that computes a cross, multiplies by a parameter of its own, or calls an activation behind
a layer, shows it in its forward alone, which is traced. While a conversion has chains for crosses,
routes for such products, or plans for layers with tails (`lokakern.nn.tail`), ``forward`` of the
module is that of a `CrossedForward`, which calls the traced function: the same, with one call for
each cross, each product (`lokakern.nn.raw_product`) and each layer with a tail. Where a plan does
not hold (see `lokakern.nn.chain_call`), this call computes the original expression by the original
modules. Where children or settings of the module changed since it was traced, or an optional
argument is given, its own forward runs; of a module with tails alone, none of which is a chain, it
does in eager mode, too.

An attribute of the module, and not a wrapper, so that names of children and of parameters stay; and
not a class, so that the module is what it was to code that asks for its type.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_compiling

from lokakern.errors import UnsupportedError
from lokakern.functional.checks import warn_once
from lokakern.nn.chain_call import (
    Keeper,
    Noted,
    Part,
    are_same,
    call_again,
    call_parts,
    has_global_hooks,
    has_no_launch,
    has_own_call,
    is_idle_at,
    is_part,
    layers_at,
    prepare_chains,
    rows_in,
    static_rows,
    words_of_plan,
)
from lokakern.nn.chain_norm import drop_norms, keep_norms, norms_of
from lokakern.nn.chain_plan import read_plan
from lokakern.nn.cross_pattern import FoundCross, crosses_in
from lokakern.nn.joined import joined_way
from lokakern.nn.linear import Linear, is_linear
from lokakern.nn.raw_pattern import FoundProduct, products_in
from lokakern.nn.raw_product import CHILD, products_of
from lokakern.nn.rectified import (
    has_backward_hooks,
    has_global_backward_hooks,
    traced_way,
)
from lokakern.nn.static_handoff import BoundedSequential
from lokakern.nn.tail import (
    FoundTail,
    Tail,
    can_run,
    follow_sums_in_place,
    parts_of,
    run_tail,
    wanted_tails,
)
from lokakern.nn.torch_owners import without_fast_path
from lokakern.nn.traced_forward import (
    CHILDREN,
    FUNCTIONS,
    MISSING,
    MODE,
    PASSING_MASKS,
    PRESENT,
    Method,
    is_row,
    is_setting,
    is_traceable,
    masks_passed,
    own_reads_of,
    reads_of,
    text_of_code,
    traced,
    traced_modes,
)
from lokakern.types import Granularity

_LISTS = (nn.ModuleList, nn.ModuleDict)  # which a forward reads, and does not call
_OTHER = "\0other"  # stands for what is not compared
_METHOD = "\0method"  # in files of earlier versions, for a method
_MOST_SHAPES = 16
CALL = nn.Module.__call__  # of modules whose calls run hooks and a forward, and no more
_CODES: WeakKeyDictionary[type[nn.Module], CodeType] = WeakKeyDictionary()
_REPLICATE = "_replicate_for_data_parallel"  # what nn.DataParallel calls
_OF_TORCH = frozenset((*vars(nn.Module()), "forward"))


class Cross(NamedTuple):
    """A cross that runs as a chain.

    Attributes:
        names: Names of its layers in the module; the last one's output is multiplied by x0.
        plan: See `lokakern.nn.chain_plan`; "" where it is off.
    """

    names: tuple[str, ...]
    plan: str


class Crosses(NamedTuple):
    """The crosses of a conversion in a module, and its layers with tails.

    Attributes:
        key: Of the conversion.
        crosses: The crosses.
        tails: The layers with tails.
        inlined: Names of modules in it whose forwards are parts of its own, so that a tail may be
            in several of them; without crosses.
    """

    key: str
    crosses: tuple[Cross, ...]
    tails: tuple[Tail, ...] = ()
    inlined: tuple[str, ...] = ()


def cross(plan: str, x0: Tensor, x: Tensor, input: Tensor, *layers: nn.Module) -> Tensor:
    """``x0 * y + x``, with y the layers' output, by a plan where it holds."""
    keeper = None
    if not is_compiling():
        is_idle = is_idle_at(plan, rows_in(input))
        if type(plan) is Noted:
            plan.is_idle &= is_idle
            plan = str(plan)
        if is_idle:
            plan = ""
        elif is_linear(layers[0]):
            found, _ = call_again(layers[0], input, plan, layers[1:], (x0, x))
            if found is not None:
                return found
            keeper = Keeper(layers[0], layers[1:])
    elif has_no_launch(plan, static_rows(input)):
        plan = ""
    words = layers_at(input, plan) if plan else []
    parts = _parts(layers, words) if words else []
    if parts:
        found = call_parts(input, plan, words, parts, (x0, x), keeper)
        if found is not None:
            return found
    y = input
    for layer in layers:
        y = layer(y)
    return x0 * y + x


def _parts(layers: Sequence[nn.Module], words: Sequence[list[str]]) -> list[Part]:
    """The layers as parts of a chain; none if they are not its layers."""
    if len(layers) != len(words):
        return []
    parts: list[Part] = []
    for layer, known in zip(layers, words, strict=True):
        if not is_linear(layer):
            return []
        part: Part = (layer, None, known[6])
        if not is_part(part, known):
            return []
        parts.append(part)
    return parts


class CrossedForward:
    """The ``forward`` of a changed module, which is copied and pickled with the module.

    It has the crosses and tails of conversions, and the registered products of the module.

    Args:
        module: The module.
        before: The attribute ``forward`` of the module itself; None if it has none.
        settings: Those of conversions; the newest are in effect.

    Raises:
        UnsupportedError: The forward cannot be traced, or a cross, a product or a tail is not
            there.
    """

    # What a compiler reads where the forward depends on nothing but layers, in one text: each of
    # these reads is a guard that every call of the compiled model evaluates. Names of the children,
    # each with its `id`, and plans; "" if there is more.
    _known = ""
    # Names of the children that a forward reads, or None of all, and these with those in lists.
    _read: tuple[str, ...] | None = None
    _read_children: list[nn.Module | None]
    _passed: tuple[nn.Module, ...] = ()  # identities and dropout within tails
    # What now runs before a layer, and did behind it, each with its class.
    _between: tuple[tuple[nn.Module, type[nn.Module]], ...] = ()
    # Modules with children that a forward looked into, or that are in `_between`, and these.
    _nested: tuple[tuple[nn.Module, tuple[nn.Module | None, ...]], ...] = ()
    _of_one_mode: tuple[nn.Module, ...] = ()  # where the forward depends on modes
    # Modules whose forwards are parts of this one, each with its class and the forward of that.
    _inlined: tuple[tuple[nn.Module, type[nn.Module], Any], ...] = ()
    _is_stale = False  # a copy of one that was not as it was traced
    _code = ""  # of one that was copied or saved, its `_digest` then; of earlier versions none
    _missing: tuple[str, ...] = ()  # names of attributes that a forward asked for in vain
    _none: tuple[str, ...] = ()  # and of parameters and buffers that were None
    _handed_on: tuple[str, ...] = ()  # arguments that may be None
    # By shapes of inputs, whether no plan holds.
    _is_idle_at: dict[tuple[torch.Size, ...], bool] | None = None
    # Whether all that it has are tails without chains, whose plans are for compilers.
    _is_own_in_eager = False

    def __init__(
        self, module: nn.Module, before: Callable[..., Any] | None, settings: tuple[Crosses, ...]
    ) -> None:
        self.module, self.before, self.settings = module, before, settings
        _, crosses, tails, inlined = settings[-1] if settings else Crosses("", ())
        if crosses:  # in inference, which is no other mode
            graphs, self._defaults = [graph_of(module)], dict[str, Any]()
        else:
            graphs, self._defaults = graphs_of(module, inlined)
        self._arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
        if type(module) in PASSING_MASKS:
            self._handed_on = tuple(_defaults_of(module))
        missing = set(products_of(module))
        missing_tails = {tail.names for tail in tails}
        codes, passed, between = [], dict[str, None](), dict[str, None]()
        for graph in graphs:
            # An argument, so that a compiled graph of other plans needs no other function.
            with graph.inserting_before(next(iter(graph.nodes))):
                plans = graph.placeholder("cross_plans")
            for found, place in _wanted(graph, module, crosses):
                _replace(graph, found, plans, place)
            for product in reversed(products_in(graph, module)):  # which may read another
                key = product.matrix.key
                if key in products_of(module):
                    _replace_product(graph, product)
                    missing.discard(key)
            tail_places = {tail.names: len(crosses) + i for i, tail in enumerate(tails)}
            for tail in wanted_tails(graph, module, tail_places):
                between |= dict.fromkeys(tail.modules_between)
                _replace_tail(graph, tail, plans, tail_places[tail.names])
                passed |= dict.fromkeys(tail.passed_modules)
                missing_tails.discard(tail.names)
            codes.append(graph.python_code("self"))
        if missing:
            raise UnsupportedError(
                f"{type(module).__name__} has no product with {min(missing).replace('/', '.')}"
            )
        if missing_tails:
            raise UnsupportedError(
                f"{type(module).__name__} does not call {' and '.join(min(missing_tails))} in a row"
            )
        # As text, because a function that was made from text cannot be pickled.
        self._sources = list(dict.fromkeys(code.src for code in codes))
        self._names = {name: x for code in codes for name, x in code.globals.items()}
        self._children = children_of(module)
        asked = [own_reads_of(graph) for graph in graphs]
        names = None if None in asked else set().union(*asked)  # type: ignore[arg-type]
        self._values = {
            name: value for name, value in vars(module).items()
            if name not in _OF_TORCH and name != "training" and (names is None or name in names)
        }  # fmt: skip
        self._values |= without_fast_path(module)
        self._of_class = _settings_of(module, names)
        self._read = None
        if names is not None and CHILDREN not in names:  # a compiler may be unable to read others
            self._read = (*(x for x in module._modules if x in names and x != CHILD), CHILD)
        self._read_children = children_of(module, self._read)
        self._missing = tuple(sorted(x for x in names or () if _lacks(module, x)))
        tensors = {**module._parameters, **module._buffers}
        self._none = tuple(
            x for x, now in tensors.items() if now is None and (names is None or x in names)
        )
        self._own_forward = _forward_of(type(module))
        within = [module.get_submodule(name) for name in inlined]
        self._inlined = tuple((x, _plain(type(x)), _forward_of(type(x))) for x in within)
        reads = {(id(x[0]), x[1]): x for graph in graphs for x in reads_of(graph)}
        self._of_children = [x for x in reads.values() if x[1] not in (CHILDREN, MODE)]
        self._tied = _tied_names(graphs, module)
        self._passed = tuple(module.get_submodule(name) for name in passed)
        inner = (x for name in between for x in module.get_submodule(name).modules())
        self._between = tuple((x, type(x)) for x in dict.fromkeys(inner))
        listed = {x for x in module._modules.values() if isinstance(x, _LISTS)}  # are compared
        looked_into = [x for x, name, _ in reads.values() if name == CHILDREN and x not in listed]
        inner_ones = (x for x, _ in self._between if x._modules)
        self._nested = tuple(
            (x, tuple(x._modules.values()))
            for x in dict.fromkeys((*looked_into, *inner_ones, *within))
        )
        self._of_one_mode = ()
        if len(self._sources) > 1:
            asked_modes = [x for x, name, _ in reads.values() if name == MODE]
            children = [x for x in self._read_children if x is not None]
            children += [x for inner in within for x in (inner, *inner.children())]
            self._of_one_mode = tuple(dict.fromkeys((*children, *asked_modes)))
        self._compile()
        self.take_plans(crosses, tails)

    @property
    def tails(self) -> tuple[Tail, ...]:
        """The tails in effect."""
        return self.settings[-1].tails if self.settings else ()

    def take_plans(self, crosses: Sequence[Cross], tails: Sequence[Tail]) -> None:
        """Use the plans of these crosses and tails, which are those of the forward."""
        self.plans = (*(plan for _, plan in crosses), *(tail.plan for tail in tails))
        self._is_idle_at = None
        self.follow_products()
        self._known = ""
        if self._only_children is None or self._defaults or len(self._functions) > 1:
            return
        if not crosses:  # equal modules that are compiled one by one share a graph without it
            return
        names = self.module._modules
        if all(isinstance(child, Linear) for child in self._children):
            self._known = "\2".join((_identities(names, self._children), "\1".join(self.plans)))

    def follow_products(self) -> None:
        """Follow a change of the routes of registered products."""
        newest = self.settings[-1] if self.settings else Crosses("", ())
        has_chains = bool(newest.crosses) or any(tail.chain for tail in newest.tails)
        self._is_own_in_eager = not has_chains and not has_routes(self.module)

    def _compile(self) -> None:
        self._functions: list[Callable[..., Any]] = []  # in training, and in evaluation
        for source in self._sources:
            self._functions.append(_function(source, tuple(sorted(self._names.items()))))
        self._only_function = self._functions[0]
        others = (
            self._values, self._of_class, self._missing, self._none, self._of_children,
            self._tied, self._nested, self._inlined,
        )  # fmt: skip
        is_more = any(others) or any(isinstance(child, _LISTS) for child in self._children)
        self._only_children = None if is_more else tuple(self._children)

    @property
    def forward(self) -> Callable[..., Any]:
        """`run` with the signature of the original, whose names torch.export asks for."""
        run = CrossedForward.run
        # A pickle of a method has the name of its function, and asks for this property then.
        function = FunctionType(_code_for(type(self.module)), run.__globals__, "forward")
        function.__signature__ = inspect.signature(type(self.module).forward)  # type: ignore[attr-defined]
        return MethodType(function, self)

    def run(self, *args: Any, **options: Any) -> Any:
        """The module's output; this method is its ``forward``."""
        if is_compiling():
            if self._known:
                return self._run_compiled(args, options)
        elif self._is_own_in_eager:
            return self._run_own(args, options)
        module = self.module
        shapes: tuple[torch.Size, ...] | None = None  # if all that is given are usual tensors
        is_idle = None
        if not is_compiling() and not options and _are_tensors(args):
            shapes = tuple([x.shape for x in args])
            is_idle = self._is_idle_at.get(shapes) if self._is_idle_at is not None else None
            if is_idle:
                return self._run_own(args, options)
        given: tuple[Sequence[Any], dict[str, Any]] | None = (args, options)
        if shapes is None or self._defaults:
            given = self._given(args, options)
        is_same = self.is_as_traced if is_compiling() else self._is_unchanged
        if given is not None and is_same and self._is_in_one_mode:
            function = self._functions[0 if module.training else -1]
            if shapes is not None and is_idle is None:
                return self._noted(function, given[0], shapes)
            return function(module, self.plans, *given[0], **given[1])
        if given is not None and products_of(module) and not is_compiling():
            warn_once(
                f"a {type(module).__name__} was changed since its forward was traced, or its "
                "children are in another mode: its own forward runs, without FP8 products of its "
                "parameters; after a change, refresh the conversion (handle.refresh())"
            )
        return self._run_own(args, options)

    def _run_compiled(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """`run` by `_known`."""
        module = self.module
        children, plans = [part.split("\1") for part in self._known.split("\2")]
        if len(children) != len(module._modules) or _has_none((*args, *options.values())):
            return self._run_own(args, options)
        if _forward_of(type(module)) is not self._own_forward:
            return self._run_own(args, options)
        for child in children:
            name, identity = child.split("\0")
            if id(module._modules.get(name)) != int(identity):
                return self._run_own(args, options)
        return self._only_function(module, tuple(plans), *args, **options)

    def _run_own(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.before is not None:
            return self.before(*args, **options)
        return type(self.module).forward(self.module, *args, **options)

    def _noted(
        self, function: Callable[..., Any], given: Sequence[Tensor], shapes: tuple[torch.Size, ...]
    ) -> Any:
        """The traced forward; where no plan holds, its own runs at these shapes from now on.

        The traced one takes the host 6 to 9 us longer. Rows inside are taken to follow from these
        shapes; where they do not, a call may run unquantized.
        """
        noted = self._is_idle_at  # of these plans
        if noted is None or len(noted) >= _MOST_SHAPES:
            noted = self._is_idle_at = {}
        plans = tuple(map(Noted, self.plans))
        for plan in plans:
            plan.is_idle = True
        y = function(self.module, plans, *given)
        is_idle = all(plan.is_idle for plan in plans) and not products_of(self.module)
        if torch._C._get_tracing_state() is None:  # shapes of a trace are those of its tensors
            noted[shapes] = is_idle
        return y

    def _given(
        self, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]] | None:
        """Arguments without defaults; None if one is or holds None, or an optional one is given."""
        kept, named = list(args), options
        if self._defaults:
            pairs = [*zip(self._arguments, args, strict=False), *options.items()]
            for name, x in pairs:
                if name in self._defaults and not _is_same(x, self._defaults[name]):
                    return None
            if len(args) > len(self._arguments):
                return None
            kept = [x for name, x in pairs[: len(args)] if name not in self._defaults]
            named = {name: x for name, x in options.items() if name not in self._defaults}
        known = self._handed_on
        if known:
            pairs = [*zip(self._arguments, args, strict=False), *options.items()]
            is_missing = _has_none([x for name, x in pairs if name not in known])
        else:
            is_missing = _has_none((*kept, *named.values()))
        return None if is_missing else (kept, named)

    def has_setting(self, setting: Crosses) -> bool:
        """Whether these crosses and tails are those in effect, with these or other plans."""
        known = self.settings[-1] if self.settings else Crosses("", ())
        is_alike = [[x.names for x in both] for both in known[1:3]] == [
            [x.names for x in both] for both in setting[1:3]
        ]
        return is_alike and known.inlined == setting.inlined

    @property
    def is_as_traced(self) -> bool:
        """Whether children and settings of the module are as they were when it was traced."""
        if self._is_stale:
            return False
        if not _are_same(children_of(self.module, self._read), self._read_children):
            return False
        own = vars(self.module)  # torch adds attributes in compiling
        for name, value in self._values.items():
            if name not in own or (own[name] is not value and not _is_same(own[name], value)):
                return False
        if _forward_of(type(self.module)) is not self._own_forward:
            return False
        for inner_module, kind, forward in self._inlined:
            if not _runs(inner_module, kind, forward):
                return False
        for name, value in self._of_class.items():
            if name in own:
                return False
            if value == _OTHER:
                continue
            now = getattr(self.module, name, MISSING)  # Dynamo guards it, not ``name in own``
            if type(value) is Method:
                if getattr(now, "__func__", now) is not value.function:
                    return False
            elif not _is_same(now, value):
                return False
        for name in self._missing:
            if hasattr(self.module, name):
                return False
        for name in self._none:
            if getattr(self.module, name, None) is not None:
                return False
        for owner, inner in self._nested:
            if not _are_same(list(owner._modules.values()), inner):
                return False
        for child, name, value in self._of_children:
            now = getattr(child, name, MISSING)
            if type(value) is Method:
                if name == "forward" and crossed_of(child) is not None:
                    now = type(child).forward  # ours computes the same
                if getattr(now, "__func__", now) is not value.function:
                    return False
            elif type(value) is str and value == PRESENT:
                if not isinstance(now, Tensor):
                    return False
            elif not _is_same(now, value):
                return False
        for first, key, other, name in self._tied:
            if first._parameters.get(key) is not other._parameters.get(name):
                return False
        return True

    @property
    def _is_unchanged(self) -> bool:
        """`is_as_traced`, at a third of its cost where it reads nothing but children."""
        known = self._only_children
        if known is None or self._is_stale:
            return self.is_as_traced
        if _forward_of(type(self.module)) is not self._own_forward:
            return False
        return are_same(tuple(self.module._modules.values()), known)

    def _digest(self) -> str:
        """Of the code of classes that it was traced from."""
        read = [(self.module, "forward"), *((x, "forward") for x, *_ in self._inlined)]
        read += [(x, name) for x, name, value in self._of_children if isinstance(value, Method)]
        read += [(self.module, x) for x, value in self._of_class.items() if type(value) is Method]
        return " ".join(text_of_code(_plain(type(x)), name) for x, name in read)

    @property
    def _has_same_code(self) -> bool:
        """Whether classes and their functions are those of the trace; a copy looks them up anew."""
        if _forward_of(type(self.module)) is not self._own_forward:
            return False
        for x, kind, forward in self._inlined:
            if _plain(type(x)) is not kind or _forward_of(type(x)) is not forward:
                return False
        methods = [*self._of_children, *((self.module, *x) for x in self._of_class.items())]
        return all(
            _of_class(x, name) is value.function
            for x, name, value in methods
            if isinstance(value, Method)
        )

    @property
    def _is_in_one_mode(self) -> bool:
        """Whether children are in the mode of the module, where its forward depends on modes.

        And whether no dropout between calls that became one is in training: the order of calls
        would draw other numbers. And whether nothing that they move past writes to tensors now.
        """
        if (self._between or self._inlined) and not is_compiling() and has_global_hooks():
            return False
        if self._inlined and not is_compiling() and has_global_backward_hooks():
            return False
        for other, kind in self._between:
            is_other = type(other) is not kind or has_own_call(other)
            if is_other or getattr(other, "inplace", False) is True:
                return False
        for passed in self._passed:
            if passed.training and type(passed) is nn.Dropout:
                return False
        for child in self._of_one_mode:  # noqa: SIM110  # `all` takes twice as long
            if child.training is not self.module.training:
                return False
        return True

    def replicate(self) -> nn.Module:
        """A replica of the module for `nn.DataParallel`, which runs the forward of its class.

        Ours would read the parameters of the module that it was made for.
        """
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)  # type: ignore[no-untyped-call]
        for name in ("forward", _REPLICATE):
            vars(replica).pop(name)
        return replica

    def __getstate__(self) -> dict[str, Any]:
        names = {
            name: _Module(x.__name__) if isinstance(x, ModuleType) else x
            for name, x in self._names.items()
        }
        # Functions of local classes cannot be pickled: a copy looks them up, and compares the code.
        of_children = [
            (child, name, Method(None) if isinstance(value, Method) else value)
            for child, name, value in self._of_children
        ]
        of_class = {
            name: Method(None) if isinstance(x, Method) else x for name, x in self._of_class.items()
        }
        inlined = tuple((x, None, None) for x, *_ in self._inlined)
        return {**vars(self), "_names": names, "_functions": [], "_only_function": None,
                "_is_idle_at": None, "_own_forward": None, "_code": self._digest(),
                "_of_children": of_children, "_of_class": of_class, "_inlined": inlined,
                "_is_stale": self._is_stale or not self._has_same_code}  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._own_forward = _forward_of(type(self.module))
        self._inlined = tuple((x, _plain(type(x)), _forward_of(type(x))) for x, *_ in self._inlined)
        self._of_children = [
            (x, name, Method(_of_class(x, name)) if isinstance(value, Method) else value)
            for x, name, value in self._of_children
        ]
        self._of_class = {
            name: Method(_of_class(self.module, name))
            if isinstance(value, Method) or value == _METHOD else value
            for name, value in self._of_class.items()
        }  # fmt: skip
        if self._code not in ("", self._digest()):
            self._is_stale = True
        if "_read_children" not in state:  # of earlier versions
            self._read_children = self._children
        self._names = {
            name: importlib.import_module(x.name) if isinstance(x, _Module) else x
            for name, x in self._names.items()
        }
        self._compile()
        if self._is_stale:
            self._known = ""
        if self._known:  # of the original
            children, plans = self._known.split("\2")
            names = [child.split("\0")[0] for child in children.split("\1")]
            self._known = "\2".join((_identities(names, self._children), plans))
        prepare_chains(traced_way, joined_way)


def _code_for(kind: type[nn.Module]) -> CodeType:
    """The code of `CrossedForward.run` for a class of modules.

    Dynamo compiles one code a few times at most, and modules may be compiled one by one.
    """
    if kind not in _CODES:
        _CODES[kind] = CrossedForward.run.__code__.replace()
    return _CODES[kind]


@functools.lru_cache(maxsize=4096)
def _function(source: str, names: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """The function ``forward`` of a text; one for equal modules, whose guards compilers share."""
    scope = dict(names)
    exec(compile(source, "<crossed forward>", "exec"), scope)
    return scope["forward"]  # type: ignore[no-any-return]


def graph_of(module: nn.Module) -> fx.Graph:
    """The graph of a forward that all calls run.

    Raises:
        UnsupportedError: The forward cannot be traced, or has optional arguments: a trace does not
            know whether they are given.
    """
    defaults = _defaults_of(module)
    if defaults:
        raise UnsupportedError(f"argument {next(iter(defaults))} of its forward is optional")
    with uncrossed(module):
        graph = traced(module)
    follow_sums_in_place(graph, module)
    return graph


def graphs_of(
    module: nn.Module, inlined: Sequence[str] = ()
) -> tuple[list[fx.Graph], dict[str, Any]]:
    """The graphs of a forward in training and in evaluation, or one for both, and the defaults.

    They are those of calls without optional arguments, but for layers of torch that hand these on.

    Args:
        module: The module.
        inlined: Names of modules in it whose forwards are parts of the graphs.

    Raises:
        UnsupportedError: The forward cannot be traced, has any number of arguments, calls all
            children of the module and is not that of `nn.Sequential`, or a module is not there.
    """
    is_passing = type(module) in PASSING_MASKS
    defaults = {} if is_passing else _defaults_of(module)
    try:
        within = [module.get_submodule(name) for name in inlined]
    except AttributeError as error:
        raise UnsupportedError(f"a {type(module).__name__} has changed: {error}") from error
    with ExitStack() as stack:
        for each in (module, *within):
            stack.enter_context(uncrossed(each))
            stack.enter_context(_in_a_row(each))
        if not is_row(type(module)):
            stack.enter_context(_a_product(module))
        if is_passing:
            stack.enter_context(masks_passed())
        both = traced_modes(module, defaults, within)
    for graph in both:
        follow_sums_in_place(graph, module)
        if any(str(node.target).startswith(CHILD) for node in graph.nodes):
            raise UnsupportedError("its forward reads all children of the module")
    is_one = both[0].python_code("self").src == both[1].python_code("self").src
    return list(both[:1] if is_one else both), defaults


def _defaults_of(module: nn.Module) -> dict[str, Any]:
    """Optional arguments of a forward."""
    forward = type(module).forward
    if forward is nn.Module.forward:
        raise UnsupportedError("it has no forward")
    found = {}
    for name, parameter in inspect.signature(forward).parameters.items():
        is_optional = parameter.default is not parameter.empty
        is_one = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if not is_one and not (parameter.kind is parameter.KEYWORD_ONLY and is_optional):
            raise UnsupportedError(f"argument {name} of its forward is not positional")
        if is_optional and not is_setting(parameter.default):
            raise UnsupportedError(f"argument {name} of its forward is optional")
        if is_optional:
            found[name] = parameter.default
    return found


@contextmanager
def _in_a_row(module: nn.Module) -> Iterator[None]:
    """A sequence of ours as `nn.Sequential` in the block, which can be traced."""
    is_ours = type(module) is BoundedSequential
    if is_ours:
        module.__class__ = nn.Sequential
    try:
        yield
    finally:
        if is_ours:
            module.__class__ = BoundedSequential


def _forward_of(kind: type[nn.Module]) -> Any:
    """The forward of a class; a sequence of ours computes that of `nn.Sequential`."""
    return _plain(kind).forward


def _plain(kind: type[nn.Module]) -> type[nn.Module]:
    """A class, or that which it stands for."""
    return nn.Sequential if kind is BoundedSequential else kind


def _lacks(module: nn.Module, name: str) -> bool:
    """Whether a module has no such attribute; a property may raise any error."""
    is_of_class = inspect.getattr_static(type(module), name, None) is not None
    return not is_of_class and not hasattr(module, name)


def _of_class(module: nn.Module, name: str) -> Any:
    """What the class of a module has under a name, or the function of a method."""
    found = getattr(type(module), name, None)
    return getattr(found, "__func__", found)


def _runs(module: nn.Module, kind: type[nn.Module], forward: Any) -> bool:
    """Whether a call of a module runs this forward of its class alone, or ours in its place."""
    if module._forward_hooks or module._forward_pre_hooks or has_backward_hooks(module):
        return False
    if module._compiled_call_impl is not None or _plain(type(module)) is not kind:
        return False
    # torch.export replaces that of all modules while it traces.
    call = nn.Module.__call__ if is_compiling() else CALL
    if type(module).__call__ is not call or _forward_of(type(module)) is not forward:
        return False
    return crossed_of(module) is not None or not has_own_call(module)


@contextmanager
def _a_product(module: nn.Module) -> Iterator[None]:
    """A module with the child that a conversion adds, so that a trace shows who reads it."""
    if CHILD in module._modules:
        yield
        return
    module.add_module(CHILD, nn.ModuleDict({"none": nn.Identity()}))
    try:
        yield
    finally:
        del module._modules[CHILD]


def _are_tensors(values: tuple[Any, ...]) -> bool:
    for x in values:  # noqa: SIM110  # `all` takes twice as long
        if type(x) is not Tensor or x.is_nested:
            return False
    return True


def _has_none(values: Iterable[Any]) -> bool:
    """Whether one of the values is None, or a list, tuple or dict with None in it."""
    for x in values:
        if x is None:
            return True
        if isinstance(x, Tensor):
            continue
        if isinstance(x, list | tuple) and _has_none(x):
            return True
        if isinstance(x, dict) and _has_none(x.values()):
            return True
    return False


def _are_same(now: list[nn.Module | None], known: Sequence[nn.Module | None]) -> bool:
    """`are_same`, as all compilers trace it."""
    if len(now) != len(known):
        return False
    for one, other in zip(now, known, strict=True):  # noqa: SIM110
        if one is not other:
            return False
    return True


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of an attribute are one object, equal settings, or tuples of functions."""
    if is_setting(other):
        return type(one) is type(other) and bool(one == other)
    if type(one) is tuple and type(other) is tuple and all(map(callable, other)):
        return len(one) == len(other) and all(map(_is_same, one, other))  # compilers make new ones
    return one is other


def _settings_of(module: nn.Module, names: set[str] | None) -> dict[str, Any]:
    """What a module has from its class: all settings, and of others those with these names.

    A `Method` stands for a function, and `_OTHER` for all else, and without names for both.
    """
    mro = _plain(type(module)).__mro__
    found: dict[str, Any] = {}
    for base in mro[: mro.index(nn.Module)]:
        for name, value in vars(base).items():
            if name in vars(module) or name.startswith("__") or name == "forward":
                continue
            if is_setting(value):
                found.setdefault(name, value)
            elif names is None:
                found.setdefault(name, _OTHER)
            elif name in names:
                function = getattr(value, "__func__", value)
                found.setdefault(
                    name, Method(function) if isinstance(function, FUNCTIONS) else _OTHER
                )
    return found


def _tied_names(
    graphs: Iterable[fx.Graph], module: nn.Module
) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """Places that share a parameter, which graphs read by the first of its names."""
    read = {str(x.target) for graph in graphs for x in graph.nodes if x.op == "get_attr"}
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                name = f"{path}.{key}" if path else key
                places.setdefault(id(parameter), []).append((name, owner, key))
    found = []
    for (name, first, one), *others in places.values():
        if name in read:
            found += [(first, one, owner, key) for _, owner, key in others]
    return found


class _Module(NamedTuple):
    """A module of Python, which cannot be pickled itself."""

    name: str


def _identities(names: Iterable[str], children: Iterable[object]) -> str:
    """Names and identities of children; a compiler compares them by a guard that it has anyway."""
    return "\1".join(f"{name}\0{id(x)}" for name, x in zip(names, children, strict=True))


def children_of(module: nn.Module, names: Sequence[str] | None = None) -> list[nn.Module | None]:
    """The children that a forward may call, or those with these names."""
    found: list[nn.Module | None] = []
    for name, child in module._modules.items():
        if names is not None and name not in names:
            continue
        found.append(child)
        if isinstance(child, _LISTS):
            found += list(child._modules.values())
    return found


@contextmanager
def uncrossed(module: nn.Module) -> Iterator[None]:
    """The module with the ``forward`` that it has without crosses, in the block."""
    crossed = crossed_of(module)
    if crossed is None:
        yield
        return
    _set_forward(module, crossed.before)
    try:
        yield
    finally:
        _set_forward(module, crossed.forward)


def crossed_of(module: nn.Module) -> CrossedForward | None:
    """What runs the crosses of a module, or None."""
    if "forward" not in vars(module):
        return None
    found = module.forward  # Dynamo of torch 2.11 finds the owner of this one alone
    owner = found.__self__ if isinstance(found, MethodType) else None
    return owner if isinstance(owner, CrossedForward) else None


def set_crosses(
    module: nn.Module,
    crosses: Sequence[Cross],
    key: str = "",
    tails: Sequence[Tail] = (),
    inlined: Sequence[str] = (),
) -> None:
    """Run crosses and tails of a module by plans; the layers keep the FP8 weights that they read.

    Args:
        module: The module.
        crosses: The crosses.
        key: Of the conversion.
        tails: The layers with tails.
        inlined: As of `Crosses`.

    Raises:
        UnsupportedError: The forward cannot be traced, or a cross or its layers are others than
            those of its plan, or a tail is not there. The module is then as before.
    """
    for names, plan in crosses:
        if plan and not _parts([module.get_submodule(x) for x in names], words_of_plan(plan)):
            raise UnsupportedError(
                f"a chain of {plan.partition(';')[0]} cannot run {', '.join(names)} of a "
                f"{type(module).__name__}: these layers are others"
            )
    for tail in tails:
        if tail.chain and not can_run(tail, module):
            raise UnsupportedError(
                f"a chain of {tail.chain.partition(';')[0]} cannot run {', '.join(tail.names)} of "
                f"a {type(module).__name__}: they are others"
            )
    crossed = crossed_of(module)
    before = vars(module).get("forward") if crossed is None else crossed.before
    newest = Crosses(key, tuple(crosses), tuple(tails), tuple(inlined))
    settings = (*_others(module, key), newest)
    made = crossed
    if crossed is None or not crossed.is_as_traced or not crossed.has_setting(settings[-1]):
        made = CrossedForward(module, before, settings)
    assert made is not None
    _drop_weights(module, key)
    made.settings = settings
    made.take_plans(crosses, tails)
    for layer, granularity in _weights(module, settings[-1]):
        layer.keep_chain_weight(key, granularity)
    for tail in tails:
        keep_norms(module, key, norms_of(tail.chain, parts_of(tail, module)))
    prepare_chains(traced_way, joined_way)
    _set_forward(module, made.forward)


def remove_crosses(module: nn.Module, key: str = "") -> None:
    """Remove a conversion's crosses and tails from a module.

    Those of other conversions, too, if the module lacks them by now: its own forward then runs.
    """
    crossed, others = crossed_of(module), _others(module, key)
    if crossed is None or others == crossed.settings:
        return
    _drop_weights(module, key)
    _rebuild(module, crossed.before, others)


def renew_products(module: nn.Module, *, is_kept: bool = False) -> None:
    """Follow a change of the registered products of a module.

    Its forward is traced while a product has routes, unless someone set another one since.

    Args:
        module: The module.
        is_kept: Whether a traced forward stays without routes.
    """
    crossed = crossed_of(module)
    if crossed is not None:
        crossed.follow_products()
    if crossed is not None and crossed.is_as_traced and is_kept:
        return
    is_wanted = has_routes(module) or (crossed is not None and bool(crossed.settings))
    if crossed is None:
        if is_wanted and is_traceable(module):
            _rebuild(module, vars(module).get("forward"), ())
    elif not is_wanted or not crossed.is_as_traced:
        _rebuild(module, crossed.before, crossed.settings)


def has_routes(module: nn.Module) -> bool:
    """Whether a registered product of a module has routes."""
    return any(product.is_special for product in products_of(module).values())


def _rebuild(
    module: nn.Module, before: Callable[..., Any] | None, settings: tuple[Crosses, ...]
) -> None:
    """Set the forward of a module with these crosses and its products, or its own forward."""
    forward = before
    if settings or has_routes(module):
        try:
            forward = CrossedForward(module, before, settings).forward
        except UnsupportedError as error:
            warnings.warn(f"{error}: its own forward runs until a refresh", stacklevel=3)
            for setting in settings:
                _drop_weights(module, setting.key)
    _set_forward(module, forward)


def _set_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    attributes = vars(module)
    attributes.pop(_REPLICATE, None)
    if forward is None:
        attributes.pop("forward", None)
        return
    module.forward = forward
    crossed = getattr(forward, "__self__", None)
    if isinstance(crossed, CrossedForward):
        attributes[_REPLICATE] = crossed.replicate


def _others(module: nn.Module, key: str) -> tuple[Crosses, ...]:
    crossed = crossed_of(module)
    return tuple(x for x in (crossed.settings if crossed else ()) if x.key != key)


def _drop_weights(module: nn.Module, key: str) -> None:
    drop_norms(module, key)
    crossed = crossed_of(module)
    for setting in crossed.settings if crossed else ():
        if setting.key == key:
            for layer, granularity in _weights(module, setting):
                layer.drop_chain_weight(key, granularity)


def _weights(module: nn.Module, setting: Crosses) -> Iterator[tuple[Linear, str]]:
    """The layers of chains, each with the granularity of its FP8 weight."""
    children = dict(module.named_modules(remove_duplicate=False))
    chains = [([children.get(x) for x in names], plan) for names, plan in setting.crosses]
    chains += [(tail.layers(children), tail.chain) for tail in setting.tails]
    for layers, plan in chains:
        for linear, layer in zip(layers, read_plan(plan)[0] if plan else (), strict=False):
            # It is no longer one where it was removed, or its conversion undone.
            if isinstance(linear, Linear) and layer.weight is not Granularity.NONE:
                yield linear, layer.weight.value


def _wanted(
    graph: fx.Graph, module: nn.Module, crosses: Sequence[Cross]
) -> list[tuple[FoundCross, int]]:
    """The crosses of a graph that run by plans, the last ones first, and the places of plans."""
    wanted = {names: place for place, (names, _) in enumerate(crosses)}
    found = []
    for one in crosses_in(graph, module):
        for count in range(len(one.names), 0, -1):
            names = one.names[-count:]
            if names in wanted and not one.why:
                found.append((one._replace(layers=one.layers[-count:]), wanted[names]))
                break
    missing = wanted.keys() - {one.names for one, _ in found}
    if missing:
        raise UnsupportedError(f"{type(module).__name__} has no cross of {', '.join(min(missing))}")
    return found[::-1]


def _replace_tail(graph: fx.Graph, found: FoundTail, plans: fx.Node, place: int) -> None:
    """Replace a layer with its tail by one call, at the place of the layer.

    Where what a wide tail reads comes later, at that of its end.
    """
    arguments, at = found.arguments, found.layer
    while at is not found.end and at not in arguments:
        at = at.next
    with graph.inserting_before(found.layer if at is found.end else found.end):
        plan = graph.call_function(operator.getitem, (plans, place))
        behind = [
            x if isinstance(x, fx.Node) or x.endswith("()") else graph.get_attr(x)
            for x in (str(found.layer.target), *arguments)
        ]
        call = graph.call_function(run_tail, (plan, found.layer.args[0], *behind))
    found.end.replace_all_uses_with(call)
    for node in (*reversed(found.behind), found.layer):
        graph.erase_node(node)


def _replace_product(graph: fx.Graph, found: FoundProduct) -> None:
    """Replace a product by a call of its `RawProduct`."""
    with graph.inserting_before(found.node):
        given = (found.x, found.weight, found.bias, found.form)
        call = graph.call_module(f"{CHILD}.{found.matrix.key}", given)
    found.node.replace_all_uses_with(call)
    graph.erase_node(found.node)


def _replace(graph: fx.Graph, found: FoundCross, plans: fx.Node, place: int) -> None:
    """Replace a cross by one call; crosses that come later are already replaced."""
    with graph.inserting_before(found.sum):
        plan = graph.call_function(operator.getitem, (plans, place))
        layers = [graph.get_attr(name) for name in found.names]
        inputs = (found.x0, found.x, found.layers[0].args[0])
        call = graph.call_function(cross, (plan, *inputs, *layers))
    found.sum.replace_all_uses_with(call)
    for node in (found.sum, found.product, *reversed(found.layers)):
        graph.erase_node(node)
