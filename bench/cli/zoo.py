"""The table of `model zoo`: public models, converted, against themselves in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lokakern.bench.cli.options import ExitCode, OutputFormat, say
from lokakern.errors import DeviceLostError

if TYPE_CHECKING:
    import torch

    from lokakern.bench.models.zoo.cell import Row


def numbers(text: str) -> tuple[int, ...]:
    """Batch sizes from ``--batches``.

    Raises:
        typer.BadParameter: They are not positive integers.
    """
    found = words(text)
    if not all(word.isascii() and word.isdigit() and int(word) for word in found) or not found:
        raise typer.BadParameter(
            f"{text!r} is no list of batch sizes, such as 512,8192", param_hint="--batches"
        )
    return tuple(map(int, found))


def words(text: str) -> tuple[str, ...]:
    """Words between commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def print_zoo(
    models: Sequence[str],
    batches: Sequence[int],
    modes: Sequence[str],
    device: torch.device,
    budget: float,
    *,
    training: bool | None,
    autocast: bool,
    out: Path | None,
    time_limit_s: float | None,
    jobs: int,
    database: str | None,
    tune_s: float | None,
    how: OutputFormat,
    quiet: bool,
) -> None:
    """Measure models of the zoo and print the table; for arguments see the command `model`.

    Raises:
        typer.BadParameter: A mode is unknown.
        typer.Exit: The time limit ended the run (3), or a cell failed (5).
        DeviceLostError: The GPU cannot be used any more; raised after the table of what was
            measured.
    """
    from lokakern.bench.models.zoo.cell import MODES
    from lokakern.bench.models.zoo.table import FILE, cells_of, run, table_of
    from lokakern.device import current_device
    from lokakern.render import terminal

    if not modes or not set(modes) <= set(MODES):
        raise typer.BadParameter(
            f"{','.join(modes)!r}: expected some of {', '.join(MODES)}", param_hint="--modes"
        )
    cells = cells_of(models, batches, training, autocast)
    rows: list[Row] = []
    lost: DeviceLostError | None = None
    try:
        for row in run(
            cells, modes, device, budget, path=None if out is None else out / FILE,
            time_limit_s=time_limit_s, jobs=jobs,
            database=database, tune_s=tune_s, say=(lambda _text: None) if quiet else say,
        ):  # fmt: skip
            rows.append(row)
    except DeviceLostError as error:
        lost = error
    table = table_of(rows, modes)
    if how is OutputFormat.JSON:
        facts = {"budget": budget, "device": current_device().product, "table": table,
                 "rows": [asdict(row) for row in rows]}  # fmt: skip
        print(json.dumps(facts, indent=2))
    else:
        if how is OutputFormat.TABLE:  # three digits, also above 1
            table = [
                {key: f"{value:.3f}" if isinstance(value, float) else value
                 for key, value in line.items()}
                for line in table
            ]  # fmt: skip
        timers = ", ".join(dict.fromkeys(row.timer for row in rows if row.timer))
        terminal.print_rows(
            table, how, note=f"time: {timers or 'nothing was timed'}",
            title=f"bf16's step time over the converted model's, on {current_device().product}",
        )  # fmt: skip
    if lost is not None:
        raise lost
    missing = len(cells) * len(modes) - len(rows)
    if missing:
        say(f"the time limit left {missing} of {len(cells) * len(modes)} ratios; " + (
            "run the same command again to measure them" if out else "--out keeps those measured"
        ))  # fmt: skip
        raise typer.Exit(ExitCode.TIME_LIMIT)
    if any(row.error for row in rows):
        raise typer.Exit(ExitCode.NOT_OK)
