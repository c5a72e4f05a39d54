"""Time the candidates of one problem against each other, then check their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lokakern.device import current_device
from lokakern.measure import timing
from lokakern.measure.fences import fence
from lokakern.measure.norm_operands import operands_of
from lokakern.measure.operands import Operands
from lokakern.measure.strides import move
from lokakern.measure.timing import Contender, faults_of, status_and_reason
from lokakern.registry.register import Kernel
from lokakern.registry.schema.records import TimingRecord
from lokakern.types import Device, Problem
from lokakern.workloads.suites import Case

# Roofline of an H200, which determines the length of a replay; other devices need not be exact.
FLOOR_BYTES_PER_US, FLOOR_FLOPS_PER_US, FLOOR_LAUNCH_US = 4.3e6, 1.979e9, 1.5

OVERWRITES = "it changes what it should only read"

# Progress of a measurement: the index of the running kernel (None: no kernel runs), and a text.
Announce = Callable[[int | None, str], None]


def torch_device() -> torch.device:
    """The device that `current_device` describes."""
    is_gpu = current_device().is_gpu
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")


def floor_us(problem: Problem) -> float:
    """Least time of a problem on an H200, in microseconds: bytes, FLOPs, and one launch."""
    moved = problem.bytes_moved / FLOOR_BYTES_PER_US
    return max(moved, problem.flops / FLOOR_FLOPS_PER_US) + FLOOR_LAUNCH_US


def contender_of(operands: Operands, kernel: Kernel, name: str | None = None) -> Contender:
    """A contender that launches a kernel on each operand set, with a workspace for each."""
    calls = [operands.call_of(kernel, number) for number in range(len(operands.sets))]
    return Contender(name or kernel.name, calls)


def time_case(
    case: Case,
    kernels: Sequence[Kernel],
    device: Device,
    regime: str,
    *,
    seed: int = 0,
    announce: Announce = lambda *_: None,
) -> list[TimingRecord]:
    """Time the kernels of a problem against each other, then check their outputs.

    Args:
        case: The problem and the distribution of its operands.
        kernels: Kernels that accept the problem.
        device: The device type here.
        regime: Timing regime.
        seed: Seed of operands and order.
        announce: Called before each kernel is launched.

    Returns:
        One record for each kernel.

    Raises:
        DeviceLostError: The last announced kernel left the device unusable.
    """
    where = torch_device()
    problem = case.problem
    announce(None, "operands are made")
    try:
        operands = operands_of(
            problem, case.distribution, where, device, cold=regime != "graph-hot", seed=seed
        )
    except Exception as error:  # mostly memory; another problem may fit
        status, reason = status_and_reason(error)
        return [TimingRecord(status=status, reason=reason) for _ in kernels]
    fingerprint = operands.fingerprint()
    contenders = []
    for place, kernel in enumerate(kernels):
        announce(place, "its workspace is made")
        contender = Contender(kernel.name, ())
        with faults_of(contender, where):  # an allocation may fail like a launch
            contender = contender_of(operands, kernel)
        contenders.append(contender)
    places = {id(contender): place for place, contender in enumerate(contenders)}

    def inspect(contender: Contender) -> None:
        if operands.fingerprint() != fingerprint:
            raise _OverwrittenError(places[id(contender)])

    try:
        timing.time_contenders(
            [contender for contender in contenders if contender.status == "ok"],
            regime=regime, device=where, floor_us=floor_us(problem), seed=seed,
            announce=lambda contender: announce(places[id(contender)], "it is timed"),
            inspect=inspect,
        )  # fmt: skip
    except _OverwrittenError as error:
        at = error.place
        timing.release(contenders)
        del operands, contenders
        others = [*kernels[:at], *kernels[at + 1 :]]

        def announce_shifted(place: int | None, what: str) -> None:
            announce(place if place is None or place < at else place + 1, what)

        records = time_case(case, others, device, regime, seed=seed, announce=announce_shifted)
        culprit = TimingRecord(status="wrong", reason=OVERWRITES)
        return [*records[:at], culprit, *records[at:]]
    records = []
    for place, (kernel, contender) in enumerate(zip(kernels, contenders, strict=True)):
        announce(place, "its outputs are checked")
        records.append(_record(kernel, contender, operands, regime, where))
        announce(None, "the next kernel's turn comes")
    timing.release(contenders)
    return records


def check_case(
    case: Case, kernel: Kernel, device: Device, *, seed: int = 0, moved: str = ""
) -> TimingRecord:
    """Launch a kernel twice on one set of operands and check its outputs, without times.

    Nor may it write around outputs, or into gaps between rows of ``out``.

    The second launch finds a workspace that the first one left.

    Args:
        case: The problem and the distribution of its operands.
        kernel: A kernel that accepts the problem.
        device: The device type here.
        seed: Seed of operands.
        moved: Name of an operand in other strides, see `lokakern.measure.strides`.

    Returns:
        A record with a status and a reason.

    Raises:
        DeviceLostError: The kernel left the device unusable.
    """
    where = torch_device()
    contender = Contender(kernel.name, ())
    with faults_of(contender, where):
        operands = operands_of(
            case.problem, case.distribution, where, device, cold=False, seed=seed
        )
        if moved:
            move(operands, moved)
        fences = fence(operands)
        fingerprint = operands.fingerprint()
        contender.calls = contender_of(operands, kernel).calls
        contender.run_all()
        if operands.fingerprint() != fingerprint:
            return TimingRecord(status="wrong", reason=OVERWRITES)
        write_again(operands, contender)
        wrong = next(filter(None, (found.damage() for found in fences)), "")
        if not wrong and (wrong := operands.check(kernel)[1]):
            located = operands.wrong_elements(kernel)
            wrong += f": {located}" if located else ""
        if wrong:
            return TimingRecord(status="wrong", reason=wrong)
    return TimingRecord(status=contender.status, reason=contender.reason)


class _OverwrittenError(BaseException):  # not caught by `faults_of`: the inputs are invalid
    def __init__(self, place: int) -> None:
        self.place = place


def write_again(operands: Operands, contender: Contender) -> None:
    """Poison the outputs and repeat the timed launches, whose outputs can then be checked."""
    operands.poison()
    if operands.before is None:
        contender.run_all()
        return
    for call in contender.calls[: timing.MOST_CALLED]:  # once each: a graph may hold a call twice
        call()


def _record(
    kernel: Kernel, contender: Contender, operands: Operands, regime: str, where: torch.device
) -> TimingRecord:
    """Check the outputs of the timed launches, and make the record."""
    error, wrong = None, ""
    if contender.status == "ok":
        with faults_of(contender, where):
            write_again(operands, contender)
            error, wrong = operands.check(kernel)
    if error is None:
        return TimingRecord(status=contender.status, reason=contender.reason)
    found = timing.quantiles(contender)
    return TimingRecord(
        status="wrong" if wrong else "ok",
        reason=wrong,
        latency_us_p20=found.p20,
        latency_us_p50=found.p50,
        latency_us_p80=found.p80,
        replay_count=found.replay_count,
        void_count=found.void_count,
        calls_per_replay=contender.calls_per_replay,
        clock_mhz=found.clock_mhz,
        kernel_err=error.maximum,
        kernel_err_row_p99=error.row_p99,
        timer=timing.timer_name(regime, contender),
        operand_digest=operands.digest,
    )
