"""The command `explain`: what dispatch chooses for one product, and what that gains for many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lokakern.bench.cli.options import (
    BudgetOption,
    DatabaseOption,
    DistributionOption,
    FormatOption,
    JsonOption,
    OutputFormat,
    Regime,
    RegimeOption,
    reading,
    say,
    says_errors,
    shape_of,
)
from lokakern.errors import DatabaseError, UnknownNameError
from lokakern.types import ErrorBudget, Layout, Operand

if TYPE_CHECKING:
    from lokakern.bench.fp8_gain.gain import Row, Worth
    from lokakern.bench.fp8_gain.products import Product
    from lokakern.selection.choice import Choice

MOST_ROWS = 50  # of a table; more is for programs


@says_errors
def explain(
    op: Annotated[
        str, typer.Argument(help="gemm, gemm_norm, scaled_gemm, quantize, norm_quantize, ...")
    ] = "gemm",
    shape: Annotated[str | None, typer.Option(help="m,n,k or m,k. Default: 32768,512,512.")] = None,
    shapes: Annotated[
        Path | None,
        typer.Option(
            help="Many products: a suite as of sweep --suite (.toml), or m,n,k[,count] in "
            "rows (.csv, .json)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The linear layers of a model: package.module:factory, a function that "
            "returns it with an example of its inputs."
        ),
    ] = None,
    probe: Annotated[
        Path | None, typer.Option(help="The layers that a Probe saw: what `Probe.save` wrote.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="With --model, of each layer: for a factory without an example."),
    ] = None,
    training: Annotated[
        bool,
        typer.Option(
            "--training",
            help="Of many products: their gradients, too, and weights that "
            "are quantized anew. Default: predictions, with weights quantized once.",
        ),
    ] = False,
    missing: Annotated[
        Path | None,
        typer.Option(
            help="Of many products: write those that were never measured into a file, "
            "for sweep --suite."
        ),
    ] = None,
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
    how: FormatOption = OutputFormat.TABLE,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Say which kernel dispatch chooses, from which rows, and why not each other one.

    Or of many products (--shapes, --model or --probe) whether FP8 is worth it: the choice for each,
    what it gains against bf16 by the times measured on the device, which need not be here, and what
    all come to. What was never measured is listed so, and is in no sum.
    """
    way = OutputFormat.JSON if as_json else how
    sources = {"--shapes": shapes, "--model": model, "--probe": probe}
    given = [name for name, value in sources.items() if value is not None]
    if given:
        of_one = {"OP": op != "gemm", "--shape": shape, "--prepared": prepared, "--bias": bias,
                  "--epilogue": epilogue, "--scale": scale, "--out-scale": out_scale}  # fmt: skip
        wrong = [*given[1:], *(name for name, value in of_one.items() if value)]
        if wrong:
            raise typer.BadParameter(f"goes without {given[0]}", param_hint=wrong[0])
        if rows is not None and model is None:
            raise typer.BadParameter("goes with --model", param_hint="--rows")
        with reading(db):
            _explain_many(
                shapes, model, probe, rows, training=training, missing=missing, budget=budget,
                device_name=device, distribution=distribution, regime=regime, how=way, quiet=quiet,
            )  # fmt: skip
        return
    of_many = {"--rows": rows, "--training": training, "--missing": missing,
               "--format csv": way is OutputFormat.CSV}  # fmt: skip
    for name, value in of_many.items():
        if value:
            raise typer.BadParameter("goes with --shapes, --model or --probe", param_hint=name)
    _explain_one(op, shape or "32768,512,512", budget, device, distribution, regime, prepared,
                 bias, epilogue, scale, out_scale, db, way is OutputFormat.JSON)  # fmt: skip


def _explain_one(
    op: str,
    shape: str,
    budget: float,
    device: str | None,
    distribution: str | None,
    regime: Regime | None,
    prepared: str | None,
    bias: bool,
    epilogue: str | None,
    scale: str | None,
    out_scale: str | None,
    db: str | None,
    as_json: bool,
) -> None:
    from lokakern.device import current_device
    from lokakern.functional.checks import granularity_named
    from lokakern.registry.register import fp8_format
    from lokakern.selection.dispatcher import dispatch, snapshot
    from lokakern.workloads.suites import PREPARED_FORMS

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
            _tell_devices(choice)


def _tell_devices(choice: Choice) -> None:
    """Where nothing was measured of a device, those of which something was."""
    from lokakern.selection.dispatcher import choices, snapshot

    if choice.is_miss and choices() is None and choice.table.device not in snapshot().devices:
        known = ", ".join(sorted(repr(d.product) for d in snapshot().devices))
        if known:
            say(f"nothing was measured on {choice.table.device.product}; --device takes {known}")


