"""The command `model`: throughput and quality of whole models in FP8."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lokakern.bench.cli.options import (
    BudgetOption,
    DatabaseOption,
    FormatOption,
    JsonOption,
    OutputFormat,
    reading,
    say,
    says_errors,
)

if TYPE_CHECKING:
    from lokakern.bench.models.comparison import Comparison, Result


@says_errors
def model(
    name: Annotated[str, typer.Argument(help="wukong, interformer, dhen or dlrm.")] = "wukong",
    training: Annotated[
        bool, typer.Option("--train/--infer", help="Training steps, or predictions.")
    ] = True,
    size: Annotated[
        str | None, typer.Option(help="Such as small, S, M of wukong, or tiny of all models.")
    ] = None,
    steps: Annotated[
        int,
        typer.Option(min=0, help="Training steps before the evaluation; 0 measures times only."),
    ] = 200,
    batch: Annotated[
        int | None, typer.Option(min=16, help="Batch size. Default: as published.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm for the evaluation.")] = 3,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="bf16 (Mods, compiled; the baseline, always included), as-written, "
            "torchao-tensorwise, torchao-rowwise, fp8-tensorwise, fp8-rowwise, only-LIBRARY, "
            "by-budget, lokakern; repeatable. Default: all."
        ),
    ] = None,
    most_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest number of rows of a table. Default: the power of ten that limits all "
            "tables to a million rows; published sizes fit on no GPU.",
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole/--without-tables",
            help="Whether the timed step includes the embedding tables and their training.",
        ),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for loss curves (runs.jsonl, and loss.png with matplotlib)."),
    ] = None,
    suite: Annotated[
        Path | None,
        typer.Option(
            help="Only write the model's layers at this batch size into a TOML file for sweep "
            "--suite. Layers without measurements, and layers across tokens, run in bf16."
        ),
    ] = None,
    budget: BudgetOption = 0.06,
    db: DatabaseOption = None,
    how: FormatOption = OutputFormat.TABLE,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Compare throughput and quality of a model in bf16 and FP8, in training or inference.

    Nothing is stored in a database; times on a CPU are not those of a GPU.
    """
    import torch

    from lokakern.bench.models.arms import Setting, arms_named
    from lokakern.bench.models.catalog import CATALOG, config_named
    from lokakern.bench.models.comparison import compare, rows_of, write_suite
    from lokakern.bench.models.learning import save_curves
    from lokakern.device import current_device
    from lokakern.measure.time_problem import torch_device
    from lokakern.render import terminal

    config = config_named(name, size, most_rows)
    entry = CATALOG[name]
    setting = Setting(
        name, size or entry.default_size, config, batch or entry.samples, training,
        torch.device(torch_device()), budget,
    )  # fmt: skip
    if suite is not None:
        print(f"{suite}: {write_suite(setting, suite)} different layers")
        return
    with reading(db):
        found = compare(
            setting, arms_named(tuple(arm or ())), steps=steps, seeds=seeds, whole=whole,
            say=(lambda _text: None) if quiet else say,
        )  # fmt: skip
    what = "training" if training else "predicting"
    title = f"{name} {setting.size}, {what}, batch {setting.samples}, on {current_device().product}"
    if out is not None:
        runs = [run for result in found.results for run in result.runs]
        for path in save_curves(runs, out, title):
            print(f"wrote {path}", file=sys.stderr)
    if as_json or how is OutputFormat.JSON:
        print(json.dumps(_facts(found), indent=2, default=str))
        return
    timer = next(r.pace.timer for r in found.results if r.pace)
    terminal.print_rows(rows_of(found), how.value, title=title, note=f"time: {timer}")
    if how is OutputFormat.CSV:
        return
    print(_bound_words(found))
    for result in found.results:
        _print_choices(result)


def _bound_words(found: Comparison) -> str:
    shares = found.results[0].shares
    assert shares is not None  # the baseline was timed
    parts = ", ".join(f"{kind} {shares.share(kind):.1%}" for kind in shares.us)
    return (
        f"Time of the baseline's step: {parts} ({shares.timer}).\n"
        f"Amdahl: {shares.bound:.2f}x if GEMMs took half and norms no time, {shares.limit:.2f}x if "
        f"neither took any.\nThe best possible quality is a normalized entropy of "
        f"{found.best.normalized_entropy:.4f}, log loss {found.best.log_loss:.5f}, AUC "
        f"{found.best.auc:.4f} (seed 0)."
    )


def _print_choices(result: Result) -> None:
    from lokakern.render import terminal

    for note in result.notes:
        print(f"{result.arm.name}: {note}")
    if not result.choices:
        return
    rows = [
        {
            "site": c.site, "gemm": c.gemm, "rows,n,k": f"{c.rows},{c.n},{c.k}",
            "kernel": c.kernel, "bf16 us": c.bf16_us, "us": c.us, "gain us": c.gain_us,
            "why": c.why[:80],
        }
        for c in result.choices
    ]  # fmt: skip
    title = f"{result.arm.name}: choices, with times of the database"
    terminal.print_rows(rows, "table", title=title, note=result.gap)


def _facts(found: Comparison) -> dict[str, object]:
    from lokakern.bench.models.comparison import rows_of

    setting = found.setting
    return {
        "model": setting.name, "size": setting.size, "config": asdict(setting.config),
        "batch": setting.samples, "training": setting.training, "budget": setting.budget,
        "rows": rows_of(found), "best": asdict(found.best),
        "arms": [asdict(result) for result in found.results],
    }  # fmt: skip
