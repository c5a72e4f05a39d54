"""Smoke tests of installed libraries and plugins, each in its own processes.

A process imports the library, then times each of its kernels on a small supported problem and
checks the result, as a sweep does; on a CPU, whose times say nothing, it only launches it twice.
Kernels of a plugin also run on a problem with a bias and sizes that fill no tile, on operands in
other strides, formats and layouts, and on zeros, NaN and infinity. The process announces
each step: if it dies or hangs, its last message names the kernel, and another process continues
with the remaining kernels.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lokakern.build.empty_operands import named_operands
from lokakern.device import current_device
from lokakern.errors import UnknownNameError
from lokakern.registry import libraries, register
from lokakern.registry.libraries import LIBRARIES, LONGEST_WHY, Library, Trial
from lokakern.registry.register import KERNELS, Kernel
from lokakern.sweep.parent import end_with
from lokakern.triton_interpreter import is_interpreted
from lokakern.types import Device, Format, Granularity, Layout, Operand, Problem, Rejected

if TYPE_CHECKING:
    from lokakern.workloads.distributions import LearnedDistribution
    from lokakern.workloads.gemm_cases import Case

# Longest silence, in seconds: on a GPU a library may compile its kernels at the first launch.
GPU_PATIENCE_S, CPU_PATIENCE_S = 300.0, 60.0
POLL_S = 0.2
Say = Callable[[str], None]
MOST_PROCESSES = 16  # crashed processes per library
LONGEST_WORD = 8192  # bytes
UNTRIED = ("untried", "changed, untried")
FAULTY = ("broken", "partly")
# Outcomes of a kernel begin with these; others are faults. Sizes or the reason follow.
RIGHT, IDLE = "right", "idle: "
# A kernel runs the first supported one: one tile of most kernels, a usual layer, long sums.
SHAPES = ((256, 256, 256), (64, 64, 128), (2048, 512, 512), (128, 128, 8192))
TAILS = (67, 90, 200)  # of plugins: whoever writes one has no other test
# Also of plugins, each alone: sums past any block of k, more tiles of rows than a group has, and
# several tiles of 256 both ways.
LARGE = ((35, 40, 4100), (2100, 24, 40), (700, 600, 136))
# Ops with sums of products; on positive values what each step of a sum loses adds up. Small, so
# that tiles of 16 x 16 x 16 end in the interpreter, and else what larger tiles may ask for. From
# k = 8192 on libraries split unquantized sums (`register.SPLIT_K`).
SUMMED = {
    "scaled_gemm": ((16, 24, 16384), (128, 128, 16384)),
    "gemm": ((16, 24, 8064), (128, 128, 8064)),
}
# What FP8 tensor cores may lose of sums of one sign: twice what `test_promoted_sums_do_not_drift`
# allows. A sum rounded to bfloat16 every 128 of 16384 is off by 5.7 %.
LARGEST_DRIFT = 2.0**-9
LARGE_ROWS = ((3, 5000), (520, 40))  # of quantizers; interpreted, a program takes 2 to 5 ms
BACKWARD = (2048, 512, 256)  # for gradients and batches, if a kernel supports none of those
NO_GPU = "0 active drivers"  # says Triton without one
EPILOGUES = ("bias+layer+affine", "block_rms(64)+hardswish")
NORMS = ("layer+affine", "rms+affine")  # rowwise norms with bfloat16 output
# Scales of a and b with which a gemm may quantize inside.
QUANTIZED_BY = (
    (Granularity.ROW, Granularity.ROW), (Granularity.TENSOR, Granularity.TENSOR),
    (Granularity.GROUP, Granularity.BLOCK), (Granularity.BLOCK, Granularity.BLOCK),
)  # fmt: skip
# Ops whose contract says what becomes of zeros, NaN and infinity.
EDGED = ("quantize", "quantize_transpose", "scaled_gemm")


def known() -> list[Library]:
    """Libraries with an adapter and installed plugins, by name."""
    register.load_kernels()
    found = LIBRARIES | libraries.plugins()
    return [found[name] for name in sorted(found)]


def state_of(library: Library, device: Device) -> tuple[str, str]:
    """The state of a library on a device, and why.

    States are "not installed", "unsuitable" (unsupported version), "untried", "changed, untried"
    (tried in another version or state), "broken" (no kernel was right), "partly" (some kernels are
    broken), and "usable".
    """
    absent = library.why_not_here()
    trial = libraries.trial_of(library, device) if absent is None else None
    if absent is not None or trial is None:
        changed = absent is None and libraries.is_changed(library, device)
        why = absent or f"it {libraries.why_no_trial(library, device)}"
        never = f"; written, never run: {library.never_run}" if library.never_run else ""
        state = "unsuitable" if library.here else "not installed"
        if absent is None:
            state = UNTRIED[changed]
        return state, why + never
    if trial.why:
        return "broken", trial.why
    if trial.kernels:
        state = "partly" if trial.right or trial.idle else "broken"
        return state, "; ".join(f"{name}: {why}" for name, why in sorted(trial.kernels.items()))
    why = "tried: it imports, and "
    faultless = [k.name for k in KERNELS.values() if k.library == library.name
                 and not k.parts and k.name not in trial.idle]  # fmt: skip
    if trial.right:
        why += f"{trial.right} of its kernels {'was' if trial.right == 1 else 'were'} right"
        if library.is_plugin and len(faultless) == trial.right:
            told = [f"{name}{trial.sizes.get(name, '')}" for name in faultless]
            why += f": {', '.join(told)}"
    else:
        why += f"no kernel of it takes what it was tried with on {device}"
    if library.is_plugin:  # whose author can change it
        why += "".join(f"; {name}: {reason}" for name, reason in sorted(trial.idle.items()))
    return "usable", why


def untried(device: Device) -> list[Library]:
    """Installed libraries of a supported version without a stored trial."""
    return [library for library in known() if state_of(library, device)[0] in UNTRIED]


def doubtful(device: Device, only: str | None = None) -> list[Library]:
    """Untried libraries, and those with faults in their last trial.

    Args:
        device: The device here.
        only: Name of the only library that counts; None: all.

    Raises:
        UnknownNameError: There is no library of that name.
    """
    found = known()
    names = [library.name for library in found]
    if only is not None and only not in names:
        raise UnknownNameError(f"library {only!r} is unknown; expected one of {', '.join(names)}")
    states = (*UNTRIED, *FAULTY)
    return [library for library in found
            if only in (None, library.name) and state_of(library, device)[0] in states]  # fmt: skip


def try_all(wanted: Sequence[Library], say: Say, patience_s: float | None = None) -> None:
    """Try libraries on this device in turn, and store the results.

    Args:
        wanted: Installed libraries.
        say: Called with a line before each, and before each problem of a kernel.
        patience_s: Longest silence of a process, in seconds; None means 300 on a GPU, 60 on a CPU.
    """
    for library in wanted:
        device = current_device()
        if patience_s is None:
            patience_s = GPU_PATIENCE_S if device.is_gpu else CPU_PATIENCE_S
        again = " again (it changed)" if libraries.is_changed(library, device) else ""
        say(f"trying {library.name}{again}: it is imported, and each kernel launched, in another "
            f"process; each step takes at most {patience_s:g} s")  # fmt: skip
        libraries.keep_trial(library, device, _try(library, patience_s, say))
    if wanted:
        register.load_tried()


def _try(library: Library, patience_s: float, say: Say) -> Trial:
    """Try a library, with a new process after each crash."""
    kernels: dict[str, str] = {}
    for _ in range(MOST_PROCESSES):
        end = _run(library.name, tuple(kernels), patience_s, say)
        kernels |= end.kernels
        if not end.at:
            idle = {name: why.removeprefix(IDLE) for name, why in kernels.items()
                    if why.startswith(IDLE)}  # fmt: skip
            sizes = {name: why.removeprefix(RIGHT) for name, why in kernels.items()
                     if why.startswith(RIGHT)}  # fmt: skip
            faults = {name: why for name, why in kernels.items()
                      if name not in idle and name not in sizes}  # fmt: skip
            return Trial(end.why, faults, len(sizes), idle, sizes)
        kernels[end.at] = end.why
    return Trial(f"ended {MOST_PROCESSES} processes; the last one: {end.why}"[:LONGEST_WHY])


@dataclass(frozen=True, slots=True)
class _End:
    """Result of a process: outcomes of kernels, the reason, and the kernel at which it died."""

    kernels: dict[str, str]
    why: str
    at: str = ""


def _run(name: str, done: tuple[str, ...], patience_s: float, say: Say) -> _End:
    reading, writing = os.pipe()
    sentinel, held = os.pipe()  # held by this process only, so that it closes with it
    code = (
        "from lokakern.bench.report.library_smoke import main; "
        f"main({name!r}, {done!r}, {writing}, {sentinel})"
    )
    paths = [path or os.getcwd() for path in sys.path]  # same import paths as this process
    with (
        tempfile.TemporaryFile() as printed,
        os.fdopen(reading, "rb", buffering=0) as pipe,
        os.fdopen(held, "wb"),
    ):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code], stdin=subprocess.DEVNULL, stdout=printed,
            stderr=printed, pass_fds=(writing, sentinel), start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        os.close(writing)
        os.close(sentinel)
        kernels: dict[str, str] = {}
        at = problem = ""
        try:
            for word in _words(pipe, process, patience_s):
                match word:
                    case ["launch", str(kernel)]:
                        at, problem = kernel, ""
                    case ["try", str(named)]:
                        problem = f" at {libraries.words_of(named)}"
                        say(f"  {at}: {libraries.words_of(named)}")
                    case ["done", str(kernel), str(why)]:
                        at, kernels[kernel] = "", libraries.words_of(why)
                    case ["end", str(why)]:
                        where = problem if at else ""
                        return _End(kernels, libraries.words_of(f"{why}{where}"), at)
            silent = False
        except TimeoutError:
            silent = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            code_of_exit = process.wait()
        how = f"no sign of life for {patience_s:g} s" if silent else _words_of_exit(code_of_exit)
        step = f"when {at} was launched{problem}" if at else "when it was imported"
        return _End(kernels, libraries.words_of(f"{how} {step}{_last_line(printed)}"), at)


def _words(
    pipe: IO[bytes], process: subprocess.Popen[bytes], patience_s: float
) -> Iterator[list[Any]]:
    """Messages of a process until it has ended.

    Raises:
        TimeoutError: It is silent for too long, or closed the pipe without ending.
    """
    text, last = b"", time.monotonic()
    while time.monotonic() - last < patience_s:
        alive = process.poll() is None
        if not select.select([pipe], [], [], POLL_S if alive else 0)[0]:
            if not alive:
                return
            continue
        read = os.read(pipe.fileno(), LONGEST_WORD)
        if not read:
            try:
                process.wait(max(1.0, last + patience_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TimeoutError from None
            return
        last = time.monotonic()
        *lines, text = (text + read).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                word = json.loads(line)
                if isinstance(word, list):
                    yield word
        text = text[-LONGEST_WORD:]
    raise TimeoutError


def _words_of_exit(code: int) -> str:
    if code >= 0:
        return f"the process exited with {code}"
    try:
        return f"the process was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"the process was killed by signal {-code}"


def _last_line(printed: IO[bytes]) -> str:
    printed.seek(0, os.SEEK_END)
    printed.seek(max(0, printed.tell() - LONGEST_WORD))
    lines = printed.read().decode(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {said}" if said else ""


# --- in the process


def main(name: str, done: Sequence[str], pipe: int, sentinel: int) -> None:
    """Try a library in this process, which then exits.

    Args:
        name: The library's name.
        done: Kernels that were tried already.
        pipe: For messages: ["launch", kernel], ["try", problem], ["done", kernel, why],
            ["end", why].
        sentinel: Of the parent, with which the group of this process ends.
    """
    end_with(sentinel, lambda: os.killpg(0, signal.SIGKILL))

    def say(*words: str) -> None:
        os.write(pipe, json.dumps(words).encode()[:LONGEST_WORD] + b"\n")

    why, library = "", None
    try:
        libraries.trying = name
        register.load_own()
        library = libraries.named(name)
        if library.is_plugin:
            register.import_plugin(library)
        else:
            libraries.import_modules(library)
        mine = [k for k in KERNELS.values() if k.library == name and not k.parts]
        if not mine:
            why = "registers no kernel"
        for kernel in mine:
            if kernel.name not in done:
                say("launch", kernel.name)
                # An exception here is reported for this kernel, not for the library.
                told = functools.partial(say, "try")
                say("done", kernel.name, _outcome_of(kernel, told))
    except BaseException as error:  # including SystemExit, which would end an importer
        why = _first_line(error) + (_place_in(error, library) if library else "")
    say("end", why)
    os._exit(0)  # exit handlers of libraries are not tested


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:LONGEST_WHY]


def _place_in(error: BaseException, library: Library) -> str:
    """The last line of a library's modules that an error passed, or ""."""
    tops = {name.partition(".")[0] for package in library.packages for name in package.modules}
    places = [
        f" ({Path(frame.f_code.co_filename).name}, line {line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] in tops
    ]
    return places[-1] if places else ""


