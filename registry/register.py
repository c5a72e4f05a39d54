"""Kernels and how they enter the registry: `@register(...)` is the whole entry."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lokakern import jit
from lokakern.device import current_device
from lokakern.errors import UnknownNameError
from lokakern.registry import architectures as gpus
from lokakern.registry import digests, float16, libraries
from lokakern.registry.architectures import FP8_GPUS as FP8_GPUS
from lokakern.registry.digests import KERNELS_ROOT
from lokakern.registry.ops import EPILOGUE_OPS, op_named
from lokakern.triton_interpreter import is_interpreted, make_exact
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    NumericsClass,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
)

ANY = frozenset({"any"})

# Largest `numerics.kernel_error` of a right FP8 tensor-core kernel. An sm_90 instruction lines up
# its 32 products and the running sum with the largest and cuts them at 14 bits, so that where few
# products dominate its error passes 2^-13 sum|a||b|: at most 33 times in each of the 4 steps
# between promotions, 4.65 times over X1-X14, k 128-2048 and m to 32768 on an H200, where the
# kernels of torch and of Triton print the same figures. Never promoted, the cuts add up: 4.34 at
# k = 2048 and in proportion to k, so such kernels stop at k = 4096.
PROMOTED_KERNEL_ERR_BOUND = 8.0
FAST_KERNEL_ERR_BOUND = 16.0
FAST_LARGEST_K = 4096
# The same cuts in units of float16: of a sum without cancellation 2^-11 + 2^-13, in bfloat16
# 2^-8 + 2^-13. At k = 2048 24.4 was seen, 6.6 times 3.7.
_FAST_IN_FLOAT16 = (2**-8 + 2**-13) / (2**-11 + 2**-13)
SPLIT_K = 8192  # from which on cuBLAS splits sums of bfloat16 products

# Where kernels were compiled and inspected, or only written for, and never ran.
_ABSENT = sorted(FP8_GPUS - {"sm_90"})
COMPILED_ONLY = dict.fromkeys(_ABSENT, "no such GPU was at hand to run it")
NEVER_RUN = dict.fromkeys(_ABSENT, "no such GPU was at hand to measure it")

PLAIN_EPILOGUES = frozenset({"none", "bias"})  # of a kernel that says no more
# Attributes of a kernel that a caller of scaled_gemm may need and no problem tells of.
NEEDS = {
    "offsets": "takes no groups of any rows",
    "k_slices": "does not take a as slices along k",
    "batch_invariant": "its bits may depend on the number of rows",
    # digest: off
    "float16": "takes no float16",
    # digest: on
}

Launcher = Callable[..., None]
Workspace = Callable[..., tuple[Tensor, ...]]
Supports = Callable[[Problem, Device], Support]
QuantizedAs = Callable[[str, Tensor], QuantizedTensor]


LENT_ALIGNMENT = 16  # bytes; libraries read vectors, and not all of them look where these begin


# digest: off  of kernels outside lokakern
# Ops whose kernels read or write scales: one that declares none is a mistake.
SCALED_OPS = frozenset({"quantize", "quantize_transpose", "dequantize", "scaled_gemm"})


def _why_not_declared(kernel: Kernel, problem: Problem) -> str | None:
    """Why the scales of a problem are not those that a kernel declares, or None."""
    found: list[tuple[str, Granularity, Granularity]] = []
    if problem.op in ("quantize", "quantize_transpose"):
        found.append(("the output", problem.out_granularity, kernel.granularity))
    if problem.op in ("dequantize", "scaled_gemm"):
        found.append(("a", problem.a.granularity, kernel.granularity))
    if problem.b is not None and (
        problem.op == "scaled_gemm" or (kernel.quantizes and problem.prepared)
    ):
        found.append(("b", problem.b.granularity, kernel.b_granularity))
    return next(
        (f"{name} has {have.value} scales; it declares {declared.value}"
         for name, have, declared in found if have is not declared),
        None,
    )  # fmt: skip


# digest: on
def _why_not_lent(problem: Problem) -> str | None:
    """Why operands of a problem are not given to a library, or None."""
    operands = [problem.a, problem.b] if problem.b is not None else [problem.a]
    if all(operand.alignment >= LENT_ALIGNMENT for operand in operands):
        return None
    return f"rows of operands must start at multiples of {LENT_ALIGNMENT} bytes"


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A foreign function on the device of what it is given, whichever is the current one."""

    @functools.wraps(function)
    def call(first: Any, *rest: Any) -> Any:
        if jit.recorder is not None:
            jit.recorder.refuse("calls a kernel of a library or a user")
        device = getattr(first, "device", None)  # slices of a have none of their own
        if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(first, *rest)
        with torch.cuda.device(device):
            return function(first, *rest)

    return call


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _accept(_problem: Problem, _device: Device) -> Support:
    return ACCEPTED


