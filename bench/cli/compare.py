"""The command `compare`: dispatch against baselines or libraries, or kernels against rivals."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import ExitCode, OutputFormat, reading, say, says_errors
from lokakern.errors import UnknownNameError

if TYPE_CHECKING:
    from lokakern.bench.compare import dispatch as choices
    from lokakern.bench.compare import kernels as contests
    from lokakern.workloads.gemm_cases import Case

DEFAULT_SUITE = "smoke"
OURS = ("cuda.*",)
HELD_OUT_SEED = 1
NAN = float("nan")
MOST_FAILURES = 20  # lines on stderr


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
    shape: options.Shapes = None,
    epilogue: options.Epilogue = None,
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
    where: options.Where = None,
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
            help="Add stock modules compiled by torch.compile (torch.compiled_norm*) to the rivals "
            "of gemm_norm; naming them in --rivals does the same.",
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
    budget: options.Budget = 0.06,
    baseline: Annotated[
        list[str] | None,
        typer.Option(help='Kernel to compare dispatch with, or "bf16"; repeatable. Default: bf16.'),
    ] = None,
    distribution: options.Distribution = None,
    regime: options.Regime = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed of operands, of the order of measurements, and of the choices that "
            "--held-out draws. Database rows have seed 0. Default: 0, or 1 with --held-out.",
        ),
    ] = None,
    db: options.Database = None,
    fail_under: Annotated[
        float | None,
        typer.Option(help="Exit with 4 if anywhere less than this times as fast."),
    ] = None,
    how: options.How = OutputFormat.TABLE,
    quiet: options.Quiet = False,
) -> None:
    """Time dispatch's choices against baselines, or kernels against rivals, interleaved, now."""
    from lokakern.bench.compare import dispatch as choices
    from lokakern.bench.compare import kernels as contests
    from lokakern.bench.compare.compiled_baselines import are_asked_for, registered
    from lokakern.bench.compare.race import Setting
    from lokakern.registry.ops import op_named
    from lokakern.render import terminal
    from lokakern.workloads.filters import parse_condition

    op_named(op)
    if epilogue is not None and not shape:
        raise typer.BadParameter("goes with --shape", param_hint="--epilogue")
    for module in load or ():
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UnknownNameError(f"--load: {module!r} cannot be imported: {error}") from None
    is_contest = op != "gemm" or bool(ours or rivals)
    others = is_contest or any((baseline, group, by_library, fail_under is not None))
    if held_out is not None and others:
        raise typer.BadParameter("compares dispatch with the unquantized kernel: --op gemm, "
                                 "without --ours, --rivals, --baseline, --group, --by-library and "
                                 "--fail-under", param_hint="--held-out")  # fmt: skip
    if held_out is not None and seed == 0:
        raise typer.BadParameter("0 is what databases are measured with; give another with "
                                 "--held-out", param_hint="--seed")  # fmt: skip
    how_timed = regime.value if regime else ""
    cases = _cases(op, suite, shape, epilogue, where, db, how_timed, is_held_out=bool(held_out))
    groups = [parse_condition(text) for text in group or ()]
    if by_library and (is_contest or baseline):
        raise typer.BadParameter("compares dispatch with libraries: --op gemm, without --ours, "
                                 "--rivals and --baseline", param_hint="--by-library")  # fmt: skip
    if is_contest and baseline:
        raise typer.BadParameter("goes with dispatch: with --ours, name --rivals",
                                 param_hint="--baseline")  # fmt: skip
    names = tuple(baseline or ("bf16",))
    mine, theirs = tuple(ours or OURS), tuple(rivals or ("*",))
    compiles = is_contest and (compiled or are_asked_for([*(ours or ()), *(rivals or ())]))
    with (
        contextlib.nullcontext() if is_contest else reading(db),
        registered(compiles),
        terminal.TerminalProgress(quiet=quiet) as progress,
    ):
        setting = Setting(
            regime=how_timed,
            seed=seed if seed is not None else 0 if held_out is None else HELD_OUT_SEED,
            groups=groups,
            budget=budget,
            distribution=distribution,
            begin=lambda count: progress.begin("compare", count),
            step=progress.step,
            note=progress.note,
        )
        if is_contest:
            contest = contests.contest(cases, op, setting, ours=mine, rivals=theirs)
            report = _contest_report(contest, op, mine, theirs)
        elif held_out is not None:
            report = _held_out_report(choices.held_out(cases, held_out, setting), budget)
        elif by_library:
            report = _library_report(choices.by_library(cases, setting), budget)
        else:
            report = _dispatch_report(choices.compare(cases, setting, names), names, budget)
    _print(report, how, fail_under)


