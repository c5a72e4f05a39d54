"""Races: kernels timed against each other in interleaved rounds, and checked.

Every comparison runs its kernels here and makes its own rows of the entries.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from lokakern.bench.compare import compiled_baselines
from lokakern.build.prebuild import prebuild
from lokakern.device import current_device
from lokakern.errors import DeviceLostError
from lokakern.measure import timing
from lokakern.measure.norm_operands import operands_of
from lokakern.measure.operand_cache import prefetched_groups
from lokakern.measure.operands import Operands
from lokakern.measure.time_problem import contender_of, floor_us, torch_device, write_again
from lokakern.measure.timing import Contender, faults_of, status_and_reason
from lokakern.registry.register import Kernel
from lokakern.selection.dispatcher import default_regime
from lokakern.selection.ties import margin_us
from lokakern.sweep.engine import FEWEST_PREBUILT
from lokakern.types import ErrorBudget, Problem
from lokakern.workloads.filters import Condition
from lokakern.workloads.suites import Case

# Accumulations. "none" sums nothing; "rounded" sums are those of an unfused norm in bfloat16. The
# part after a + (another rounding, a library's quantizer) does not matter here.
ACCURATE = ("promoted", "float32", "none", "rounded")


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of a comparison.

    Raises:
        UnknownNameError: The regime is unknown.
        MeasurementError: The device here has no graphs.
    """

    regime: str = ""  # timing regime; "" means graph-cold on GPUs and eager on CPUs
    seed: int = 0  # seed of operands and of the order in rounds; rows of a database have 0
    groups: Sequence[Condition] = ()  # conditions; each gets a summary of the rows where it holds
    budget: float | ErrorBudget = 0.06  # the error budget of dispatch; a number limits ``row_err``
    # Judge errors on one distribution instead of all realistic ones.
    distribution: str | None = None
    begin: Callable[[int], None] = lambda _count: None  # called with the number of races
    step: Callable[[str], None] = lambda _text: None  # called with each problem
    note: Callable[[str], None] = lambda _text: None  # called with what torch.compile compiled

    def __post_init__(self) -> None:
        regime = self.regime or default_regime(current_device())
        timing.check_regime(regime, torch_device())
        object.__setattr__(self, "regime", regime)


class Entrant(NamedTuple):
    """A kernel that takes part in a race."""

    case: Case  # the problem it runs, and the distribution of its operands
    kernel: Kernel
    name: str  # its name in the entry: that of the kernel, or its part in the comparison
    ours: bool  # whether it is on the side under test, not a rival

    @property
    def accurate(self) -> bool:
        return self.kernel.accumulation.partition("+")[0] in ACCURATE


Side = Callable[[Entrant], bool]
RIVALS: tuple[Side, Side] = (
    lambda entrant: not entrant.ours,
    lambda entrant: not entrant.ours and entrant.accurate,
)


