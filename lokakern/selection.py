"""Dispatch: the fastest kernel whose error one can afford, from what was measured, with reasons.

A pure function of (snapshot, usable kernels, op, problem, budget, distribution, regime). What is
computed for a problem without its m is kept as a `Table`: sorted breakpoints of m and the winner
between them, so that a warm answer is one dict look-up and one bisection.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lokakern.device import current_device, devices_here
from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.evidence import Candidate, candidate_of
from lokakern.problems import baseline_name, make_problem
from lokakern.registry.register import KERNELS, Kernel, kernels_for, load_kernels
from lokakern.table import Pick, Table
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    REGIMES,
    Device,
    ErrorBudget,
    Problem,
    alignment_of,
)

if TYPE_CHECKING:
    from lokakern.registry.snapshot import Snapshot, TimingCell

# A distribution like none that is measured: no error is ever known under it, so that kernels which
# quantize are rejected by the same rule as any without a cell, and the unquantized one is taken.
OUTSIDE = "outside"


class Choice:
    """Dispatch's answer at one m; everything but the kernel's name is worked out when asked."""

    __slots__ = ("_pick", "m", "table")

    def __init__(self, table: Table, m: int) -> None:
        self.table = table
        self.m = m
        self._pick: Pick | None = None

    @property
    def pick(self) -> Pick:
        if self._pick is None:
            self._pick = self.table.pick(self.m)
        return self._pick

    @property
    def kernel(self) -> str:
        """Name of the chosen kernel."""
        table = self.table
        return table.winners[bisect_right(table.breakpoints, self.m) - 1]

    @property
    def problem(self) -> Problem:
        return replace(self.table.problem, m=self.m)

    @property
    def latency_us(self) -> float | None:
        """Median time in microseconds, measured or interpolated; None if not measured."""
        return self.pick.time.latency_us if self.pick.time else None

    @property
    def interpolated(self) -> bool:
        return self.pick.interpolated

    @property
    def is_miss(self) -> bool:
        """Whether the database could not answer and the unquantized kernel was taken."""
        return bool(self.pick.note)

    @property
    def tied(self) -> tuple[str, ...]:
        """Kernels whose time cannot be told from the winner's."""
        return self.pick.tied

    @property
    def rejected(self) -> dict[str, str]:
        """Every other kernel, with its reason."""
        return dict(self.pick.rejected)

    @property
    def errors(self) -> dict[str, float]:
        """Worst stored bounds of the winner over the distributions asked for."""
        return dict(self.pick.candidate.errors) if self.pick.candidate else {}

    @property
    def callable(self) -> bool:
        """Whether the kernel can run here."""
        return self.table.callable_here and self._kernel() is not None

    def _kernel(self) -> Kernel | None:
        table = self.table
        return table.kernels[bisect_right(table.breakpoints, self.m) - 1]

    def explain(self) -> str:
        """The winner with its rows, and every rejected kernel with its reason."""
        pick, table = self.pick, self.table
        within = f" within {table.budget}" if table.budget else ""
        if pick.time is None:
            how = f"{pick.name or 'no kernel'}, not measured"
        else:
            how = f"{pick.name}, {pick.time.latency_us:.2f} us"
            kind = "interpolated" if pick.interpolated else "measured"
            runs = f"{pick.time.run_count} run" + ("s" if pick.time.run_count > 1 else "")
            how += f" ({kind}, {runs}, {table.regime}"
            how += "" if pick.time.freshness == "fresh" else f", {pick.time.freshness}"
            how += "" if pick.time.is_verified else ", imported and not verified"
            how += ")"
        lines = [f"{self.problem} on {table.device.product}{within}: {how}"]
        if pick.note:
            lines.append(f"  miss: {pick.note}")
        if pick.tied:
            lines.append(f"  tied with {', '.join(pick.tied)}: larger errors lose a tie")
        if self.errors:
            words = ", ".join(f"{k} {v:.4g}" for k, v in self.errors.items() if math.isfinite(v))
            worst = pick.candidate.worst_distribution if pick.candidate else ""
            lines.append(f"  error: {words} (row_err worst on {worst})")
        if pick.candidate and not pick.candidate.errors_verified:
            lines.append("  error: imported and not verified: the worse of it and of what is known "
                         "here of such arithmetic")  # fmt: skip
        if len(table.distributions) < len(REALISTIC_DISTRIBUTIONS):
            lines.append(f"  judged on {', '.join(table.distributions)} only")
        width = max((len(name) for name, _ in pick.rejected), default=0)
        lines += [f"  {name:<{width}}  rejected: {why}" for name, why in sorted(pick.rejected)]
        return "\n".join(lines)

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Run the chosen kernel on operands, as the public function of the op would.

        Raises:
            UnsupportedError: The choice is for another device.
        """
        kernel = self._kernel()
        if kernel is None and self.pick.note and self.table.callable_here:
            raise UnsupportedError(f"{self.problem}: {self.pick.note}")
        if not self.table.callable_here or kernel is None:
            raise UnsupportedError(
                f"{self.kernel or 'this choice'} is for {self.table.device.product}; "
                f"here is {current_device().product}; dispatch without device= to run it"
            )
        from lokakern import functional

        return functional.run(kernel, *operands, **options)

    def __repr__(self) -> str:
        time = "not measured" if self.latency_us is None else f"{self.latency_us:.2f} us"
        return f"Choice({self.kernel!r}, {self.problem}, {time})"


_TABLES: dict[Any, Table] = {}
_LOCK = threading.RLock()
_SNAPSHOT: Snapshot | None = None
_GENERATION = 0


def snapshot() -> Snapshot:
    """What dispatch reads: shipped files and the user's database, loaded at first use."""
    global _SNAPSHOT
    with _LOCK:
        if _SNAPSHOT is None:
            from lokakern.registry.snapshot import load_snapshot

            _SNAPSHOT = load_snapshot()
        return _SNAPSHOT


