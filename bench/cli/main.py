"""The command line: sweep, explain, model, tune, compare, report, export, verify and others.

Commands write data to stdout, and progress and errors to stderr. Exit codes: `options.ExitCode`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.chain import chain
from lokakern.bench.cli.compare import compare
from lokakern.bench.cli.contribute import contribute
from lokakern.bench.cli.describe import describe
from lokakern.bench.cli.examples import examples_of
from lokakern.bench.cli.exchange import diff, export, import_, merge
from lokakern.bench.cli.explain import explain
from lokakern.bench.cli.explore import explore
from lokakern.bench.cli.fit import fit
from lokakern.bench.cli.host import host
from lokakern.bench.cli.model import model
from lokakern.bench.cli.new_kernel import new_kernel
from lokakern.bench.cli.options import EXIT_CODES, ExitCode, OutputFormat, reading, say, says_errors
from lokakern.bench.cli.report import report
from lokakern.bench.cli.sweep import sweep
from lokakern.bench.cli.tune import tune
from lokakern.bench.cli.verify import verify
from lokakern.version import __version__

app = typer.Typer(
    name="lokakern.bench",
    help=f"Measure FP8 kernels, and show which one dispatch chooses and why.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"lokakern {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


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
    name: Annotated[
        str | None,
        typer.Argument(
            help="With kernels: only those whose name contains this; of the one of that name, "
            "everything that it declares."
        ),
    ] = None,
    resources: Annotated[
        bool,
        typer.Option(
            "--resources",
            help="With kernels: registers, local memory and matrix instructions of HIP and Triton "
            "kernels on AMD GPUs, as recorded when they were compiled.",
        ),
    ] = False,
    device: options.Device = None,
    only: Annotated[
        str | None, typer.Option(help="With libraries: try and show only this library or plugin.")
    ] = None,
    db: options.Database = None,
    no_shipped: options.NoShipped = False,
    how: options.How = OutputFormat.TABLE,
) -> None:
    """List kernels with their measurements, libraries, suites, distributions, or the device.

    Coverage shows for each op and suite the number of problems with a time of every kernel, and the
    number of rows that are fresh, usable (the toolchain differs) or stale (the kernel changed), of
    the shipped files and the database together; `describe` shows one database alone.
    Libraries that fail or were never tried are tried first; the exit code is 5 if a plugin or a
    kernel of one fails. --device goes with device and coverage.
    """
    from lokakern.bench.report import library_smoke, listing
    from lokakern.bench.report.resources import NOTE, resource_rows
    from lokakern.device import current_device
    from lokakern.registry.libraries import plugins
    from lokakern.registry.register import KERNELS
    from lokakern.render.terminal import print_rows

    brief = how is OutputFormat.TABLE
    if resources and what is not Listing.KERNELS:
        raise typer.BadParameter(f"goes with kernels, not {what.value}", param_hint="--resources")
    if name is not None and what is not Listing.KERNELS:
        raise typer.BadParameter(f"goes with kernels, not {what.value}", param_hint="NAME")
    if device is not None and what not in (Listing.DEVICE, Listing.COVERAGE):
        raise typer.BadParameter(
            f"goes with device and coverage, not {what.value}", param_hint="--device"
        )
    if only is not None and what is not Listing.LIBRARIES:
        raise typer.BadParameter(f"goes with libraries, not {what.value}", param_hint="--only")
    if what is Listing.LIBRARIES:
        library_smoke.try_all(library_smoke.doubtful(current_device(), only), say)
    with reading(db, no_shipped=no_shipped):
        rows = (
            resource_rows(brief=brief)
            if resources
            else listing.rows_of(what.value, brief=brief, device=device)
        )
        if name is not None:
            rows = listing.kernels_named(name, rows)
            if not resources and name in KERNELS:
                rows = listing.facts_of(KERNELS[name])
    if only is not None:
        rows = [row for row in rows if row["library"] == only]
    print_rows(rows, how, note=NOTE if resources else "", spare=("why",))
    if what is Listing.LIBRARIES and any(
        row["library"] in plugins() and row["state"] in library_smoke.FAULTY for row in rows
    ):
        raise typer.Exit(ExitCode.NOT_OK)


def _help_of(command: Callable[..., None]) -> str:
    """The docstring with a line for each paragraph: help breaks lines by the terminal's width."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


for name, command in {
    "sweep": sweep, "fit": fit, "host": host, "explain": explain, "chain": chain, "model": model,
    "tune": tune,
    "compare": compare, "report": report, "export": export, "import": import_, "verify": verify,
    "contribute": contribute, "merge": merge, "diff": diff, "describe": describe,
    "explore": explore, "list": list_, "new-kernel": new_kernel,
}.items():  # fmt: skip
    settings = {"allow_extra_args": name == "verify"}  # which tells what to do with a file
    app.command(name, help=_help_of(command), epilog=examples_of(name), context_settings=settings)(
        command
    )


def main(name: str = "python -m lokakern.bench") -> None:
    """Run the command line, which help calls by this name."""
    app(prog_name=name)
