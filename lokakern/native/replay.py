"""The library's state in this process, and the two wrappers that use it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from lokakern import jit, scratch
from lokakern.errors import CompilationError, LaunchError
from lokakern.native import build
from lokakern.native.record import Recorder, Recording, result_template
from lokakern.quantized_tensor import QuantizedTensor

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MODES = ("", "off", "wait")


class _Native:
    """The library: not asked for yet, being built, loaded, or not to be had and why."""

    def __init__(self) -> None:
        self.module: Any = None
        self.replay: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.reason = "not used yet"
        self.generation = 0  # of choices
        self.is_asked = False
        self._lock = threading.Lock()

    def ask(self) -> None:
        """Load the library, or begin to build it; once."""
        with self._lock:
            is_first, self.is_asked = not self.is_asked, True
        if is_first:
            self._begin()

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
        if os.environ.get("LOKAKERN_NATIVE") == "wait" or build.library_path(cxx).exists():
            self._load(cxx)
            return
        self.reason = f"being built by {cxx}"
        threading.Thread(target=self._load, args=(cxx,), daemon=True, name="lokakern-build").start()

    def _load(self, cxx: str) -> None:
        try:
            module = build.load(build.build(cxx))
        except Exception as error:  # a build is never worth a call
            self.reason = f"off: {error}"
            return
        self.take(module, f"in use, built by {cxx}")

    def take(self, module: Any, reason: str) -> None:
        """Use a loaded library from now on."""
        module.bind(QuantizedTensor, LaunchError)
        scratch.on_owned(module.own)
        self.module, self.reason = module, reason
        self.replay = module.replay


NATIVE = _Native()

# Recorded calls of ops by signature, or the reasons against their plans, for
# `lokakern.native.freeze`.
OPS: dict[bytes, Recording | str] = {}
_MOST_OPS = 8192


def status() -> str:
    """Whether warm calls are replayed in C++, or why not; loads nothing."""
    return NATIVE.reason if NATIVE.is_asked else NATIVE.outlook()


def forget() -> None:
    """Discard all plans, because choices may have changed."""
    NATIVE.generation += 1
    OPS.clear()
    if NATIVE.module is not None:
        NATIVE.module.clear()


def replayed(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Replay the function's warm calls. Its arguments are tensors and constants."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        replay = NATIVE.replay
        if replay is None or jit.recorder is not None:
            if _has_gpu():
                NATIVE.ask()
            return function(*args, **kwargs)
        found = replay(function, args, kwargs)
        if found is None:
            return function(*args, **kwargs)
        if type(found) is bytes:
            return _recorded(found, NATIVE.module.inputs(args, kwargs), function, args, kwargs)  # type: ignore[no-any-return]
        return found  # type: ignore[no-any-return]

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
        signature = NATIVE.module.recorded()
        if signature is None:
            return implementation(*args)
        inputs = [x for x in args if isinstance(x, torch.Tensor)]
        return _recorded(signature, inputs, implementation, args, {}, name)

    library.define(schema, **options)
    library.impl(name, _asking(implementation), "CompositeExplicitAutograd")
    library.define(f"{name}_cold({rest}", **options)
    library.impl(f"{name}_cold", cold, "CompositeExplicitAutograd")


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
    recorder = Recorder(inputs, NATIVE.module.dtype_code)
    try:
        jit.recorder = recorder
        with recorder:
            result = function(*args, **kwargs)
    finally:
        jit.recorder = None
        _RECORDING.release()
    first = inputs[0].device
    template = result_template(result, recorder)
    recording = recorder.recording()
    plan = None if recording is None else recording.text()
    if generation != NATIVE.generation:
        return result
    NATIVE.module.install(
        signature, plan, first.index or 0, first.type == "cuda", recorder.constants, template
    )
    if op:
        shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in inputs)
        if len(OPS) < _MOST_OPS:
            OPS[signature] = recording or f"{op}({shapes}) {recorder.reason}"
        else:
            OPS[signature[:8]] = f"more than {_MOST_OPS} calls"  # the device alone
    return result
