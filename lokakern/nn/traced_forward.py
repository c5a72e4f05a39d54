"""Traced forwards: the graph of a module that calls layers, and the forward of a changed graph."""

from __future__ import annotations

import collections
import copy
import dis
import functools
import hashlib
import heapq
import inspect
import operator
import os
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.fx.proxy import Attribute

from lokakern.errors import UnsupportedError

_GRAPHS: WeakKeyDictionary[Any, fx.Graph] = WeakKeyDictionary()  # of rewritten forwards


_OF_MODULES = frozenset(dir(nn.Module()))
_OF_OTHERS = ("_modules", "_parameters", "_buffers")  # names that are no attributes
_HARMLESS = ("training", "forward", "__class__")  # others may show all children or attributes
_ALL = "*"
FUNCTIONS = (FunctionType, BuiltinFunctionType, staticmethod, classmethod)
_SETTINGS = (bool, int, float, str, type(None))
CHILDREN, MODE = "_modules", "training"  # in the place of names: what is no attribute to compare
MISSING, PRESENT = "\0missing", "\0present"  # in the place of a value; of a parameter that is one
# What the forward of a graph read of other modules: the module, the name and the value.
_READS: WeakKeyDictionary[fx.Graph, list[tuple[nn.Module, str, Any]]] = WeakKeyDictionary()
# Names of attributes and children of the module itself that it read, unless it may read all.
_OWN_READS: WeakKeyDictionary[fx.Graph, set[str]] = WeakKeyDictionary()
_CONSTANT = "_tensor_constant"  # attributes that fx makes of tensors in a forward
_SDP = ("flash", "mem_efficient", "math", "cudnn")
_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
_OF_NN = os.path.join(_OF_TORCH, "nn") + os.sep


# Functions of a list of tensors, which ask for its type; a list input of a forward is a proxy.
_OF_LISTS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack")
# Layers of torch that hand their optional arguments on, with functions that take None for a mask.
PASSING_MASKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_OF_MASKS = ("_canonical_mask", "_none_or_dtype")
_MAY_BE_MISSING = ("get", "pop", "setdefault")
_CONTAINERS = (
    list, dict, set, collections.OrderedDict, collections.defaultdict, collections.Counter,
    collections.deque,
)  # fmt: skip


def in_place_add(x: Any, y: Any) -> Any:
    """``x += y`` in a graph; fx makes a sum of it, which leaves other names of x as they were."""
    x += y
    return x


def in_place_subtract(x: Any, y: Any) -> Any:
    """``x -= y``."""
    x -= y
    return x


def in_place_multiply(x: Any, y: Any) -> Any:
    """``x *= y``."""
    x *= y
    return x


def in_place_divide(x: Any, y: Any) -> Any:
    """``x /= y``."""
    x /= y
    return x


class Method(NamedTuple):
    """In the place of a value: the function of a method, which a forward read of a class."""

    function: Any


