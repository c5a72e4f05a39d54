"""The command line: sweep, explain, chain, compare, export, import, merge, diff, list.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 done; 1 an error, said in one
line; 2 wrong usage; 3 the time limit ended a sweep (run it again to go on); 4 a compared choice was
slower than allowed by ``--fail-under``; 5 a sweep is done, but rows of it are not ok; 6 a diff
found something slower or wronger.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lokakern.bench.cli_chain import chain
from lokakern.bench.cli_compare import compare
from lokakern.bench.cli_exchange import diff, export, import_, merge
from lokakern.bench.options import (
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
    shape_of,
    source_of,
)
from lokakern.errors import DatabaseError, MeasurementError, UnknownNameError
from lokakern.types import Layout, Operand

app = typer.Typer(
    name="lokakern.bench",
    help="Measure FP8 kernels, and ask which one dispatch would choose and why.\n\n"
    "Exit codes: 0 done, 1 error, 2 wrong usage, 3 time limit (run again to go on), "
    "4 slower than --fail-under, 5 swept, but rows are not ok, 6 slower or wronger (diff).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
TIME_LIMIT_EXIT, NOT_OK_EXIT = 3, 5


class Grade(StrEnum):
    """What a run's rows are worth."""

    FULL = "full"
    QUICK = "quick"


class Errors(StrEnum):
    """Whose errors a sweep measures."""

    ALL = "all"
    NEEDED = "needed"
    NONE = "none"


class Listing(StrEnum):
    """What can be listed."""

    KERNELS = "kernels"
    SUITES = "suites"
    DISTRIBUTIONS = "distributions"
    DEVICE = "device"
    LIBRARIES = "libraries"


def _command_again(arguments: list[str]) -> str:
    """The command line that is kept with a run: without where this machine keeps its database."""
    words = ["python", "-m", "lokakern.bench"]
    skip = False
    for word in arguments:
        if not skip and word != "--db" and not word.startswith("--db="):
            words.append(Path(word).name if word.endswith(".toml") else word)
        skip = word == "--db"
    return " ".join(words)


def _say(words: str) -> None:
    print(words, file=sys.stderr)


