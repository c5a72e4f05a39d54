"""The ledger of misses: which problems dispatch was asked and nothing was measured for.

Counted in memory, appended to a file of the user at exit, read by ``sweep --from-misses``.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from pathlib import Path

from lokakern.types import Device, Problem

LARGEST_FILE_BYTES = 4 * 2**20  # about 20 000 misses; older ones were asked for long enough
_COUNTS: Counter[tuple[Problem, str]] = Counter()


def record(problem: Problem, device: Device) -> None:
    """Count a miss."""
    if not _COUNTS:
        atexit.register(save)
    _COUNTS[(problem, device.product)] += 1


def ledger_path() -> Path:
    """Where misses are kept: ``misses.jsonl`` beside the user's database."""
    from lokakern.registry.store import user_database

    return user_database().with_name("misses.jsonl")


def save() -> None:
    """Append the counted misses to the ledger; if it cannot be written, only they are lost."""
    if not _COUNTS:
        return
    lines = "".join(
        json.dumps(
            {
                "op": problem.op,
                "shape": problem.shape,
                "a": str(problem.a),
                "b": str(problem.b) if problem.b else None,
                "prepared": problem.prepared,
                "epilogue": problem.epilogue,
                "device": device,
                "count": count,
            }
        )
        + "\n"
        for (problem, device), count in _COUNTS.items()
    )
    _COUNTS.clear()
    path = ledger_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LARGEST_FILE_BYTES:
            path.unlink()
        # One write of whole lines to a file opened for appending: processes do not mix.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), "a") as file:
            file.write(lines)
    except OSError:
        return


def read() -> list[tuple[str, tuple[int, ...], int]]:
    """Op, shape and count of each miss with usual operands, most frequent first."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    try:
        text = ledger_path().read_text(encoding="utf-8")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            row = json.loads(line)
            counts[(str(row["op"]), tuple(int(size) for size in row["shape"]))] += int(row["count"])
        except (ValueError, KeyError, TypeError):
            continue  # a torn line, or a file of another program
    return [(op, shape, count) for (op, shape), count in counts.most_common()]
