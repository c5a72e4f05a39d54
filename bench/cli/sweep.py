"""The command `sweep`: measures times and errors."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import ExitCode, OutputFormat, say, says_errors
from lokakern.errors import DatabaseError, DeviceError, MeasurementError, UnknownNameError

if TYPE_CHECKING:
    from lokakern.registry.snapshot.loading import SweepDatabase
    from lokakern.registry.storage.reader import Source
    from lokakern.sweep.engine import SweepReport
    from lokakern.sweep.ranks import SingleRank
    from lokakern.types import Device, Granularity, Problem
    from lokakern.workloads.suites import Case

MOST_SHOWN = 200  # problems; printing 10970 times at 2065 problems takes 20 s
DEFAULT_SUITE = "smoke"
PLACES = ("--db", "--out", "--tuned")  # options that name files of this machine


class Grade(StrEnum):
    """Grade of the rows of a run."""

    FULL = "full"
    QUICK = "quick"


class Errors(StrEnum):
    """Kernels whose errors a sweep measures."""

    ALL = "all"
    NEEDED = "needed"
    NONE = "none"


def _command_again(arguments: list[str]) -> str:
    """The command line to store with a run, without paths of this machine."""
    words = ["python", "-m", "lokakern.bench"]
    skip = False
    for word in arguments:
        if not skip and word.partition("=")[0] not in PLACES:
            words.append(Path(word).name if word.endswith(".toml") else word)
        skip = word in PLACES
    return " ".join(words)


@says_errors
def sweep(
    suite: Annotated[
        str | None,
        typer.Option(
            help="Suite: a name from `list suites`, or a .toml file. Default: smoke; with "
            "--only-stale, all problems timed on this device."
        ),
    ] = None,
    shape: options.Shapes = None,
    epilogue: options.Epilogue = None,
    problem: Annotated[
        list[str] | None,
        typer.Option(help="A problem as JSON, as printed for a miss; repeatable."),
    ] = None,
    db: options.Database = None,
    regime: options.Regime = None,
    grade: Annotated[
        Grade, typer.Option(help="quick rows count only where no full row exists.")
    ] = Grade.FULL,
    kernel: Annotated[
        list[str] | None, typer.Option(help="Only kernels whose name contains this; repeatable.")
    ] = None,
    where: options.Where = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which no new work begins (exit code 3).")
    ] = None,
    from_misses: Annotated[
        bool, typer.Option("--from-misses", help="Measure the problems that gemm missed.")
    ] = False,
    for_model: Annotated[
        bool,
        typer.Option(
            "--for-model",
            help="Only the quarter of the unmeasured problems whose measurement is most likely to "
            "change a predicted choice (see fit).",
        ),
    ] = False,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Then fit the model that predicts unmeasured sizes (see fit)."),
    ] = False,
    tuned: Annotated[
        list[Path] | None,
        typer.Option(
            help="Table of kernels that others tuned: CSV of AITER, JSON of vLLM or of kernels of "
            "Hugging Face. Problems of its sizes come first; nothing else of it counts. Repeatable."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Repeat measurements that the database contains.")
    ] = False,
    only_stale: Annotated[
        bool,
        typer.Option(
            "--only-stale",
            help="Only repeat measurements made before a kernel or the toolchain changed. A "
            "problem with one stale kernel is timed with all its kernels.",
        ),
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Include kernels that crashed or hung before.")
    ] = False,
    errors: Annotated[
        Errors, typer.Option(help="Measure errors of all kernels, of possible choices, or none.")
    ] = Errors.ALL,
    watchdog: Annotated[
        float | None,
        typer.Option(
            help="Seconds without progress after which a kernel counts as hung. Default: 60 on a "
            "GPU, 600 on a CPU."
        ),
    ] = None,
    prebuild: Annotated[
        bool,
        typer.Option(
            "--prebuild",
            help="Compile the kernels of the sweep, on all cores and without a GPU, and measure "
            "nothing.",
        ),
    ] = False,
    device_name: Annotated[
        str | None,
        typer.Option("--device", help='With --prebuild: a GPU type, such as "NVIDIA H200".'),
    ] = None,
    quiet: options.Quiet = False,
    how: options.How = OutputFormat.TABLE,
) -> None:
    """Measure times and errors and store them; resume where an earlier sweep stopped."""
    from lokakern.bench.cli.fit import write_model
    from lokakern.bench.report import library_smoke
    from lokakern.bench.report.summary import summary_rows
    from lokakern.build.prebuild import load_interpreted
    from lokakern.device import current_device
    from lokakern.registry.register import load_tried
    from lokakern.registry.snapshot.loading import SweepDatabase
    from lokakern.render import terminal
    from lokakern.selection import dispatcher
    from lokakern.selection.prediction.models import model_path
    from lokakern.sweep import engine as sweeping
    from lokakern.sweep.ranks import ranks_of_torchrun, take_gpu

    if epilogue is not None and not shape:
        raise typer.BadParameter("goes with --shape", param_hint="--epilogue")
    if device_name is not None and not prebuild:
        raise typer.BadParameter("goes with --prebuild: a sweep measures the device here",
                                 param_hint="--device")  # fmt: skip
    if time_limit is not None and not time_limit >= 0:
        raise typer.BadParameter(f"{time_limit} is negative or NaN", param_hint="--time-limit")
    if watchdog is not None and not watchdog > 0:
        raise typer.BadParameter(f"{watchdog} is not positive", param_hint="--watchdog")
    if only_stale and (fresh or prebuild):
        raise typer.BadParameter(f"goes without {'--fresh' if fresh else '--prebuild'}",
                                 param_hint="--only-stale")  # fmt: skip
    if for_model and (fresh or only_stale or prebuild):
        wrong = "--fresh" if fresh else "--only-stale" if only_stale else "--prebuild"
        raise typer.BadParameter(f"goes without {wrong}", param_hint="--for-model")
    if fit and prebuild:
        raise typer.BadParameter("goes without --prebuild", param_hint="--fit")
    fitted = options.file_of(str(_target(db)), "--fit") if fit else None
    take_gpu()
    device = _compiled_for(device_name) if prebuild else current_device()

    @functools.cache
    def read() -> SweepDatabase:
        return SweepDatabase(_target(db))

    with ranks_of_torchrun() as ranks:
        if ranks.world > 1 and prebuild:
            raise typer.BadParameter("goes without torchrun: one process compiles on all cores",
                                     param_hint="--prebuild")  # fmt: skip
        if prebuild:
            load_interpreted()
        else:
            ranks.once("trials", lambda: library_smoke.try_all(library_smoke.untried(device), say))
            load_tried()  # kernels that another rank tried
        if shape or problem or from_misses:
            cases = _asked_for(shape or [], epilogue, problem or [], from_misses, device)
            name = "misses" if from_misses else "shapes"
        elif only_stale and suite is None:
            cases, name = _cases_timed(read(), regime, device, ranks), "stale"
        else:
            cases, name = _cases_of_suite(suite or DEFAULT_SUITE, device)
        if cases or not only_stale:  # an empty database is not a usage error
            cases = _checked(cases, name, where, kernel or (), device)
        if tuned:
            cases = _tuned_first(cases, tuned, device)
        if for_model:
            cases = _most_doubtful(cases, read(), regime, device, ranks)
            if not cases and fitted is None:
                return
        if prebuild:
            _prebuild(cases, device, kernel or (), quiet, has_errors=errors != "none")
            return
        database = read()
        shown = terminal.TerminalProgress(quiet=quiet) if ranks.rank == 0 else None
        with shown or contextlib.nullcontext() as progress:
            did = sweeping.sweep(
                cases,
                database=database,
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
    if every is None:  # the first rank reports for all
        return
    if len(every) < ranks.world:
        database.collect_runs()
        say(f"{ranks.world - len(every)} of {ranks.world} ranks ended early; their finished "
            "measurements are in the database, other ranks made the rest")  # fmt: skip
    dispatcher.use_snapshot(None)
    done = sweeping.SweepReport.of_all(every)
    _tell(done, database.source, only_stale)
    if database.own is not None:
        shown_cases = [cases[place] for place in done.stale] if only_stale else cases
        if how is OutputFormat.TABLE and len(shown_cases) > MOST_SHOWN:
            say(f"{len(shown_cases)} problems are too many for a table: --format csv or json "
                "prints them, `compare` shows gains, `explain` reasons")  # fmt: skip
        else:
            rows = summary_rows(database.own, shown_cases, regime.value if regime else None)
            terminal.print_rows(rows, how, title=f"{name} on {device.product}")
    if fitted is not None:
        with options.reading(db):
            place = model_path(fitted, device)
            _, quality = write_model(place, device, quiet=quiet)
        say(f"{place}: {quality}")
    if done.out_of_time:
        say(f"the time limit of {time_limit:g} s ended the sweep; run it again")
        raise typer.Exit(ExitCode.TIME_LIMIT)
    if done.failures:
        raise typer.Exit(ExitCode.NOT_OK)


def _asked_for(
    shapes: Sequence[str],
    epilogue: str | None,
    problems: Sequence[str],
    from_misses: bool,
    device: Device,
) -> list[Case]:
    """Cases named on the command line or in the ledger of misses."""
    from lokakern.registry.register import fp8_format
    from lokakern.selection import misses, remedies
    from lokakern.workloads.suites import Case

    cases = options.cases_of(shapes, epilogue, fp8_format(device))
    asked = [misses.parse(text) for text in problems]
    asked += [missed for missed, _ in misses.read()] if from_misses else []
    refused = []
    for found in asked:
        reason = remedies.why_not_measurable(found)
        if reason is None:
            cases.append(Case(found, "X1"))
        else:
            refused.append(f"{found} cannot be measured: {reason}")
    if refused and not cases:
        raise MeasurementError("; ".join(refused))
    for words in refused:
        say(f"left out: {words}")
    return list(dict.fromkeys(cases))


def _tuned_first(cases: Sequence[Case], tables: Sequence[Path], device: Device) -> list[Case]:
    from lokakern.bench.exchange.tuned_tables import rank_of, read_tuned

    products = [product for path in tables for product in read_tuned(path.expanduser())]
    ranks = rank_of(cases, products, device)
    here, elsewhere = (sum(rank in some for rank in ranks) for some in ((0, 1), (2,)))
    say(f"{here} of {len(cases)} problems have sizes that others tuned for on {device}, and "
        f"{elsewhere} for other GPUs: they come first")  # fmt: skip
    return [case for _, case in sorted(zip(ranks, cases, strict=True), key=lambda pair: pair[0])]


def _most_doubtful(
    cases: Sequence[Case],
    database: SweepDatabase,
    regime: options.TimingRegime | None,
    device: Device,
    ranks: SingleRank,
) -> list[Case]:
    """The cases that would change the most predicted choices; one rank finds them for all."""
    from lokakern.bench.prediction.doubt import doubtful

    def look() -> list[int]:
        database.collect_runs()
        how = regime.value if regime else None
        found = doubtful(cases, device, how, database.dispatched)
        say(str(found))
        return [*found.places]

    return [cases[place] for place in ranks.plan("for-model", look)]


def _cases_timed(
    database: SweepDatabase, regime: options.TimingRegime | None, device: Device, ranks: SingleRank
) -> list[Case]:
    """All problems with times on the device, in the database or a shipped one.

    One rank reads them for all ranks, which may have different copies.
    """
    from lokakern.registry.schema.row_keys import from_row, row_of
    from lokakern.selection import dispatcher
    from lokakern.sweep.stale_jobs import cases_timed
    from lokakern.types import Problem
    from lokakern.workloads.suites import Case

    def look() -> list[Any]:
        database.collect_runs()
        how = regime.value if regime else dispatcher.default_regime(device)
        found = cases_timed(database.dispatched, device, how)
        return [(row_of(case.problem), case.distribution) for case in found]

    plain = ranks.plan("cases", look)
    return [Case(from_row(Problem, row), distribution) for row, distribution in plain]


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
    """Cases that meet the condition, after a check that a kernel accepts one of them."""
    from lokakern.registry.register import KERNELS
    from lokakern.render.did_you_mean import did_you_mean
    from lokakern.sweep.plan import candidates
    from lokakern.workloads.filters import parse_condition

    if where:
        condition = parse_condition(where)
        cases = [case for case in cases if condition.holds(case.problem)]
        if not cases:
            raise UnknownNameError(f"no problem of {name} meets {where!r}")
    if kernels and not any(candidates(case.problem, device, kernels) for case in cases):
        why = _why_none(cases, device, kernels) or did_you_mean(kernels[0], KERNELS)
        raise UnknownNameError(
            f"--kernel is {', '.join(kernels)}; no kernel that accepts these problems has such a "
            f"name; {why}`list kernels` shows all"
        )
    return cases


def _why_none(cases: Sequence[Case], device: Device, words: Sequence[str]) -> str:
    """Why the named plugin, or a kernel with one of the words, accepts none of the cases, or ""."""
    from lokakern.device import current_device
    from lokakern.registry import libraries
    from lokakern.registry.register import KERNELS
    from lokakern.types import Rejected

    for word in words:
        plugin = libraries.plugin_meant(word)
        if plugin is None or any(kernel.library == plugin.name for kernel in KERNELS.values()):
            continue
        why = libraries.why_not_tried(plugin, current_device())
        if why is not None:
            if device != current_device():  # no interpreter compiles
                why = why.replace(f": {libraries.INTERPRET}", f": try it on {device}")
            return f"plugin {why}; "
    for name, kernel in sorted(KERNELS.items()):
        if any(word in name for word in words):
            if not kernel.runs_on(device):
                return f"{name} does not run on {device} ({device.architecture}); "
            asked = [case.problem for case in cases if case.problem.op == kernel.op]
            asked.sort(key=lambda problem: _scales_of(problem) is not kernel.granularity)
            for problem in asked:
                answer = kernel.supports(problem, device)
                if isinstance(answer, Rejected):
                    return f"{name}: {answer.reason} ({problem}); "
    return ""


def _scales_of(problem: Problem) -> Granularity:
    """Those that the granularity of a kernel declares: of a, or of what a quantizer writes."""
    return problem.out_granularity if problem.b is None else problem.a.granularity


def _compiled_for(name: str | None) -> Device:
    """A GPU type that was measured, or one of data sheets: compiling needs no measurements."""
    from lokakern.build.prebuild import gpu_named
    from lokakern.selection import dispatcher
    from lokakern.types import Device
    from lokakern.what_if.devices import DEVICES, device_named

    # Nothing predicts times of a MI300X; it has 304 CUs and 192 GiB.
    absent = (*DEVICES, Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192))
    try:
        return gpu_named(name)
    except DeviceError:
        if name is None:
            raise
        found = device_named(name, absent)
        if found is None:
            measured = {d.product for d in dispatcher.snapshot().devices if d.is_gpu}
            products = sorted(measured | {d.product for d in absent})
            raise DeviceError(
                f"device {name!r} is unknown; kernels compile for {', '.join(map(repr, products))}"
            ) from None
        return found


def _prebuild(
    cases: Sequence[Case],
    device: Device,
    kernels: Sequence[str],
    quiet: bool,
    *,
    has_errors: bool,
) -> None:
    from lokakern import nvrtc
    from lokakern.build.prebuild import prebuild
    from lokakern.errors import CompilationError
    from lokakern.measure.accuracy import launched_for_errors
    from lokakern.registry.register import kernels_for
    from lokakern.render import terminal

    taken = (k for op in {case.problem.op for case in cases} for k in kernels_for(op, device))
    needs_nvrtc = any(
        k.language == "cuda" and (not kernels or any(word in k.name for word in kernels))
        for k in taken
    )
    if needs_nvrtc:
        try:
            nvrtc.version()
        except CompilationError as error:  # of every kernel; Triton's need no NVRTC
            raise CompilationError(f"{error}; or choose others, as by --kernel triton") from None

    with terminal.TerminalProgress(quiet=quiet) as progress:
        problems = [case.problem for case in cases]
        if has_errors:
            problems += [launched_for_errors(problem, device) for problem in problems]
        built = prebuild(problems, device, tuple(kernels), progress=progress, plugins=True)
    say(f"{built.compiled} kernels compiled for {device.product} and {built.already_there} "
        f"there already, in {built.seconds:.0f} s")  # fmt: skip
    for job, resources in sorted(built.resources.items()):
        say(f"{job}: {resources}")
    for broken in built.failures:
        say(f"not compiled: {broken.job}: {broken.reason}")
    if built.failures:
        raise typer.Exit(ExitCode.NOT_OK)


def _plugins_left_out() -> list[str]:
    """Why plugins, or kernels of them, are not used here, with their names."""
    from lokakern.device import current_device
    from lokakern.registry import libraries
    from lokakern.registry.register import KERNELS, load_kernels

    found = [f"{module}: {why}" for module, why in load_kernels().items()
             if module.startswith("plugin ")]  # fmt: skip
    for name, kernel in sorted(KERNELS.items()):
        if kernel.library in libraries.plugins() and not kernel.parts:
            why = libraries.why_not(kernel.library, current_device(), name)
            found += [] if why is None else [f"{name}: {why}"]
    return found


def _target(db: str | None) -> Path | str:
    from lokakern.registry.sharing.import_file import checked_file
    from lokakern.registry.storage.paths import user_database

    target = options.source_of(db) if db else user_database()
    if isinstance(target, Path):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"database folder {str(target.parent)!r} cannot be created: {error.strerror}; "
                "choose another with --db"
            ) from None
        if db is not None and target.exists():  # it may come from another user
            with checked_file(target):
                pass
    return target


def _tell(done: SweepReport, target: Source, only_stale: bool) -> None:
    if only_stale and not (done.timed or done.measured or done.out_of_time):
        say("nothing is stale")
        for why in _plugins_left_out():
            say(f"left out: {why}")
    others = "fresh or never measured" if only_stale else "there already"
    say(f"{done.timed} times of {done.problems} problems and {done.measured} errors in "
        f"{done.seconds:.0f} s, {done.skipped} were {others}; database {target}")  # fmt: skip
    if done.unsteady:
        say(f"{done.unsteady} of these times are unsteady (they vary by more than 25 %): measure "
            "again with --fresh when nothing else runs here")  # fmt: skip
    for words in done.given_up:
        say(f"given up: {words}; --retry launches it again")
    for failure in done.failures[:20]:
        say(f"not ok: {failure}")
    if len(done.failures) > 20:
        say(f"not ok: and {len(done.failures) - 20} more")
