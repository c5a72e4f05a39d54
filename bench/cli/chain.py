"""The command `chain`: what dispatch chooses for a chain of layers, measured whole."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import OutputFormat, reading, says_errors
from lokakern.errors import ShapeError

if TYPE_CHECKING:
    from lokakern.bench.compare.chain_timing import Row
    from lokakern.chain.choice import ChainChoice


@says_errors
def chain(
    m: Annotated[int, typer.Option("--m", help="Rows.")] = 32768,
    layers: Annotated[
        str, typer.Option(help="Output and input columns of each, nxk, separated by commas.")
    ] = "512x512,512x512,512x512,512x512",
    epilogue: Annotated[
        list[str] | None,
        typer.Option(
            help="Epilogue of the products, such as bias+block_rms(256)+hardswish. Give it once "
            "for all layers, or once for each layer. Default: none."
        ),
    ] = None,
    budget: options.Budget = 0.06,
    distribution: options.Distribution = None,
    regime: options.Regime = None,
    rivals: Annotated[
        list[str] | None,
        typer.Option(
            help="Rival to measure as well: torch.compile of the whole chain in bfloat16, in "
            "default mode and with max-autotune; repeatable."
        ),
    ] = None,
    in_scale: Annotated[
        str | None, typer.Option(help="The input is FP8: tensor, row or 1x128 scales.")
    ] = None,
    out_scale: Annotated[
        str | None, typer.Option(help="The output is FP8: tensor, row or 1x128 scales.")
    ] = None,
    unprepared: Annotated[
        bool, typer.Option("--unprepared", help="Weights are not quantized ahead.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help='GPU type, such as "NVIDIA H200": only shows its choice, and measures nothing.'
        ),
    ] = None,
    db: options.Database = None,
    how: options.How = OutputFormat.TABLE,
    quiet: options.Quiet = False,
) -> None:
    """Show the choice of dispatch for a chain of layers, and measure the whole chain and rivals."""
    from lokakern.bench.compare.chain_timing import measure_chain, rivals_named
    from lokakern.chain.dispatch import dispatch_chain
    from lokakern.render import terminal

    names = rivals_named(rivals or ())
    with reading(db):
        choice = dispatch_chain(
            _layers_of(layers, epilogue or ["none"]), m, budget, distribution=distribution,
            device=device, regime=regime.value if regime else None, in_granularity=in_scale,
            out_granularity=out_scale, prepared=not unprepared,
        )  # fmt: skip
        rows: list[Row] = []
        if not device:
            with terminal.TerminalProgress(quiet=quiet) as progress:
                progress.begin("chain", 0)
                rows = measure_chain(choice, rivals=names, regime=regime.value if regime else None,
                                     step=progress.step)  # fmt: skip
    if how is OutputFormat.JSON:
        print(json.dumps({"choice": _facts(choice), "measured": [asdict(r) for r in rows]},
                         indent=2))  # fmt: skip
        return
    print(choice.explain())
    if rows:
        terminal.print_rows([_cells(row) for row in rows], how, title="measured whole")


def _layers_of(text: str, epilogues: list[str]) -> list[tuple[int, int, str]]:
    try:
        sizes = [tuple(int(size) for size in word.split("x")) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or any(len(size) != 2 for size in sizes):
        raise ShapeError(
            f"--layers is {text!r}; expected nxk of each layer, such as 512x256,64x512"
        )
    if len(epilogues) not in (1, len(sizes)):
        raise ShapeError(
            f"{len(epilogues)} --epilogue options for {len(sizes)} layers; expected one, or one "
            "per layer"
        )
    each = epilogues * len(sizes) if len(epilogues) == 1 else epilogues
    return [(n, k, words) for (n, k), words in zip(sizes, each, strict=True)]


def _facts(choice: ChainChoice) -> dict[str, Any]:
    return {
        "device": choice.chain.device.product, "m": choice.chain.m, "budget": choice.budget,
        "layers": [list(layer) for layer in choice.chain.layers], "kernels": choice.kernels,
        "formats": choice.formats, "latency_us": choice.latency_us, "row_err": choice.row_err,
        "interpolated": choice.interpolated, "miss": choice.note,
        "unquantized_kernels": choice.unquantized.kernels,
        "unquantized_us": choice.unquantized.latency_us,
        "trade_offs": [
            {"latency_us": path.time_us, "row_err": math.sqrt(path.square)} for path in choice.paths
        ],
        "measure_with": choice.sweep_command,
    }  # fmt: skip


def _cells(row: Row) -> dict[str, Any]:
    numbers = {
        "us": row.latency_us, "+-": row.margin_us, "summed us": row.summed_us, "x": row.speedup,
        "worst row_err": row.row_err, "summed row_err": row.summed_row_err,
    }  # fmt: skip
    known = {name: math.nan if value is None else value for name, value in numbers.items()}
    return {"chain": row.name, **known, "on": row.worst_on, "failed": row.failed}
