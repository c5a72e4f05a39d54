"""Rivals of `compare`: a layer of stock modules compiled by torch.compile.

Linear, norm and epilogue, in bfloat16 with bfloat16 parameters, are compiled once for each shape
and epilogue, before anything is timed. These kernels are registered only while `compare` needs
them: they are never swept, and dispatch never chooses them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lokakern.build.pool import build
from lokakern.kernels.torch import norm as stock
from lokakern.measure.norm_operands import draw_epilogue
from lokakern.registry.register import ANY, KERNELS, Kernel, add
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    NormEpilogue,
    Problem,
    Rejected,
    Support,
    norm_form,
)

# The harness captures their graphs, as of all kernels.
MODES = {
    "torch.compiled_norm": "default",
    "torch.compiled_norm_max_autotune": "max-autotune-no-cudagraphs",
}
WORD = "compiled"  # patterns with it ask for them
# A rounding to bfloat16 is up to 2^-8 of the value, 32 times the 2^-13 of a bound of 1. There are
# three: of the bias, of the sums, and of the norm's weights.
KERNEL_ERR_BOUND = 3 * 32.0 + 1.0

BACKEND = "inductor"
FEWEST_LAYERS = 4  # from which on it pays to compile in other processes
_compiled: dict[Any, Callable[..., None]] = {}


def _function_of(epilogue: NormEpilogue) -> Callable[..., None]:
    """The layer of a model, for torch.compile; parts that are None are absent."""
    norm, residual_last = epilogue.norm, epilogue.residual_last
    activation = epilogue.activation

    def layer(
        a: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, norm_weight: Tensor | None,
        norm_bias: Tensor | None, residual: Tensor | None, gate: Tensor | None,
        x0: Tensor | None, x: Tensor | None,
    ) -> None:  # fmt: skip
        y = functional.linear(a, weight, bias)
        if residual is not None and not residual_last:
            y = y + residual
        z = stock._torch_norm(y, norm, norm_weight, norm_bias)
        tail = NormEpilogue(activation=activation, residual=residual, residual_last=residual_last,
                            gate=gate, x0=x0, x=x)  # fmt: skip
        out.copy_(stock._tail(z, tail))  # inside, so that the last kernel writes there

    # torch.compile recompiles a code object eight times at most.
    code = layer.__code__.replace(co_name=f"layer_{len(_compiled)}")
    return types.FunctionType(code, globals(), code.co_name, None, layer.__closure__)


def compiled(function: Callable[..., None], mode: str) -> Callable[..., None]:
    """A function for torch.compile to compile, for constant shapes, at its first call."""
    mode_of = mode if BACKEND == "inductor" else None  # other backends have no modes
    return torch.compile(function, dynamic=False, backend=BACKEND, mode=mode_of)


def _workspace(
    mode: str, a: Tensor, b: Tensor, out: Tensor, epilogue: NormEpilogue
) -> tuple[Any, ...]:
    """The compiled layer and its parameters in bfloat16; compiles it the first time."""
    dtype = Format.BFLOAT16.dtype
    parameters = tuple(
        None if x is None else x.to(dtype)
        for x in (epilogue.bias, epilogue.norm_weight, epilogue.norm_bias)
    )
    key = (mode, BACKEND, a.shape, b.shape, a.device, epilogue.norm, epilogue.form)
    if key not in _compiled:
        function = compiled(_function_of(epilogue), mode)
        _launch(a, b, out, epilogue, (function, parameters))
        _compiled[key] = function
    return _compiled[key], parameters


def _launch(
    a: Tensor, b: Tensor, out: Tensor, epilogue: NormEpilogue, workspace: tuple[Any, ...]
) -> None:
    function, parameters = workspace
    matrices = epilogue.residual, epilogue.gate, epilogue.x0, epilogue.x
    function(a, b.t(), out, *parameters, *matrices)


def _supports(problem: Problem, _device: Device) -> Support:
    assert problem.b is not None  # an op with two operands
    formats = {problem.a.format, problem.b.format, problem.out_format}
    if formats != {Format.BFLOAT16}:
        return Rejected("takes and writes bfloat16")
    return Rejected("writes whole tensors, no slices") if problem.out_strided else ACCEPTED


def _kernel(name: str, mode: str) -> Kernel:
    return Kernel(
        name=name,
        op="gemm_norm",
        language="torch",
        modules=(f"python:{__name__}",),
        launch=_launch,
        architectures=ANY,
        granularity=Granularity.NONE,
        accumulation="rounded",
        supports_problem=_supports,
        workspace=functools.partial(_workspace, mode),
        kernel_err_bound=KERNEL_ERR_BOUND,
    )


def are_asked_for(globs: Iterable[str]) -> bool:
    """Whether a pattern names one of them rather than all kernels: compiling takes minutes."""
    return any(WORD in glob and any(fnmatchcase(name, glob) for name in MODES) for glob in globs)


@contextlib.contextmanager
def registered(wanted: bool = True) -> Iterator[None]:
    """Register them inside, if they are wanted."""
    if wanted:
        for name, mode in MODES.items():
            add(_kernel(name, mode))
    try:
        yield
    finally:
        for name in MODES if wanted else ():
            del KERNELS[name]
        _compiled.clear()


def compile_ahead(
    problems: Iterable[Problem],
    names: Iterable[str],
    where: torch.device,
    device: Device,
    note: Callable[[str], None] = lambda _text: None,
) -> int:
    """Compile all layers before any race.

    Tuning one layer takes tens of seconds of a core. For a GPU, processes on all cores first
    compile into Inductor's caches on disk, which this process then reads. The layers of one shape
    are far apart in the queue, so that later ones find the products tuned.

    Args:
        problems: Problems of any ops.
        names: Names of kernels that take part.
        where: Torch device.
        device: The device type there.
        note: Called with successes and failures.

    Returns:
        The number of compiled layers.
    """
    wanted = tuple(sorted(set(names) & MODES.keys()))
    asked = [
        problem for problem in dict.fromkeys(problems)
        if wanted and not isinstance(KERNELS[wanted[0]].supports(problem, device), Rejected)
    ]  # fmt: skip
    seen: Counter[tuple[int, ...]] = Counter()
    jobs: list[tuple[int, _Layer]] = []
    for problem in asked:
        jobs.append((seen[problem.shape], _Layer(problem, wanted, str(where))))
        seen[problem.shape] += 1
    jobs.sort(key=lambda job: (job[0], -job[1].problem.flops))  # the longest first
    if where.type == "cuda" and len(jobs) >= FEWEST_LAYERS:
        note(f"compiling {len(jobs)} layers by torch.compile")
        with _one_thread_each():
            note(f"layers of torch.compile: {build([job for _, job in jobs], device)}")
    count = 0
    for name, problem in itertools.product(wanted, asked):
        try:
            _compile(name, problem, where)
            count += 1
        except Exception as error:  # the race meets it again, and puts it into its entry
            note(f"not compiled: {name} at {problem}: {type(error).__name__}: {error}"[:500])
    if where.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return count


def _compile(name: str, problem: Problem, where: torch.device) -> None:
    """Compile a layer the first time, and launch it once, which tunes it."""
    m, n, k = problem.m, problem.n, problem.k
    dtype = Format.BFLOAT16.dtype
    a, weight, out = (torch.zeros(shape, dtype=dtype, device=where)
                      for shape in ((m, k), (n, k), (m, n)))  # fmt: skip
    epilogue = draw_epilogue(norm_form(problem.epilogue), m, n, where)
    _workspace(MODES[name], a, weight.t(), out, epilogue)


@dataclass(frozen=True)
class _Layer:
    """A layer to compile in a process."""

    problem: Problem
    names: tuple[str, ...]
    where: str

    @property
    def key(self) -> Hashable:
        return (self.problem, self.names)

    def compile(self, _device: Device) -> bool:
        _benchmark_one_at_a_time()
        for name in self.names:
            _compile(name, self.problem, torch.device(self.where))
        return False

    def __str__(self) -> str:
        return str(self.problem)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started inside compile on one core each, unless the user's environment differs."""
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    is_unset = name not in os.environ
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if is_unset:
            del os.environ[name]


@functools.cache
def _benchmark_one_at_a_time() -> None:
    """Let one process at a time run Inductor's benchmarks."""
    from filelock import FileLock
    from torch._inductor.runtime.benchmarking import benchmarker

    path = Path(tempfile.gettempdir()) / f"lokakern-tuning-{os.getuid()}.lock"
    # Reentrant, because one of the methods calls the other; they take milliseconds.
    lock = FileLock(path, poll_interval=0.001)
    kind = type(benchmarker)

    def alone(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def locked(*given: Any, **options: Any) -> Any:
            with lock:
                return method(*given, **options)

        return locked

    for name in ("benchmark", "benchmark_gpu"):
        setattr(kind, name, alone(getattr(kind, name)))
