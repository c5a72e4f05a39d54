"""The command line: sweep, explain, compare, list.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 done; 1 an error, said in one
line; 2 wrong usage; 3 the time limit ended a sweep (run it again to go on); 4 a compared choice was
slower than allowed by ``--fail-under``; 5 a sweep is done, but rows of it are not ok.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from lokakern.errors import (
    DatabaseError,
    LokakernError,
    MeasurementError,
    ShapeError,
    UnknownNameError,
)
from lokakern.types import REGIMES, ErrorBudget, Layout, Operand

app = typer.Typer(
    name="lokakern.bench",
    help="Measure FP8 kernels, and ask which one dispatch would choose and why.\n\n"
    "Exit codes: 0 done, 1 error, 2 wrong usage, 3 time limit (run again to go on), "
    "4 slower than --fail-under, 5 swept, but rows are not ok.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
TIME_LIMIT_EXIT, SLOWER_EXIT, NOT_OK_EXIT = 3, 4, 5


class OutputFormat(StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class Regime(StrEnum):
    """Timing regimes."""

    GRAPH_COLD = REGIMES[0]
    GRAPH_HOT = REGIMES[1]
    EAGER = REGIMES[2]


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


DatabaseOption = Annotated[
    str | None,
    typer.Option("--db", help="Database: a path or an SQLAlchemy URL. Default: $LOKAKERN_DB, "
                 "else a file in the user's data folder."),
]  # fmt: skip
FormatOption = Annotated[OutputFormat, typer.Option("--format", help="How to print data.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Same as --format json.")]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option("--shape", help="m,n,k of a GEMM or m,k of a quantization; may be repeated."),
]
RegimeOption = Annotated[
    Regime | None,
    typer.Option(help="Default: graph-cold on a GPU, eager on a CPU."),
]
BudgetOption = Annotated[
    float, typer.Option(help="Largest accepted row error (0.06 admits E4M3 GEMMs).")
]
DistributionOption = Annotated[
    str | None,
    typer.Option(help="Judge errors on this distribution only. Default: all realistic ones."),
]


def _says_errors(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except LokakernError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except BrokenPipeError:  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return wrapped


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if len(sizes) not in (2, 3) or any(size < 1 for size in sizes):
        raise ShapeError(f"--shape is {text!r}; expected m,n,k (or m,k), integers of at least 1")
    return sizes


def _source(text: str) -> str | Path:
    """A database as asked for: a URL stays text, a path gets its home folder."""
    return text if "://" in text else Path(text).expanduser()


@contextmanager
def _reading(database: str | None) -> Iterator[None]:
    """Answer from the shipped files and this database while inside."""
    if database is None:
        yield
        return
    from lokakern import selection
    from lokakern.registry.snapshot import load_snapshot
    from lokakern.registry.store import shipped_databases

    selection.use_snapshot(load_snapshot([*shipped_databases(), _source(database)]))
    try:
        yield
    finally:
        selection.use_snapshot(None)


def _command_again(arguments: list[str]) -> str:
    """The command line that is kept with a run: without where this machine keeps its database."""
    words = ["python", "-m", "lokakern.bench"]
    skip = False
    for word in arguments:
        if not skip and word != "--db" and not word.startswith("--db="):
            words.append(Path(word).name if word.endswith(".toml") else word)
        skip = word == "--db"
    return " ".join(words)


@app.command()
@_says_errors
def sweep(
    suite: Annotated[
        str, typer.Option(help="Suite to measure: a name of `list suites`, or a .toml file.")
    ] = "smoke",
    shape: ShapeOption = None,
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
    from lokakern.bench import report
    from lokakern.bench import sweep as sweeping
    from lokakern.bench.suites import Case, shape_cases, suite_named
    from lokakern.bench.summary import summary_rows
    from lokakern.device import current_device
    from lokakern.prebuild import gpu_named
    from lokakern.prebuild import prebuild as build_ahead
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
    if shape or problem or from_misses:
        cases = list(shape_cases([_shape(text) for text in shape or ()], fp8_format(device)))
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
    target = _source(db) if db else user_database()
    if isinstance(target, Path):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"database folder {str(target.parent)!r} cannot be made: {error.strerror}; choose "
                "another with --db"
            ) from None
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
@_says_errors
def explain(
    op: Annotated[str, typer.Argument(help="gemm, scaled_gemm, quantize or dequantize.")] = "gemm",
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
    db: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which kernel dispatch chooses, from which rows, and why not each other one."""
    import json

    from lokakern.bench.suites import PREPARED_FORMS
    from lokakern.device import current_device
    from lokakern.registry.register import fp8_format
    from lokakern.selection import dispatch, snapshot

    sizes = _shape(shape)
    fields: dict[str, Any] = {"epilogue": "bias"} if bias else {}
    with _reading(db):
        if prepared is not None:
            known = {g.value: g for g in PREPARED_FORMS} if op == "gemm" else {}
            if prepared not in known:
                raise UnknownNameError(
                    f"--prepared is {prepared!r}; expected one of "
                    f"{', '.join(g.value for g in PREPARED_FORMS)}, with gemm"
                )
            target = snapshot().find_device(device) if device else current_device()
            fp8 = fp8_format(target)
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


