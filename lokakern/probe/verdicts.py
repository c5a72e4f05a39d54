"""Verdicts: {safe, unsafe, undecided} x {fast, slow, tie} for each GEMM of a site.

Errors are replayed, by numerics class; times are those of a database, by kernel. They meet where
scales are the same, so that an error emulated here judges a kernel of a GPU that is not here. Sums
that are never promoted, and libraries that quantize in their own way, have errors of their own
(`lokakern.probe.problems.way_of`): only where such a kernel was replayed, on a GPU that has it, is
there a verdict. For a GEMM whose output is normalized the error is the one after the norm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lokakern.device import current_device
from lokakern.errors import UnsupportedError
from lokakern.probe.problems import Replayed, padded, problem_of, way_of
from lokakern.probe.statistics import FEWEST_ROWS, GEMMS, SiteStatistics
from lokakern.registry.architectures import FP8_GPUS
from lokakern.registry.register import kernel_named
from lokakern.selection.arguments import budget_of
from lokakern.selection.candidates import Time
from lokakern.selection.dispatcher import device_named, table_for
from lokakern.selection.ties import within_noise
from lokakern.types import COMPILED, Device, ErrorBudget, Format, Problem

BUDGET = 0.06  # row error that E4M3 GEMMs of harmless operands keep within: 0.035-0.045
LIMITS = ("row_err", "row_p99", "mean_shift")
SPEEDS = ("fast", "tie", "slow")
OUTSTANDING = 64.0  # a column so many times as large as the median one is named


@dataclass(frozen=True, slots=True)
class ClassVerdict:
    """One way to scale the operands of a GEMM, and to sum; errors are those of sampled rows."""

    scales: str  # of `lokakern.probe.problems.way_of`, such as "row" or "1x128 x 128x128"
    safety: str  # "safe", "unsafe" or "undecided"
    row_err: float
    row_err_upper: float  # the 95 % upper limit
    row_p99: float  # error of the 99th percentile of rows
    mean_shift: float = float("inf")  # 95 % upper limit, in units of the output's size
    kernel: str = ""  # the fastest kernel that scales so; "" where none was timed
    latency_us: float | None = None
    speed: str = ""  # "fast", "slow" or "tie" against bfloat16; "" where that is not known
    reason: str = ""  # why it is not safe
    architecture: str = ""  # of the GPUs for which alone the errors hold; "" of all


@dataclass(frozen=True, slots=True)
class Verdict:
    """One GEMM of a site: safe if some class is, unsafe if every one is unsafe."""

    site: str
    gemm: str  # "output", "grad_input" or "grad_weight"
    shape: tuple[int, ...]  # m (the median), n and k of the GEMM
    norm: str  # after which errors were taken; "" for none
    safety: str
    speed: str  # of `best`; "" where nothing was timed
    best: str  # the scales to take: of safe classes the fastest; "" where none is safe
    bf16_err: float  # row error of bfloat16 itself
    bf16_us: float | None
    change: str  # the cheapest change that makes it safe and fast; "" for none
    notes: tuple[str, ...]  # the limit of an undecided one, and other reasons for caution
    classes: tuple[ClassVerdict, ...] = field(repr=False)
    dtype: str = "bfloat16"  # or "float16": of operands and outputs, also of `bf16_err` and times

    @property
    def is_worth_it(self) -> bool:
        """Whether it is safe and fast."""
        return (self.safety, self.speed) == ("safe", "fast")

    @property
    def saved_us(self) -> float:
        """Time that `best` saves, where it is worth it; 0 elsewhere."""
        chosen = self.of(self.best)
        if not self.is_worth_it or not chosen or None in (chosen.latency_us, self.bf16_us):
            return 0.0
        return float(self.bf16_us or 0.0) - float(chosen.latency_us or 0.0)

    def of(self, scales: str) -> ClassVerdict | None:
        """The class of some scales."""
        return next((c for c in self.classes if c.scales == scales), None)


def verdicts_of(
    name: str,
    statistics: SiteStatistics,
    replayed: Sequence[Replayed],
    *,
    budget: ErrorBudget | float = BUDGET,
    device: Device | str | None = None,
) -> tuple[Verdict, ...]:
    """Verdicts on the GEMMs of a site by errors that were replayed here.

    A budget limits ``row_err``, ``row_p99``, ``mean_shift`` or several. Without a device no times
    are compared.

    Raises:
        UnsupportedError: The budget limits something else.
        DeviceError: The database does not know the device.
    """
    limits = budget_of(budget).limits
    if not limits.keys() <= set(LIMITS):
        raise UnsupportedError(
            f"Probe judges by {' and '.join(LIMITS)}; the budget is {budget_of(budget)}"
        )
    here = current_device()
    there = here if device is None else device_named(device)
    has_fp8 = not there.is_gpu or there.architecture in FP8_GPUS
    found = []
    for gemm in GEMMS:
        mine = [
            r
            for r in replayed
            if r.gemm == gemm
            and (r.is_everywhere or there.architecture == here.architecture)
            and (r.is_plain or r.format or has_fp8)
        ]
        if not mine:
            continue
        norm = statistics.norm if any(r.norm == statistics.norm for r in mine if r.norm) else ""
        after = [r for r in mine if r.norm == norm]
        plain = [r for r in after if r.is_plain]
        times = _times_of(statistics, gemm, norm, device)
        classes = _classes([r for r in after if r not in plain], limits, times)
        safe = [c for c in classes if c.safety == "safe"]
        fastest = min(safe or classes, key=_rank, default=None)
        is_unsafe = classes and all(c.safety == "unsafe" for c in classes)
        doubtful = [] if safe else [c for c in classes if c.safety == "undecided"]
        least = min(doubtful, key=lambda c: c.row_err, default=None)
        why = [f"{least.scales}: {least.reason}"] if least else []
        verdict = Verdict(
            site=name,
            gemm=gemm,
            shape=problem_of(statistics, gemm).shape,
            norm=norm,
            safety="safe" if safe else "unsafe" if is_unsafe else "undecided",
            speed=fastest.speed if fastest else "",
            best=fastest.scales if fastest and safe else "",
            bf16_err=min((r.row_err for r in plain), default=float("inf")),
            bf16_us=times.bf16.latency_us if times.bf16 else None,
            change="",
            notes=(*why, *_notes(statistics, gemm, norm, plain, limits, classes)),
            classes=tuple(classes),
            dtype=statistics.half.value,
        )
        found.append(replace(verdict, change=_change(verdict, statistics, mine, limits, device)))
    return tuple(found)


def worst_of(
    statistics: SiteStatistics,
    gemm: str,
    replayed: Sequence[Replayed],
    kernels: Sequence[str],
    budget: ErrorBudget,
) -> ClassVerdict | None:
    """Of the classes of some kernels of one GEMM the least safe; None where one has none.

    As in `verdicts_of`, and no times are looked up.
    """
    mine = [r for r in replayed if r.gemm == gemm]
    norm = statistics.norm if any(r.norm == statistics.norm for r in mine if r.norm) else ""
    times = _Times(problem_of(statistics, gemm, norm), None)
    classes = _classes([r for r in mine if r.norm == norm], budget.limits, times)
    by_way = {c.scales: c for c in classes}
    found = []
    for kernel in map(kernel_named, kernels):
        way = way_of(kernel.granularity, kernel.b_granularity, kernel.accumulation)
        if way not in by_way:
            return None
        found.append(by_way[way])
    order = ("safe", "undecided", "unsafe")
    return max(found, key=lambda c: (order.index(c.safety), c.row_err_upper))


def _rank(verdict: ClassVerdict) -> tuple[float, float, str]:
    us = verdict.latency_us
    return (float("inf") if us is None else us, verdict.row_err, verdict.scales)


class _Times:
    """Times at a problem: of the fastest kernel of each way, and of bfloat16."""

    def __init__(
        self, problem: Problem, device: Device | str | None, *, has_bias: bool = False
    ) -> None:
        self.bf16: Time | None = None
        self.fastest: dict[str, tuple[str, Time]] = {}
        if device is None:
            return
        table = table_for(problem, None, None, device, COMPILED, is_choice=False, has_bias=has_bias)
        for candidate in table.candidates:
            timed = candidate.time_at(problem.m)
            kernel = candidate.kernel
            if timed is None or kernel is None:
                continue
            time = timed[0]
            if candidate.unquantized:
                if self.bf16 is None or time.latency_us < self.bf16.latency_us:
                    self.bf16 = time
                continue
            way = way_of(kernel.granularity, kernel.b_granularity, kernel.accumulation)
            if way not in self.fastest or time.latency_us < self.fastest[way][1].latency_us:
                self.fastest[way] = (candidate.name, time)
        if table.lacks_padded(problem.m):
            self.bf16 = None  # that of unaligned rows is no measure of a gain

    def speed(self, ours: Time) -> str:
        plain = self.bf16
        if plain is None:
            return ""
        if within_noise(ours.latency_us, ours.margin_us, plain.latency_us, plain.margin_us):
            return "tie"
        return "fast" if ours.latency_us < plain.latency_us else "slow"

    def is_fast(self, ways: Collection[str]) -> bool:
        """Whether one of some ways is."""
        return any(self.speed(t) == "fast" for way, (_, t) in self.fastest.items() if way in ways)


def _times_of(
    statistics: SiteStatistics, gemm: str, norm: str, device: Device | str | None
) -> _Times:
    """Of the GEMM as the model has it, with its norm or its bias, if that was timed."""
    plain = problem_of(statistics, gemm)
    whole = [problem_of(statistics, gemm, norm)] if norm else []
    has_bias = statistics.has_bias and gemm == "output"
    if has_bias:
        whole.append(replace(plain, epilogue="bias"))
    for problem in whole:
        times = _Times(problem, device)
        if times.bf16 is not None and times.fastest:
            return times
    return _Times(plain, device, has_bias=has_bias)


def _classes(
    replayed: Sequence[Replayed], limits: dict[str, float], times: _Times
) -> list[ClassVerdict]:
    """The largest errors of each way; a kernel that fails does not count where another works."""
    found = []
    for way in dict.fromkeys(r.way for r in replayed):
        many = [r for r in replayed if r.way == way]
        right = [r for r in many if not r.reason] or many[:1]
        names = [f"{name}{end}" for name in LIMITS for end in ("", "_upper")]
        r = replace(right[0], **{name: max(getattr(x, name) for x in right) for name in names})
        safety, reason = _safety(r, limits)
        kernel, time = times.fastest.get(way, ("", None))
        us, speed = (time.latency_us, times.speed(time)) if time else (None, "")
        errors = (r.row_err, r.row_err_upper, r.row_p99, r.mean_shift_upper)
        where = "" if r.is_everywhere else current_device().architecture
        found.append(ClassVerdict(way, safety, *errors, kernel, us, speed, reason, where))
    return found


def _safety(r: Replayed, limits: dict[str, float]) -> tuple[str, str]:
    if r.reason:
        return "unsafe", r.reason
    if r.rows < FEWEST_ROWS:
        return "undecided", f"{r.rows} rows were sampled; expected at least {FEWEST_ROWS}"
    safety, reason = "safe", ""
    for limit, allowed in limits.items():
        value, upper = float(getattr(r, limit)), float(getattr(r, f"{limit}_upper"))
        if value > allowed:
            return "unsafe", f"{limit} {value:.4g} > {allowed:g}"
        if upper > allowed:
            safety, reason = "undecided", f"{limit} {value:.4g}, at most {upper:.4g} > {allowed:g}"
    return safety, reason


def _notes(
    statistics: SiteStatistics,
    gemm: str,
    norm: str,
    plain: Sequence[Replayed],
    limits: dict[str, float],
    classes: Sequence[ClassVerdict],
) -> Iterator[str]:
    for limit, allowed in limits.items():
        least = min((float(getattr(r, limit)) for r in plain if not r.reason), default=0.0)
        if least > allowed:
            yield f"{statistics.half.value} itself has a {limit} of {least:.4g} > {allowed:g}"
    operand = statistics.input if gemm == "output" else statistics.grad_output
    if operand.nonfinite_rows:
        yield f"{operand.nonfinite_rows} of {operand.rows_seen} rows were not finite"
    if gemm != "grad_input" and any(c.safety != "safe" for c in classes):
        sizes = statistics.input.column_sizes.cpu()
        ratio = float(sizes.max() / sizes[sizes > 0].median()) if float(sizes.max()) else 0.0
        if ratio >= OUTSTANDING:
            yield (
                f"input column {int(sizes.argmax())} is {ratio:.3g} times as large as the median "
                "one: normalize it"
            )
    if norm == "layer" and statistics.mean_ratio > 8:
        yield f"LayerNorm subtracts means of {statistics.mean_ratio:.0f} deviations"


def _change(
    verdict: Verdict,
    statistics: SiteStatistics,
    mine: Sequence[Replayed],
    limits: dict[str, float],
    device: Device | str | None,
) -> str:
    """The cheapest first."""
    safe = {c.scales for c in verdict.classes if c.safety == "safe"}
    tensor = verdict.of("tensor")
    if tensor is not None and tensor.safety == "unsafe" and "row" in safe:
        return "row instead of tensor scales"
    if verdict.safety == "unsafe":
        blocks = [r for r in mine if r.norm.startswith("block") and r.norm != verdict.norm
                  and not r.is_plain]  # fmt: skip
        if verdict.norm == "layer" and any(_safety(r, limits)[0] == "safe" for r in blocks):
            return "BlockNorm instead of LayerNorm"
        plain = "float16" if statistics.half is Format.FLOAT16 else "bf16"
        return f"weight gradient in {plain}" if verdict.gemm == "grad_weight" else ""
    if verdict.speed == "fast" or device is None or verdict.gemm != "output":
        return ""
    if statistics.has_bias and _Times(problem_of(statistics, "output"), device).is_fast(safe):
        return "drop the bias"
    wider = padded(statistics)
    if wider is not None and _Times(wider, device).is_fast(safe):
        return f"pad K {statistics.shape[2]} to {wider.k}"
    return ""
