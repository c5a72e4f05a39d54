"""The command `compare`: dispatch against baselines, or kernels of ours against rivals."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lokakern.bench.cli import held_out as cli_held_out
from lokakern.bench.cli.options import (
    BudgetOption,
    DatabaseOption,
    DistributionOption,
    EpilogueOption,
    FormatOption,
    JsonOption,
    OutputFormat,
    RegimeOption,
    ShapeOption,
    WhereOption,
    cases_of,
    reading,
    says_errors,
)
from lokakern.errors import UnknownNameError
from lokakern.types import ErrorBudget

if TYPE_CHECKING:
    from lokakern.bench.compare import by_library as libraries
    from lokakern.bench.compare.kernels import Contest, Pairing, Row, Summary
    from lokakern.workloads.filters import Condition
    from lokakern.workloads.gemm_cases import Case

SLOWER_EXIT = 4
DEFAULT_SUITE = "smoke"
OURS = ("cuda.*",)
NAN = float("nan")


@says_errors
def compare(
    op: Annotated[
        str, typer.Option(help="gemm (whole, against baselines), or a part such as scaled_gemm.")
    ] = "gemm",
    suite: Annotated[
        str | None,
        typer.Option(
            help="Suite whose problems are compared. Default: smoke; with --held-out whatever was "
            "timed on this device."
        ),
    ] = None,
    shape: ShapeOption = None,
    epilogue: EpilogueOption = None,
    ours: Annotated[
        list[str] | None,
        typer.Option(
            help="Kernel or pattern; repeatable. Compares these with --rivals instead of "
            "dispatch with baselines; a composition counts if all its parts do. Default of an op "
            "that is not gemm: cuda.*"
        ),
    ] = None,
    rivals: Annotated[
        list[str] | None,
        typer.Option(
            help="Kernel or pattern; repeatable. Default: all that are not ours. Of several, each "
            "pattern of --ours is compared with each."
        ),
    ] = None,
    where: WhereOption = None,
    group: Annotated[
        list[str] | None,
        typer.Option(help="Means also of the problems for which this holds; repeatable."),
    ] = None,
    load: Annotated[
        list[str] | None,
        typer.Option(help="Module that registers more kernels, as rivals; repeatable."),
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Rivals of gemm_norm are also what torch.compile makes of stock modules, "
            "torch.compiled_norm*; to name them does the same.",
        ),
    ] = False,
    by_library: Annotated[
        bool,
        typer.Option(
            "--by-library",
            help="Times of dispatch against each library alone: its fastest kernel within the "
            "budget, or the unquantized one.",
        ),
    ] = False,
    held_out: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draw so many problems for which the database chooses a quantized kernel, and "
            "time these choices against the unquantized kernel alone. Exit with 4 if one is "
            "slower beyond noise.",
        ),
    ] = None,
    budget: BudgetOption = 0.06,
    baseline: Annotated[
        list[str] | None,
        typer.Option(help='Kernel to compare dispatch with, or "bf16"; repeatable. Default: bf16.'),
    ] = None,
    distribution: DistributionOption = None,
    regime: RegimeOption = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Of operands and order, and of what is held out. What a database holds was drawn "
            "with 0. Default: 0, or 1 with --held-out.",
        ),
    ] = None,
    db: DatabaseOption = None,
    fail_under: Annotated[
        float | None,
        typer.Option(help="Exit with 4 if anywhere less than this times as fast."),
    ] = None,
    how: FormatOption = OutputFormat.TABLE,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Time dispatch's choices against baselines, or kernels against rivals, interleaved, now."""
    from lokakern.bench.compare.compiled_baselines import are_asked_for
    from lokakern.device import current_device
    from lokakern.registry.ops import op_named
    from lokakern.registry.register import fp8_format
    from lokakern.workloads.filters import parse_condition
    from lokakern.workloads.suite_files import suite_named

    op_named(op)
    for module in load or ():
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UnknownNameError(f"--load: {module!r} cannot be imported: {error}") from None
    device = current_device()
    if held_out is not None:
        others = any((ours, rivals, baseline, group, by_library, fail_under is not None))
        cli_held_out.check(seed, is_plain=op == "gemm" and not others)
    how_timed = regime.value if regime else None
    if shape:
        cases, source = cases_of(shape, epilogue, fp8_format(device)), "the shapes"
    elif held_out is not None and suite is None:
        cases, source = cli_held_out.cases_timed_here(db, how_timed), "what was timed here"
    else:
        found = suite_named(suite or DEFAULT_SUITE)
        cases, source = found.cases(device), found.name
    condition = parse_condition(where) if where else None
    cases = [
        case for case in cases
        if case.problem.op == op and (condition is None or condition.holds(case.problem))
    ]  # fmt: skip
    if not cases:
        words = f" for which {where!r} holds" if where else ""
        raise UnknownNameError(f"no problem of {op} is in {source}{words}; see `list suites`, or "
                               "give --shape")  # fmt: skip
    groups = [parse_condition(text) for text in group or ()]
    chosen = OutputFormat.JSON if as_json else how
    if by_library and (op != "gemm" or ours or rivals or baseline):
        raise typer.BadParameter("compares dispatch with libraries: --op gemm, without --ours, "
                                 "--rivals and --baseline", param_hint="--by-library")  # fmt: skip
    if op != "gemm" or ours or rivals:
        if baseline:
            raise typer.BadParameter("goes with dispatch: with --ours, name --rivals",
                                     param_hint="--baseline")  # fmt: skip
        _compare_kernels(
            cases, op, tuple(ours or OURS), tuple(rivals or ("*",)), groups,
            compiled=compiled or are_asked_for([*(ours or ()), *(rivals or ())]),
            regime=how_timed, seed=seed or 0, fail_under=fail_under, how=chosen, quiet=quiet,
        )  # fmt: skip
        return
    names = tuple(baseline or ("bf16",))
    against = _compare_libraries if by_library else functools.partial(_compare_dispatch, names)
    with reading(db):
        if held_out is not None:
            slower = cli_held_out.compare_held_out(
                cases, held_out, budget=budget, distribution=distribution, regime=how_timed,
                seed=seed, how=chosen, quiet=quiet,
            )  # fmt: skip
            if slower:
                raise typer.Exit(SLOWER_EXIT)
            return
        against(
            cases, groups, budget=budget, distribution=distribution, regime=how_timed,
            seed=seed or 0, fail_under=fail_under, how=chosen, quiet=quiet,
        )  # fmt: skip


