"""Contest: kernels of ours against rivals, timed against each other now, without a database.

All problems that ask for the same product stand in one contest, whatever their scales: a
tensor-scaled library kernel is a rival of a row-scaled one of ours, and of the prepared forms of a
weight whichever is fastest counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from lokakern.bench import timing
from lokakern.bench.conditions import Condition
from lokakern.bench.draws import finish_draws
from lokakern.bench.measure import FLOOR_BYTES_PER_US, contender_of, floor_us, torch_device
from lokakern.bench.operands import Operands
from lokakern.bench.suites import Case
from lokakern.bench.sweep import FEWEST_PREBUILT, candidates
from lokakern.bench.timing import Contender, faults_of, status_and_reason
from lokakern.device import current_device
from lokakern.errors import DeviceLostError, UnknownNameError
from lokakern.evidence import margin_us
from lokakern.prebuild import prebuild
from lokakern.registry.register import Kernel, kernels_for
from lokakern.selection import default_regime
from lokakern.types import Granularity, Operand, Problem

ACCURATE = ("promoted", "float32", "none")  # accumulations; "none" sums nothing
# What a kernel may take: this times its bytes at 4.3 TB/s, and so many microseconds. The bound of
# quantizers; elsewhere the bytes alone.
BOUNDS = {"quantize": (1.2, 2.0), "dequantize": (1.2, 2.0)}


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel in a contest.

    Attributes:
        kernel: Its name.
        problem: The problem as it saw it.
        ours: Whose it is.
        accurate: Whether its sums are promoted, or float32.
        latency_us: Median time per call.
        margin_us: Half-width of the 95 % interval of the median.
        is_lower_bound: Whether it was too far behind to be timed cold.
        failed: Why it has no time; "" if it has.
    """

    kernel: str
    problem: str
    ours: bool
    accurate: bool
    latency_us: float | None
    margin_us: float | None
    is_lower_bound: bool
    failed: str


@dataclass(frozen=True, slots=True)
class Row:
    """One contest: the fastest accurate kernel of ours against the fastest rivals.

    Attributes:
        problem: The problem without its scales.
        ours: The fastest accurate kernel of ours; "" where none ran.
        rival: The fastest rival of any accumulation.
        accurate_rival: The fastest accurate rival.
        speedup: Rival's time over ours; above 1 ours is faster.
        accurate_speedup: The same of the accurate rival.
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

    ``count`` rows are in the group; of ``compared`` ours and a rival have a time.
    """

    group: str
    count: int
    compared: int
    speedup: float | None
    least_speedup: float | None
    accurate_speedup: float | None
    least_accurate_speedup: float | None
    over_bound: float | None
    most_over_bound: float | None


