"""The command ``sweep``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lokakern.bench.cli.options import (
    DatabaseOption,
    EpilogueOption,
    FormatOption,
    JsonOption,
    OutputFormat,
    Regime,
    RegimeOption,
    ShapeOption,
    WhereOption,
    cases_of,
    say,
    says_errors,
    source_of,
)
from lokakern.errors import DatabaseError, MeasurementError, UnknownNameError

if TYPE_CHECKING:
    from lokakern.sweep.engine import SweepReport
    from lokakern.sweep.ranks import SingleRank
    from lokakern.types import Device
    from lokakern.workloads.suites import Case

TIME_LIMIT_EXIT, NOT_OK_EXIT = 3, 5
MOST_SHOWN = 200  # problems; 10970 times at 2065 take 20 s to print
DEFAULT_SUITE = "smoke"


class Grade(StrEnum):
    """What a run's rows are worth."""

    FULL = "full"
    QUICK = "quick"


class Errors(StrEnum):
    """Whose errors a sweep measures."""

    ALL = "all"
    NEEDED = "needed"
    NONE = "none"


def _command_again(arguments: list[str]) -> str:
    """The command line that is kept with a run: without where this machine keeps its database."""
    words = ["python", "-m", "lokakern.bench"]
    skip = False
    for word in arguments:
        if not skip and word != "--db" and not word.startswith("--db="):
            words.append(Path(word).name if word.endswith(".toml") else word)
        skip = word == "--db"
    return " ".join(words)


