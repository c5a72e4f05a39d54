"""The command line: sweep, explain, model, tune, compare, report, export, verify and others.

Commands write data to stdout, and progress and errors to stderr. Exit codes:

0: done. 1: an error, reported in one line. 2: wrong usage. 3: the time limit ended a sweep, which
the same command resumes. 4: a compared choice was slower than ``--fail-under`` allows, or with
``--held-out`` slower beyond noise. 5: the sweep is done, but some kernels failed. 6: ``diff`` found
something slower or less accurate, or ``verify`` rejected a file.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.chain import chain
from lokakern.bench.cli.compare import compare
from lokakern.bench.cli.examples import examples_of
from lokakern.bench.cli.exchange import diff, export, import_, merge
from lokakern.bench.cli.explain import explain
from lokakern.bench.cli.explore import explore
from lokakern.bench.cli.fit import fit
from lokakern.bench.cli.host import host
from lokakern.bench.cli.model import model
from lokakern.bench.cli.options import OutputFormat, reading, say, says_errors
from lokakern.bench.cli.report import report
from lokakern.bench.cli.sweep import sweep
from lokakern.bench.cli.tune import tune
from lokakern.bench.cli.verify import verify
from lokakern.device import current_device

app = typer.Typer(
    name="lokakern.bench",
    help="Measure FP8 kernels, and show which one dispatch chooses and why.\n\n"
    "Exit codes: 0 done, 1 error, 2 wrong usage, 3 time limit (run again to resume), 4 slower than "
    "--fail-under allows (or beyond noise with --held-out), 5 swept, but some kernels failed, "
    "6 slower or less accurate (diff), or a file was rejected (verify).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Listing(StrEnum):
    """Subjects of `list`."""

    KERNELS = "kernels"
    SUITES = "suites"
    DISTRIBUTIONS = "distributions"
    DEVICE = "device"
    COVERAGE = "coverage"
    LIBRARIES = "libraries"


@says_errors
def list_(
    what: Annotated[Listing, typer.Argument(help="Subject.")] = Listing.KERNELS,
    resources: Annotated[
        bool,
        typer.Option(
            "--resources",
            help="With kernels: registers, local memory and matrix instructions of HIP and Triton "
            "kernels on AMD GPUs, as recorded when they were compiled.",
        ),
    ] = False,
    device: options.Device = None,
    db: options.Database = None,
    how: options.How = OutputFormat.TABLE,
) -> None:
    """List kernels with their measurements, libraries, suites, distributions, or the device.

    Coverage shows for each op and suite the number of problems with a time of every kernel, and the
    number of rows that are fresh, usable (the toolchain differs) or stale (the kernel changed).
    Libraries that fail or were never tried are tried first. --device goes with device and coverage.
    """
    from lokakern.bench.report import library_smoke, listing
    from lokakern.bench.report.resources import NOTE, resource_rows
    from lokakern.render.terminal import print_rows

    brief = how is OutputFormat.TABLE
    if resources and what is not Listing.KERNELS:
        raise typer.BadParameter(f"goes with kernels, not {what.value}", param_hint="--resources")
    if device is not None and what not in (Listing.DEVICE, Listing.COVERAGE):
        raise typer.BadParameter(
            f"goes with device and coverage, not {what.value}", param_hint="--device"
        )
    if what is Listing.LIBRARIES:
        library_smoke.try_all(library_smoke.doubtful(current_device()), say)
    with reading(db):
        rows = (
            resource_rows(brief=brief)
            if resources
            else listing.rows_of(what.value, brief=brief, device=device)
        )
    print_rows(rows, how, note=NOTE if resources else "", spare=("why",))


for name, command in {
    "sweep": sweep, "fit": fit, "host": host, "explain": explain, "chain": chain, "model": model,
    "tune": tune,
    "compare": compare, "report": report, "export": export, "import": import_, "verify": verify,
    "merge": merge, "diff": diff, "explore": explore, "list": list_,
}.items():  # fmt: skip
    app.command(name, epilog=examples_of(name))(command)


def main() -> None:
    """Run the command line."""
    app(prog_name="python -m lokakern.bench")
