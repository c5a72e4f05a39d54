"""The command `explain`: what dispatch chooses for one product, and what that gains for many."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import OutputFormat, reading, say, says_errors
from lokakern.errors import DeviceError, UnknownNameError

if TYPE_CHECKING:
    from lokakern.bench.fp8_gain.gain import Row, Worth
    from lokakern.bench.fp8_gain.products import Product
    from lokakern.bench.fp8_gain.what_if import WhatIf
    from lokakern.selection.choice import Choice
    from lokakern.types import Device

UNSCALED = ("quantize", "quantize_transpose", "norm_quantize")  # ops that write FP8 and read none


@says_errors
def explain(
    op: Annotated[
        str, typer.Argument(help="gemm, gemm_norm, scaled_gemm, quantize, norm_quantize, ...")
    ] = "gemm",
    sizes: Annotated[
        list[str] | None, typer.Argument(metavar="M N K", help="Sizes, instead of --shape.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="m,n,k or m,k. Default: 32768,512,512.")] = None,
    shapes: Annotated[
        Path | None,
        typer.Option(
            help="Many products: a suite for sweep --suite (.toml), or rows of m,n,k[,count] "
            "(.csv, .json)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The linear layers of a model: package.module:factory, a function that returns "
            "the model with example inputs."
        ),
    ] = None,
    probe: Annotated[
        Path | None, typer.Option(help="The layers in a file of `Probe.save`.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of each layer, if the factory of --model has no example."),
    ] = None,
    training: Annotated[
        bool,
        typer.Option(
            "--training",
            help="With many products: include gradients, and quantize weights in each pass. "
            "Default: inference with weights quantized once.",
        ),
    ] = False,
    missing: Annotated[
        Path | None,
        typer.Option(help="With many products: write unmeasured ones to a file for sweep --suite."),
    ] = None,
    budget: options.Budget = 0.06,
    device: options.Device = None,
    distribution: options.Distribution = None,
    regime: options.RegimeOfChoice = None,
    prepared: Annotated[
        str | None, typer.Option(help="Prepared weight with tensor, row or 128x128 scales.")
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="With a bias.")] = False,
    epilogue: Annotated[
        str | None, typer.Option(help="Epilogue, such as bias+relu or bias+layer+affine.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="Quantized operands; a has tensor, row or 1x128 scales.")
    ] = None,
    out_scale: Annotated[
        str | None, typer.Option(help="FP8 output with tensor, row or 1x128 scales.")
    ] = None,
    db: options.Database = None,
    no_shipped: options.NoShipped = False,
    how: options.How = OutputFormat.TABLE,
    quiet: options.Quiet = False,
) -> None:
    """Show the kernel that dispatch chooses, the rows behind it, and why it rejects the others.

    With many products (--shapes, --model or --probe), show whether FP8 is worth it: the choice for
    each, its gain over bf16 by times measured on the device, which need not be present, and the
    total. Products that were never measured are predicted if a model covers them (`fit`), marked
    and summed apart with an interval; others are listed and excluded from the totals.

    Of a GPU type that nobody has measured (A100, L40S, B200, B300, MI355X) show the formats whose
    emulated errors are within the budget, such as nvfp4, mxfp8 or int8. No times are known there.
    """
    from lokakern.bench.fp8_gain.chains import chains_of_model
    from lokakern.bench.fp8_gain.gain import pad_words, worth
    from lokakern.bench.fp8_gain.products import Product
    from lokakern.bench.fp8_gain.what_if import what_if
    from lokakern.probe.statistics import GEMMS
    from lokakern.render.terminal import TerminalProgress
    from lokakern.selection import dispatcher
    from lokakern.selection.arguments import budget_of, problem_of
    from lokakern.what_if.devices import DEVICES, device_named

    if op[:1].isdigit():  # sizes alone are those of the default
        op, sizes = "gemm", [op, *(sizes or [])]
    sources = {"--shapes": shapes, "--model": model, "--probe": probe}
    given = [name for name, value in sources.items() if value is not None]
    wrong: dict[str, object]
    if given:
        reason = f"goes without {given[0]}"
        wrong = dict.fromkeys(given[1:], True) | {
            "OP": op != "gemm", "M N K": sizes, "--shape": shape, "--prepared": prepared,
            "--bias": bias, "--epilogue": epilogue, "--scale": scale, "--out-scale": out_scale,
        }  # fmt: skip
    else:
        reason = "goes with --shapes, --model or --probe"
        wrong = {"--rows": rows, "--training": training, "--missing": missing,
                 "--format csv": how is OutputFormat.CSV}  # fmt: skip
    for name, value in wrong.items():
        if value:
            raise typer.BadParameter(reason, param_hint=name)
    if bias and epilogue is not None:
        raise typer.BadParameter("goes without --epilogue, which has bias as a word",
                                 param_hint="--bias")  # fmt: skip
    if sizes and shape is not None:
        raise typer.BadParameter("goes without M N K", param_hint="--shape")
    if scale is not None and op in UNSCALED:
        raise typer.BadParameter(f"operands of {op} have no scales: --out-scale {scale}",
                                 param_hint="--scale")  # fmt: skip
    if rows is not None and model is None:
        raise typer.BadParameter("goes with --model", param_hint="--rows")
    asked_for = options.shape_of(shape or ",".join(sizes or ["32768,512,512"]))
    timing = regime.value if regime else None
    with reading(db, no_shipped=no_shipped):
        try:
            target = dispatcher.device_named(device, [absent.product for absent in DEVICES])
        except DeviceError:
            absent = device_named(device or "")
            if absent is None:
                raise
            wrong = {"OP": op != "gemm", "--training": training, "--missing": missing,
                     "--regime": regime, "--prepared": prepared, "--epilogue": epilogue,
                     "--scale": scale, "--out-scale": out_scale}  # fmt: skip
            for name, value in wrong.items():
                if value:
                    raise typer.BadParameter(
                        f"nothing was measured on {absent}, of which only errors of plain products "
                        "are known", param_hint=name) from None  # fmt: skip
            if given:
                asked, (_, *notes) = _products(shapes, model, probe, rows, GEMMS[:1])
            else:
                one = problem_of(op, asked_for, {})
                asked, notes = [Product("product", one.m, one.n, one.k)], []
            judged = dispatcher.distribution_names(distribution)
            _print_what_if(what_if(asked, absent, budget_of(budget), judged), notes, how)
            return
        if not given:
            fields = _fields(op, target, prepared, bias, epilogue, scale, out_scale)
            choice = dispatcher.dispatch(op, asked_for, budget, distribution=distribution,
                                         device=target, regime=timing, **fields)  # fmt: skip
            _print_choice(choice, how)
            return
        gemms = GEMMS if training else GEMMS[:1]
        asked, notes = _products(shapes, model, probe, rows, gemms)
        with TerminalProgress(quiet=quiet) as progress:
            progress.begin("explain", len(asked))
            judged = dispatcher.distribution_names(distribution)
            found = worth(
                asked, budget=budget_of(budget), device=target, gemms=gemms,
                distributions=judged, regime=timing, step=progress.step,
            )  # fmt: skip
        notes.append(found.convert_words())
        if pads := pad_words(found, judged, gemms):
            notes.append(pads)
        if model is not None and not training:
            notes += chains_of_model(model, asked, found)
        _print_worth(found, notes, "training" if training else "predictions", how)
        _tell_missing(found, missing)


def _fields(
    op: str,
    device: Device,
    prepared: str | None,
    bias: bool,
    epilogue: str | None,
    scale: str | None,
    out_scale: str | None,
) -> dict[str, Any]:
    """Fields of the problem besides its shape."""
    from lokakern.functional.checks import granularity_named
    from lokakern.registry.register import fp8_format
    from lokakern.types import Layout, Operand
    from lokakern.workloads.suites import PREPARED_FORMS

    fp8 = fp8_format(device)
    fields: dict[str, Any] = {"epilogue": "bias"} if bias else {}
    if epilogue is not None:
        fields["epilogue"] = epilogue
    if scale is not None:
        fields["a"] = Operand(fp8, granularity_named(op, scale))
    if out_scale is not None:
        fields |= {"out_format": fp8, "out_granularity": granularity_named(op, out_scale)}
    if prepared is not None:
        known = {form.value: form for form in PREPARED_FORMS}
        if prepared not in known or op not in ("gemm", "gemm_norm"):
            raise UnknownNameError(f"--prepared is {prepared!r}; expected one of "
                                   f"{', '.join(known)}, with gemm or gemm_norm")  # fmt: skip
        fields |= {"b": Operand(fp8, known[prepared], Layout.COLUMN), "prepared": True}
    return fields


def _print_choice(choice: Choice, how: OutputFormat) -> None:
    from lokakern.selection import dispatcher
    from lokakern.selection.remedies import miss_words

    if how is OutputFormat.JSON:
        facts = {
            "problem": str(choice.problem), "device": choice.table.device.product,
            "kernel": choice.kernel, "latency_us": choice.latency_us,
            "freshness": choice.pick.time.freshness if choice.pick.time else None,
            "regime": choice.table.regime, "gpu_us": choice.gpu_us, "host_us": choice.host_us,
            "host_cost": choice.table.host or None, "interpolated": choice.interpolated,
            "miss": choice.is_miss,
            "why": miss_words(choice.table, choice.pick, choice.m) if choice.is_miss else None,
            "predicted": None if choice.predicted is None else asdict(choice.predicted),
            "over_budget": choice.pick.excess or None, "undecided": _undecided(choice),
            "tied": choice.tied, "errors": choice.errors, "rejected": choice.rejected,
            "left_out": choice.left_out,
        }  # fmt: skip
        print(json.dumps(facts, indent=2))
        return
    print(choice.explain())
    device = choice.table.device
    unknown = (
        choice.is_miss
        and dispatcher.choices() is None
        and device not in dispatcher.snapshot().devices
    )
    if unknown and (known := _measured_devices()):
        say(f"nothing was measured on {device.product}; choose --device from {known}")


def _undecided(choice: Choice) -> dict[str, Any] | None:
    found = choice.undecided
    if found is None:
        return None
    return {"kernel": found.name, "latency_us": found.time.latency_us, "why": found.why}


def _measured_devices() -> str:
    from lokakern.selection import dispatcher

    return ", ".join(sorted(repr(device.product) for device in dispatcher.snapshot().devices))


def _print_worth(found: Worth, notes: list[str], what: str, how: OutputFormat) -> None:
    from lokakern.render.terminal import print_rows

    if how is OutputFormat.JSON:
        facts = {"device": found.device.product, "budget": found.budget.limits,
                 "regime": found.regime, "of": what, "layers": [_facts(row) for row in found.rows],
                 "total": found.total(), "notes": notes}  # fmt: skip
        print(json.dumps(facts, indent=2, allow_nan=False))
    elif how is OutputFormat.CSV:
        print_rows([_facts(row) for row in found.rows], "csv")
        say(found.words())
    else:
        title = f"{what} within {found.budget} on {found.device.product}, {found.regime}"
        places = sorted(range(len(found.rows)), key=lambda at: -found.rows[at].product.flops)
        cells = [_cells(found.rows[at], found) for at in sorted(places[: options.MOST_ROWS])]
        note = "\n".join(["", found.words(), *notes])
        print_rows(cells, "table", title=title, note=note, spare=("why", "saved us"))
        if len(places) > options.MOST_ROWS:
            left = len(places) - options.MOST_ROWS
            say(f"and {left} smaller ones: --format csv or json prints all")


def _print_what_if(found: WhatIf, notes: list[str], how: OutputFormat) -> None:
    from lokakern.render.terminal import print_rows

    if how is OutputFormat.JSON:
        facts = {"device": found.device.product, "budget": found.budget.limits, "emulated": True,
                 "layers": found.facts(), "total": found.total(),
                 "notes": [*found.notes(), *notes]}  # fmt: skip
        print(json.dumps(facts, indent=2, allow_nan=False))
        return
    cells = found.cells()
    if how is OutputFormat.CSV:
        print_rows(cells, "csv")
        say(found.words())
        return
    title = f"row_err of formats that {found.device} has, within {found.budget}"
    note = "\n".join(["", found.words(), *notes])
    print_rows(cells[: options.MOST_ROWS], "table", title=title, note=note)
    if len(cells) > options.MOST_ROWS:
        say(f"and {len(cells) - options.MOST_ROWS} more: --format csv or json prints all")


def _products(
    shapes: Path | None, model: str | None, probe: Path | None, rows: int | None, gemms: Any
) -> tuple[list[Product], list[str]]:
    """Products, and notes about their source."""
    from lokakern.bench.fp8_gain import products
    from lokakern.probe import files
    from lokakern.types import Format

    alone = "Times cover the products only, not the rest of a step."
    if shapes is not None:
        return products.products_from_file(shapes.expanduser()), [alone]
    if probe is not None:
        sites = files.load(probe.expanduser())
        found = products.products_of_probe(sites, gemms)
        if not found:
            raise UnknownNameError(f"--probe: {str(probe)!r} contains no layer that was called")
        alone += " Counts are calls in all the steps that Probe sampled."
        alone += _first_words(found, gemms)
        note = (
            "Errors are those of the nearest benchmarked distributions, and what is like none of "
            "them is left in bf16; `report --probe` replays the operands themselves."
        )
        if halves := [name for name, site in sites.items() if site.half is Format.FLOAT16]:
            note += f" In float16 were {', '.join(halves)}: here they are judged as in bfloat16."
        return found, [alone, note]
    assert model is not None  # one of the three is given
    found, share = products.products_of_model(model, rows, say, is_trained=len(gemms) > 1)
    alone += _first_words(found, gemms)
    if share is not None:
        alone += f" Linear layers, in bfloat16, take {share:.1%} of the FLOPs of a forward pass."
    return found, [alone]


def _first_words(products: list[Product], gemms: Any) -> str:
    """Names of layers whose inputs need no gradient, in training."""
    first = dict.fromkeys(p.layer for p in products if not p.needs_input_gradient)
    return f" The input of {', '.join(first)} needs no gradient." * (len(gemms) > 1 and bool(first))


def _facts(row: Row) -> dict[str, Any]:
    p = row.product
    return {
        "layer": p.layer, "gemm": row.gemm, "m": p.m, "n": p.n, "k": p.k, "batch": p.batch,
        "count": p.count, "state": row.state, "kernel": row.kernel or None, "us": row.us,
        "bf16_us": row.bf16_us, "speedup": row.speedup, "gain_us": row.gain_us,
        "row_err": row.row_err, "why": row.why,
        "predicted": None if row.predicted is None else asdict(row.predicted),
        "transferred": None if row.transferred is None else asdict(row.transferred),
    }  # fmt: skip


def _cells(row: Row, found: Worth) -> dict[str, Any]:
    from lokakern.bench.fp8_gain.gain import PREDICTED

    p = row.product
    cells: dict[str, Any] = {"layer": p.layer}
    if any(other.gemm != "output" for other in found.rows):
        cells["gemm"] = row.gemm
    cells["m,n,k"] = f"{p.m},{p.n},{p.k}" + (f" x{p.batch}" if p.batch > 1 else "")
    if any(other.product.count > 1 for other in found.rows):
        cells["count"] = p.count
    mark = {"interpolated": " ~", PREDICTED: " (predicted)"}.get(row.state, "")
    us, bf16_us, speedup, gain_us = row.us, row.bf16_us, row.speedup, row.gain_us
    if (guess := row.predicted) is not None:
        us, bf16_us, speedup = guess.us, guess.bf16_us, guess.bf16_us / guess.us
        gain_us = p.count * (bf16_us - us)
    cells |= {
        "choice": (row.kernel or row.state) + mark, "us": us, "bf16 us": bf16_us,
        "x bf16": speedup, "saved us": gain_us,
        "why": "\n".join(textwrap.wrap(row.why, 60, break_long_words=False)),
    }  # fmt: skip
    return cells


def _tell_missing(found: Worth, place: Path | None) -> None:
    from lokakern.bench.fp8_gain.products import suite_of
    from lokakern.selection import dispatcher

    missing = found.missing()
    if place is not None and not missing:
        say("everything that a sweep can measure was measured: no file is written")
    elif place is not None:
        with options.writing(place):
            place.write_text(suite_of(missing, name="missing"), encoding="utf-8")
        say(f"{place}: {len(missing)} shapes; on {found.device.product}: python -m lokakern.bench "
            f"sweep --suite {place} --errors needed")  # fmt: skip
    elif missing and found.device in dispatcher.snapshot().devices:
        say("--missing FILE writes unmeasured products into a file for sweep --suite")
    elif missing:
        known = _measured_devices()
        choice = f"choose --device from {known}" if known else "no database has any: `sweep` first"
        say(f"nothing was measured on {found.device.product}; {choice}")