@says_errors
def sweep(
    suite: Annotated[
        str | None,
        typer.Option(
            help="Suite to measure: a name of `list suites`, or a .toml file. Default: smoke; with "
            "--only-stale whatever was timed on this device."
        ),
    ] = None,
    shape: ShapeOption = None,
    epilogue: EpilogueOption = None,
    problem: Annotated[
        list[str] | None,
        typer.Option(help="A problem as a miss printed it (JSON); may be repeated."),
    ] = None,
    db: DatabaseOption = None,
    regime: RegimeOption = None,
    grade: Annotated[Grade, typer.Option(help="quick rows count only where none is full.")] = (
        Grade.FULL
    ),
    kernel: Annotated[
        list[str] | None, typer.Option(help="Only kernels whose name holds this; repeatable.")
    ] = None,
    where: WhereOption = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which no new work begins (exit code 3).")
    ] = None,
    from_misses: Annotated[
        bool, typer.Option("--from-misses", help="The problems that gemm missed before.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure also what the database holds already.")
    ] = False,
    only_stale: Annotated[
        bool,
        typer.Option(
            "--only-stale",
            help="Only what was measured before a kernel or the toolchain changed, and not since; "
            "what was never measured is left out. A problem with one stale kernel is timed whole.",
        ),
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Measure also what crashed or hung before.")
    ] = False,
    errors: Annotated[
        Errors, typer.Option(help="Errors of all kernels, of those that may be chosen, or of none.")
    ] = Errors.ALL,
    watchdog: Annotated[
        float | None,
        typer.Option(
            help="Seconds of silence after which a kernel counts as hung. Default: 60 on "
            "a GPU, 600 on a CPU."
        ),
    ] = None,
    prebuild: Annotated[
        bool,
        typer.Option(
            "--prebuild",
            help="Compile what the sweep would launch, on all cores and "
            "with no GPU, and measure nothing.",
        ),
    ] = False,
    device_name: Annotated[
        str | None,
        typer.Option("--device", help='With --prebuild: a GPU type such as "NVIDIA H200".'),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    how: FormatOption = OutputFormat.TABLE,
    as_json: JsonOption = False,
) -> None:
    """Measure times and errors into the database; goes on where an earlier sweep stopped."""
    from lokakern.bench.report import library_smoke
    from lokakern.bench.report.summary import summary_rows
    from lokakern.build.prebuild import gpu_named
    from lokakern.device import current_device
    from lokakern.registry.register import load_tried
    from lokakern.registry.storage.reader import is_there
    from lokakern.registry.storage.run_files import collect_runs
    from lokakern.render import terminal
    from lokakern.selection import dispatcher
    from lokakern.sweep import engine as sweeping
    from lokakern.sweep.ranks import ranks_of_torchrun, take_gpu

    if device_name is not None and not prebuild:
        raise typer.BadParameter("goes with --prebuild: a sweep measures the device that is here",
                                 param_hint="--device")  # fmt: skip
    if time_limit is not None and not time_limit >= 0:
        raise typer.BadParameter(f"{time_limit} is no number of seconds", param_hint="--time-limit")
    if watchdog is not None and not watchdog > 0:
        raise typer.BadParameter(f"{watchdog} is no number of seconds", param_hint="--watchdog")
    if only_stale and (fresh or prebuild):
        raise typer.BadParameter(f"goes without {'--fresh' if fresh else '--prebuild'}",
                                 param_hint="--only-stale")  # fmt: skip
    take_gpu()
    device = gpu_named(device_name) if prebuild else current_device()
    with ranks_of_torchrun() as ranks:
        if ranks.world > 1 and prebuild:
            raise typer.BadParameter("goes without torchrun: one process compiles on all cores",
                                     param_hint="--prebuild")  # fmt: skip
        if not prebuild:
            ranks.once("trials", lambda: library_smoke.try_all(library_smoke.untried(device), say))
            load_tried()  # what another rank tried
        if shape or problem or from_misses:
            cases = _asked_for(shape or [], epilogue, problem or [], from_misses, device)
            name = "misses" if from_misses else "shapes"
        elif only_stale and suite is None:
            cases, name = _cases_timed(_target(db), regime, device, ranks), "stale"
        else:
            cases, name = _cases_of_suite(suite or DEFAULT_SUITE, device)
        if cases or not only_stale:  # a database that holds nothing is no wrong usage
            cases = _checked(cases, name, where, kernel or (), device)
        if prebuild:
            _prebuild(cases, device, kernel or (), quiet)
            return
        target = _target(db)
        shown = terminal.TerminalProgress(quiet=quiet) if ranks.rank == 0 else None
        with shown or contextlib.nullcontext() as progress:
            did = sweeping.sweep(
                cases,
                database=target,
                suite=name,
                command=_command_again(sys.argv[1:]),
                regime=regime.value if regime else None,
                grade=grade.value,
                time_limit_s=time_limit,
                only=tuple(kernel or ()),
                fresh=fresh,
                retry=retry,
                only_stale=only_stale,
                errors=errors.value,
                watchdog_s=watchdog,
                progress=progress,
                ranks=ranks,
            )
        every = ranks.gather("report", did.counts())
    if every is None:  # the first rank tells of all
        return
    if len(every) < ranks.world:
        collect_runs(target)
        say(f"{ranks.world - len(every)} of {ranks.world} ranks ended early; their finished "
            "measurements are in the database, other ranks made the rest")  # fmt: skip
    dispatcher.use_snapshot(None)
    done = sweeping.SweepReport.of_all(every)
    _tell(done, target, only_stale)
    if is_there(target):
        shown_cases = [cases[place] for place in done.stale] if only_stale else cases
        how = OutputFormat.JSON if as_json else how
        if how is OutputFormat.TABLE and len(shown_cases) > MOST_SHOWN:
            say(f"{len(shown_cases)} problems are too many for a table: --format csv or json "
                "prints them, `compare` says what dispatch gains, `explain` why")  # fmt: skip
        else:
            rows = summary_rows(target, shown_cases, regime.value if regime else None)
            terminal.print_rows(rows, how.value, title=f"{name} on {device.product}")
    if done.out_of_time:
        say(f"the time limit of {time_limit:g} s ended the sweep; run it again")
        raise typer.Exit(TIME_LIMIT_EXIT)
    if done.failures:
        raise typer.Exit(NOT_OK_EXIT)


def _asked_for(
    shapes: Sequence[str],
    epilogue: str | None,
    problems: Sequence[str],
    from_misses: bool,
    device: Device,
) -> list[Case]:
    """Cases that the command line, or the ledger of misses, names one by one."""
    from lokakern.registry.register import fp8_format
    from lokakern.selection import misses
    from lokakern.workloads.suites import Case

    cases = cases_of(shapes, epilogue, fp8_format(device))
    asked = [misses.parse(text) for text in problems]
    asked += [missed for missed, _ in misses.read()] if from_misses else []
    for found in asked:
        reason = misses.why_not_measurable(found)
        if reason is not None:
            raise MeasurementError(f"{found} cannot be measured: {reason}")
        cases.append(Case(found, "X1"))
    return list(dict.fromkeys(cases))


