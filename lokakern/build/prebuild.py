"""Ahead-of-time compilation of many kernels in parallel, without a GPU.

`jobs_for` launches kernels on meta tensors, which have shapes and no memory, and records the
compilations; `build` does them and fills the caches that later launches read.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import os
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lokakern.build.empty_operands import empty_epilogue, empty_operands, launch_arguments
from lokakern.build.pool import BuildReport, build, check_workers, reason_of
from lokakern.device import current_device, current_environment
from lokakern.errors import DeviceError, ShapeError, UnsupportedError
from lokakern.jit import Job, record
from lokakern.problems import make_problem
from lokakern.progress import Progress
from lokakern.registry import libraries
from lokakern.registry.register import (
    KERNELS,
    Kernel,
    fp8_format,
    import_plugin,
    kernels_for,
    load_kernels,
)
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of
from lokakern.triton_job import recording_plugins
from lokakern.types import Device, ErrorBudget, Layout, Problem, Rejected

_META = torch.device("meta")


def warmup(
    problems: Iterable[Problem | Sequence[int]],
    budget: ErrorBudget | float | None = None,
    *,
    device: Device | str | None = None,
    workers: int | None = None,
) -> BuildReport:
    """Compile in parallel the kernels that public functions would compile at their first calls.

    Nothing is launched. A first call afterwards loads its kernels from the caches on disk
    (``TRITON_CACHE_DIR`` must stay the same); Triton 3.6 then also compiles, in C, a launcher for
    each new list of argument types. Operands are assumed contiguous and 16-byte aligned, and x0
    and x of a cross to be two matrices; kernels for others are compiled at their first call.

    Args:
        problems: `Problem`s, or shapes ``(m, n, k)`` of a `gemm` on bfloat16 operands with
            ``weight.t()`` on the right.
        budget: The budget of later calls of `gemm`, `scaled_gemm` and `gemm_norm`: the kernels that
            `dispatch` chooses at the problem's m and over the measured range of m are compiled.
            A miss uses the unquantized kernel, which needs no compilation. None compiles every
            registered kernel that supports a problem, at its m.
        device: A product such as "NVIDIA H200", or a `Device`, which need not be present; None
            means the local GPU.
        workers: Number of processes; None means one for each CPU core of this process.

    Returns:
        Counts, and each failure with its reason; printable.

    Raises:
        DeviceError: There is no local GPU and none is named, the database does not know the name,
            or the device is no GPU.
        ShapeError: A shape is not three integers, or ``problems`` is no list.
        BudgetError: The budget is not a finite, non-negative number.
        ValueError: Fewer than one worker.
    """
    check_workers(workers)
    target = gpu_named(device)
    limits = None if budget is None else budget_of(budget)
    try:
        given = list(problems)
    except TypeError:
        raise ShapeError(
            f"warmup: problems is {problems!r}; expected a list of Problems or of (m, n, k)"
        ) from None
    asked = [x if isinstance(x, Problem) else make_problem("gemm", x) for x in given]
    if limits is None:
        jobs = jobs_for(asked, target)
    else:
        jobs = _record([pair for p in asked for pair in _chosen(p, limits, target)], target)
    return build(jobs, target, workers)


def prebuild(
    problems: Iterable[Problem],
    device: Device,
    only: Sequence[str] = (),
    workers: int | None = None,
    progress: Progress | None = None,
    *,
    again: bool = True,
    plugins: bool = False,
) -> BuildReport:
    """Compile every kernel that a sweep of these problems launches on a device.

    Recording takes 15 s for the 2065 problems of suite lrm.

    Args:
        problems: The problems to measure.
        device: The GPU type; it need not be present.
        only: Words of kernel names; empty for all kernels.
        workers: Number of processes; None means one for each CPU core of this process.
        progress: Receives the progress.
        again: Record again even if the same was built before and the caches are unchanged.
        plugins: Compile kernels of plugins, too, those tried in Triton's interpreter included.
            Their launchers are called here on tensors without memory, which may end a process that
            holds a GPU: for processes that launch nothing.
    """
    load_kernels()
    if plugins:
        load_interpreted()
    named = [k for _, k in sorted(KERNELS.items())
             if not only or any(word in k.name for word in only)]  # fmt: skip
    asked = list(dict.fromkeys(problems))
    mark = _mark_of(device, named)
    names = {hashlib.sha256(repr(problem).encode()).hexdigest()[:16] for problem in asked}
    before = _read_mark(mark)
    if not again and names <= before:
        return BuildReport()
    jobs = jobs_for(asked, device, named, plugins=plugins)
    report = build(jobs, device, workers, progress)
    if not report.failures:
        _write_mark(mark, before | names)
    return report


def load_interpreted() -> None:
    """Import plugins that were right in Triton's interpreter, to compile their kernels."""
    for plugin in libraries.plugins().values():
        trial = libraries.trial_of(plugin, current_device(), interpreted=True)
        if trial is not None and not trial.why:
            import_plugin(plugin)