def _outcome_of(kernel: Kernel, say: Say) -> str:
    """The fault of a kernel, `RIGHT` and its sizes, or `IDLE` and why it supports no problem.

    Args:
        kernel: The kernel.
        say: Called with the name of each problem before its launches.
    """
    from lokakern.measure.operands import QUANTIZERS
    from lokakern.problems import make_problem
    from lokakern.registry.register import fp8_format
    from lokakern.workloads.distributions import learned
    from lokakern.workloads.edge_values import EDGE_ROWS, ONLY_TINY, ONLY_ZEROS, POSITIVE
    from lokakern.workloads.gemm_cases import Case, fused_case, shape_cases
    from lokakern.workloads.gemm_gradient_cases import (
        grad_input_cases,
        grad_weight_case,
        main_grad_case,
    )
    from lokakern.workloads.norm_cases import epilogue_cases

    device = current_device()
    fp8 = fp8_format(device)
    cases = [*shape_cases(SHAPES, fp8)]
    for epilogue in EPILOGUES:
        cases += epilogue_cases(list(SHAPES), epilogue, fp8)
    cases += grad_input_cases(*BACKWARD, fp8)
    cases += [grad_weight_case(*BACKWARD), main_grad_case(*BACKWARD, fp8, fp8)]
    cases.append(fused_case(*BACKWARD, Granularity.ROW, "X1", fp8, batch=4))
    for norm in NORMS:
        problem = make_problem(
            "norm_quantize", (2048, 512), epilogue=norm, out_format=Format.BFLOAT16
        )
        cases.append(Case(problem, "X1"))
    tails: list[Case] = []
    large: list[list[Case]] = []
    edges: tuple[LearnedDistribution, ...] = ()
    is_plugin = libraries.named(kernel.library).is_plugin
    if is_plugin:
        if kernel.op in EDGED:
            edges = (EDGE_ROWS, ONLY_ZEROS, ONLY_TINY) if kernel.op in QUANTIZERS else (EDGE_ROWS,)
        tails += shape_cases([TAILS, (TAILS[0], TAILS[2])], fp8)
        shapes = LARGE_ROWS if kernel.op in QUANTIZERS else LARGE
        large = [[*shape_cases([shape], fp8)] for shape in shapes]
        if kernel.op == "scaled_gemm":  # with the scales that it declares, and a bias
            operands = {"a": Operand(fp8, kernel.granularity),
                        "b": Operand(fp8, kernel.b_granularity, Layout.COLUMN)}  # fmt: skip
            cases[:0] = [Case.of(kernel.op, shape, "X1", **operands) for shape in SHAPES]
            tails = [Case.of(kernel.op, TAILS, "X1", **operands, epilogue=epilogue)
                     for epilogue in ("bias", "none")]  # fmt: skip
            large = [[Case.of(kernel.op, shape, "X1", **operands)] for shape in LARGE]
        # What drifts as it declares is not tried with sums of one sign.
        summed = () if device.is_gpu and kernel.accumulation == "fast" else SUMMED.get(kernel.op)
        if summed and kernel.op == "scaled_gemm":  # float32 shows more
            forms = (Format.FLOAT32, Format.BFLOAT16)
            large.append([Case.of(kernel.op, shape, POSITIVE.name, **operands, out_format=form)
                          for form in forms for shape in summed])  # fmt: skip
        elif summed:
            large.append([replace(case, distribution=POSITIVE.name)
                          for case in shape_cases(summed, fp8)])  # fmt: skip
    outcome = idle = ""
    also: list[str] = []  # further forms in which it was right
    last: Case | None = None  # with the fewest elements, and a bias, of those that it supports
    right: list[Problem] = []
    for some in (cases, tails):
        for case in some:
            fault, rejected = _fault_or_rejection(case, kernel, device, say)
            if fault:
                return fault
            if not rejected:
                outcome, last = RIGHT, case
                right.append(case.problem)
                break
            if case.problem.op == kernel.op and not idle:
                idle = f"{IDLE}{rejected} ({case.problem})"
    if last is None or not is_plugin:
        return outcome or idle or f"{IDLE}none was of {kernel.op}"
    with learned(*edges):
        for case, moved in _variants(last, edges):
            fault, _ = _fault_or_rejection(case, kernel, device, say, moved)
            if fault:
                return fault
    for name, problem in _forms(last.problem, fp8, device):
        fault, rejected = _fault_or_rejection(replace(last, problem=problem), kernel, device, say)
        if fault:
            return fault
        if not rejected:
            also.append(name)
    with learned(POSITIVE):
        for some in large:
            for case in some:
                fault, rejected = _fault_or_rejection(case, kernel, device, say)
                if fault:
                    return fault
                if not rejected:
                    right.append(case.problem)
                    break
    sizes = {axis: max(getattr(problem, axis) for problem in right) for axis in "mnk"}
    words = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    words += f"; also {', '.join(also)}" if also else ""
    untried = [name for name, problem in _unmeasured_forms(last.problem)
               if not isinstance(kernel.supports(problem, device), Rejected)]  # fmt: skip
    words += f"; not tried: {', '.join(untried)}" if untried else ""
    return f"{outcome} (to {words})"