def _no_workspace(*_operands: Tensor) -> tuple[Tensor, ...]:
    return ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernel:
    """One implementation of an op.

    ``launch`` neither checks nor allocates; what it is called with depends on the op. b is
    ``[k, n]`` and its scales ``[k / 128, n / 128]``, ``[1, n]`` or ``[1, 1]``: both are transposed
    views of what `quantize` made of a weight ``[n, k]`` (`QuantizedTensor.transpose`).

        quantize      launch(x, data, scale, workspace)
        quantize_transpose
                      launch(x, data, scale, data_t, scale_t, sums, workspace)
        dequantize    launch(data, scale, out, workspace)
        scaled_gemm   launch(a, a_scale, b, b_scale, out, bias, workspace, epilogue=PLAIN)
        gemm          launch(a, b, out, bias, workspace)     b: Tensor [k, n] or QuantizedTensor
        gemm_norm     launch(a, b, out, epilogue, workspace)
        norm_quantize launch(x, out, epilogue, workspace)
        norm_backward launch(dd, y, outputs, epilogue, workspace)

    Operands of gemm_norm and norm_quantize are tensors or `QuantizedTensor`s: a is ``[m, k]``, b
    ``[k, n]`` as of gemm (of bfloat16 a quantized only as a prepared weight), x bfloat16
    ``[m, k]``. out is a bfloat16 tensor, which may be a slice, or a `QuantizedTensor` whose data
    and scales are written; one with a scale of the whole tensor is given that scale. The epilogue
    is a `NormEpilogue`. dd and y of norm_backward are bfloat16 ``[m, k]``, outputs what
    `lokakern.gradients.NormGradients` says; of its epilogue neither bias nor residual is read: they
    tell whose gradients are wanted. Behind a cross y is x0, and that of the epilogue is not read.

    FP8 data lie as `types.empty_data` lays them out. Sums of columns are float32 ``[columns]``, or
    None where the epilogue does not ask for them. A scaled GEMM is given its epilogue if the kernel
    has one to be given, and slices of a along k as two tuples in the places of a and a_scale. A
    kernel with `k_slices` takes any number of them.

    Attributes:
        name: ``<language>.<function>``, or the names of the parts of a composition.
        language: ``torch``, ``triton``, ``cuda``, ``hip``, an adapter's library.
        modules: Source files, relative to ``kernels/``, without ending, and of a library's kernel
            the version of the library.
        library: Name of the library or plugin that brings it, see `libraries.Library`.
        architectures: Where it runs; ``{"any"}`` is everywhere.
        granularity: Of the scales: of ``a`` for a GEMM; NONE for an unquantized GEMM.
        b_granularity: Of the scales of ``b``.
        accumulation: See `NumericsClass`.
        workspace: From the operands to the scratch tensors ``launch`` gets last.
        compile_only: Architectures where it only compiles so far, with the reason.
        unmeasured: Architectures where nobody measured it, with the reason.
        kernel_err_bound: Largest accepted `numerics.kernel_error`.
        odd_kernel_err_bound: For each time that parts of a sum are rounded to the output's format
            before they are added up, see `bound_at`; None: they never are.
        parts: Names of a composition's parts.
        batched: Whether it takes a batch: every operand and output but the bias has one more axis
            then, in front; of a scaled GEMM, whether it takes groups, of equal or any rows.
        equal_groups: Whether its groups must have equal rows.
        epilogues: What of `Problem.epilogue` it does; not asked of ops with a norm, whose kernels
            read `types.norm_form` themselves.
        accumulates: Whether it can add to a float32 output.
        k_slices: Whether it takes a as slices along k.
        batch_invariant: Whether the bits of an output row depend neither on the other rows nor on
            how many there are, if `Epilogue` asks for that.
        pads: Whether it pads operands, so that their rows are 16-byte aligned.
        quantized_as: How a library's own quantizers round, where that is not `numerics.quantize`:
            from "x" (rows of a) or "w" (columns of b, as rows) and the operand ``[rows, k]`` to
            what they make of it. Its `accumulation` names the library then, because its errors are
            those of no other class.
    """

    name: str
    op: str
    language: str
    modules: tuple[str, ...]
    launch: Launcher
    architectures: frozenset[str]
    granularity: Granularity = Granularity.NONE
    b_granularity: Granularity = Granularity.NONE
    accumulation: str = "none"
    supports_problem: Supports = _accept
    workspace: Workspace = _no_workspace
    compile_only: dict[str, str] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)
    kernel_err_bound: float = 1.0
    odd_kernel_err_bound: float | None = None
    parts: tuple[str, ...] = ()
    batched: bool = False
    equal_groups: bool = False
    epilogues: frozenset[str] = PLAIN_EPILOGUES
    accumulates: bool = False
    k_slices: bool = False
    batch_invariant: bool = False
    pads: bool = False
    library: str = ""
    quantized_as: QuantizedAs | None = None

    @functools.cached_property
    def digest(self) -> str:
        return digests.kernel_digest(self.name, self.modules)

    @property
    def libraries(self) -> frozenset[str]:
        """Names of the libraries that it, or a part of it, is of."""
        parts = (KERNELS[part].library for part in self.parts if part in KERNELS)
        return frozenset((self.library, *parts)) - {""}

    @property
    def offsets(self) -> bool:
        """Whether it takes groups of any rows."""
        return self.batched and not self.equal_groups

    # digest: off
    @property
    def float16(self) -> bool:
        """Whether it takes float16, which no problem from FP8 to FP8 tells."""
        return float16.why_not(self.name, self.parts) is None

    # digest: on
    @property
    def quantizes(self) -> bool:
        """Whether an op on unquantized operands goes through FP8."""
        if self.op == "gemm_norm":  # one with a granularity may want its operands quantized
            return any(KERNELS[part].op == "quantize" for part in self.parts if part in KERNELS)
        return self.op == "gemm" and self.granularity is not Granularity.NONE

    def supports(self, problem: Problem, device: Device) -> Support:
        """Whether this kernel may run the problem on the device, or why not."""
        if problem.op != self.op:
            return Rejected(f"computes {self.op}, not {problem.op}")
        if not self.runs_on(device):
            needs = ", ".join(sorted(self.architectures))
            return Rejected(f"needs {needs}; device is {device.architecture}")
        if problem.batch != 1 and not self.batched:
            return Rejected("takes no batch")
        if problem.accumulate and not self.accumulates:
            return Rejected("does not accumulate into its output")
        if self.op not in EPILOGUE_OPS and problem.epilogue not in self.epilogues:
            return Rejected(f"has no epilogue {problem.epilogue!r}")
        if self.library:
            reason = libraries.why_not(self.library, device, self.name)
            if reason is not None:
                return Rejected(reason)
            reason = _why_not_lent(problem)
            if reason is not None and not libraries.named(self.library).is_plugin:
                return Rejected(reason)
        # digest: off
        if any(module.startswith("python:") for module in self.modules):
            reason = _why_not_declared(self, problem)
            if reason is not None:
                return Rejected(reason)
        # digest: on
        if float16.is_in(problem):
            reason = float16.refusal(self.name, self.parts, problem)
            if reason is not None:
                return Rejected(reason)
            problem = float16.as_bfloat16(problem)
        try:
            answer = self.supports_problem(problem, device)
        except Exception as error:
            if not self.library or self.library == libraries.trying:
                raise
            return Rejected(f"cannot say whether it takes it: {libraries.words_of(error)}")
        reason = None if isinstance(answer, Rejected) else gpus.limit(self.name, problem, device)
        return answer if reason is None else Rejected(reason)

    def refusal(self, problem: Problem, device: Device) -> str | None:
        """Why this kernel does not support a problem; None if it does."""
        answer = self.supports(problem, device)
        return answer.reason if isinstance(answer, Rejected) else None

    def lacks(self, needs: Iterable[str]) -> str | None:
        """What of the words of `NEEDS` it does not do."""
        return next((NEEDS[need] for need in needs if not getattr(self, need)), None)

    def bound_at(self, problem: Problem) -> float:
        """Largest accepted `numerics.kernel_error` at a problem.

        Libraries round parts of a sum where they split it, long ones above all, where rows are not
        16-byte aligned, and in batches: up to twice, as the largest errors seen on an H200 say
        (20 at m=1024 n=479 k=1024, 1.04 at k=327680). Where sums are never promoted, the bound in
        float16 is that of bfloat16 in smaller units.
        """
        bound = self.odd_kernel_err_bound
        if problem.out_format is Format.FLOAT16 and self.kernel_err_bound == FAST_KERNEL_ERR_BOUND:
            return self.kernel_err_bound * _FAST_IN_FLOAT16
        if bound is None or problem.b is None:
            return self.kernel_err_bound
        aligned = self.pads or (problem.n % 8 == 0 and problem.k % 8 == 0)
        whole = aligned and problem.k < SPLIT_K and problem.batch == 1
        return self.kernel_err_bound if whole else 2 * bound

    def runs_on(self, device: Device) -> bool:
        return "any" in self.architectures or device.architecture in self.architectures

    def numerics(self, problem: Problem, device: Device) -> NumericsClass:
        """What decides the error of this kernel on the problem."""
        b = problem.b or problem.a
        if self.quantizes:
            fp8 = fp8_format(device)
            return NumericsClass(
                fp8,
                self.granularity,
                fp8,
                self.b_granularity,
                self.accumulation,
                problem.out_format,
            )
        return NumericsClass(
            problem.a.format, problem.a.granularity, b.format, b.granularity,
            self.accumulation, problem.out_format,
        )  # fmt: skip

    def __str__(self) -> str:
        return self.name


