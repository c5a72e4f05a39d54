"""The zoo's table: cells in order, rows in a file as soon as they are known, and their summary."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import lokakern
from lokakern.bench.models.zoo.ahead import compile_ahead
from lokakern.bench.models.zoo.catalog import ZOO
from lokakern.bench.models.zoo.cell import MODES, Cell, Row, free_memory, measure
from lokakern.device import current_device
from lokakern.errors import SuiteError, UnknownNameError
from lokakern.registry.register import load_kernels
from lokakern.selection import dispatcher
from lokakern.sweep.plan import digest_of, kernels_digest

FILE = "zoo.jsonl"
SOURCES = (".py", ".cu", ".cuh", ".hip", ".hpp", ".cpp", ".h")


def cells_of(
    models: Sequence[str], batches: Sequence[int], training: bool | None, autocast: bool = False
) -> list[Cell]:
    """Cells in the order of measurement: by batch size, then prediction, then training.

    Args:
        models: Names in `ZOO`.
        batches: Batch sizes.
        training: Whether steps are training steps, or predictions; None is both.
        autocast: As of `Cell`.

    Raises:
        UnknownNameError: A model is unknown.
    """
    unknown = [name for name in models if name not in ZOO]
    if unknown:
        raise UnknownNameError(
            f"the zoo has no {', '.join(unknown)}; expected some of {', '.join(ZOO)}"
        )
    steps = (False, True) if training is None else (training,)
    return [
        Cell(name, batch, step, autocast) for batch in batches for step in steps for name in models
    ]


def run(
    cells: Sequence[Cell],
    modes: Sequence[str],
    device: torch.device,
    budget: float,
    *,
    path: Path | None = None,
    time_limit_s: float | None = None,
    jobs: int = 1,
    database: str | None = None,
    tune_s: float | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> Iterator[Row]:
    """Measure cells; rows that a file has from the same state are not measured again.

    Args:
        cells: What is compared, in this order.
        modes: Some of `MODES`.
        device: Where they run.
        budget: Largest accepted row error of a quantized product.
        path: File of JSON lines, one for each row; None keeps nothing.
        time_limit_s: Seconds after which no new cell begins.
        jobs: Processes that compile cells before the first one is timed; 1: each is compiled when
            its turn comes. On a GPU only.
        database: As of `lokakern.bench.models.zoo.ahead.compile_ahead`.
        tune_s: As of `lokakern.bench.models.zoo.cell.measure`.
        say: Called with progress messages.

    Raises:
        DeviceLostError: The device is unusable; its rows are in the file.
        SuiteError: The file has lines of something else.
    """
    end = None if time_limit_s is None else time.monotonic() + time_limit_s
    state = state_digest(device, budget, tune_s)
    known = {} if path is None else _rows_in(path, state)
    if jobs > 1 and device.type == "cuda":
        left = [(cell, [mode for mode in modes if mode != MODES[2]
                        and (cell.model, cell.batch, cell.step, mode) not in known])
                for cell in cells]  # fmt: skip
        compile_ahead(
            [(cell, some) for cell, some in left if some], device.type, budget, jobs,
            end=end, database=database, say=say,
        )  # fmt: skip
    for place, cell in enumerate(cells):
        asked = {mode: known.get((cell.model, cell.batch, cell.step, mode)) for mode in modes}
        yield from filter(None, asked.values())
        missing = [mode for mode, row in asked.items() if row is None]
        if not missing or (end is not None and time.monotonic() >= end):
            continue
        say(f"{place + 1}/{len(cells)}: {cell.model}, batch {cell.batch}, {cell.step}")
        for row in measure(cell, missing, device, budget, tune_s):
            if path is not None:
                _append(path, row, state)
            say(f"  {_words(row)}")
            yield row
        free_memory()


def _words(row: Row) -> str:
    if row.error:
        return f"{row.mode}: {row.error}"
    tuned = "" if row.tuned_speedup is None else (
        f"; {row.tuned_speedup:.3f}x +- {row.tuned_margin:.3f} after {row.tune_s:.0f} s of tune"
    )  # fmt: skip
    return (
        f"{row.mode}: {row.speedup:.3f}x +- {row.speedup_margin:.3f}, {row.us:.0f} us, "
        f"{row.quantized} of {row.products} products in FP8{tuned}"
    )


# --- the file


def state_digest(device: torch.device, budget: float, tune_s: float | None = None) -> str:
    """Digest of all that a ratio depends on: device, torch, source code, kernels and database."""
    load_kernels()
    frozen = dispatcher.choices()
    limits = [repr(budget), *([] if tune_s is None else [repr(tune_s)])]
    return digest_of([
        str(current_device()), torch.__version__, str(device), *limits, _source_digest(),
        kernels_digest(), dispatcher.snapshot().digest if frozen is None else frozen.digest,
    ])  # fmt: skip


@functools.cache
def _source_digest() -> str:
    """SHA-256 of the source files of the package."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(Path(lokakern.__file__).parent, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith(SOURCES):
                digest.update(name.encode() + (Path(folder) / name).read_bytes())
    return digest.hexdigest()


