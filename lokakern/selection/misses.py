"""Misses: calls for which dispatch has no answer.

A miss is logged once. Misses are counted in memory, appended to a file of the user at exit, and
read by ``sweep --from-misses``.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from lokakern.errors import (
    LokakernError,
    MeasurementError,
    MissError,
    UnknownNameError,
    UnsupportedError,
)
from lokakern.problems import make_problem
from lokakern.registry.register import Kernel
from lokakern.registry.schema.row_keys import from_row
from lokakern.selection import dispatcher
from lokakern.selection.remedies import miss_words, plain, sweep_command, why_not_measurable
from lokakern.selection.table import Table
from lokakern.types import Device, Problem

logger = logging.getLogger("lokakern")

ON_MISS = ("bf16", "raise", "measure")
LARGEST_FILE_BYTES = 4 * 2**20  # about 8 000 misses; a larger file is begun anew
MOST_COUNTED = 10_000  # jagged batches have every m
_COUNTS: Counter[tuple[Problem, str]] = Counter()
LOGGED: set[str] = set()  # families of problems whose miss was logged
# Tables whose predictions were logged: their calls, which are frequent, skip the reasons.
_PREDICTING: WeakSet[Table] = WeakSet()


def check_on_miss(op: str, on_miss: str) -> None:
    if on_miss not in ON_MISS:
        raise UnknownNameError(
            f"{op}: on_miss is {on_miss!r}; expected one of {', '.join(ON_MISS)}"
        )


def after_miss(table: Table, m: int, on_miss: str) -> Kernel | None:
    """Handle a miss: log it once, record it in the ledger and return the kernel to use.

    That is the unquantized one, or the one that is predicted to be faster.

    Misses of frozen choices are not recorded, because no database was asked.

    Returns:
        None if the problem was measured now, so that dispatch has an answer.

    Raises:
        MissError: ``on_miss`` is "raise".
        MeasurementError: ``on_miss`` is "measure" and the sweep failed or is refused.
        UnsupportedError: No unquantized kernel runs here.
    """
    problem = replace(table.problem, m=m)
    if on_miss == "bf16" and table in _PREDICTING:
        record(problem, table.device)
        return table.kernel_at(m)
    pick = table.pick(m)
    words = f"{problem.op}: {problem}: {miss_words(table, pick, m)}"
    if on_miss == "raise":
        raise MissError(words)
    if on_miss == "measure":
        if table.origin is not None:
            raise MeasurementError(
                f'{problem.op}: on_miss="measure" is refused while answers are frozen, because '
                f"what is measured would not be read: {words}"
            )
        measure(problem)
        dispatcher.use_snapshot(None)
        return None
    if table.origin is None:
        record(problem, table.device)
    family = str(replace(problem, m=0))
    if family not in LOGGED:
        LOGGED.add(family)
        name = pick.name + (f" (predicted: {pick.prediction})" if pick.prediction else "")
        logger.warning("using %s: %s", name, words)
    kernel = pick.candidate.kernel if pick.candidate else None
    if pick.prediction is not None:
        _PREDICTING.add(table)
    if kernel is None:
        raise UnsupportedError(f"{problem.op}: {problem}: no kernel runs on {table.device.product}")
    return kernel


def record(problem: Problem, device: Device) -> None:
    """Count a miss."""
    if not _COUNTS:
        atexit.register(save)
    key = (problem, device.product)
    if key in _COUNTS or len(_COUNTS) < MOST_COUNTED:
        _COUNTS[key] += 1


def ledger_path() -> Path:
    """The ledger: ``misses.jsonl`` beside the user's database."""
    from lokakern.registry.storage.paths import user_database

    return user_database().with_name("misses.jsonl")


def save() -> None:
    """Append the counted misses to the ledger; they are lost if it cannot be written."""
    lines = "".join(
        json.dumps({"problem": plain(problem), "device": device, "count": count}) + "\n"
        for (problem, device), count in _COUNTS.items()
    )
    _COUNTS.clear()
    try:
        path = ledger_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LARGEST_FILE_BYTES:
            path.unlink()
        # One write of whole lines in append mode, so that processes do not interleave.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), "a") as file:
            file.write(lines)
    except (OSError, LokakernError):
        return


_UNREADABLE = (
    ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, LokakernError
)  # fmt: skip


def _problem_of(row: dict[str, Any]) -> Problem:
    problem = from_row(Problem, row)
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k, "batch": problem.batch}
    if any(type(size) is not int or size < 1 for size in sizes.values()):
        raise ValueError(f"sizes are {sizes}")
    make_problem(problem.op, problem.shape)  # checks the op and its number of sizes
    return problem


def read() -> list[tuple[Problem, int]]:
    """The measurable problems of the ledger with their counts, most frequent first."""
    counts: Counter[Problem] = Counter()
    try:
        text = ledger_path().read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            row = json.loads(line)
            problem = _problem_of(row["problem"])
            if why_not_measurable(problem) is None:
                counts[problem] += int(row["count"])
        except _UNREADABLE:
            continue  # a torn line, or a file of another program
    return counts.most_common()


def parse(text: str) -> Problem:
    """Parse a problem as `sweep_command` writes it.

    Raises:
        MeasurementError: The text is no problem.
    """
    try:
        return _problem_of(json.loads(text))
    except _UNREADABLE as error:
        raise MeasurementError(
            f"--problem is {text!r}, which is no problem ({error}); expected what a miss printed"
        ) from None


def measure(problem: Problem) -> None:
    """Sweep one problem in another process, into the user's database.

    Raises:
        MeasurementError: The sweep failed or does not support the layout, or torch.distributed is
            initialized (ranks would then choose differently).
    """
    command = sweep_command(problem)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise MeasurementError(
            f'{problem.op}: on_miss="measure" is refused while torch.distributed is initialized, '
            f"because ranks would choose different kernels; run {command} before"
        )
    reason = why_not_measurable(problem)
    if reason is not None:
        raise MeasurementError(
            f"{problem.op}: {problem} cannot be measured: {reason}; copy it first"
        )
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 5):  # 5: some kernel failed, which is a result, too
        raise MeasurementError(
            f"{problem.op}: {command} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