@app.command()
@says_errors
def sweep(
    suite: Annotated[
        str, typer.Option(help="Suite to measure: a name of `list suites`, or a .toml file.")
    ] = "smoke",
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
    from lokakern import misses, selection
    from lokakern.bench import report, trials
    from lokakern.bench import sweep as sweeping
    from lokakern.bench.conditions import parse_condition
    from lokakern.bench.suites import Case, suite_named
    from lokakern.bench.summary import summary_rows
    from lokakern.device import current_device
    from lokakern.prebuild import gpu_named
    from lokakern.prebuild import prebuild as build_ahead
    from lokakern.registry.exchange import checked_file
    from lokakern.registry.reader import is_there
    from lokakern.registry.register import fp8_format
    from lokakern.registry.store import user_database

    if device_name is not None and not prebuild:
        raise typer.BadParameter("goes with --prebuild: a sweep measures the device that is here",
                                 param_hint="--device")  # fmt: skip
    device = gpu_named(device_name) if prebuild else current_device()
    if time_limit is not None and not time_limit >= 0:
        raise typer.BadParameter(f"{time_limit} is no number of seconds", param_hint="--time-limit")
    if watchdog is not None and not watchdog > 0:
        raise typer.BadParameter(f"{watchdog} is no number of seconds", param_hint="--watchdog")
    if not prebuild:
        trials.try_all(trials.untried(device), _say)
    if shape or problem or from_misses:
        cases = cases_of(shape or [], epilogue, fp8_format(device))
        asked = [misses.parse(text) for text in problem or ()]
        asked += [missed for missed, _ in misses.read()] if from_misses else []
        for found in asked:
            reason = misses.why_not_measurable(found)
            if reason is not None:
                raise MeasurementError(f"{found} cannot be measured: {reason}")
            cases.append(Case(found, "X1"))
        cases = list(dict.fromkeys(cases))
        name = "misses" if from_misses else "shapes"
    else:
        chosen = suite_named(suite)
        cases, name = chosen.cases(device), chosen.name
    if where:
        condition = parse_condition(where)
        cases = [case for case in cases if condition.holds(case.problem)]
        if not cases:
            raise UnknownNameError(f"no problem of {name} is one for which {where!r} holds")
    if kernel and not any(sweeping.candidates(case.problem, device, kernel) for case in cases):
        raise UnknownNameError(
            f"--kernel is {', '.join(kernel)}; no kernel that takes these problems has such a "
            "name (see `list kernels`)"
        )
    if prebuild:
        with report.TerminalProgress(quiet=quiet) as progress:
            built = build_ahead([case.problem for case in cases], device, tuple(kernel or ()),
                                progress=progress)  # fmt: skip
        print(
            f"{built.compiled} kernels compiled for {device.product} and {built.already_there} "
            f"there already, in {built.seconds:.0f} s",
            file=sys.stderr,
        )
        for broken in built.failures:
            print(f"not compiled: {broken.job}: {broken.reason}", file=sys.stderr)
        if built.failures:
            raise typer.Exit(NOT_OK_EXIT)
        return
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
    with report.TerminalProgress(quiet=quiet) as progress:
        done = sweeping.sweep(
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
            errors=errors.value,
            watchdog_s=watchdog,
            progress=progress,
        )
    selection.use_snapshot(None)
    words = (
        f"{done.timed} times of {done.problems} problems and {done.measured} errors in "
        f"{done.seconds:.0f} s, {done.skipped} were there already; database {target}"
    )
    print(words, file=sys.stderr)
    for words in done.given_up:
        print(f"given up: {words}; --retry launches it again", file=sys.stderr)
    for failure in done.failures[:20]:
        print(f"not ok: {failure}", file=sys.stderr)
    if len(done.failures) > 20:
        print(f"not ok: and {len(done.failures) - 20} more", file=sys.stderr)
    if is_there(target):
        rows = summary_rows(target, cases, regime.value if regime else None)
        report.print_rows(rows, "json" if as_json else how.value,
                          title=f"{name} on {device.product}")  # fmt: skip
    if done.out_of_time:
        print(f"the time limit of {time_limit:g} s ended the sweep; run it again", file=sys.stderr)
        raise typer.Exit(TIME_LIMIT_EXIT)
    if done.failures:
        raise typer.Exit(NOT_OK_EXIT)


@app.command()
@says_errors
def explain(
    op: Annotated[
        str, typer.Argument(help="gemm, gemm_norm, scaled_gemm, quantize, norm_quantize, ...")
    ] = "gemm",
    shape: Annotated[str, typer.Option(help="m,n,k or m,k.")] = "32768,512,512",
    budget: BudgetOption = 0.06,
    device: Annotated[
        str | None, typer.Option(help='Such as "NVIDIA H200"; need not be here. Default: here.')
    ] = None,
    distribution: DistributionOption = None,
    regime: RegimeOption = None,
    prepared: Annotated[
        str | None, typer.Option(help="The weight is prepared: tensor, row or 128x128 scales.")
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="With a bias.")] = False,
    epilogue: Annotated[
        str | None,
        typer.Option(help="All that comes after the sums, such as bias+relu or bias+layer+affine."),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Operands are quantized: tensor, row or 1x128 scales (of a)."),
    ] = None,
    out_scale: Annotated[
        str | None,
        typer.Option(help="The output is FP8: tensor, row or 1x128 scales."),
    ] = None,
    db: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which kernel dispatch chooses, from which rows, and why not each other one."""
    import json

    from lokakern.bench.suites import PREPARED_FORMS
    from lokakern.device import current_device
    from lokakern.operands import granularity_named
    from lokakern.registry.register import fp8_format
    from lokakern.selection import dispatch, snapshot

    sizes = shape_of(shape)
    fields: dict[str, Any] = {"epilogue": "bias"} if bias else {}
    if epilogue is not None:
        fields["epilogue"] = epilogue
    with reading(db):
        target = snapshot().find_device(device) if device else current_device()
        fp8 = fp8_format(target)
        if scale is not None:
            fields["a"] = Operand(fp8, granularity_named(op, scale))
        if out_scale is not None:
            fields |= {"out_format": fp8, "out_granularity": granularity_named(op, out_scale)}
        if prepared is not None:
            known = {g.value: g for g in PREPARED_FORMS} if op in ("gemm", "gemm_norm") else {}
            if prepared not in known:
                raise UnknownNameError(
                    f"--prepared is {prepared!r}; expected one of "
                    f"{', '.join(g.value for g in PREPARED_FORMS)}, with gemm or gemm_norm"
                )
            fields |= {
                "b": Operand(fp8, known[prepared], Layout.COLUMN),
                "prepared": True,
            }
        choice = dispatch(
            op, sizes, budget, distribution=distribution, device=device,
            regime=regime.value if regime else None, **fields,
        )  # fmt: skip
        if as_json:
            facts = {
                "problem": str(choice.problem), "device": choice.table.device.product,
                "kernel": choice.kernel, "latency_us": choice.latency_us,
                "interpolated": choice.interpolated, "miss": choice.is_miss,
                "tied": choice.tied, "errors": choice.errors, "rejected": choice.rejected,
            }  # fmt: skip
            print(json.dumps(facts, indent=2))
        else:
            print(choice.explain())


app.command()(chain)
app.command()(compare)
app.command()(export)
app.command("import")(import_)
app.command()(merge)
app.command()(diff)


@app.command("list")
@says_errors
def list_(
    what: Annotated[Listing, typer.Argument(help="What to list.")] = Listing.KERNELS,
    db: DatabaseOption = None,
    how: FormatOption = OutputFormat.TABLE,
    as_json: JsonOption = False,
) -> None:
    """List kernels with what is measured of them, libraries, suites, distributions, or the device.

    Libraries that are installed and do not work, or were never tried, are tried first.
    """
    from lokakern.bench import listing, report, trials
    from lokakern.device import current_device

    if what is Listing.LIBRARIES:
        trials.try_all(trials.doubtful(current_device()), _say)
    with reading(db):
        rows = listing.rows_of(what.value, brief=how is OutputFormat.TABLE and not as_json)
    report.print_rows(rows, "json" if as_json else how.value)


def main() -> None:
    """Run the command line."""
    app(prog_name="python -m lokakern.bench")
