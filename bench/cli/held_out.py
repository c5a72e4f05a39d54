"""``compare --held-out``: choices of a database, measured again where nobody looked."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from lokakern.bench.cli.options import OutputFormat, reading
from lokakern.types import ErrorBudget

if TYPE_CHECKING:
    from lokakern.workloads.gemm_cases import Case

DEFAULT_SEED = 1
UNQUANTIZED = "bf16"


def check(seed: int | None, *, is_plain: bool) -> None:
    """See that nothing was asked for that goes with other comparisons."""
    if not is_plain:
        raise typer.BadParameter("compares dispatch with the unquantized kernel: --op gemm, "
                                 "without --ours, --rivals, --baseline, --group, --by-library and "
                                 "--fail-under", param_hint="--held-out")  # fmt: skip
    if seed == 0:
        raise typer.BadParameter("0 is what databases are measured with; give another with "
                                 "--held-out", param_hint="--seed")  # fmt: skip


def cases_timed_here(db: str | None, regime: str | None) -> list[Case]:
    """What the database has times of on the device here."""
    from lokakern.device import current_device
    from lokakern.selection import dispatcher
    from lokakern.sweep.staleness import cases_timed

    device = current_device()
    with reading(db):
        how = regime or dispatcher.default_regime(device)
        return cases_timed(dispatcher.snapshot(), device, how)


def compare_held_out(
    cases: Sequence[Case],
    count: int,
    *,
    budget: float,
    distribution: str | None,
    regime: str | None,
    seed: int | None,
    how: OutputFormat,
    quiet: bool,
) -> bool:
    """Print what `held_out` finds; whether a choice is slower."""
    from lokakern.bench.compare.held_out import held_out
    from lokakern.device import current_device
    from lokakern.render import terminal

    with terminal.TerminalProgress(quiet=quiet) as progress:
        found = held_out(
            cases, count, budget=ErrorBudget.of(budget), regime=regime,
            seed=DEFAULT_SEED if seed is None else seed, distribution=distribution,
            begin=functools.partial(progress.begin, "compare"), step=progress.step,
        )  # fmt: skip
    if how is OutputFormat.JSON:
        print(json.dumps(found.as_json(), indent=2))
    else:
        rows = [
            {
                "problem": row.problem.removeprefix("gemm "),
                "chosen": row.chosen,
                "us": row.chosen_us,
                f"{UNQUANTIZED} us": row.unquantized_us,
                f"x {UNQUANTIZED}": row.speedup,
                "x promised": row.promised,
                "slower": row.slower,
                "why": row.why,
            }
            for row in found.rows
        ]
        title = f"choices within {budget:g}, measured again on {current_device().product}"
        terminal.print_rows(rows, how.value, title=title)
    means = ""
    if found.geometric_mean is not None and found.least_speedup is not None:
        means = f": {found.geometric_mean:.3f}x {UNQUANTIZED}, least {found.least_speedup:.3f}x"
    print(
        f"{len(found.rows)} of {found.candidates} choices of a quantized kernel, drawn with seed "
        f"{found.seed}{means}; {len(found.slower)} slower than {UNQUANTIZED} beyond noise",
        file=sys.stderr,
    )
    for problem in found.slower:
        print(f"slower: {problem}", file=sys.stderr)
    return bool(found.slower)
