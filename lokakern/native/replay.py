"""The library's state in this process, and the two wrappers that use it."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from lokakern import arrays, driver, jit, scratch
from lokakern.errors import CompilationError, LaunchError
from lokakern.native import build
from lokakern.native.record import Recorder, Recording, result_template
from lokakern.norm import Norm
from lokakern.quantized_tensor import QuantizedTensor
from lokakern.types import ErrorBudget, Format, Granularity

_LOG = logging.getLogger("lokakern")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_MODES = ("", "off", "wait")
# Arguments beside tensors and numbers; calls with others stay in Python.
_CONSTANTS = (str, Format, Granularity, ErrorBudget, Norm)


class _Native:
    """The library: not asked for yet, being built, loaded, or not to be had and why."""

    def __init__(self) -> None:
        self.module: Any = None
        self.replay: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.call_layer: Callable[..., Any] | None = None  # see layer.h
        self.call_chain: Callable[..., Any] | None = None  # as call_layer
        self.call_sequence: Callable[..., Any] | None = None  # see sequence.h
        self.call_op: Callable[..., Any] | None = None  # see python.cpp
        self.reason = "not used yet"
        self.generation = 0  # of choices
        self.is_asked = False
        self._builder: threading.Thread | None = None
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def ask(self) -> None:
        """Load the library, or begin to build it; once."""
        if self.is_asked:
            return
        with self._lock:
            is_first, self.is_asked = not self.is_asked, True
        if is_first:
            try:
                self._begin()
            except CompilationError:
                self.is_asked = False  # each call says so
                raise

    def need(self) -> None:
        """Load the library, and wait until it is built.

        Raises:
            CompilationError: The library is off, or does not compile.
        """
        if self.module is not None:
            return
        self.is_asked = True
        cxx, outlook = build.compiler(), self.outlook()
        if outlook.startswith("off") or cxx is None:
            raise CompilationError(f"the native library is needed here, but is {outlook}")
        self._take_built(cxx)

    def outlook(self) -> str:
        """What the first call on a GPU will find."""
        mode = os.environ.get("LOKAKERN_NATIVE", "")
        if mode not in _MODES:
            raise CompilationError(
                f"LOKAKERN_NATIVE is {mode!r}; expected 'off', 'wait', or nothing"
            )
        if mode == "off":
            return "off: LOKAKERN_NATIVE is 'off'"
        cxx = build.compiler()
        if cxx is None:
            return "off: no C++ compiler (g++, clang++ or that of CXX)"
        return f"loaded at the first call on a GPU, built by {cxx}"

    def _begin(self) -> None:
        self.reason = self.outlook()
        cxx = build.compiler()
        if self.reason.startswith("off") or cxx is None:
            return
        try:
            if os.environ.get("LOKAKERN_NATIVE") == "wait" or build.is_whole(
                build.library_path(cxx)
            ):
                self._load(cxx)
                return
            self.reason = f"being built by {cxx}"
            build_it = functools.partial(self._load, cxx)
            builder = threading.Thread(target=build_it, daemon=True, name="lokakern-build")
            builder.start()
            self._builder = builder
        except (OSError, RuntimeError) as error:  # no access to the cache, or no more threads
            self._give_up(error)

    def wait(self) -> bool:
        """Wait for a build that has begun; returns whether it was under way."""
        builder = self._builder
        if builder is None:
            return False
        was_under_way = builder.is_alive()
        builder.join()
        return was_under_way

    def _load(self, cxx: str) -> None:
        try:
            self._take_built(cxx)
        except Exception as error:  # a build is never worth a call
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.reason = f"off: {error}"
        _LOG.warning(
            "calls are made in Python, at a higher host cost: the C++ library cannot be built or "
            "loaded: %s. LOKAKERN_CACHE names a folder for it, and LOKAKERN_NATIVE=off does "
            "without it", error,
        )  # fmt: skip

    def _take_built(self, cxx: str) -> None:
        with self._loading:
            if self.module is None:
                self.take(build.load(build.build(cxx)), f"in use, built by {cxx}")

    def take(self, module: Any, reason: str) -> None:
        """Use a loaded library from now on."""
        module.bind(QuantizedTensor, LaunchError, _CONSTANTS)
        scratch.on_owned(module.own)
        arrays.serve(module.bind_arrays)
        self.module, self.reason = module, reason
        self.replay, self.call_layer = module.replay, module.call_layer
        self.call_op, self.call_chain = module.call_op, module.call_chain
        self.call_sequence = module.call_sequence


NATIVE = _Native()


@dataclass
class Kept:
    """Calls of ops on GPUs, for a file of plans.

    Attributes:
        calls: The recorded calls by signature, or the reasons against their plans.
        unrecorded: Names of the ops of calls that Python made without recording them.
    """

    calls: dict[bytes, Recording | str] = field(default_factory=dict)
    unrecorded: list[str] = field(default_factory=list)


_KEPT: Kept | None = None


def status() -> str:
    """Whether warm calls are replayed in C++, or why not; loads nothing."""
    return NATIVE.reason if NATIVE.is_asked else NATIVE.outlook()


def wait() -> bool:
    """Wait until the library is built, if its build has begun; returns whether it was under way."""
    return NATIVE.wait()


def is_keeping() -> bool:
    """Whether calls of ops are kept for a file of plans, beside a package with its own calls."""
    return _KEPT is not None


def forget() -> None:
    """Discard all plans, because choices may have changed."""
    with _INSTALLING:
        NATIVE.generation += 1
        if _KEPT is not None:
            _KEPT.calls.clear()
        if NATIVE.module is not None:
            NATIVE.module.clear()


@contextmanager
def keeping() -> Iterator[Kept]:
    """Keep the calls of ops that all threads make inside the block, and record them anew."""
    global _KEPT
    NATIVE.need()
    forget()
    _KEPT = kept = Kept()
    try:
        yield kept
    finally:
        _KEPT = None


_REPLAYED: list[Callable[..., Any]] = []  # for good: signatures hold their addresses


def replayed(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Replay the function's warm calls. Its arguments are tensors, or arrays, and constants."""
    _REPLAYED.append(function)
    first = arrays.first_name(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        replay = NATIVE.replay
        if replay is None or jit.recorder is not None:
            if _has_gpu():
                NATIVE.ask()
        else:
            found = replay(function, args, kwargs)
            if type(found) is bytes:
                return _recorded(found, NATIVE.module.inputs(args, kwargs), function, args, kwargs)  # type: ignore[no-any-return]
            if found is not None:
                return found  # type: ignore[no-any-return]
        if isinstance(args[0] if args else kwargs.get(first), arrays.OWN):
            return function(*args, **kwargs)
        return arrays.call(function, args, kwargs)  # type: ignore[no-any-return]

    return call


def recorded_op(
    library: torch.library.Library, schema: str, implementation: Callable[..., Any], **options: Any
) -> None:
    """Define an op whose calls on GPUs are replayed, and NAME_cold, which makes and records them.

    Args:
        library: Where the ops are defined.
        schema: Of the op.
        implementation: The op on any device.
        options: Of `torch.library.Library.define`.
    """
    name, _, rest = schema.partition("(")

    def cold(*args: Any) -> Any:
        module = NATIVE.module  # None while another thread is about to take what it loaded
        signature = None if module is None else module.recorded()
        if signature is None:
            if _KEPT is not None:
                _KEPT.unrecorded.append(name)
            return implementation(*args)
        given = [x for arg in args for x in (arg if isinstance(arg, list) else (arg,))]
        inputs = [x for x in given if isinstance(x, torch.Tensor)]
        return _recorded(signature, inputs, implementation, args, {}, name)

    library.define(schema, **options)
    library.impl(name, _asking(implementation), "CompositeExplicitAutograd")
    library.define(f"{name}_cold({rest}", **options)
    library.impl(f"{name}_cold", cold, "CompositeExplicitAutograd")


def plain_op(
    library: torch.library.Library, schema: str, implementation: Callable[..., Any], **options: Any
) -> None:
    """Define an op that always runs in Python, such as one that writes to arguments.

    Args:
        library: Where the op is defined.
        schema: Of the op.
        implementation: The op on any device.
        options: Of `torch.library.Library.define`.
    """
    name = schema.partition("(")[0]

    @functools.wraps(implementation)
    def call(*args: Any) -> Any:
        if _KEPT is not None:
            _KEPT.unrecorded.append(name)
        return implementation(*args)

    library.define(schema, **options)
    library.impl(name, call, "CompositeExplicitAutograd")


def _asking(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation where the library is not loaded; it asks for it on a GPU."""

    @functools.wraps(implementation)
    def call(*args: Any) -> Any:
        if NATIVE.replay is None and _has_gpu():
            NATIVE.ask()
        return implementation(*args)

    return call


def _has_gpu() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call,no-any-return]


_RECORDING = threading.Lock()
_INSTALLING = threading.RLock()  # so that no plan of older choices is installed after `forget`


def _recorded(
    signature: bytes,
    inputs: list[torch.Tensor],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    op: str = "",
) -> Any:
    """The result of a call, of an op if named, and its plan in the library's book."""
    if not _RECORDING.acquire(blocking=False):
        return function(*args, **kwargs)  # another thread records
    generation = NATIVE.generation
    try:
        driver.make_room_for_maps()
        jit.recorder = recorder = Recorder(inputs, NATIVE.module.dtype_code)
        with recorder:
            result = function(*args, **kwargs)
    finally:
        jit.recorder = None
        _RECORDING.release()
    is_written = op and result is None  # to an argument, as the schema of the op says
    template = None if is_written else result_template(result, recorder)
    with _INSTALLING:
        if generation == NATIVE.generation:
            _install(signature, recorder, template, op)
    return result


def _install(signature: bytes, recorder: Recorder, template: Any, op: str) -> None:
    """Put a recorded call into the library's book, and keep that of an op for a file of plans."""
    first = recorder.inputs[0].device
    place = (first.index or 0, first.type == "cuda", recorder.constants)
    recording = recorder.recording()
    if recording is not None:
        try:
            NATIVE.module.install(signature, recording.text(), *place, template)
        except (ValueError, RuntimeError) as error:  # such as too many steps
            recorder.refuse(f"has no plan: {error}")
            recording = None
    if recording is None:
        NATIVE.module.install(signature, None, *place, None)
    if op and _KEPT is not None:
        shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in recorder.inputs)
        _KEPT.calls[signature] = recording or f"{op}({shapes}) {recorder.reason}"
