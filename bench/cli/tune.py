"""The command `tune`: keeps the products of a model that make its own step faster."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import OutputFormat, reading, say, says_errors
from lokakern.errors import UnsupportedError
from lokakern.progress import Progress

EXPECTED = (
    "a function without arguments that returns the handle of lokakern.convert and a step: a "
    "function without arguments that runs one step of the model"
)


@says_errors
def tune(
    factory: Annotated[
        str,
        typer.Argument(
            help="package.module:factory, a function that returns the handle of lokakern.convert, "
            "and a function that runs one step."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File for the outcome, for convert(..., tuned=FILE).")
    ] = None,
    graph: Annotated[
        bool, typer.Option("--graph/--calls", help="Time CUDA graphs of the step, or its calls.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=8, help="Most rounds of a comparison, of four times each.")
    ] = 64,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after which nothing further is tried. Default: 150 in inference, 300 in "
            "training, after which comparisons are finished.",
        ),
    ] = None,
    db: options.Database = None,
    how: options.How = OutputFormat.TABLE,
    quiet: options.Quiet = False,
) -> None:
    """Time a step of your model with FP8 products on and off, and keep those that gain.

    The factory converts the model, and may compile it. See `Conversion.tune`.
    """
    from lokakern.bench.fp8_gain.products import factory_named

    with reading(db), Progress() if quiet else contextlib.nullcontext():
        handle, step = _made(factory, factory_named(factory, "tune", EXPECTED))
        found = handle.tune(step, graph=graph, rounds=rounds, time_limit=time_limit)
    if how is OutputFormat.JSON:
        print(json.dumps({"summary": found.summary, "groups": found.rows}, indent=2))
    else:
        found.table(how)
    if out is not None:
        found.save(out)
        if not quiet:
            say(f"wrote {out}; apply it by lokakern.convert(..., tuned={str(out)!r})")


def _made(spec: str, factory: Any) -> tuple[Any, Any]:
    """What a factory returns."""
    from lokakern.conversion.convert import Conversion

    made = factory()
    is_pair = isinstance(made, tuple) and len(made) == 2
    if not (is_pair and isinstance(made[0], Conversion) and callable(made[1])):
        found = ", ".join(type(x).__name__ for x in made) if is_pair else type(made).__name__
        raise UnsupportedError(f"tune: {spec} returned {found}; expected {EXPECTED}")
    return made[0], made[1]