def fp8_format(device: Device | str) -> Format:
    """The E4M3 format of a device: fnuz on CDNA 3, OCP elsewhere."""
    architecture = device if isinstance(device, str) else device.architecture
    return Format.E4M3FNUZ if architecture == "gfx942" else Format.E4M3FN


KERNELS: dict[str, Kernel] = {}
# The plugin that is imported, whatever else its modules import.
_loading: ContextVar[libraries.Library | None] = ContextVar("loading", default=None)


def register(
    op: str,
    *,
    architectures: frozenset[str] = ANY,
    name: str | None = None,
    granularity: Granularity = Granularity.NONE,
    b_granularity: Granularity | None = None,
    accumulation: str = "none",
    supports: Supports = _accept,
    workspace: Workspace = _no_workspace,
    compile_only: dict[str, str] | None = None,
    unmeasured: dict[str, str] | None = None,
    kernel_err_bound: float = 1.0,
    odd_kernel_err_bound: float | None = None,
    batched: bool = False,
    equal_groups: bool = False,
    epilogues: frozenset[str] = PLAIN_EPILOGUES,
    accumulates: bool = False,
    k_slices: bool = False,
    batch_invariant: bool = False,
    pads: bool = False,
    quantized_as: QuantizedAs | None = None,
) -> Callable[[Launcher], Launcher]:
    """Enter a launcher into the registry: tested, swept and dispatchable from then on.

    The name is ``<folder>.<function>`` unless ``name`` replaces the function's; the other
    arguments are the attributes of `Kernel`.

    Raises:
        UnknownNameError: There is no such op.
        ValueError: The name is taken, what should be a set of names is none, or a granularity is
            unknown, or missing for an op with scales.
    """
    op_named(op)
    for what, names in (("architectures", architectures), ("epilogues", epilogues)):
        if not isinstance(names, set | frozenset) or not all(isinstance(x, str) for x in names):
            raise ValueError(f"{what} is {names!r}; expected a set of names")
    # digest: off
    if is_interpreted():  # now: whoever writes a kernel may call it without anything else
        make_exact()
    granularity = Granularity(granularity)  # of its text, too
    b_granularity = None if b_granularity is None else Granularity(b_granularity)
    if op in SCALED_OPS and granularity is Granularity.NONE:
        known = ", ".join(f"Granularity.{x.name}" for x in Granularity if x is not granularity)
        raise ValueError(f"{op} has scales, and granularity is NONE; expected one of {known}")
    # digest: on

    def enter(launch: Launcher) -> Launcher:
        function = launch.func if isinstance(launch, functools.partial) else launch
        path, language, library = _origin_of(function.__module__)
        # Other code may launch in ways of which lokakern.jit tells nobody.
        is_own = library is None and function.__module__.startswith("lokakern.kernels.")
        guard = _as_it_is if is_own else _on_its_device
        full_name = f"{language}.{name or function.__name__}"
        where = gpus.claimed(full_name, architectures) if is_own else architectures
        added = {gpu: COMPILED_ONLY[gpu] for gpu in sorted(where - architectures)}
        add(
            Kernel(
                name=full_name,
                op=op,
                language=language,
                modules=(path, *(library.words if library else ())),
                library=library.name if library else "",
                launch=guard(launch),
                architectures=where,
                granularity=granularity,
                b_granularity=granularity if b_granularity is None else b_granularity,
                accumulation=accumulation,
                supports_problem=supports,
                workspace=guard(workspace),
                compile_only=_of_claimed(compile_only or {}, where) | added,
                unmeasured=unmeasured or {},
                kernel_err_bound=kernel_err_bound,
                odd_kernel_err_bound=odd_kernel_err_bound,
                batched=batched,
                equal_groups=equal_groups,
                epilogues=epilogues,
                accumulates=accumulates,
                k_slices=k_slices,
                batch_invariant=batch_invariant,
                pads=pads,
                quantized_as=quantized_as,
            )
        )
        return launch

    return enter


