"""The command line: sweep, explain, model, compare, report, export, verify and others.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 done; 1 an error, said in one
line; 2 wrong usage; 3 the time limit ended a sweep (run it again to go on); 4 a compared choice was
slower than allowed by ``--fail-under``, or with ``--held-out`` beyond noise; 5 a sweep is done, but
rows of it are not ok; 6 a diff found something slower or wronger, or verify rejected a file.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from lokakern.bench.cli.chain import chain
from lokakern.bench.cli.compare import compare
from lokakern.bench.cli.examples import examples_of
from lokakern.bench.cli.exchange import diff, export, import_, merge
from lokakern.bench.cli.explain import explain
from lokakern.bench.cli.explore import explore
from lokakern.bench.cli.model import model
from lokakern.bench.cli.options import (
    DatabaseOption,
    FormatOption,
    JsonOption,
    OutputFormat,
    reading,
    say,
    says_errors,
)
from lokakern.bench.cli.report import report
from lokakern.bench.cli.sweep import sweep
from lokakern.bench.cli.verify import verify

app = typer.Typer(
    name="lokakern.bench",
    help="Measure FP8 kernels, and ask which one dispatch would choose and why.\n\n"
    "Exit codes: 0 done, 1 error, 2 wrong usage, 3 time limit (run again to go on), "
    "4 slower than --fail-under (or --held-out beyond noise), 5 swept, but rows are not ok, "
    "6 slower or wronger than before (diff) or than said (verify).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Listing(StrEnum):
    """What can be listed."""

    KERNELS = "kernels"
    SUITES = "suites"
    DISTRIBUTIONS = "distributions"
    DEVICE = "device"
    COVERAGE = "coverage"
    LIBRARIES = "libraries"


@says_errors
def list_(
    what: Annotated[Listing, typer.Argument(help="What to list.")] = Listing.KERNELS,
    resources: Annotated[
        bool,
        typer.Option(
            "--resources",
            help="Of kernels: the registers, local memory and matrix instructions that HIP and "
            "Triton ones take on AMD's GPUs, as recorded when they were compiled.",
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="Of device and coverage: one that is in a database, such as "
            '"NVIDIA H200". Default: here.'
        ),
    ] = None,
    db: DatabaseOption = None,
    how: FormatOption = OutputFormat.TABLE,
    as_json: JsonOption = False,
) -> None:
    """List kernels with what is measured of them, libraries, suites, distributions, or the device.

    Of a device, coverage is what the database holds: of each op's problems and of each suite's
    those of which every kernel has a time, and rows that are fresh, usable (the toolchain differs)
    or stale (the kernel changed).

    Libraries that are installed and do not work, or were never tried, are tried first.
    """
    from lokakern.bench.report import library_smoke, listing
    from lokakern.bench.report.resources import NOTE, resource_rows
    from lokakern.device import current_device
    from lokakern.render.terminal import print_rows

    brief = how is OutputFormat.TABLE and not as_json
    if resources and what is not Listing.KERNELS:
        raise typer.BadParameter(f"goes with kernels, not {what.value}", param_hint="--resources")
    if device is not None and what not in (Listing.DEVICE, Listing.COVERAGE):
        raise typer.BadParameter(f"goes with device and coverage, not {what.value}",
                                 param_hint="--device")  # fmt: skip
    if what is Listing.LIBRARIES:
        library_smoke.try_all(library_smoke.doubtful(current_device()), say)
    with reading(db):
        rows = (
            resource_rows(brief=brief)
            if resources
            else listing.rows_of(what.value, brief=brief, device=device)
        )
    print_rows(rows, "json" if as_json else how.value, note=NOTE if resources else "",
               spare=("why",))  # fmt: skip


for name, command in {
    "sweep": sweep, "explain": explain, "chain": chain, "model": model, "compare": compare,
    "report": report, "export": export, "import": import_, "verify": verify, "merge": merge,
    "diff": diff, "explore": explore, "list": list_,
}.items():  # fmt: skip
    app.command(name, epilog=examples_of(name))(command)


def main() -> None:
    """Run the command line."""
    app(prog_name="python -m lokakern.bench")
