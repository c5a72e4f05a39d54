"""The final table of a sweep: time and worst error of every kernel at every problem."""

from __future__ import annotations

from typing import Any

from lokakern.device import current_device
from lokakern.problems import accuracy_problem
from lokakern.registry.register import fp8_format
from lokakern.registry.schema.row_keys import family_key, key_of
from lokakern.registry.snapshot.cells import TimingCell
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.registry.staleness import is_current
from lokakern.selection.dispatcher import default_regime
from lokakern.types import Problem
from lokakern.workloads.suites import Case


def summary_rows(facts: Snapshot, cases: list[Case], regime: str | None) -> list[dict[str, Any]]:
    """One row per problem and kernel, fastest first within a problem.

    Of a kernel with a current row, rows from before it changed are left out; others are marked.

    Columns: problem, kernel, median time in microseconds, its spread (p80 over p20), the worst
    stored bound of the row error and its distribution, largest kernel error, status.
    """
    device = current_device()
    regime = regime or default_regime(device)
    cells: dict[Problem, list[TimingCell]] = {}
    asked_for = dict.fromkeys(case.problem for case in cases)
    for family in dict.fromkeys(map(family_key, asked_for)):
        for cell in facts.timing_cells(device, family, regime):
            cells.setdefault(cell.problem, []).append(cell)
    rows = []
    for problem in asked_for:
        found = []
        timed = cells.get(problem, [])
        renewed = {cell.kernel.name for cell in timed if is_current(cell.kernel)}
        asked = key_of(accuracy_problem(problem, fp8_format(device)))
        for cell in timed:
            kernel = cell.kernel
            stale = "" if is_current(kernel) else "stale, "
            if stale and kernel.name in renewed:
                continue
            errors = [
                (c.row_err_upper, c.distribution)
                for c in facts.accuracy_cells_of_class(
                    device.architecture, asked,
                    kernel.granularity, kernel.b_granularity, kernel.accumulation,
                )
                if c.status == "ok" and is_current(c.kernel)
            ]  # fmt: skip
            worst = max(errors, default=(None, "not measured"))
            found.append(
                {
                    "problem": str(problem),
                    "kernel": cell.kernel.name,
                    "time us": cell.latency_us_p50 if cell.status == "ok" else "-",
                    "p80/p20": cell.latency_us_p80 / cell.latency_us_p20
                    if cell.status == "ok"
                    else "-",
                    "worst row_err": "-" if worst[0] is None else worst[0],
                    "on": worst[1],
                    "kernel_err": cell.kernel_err if cell.status == "ok" else "-",
                    "status": stale
                    + (cell.status if cell.status == "ok" else f"{cell.status}: {cell.reason}"),
                }
            )
        found.sort(key=lambda row: (isinstance(row["time us"], str), row["time us"], row["kernel"]))
        rows += found
    return rows