@app.command()
@_says_errors
def compare(
    suite: Annotated[str, typer.Option(help="Suite whose gemms are compared.")] = "smoke",
    shape: ShapeOption = None,
    budget: BudgetOption = 0.06,
    baseline: Annotated[
        list[str] | None,
        typer.Option(help='Kernel to compare with, or "bf16"; repeatable. Default: bf16.'),
    ] = None,
    distribution: DistributionOption = None,
    regime: RegimeOption = None,
    db: DatabaseOption = None,
    fail_under: Annotated[
        float | None,
        typer.Option(help="Exit with 4 if dispatch is anywhere less than this times as fast."),
    ] = None,
    how: FormatOption = OutputFormat.TABLE,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Time dispatch's choices against baselines, interleaved, now."""
    import json

    from lokakern.bench import report
    from lokakern.bench.compare import UNQUANTIZED
    from lokakern.bench.compare import compare as compare_cases
    from lokakern.bench.suites import shape_cases, suite_named
    from lokakern.device import current_device
    from lokakern.registry.register import fp8_format

    device = current_device()
    cases = suite_named(suite).cases(device)
    if shape:
        shapes = [_shape(text) for text in shape]
        cases = list(shape_cases(shapes, fp8_format(device)))
    names = tuple(baseline or (UNQUANTIZED,))
    gemms = sum(case.problem.op == "gemm" for case in cases)
    with _reading(db), report.TerminalProgress(quiet=quiet) as progress:
        progress.begin("compare", gemms)
        found = compare_cases(
            cases, budget=ErrorBudget.of(budget), baselines=names,
            regime=regime.value if regime else None, distribution=distribution,
            step=progress.step,
        )  # fmt: skip
    if as_json or how is OutputFormat.JSON:
        print(json.dumps(found.as_json(), indent=2))
    else:
        rows = [
            {
                "problem": row.problem,
                "chosen": row.chosen,
                "dispatch us": row.latency_us.get("dispatch", float("nan")),
                **{f"{n} us": row.latency_us.get(n, float("nan")) for n in names},
                **{f"x {n}": row.speedup.get(n, float("nan")) for n in names},
            }
            for row in found.rows
        ]
        report.print_rows(rows, how.value, title=f"dispatch within {budget:g} on {device.product}")
    for name in names:
        if name in found.geometric_mean:
            print(
                f"geometric mean against {name}: {found.geometric_mean[name]:.3f}x, "
                f"least {found.least_speedup[name]:.3f}x",
                file=sys.stderr,
            )
    print(
        f"FP8 chosen for {found.fp8_share:.0%} of {len(found.rows)} problems; "
        f"{len(found.fp8_missed)} more where an admissible FP8 kernel was faster beyond noise",
        file=sys.stderr,
    )
    if fail_under is not None:
        slower = [n for n in names if found.least_speedup.get(n, 0.0) < fail_under]
        if slower:
            words = ", ".join(slower)
            print(f"less than {fail_under:g} times as fast as {words}", file=sys.stderr)
            raise typer.Exit(SLOWER_EXIT)


@app.command("list")
@_says_errors
def list_(
    what: Annotated[Listing, typer.Argument(help="What to list.")] = Listing.KERNELS,
    db: DatabaseOption = None,
    how: FormatOption = OutputFormat.TABLE,
    as_json: JsonOption = False,
) -> None:
    """List kernels (with what is measured of them), suites, distributions, or the device here."""
    from lokakern.bench import listing, report

    with _reading(db):
        rows = listing.rows_of(what.value, brief=how is OutputFormat.TABLE and not as_json)
    report.print_rows(rows, "json" if as_json else how.value)


def main() -> None:
    """Run the command line."""
    app(prog_name="python -m lokakern.bench")
