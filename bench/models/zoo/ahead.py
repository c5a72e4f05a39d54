"""Compile cells of the zoo in several processes before they are timed one by one.

Compilation takes most of a table's time, and one core. Inductor keeps the graphs on disk, where the
process that times finds them. It still chooses Triton's configurations itself, alone on the GPU.
Whether to pad a product Inductor decides while it compiles, by times that other processes disturb.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from typing import Any

from lokakern.bench.models.zoo.cell import Cell, compile_cell
from lokakern.measure.timing import status_and_reason


def compile_ahead(
    cells: Sequence[tuple[Cell, Sequence[str]]],
    device: str,
    budget: float,
    jobs: int,
    *,
    end: float | None = None,
    database: str | None = None,
    say: Callable[[str], None] = lambda _text: None,
    made: Callable[[int], Executor] | None = None,
) -> None:
    """Compile cells, as many at once as there are jobs.

    One that fails is told; its measurement says why.

    Args:
        cells: Cells, each with some of `lokakern.bench.models.zoo.cell.MODES`.
        device: Where they will run, such as "cuda".
        budget: As of `lokakern.bench.models.zoo.cell.measure`.
        jobs: Processes.
        end: Of the clock `time.monotonic`; no cell begins after it.
        database: What these read beside the shipped files; None: as this process by default.
        say: Called with progress messages.
        made: Makes the processes; None: each compiles one cell.
    """
    threads = max(1, (os.cpu_count() or 1) // jobs)
    executor = (made or _processes)(jobs)
    try:
        asked = {
            executor.submit(
                compile_one, cell, tuple(modes), device, budget, threads, database
            ): cell
            for cell, modes in cells
        }
        for place, done in enumerate(as_completed(asked)):
            cell, why = asked[done], ""
            try:
                done.result()
            except Exception as error:  # a compiler may raise anything
                why = f": {status_and_reason(error)[1]}"
            say(f"compiled {place + 1}/{len(asked)}: {cell.model}, batch {cell.batch}, "
                f"{cell.step}{why}")  # fmt: skip
            if end is not None and time.monotonic() >= end:
                break
    finally:
        executor.shutdown(cancel_futures=True)  # after an interruption


def compile_one(
    cell: Cell,
    modes: Sequence[str],
    device: str,
    budget: float,
    threads: int,
    database: str | None,
) -> None:
    """`compile_cell` in a process of its own, with so many threads of Inductor."""
    import torch
    from torch._inductor import config

    if database is not None:
        os.environ["LOKAKERN_DB"] = database
    settings: Any = config
    # Configurations that were chosen while others used the GPU are not kept.
    with settings.patch(autotune_local_cache=False, compile_threads=threads):
        compile_cell(cell, modes, torch.device(device), budget)


def _processes(jobs: int) -> Executor:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    return ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1)