def _compare_dispatch(
    names: Sequence[str],
    cases: Sequence[Case],
    groups: Sequence[Condition],
    *,
    budget: float,
    distribution: str | None,
    regime: str | None,
    seed: int,
    fail_under: float | None,
    how: OutputFormat,
    quiet: bool,
) -> None:
    from lokakern.bench.compare.dispatch import compare as compare_cases
    from lokakern.device import current_device
    from lokakern.render import terminal

    with terminal.TerminalProgress(quiet=quiet) as progress:
        progress.begin("compare", len(cases))
        found = compare_cases(
            cases, budget=ErrorBudget.of(budget), baselines=names, regime=regime,
            distribution=distribution, groups=groups, seed=seed, step=progress.step,
        )  # fmt: skip
    if how is OutputFormat.JSON:
        print(json.dumps(found.as_json(), indent=2))
    else:
        rows = [
            {
                "problem": row.problem,
                "chosen": row.chosen,
                "dispatch us": row.latency_us.get("dispatch", NAN),
                **{f"{n} us": row.latency_us.get(n, NAN) for n in names},
                **{f"x {n}": row.speedup.get(n, NAN) for n in names},
            }
            for row in found.rows
        ]
        title = f"dispatch within {budget:g} on {current_device().product}"
        terminal.print_rows(rows, how.value, title=title)
    for name in names:
        if name in found.geometric_mean:
            print(
                f"geometric mean against {name}: {found.geometric_mean[name]:.3f}x, "
                f"least {found.least_speedup[name]:.3f}x",
                file=sys.stderr,
            )
        for text, part in found.groups.items():
            if name in part.geometric_mean:
                print(
                    f"geometric mean against {name} where {text} ({part.count} problems): "
                    f"{part.geometric_mean[name]:.3f}x, least {part.least_speedup[name]:.3f}x",
                    file=sys.stderr,
                )
    print(
        f"FP8 chosen for {found.fp8_share:.0%} of {len(found.rows)} problems; "
        f"{len(found.fp8_missed)} more where an admissible FP8 kernel was faster beyond noise",
        file=sys.stderr,
    )
    if fail_under is not None:
        slower = [n for n in names if found.least_speedup.get(n, 0.0) < fail_under]
        _end_if_slower(slower, fail_under)