class _Proxy(fx.Proxy):
    """A proxy that forwards cannot ask for what it does not know: its type and attributes."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        code = sys._getframe(1).f_code
        is_of_torch = code.co_filename.startswith(_OF_TORCH) and code.co_name != "is_tensor"
        if not is_of_torch and code.co_filename != __file__:
            raise UnsupportedError("its forward depends on the type of a tensor")
        return _Proxy

    def __getattr__(self, name: str) -> Any:
        frame = sys._getframe(1)
        code = frame.f_code
        # hasattr(x, ...) and getattr(x, ..., default) are calls; x.name is none.
        is_call = dis.opname[code.co_code[frame.f_lasti]].startswith("CALL")
        if is_call and not code.co_filename.startswith(_OF_TORCH):
            raise UnsupportedError(f"its forward asks whether a tensor has an attribute {name}")
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not sys._getframe(1).f_code.co_filename.startswith(_OF_TORCH):
            raise UnsupportedError(f"its forward sets the attribute {name} of a tensor")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        raise UnsupportedError("its forward asks for the length of an input")

    def __contains__(self, _: Any) -> bool:
        raise UnsupportedError("its forward asks what is in an input")

    def _in_place(self, function: Callable[..., Any], other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return self._in_place(in_place_add, other)

    def __isub__(self, other: Any) -> Any:
        return self._in_place(in_place_subtract, other)

    def __imul__(self, other: Any) -> Any:
        return self._in_place(in_place_multiply, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._in_place(in_place_divide, other)

    def _refused(self, _: Any) -> Any:
        raise UnsupportedError("its forward changes a tensor in place by an operator such as **=")

    __ifloordiv__ = __imod__ = __ipow__ = __iand__ = __ior__ = __ixor__ = _refused
    __ilshift__ = __irshift__ = __imatmul__ = _refused


class _Attribute(Attribute, _Proxy):
    """An attribute of a proxy, or a method that is called next."""


class _Tracer(fx.Tracer):
    # Else reads of buffers are constants, and writes to them happen when the forward is traced.
    proxy_buffer_attributes = True

    def __init__(self, defaults: Mapping[str, Any], inlined: Collection[nn.Module]) -> None:
        super().__init__()
        self._modes, self._defaults = _modes(), defaults
        self._inlined = {id(module) for module in inlined}

    def create_args_for_root(self, *arguments: Any, **options: Any) -> tuple[Any, list[Any]]:
        function, given = super().create_args_for_root(*arguments, **options)
        for place, x in enumerate(given):
            name = str(x.node.target) if isinstance(x, fx.Proxy) else ""
            if name in self._defaults:
                self.graph.erase_node(x.node)
                given[place] = self._defaults[name]
        return function, given

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self._inlined

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        raise UnsupportedError(
            "its forward loops over an input, and how often is known in a call only: unpack it "
            "(x, y = xs), or read its items by index or key"
        )

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_proxy(self, kind: str, target: Any, *arguments: Any, **options: Any) -> fx.Proxy:
        if _modes() != self._modes:
            raise UnsupportedError(
                "its forward changes the mode of gradients or autocast, or another one"
            )
        if kind == "call_method" and target in _MAY_BE_MISSING:
            raise UnsupportedError(f"its forward calls {target}(), which may return nothing")
        return super().create_proxy(kind, target, *arguments, **options)


def _modes() -> tuple[object, ...]:
    """What blocks such as ``torch.no_grad()`` change, which a graph does not show."""
    devices = ("cpu", "cuda")
    is_cast = [(torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in devices]
    of_attention = [getattr(torch.backends.cuda, f"{x}_sdp_enabled")() for x in _SDP]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *is_cast,
        *of_attention,
        torch.get_float32_matmul_precision(),
        torch.initial_seed(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),  # as of checkpoint
    )


@contextmanager
def _modes_set(*, are_on: bool) -> Iterator[None]:
    """A block with gradients and autocast, or one without, of inference."""
    were = [torch.is_autocast_enabled(x) for x in ("cpu", "cuda")]
    try:
        for device in ("cpu", "cuda"):
            torch.set_autocast_enabled(device, are_on)
        with torch.inference_mode(not are_on), torch.set_grad_enabled(are_on):
            yield
    finally:
        for device, was in zip(("cpu", "cuda"), were, strict=True):
            torch.set_autocast_enabled(device, was)


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
    parent: nn.Module,
    defaults: Mapping[str, Any] | None = None,
    inlined: Collection[nn.Module] = (),
) -> tuple[fx.Graph, fx.Graph]:
    """The graphs of the forward of a module in training and in evaluation.

    Args:
        parent: The module; its children are not traced, but for these.
        defaults: Arguments that have these values, and are none of the graphs.
        inlined: Modules in it whose forwards are traced, too, where it calls them.

    Raises:
        UnsupportedError: The forward cannot be traced, is not that of the class, or does what a
            graph does not show: it sets attributes of the module, asks for the type or attributes
            of a tensor, reads or changes the mode of gradients or autocast, draws random numbers,
            or makes tensors.
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
    kept = _Kept(parent)
    # A forward may ask its children, too.
    were_training = {m: m.training for m in parent.modules() if "training" in vars(m)}
    state, draws = random.getstate(), torch.get_rng_state()
    graphs: list[fx.Graph] = []
    sources: list[str] = []
    try:
        # The modes that a graph does not show are others in the second one.
        for mode, are_on in ((True, True), (False, False), (True, False), (False, True)):
            for module in were_training:
                module.training = mode
            reads: list[tuple[nn.Module, str, Any]] = []
            own_reads = set[str]()
            noted = _settings_read(parent, reads, own_reads)
            lists = _taken(torch, _OF_LISTS)
            with _modes_set(are_on=are_on), noted, lists, _functions_refused():
                graphs.append(_Tracer(defaults or {}, inlined).trace(parent))
            _READS[graphs[-1]] = reads
            if is_row(type(parent)):
                own_reads.add(CHILDREN)
            if _ALL not in own_reads and not looks_up(type(parent)):
                _OWN_READS[graphs[-1]] = own_reads
            sources.append(graphs[-1].python_code("self").src)
            if sources[1:] == sources[:1]:
                break
    except UnsupportedError:
        raise
    except Exception as error:  # fx raises whatever a forward does with a proxy
        raise UnsupportedError(f"torch.fx cannot trace it: {error}") from error
    finally:
        for module, was_training in were_training.items():
            module.training = was_training
        written = kept.restore()
    if written:
        raise UnsupportedError(f"its forward sets the attribute {min(written)}")
    if random.getstate() != state or not torch.equal(torch.get_rng_state(), draws):
        random.setstate(state)
        torch.set_rng_state(draws)
        raise UnsupportedError("its forward draws random numbers, which a graph would keep")
    if any(str(node.target).startswith(_CONSTANT) for graph in graphs for node in graph.nodes):
        raise UnsupportedError("its forward makes a tensor of no input, which a graph would keep")
    if sources[2:] not in ([], sources[:2]):
        raise UnsupportedError(
            "its forward depends on the mode of gradients or autocast, or differs in each call"
        )
    return graphs[0], graphs[1]