def _of_claimed(reasons: dict[str, str], where: frozenset[str]) -> dict[str, str]:
    return {gpu: why for gpu, why in reasons.items() if where == ANY or gpu in where}


def _origin_of(module: str) -> tuple[str, str, libraries.Library | None]:
    """Of a launcher's module: the entry of `Kernel.modules`, the language and the library."""
    if not module.startswith("lokakern.kernels."):
        plugin = libraries.plugin_of(module) or _loading.get()
        return f"python:{module}", module.split(".")[0].strip("_"), plugin
    path = module.removeprefix("lokakern.kernels.").replace(".", "/")
    folder, _, stem = path.partition("/")
    if folder == "adapters":
        return path, stem, libraries.LIBRARIES[stem]
    return path, folder, None


def add(kernel: Kernel) -> None:
    """Enter a kernel.

    Raises:
        ValueError: The name is taken.
    """
    if kernel.name in KERNELS:
        raise ValueError(f"kernel {kernel.name!r} is registered twice")
    KERNELS[kernel.name] = kernel


def load_kernels() -> dict[str, str]:
    """Import every module under ``lokakern.kernels``, and every plugin that was tried, once.

    Returns:
        Modules that cannot be imported here, with the reason.
    """
    return {**load_own(), **_import_plugins()}