def _mark_of(device: Device, kernels: Iterable[Kernel]) -> Path:
    """The file with the problems for which all kernels are compiled.

    Its name is a digest of everything else that compilations depend on.
    """
    from lokakern.nvrtc import cache_folder  # filelock takes time to import

    here = current_environment()
    words = [repr(device), here.torch, here.triton, here.toolkit, here.libraries]
    words += [str(cache_folder()), os.environ.get("TRITON_CACHE_DIR", "")]
    words += [f"{kernel.name} {kernel.digest}" for kernel in kernels]
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()
    return cache_folder().parent / "prebuilt" / digest


def _read_mark(mark: Path) -> set[str]:
    """Problems for which all kernels are compiled; none if compiled programs were removed."""
    try:
        count, *problems = mark.read_text("ascii").split()
        return set(problems) if int(count) <= _compiled_count() else set()
    except (OSError, ValueError):
        return set()


def _compiled_count() -> int:
    """The number of entries in the caches, which shows that one was emptied."""
    from lokakern.nvrtc import cache_folder

    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    folders = (cache_folder(), triton)
    return sum(len(os.listdir(folder)) for folder in folders if folder.is_dir())


def _write_mark(mark: Path, problems: set[str]) -> None:
    with contextlib.suppress(OSError):  # the next prebuild then records again
        mark.parent.mkdir(parents=True, exist_ok=True)
        beside = mark.with_name(f".{mark.name}.{uuid4().hex}")
        beside.write_text("\n".join([str(_compiled_count()), *sorted(problems)]), "ascii")
        beside.replace(mark)


def jobs_for(
    problems: Iterable[Problem],
    device: Device,
    kernels: Iterable[Kernel] | None = None,
    *,
    plugins: bool = False,
) -> list[Job]:
    """The compilations of problems on a device, each once.

    Args:
        problems: Problems of any ops.
        device: The GPU type; it need not be present.
        kernels: Kernels of any ops; None means all registered ones.
        plugins: Whether launchers of plugins are recorded, see `prebuild`.

    Returns:
        Jobs for `build`. A kernel that cannot be recorded leaves a job that fails with the reason.
    """
    given = None if kernels is None else list(kernels)
    pairs = [
        (kernel, problem)
        for problem in dict.fromkeys(problems)
        for kernel in (kernels_for(problem.op, device) if given is None else given)
        if not isinstance(kernel.supports(problem, device), Rejected)
    ]
    return _record(pairs, device, plugins)


def gpu_named(device: Device | str | None) -> Device:
    if device is None:
        found = current_device()
        if not found.is_gpu:
            raise DeviceError(
                "there is no GPU here; name the one to compile for, such as device='NVIDIA H200'"
            )
        return found
    found = dispatcher.device_named(device)
    if not found.is_gpu:
        raise DeviceError(f"{found} is no GPU; nothing is compiled for it")
    return found


