"""Race: kernels at problems of different scales, timed in the same rounds and checked."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lokakern.device import current_device
from lokakern.errors import DeviceLostError
from lokakern.measure import timing
from lokakern.measure.norm_operands import operands_of
from lokakern.measure.operands import Operands
from lokakern.measure.time_problem import contender_of, floor_us, torch_device, write_again
from lokakern.measure.timing import Contender, faults_of, status_and_reason
from lokakern.registry.register import Kernel
from lokakern.selection.candidates import margin_us
from lokakern.sweep.engine import candidates
from lokakern.types import Problem
from lokakern.workloads.suites import Case

# Accumulations; "none" sums nothing. Sums that are rounded before a norm are those of an unfused
# one in bfloat16, which nobody calls inaccurate: "rounded". What follows a + (another rounding, a
# library's quantizers) is not looked at.
ACCURATE = ("promoted", "float32", "none", "rounded")


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel in a race.

    Attributes:
        kernel: Its name.
        problem: The problem as it saw it.
        ours: Whose it is.
        accurate: Whether its sums are promoted, or float32.
        latency_us: Median time per call.
        margin_us: Half-width of the 95 % interval of the median.
        is_lower_bound: Whether it was too far behind to be timed cold.
        failed: Why it has no time; "" if it has.
        wrong: Whether that is because of what it wrote.
    """

    kernel: str
    problem: str
    ours: bool
    accurate: bool
    latency_us: float | None
    margin_us: float | None
    is_lower_bound: bool
    failed: str
    wrong: bool = False


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
        return self.kernel.accumulation.partition("+")[0] in ACCURATE

    @property
    def median_us(self) -> float:
        samples = self.contender.samples_us
        return statistics.median(samples) if samples and self.contender.status == "ok" else math.inf


def timed(
    same: Sequence[Case],
    side_of: Callable[[Kernel], bool | None],
    regime: str,
    sides: Sequence[Callable[[Kernel], bool]] = (),
    seed: int = 0,
) -> list[Entry]:
    """Everybody's time at the problems of one contest, in the same rounds.

    Args:
        same: Problems that ask for the same product.
        side_of: Whether a kernel is ours; None if it does not take part.
        regime: Timing regime.
        sides: Of whom the fastest is wanted, too, beside ours and the rivals.
        seed: Of operands and order.

    Raises:
        DeviceLostError: A kernel, which is named, left the device unusable.
    """
    running = list(_running(same, side_of, regime, seed))
    ready = [one.contender for one in running if one.contender.status == "ok"]
    floor = min((floor_us(case.problem) for case in same), default=1.0)
    launched = ""

    def announce(contender: Contender) -> None:
        nonlocal launched
        launched = contender.name

    try:
        _race(running, ready, regime, floor, seed, announce, sides)
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
    seed: int,
    announce: Callable[[Contender], None],
    also: Sequence[Callable[[Kernel], bool]],
) -> None:
    def race(contenders: Sequence[Contender]) -> None:
        timing.time_contenders(
            contenders, regime=regime, device=torch_device(), floor_us=floor, seed=seed,
            announce=announce,
        )  # fmt: skip

    race(ready)
    while flattered := [one for one in _leaders(running, also) if one.contender.screened]:
        # Who was timed by a few warm calls only is ahead of all others of its side: a ratio to it
        # would be too low.
        for one in flattered:
            one.contender.screened = one.contender.dropped = False
            one.contender.samples_us.clear()
            one.contender.clocks_mhz.clear()
            race([one.contender])


def _running(
    same: Sequence[Case], side_of: Callable[[Kernel], bool | None], regime: str, seed: int
) -> Iterator[_Running]:
    device, where = current_device(), torch_device()
    unquantized: set[str] = set()
    for case in same:
        kernels = [kernel for kernel in candidates(case.problem, device)
                   if side_of(kernel) is not None and kernel.name not in unquantized]  # fmt: skip
        if not kernels:
            continue
        operands, status, reason = None, "ok", ""
        try:
            operands = operands_of(case.problem, case.distribution, where, device,
                                   cold=regime != "graph-hot", seed=seed)  # fmt: skip
        except Exception as error:  # memory above all; another problem may fit
            status, reason = status_and_reason(error)
        for kernel in kernels:
            name = f"{kernel.name} at {case.problem}"  # some take more than one kind of scale
            contender = Contender(name, (), status, reason)
            if operands is not None:
                with faults_of(contender, where):
                    contender = contender_of(operands, kernel, name)
            if kernel.op == "gemm" and not kernel.quantizes and contender.status == "ok":
                # It reads the source of a prepared weight, whatever its form: once is enough.
                unquantized.add(kernel.name)
            yield _Running(kernel, case.problem, bool(side_of(kernel)), operands, contender)


def _leaders(
    running: Sequence[_Running], also: Sequence[Callable[[Kernel], bool]]
) -> list[_Running]:
    """Who is fastest of ours, of the rivals, of the accurate rivals, and of each other side."""
    sides = (
        [one for one in running if one.ours and one.accurate],
        [one for one in running if not one.ours],
        [one for one in running if not one.ours and one.accurate],
        *([one for one in running if member(one.kernel) and (one.accurate or not one.ours)]
          for member in also),
    )  # fmt: skip
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
            write_again(one.operands, contender)
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
        wrong=bool(wrong),
    )