def _fault_or_rejection(
    case: Case, kernel: Kernel, device: Device, say: Say, moved: str = ""
) -> tuple[str, str]:
    """What went wrong at a case, and why the kernel does not take it; "" for neither."""
    try:
        answer = kernel.supports(case.problem, device)
    except Exception as error:
        return f"cannot say what it supports: {_first_line(error)}", ""
    if isinstance(answer, Rejected):
        return "", answer.reason
    return _fault_at(case, kernel, device, say, moved), ""


def _variants(case: Case, edges: Sequence[LearnedDistribution]) -> Iterator[tuple[Case, str]]:
    """What else launchers get: operands in other strides (by name), and edge values."""
    from lokakern.measure.strides import MOVED, moved_problem

    problem = case.problem
    for name in MOVED.get(problem.op, ()):
        moved = moved_problem(problem, name)
        if moved is not None:
            yield replace(case, problem=moved), name
    for edge in edges:
        yield replace(case, distribution=edge.name), ""


def _forms(problem: Problem, fp8: Format, device: Device) -> Iterator[tuple[str, Problem]]:
    """The problem in further formats and layouts that launchers may get, with their names.

    FP8 formats are those of the device; a CPU has them all.
    """
    from lokakern.measure.operands import QUANTIZERS
    from lokakern.workloads.gemm_cases import dense_operand

    is_fnuz = fp8.value.endswith("fnuz")
    formats = [form for form in Format if form.is_fp8
               and (not device.is_gpu or form.value.endswith("fnuz") is is_fnuz)]  # fmt: skip
    a, b, (m, k, n) = problem.a, problem.b, (problem.m, problem.k, problem.n)
    if problem.op in QUANTIZERS:
        yield "float32 x", replace(problem, a=replace(a, format=Format.FLOAT32))
        turned = dense_operand(a.format, (m, k), Layout.COLUMN, Layout.ROW)
        yield "column-major x", replace(problem, a=turned)
        yield from ((form.value, replace(problem, out_format=form))
                    for form in formats if form is not problem.out_format)  # fmt: skip
    elif problem.op == "scaled_gemm" and b is not None:
        yield "float32 out", replace(problem, out_format=Format.FLOAT32)
        for left, right in itertools.product(formats, repeat=2):
            if (left, right) != (a.format, b.format):
                left_a, right_b = replace(a, format=left), replace(b, format=right)
                yield f"{left.value} by {right.value}", replace(problem, a=left_a, b=right_b)
    elif problem.op == "gemm" and b is not None and not problem.prepared:
        wide_a = dense_operand(Format.FLOAT32, (m, k), a.layout, Layout.ROW)
        wide_b = dense_operand(Format.FLOAT32, (k, n), b.layout, Layout.COLUMN)
        yield "float32", replace(problem, a=wide_a, b=wide_b, out_format=Format.FLOAT32)
        turned = dense_operand(a.format, (m, k), Layout.COLUMN, Layout.ROW)
        yield "column-major a", replace(problem, a=turned)
        turned = dense_operand(b.format, (k, n), Layout.ROW, Layout.COLUMN)
        yield "row-major b", replace(problem, b=turned)