def is_setting(value: Any) -> bool:
    """Whether a value is compared; tuples, because compilers make new ones."""
    if isinstance(value, tuple):
        return all(is_setting(x) for x in value)
    return isinstance(value, _SETTINGS)


def reads_of(graph: fx.Graph) -> list[tuple[nn.Module, str, Any]]:
    """What a traced forward read of children, and of theirs, which its graph has as constants.

    `CHILDREN` stands for all children of such a module, `MODE` for its mode; `PRESENT` is the value
    of a parameter, and a `Method` that of a method.
    """
    return _READS.get(graph, [])


def own_reads_of(graph: fx.Graph) -> set[str] | None:
    """Names of attributes and children of the module itself that a traced forward read.

    `CHILDREN` is among them if it read all children, and None stands for all of both.
    """
    return _OWN_READS.get(graph)


def text_of_code(kind: type[nn.Module], name: str) -> str:
    """A digest of the code that a class of modules and its bases have under a name.

    It changes with what the functions do, their defaults and what they enclose, and not with the
    file and the lines that they are in.
    """
    mro = kind.__mro__
    held = (vars(base).get(name) for base in mro[: mro.index(nn.Module)])
    parts = [_parts_of(getattr(x, "__func__", x), set()) for x in held if x is not None]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _parts_of(x: Any, seen: set[int]) -> Any:
    """What a function, its code or a value is, as what `repr` tells alike in each process."""
    if isinstance(x, frozenset):
        return sorted(repr(_parts_of(y, seen)) for y in x)
    if isinstance(x, tuple):
        return [_parts_of(y, seen) for y in x]
    if isinstance(x, CodeType):
        known = (x.co_code, x.co_flags, x.co_argcount, x.co_kwonlyargcount, x.co_posonlyargcount)
        names = (x.co_names, x.co_varnames, x.co_freevars)
        return known, names, [_parts_of(y, seen) for y in x.co_consts]
    if is_setting(x) or isinstance(x, bytes | complex):
        return repr(x)
    if not isinstance(x, FunctionType) or id(x) in seen:
        return getattr(x, "__qualname__", type(x).__qualname__)
    seen.add(id(x))
    try:
        cells = inspect.getclosurevars(x).nonlocals.items()
    except ValueError:  # one is empty
        cells = {}.items()
    given = (x.__defaults__ or (), *sorted((x.__kwdefaults__ or {}).items()), *sorted(cells))
    return _parts_of(x.__code__, seen), [_parts_of(y, seen) for y in given]


