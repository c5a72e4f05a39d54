"""The command `model`: throughput and quality of FP8 in whole models."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lokakern.bench.cli import options
from lokakern.bench.cli.options import OutputFormat, reading, say, says_errors
from lokakern.bench.cli.zoo import numbers, print_zoo, words

if TYPE_CHECKING:
    from lokakern.bench.models.comparison import Comparison, Result


ALL = "zoo"
OF_ZOO = ("batches", "modes", "autocast", "time_limit", "jobs", "tune")
NOT_OF_ZOO = (
    "size", "steps", "batch", "seeds", "arm", "most_rows", "whole", "large_steps", "suite", "data",
)  # fmt: skip


@says_errors
def model(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="wukong, interformer, dhen or dlrm; or zoo, the table of dlrm-dcnv2, dcnv2, "
            "tower, hstu, wide, masknet, autoint and ple, or one of these."
        ),
    ] = "wukong",
    training: Annotated[
        bool | None,
        typer.Option(
            "--train/--infer",
            help="Training steps, or inference. Default: training; both in the zoo.",
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Size, such as small, S or M of wukong, or tiny of any.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Training steps before quality is measured. 0: times only.")
    ] = 200,
    batch: Annotated[
        int | None, typer.Option(min=16, help="Samples per batch. Default: as published.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Pairs of runs for the quality.")] = 3,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="bf16 (Mods, compiled: the baseline, always included), as-written, "
            "torchao-tensorwise, torchao-rowwise, fp8-tensorwise, fp8-rowwise, only-LIBRARY, "
            "by-budget, lokakern; repeatable. Default: all."
        ),
    ] = None,
    most_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Limit on table rows. Default: a power of ten, with all tables within a million; "
            "as published they fit on no GPU.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder that FuxiCTR prepared (feature_map.json; train, valid and test as npz or "
            "parquet), such as of Criteo, Avazu or MovieLens: features, samples and clicks are its "
            "own. Default: a synthetic log."
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole/--without-tables",
            help="Include the lookup of embeddings, and the training of their tables, in the step.",
        ),
    ] = True,
    large_steps: Annotated[
        bool,
        typer.Option(
            "--large-steps",
            help="Step the parameters of every arm by lokakern.nn.optim.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for loss curves (runs.jsonl, and loss.png with matplotlib). With zoo: for "
            "zoo.jsonl, from which the same command resumes."
        ),
    ] = None,
    batches: Annotated[
        str, typer.Option(help="With zoo: batch sizes, measured in this order.")
    ] = "8192,2048,32768,512",
    modes: Annotated[
        str, typer.Option(help="With zoo: some of graph, compiled and eager.")
    ] = "graph,compiled,eager",
    autocast: Annotated[
        bool,
        typer.Option(
            "--autocast", help="With zoo: float32 parameters under autocast, instead of bfloat16."
        ),
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, help="With zoo: seconds after which no new cell begins (exit code 3)."),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            min=1,
            help="With zoo, on a GPU: processes that compile all cells before the first is timed.",
        ),
    ] = 1,
    tune: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="With zoo: also tune each step in place (`Conversion.tune`), for so many seconds "
            "at most, and time it again.",
        ),
    ] = None,
    suite: Annotated[
        Path | None,
        typer.Option(
            help="Only write the layers of the model at this batch into a TOML file, for sweep "
            "--suite. Unmeasured layers run in bf16; layers across tokens always do."
        ),
    ] = None,
    budget: options.Budget = 0.06,
    db: options.Database = None,
    how: options.How = OutputFormat.TABLE,
    quiet: options.Quiet = False,
) -> None:
    """Train a model, or run inference, in bf16 and FP8, and compare throughput and quality.

    With zoo, print one table of the dense parts of public models: step times of torch's bf16 over
    those after `lokakern.convert` by the budget, in CUDA graphs of compiled steps, compiled without
    graphs, and eager.

    Nothing is stored in a database. Times on a CPU say nothing about a GPU.
    """
    import torch

    from lokakern.bench.models.arms import Setting, arms_named
    from lokakern.bench.models.catalog import CATALOG, config_named
    from lokakern.bench.models.comparison import compare, rows_of, write_suite
    from lokakern.bench.models.learning import save_curves
    from lokakern.bench.models.recorded_log import RecordedData
    from lokakern.bench.models.zoo.catalog import ZOO
    from lokakern.device import current_device
    from lokakern.measure.time_problem import torch_device
    from lokakern.render import terminal

    device = torch.device(torch_device())
    is_zoo = name == ALL or name in ZOO
    _check_options(context, NOT_OF_ZOO if is_zoo else OF_ZOO, is_zoo)
    if is_zoo:
        models = tuple(ZOO) if name == ALL else (name,)
        with reading(db):
            print_zoo(
                models, numbers(batches), words(modes), device, budget, training=training,
                autocast=autocast, out=out,
                time_limit_s=time_limit, jobs=jobs, database=db, tune_s=tune, how=how, quiet=quiet,
            )  # fmt: skip
        return
    config = config_named(name, size, most_rows)
    entry = CATALOG[name]
    recorded = None if data is None else RecordedData.open(data)
    if recorded is not None:
        config = recorded.config_of(config, most_rows)
    setting = Setting(
        name, size or entry.default_size, config, batch or entry.samples, training is not False,
        device, budget, large_steps, recorded,
    )  # fmt: skip
    if suite is not None:
        print(f"{suite}: {write_suite(setting, suite)} different layers")
        return
    with reading(db):
        found = compare(
            setting, arms_named(tuple(arm or ())), steps=steps, seeds=seeds, whole=whole,
            say=(lambda _text: None) if quiet else say,
        )  # fmt: skip
    what = "training" if setting.training else "inference"
    title = f"{name} {setting.size}, {what}, batch {setting.samples}, on {current_device().product}"
    if out is not None:
        runs = [run for result in found.results for run in result.runs]
        for path in save_curves(runs, out, title):
            say(f"wrote {path}")
    if how is OutputFormat.JSON:
        print(json.dumps(_facts(found), indent=2, default=str))
        return
    timer = next(r.pace.timer for r in found.results if r.pace)
    terminal.print_rows(rows_of(found), how, title=title, note=f"time: {timer}")
    if how is OutputFormat.CSV:
        return
    print(_bound_words(found))
    for result in found.results:
        _print_choices(result)


def _check_options(context: typer.Context, refused: tuple[str, ...], is_zoo: bool) -> None:
    for name in refused:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            hint = "; sweep --suite zoo measures its layers" if name == "suite" else ""
            raise typer.BadParameter(
                f"goes {'without' if is_zoo else 'with'} a model of the zoo{hint}",
                param_hint=f"--{name.replace('_', '-')}",
            )


def _bound_words(found: Comparison) -> str:
    shares = found.results[0].shares
    assert shares is not None  # the baseline was timed
    parts = ", ".join(f"{kind} {shares.share(kind):.1%}" for kind in shares.us)
    said = (
        f"shares of the baseline's step: {parts} ({shares.timer}).\n"
        f"Amdahl: {shares.bound:.2f}x if GEMMs took half and norms no time, {shares.limit:.2f}x if "
        "neither took any."
    )
    if found.best is None:
        return said
    return (
        f"{said}\nA model equal to the teacher has a normalized entropy of "
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
    title = f"{result.arm.name}: choices, and times in the database"
    terminal.print_rows(rows, "table", title=title, note=result.gap)


def _facts(found: Comparison) -> dict[str, object]:
    from lokakern.bench.models.comparison import rows_of

    setting = found.setting
    return {
        "model": setting.name, "size": setting.size, "config": asdict(setting.config),
        "batch": setting.samples, "training": setting.training, "budget": setting.budget,
        "data": None if setting.data is None else str(setting.data.folder),
        "rows": rows_of(found), "best": None if found.best is None else asdict(found.best),
        "arms": [asdict(result) for result in found.results],
    }  # fmt: skip