def _cases(
    op: str, suite: str | None, shape: list[str] | None, epilogue: str | None, where: str | None,
    db: str | None, regime: str, *, is_held_out: bool,
) -> list[Case]:  # fmt: skip
    """The problems of an op to compare."""
    from lokakern.device import current_device
    from lokakern.registry.register import fp8_format
    from lokakern.selection import dispatcher
    from lokakern.sweep.stale_jobs import cases_timed
    from lokakern.workloads.filters import parse_condition
    from lokakern.workloads.suite_files import suite_named

    device = current_device()
    if shape:
        cases, source = options.cases_of(shape, epilogue, fp8_format(device)), "the shapes"
    elif is_held_out and suite is None:
        with reading(db):
            known = dispatcher.snapshot()
            cases = cases_timed(known, device, regime or dispatcher.default_regime(device))
        source = "what was timed here"
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
    return cases


class _Report(NamedTuple):
    """A comparison to print.

    Attributes:
        data: The comparison, a dataclass, for JSON.
        title: Title of the table, without the device.
        rows: Rows of the table.
        lines: Summary on stderr.
        least: Least speedups, by rival; a missing one is 0.
        is_slower: Whether to exit with 4 whatever the limit.
        note: Below the table.
        missing: Cell of a value that is missing.
    """

    data: Any
    title: str
    rows: Sequence[Mapping[str, Any]]
    lines: Sequence[str]
    least: Mapping[str, float]
    is_slower: bool = False
    note: str = ""
    missing: float | None = NAN


def _print(report: _Report, how: OutputFormat, fail_under: float | None) -> None:
    from lokakern.device import current_device
    from lokakern.render import terminal

    if how is OutputFormat.JSON:
        print(json.dumps(asdict(report.data), indent=2))
    else:
        rows = [
            {name: report.missing if x is None else x for name, x in r.items()} for r in report.rows
        ]
        title = f"{report.title} on {current_device().product}"
        terminal.print_rows(rows, how, title=title, note=report.note)
    for line in report.lines:
        say(line)
    limit = 0.0 if fail_under is None else fail_under
    slower = [name for name, least in report.least.items() if least < limit]
    if slower:
        say(f"less than {limit:g} times as fast as {', '.join(slower)}")
    if slower or report.is_slower:
        raise typer.Exit(ExitCode.SLOWER)


def _dispatch_report(found: choices.Comparison, names: Sequence[str], budget: float) -> _Report:
    rows = [
        {
            "problem": row.problem,
            "chosen": row.chosen,
            "dispatch us": row.latency_us.get("dispatch"),
            **{f"{name} us": row.latency_us.get(name) for name in names},
            **{f"x {name}": row.speedup.get(name) for name in names},
        }
        for row in found.rows
    ]
    lines = []
    parts: list[tuple[str, choices.Comparison | choices.Group]] = [
        ("", found),
        *((f" where {text} ({x.count} problems)", x) for text, x in found.groups.items()),
    ]
    for name in names:
        for where, part in parts:
            if name in part.geometric_mean:
                mean, least = part.geometric_mean[name], part.least_speedup[name]
                words = f"geometric mean against {name}{where}: {mean:.3f}x, least {least:.3f}x"
                lines.append(words)
    lines.append(
        f"FP8 chosen for {found.fp8_share:.0%} of {len(found.rows)} problems; "
        f"{len(found.fp8_missed)} more where an admissible FP8 kernel was faster beyond noise"
    )
    least_by_name = {name: found.least_speedup.get(name, 0.0) for name in names}
    return _Report(found, f"dispatch within {budget:g}", rows, lines, least_by_name)