def _compare_libraries(
    cases: Sequence[Case],
    groups: Sequence[Condition],
    *,
    budget: float,
    distribution: str | None,
    regime: str | None,
    seed: int,
    fail_under: float | None,
    how: OutputFormat,
    quiet: bool,
) -> None:
    from lokakern.bench.compare.by_library import by_library
    from lokakern.device import current_device
    from lokakern.render import terminal

    with terminal.TerminalProgress(quiet=quiet) as progress:
        found = by_library(
            cases, budget=ErrorBudget.of(budget), regime=regime, distribution=distribution,
            groups=groups, seed=seed, begin=functools.partial(progress.begin, "compare"),
            step=progress.step,
        )  # fmt: skip
    if how is OutputFormat.JSON:
        print(json.dumps(found.as_json(), indent=2))
    else:
        rows = [
            {
                "problem": row.problem.removeprefix("gemm "),
                "chosen": row.chosen,
                "dispatch us": _number(row.dispatch_us),
                **{f"{name} us": row.library_us.get(name, NAN) for name in found.libraries},
                "best library": row.fastest,
                "x best": _number(row.speedup),
                "best not ours": row.fastest_other,
                "x not ours": _number(row.other_speedup),
            }
            for row in found.rows
        ]
        title = f"dispatch within {budget:g} against libraries on {current_device().product}"
        terminal.print_rows(rows, how.value, title=title)
    for summary in found.summaries:
        print(_library_words(summary), file=sys.stderr)
    for line in _shown(_failed(found.rows)):
        print(line, file=sys.stderr)
    if fail_under is not None:
        # A row that could not be compared is slower than anything.
        worst = min((row.speedup or 0.0 for row in found.rows), default=0.0)
        _end_if_slower(["the best library"] if worst < fail_under else [], fail_under)


def _library_words(summary: libraries.Summary) -> str:
    which = "libraries that are not ours" if summary.libraries == "not ours" else "all libraries"
    where = f"{which}, {summary.group}, {summary.compared} of {summary.count} compared"
    if summary.speedup is None or summary.least_speedup is None:
        return f"{where}: nothing to compare"
    each = ", ".join(
        f"{name} {mean:.3f}x (least {summary.least[name]:.3f}x)"
        for name, mean in sorted(summary.geometric_mean.items(), key=lambda item: item[1])
    )
    in_fp8 = ", ".join(
        f"{name} {mean:.3f}x"
        for name, mean in sorted(summary.fp8_mean.items(), key=lambda item: item[1])
    )
    return (
        f"{where}: {summary.speedup:.3f}x {summary.best}, the best single one; least "
        f"{summary.least_speedup:.3f}x the best of a problem; {each}; in FP8 wherever they can: "
        f"{in_fp8}"
    )


def _number(value: float | None) -> float:
    return NAN if value is None else value