class Race(NamedTuple):
    """Kernels to be timed in the same rounds."""

    problem: Problem  # the problem that progress reports
    cases: Sequence[Case]  # problems that ask for the same product
    entrants: Sequence[Entrant]  # kernels at these problems, case by case
    sides: Sequence[Side] = ()  # the fastest of each side gets a time that is no lower bound


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel in a race."""

    kernel: str  # its name
    problem: str  # the problem it ran
    ours: bool  # whether it is on the side under test, not a rival
    accurate: bool  # whether its sums are promoted, or float32
    latency_us: float | None  # median time per call
    margin_us: float | None  # half-width of the 95 % interval of the median
    is_lower_bound: bool  # whether it was too slow to be timed cold
    failed: str  # why it has no time; "" if it has
    wrong: bool = False  # whether its output was incorrect


@dataclass(slots=True)
class _Running:
    """An entrant while it is timed; without operands where memory is short."""

    entrant: Entrant
    operands: Operands | None
    contender: Contender

    @property
    def median_us(self) -> float:
        samples = self.contender.samples_us
        return statistics.median(samples) if samples and self.contender.status == "ok" else math.inf


def run(races: Sequence[Race], setting: Setting) -> Iterator[list[Entry]]:
    """Build all kernels, then run race after race.

    Yields:
        The entries of each race, in the order of its entrants.

    Raises:
        DeviceLostError: A kernel, which is named, left the device unusable.
    """
    device, where = current_device(), torch_device()
    problems = [case.problem for race in races for case in race.cases]
    names = sorted({entrant.kernel.name for race in races for entrant in race.entrants})
    if device.is_gpu and len(problems) >= FEWEST_PREBUILT:
        prebuild(problems, device, names)
    compiled_baselines.compile_ahead(problems, names, where, device, setting.note)
    timing.warm(where)
    setting.begin(len(races))
    ready = prefetched_groups([race.cases for race in races], seed=setting.seed)
    for race, _ in zip(races, ready, strict=True):
        setting.step(str(race.problem))
        yield _timed(race, setting.regime, setting.seed)


def _timed(race: Race, regime: str, seed: int) -> list[Entry]:
    running = list(_started(race, regime, seed))
    floor = min((floor_us(case.problem) for case in race.cases), default=1.0)
    launched = ""

    def announce(contender: Contender) -> None:
        nonlocal launched
        launched = contender.name

    def time(contenders: Sequence[Contender]) -> None:
        timing.time_contenders(
            contenders, regime=regime, device=torch_device(), floor_us=floor, seed=seed,
            announce=announce,
        )  # fmt: skip

    try:
        time([one.contender for one in running if one.contender.status == "ok"])
        while screened := [c for c in _leaders(running, race.sides) if c.screened]:
            # A time of a few warm calls is too short: a ratio to it would be too low.
            for contender in screened:
                contender.screened = contender.dropped = False
                contender.samples_us.clear()
                contender.clocks_mhz.clear()
                time([contender])
        entries = [_entry(one, announce) for one in running]
    except DeviceLostError as error:
        raise DeviceLostError(f"{launched}: {error}; leave that kernel out") from error
    timing.release([one.contender for one in running])
    return entries


def _started(race: Race, regime: str, seed: int) -> Iterator[_Running]:
    device, where = current_device(), torch_device()
    unquantized: set[str] = set()
    for case, group in itertools.groupby(race.entrants, attrgetter("case")):
        entrants = [entrant for entrant in group if entrant.kernel.name not in unquantized]
        if not entrants:
            continue
        operands, status, reason = None, "ok", ""
        try:
            operands = operands_of(case.problem, case.distribution, where, device,
                                   cold=regime != "graph-hot", seed=seed)  # fmt: skip
        except Exception as error:  # memory above all; another problem may fit
            status, reason = status_and_reason(error)
        for entrant in entrants:
            name = f"{entrant.name} at {case.problem}"  # some take more than one kind of scale
            contender = Contender(name, (), status, reason)
            if operands is not None:
                with faults_of(contender, where):
                    contender = contender_of(operands, entrant.kernel, name)
            kernel = entrant.kernel
            if kernel.op == "gemm" and not kernel.quantizes and contender.status == "ok":
                # It reads the source of a prepared weight, whatever its form: once is enough.
                unquantized.add(kernel.name)
            yield _Running(entrant, operands, contender)


def _leaders(running: Sequence[_Running], sides: Sequence[Side]) -> list[Contender]:
    """The fastest of each side."""
    teams = [[one for one in running if side(one.entrant)] for side in sides]
    found = [min(team, key=lambda one: one.median_us) for team in teams if team]
    leaders = {id(one): one.contender for one in found if one.median_us < math.inf}
    return list(leaders.values())


def _entry(one: _Running, announce: Callable[[Contender], None]) -> Entry:
    """Check the output of a timed kernel, and make its entry."""
    entrant, contender = one.entrant, one.contender
    wrong = ""
    if contender.status == "ok" and one.operands is not None:
        announce(contender)
        with faults_of(contender, torch_device()):
            write_again(one.operands, contender)
            _, wrong = one.operands.check(entrant.kernel)
    reason = wrong or contender.reason
    median, margin = (None, None) if reason else median_of(contender)
    return Entry(
        kernel=entrant.name,
        problem=str(entrant.case.problem),
        ours=entrant.ours,
        accurate=entrant.accurate,
        latency_us=median,
        margin_us=margin,
        is_lower_bound=contender.screened,
        failed=reason,
        wrong=bool(wrong),
    )


def median_of(contender: Contender) -> tuple[float, float]:
    """The median time of a contender, and the half-width of its 95 % interval."""
    times = timing.quantiles(contender)
    return times.p50, margin_us(times.p20, times.p80, times.replay_count)


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """The geometric mean of ratios; None of none."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def means_of(ratios: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Geometric means and least ratios, by name; names without ratios have none."""
    means = {name: mean for name, found in ratios.items() if (mean := geometric_mean(found))}
    return means, {name: min(ratios[name]) for name in means}


def fastest(entries: Iterable[Entry]) -> Entry | None:
    """The entry with the shortest time; None where none has a time."""
    timed = [entry for entry in entries if entry.latency_us is not None]
    return min(timed, key=lambda entry: entry.latency_us or math.inf, default=None)


@dataclass(frozen=True, slots=True)
class Shape:
    """First columns of every comparison: the problem, and the texts of conditions that hold."""

    problem: str
    m: int
    n: int
    k: int
    groups: tuple[str, ...]


def shape_of(problem: Problem, groups: Sequence[Condition], name: str = "") -> dict[str, Any]:
    """Fields of a `Shape`."""
    holding = tuple(str(group) for group in groups if group.holds(problem))
    return {"problem": name or str(problem), "m": problem.m, "n": problem.n, "k": problem.k,
            "groups": holding}  # fmt: skip


_Row = TypeVar("_Row", bound=Shape)


def by_group(
    rows: Sequence[_Row], groups: Sequence[Condition]
) -> Iterator[tuple[str, Sequence[_Row]]]:
    """All rows, then those of each group."""
    yield "all", rows
    for text in map(str, groups):
        yield text, [row for row in rows if text in row.groups]