def _append(path: Path, row: Row, state: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row) | {"state": state}) + "\n")


def _rows_in(path: Path, state: str) -> dict[tuple[str, int, str, str], Row]:
    """Rows of a state by cell and mode; a line that a crash cut off ends the file."""
    if not path.exists():
        return {}
    found = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for place, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size - len(line.encode()))
            break
        try:
            values = json.loads(line)
            its_state = values.pop("state")
            row = Row(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SuiteError(
                f"{path}, line {place}: is no row of the zoo ({type(error).__name__}: {error}); "
                "move the file away, or name another folder"
            ) from None
        if its_state == state:
            found[row.model, row.batch, row.step, row.mode] = row
    return found


# --- the table


def table_of(rows: Iterable[Row], modes: Sequence[str] = MODES) -> list[dict[str, Any]]:
    """One row for each cell, sorted by model, with ratios of each mode; the summary at the end."""
    kept = list(rows)
    table = []
    for name in dict.fromkeys(row.model for row in kept):
        cells = sorted({(row.step, row.batch) for row in kept if row.model == name})
        for step, batch in cells:
            here = [r for r in kept if (r.model, r.step, r.batch) == (name, step, batch)]
            by_mode = {row.mode: row for row in here}
            counts = next((r for r in here if r.products is not None), None)
            errors = dict.fromkeys(row.error for row in here if row.error)
            notes = [f"{', '.join(r.mode for r in here if r.error == e)}: {e}" for e in errors]
            table.append({
                "model": name, "batch": batch, "step": step,
                **{column: _rounded(of(by_mode[m]) if m in by_mode else None)
                   for m in modes for column, of in _columns(kept, m)},
                "FP8 products": f"{counts.quantized} of {counts.products}" if counts else None,
                "note": "; ".join(notes),
            })  # fmt: skip
    return table + _summary_of(kept, modes)


def _columns(rows: Sequence[Row], mode: str) -> list[tuple[str, Callable[[Row], float | None]]]:
    """The ratios of a mode: after `convert`, and after `tune` where some row has it."""
    found: list[tuple[str, Callable[[Row], float | None]]] = [(mode, lambda row: row.speedup)]
    if any(row.tuned_speedup is not None for row in rows):
        found.append((f"{mode}, tuned", lambda row: row.tuned_speedup))
    return found


SUMMARIES: dict[str, Callable[[list[float]], float]] = {
    "least": min, "geometric mean": statistics.geometric_mean,
}  # fmt: skip


def _summary_of(rows: Sequence[Row], modes: Sequence[str]) -> list[dict[str, Any]]:
    """Least ratio and geometric mean of each step and mode, over all models and batches."""
    summary = []
    for name, summarize in SUMMARIES.items():
        for step in sorted({row.step for row in rows}):
            line: dict[str, Any] = {"model": name, "batch": None, "step": step}
            for mode, (column, of) in ((m, c) for m in modes for c in _columns(rows, m)):
                here = [of(row) for row in rows if (row.step, row.mode) == (step, mode)]
                ratios = [ratio for ratio in here if ratio is not None]
                line[column] = _rounded(summarize(ratios)) if ratios else None
            failed = sum(bool(row.error) for row in rows if row.step == step)
            note = f"{failed} of {sum(row.step == step for row in rows)} failed" if failed else ""
            summary.append(line | {"FP8 products": None, "note": note})
    return summary


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 3)
