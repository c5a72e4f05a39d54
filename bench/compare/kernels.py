"""Contest: kernels of ours against rivals, timed against each other now, without a database.

All problems that ask for the same product stand in one contest, whatever their scales: a
tensor-scaled library kernel is a rival of a row-scaled one of ours, and of the prepared forms of a
weight whichever is fastest counts. Of a GEMM with a norm formats do not part them, either.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from lokakern.bench.compare import compiled_baselines as compiled_layers
from lokakern.bench.compare.race import Entry, timed
from lokakern.build.prebuild import prebuild
from lokakern.device import current_device
from lokakern.errors import UnknownNameError
from lokakern.measure import timing
from lokakern.measure.operand_cache import prefetched_groups
from lokakern.measure.time_problem import (
    FLOOR_BYTES_PER_US,
    FLOOR_FLOPS_PER_US,
    FLOOR_LAUNCH_US,
    torch_device,
)
from lokakern.registry.register import KERNELS, Kernel, kernels_for
from lokakern.selection.dispatcher import default_regime
from lokakern.sweep.engine import FEWEST_PREBUILT, candidates
from lokakern.types import Format, Granularity, Operand, Problem
from lokakern.workloads.filters import Condition
from lokakern.workloads.suites import Case

# What a kernel may take: this times its bytes at 4.3 TB/s, and so many microseconds. The bound of
# quantizers; of a GEMM with a norm the floor of its products too, and a launch; elsewhere the bytes
# alone.
BOUNDS = {
    "quantize": (1.2, 2.0), "dequantize": (1.2, 2.0), "norm_quantize": (1.2, 2.0),
    "norm_backward": (1.2, 2.0),
    "gemm_norm": (1.0, FLOOR_LAUNCH_US),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One contest: ours against the rivals, of any accumulation and the accurate among themselves.

    Attributes:
        problem: The problem without its scales.
        ours: The fastest kernel of ours, of any accumulation; "" where none ran.
        rival: The fastest rival of any accumulation.
        accurate_ours: The fastest accurate kernel of ours.
        accurate_rival: The fastest accurate rival.
        speedup: Rival's time over ours; above 1 ours is faster.
        accurate_speedup: The same of the accurate ones.
        bound_us: See `BOUNDS`, of the problem that ours solves.
        over_bound: Time of ours over the bound.
        groups: Texts of the conditions that hold.
        entries: Everybody.
    """

    problem: str
    m: int
    n: int
    k: int
    ours: str
    ours_us: float | None
    rival: str
    rival_us: float | None
    speedup: float | None
    accurate_ours: str
    accurate_ours_us: float | None
    accurate_rival: str
    accurate_rival_us: float | None
    accurate_speedup: float | None
    bound_us: float | None
    over_bound: float | None
    groups: tuple[str, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """What rows come to: geometric means and extremes; None without any.

    ``count`` rows are in the group; of ``compared`` ours and a rival have a time, in ``missing``
    none of ours has. ``wrong`` times a kernel of ours wrote something wrong, ``failed`` times one
    did not run, at any of the problems of a row.
    """

    group: str
    count: int
    compared: int
    missing: int
    wrong: int
    failed: int
    speedup: float | None
    least_speedup: float | None
    accurate_speedup: float | None
    least_accurate_speedup: float | None
    over_bound: float | None
    most_over_bound: float | None


@dataclass(frozen=True, slots=True)
class Pairing:
    """What one pattern of ours comes to against one of the rivals, where there are several.

    Of each side the fastest kernel counts; ``compared`` rows have both.
    """

    ours: str
    rivals: str
    group: str
    compared: int
    speedup: float | None
    least_speedup: float | None


@dataclass(frozen=True, slots=True)
class Contest:
    """All rows, and what they come to: all of them first, then by group."""

    rows: tuple[Row, ...]
    summaries: tuple[Summary, ...]
    pairings: tuple[Pairing, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def unscaled(problem: Problem) -> Problem:
    """A problem without its scales and what follows from how they are prepared.

    Of a GEMM with a norm formats do not count, either, of operands and output: who asks for the
    layer of a model chooses among all that make it.
    """
    any_format = problem.op == "gemm_norm"

    def bare(operand: Operand) -> Operand:
        form = Format.BFLOAT16 if any_format else operand.format
        return replace(operand, format=form, granularity=Granularity.NONE, alignment=16)

    b = problem.b
    if b is not None:
        b = bare(b)
    problem = replace(problem, a=bare(problem.a), b=b)
    if not any_format:
        return problem
    return replace(problem, prepared=False, out_format=Format.BFLOAT16,
                   out_granularity=Granularity.NONE)  # fmt: skip


def contests_of(cases: Iterable[Case], op: str) -> dict[tuple[Problem, str], list[Case]]:
    """Cases of an op by what they ask for."""
    found: dict[tuple[Problem, str], list[Case]] = {}
    for case in cases:
        if case.problem.op == op:
            found.setdefault((unscaled(case.problem), case.distribution), []).append(case)
    return found


def contest(
    cases: Sequence[Case],
    op: str,
    *,
    ours: Sequence[str],
    rivals: Sequence[str],
    groups: Sequence[Condition] = (),
    regime: str | None = None,
    seed: int = 0,
    step: Callable[[str], None] = lambda _text: None,
    note: Callable[[str], None] = lambda _text: None,
) -> Contest:
    """Time kernels of ours and rivals at every problem of an op, all of a shape interleaved.

    What each wrote while it was timed is checked; one that is wrong does not count.

    Args:
        cases: Of any op; those of others are left out.
        op: What is compared.
        ours: Names of kernels, ``*`` and ``?`` standing for anything. A composition is ours if all
            its parts are, or if a name with ``+`` is its own.
        rivals: Names of kernels or of compositions; a kernel of ours is no rival. Where there is
            more than one pattern, each of ours is compared with each of the rivals, too.
        groups: Conditions under which means are taken, too.
        regime: Timing regime; None means graph-cold on GPUs and eager on CPUs.
        seed: Of operands and order.
        step: Called with each problem.
        note: Told what is compiled before.

    Raises:
        UnknownNameError: No kernel of the op has a name of ours, or of the rivals; or all that have
            are compositions with parts that are not ours.
        DeviceLostError: A kernel, which is named, left the device unusable.
    """
    _refuse_unknown(op, ours)
    _refuse_unknown(op, rivals)
    _refuse_parts_of_others(op, ours)
    device, where = current_device(), torch_device()
    regime = regime or default_regime(device)
    timing.check_regime(regime, where)

    def side_of(kernel: Kernel) -> bool | None:
        if _is_ours(kernel, ours):
            return True
        return False if _matches(kernel.name, rivals) else None

    def is_rival(kernel: Kernel, glob: str) -> bool:
        return side_of(kernel) is False and _matches(kernel.name, [glob])

    sides: list[Callable[[Kernel], bool]] = []
    if len(ours) * len(rivals) > 1:
        sides += [functools.partial(_is_ours, globs=[glob]) for glob in ours]
        sides += [functools.partial(is_rival, glob=glob) for glob in rivals]
    found = contests_of(cases, op)
    problems = [case.problem for same in found.values() for case in same]
    names = sorted({
        kernel.name for problem in problems for kernel in candidates(problem, device)
        if side_of(kernel) is not None
    })  # fmt: skip
    if device.is_gpu and len(problems) >= FEWEST_PREBUILT:
        prebuild(problems, device, names)
    compiled_layers.compile_ahead(problems, names, where, device, note)
    timing.warm(where)
    rows = []
    for (problem, _), same in zip(found, prefetched_groups(found.values(), seed=seed), strict=True):
        step(str(problem))
        rows.append(_row(problem, same, side_of, groups, regime, sides, seed))
    pairings = _pairings(rows, ours, rivals, groups) if sides else ()
    return Contest(tuple(rows), tuple(_summaries(rows, groups)), tuple(pairings))


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _is_ours(kernel: Kernel, globs: Sequence[str]) -> bool:
    """A rival's GEMM does not become ours by a quantizer of ours in front of it."""
    if not kernel.parts:
        return _matches(kernel.name, globs)
    whole = [glob for glob in globs if "+" in glob]
    return _matches(kernel.name, whole) or all(_matches(part, globs) for part in kernel.parts)


def _refuse_parts_of_others(op: str, globs: Sequence[str]) -> None:
    if not any(_is_ours(kernel, globs) for kernel in kernels_for(op)):
        raise UnknownNameError(
            f"every kernel of {op} named by {', '.join(globs)} has parts with other names; name "
            "these, too, or whole compositions, such as 'cuda.quantize_*+torch.*'"
        )


def _refuse_unknown(op: str, globs: Sequence[str]) -> None:
    kernels = kernels_for(op)
    names = [kernel.name for kernel in kernels]
    parts = [part for kernel in kernels for part in kernel.parts]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in (*names, *parts)):
            raise UnknownNameError(
                f"no kernel of {op} is named {glob!r}; expected one of {', '.join(names)}, or a "
                "pattern such as 'cuda.*'"
            )


def _row(
    problem: Problem,
    same: Sequence[Case],
    side_of: Callable[[Kernel], bool | None],
    groups: Sequence[Condition],
    regime: str,
    sides: Sequence[Callable[[Kernel], bool]] = (),
    seed: int = 0,
) -> Row:
    entries = timed(same, side_of, regime, sides, seed)
    problems = {str(case.problem): case.problem for case in same}
    ours = _fastest(e for e in entries if e.ours)
    accurate_ours = _fastest(e for e in entries if e.ours and e.accurate)
    rival = _fastest(e for e in entries if not e.ours)
    accurate = _fastest(e for e in entries if not e.ours and e.accurate)
    bound = None if ours is None else bound_us(problems[ours.problem])
    return Row(
        problem=str(problem),
        m=problem.m,
        n=problem.n,
        k=problem.k,
        ours=ours.kernel if ours else "",
        ours_us=ours.latency_us if ours else None,
        rival=rival.kernel if rival else "",
        rival_us=rival.latency_us if rival else None,
        speedup=_ratio(rival, ours),
        accurate_ours=accurate_ours.kernel if accurate_ours else "",
        accurate_ours_us=accurate_ours.latency_us if accurate_ours else None,
        accurate_rival=accurate.kernel if accurate else "",
        accurate_rival_us=accurate.latency_us if accurate else None,
        accurate_speedup=_ratio(accurate, accurate_ours),
        bound_us=bound,
        over_bound=ours.latency_us / bound if ours and ours.latency_us and bound else None,
        groups=tuple(str(group) for group in groups if group.holds(same[0].problem)),
        entries=tuple(entries),
    )


def bound_us(problem: Problem) -> float:
    """See `BOUNDS`."""
    factor, launch_us = BOUNDS.get(problem.op, (1.0, 0.0))
    moved = factor * problem.bytes_moved / FLOOR_BYTES_PER_US
    if problem.op == "gemm_norm":
        moved = max(moved, problem.flops / FLOOR_FLOPS_PER_US)
    return moved + launch_us


def bound_words(op: str) -> str:
    """What `bound_us` is of an op."""
    factor, launch_us = BOUNDS.get(op, (1.0, 0.0))
    moved = f"{factor:g} times the bytes at 4.3 TB/s"
    if op == "gemm_norm":
        moved = f"the larger of {moved} and products at {FLOOR_FLOPS_PER_US / 1e6:g} TFLOP/s"
    return f"bound: {moved}, and {launch_us:g} us"


def _fastest(entries: Iterable[Entry]) -> Entry | None:
    timed = [entry for entry in entries if entry.latency_us is not None]
    return min(timed, key=lambda entry: entry.latency_us or math.inf, default=None)


def _ratio(one: Entry | None, other: Entry | None) -> float | None:
    if one is None or other is None or not one.latency_us or not other.latency_us:
        return None
    return one.latency_us / other.latency_us


def _summaries(rows: Sequence[Row], groups: Sequence[Condition]) -> Iterable[Summary]:
    yield _summary("all", rows)
    for group in groups:
        yield _summary(str(group), [row for row in rows if str(group) in row.groups])


def _pairings(
    rows: Sequence[Row], ours: Sequence[str], rivals: Sequence[str], groups: Sequence[Condition]
) -> Iterable[Pairing]:
    for group, mine, theirs in itertools.product(["all", *map(str, groups)], ours, rivals):
        ratios = []
        for row in rows:
            if group != "all" and group not in row.groups:
                continue
            one = _fastest(e for e in row.entries if e.ours and _is_ours(KERNELS[e.kernel], [mine]))
            other = _fastest(e for e in row.entries if not e.ours and _matches(e.kernel, [theirs]))
            ratio = _ratio(other, one)
            if ratio is not None:
                ratios.append(ratio)
        yield Pairing(mine, theirs, group, len(ratios), geometric_mean(ratios),
                      min(ratios, default=None))  # fmt: skip


def _summary(name: str, rows: Sequence[Row]) -> Summary:
    speedups = [row.speedup for row in rows if row.speedup]
    accurate = [row.accurate_speedup for row in rows if row.accurate_speedup]
    over = [row.over_bound for row in rows if row.over_bound]
    ours = [entry for row in rows for entry in row.entries if entry.ours]
    return Summary(
        group=name,
        count=len(rows),
        compared=len(speedups),
        missing=sum(not row.ours for row in rows),
        wrong=sum(entry.wrong for entry in ours),
        failed=sum(bool(entry.failed) and not entry.wrong for entry in ours),
        speedup=geometric_mean(speedups),
        least_speedup=min(speedups, default=None),
        accurate_speedup=geometric_mean(accurate),
        least_accurate_speedup=min(accurate, default=None),
        over_bound=geometric_mean(over),
        most_over_bound=max(over, default=None),
    )


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """Of ratios; None of none."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