@dataclass(frozen=True, slots=True)
class Contest:
    """All rows, and what they come to: all of them first, then by group."""

    rows: tuple[Row, ...]
    summaries: tuple[Summary, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def unscaled(problem: Problem) -> Problem:
    """A problem without its scales and what follows from how they are prepared."""

    def bare(operand: Operand) -> Operand:
        return replace(operand, granularity=Granularity.NONE, alignment=16)

    b = problem.b
    if b is not None:
        b = bare(b)
    return replace(problem, a=bare(problem.a), b=b)


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
    step: Callable[[str], None] = lambda _text: None,
) -> Contest:
    """Time kernels of ours and rivals at every problem of an op, all of a shape interleaved.

    What each wrote while it was timed is checked; one that is wrong does not count.

    Args:
        cases: Of any op; those of others are left out.
        op: What is compared.
        ours: Names of kernels, ``*`` and ``?`` standing for anything.
        rivals: The same; a kernel of ours is no rival.
        groups: Conditions under which means are taken, too.
        regime: Timing regime; None means graph-cold on GPUs and eager on CPUs.
        step: Called with each problem.

    Raises:
        UnknownNameError: No kernel of the op has a name of ours, or of the rivals.
        DeviceLostError: A kernel, which is named, left the device unusable.
    """
    _refuse_unknown(op, ours)
    _refuse_unknown(op, rivals)
    device, where = current_device(), torch_device()
    regime = regime or default_regime(device)
    timing.check_regime(regime, where)

    def side_of(kernel: Kernel) -> bool | None:
        if _matches(kernel.name, ours):
            return True
        return False if _matches(kernel.name, rivals) else None

    found = contests_of(cases, op)
    problems = [case.problem for same in found.values() for case in same]
    names = sorted({
        kernel.name for problem in problems for kernel in candidates(problem, device)
        if side_of(kernel) is not None
    })  # fmt: skip
    if device.is_gpu and len(problems) >= FEWEST_PREBUILT:
        prebuild(problems, device, names)
    timing.warm(where)
    waiting = [case for same in found.values() for case in same]
    rows, drawn = [], 0
    for (problem, _), same in found.items():
        step(str(problem))
        if drawn < len(same):
            drawn = finish_draws(waiting)
        drawn, waiting = drawn - len(same), waiting[len(same) :]
        rows.append(_row(problem, same, side_of, groups, regime))
    return Contest(tuple(rows), tuple(_summaries(rows, groups)))


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _refuse_unknown(op: str, globs: Sequence[str]) -> None:
    names = [kernel.name for kernel in kernels_for(op)]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
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
) -> Row:
    entries = _timed(same, side_of, regime)
    problems = {str(case.problem): case.problem for case in same}
    ours = _fastest(e for e in entries if e.ours and e.accurate)
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
        accurate_rival=accurate.kernel if accurate else "",
        accurate_rival_us=accurate.latency_us if accurate else None,
        accurate_speedup=_ratio(accurate, ours),
        bound_us=bound,
        over_bound=ours.latency_us / bound if ours and ours.latency_us and bound else None,
        groups=tuple(str(group) for group in groups if group.holds(same[0].problem)),
        entries=tuple(entries),
    )


def bound_us(problem: Problem) -> float:
    """See `BOUNDS`."""
    factor, launch_us = BOUNDS.get(problem.op, (1.0, 0.0))
    return factor * problem.bytes_moved / FLOOR_BYTES_PER_US + launch_us


def _fastest(entries: Iterable[Entry]) -> Entry | None:
    timed = [entry for entry in entries if entry.latency_us is not None]
    return min(timed, key=lambda entry: entry.latency_us or math.inf, default=None)


def _ratio(one: Entry | None, other: Entry | None) -> float | None:
    if one is None or other is None or not one.latency_us or not other.latency_us:
        return None
    return one.latency_us / other.latency_us


@dataclass(slots=True)
class _Running:
    """A kernel at a problem while it is timed; without operands where there is no room."""

    kernel: Kernel
    problem: Problem
    ours: bool
    operands: Operands | None
    contender: Contender

    @property
    def accurate(self) -> bool:
        return self.kernel.accumulation in ACCURATE

    @property
    def median_us(self) -> float:
        samples = self.contender.samples_us
        return statistics.median(samples) if samples and self.contender.status == "ok" else math.inf


def _timed(
    same: Sequence[Case], side_of: Callable[[Kernel], bool | None], regime: str
) -> list[Entry]:
    """Everybody's time at the problems of one contest, in the same rounds."""
    running = list(_running(same, side_of, regime))
    ready = [one.contender for one in running if one.contender.status == "ok"]
    floor = min((floor_us(case.problem) for case in same), default=1.0)
    launched = ""

    def announce(contender: Contender) -> None:
        nonlocal launched
        launched = contender.name

    try:
        _race(running, ready, regime, floor, announce)
        entries = [_entry(one, announce) for one in running]
    except DeviceLostError as error:
        raise DeviceLostError(f"{launched}: {error}; leave that kernel out") from error
    timing.release([one.contender for one in running])
    return entries