def _compare_kernels(
    cases: Sequence[Case],
    op: str,
    ours: Sequence[str],
    rivals: Sequence[str],
    groups: Sequence[Condition],
    *,
    compiled: bool,
    regime: str | None,
    seed: int,
    fail_under: float | None,
    how: OutputFormat,
    quiet: bool,
) -> None:
    from lokakern.bench.compare.compiled_baselines import registered
    from lokakern.bench.compare.kernels import bound_words, contest, contests_of
    from lokakern.device import current_device
    from lokakern.render import terminal

    with registered(compiled), terminal.TerminalProgress(quiet=quiet) as progress:
        progress.begin("compare", len(contests_of(cases, op)))
        found = contest(cases, op, ours=ours, rivals=rivals, groups=groups, regime=regime,
                        seed=seed, step=progress.step, note=progress.note)  # fmt: skip
    if how is OutputFormat.JSON:
        print(json.dumps(found.as_json(), indent=2))
    else:
        title = f"{op}: {', '.join(ours)} against {', '.join(rivals)} on {current_device().product}"
        terminal.print_rows(
            [_cells(op, row) for row in found.rows], how.value, title=title, note=bound_words(op)
        )
    for summary in found.summaries:
        print(_words(summary), file=sys.stderr)
    for pairing in found.pairings:
        print(_pair_words(pairing), file=sys.stderr)
    for line in _failures(found):
        print(line, file=sys.stderr)
    if fail_under is not None:
        # A row where ours did not run is slower than anything.
        worst = min((row.speedup or 0.0 if row.rival else 1.0 for row in found.rows), default=0.0)
        _end_if_slower(["the best rival"] if worst < fail_under else [], fail_under)


def _cells(op: str, row: Row) -> dict[str, Any]:
    same = row.accurate_rival == row.rival
    cells = {
        "problem": row.problem.removeprefix(f"{op} "),
        "ours": row.ours,
        "us": row.ours_us,
        "best rival": row.rival,
        "rival us": row.rival_us,
        "x rival": row.speedup,
        "best accurate rival": "the same" if same and row.rival else row.accurate_rival,
        "accurate us": row.accurate_rival_us,
        "x accurate": row.accurate_speedup,
        "bound us": row.bound_us,
        "/ bound": row.over_bound,
    }
    return {name: NAN if value is None else value for name, value in cells.items()}


def _words(summary: Summary) -> str:
    words = []
    if summary.speedup and summary.least_speedup:
        words.append(f"{summary.speedup:.3f}x the best rival (least {summary.least_speedup:.3f}x)")
    if summary.accurate_speedup and summary.least_accurate_speedup:
        words.append(
            f"{summary.accurate_speedup:.3f}x among the accurate "
            f"(least {summary.least_accurate_speedup:.3f}x)"
        )
    if summary.over_bound and summary.most_over_bound:
        words.append(f"{summary.over_bound:.3f} of the bound (most {summary.most_over_bound:.3f})")
    found = "; ".join(words) or "nothing to compare"
    counts = [f"{summary.group}, {summary.compared} of {summary.count} compared"]
    if summary.wrong:
        counts.append(f"ours WRONG {summary.wrong} times")
    if summary.failed:
        counts.append(f"ours did not run {summary.failed} times")
    if summary.missing:
        counts.append(f"none of ours at {summary.missing}")
    return f"{', '.join(counts)}: {found}"


def _pair_words(pairing: Pairing) -> str:
    where = f"{pairing.ours} against {pairing.rivals}, {pairing.group}"
    if pairing.speedup is None or pairing.least_speedup is None:
        return f"{where}: nothing to compare"
    return (
        f"{where}, {pairing.compared} compared: {pairing.speedup:.3f}x "
        f"(least {pairing.least_speedup:.3f}x)"
    )


def _failures(found: Contest) -> list[str]:
    missing = [f"none of ours: {row.problem}" for row in found.rows if not row.ours]
    return _shown(_failed(found.rows) + missing)


def _failed(rows: Sequence[Row | libraries.Row]) -> list[str]:
    entries = [entry for row in rows for entry in row.entries if entry.failed]
    return [
        f"{'WRONG' if entry.wrong else 'not ok'}: {entry.kernel}: {entry.problem}: {entry.failed}"
        for entry in sorted(entries, key=lambda entry: not entry.wrong)
    ]


def _shown(lines: Sequence[str]) -> list[str]:
    left = len(lines) - 20
    return [*lines[:20], f"and {left} more"] if left > 0 else list(lines)


def _end_if_slower(slower: Sequence[str], limit: float) -> None:
    if slower:
        print(f"less than {limit:g} times as fast as {', '.join(slower)}", file=sys.stderr)
        raise typer.Exit(SLOWER_EXIT)