def load_own() -> dict[str, str]:
    """Import lokakern's modules only, which touches no GPU."""
    return {**load_parts(), **_import_modules(in_folders=False)}


def load_tried() -> None:
    """Import the plugins that were found to work since they were last asked for."""
    _import_plugins.cache_clear()
    load_kernels()


def load_parts() -> dict[str, str]:
    """Import the modules in folders, of which those beside the folders (compositions) are made."""
    return _import_modules(in_folders=True)


@functools.cache
def _import_modules(in_folders: bool) -> dict[str, str]:
    unavailable: dict[str, str] = {}
    names = _module_names([str(KERNELS_ROOT)], "lokakern.kernels.")
    for name in sorted(name for name in names if (name.count(".") > 2) is in_folders):
        try:
            importlib.import_module(name)
        except ImportError as error:
            unavailable[name.removeprefix("lokakern.kernels.").replace(".", "/")] = str(error)
    return unavailable


@functools.cache
def _import_plugins() -> dict[str, str]:
    unavailable: dict[str, str] = {}
    for name, plugin in libraries.plugins().items():
        try:
            why = libraries.why_not_tried(plugin, current_device())
            if why is None:
                import_plugin(plugin)
        except (Exception, SystemExit) as error:
            # It did not when it was tried, so nothing here depends on it. A module that reads
            # the program's arguments when it is imported exits at those of another program.
            why = libraries.words_of(error)
        if why is not None:
            unavailable[f"plugin {name}"] = why
    return unavailable


def import_plugin(plugin: libraries.Library) -> None:
    """Import what registers a plugin's kernels; none stays if it raises."""
    before = set(KERNELS)
    token = _loading.set(plugin)
    try:
        libraries.import_modules(plugin)
    except BaseException:
        for name in set(KERNELS) - before:
            del KERNELS[name]
        raise
    finally:
        _loading.reset(token)


def _module_names(paths: Iterable[str], prefix: str) -> Iterator[str]:
    for found in pkgutil.iter_modules(paths, prefix):
        if not found.ispkg:
            yield found.name
    for path in paths:  # namespace folders are not packages to pkgutil
        for folder in sorted(Path(path).iterdir()):
            if folder.is_dir() and not folder.name.startswith(("_", ".")):
                yield from _module_names([str(folder)], f"{prefix}{folder.name}.")


def kernels_for(op: str, device: Device | None = None) -> list[Kernel]:
    """Registered kernels of an op, by name; with a device, those that run there."""
    load_kernels()
    found = [k for _, k in sorted(KERNELS.items()) if k.op == op]
    return [k for k in found if device is None or k.runs_on(device)]


def kernel_named(name: str) -> Kernel:
    """The kernel of that name.

    Raises:
        UnknownNameError: There is none.
    """
    unavailable = load_kernels()
    try:
        return KERNELS[name]
    except KeyError:
        reasons = "".join(f"; {module}: {why}" for module, why in unavailable.items())
        raise UnknownNameError(
            f"kernel {name!r} is not registered; expected one of {', '.join(sorted(KERNELS))}"
            f"{reasons}"
        ) from None
