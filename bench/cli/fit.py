"""The command `fit`: a model that predicts times at sizes without measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import OutputFormat, reading, say, says_errors, writing

if TYPE_CHECKING:
    from lokakern.bench.prediction.fit import Quality
    from lokakern.selection.prediction.laws import Law
    from lokakern.selection.prediction.model_file import KernelModel
    from lokakern.types import Device


@says_errors
def fit(
    out: Annotated[
        Path | None,
        typer.Option(
            help="File of the model. Default: where dispatch reads it, in the folder models beside "
            "the database."
        ),
    ] = None,
    device: options.Device = None,
    db: options.Database = None,
    how: options.How = OutputFormat.TABLE,
    quiet: options.Quiet = False,
) -> None:
    r"""Fit a model to the times of a device, by which dispatch predicts sizes without any.

    Prints for each kernel how much predictions differ from times at sizes (n, k) that a fit did not
    see, and how good the choices by these predictions are. A model belongs to the rows that it was
    fitted from: fit again after a sweep. With a shipped file as --db it is of that file alone.
    Needs scikit-learn: pip install 'lokakern\[fit]'.
    """
    from lokakern.registry.storage import paths
    from lokakern.render.terminal import print_rows
    from lokakern.selection import dispatcher
    from lokakern.selection.prediction.model_file import parse
    from lokakern.selection.prediction.models import model_path

    database = paths.user_database() if db is None else options.file_of(db, "fit").resolve()
    with _alone(database) if database in paths.shipped_databases() else reading(db):
        target = dispatcher.device_named(device)
        place = out or model_path(database, target)
        content, quality = write_model(place, target, quiet=quiet)
    model = parse(content, str(place)).content
    fitted: dict[str, Sequence[KernelModel | Law]] = {"gemm": model.kernels}
    fitted |= {op: its.kernels for op, its in model.laws.items()}
    rows: list[dict[str, Any]] = [
        {
            "op": op, "kernel": one.name, "times": one.rows, "median error": one.median_error,
            "90 % error": one.p90_error,
        }
        for op, kernels in fitted.items() for one in kernels
    ]  # fmt: skip
    if how is OutputFormat.JSON:
        rows = [{"file": str(place), "bytes": len(content), **asdict(quality), "kernels": rows}]
    print_rows(rows, how)
    if how is OutputFormat.TABLE:
        say(f"{place}: {len(content)} bytes. Of gemm: {quality}")


@contextmanager
def _alone(database: Path) -> Iterator[None]:
    """Let dispatch read one shipped file while inside: its model holds beside any other file."""
    from lokakern.registry.snapshot.loading import load_snapshot
    from lokakern.selection import dispatcher

    dispatcher.use_snapshot(load_snapshot([database]))
    try:
        yield
    finally:
        dispatcher.use_snapshot(None)


def write_model(place: Path, device: Device, *, quiet: bool) -> tuple[bytes, Quality]:
    """Fit a model to what dispatch reads, and write it.

    Returns:
        The content of the file, and how well the model predicts.
    """
    from lokakern.bench.prediction.fit import fit as fit_model
    from lokakern.render.terminal import TerminalProgress
    from lokakern.selection import dispatcher

    regime = dispatcher.default_regime(device)
    with TerminalProgress(quiet=quiet) as progress:
        content, quality = fit_model(dispatcher.snapshot(), device, regime, progress)
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(f"{place.name}.{uuid4().hex}.part")
        part.write_bytes(content)
        part.replace(place)
    dispatcher.use_snapshot(None)
    return content, quality