def _chosen(
    problem: Problem, budget: ErrorBudget, device: Device
) -> Iterable[tuple[Kernel, Problem]]:
    """The kernels that dispatch chooses for a problem at its m and at other m.

    Compilations depend on m only through tiles: each winner is recorded at the problem's m, at the
    measured m, and at powers of two and 1.5 times those between.
    """
    multiplies = problem.op in ("gemm", "scaled_gemm", "gemm_norm")  # other ops have no budget
    limits = budget if multiplies else None
    table = dispatcher.table_for(problem, limits, None, device)
    load_kernels()
    largest = max([problem.m, *table.measured_m])
    steps = {size for power in range(1, 32) for size in (2**power, 3 * 2 ** (power - 1))}
    sizes = {problem.m, *table.measured_m, *(size for size in steps if size <= largest)}
    for m in sorted(sizes):
        name = table.winners[bisect_right(table.breakpoints, m) - 1]
        if name in KERNELS:
            yield KERNELS[name], replace(problem, m=m)


def _record(
    pairs: Iterable[tuple[Kernel, Problem]], device: Device, plugins: bool = False
) -> list[Job]:
    with contextlib.ExitStack() as stack:
        recording = stack.enter_context(record(device))
        stack.enter_context(_OutputsOnly())  # type: ignore[no-untyped-call]
        if plugins and importlib.util.find_spec("triton") is not None:
            stack.enter_context(recording_plugins(recording))
        for kernel, problem in itertools.chain.from_iterable(
            _own(*pair, device, plugins) for pair in pairs
        ):
            if not _compiles(kernel) or not problem.m:  # an empty output launches nothing
                continue
            try:
                given = empty_operands(problem, _META), empty_epilogue(problem, _META)
                kernel.launch(*launch_arguments(kernel, *given))
            except Exception as error:  # becomes a failure of the report
                recording.add(_Unrecorded(kernel.name, str(problem), reason_of(error)))
        return list(recording.jobs.values())


def _own(
    kernel: Kernel, problem: Problem, device: Device, plugins: bool = False
) -> Iterator[tuple[Kernel, Problem]]:
    """The parts of a kernel that lokakern compiles: of a library's GEMM, its quantizers.

    Libraries compile by themselves and might crash when launched on meta tensors.
    """
    is_plugin = kernel.library in libraries.plugins()
    if not kernel.libraries or (plugins and is_plugin):
        yield kernel, problem
        return
    quantizers = [KERNELS[name] for name in kernel.parts if KERNELS[name].op == "quantize"]
    if not quantizers or problem.b is None:
        return
    fp8 = fp8_format(device)
    turned = {Layout.ROW: Layout.COLUMN, Layout.COLUMN: Layout.ROW}
    weight = replace(problem.b, layout=turned.get(problem.b.layout, problem.b.layout))
    sides = [(problem.m, problem.a, quantizers[0])]
    if not problem.prepared:
        sides.append((problem.n, weight, quantizers[-1]))
    for rows, operand, quantizer in sides:
        yield (
            quantizer,
            Problem(op="quantize", m=rows, n=1, k=problem.k, a=operand, out_format=fp8,
                    out_granularity=quantizer.granularity),
        )  # fmt: skip


def _compiles(kernel: Kernel) -> bool:
    """Whether any part of a kernel is in another language than torch, which is compiled."""
    parts = [KERNELS[name] for name in kernel.parts] or [kernel]
    return any(part.language != "torch" for part in parts)


class _OutputsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips torch's part of a composition: calls with an output tensor compute nothing.

    Not every FP8 GEMM of torch has a meta implementation, and none needs compilation.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        outputs = [kwargs[x.name] for x in func._schema.arguments if x.is_out and x.name in kwargs]
        if outputs:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Unrecorded:
    """A kernel that could not be launched on meta tensors."""

    kernel: str
    problem: str
    reason: str

    @property
    def key(self) -> Hashable:
        return (self.kernel, self.reason)

    def compile(self, _device: Device) -> bool | None:
        raise UnsupportedError(f"cannot be launched on meta tensors: {self.reason}")

    def __str__(self) -> str:
        return f"{self.kernel}: {self.problem}"
