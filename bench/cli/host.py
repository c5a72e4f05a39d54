"""The command `host`: measures how long the host takes for calls of layers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import OutputFormat, say, says_errors


class HostRegime(StrEnum):
    """Regimes in which the host makes each call: `records.HOST_REGIMES`."""

    EAGER = "eager"
    COMPILED = "compiled"


@says_errors
def host(
    regime: Annotated[
        list[HostRegime] | None,
        typer.Option(help="eager or compiled (by torch.compile); repeatable. Default: both."),
    ] = None,
    call: Annotated[
        list[str] | None,
        typer.Option(
            help="kind of call, such as training or 'training step'; repeatable. Default: all."
        ),
    ] = None,
    db: options.Database = None,
    how: options.How = OutputFormat.TABLE,
    quiet: options.Quiet = False,
) -> None:
    """Measure how long the host takes for a call of a linear layer and a step, and store it.

    In the regimes eager and compiled, dispatch and convert compare the longer of the times of GPU
    and host. Host costs hold for a class of machines: one CPU, and one minor version of torch.
    Without them these regimes count the GPU alone. It takes less than a minute.
    """
    from lokakern.bench.compare.host_cost import CALLS, measure_host_costs, table_of
    from lokakern.device import current_device, current_environment
    from lokakern.registry.storage import paths
    from lokakern.registry.storage.run_files import RunFile
    from lokakern.render.terminal import TerminalProgress, print_rows
    from lokakern.selection.host_cost import machine_class
    from lokakern.sweep.plan import harness_digest

    regimes = [x.value for x in regime or HostRegime]
    with TerminalProgress(quiet=quiet) as progress:
        costs, notes = measure_host_costs(regimes, call or CALLS, progress)
    target = options.source_of(db) if db is not None else paths.user_database()
    words = [f"--regime {x.value}" for x in regime or ()] + [f"--call '{x}'" for x in call or ()]
    command = " ".join(["python -m lokakern.bench host", *words])
    device, environment = current_device(), current_environment()
    with RunFile.create(
        target, suite="host", command=command, harness_digest=harness_digest()
    ) as run:
        for cost in costs:
            run.add_host_cost(device, environment, cost)
    print_rows(table_of(costs), how, title=f"host costs of {machine_class()}")
    for note in notes:
        say(note)
    if not quiet:
        say(f"{len(costs)} host costs were added to {target}")