def _unmeasured_forms(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The problem in forms that launchers may get, and of which no operands are made here."""
    from lokakern.measure.operands import QUANTIZERS

    if problem.op in QUANTIZERS or (problem.op == "gemm" and not problem.prepared):
        name = "x" if problem.b is None else "a"
        strided = replace(problem.a, layout=Layout.STRIDED)
        yield f"{name} strided along both axes", replace(problem, a=strided)


def _fault_at(case: Case, kernel: Kernel, device: Device, say: Say, moved: str = "") -> str:
    """What went wrong at a case, with the shapes of all operands and scales, or "".

    ``moved`` names an operand in other strides (`lokakern.measure.strides`).
    """
    from lokakern.measure.time_problem import check_case, time_case
    from lokakern.selection.dispatcher import default_regime
    from lokakern.workloads.distributions import DISTRIBUTIONS

    kernel = _within_trial_bound(kernel, case, device)
    values = "" if case.distribution in DISTRIBUTIONS else f" with {case.distribution}"
    named = f"{case.problem}{values}"
    if moved:
        tight = case.problem.a.format.is_fp8 and moved != "out"
        rows = "columns" if moved == "b" else "rows"
        named += f" {'without' if tight else 'with'} gaps between {rows} of {moved}"
    say(named)
    is_timed = device.is_gpu and not moved
    if is_timed:
        (record,) = time_case(case, [kernel], device, default_regime(device))
    if not is_timed or (record.status == "ok" and libraries.named(kernel.library).is_plugin):
        record = check_case(case, kernel, device, moved=moved)
    if record.status == "ok":
        return ""
    reason = record.reason[: LONGEST_WHY // 2]
    if NO_GPU in reason and not is_interpreted():
        reason = f"Triton finds no GPU: {libraries.INTERPRET} to run its kernels on a CPU"
    if record.status == "wrong" and kernel.op == "gemm" and kernel.granularity is Granularity.NONE:
        reason += _undeclared(case, kernel, device)
    operands = named_operands(case.problem).items()
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in operands)
    return f"{record.status}: {reason} at {named}: {shapes}"


def _within_trial_bound(kernel: Kernel, case: Case, device: Device) -> Kernel:
    """A plugin's kernel with the bound of its errors in a trial.

    Declared bounds above 1 are for FP8 tensor cores, which keep 14 bits of a sum; on a CPU, also in
    Triton's interpreter, it has 24. Of positive values errors of all steps have one sign.
    """
    from lokakern.measure.norm_errors import SUM_ROUNDOFF
    from lokakern.workloads.edge_values import POSITIVE

    bound = kernel.kernel_err_bound
    if bound <= 1 or kernel.op not in SUMMED or not libraries.named(kernel.library).is_plugin:
        return kernel
    if not device.is_gpu:
        return replace(kernel, kernel_err_bound=1.0)
    if case.distribution == POSITIVE.name:
        allowed = case.problem.out_format.unit_roundoff + SUM_ROUNDOFF
        return replace(kernel, kernel_err_bound=1 + LARGEST_DRIFT / allowed)
    return kernel


def _undeclared(case: Case, kernel: Kernel, device: Device) -> str:
    """The scales with which a gemm would be right had it declared that it quantizes, or ""."""
    from lokakern.measure.time_problem import check_case

    bound = max(kernel.kernel_err_bound, register.PROMOTED_KERNEL_ERR_BOUND)
    for a, b in QUANTIZED_BY:
        declared = replace(kernel, granularity=a, b_granularity=b, kernel_err_bound=bound)
        if check_case(case, declared, device).status == "ok":
            words = f"granularity=Granularity.{a.name}"
            words += "" if a is b else f", b_granularity=Granularity.{b.name}"
            return f" (a gemm that quantizes inside declares it: {words})"
    return ""