def _held_out_report(found: choices.HeldOut, budget: float) -> _Report:
    rows = [
        {
            "problem": row.problem.removeprefix("gemm "),
            "chosen": row.chosen,
            "us": row.chosen_us,
            "bf16 us": row.unquantized_us,
            "x bf16": row.speedup,
            "x promised": row.promised,
            "slower": row.slower,
            "why": row.why,
        }
        for row in found.rows
    ]
    means = ""
    if found.geometric_mean is not None and found.least_speedup is not None:
        means = f": {found.geometric_mean:.3f}x bf16, least {found.least_speedup:.3f}x"
    lines = [
        f"{len(found.rows)} of {found.candidates} choices of a quantized kernel, drawn with seed "
        f"{found.seed}{means}; {len(found.slower)} slower than bf16 beyond noise",
        *(f"slower: {problem}" for problem in found.slower),
    ]
    title = f"choices within {budget:g}, measured again"
    is_slower = bool(found.slower)
    return _Report(found, title, rows, lines, {}, is_slower, missing=None)


def _library_report(found: choices.ByLibrary, budget: float) -> _Report:
    rows = [
        {
            "problem": row.problem.removeprefix("gemm "),
            "chosen": row.chosen,
            "dispatch us": row.dispatch_us,
            **{f"{name} us": row.library_us.get(name) for name in found.libraries},
            "best library": row.fastest,
            "x best": row.speedup,
            "best not ours": row.fastest_other,
            "x not ours": row.other_speedup,
        }
        for row in found.rows
    ]
    lines = [*map(_library_words, found.summaries), *_shown(_failed(found.rows))]
    # A row that could not be compared is slower than any limit.
    least = {"the best library": min((row.speedup or 0.0 for row in found.rows), default=0.0)}
    title = f"dispatch within {budget:g} against libraries"
    return _Report(found, title, rows, lines, least)


def _library_words(summary: choices.LibrarySummary) -> str:
    which = "libraries that are not ours" if summary.libraries == "not ours" else "all libraries"
    where = f"{which}, {summary.group}, {summary.compared} of {summary.count} compared"
    if summary.speedup is None or summary.least_speedup is None:
        return f"{where}: nothing to compare"
    means = sorted(summary.geometric_mean.items(), key=lambda item: item[1])
    fp8_means = sorted(summary.fp8_mean.items(), key=lambda item: item[1])
    each = ", ".join(f"{n} {mean:.3f}x (least {summary.least[n]:.3f}x)" for n, mean in means)
    in_fp8 = ", ".join(f"{name} {mean:.3f}x" for name, mean in fp8_means)
    return (
        f"{where}: {summary.speedup:.3f}x {summary.best}, the best single one; least "
        f"{summary.least_speedup:.3f}x the best of a problem; {each}; in FP8 wherever they can: "
        f"{in_fp8}"
    )


def _contest_report(
    found: contests.Contest, op: str, ours: Sequence[str], rivals: Sequence[str]
) -> _Report:
    from lokakern.bench.compare.kernels import bound_words

    lines = [*map(_words, found.summaries), *map(_pair_words, found.pairings), *_failures(found)]
    # A row where ours did not run is slower than any limit.
    speedups = (row.speedup or 0.0 if row.rival else 1.0 for row in found.rows)
    return _Report(
        found,
        f"{op}: {', '.join(ours)} against {', '.join(rivals)}",
        [_cells(op, row) for row in found.rows],
        lines,
        {"the best rival": min(speedups, default=0.0)},
        note=bound_words(op),
    )


def _cells(op: str, row: contests.Row) -> dict[str, Any]:
    same = row.accurate_rival == row.rival
    return {
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


def _words(summary: contests.Summary) -> str:
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


def _pair_words(pairing: contests.Pairing) -> str:
    where = f"{pairing.ours} against {pairing.rivals}, {pairing.group}"
    if pairing.speedup is None or pairing.least_speedup is None:
        return f"{where}: nothing to compare"
    return (
        f"{where}, {pairing.compared} compared: {pairing.speedup:.3f}x "
        f"(least {pairing.least_speedup:.3f}x)"
    )


def _failures(found: contests.Contest) -> list[str]:
    missing = [f"none of ours: {row.problem}" for row in found.rows if not row.ours]
    return _shown(_failed(found.rows) + missing)


def _failed(rows: Sequence[contests.Row | choices.LibraryRow]) -> list[str]:
    entries = [entry for row in rows for entry in row.entries if entry.failed]
    return [
        f"{'WRONG' if entry.wrong else 'not ok'}: {entry.kernel}: {entry.problem}: {entry.failed}"
        for entry in sorted(entries, key=lambda entry: not entry.wrong)
    ]


def _shown(lines: Sequence[str]) -> list[str]:
    left = len(lines) - MOST_FAILURES
    return [*lines[:MOST_FAILURES], f"and {left} more"] if left > 0 else list(lines)