def is_row(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class is that of `nn.Sequential`, as in subclasses of users."""
    of = nn.Sequential
    return kind.forward is of.forward and kind.__iter__ is of.__iter__  # type: ignore[attr-defined]


def looks_up(kind: type[nn.Module]) -> bool:
    """Whether a class of modules has an own way to look attributes up."""
    is_usual = kind.__getattribute__ is object.__getattribute__
    return not is_usual or kind.__getattr__ is not nn.Module.__getattr__


@contextmanager
def _settings_read(
    parent: nn.Module, found: list[tuple[nn.Module, str, Any]], own: set[str]
) -> Iterator[None]:
    """Note what a forward reads of other modules in the block, and its own names."""

    def read(self: nn.Module, name: str) -> Any:
        if name == "__dict__" and self is not parent and not _is_of_torch(sys._getframe(1)):
            raise UnsupportedError("its forward reads all attributes of a child (vars, __dict__)")
        if self is parent and name not in _OF_MODULES:
            own.add(name)  # also of what it lacks
        elif self is parent and name not in _HARMLESS and _is_read_by_user():
            own.add(_ALL)
        try:
            value = object.__getattribute__(self, name)
        except AttributeError:
            if self is not parent and _is_read_by_user():
                found.append((self, CHILDREN, ()))  # one of them, or a parameter
                if not any(name in vars(self)[x] for x in _OF_OTHERS):
                    found.append((self, name, MISSING))
                for tensors in (vars(self)["_parameters"], vars(self)["_buffers"]):
                    if name in tensors:
                        is_there = tensors[name] is not None
                        found.append((self, name, PRESENT if is_there else None))
            raise
        if self is not parent:
            is_own = name not in _OF_MODULES and name in object.__getattribute__(self, "__dict__")
            is_known = is_own or name in (CHILDREN, MODE) or is_setting(value)
            is_method = type(value) is MethodType and (name == "forward" or name not in _OF_MODULES)
            if is_method and getattr(type(self), name, None) is value.__func__ and not is_own:
                if _is_read_by_user():
                    found.append((self, name, Method(value.__func__)))
            elif is_known and _is_read_by_user():
                found.append((self, name, value))
            elif name not in _OF_MODULES and _is_read_by_user():
                function = getattr(value, "__func__", value)
                held = inspect.getattr_static(type(self), name, None)
                if isinstance(held, FUNCTIONS) and isinstance(function, FUNCTIONS):
                    found.append((self, name, Method(function)))
        return value

    # Modules have none of their own, as their __getattr__ gets only what is no attribute.
    nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__


def _is_of_torch(frame: FrameType) -> bool:
    """Whether code is torch's or ours."""
    file = frame.f_code.co_filename
    return file.startswith(_OF_TORCH) or file == __file__


def _is_read_by_user() -> bool:
    """Whether the code that reads an attribute is not torch's; of the hook on reads.

    Methods of modules read for the code that calls them.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OF_NN):
        frame = frame.f_back
    return frame is not None and not _is_of_torch(frame)


@contextmanager
def _functions_refused() -> Iterator[None]:
    """Refuse forwards in the block that call an autograd function, whose gradient would be lost."""
    kind = torch.autograd.Function
    own = vars(kind)["apply"]

    def apply(cls: Any, *given: Any, **options: Any) -> Any:
        if any(type(x) in (_Proxy, _Attribute) for x in (*given, *options.values())):
            raise UnsupportedError(f"its forward calls the autograd function {cls.__name__}")
        return own.__get__(None, cls)(*given, **options)

    kind.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        kind.apply = own  # type: ignore[method-assign]


@contextmanager
def _taken(owner: ModuleType, names: Sequence[str]) -> Iterator[None]:
    """Let functions take a proxy for what they ask something of in the block, and be calls."""

    def taking(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            for given in (*arguments, *options.values()):
                if type(given) in (_Proxy, _Attribute):
                    tracer = given.tracer
                    return tracer.create_proxy("call_function", function, arguments, options)
            return function(*arguments, **options)

        return call

    functions = {name: getattr(owner, name) for name in names}
    try:
        for name, function in functions.items():
            setattr(owner, name, taking(function))
        yield
    finally:
        for name, function in functions.items():
            setattr(owner, name, function)


@contextmanager
def masks_passed() -> Iterator[None]:
    """Let forwards of `PASSING_MASKS` be traced in the block for any masks, without a fast path."""
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _taken(nn.functional, _OF_MASKS):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)


def writes(node: fx.Node, parent: nn.Module) -> bool:
    """Whether a node of a graph may write to a tensor, as far as its name and options say."""
    target = node.target
    if node.op == "call_module":
        called = parent.get_submodule(str(target)).modules()
        return any(getattr(module, "inplace", False) is True for module in called)
    if node.op not in ("call_method", "call_function"):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()  # type: ignore[no-untyped-call]
        return any(getattr(target, name)._schema.is_mutable for name in names)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name == "setitem" or name.startswith("in_place_") or name.rstrip("_") + "_" == name:
        return True
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    try:
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no Python function
        return False
    return bool(bound.arguments.get("inplace"))


def is_traceable(parent: nn.Module) -> bool:
    """Whether the forward of a module is that of its class, or of a mod."""
    own = vars(parent).get("forward")
    return own is None or getattr(own, "__func__", None) in _GRAPHS


class _Kept:
    """The attributes of a module and of its children, and the contents of their containers."""

    def __init__(self, parent: nn.Module) -> None:
        self._attributes = [(vars(module), dict(vars(module))) for module in parent.modules()]
        self._contents: dict[int, tuple[Any, Any]] = {}
        for own, _ in self._attributes:
            self._keep(own.values())

    def _keep(self, values: Any) -> None:
        for x in values:
            if type(x) in _CONTAINERS and id(x) not in self._contents:
                self._contents[id(x)] = (x, copy.copy(x))
                self._keep(x.values() if isinstance(x, dict) else x)

    def restore(self) -> set[str]:
        """Undo what tracing set; the names of the attributes that it set or changed."""
        written: set[str] = set()
        for own, before in self._attributes:
            if _is_same(own, before):
                continue
            names = own.keys() | before.keys()
            written |= {x for x in names if own.get(x, self) is not before.get(x, self)}
            own.clear()
            own.update(before)
        for x, before in self._contents.values():
            if not _is_same(x, before):
                written |= self._names_of(x)
                x.clear()
                add = x.extend if isinstance(x, list | collections.deque) else x.update
                add(before)
        # Constants of fx are different in each graph.
        return {name for name in written if not name.startswith(_CONSTANT)}

    def _names_of(self, container: Any) -> set[str]:
        found = {name for own, _ in self._attributes for name, x in own.items() if x is container}
        return found or {"in a container"}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    if isinstance(one, set):
        return {id(x) for x in one} == {id(x) for x in other}
    return all(map(operator.is_, one, other))


def _sort(graph: fx.Graph) -> None:
    """Put nodes behind their inputs; others keep their order, as some write in place."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    missing = {node: len(node.all_input_nodes) for node in places}
    ready = [(place, node) for node, place in places.items() if not missing[node]]
    last = next(node for node in places if node.op == "output")
    while ready:
        _, node = heapq.heappop(ready)
        last.prepend(node)  # which leaves the output itself where it is
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (places[user], user))


def forward_of(parent: nn.Module, graph: fx.Graph) -> Callable[..., Any]:
    """The function of a changed graph, to be a forward of its module."""
    _sort(graph)
    rewritten = fx.GraphModule(parent, graph)
    forward: Callable[..., Any] = type(rewritten).forward
    _GRAPHS[forward] = rewritten.graph
    return forward