def _cases_timed(
    target: Path | str, regime: Regime | None, device: Device, ranks: SingleRank
) -> list[Case]:
    """Every problem that a database, or a shipped one, has times of on the device.

    One rank reads it and tells the others: they may have another copy, or read it later.
    """
    from lokakern.registry.schema.row_keys import problem_from_row, problem_row
    from lokakern.registry.storage.run_files import collect_runs
    from lokakern.selection.dispatcher import default_regime
    from lokakern.sweep.resume import read_by_dispatch
    from lokakern.sweep.staleness import cases_timed
    from lokakern.workloads.suites import Case

    def look() -> list[Any]:
        collect_runs(target)
        how = regime.value if regime else default_regime(device)
        found = cases_timed(read_by_dispatch(target), device, how)
        return [(problem_row(case.problem), case.distribution) for case in found]

    plain = ranks.plan("cases", look)
    return [Case(problem_from_row(row), distribution) for row, distribution in plain]


def _cases_of_suite(suite: str, device: Device) -> tuple[list[Case], str]:
    from lokakern.workloads.suite_files import suite_named

    chosen = suite_named(suite)
    cases = chosen.cases(device)
    if not cases:
        where = ", ".join(sorted(chosen.architectures))
        raise UnknownNameError(
            f"suite {chosen.name} is for {where}, not for {device} ({device.architecture}); see "
            "`list suites`"
        )
    return cases, chosen.name


def _checked(
    cases: list[Case], name: str, where: str | None, kernels: Sequence[str], device: Device
) -> list[Case]:
    """Cases for which the condition holds, if a kernel that was asked for takes any."""
    from lokakern.sweep.plan import candidates
    from lokakern.workloads.filters import parse_condition

    if where:
        condition = parse_condition(where)
        cases = [case for case in cases if condition.holds(case.problem)]
        if not cases:
            raise UnknownNameError(f"no problem of {name} is one for which {where!r} holds")
    if kernels and not any(candidates(case.problem, device, kernels) for case in cases):
        raise UnknownNameError(
            f"--kernel is {', '.join(kernels)}; no kernel that takes these problems has such a "
            "name (see `list kernels`)"
        )
    return cases


def _prebuild(cases: Sequence[Case], device: Device, kernels: Sequence[str], quiet: bool) -> None:
    from lokakern.build.prebuild import prebuild
    from lokakern.render import terminal

    with terminal.TerminalProgress(quiet=quiet) as progress:
        problems = [case.problem for case in cases]
        built = prebuild(problems, device, tuple(kernels), progress=progress)
    say(f"{built.compiled} kernels compiled for {device.product} and {built.already_there} "
        f"there already, in {built.seconds:.0f} s")  # fmt: skip
    for broken in built.failures:
        say(f"not compiled: {broken.job}: {broken.reason}")
    if built.failures:
        raise typer.Exit(NOT_OK_EXIT)


def _target(db: str | None) -> Path | str:
    from lokakern.registry.sharing.import_merge import checked_file
    from lokakern.registry.storage.run_files import user_database

    target = source_of(db) if db else user_database()
    if isinstance(target, Path):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"database folder {str(target.parent)!r} cannot be made: {error.strerror}; choose "
                "another with --db"
            ) from None
        if db is not None and target.exists():  # whoever wrote it
            with checked_file(target):
                pass
    return target


def _tell(done: SweepReport, target: Path | str, only_stale: bool) -> None:
    if only_stale and not (done.timed or done.measured or done.out_of_time):
        say("nothing is stale")
    others = "fresh or never measured" if only_stale else "there already"
    say(f"{done.timed} times of {done.problems} problems and {done.measured} errors in "
        f"{done.seconds:.0f} s, {done.skipped} were {others}; database {target}")  # fmt: skip
    for words in done.given_up:
        say(f"given up: {words}; --retry launches it again")
    for failure in done.failures[:20]:
        say(f"not ok: {failure}")
    if len(done.failures) > 20:
        say(f"not ok: and {len(done.failures) - 20} more")