def _explain_many(
    shapes: Path | None,
    model: str | None,
    probe: Path | None,
    rows: int | None,
    *,
    training: bool,
    missing: Path | None,
    budget: float,
    device_name: str | None,
    distribution: str | None,
    regime: Regime | None,
    how: OutputFormat,
    quiet: bool,
) -> None:
    from lokakern.bench.fp8_gain.gain import worth
    from lokakern.probe.site import GEMMS
    from lokakern.render import terminal
    from lokakern.selection import dispatcher

    device = dispatcher.device_named(device_name)
    gemms = GEMMS if training else GEMMS[:1]
    products, notes = _products(shapes, model, probe, rows, gemms)
    with terminal.TerminalProgress(quiet=quiet) as progress:
        progress.begin("explain", len(products))
        found = worth(
            products, budget=ErrorBudget.of(budget), device=device, gemms=gemms,
            distributions=dispatcher.distribution_names(distribution),
            regime=regime.value if regime else None, step=progress.step,
        )  # fmt: skip
    what = "training" if training else "predictions"
    if how is OutputFormat.JSON:
        facts = {"device": device.product, "budget": found.budget.limits, "of": what,
                 "layers": [_facts(row) for row in found.rows], "total": found.total(),
                 "notes": notes}  # fmt: skip
        print(json.dumps(facts, indent=2, allow_nan=False))
    elif how is OutputFormat.CSV:
        terminal.print_rows([_facts(row) for row in found.rows], "csv")
        say(found.words())
    else:
        title = f"{what} within {found.budget} on {device.product}"
        places = sorted(range(len(found.rows)), key=lambda at: -found.rows[at].product.flops)
        largest = [found.rows[at] for at in sorted(places[:MOST_ROWS])]
        kept = largest if len(found.rows) > MOST_ROWS else None
        cells = [_cells(row, found) for row in kept or found.rows]
        note = "\n".join(["", found.words(), *notes])
        terminal.print_rows(cells, "table", title=title, note=note, spare=("why", "saved us"))
        if kept is not None:
            say(f"and {len(found.rows) - len(kept)} smaller ones: --format csv or json has all")
    _tell_missing(found, missing)


def _products(
    shapes: Path | None, model: str | None, probe: Path | None, rows: int | None, gemms: Any
) -> tuple[list[Product], list[str]]:
    """Products, and what to know of where they come from."""
    from lokakern.bench.fp8_gain import products

    alone = "Times of the products alone, not of a step with all else that it does."
    if shapes is not None:
        return products.products_from_file(shapes.expanduser()), [alone]
    if probe is not None:
        from lokakern.probe import files

        found = products.products_of_probe(files.load(probe.expanduser()), gemms)
        if not found:
            raise UnknownNameError(f"--probe: {str(probe)!r} holds no layer that was called")
        return found, [alone, "Errors are those of the benchmarked distributions that operands are "
                       "like; `report --probe` replays the operands themselves."]  # fmt: skip
    assert model is not None  # one of the three is given
    found, share = products.products_of_model(model, rows, say)
    if share is not None:
        alone += (f" Linear layers, as under autocast to bfloat16, are {share:.1%} of the FLOPs of "
                  "a forward pass.")  # fmt: skip
    return found, [alone]


def _facts(row: Row) -> dict[str, Any]:
    p = row.product
    return {
        "layer": p.layer, "gemm": row.gemm, "m": p.m, "n": p.n, "k": p.k, "batch": p.batch,
        "count": p.count, "state": row.state, "kernel": row.kernel or None, "us": row.us,
        "bf16_us": row.bf16_us, "speedup": row.speedup, "gain_us": row.gain_us,
        "row_err": row.row_err, "why": row.why,
    }  # fmt: skip


def _cells(row: Row, found: Worth) -> dict[str, Any]:
    p = row.product
    cells: dict[str, Any] = {"layer": p.layer}
    if any(other.gemm != "output" for other in found.rows):
        cells["gemm"] = row.gemm
    cells["m,n,k"] = f"{p.m},{p.n},{p.k}" + (f" x{p.batch}" if p.batch > 1 else "")
    if any(other.product.count > 1 for other in found.rows):
        cells["count"] = p.count
    between = " ~" if row.state == "interpolated" else ""
    cells |= {
        "choice": (row.kernel or row.state) + between, "us": row.us, "bf16 us": row.bf16_us,
        "x bf16": row.speedup, "saved us": row.gain_us,
        "why": row.why if len(row.why) <= 100 else f"{row.why[:97]}...",
    }  # fmt: skip
    return cells


def _tell_missing(found: Worth, place: Path | None) -> None:
    from lokakern.bench.fp8_gain.products import suite_of
    from lokakern.selection import dispatcher

    missing = found.missing()
    if place is not None:
        if not missing:
            say("everything that a sweep can lay out was measured: nothing is written")
            return
        try:
            place.write_text(suite_of(missing, "missing"), encoding="utf-8")
        except OSError as error:
            raise DatabaseError(f"{str(place)!r} cannot be written: {error.strerror}") from error
        say(f"{place}: {len(missing)} shapes; on {found.device.product}: python -m lokakern.bench "
            f"sweep --suite {place} --errors needed")  # fmt: skip
    elif missing and found.device in dispatcher.snapshot().devices:
        say("--missing FILE writes what was never measured into a file for sweep --suite")
    elif missing:
        known = ", ".join(sorted(repr(d.product) for d in dispatcher.snapshot().devices))
        say(f"nothing was measured on {found.device.product}; give --device, of "
            f"{known or 'which no database holds any: `sweep` first'}")  # fmt: skip