def use_snapshot(new: Snapshot | None) -> None:
    """Answer from another snapshot from now on; None reads the files again at the next use."""
    global _SNAPSHOT, _GENERATION
    with _LOCK:
        _SNAPSHOT = new
        _GENERATION += 1
        _TABLES.clear()
        for listener in _LISTENERS:
            listener()


def on_new_snapshot(clear: Callable[[], None]) -> None:
    """Call ``clear`` whenever the snapshot changes: for caches that are built on tables."""
    _LISTENERS.append(clear)


_LISTENERS: list[Callable[[], None]] = []


def dispatch(
    op: str,
    shape: Sequence[int],
    error_budget: ErrorBudget | float | None = None,
    *,
    distribution: str | Sequence[str] | None = None,
    device: Device | str | None = None,
    regime: str | None = None,
    **problem: Any,
) -> Choice:
    """The fastest kernel whose error is within the budget, from what was measured.

    1. Candidates: registered kernels that accept the problem here; for a device that is not here,
       the kernels of the database's rows (the Choice is then not callable).
    2. Error: the worst stored bound over the distributions asked for. A kernel with a missing
       cell, or a wrong result, is rejected.
    3. Time: measured, or between measured m of the same (n, k) interpolated and marked.
    4. Least time wins. Within noise the lower error wins, then the name; so an FP8 kernel is
       chosen only where it is faster than the unquantized one beyond noise.

    Args:
        op: A key of `registry.ops.OPS`, such as "gemm", "scaled_gemm", "gemm_norm" or "quantize".
        shape: ``(m, n, k)``, or ``(m, k)`` for ops with one operand.
        error_budget: A limit on row_err, or an `ErrorBudget`. None means the unquantized kernel
            (of several, the fastest; for ops that have none, the fastest of all).
        distribution: Name (or names) of the input distributions to judge the error on; None means
            all realistic ones.
        device: A product such as "NVIDIA H200", or a `Device`; None means the one here.
        regime: "graph-cold", "graph-hot" or "eager"; None means graph-cold on GPUs and eager on
            CPUs, which have no graphs.
        problem: Fields of `Problem` that differ from the usual, such as ``prepared=True``.

    Raises:
        UnknownNameError: Unknown op, regime or distribution.
        ShapeError: The shape does not fit the op.
        BudgetError: The budget is not a finite, non-negative number.
        DeviceError: The database does not know the device.
    """
    try:
        m = shape[0]
        low = m & -m
        key = (op, *shape[1:], error_budget, distribution, device, regime, low if low < 16 else 16)
        if problem:
            key = (*key, *sorted(problem.items()))
        table = _TABLES.get(key) if m >= 0 else None
    except (TypeError, IndexError):  # an unhashable or wrong argument: the slow path says which
        key, table = None, None
    if table is None:
        generation = _GENERATION
        asked = make_problem(op, shape, **problem)
        table = table_for(
            asked,
            None if error_budget is None else ErrorBudget.of(error_budget),
            distribution_names(distribution),
            device,
            regime,
        )
        m = asked.m
        with _LOCK:
            if key is not None and generation == _GENERATION:
                _TABLES[key] = table
    return Choice(table, m)


