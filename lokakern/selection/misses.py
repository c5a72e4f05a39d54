"""Misses: problems without measurements, how to measure them, and what was measured instead.

They are counted in memory, appended to a file of the user at exit, and read by
``sweep --from-misses``.
"""

from __future__ import annotations

import atexit
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lokakern.errors import LokakernError, MeasurementError
from lokakern.problems import make_problem
from lokakern.registry.schema.row_keys import from_row, row_of
from lokakern.types import Device, Layout, Operand, Problem, alignment_of

if TYPE_CHECKING:
    from lokakern.registry.snapshot.snapshot import Snapshot

LARGEST_FILE_BYTES = 4 * 2**20  # about 8 000 misses; a larger file is begun anew
MOST_COUNTED = 10_000  # jagged batches have every m
_MOST_NEIGHBORS = 3  # in a message
_SHAPE = ("op", "m", "n", "k")
_COUNTS: Counter[tuple[Problem, str]] = Counter()


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
        json.dumps({"problem": _plain(problem), "device": device, "count": count}) + "\n"
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


def _plain(problem: Problem) -> dict[str, Any]:
    return {name: value for name, value in row_of(problem).items() if name != "key"}


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


def sweep_command(problem: Problem) -> str:
    """The command that measures a problem."""
    sizes = ",".join(map(str, problem.shape))
    if problem.op == "gemm" and problem == make_problem(problem.op, problem.shape):
        return f"python -m lokakern.bench sweep --shape {sizes}"
    return f"python -m lokakern.bench sweep --problem {shlex.quote(json.dumps(_plain(problem)))}"


def why_not_measurable(problem: Problem) -> str | None:
    """Why a sweep cannot allocate operands with the layout of the problem; None if it can."""
    natural = _natural_alignment(problem.m, problem.k, problem.a)
    if problem.a.layout is not Layout.ROW or problem.a.alignment != natural:
        return "a is not row-major and aligned as an allocation of its own is"
    if problem.b is not None and problem.b.layout is not Layout.COLUMN:
        return "b is not weight.t() of a row-major weight"
    if problem.b is not None:
        natural = _natural_alignment(problem.n, problem.k, problem.b)
        if problem.b.alignment != natural:
            return "b is not aligned as an allocation of its own is"
    return "out is a slice" if problem.out_strided else None


def _natural_alignment(rows: int, columns: int, operand: Operand) -> int:
    if operand.format.is_fp8:  # rows of FP8 are padded
        return 16
    return alignment_of(columns * operand.format.dtype.itemsize) if rows > 1 else 16


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


def measured_instead(facts: Snapshot, problem: Problem, device: Device, regime: str) -> str:
    """The measured problems with the same n and k that differ least, with their arguments.

    Returns:
        Such as "n=512 k=512 was measured on NVIDIA H200 only with bias: ask with epilogue='bias'";
        "" if there is none, or the problem itself was measured.
    """
    asked = replace(problem, m=0)
    found: dict[tuple[tuple[str, ...], ...], tuple[str, str]] = {}
    for other, its_regime in facts.timed_like(device, problem):
        words = [_words(name, other) for name in _differing(asked, other)]
        if its_regime != regime:
            words.append((f"in {its_regime}", f"regime={its_regime!r}"))
        if not words:
            return ""
        found[tuple(words)] = " ".join(w for w, _ in words), ", ".join(a for _, a in words)
    if not found:
        return ""
    few = min(map(len, found))
    nearest = sorted(told for words, told in found.items() if len(words) == few)[:_MOST_NEIGHBORS]
    ways = dict.fromkeys(way for _, way in nearest)
    told = " or ".join(told for told, _ in nearest)
    return (
        f"{sizes_of(problem)} was measured on {device.product} only {told}: ask with "
        + " or ".join(ways)
    )


def sizes_of(problem: Problem) -> str:
    """The sizes of a problem without m."""
    return f"n={problem.n} k={problem.k}" if problem.b is not None else f"k={problem.k}"


def _differing(asked: Problem, other: Problem) -> list[str]:
    """Names of differing fields; a prepared weight implies another b."""
    names = [
        field.name
        for field in fields(Problem)
        if field.name not in _SHAPE and getattr(asked, field.name) != getattr(other, field.name)
    ]
    return [name for name in names if not (name == "b" and "prepared" in names)]


def _words(name: str, other: Problem) -> tuple[str, str]:
    """The description of a differing field of a measured problem, and the argument for it."""
    value = getattr(other, name)
    if name == "prepared":
        if not value:
            return "not prepared", "prepared=False"
        assert other.b is not None
        return f"prepared ({other.b.granularity})", "prepared=True"
    if name == "epilogue":
        return (f"with {value}" if value != "none" else "without epilogue"), f"epilogue={value!r}"
    if isinstance(value, Operand):
        return f"with {name}={value}", f"{name}=Operand.parse({str(value)!r})"
    said = str(value) if isinstance(value, int) else repr(str(value))
    return f"with {name}={value}", f"{name}={said}"