def _race(
    running: Sequence[_Running],
    ready: Sequence[Contender],
    regime: str,
    floor: float,
    announce: Callable[[Contender], None],
) -> None:
    def race(contenders: Sequence[Contender]) -> None:
        timing.time_contenders(
            contenders, regime=regime, device=torch_device(), floor_us=floor, announce=announce
        )

    race(ready)
    while flattered := [one for one in _leaders(running) if one.contender.screened]:
        # Who was timed by a few warm calls only is ahead of all others of its side: a ratio to it
        # would be too low.
        for one in flattered:
            one.contender.screened = one.contender.dropped = False
            one.contender.samples_us.clear()
            one.contender.clocks_mhz.clear()
            race([one.contender])


def _running(
    same: Sequence[Case], side_of: Callable[[Kernel], bool | None], regime: str
) -> Iterator[_Running]:
    device, where = current_device(), torch_device()
    unquantized: set[str] = set()
    for case in same:
        kernels = [kernel for kernel in candidates(case.problem, device)
                   if side_of(kernel) is not None and kernel.name not in unquantized]  # fmt: skip
        # It reads the source of a prepared weight, whatever its form: once is enough.
        unquantized |= {k.name for k in kernels if k.op == "gemm" and not k.quantizes}
        if not kernels:
            continue
        operands, status, reason = None, "ok", ""
        try:
            operands = Operands(case.problem, case.distribution, where, device,
                                cold=regime != "graph-hot")  # fmt: skip
        except Exception as error:  # memory above all; another problem may fit
            status, reason = status_and_reason(error)
        for kernel in kernels:
            name = f"{kernel.name} at {case.problem}"  # some take more than one kind of scale
            contender = Contender(name, (), status, reason)
            if operands is not None:
                with faults_of(contender, where):
                    contender = contender_of(operands, kernel, name)
            yield _Running(kernel, case.problem, bool(side_of(kernel)), operands, contender)


def _leaders(running: Sequence[_Running]) -> list[_Running]:
    """Who is fastest of ours, of the rivals, and of the accurate rivals."""
    sides = (
        [one for one in running if one.ours and one.accurate],
        [one for one in running if not one.ours],
        [one for one in running if not one.ours and one.accurate],
    )
    found = [min(side, key=lambda one: one.median_us) for side in sides if side]
    distinct = {id(one): one for one in found if one.median_us < math.inf}
    return list(distinct.values())


def _entry(one: _Running, announce: Callable[[Contender], None]) -> Entry:
    """Check what was written while it was timed, and put its entry together."""
    contender = one.contender
    wrong = ""
    if contender.status == "ok" and one.operands is not None:
        announce(contender)
        with faults_of(contender, torch_device()):
            one.operands.poison()
            contender.run_all()
            _, wrong = one.operands.check(one.kernel)
    reason = wrong or contender.reason
    times = None if reason else timing.quantiles(contender)
    return Entry(
        kernel=one.kernel.name,
        problem=str(one.problem),
        ours=one.ours,
        accurate=one.accurate,
        latency_us=times.p50 if times else None,
        margin_us=margin_us(times.p20, times.p80, times.replay_count) if times else None,
        is_lower_bound=contender.screened,
        failed=reason,
    )


def _summaries(rows: Sequence[Row], groups: Sequence[Condition]) -> Iterable[Summary]:
    yield _summary("all", rows)
    for group in groups:
        yield _summary(str(group), [row for row in rows if str(group) in row.groups])


def _summary(name: str, rows: Sequence[Row]) -> Summary:
    speedups = [row.speedup for row in rows if row.speedup]
    accurate = [row.accurate_speedup for row in rows if row.accurate_speedup]
    over = [row.over_bound for row in rows if row.over_bound]
    return Summary(
        group=name,
        count=len(rows),
        compared=len(speedups),
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