def distribution_names(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Names as a tuple; None for all realistic ones.

    Raises:
        UnknownNameError: Neither a name nor names.
    """
    if given is None or isinstance(given, str):
        return None if given is None else (given,)
    names = tuple(given) if isinstance(given, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise UnknownNameError(f"distribution is {given!r}; expected a name such as 'X3', or names")
    return names


def generation() -> int:
    """Counts snapshots: what was built on an earlier one must not be kept."""
    return _GENERATION


def table_for(
    problem: Problem,
    budget: ErrorBudget | None,
    distributions: tuple[str, ...] | None = None,
    device: Device | str | None = None,
    regime: str | None = None,
    needs: frozenset[str] = frozenset(),
) -> Table:
    """The frozen answers for a problem at every m with the same power-of-two divisors.

    Only kernels that do what ``needs`` says (`registry.register.NEEDS`) are considered.

    Raises:
        UnknownNameError: Unknown regime or distribution.
        DeviceError: The database does not know the device.
    """
    m_alignment = alignment_of(problem.m)
    if regime is not None and regime not in REGIMES:
        raise UnknownNameError(
            f"regime {regime!r} is unknown; expected one of {', '.join(REGIMES)}"
        )
    key = (replace(problem, m=0), m_alignment, budget, distributions, device, regime, needs)
    with _LOCK:
        table = _TABLES.get(key)
        if table is None:
            if len(_TABLES) > 4096:  # callers that invent budgets must not fill the memory
                _TABLES.clear()
            table = _TABLES[key] = _build(problem, budget, distributions, device, regime, needs)
        return table


def unquantized_table(problem: Problem, device: Device) -> Table:
    """The answer without a budget, from no measurement at all: the unquantized kernel."""
    load_kernels()
    base = baseline_name(problem)
    return Table(
        problem=problem,
        device=device,
        budget=None,
        distributions=REALISTIC_DISTRIBUTIONS,
        regime=default_regime(device),
        candidates=(),
        rejected=(),
        baseline=base,
        baseline_kernel=KERNELS.get(base) if base else None,
        callable_here=True,
        m_alignment=alignment_of(problem.m),
    )


def default_regime(device: Device) -> str:
    """graph-cold on GPUs; CPUs have no graphs."""
    return "graph-cold" if device.is_gpu else "eager"


def _build(
    problem: Problem,
    budget: ErrorBudget | None,
    distributions: tuple[str, ...] | None,
    device: Device | str | None,
    regime: str | None,
    needs: frozenset[str],
) -> Table:
    from lokakern.registry.snapshot import family_key

    facts = snapshot()
    if device is None:
        target = current_device()
    else:
        target = device if isinstance(device, Device) else facts.find_device(device)
    local = target in devices_here()
    if regime is None:
        regime = default_regime(target)
    if distributions is None:
        distributions = REALISTIC_DISTRIBUTIONS
    else:
        known = {*REALISTIC_DISTRIBUTIONS, *facts.distribution_names, OUTSIDE}
        for name in distributions:
            if name not in known:
                raise UnknownNameError(
                    f"distribution {name!r} was never measured; "
                    f"expected one of {', '.join(sorted(known))}"
                )
    cells: dict[str, list[TimingCell]] = {}
    for cell in facts.timing_cells(target, family_key(problem), regime):
        cells.setdefault(cell.kernel.name, []).append(cell)
    rejected: list[tuple[str, str]] = []
    candidates: list[Candidate] = []
    base = baseline_name(problem)
    load_kernels()
    names = set(cells)
    if local:
        names |= {k.name for k in kernels_for(problem.op, target)}
    for name in sorted(names):
        reason = KERNELS[name].lacks(needs) if name in KERNELS else None
        if reason is not None:
            rejected.append((name, reason))
            continue
        found = candidate_of(
            name, cells.get(name, []), problem, distributions, target, local, facts
        )
        if isinstance(found, str):
            rejected.append((name, found))
        else:
            candidates.append(found)
    return Table(
        problem=problem,
        device=target,
        budget=budget,
        distributions=distributions,
        regime=regime,
        candidates=tuple(candidates),
        rejected=tuple(rejected),
        baseline=base,
        baseline_kernel=KERNELS.get(base) if base else None,
        callable_here=local,
        m_alignment=alignment_of(problem.m),
        needs=needs,
    )
