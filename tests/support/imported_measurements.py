"""A database of this machine's measurements and of imported ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lokakern.registry.sharing.import_file import import_file
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher
from lokakern.selection.dispatcher import Choice, dispatch
from tests.support.measurements import H200, Book, gemm

M = 4096
HERE, ELSEWHERE = gemm(M), gemm(M, n=1024)
DEEPER = gemm(M, k=1024)  # no error of another k stands for that of a problem


def own(path: Path, *rows: Any) -> None:
    Book(path).write(*rows)
    dispatcher.use_snapshot(None)


def others(path: Path, *rows: Any) -> None:
    """Import what somebody else measured."""
    theirs = path.with_name(f"theirs{len(os.listdir(path.parent))}.sqlite")
    Book(theirs).write(*rows)
    import_file(theirs, path)
    dispatcher.use_snapshot(None)


def chosen(budget: float = 0.06, m: int = M) -> Choice:
    dispatcher.use_snapshot(load_snapshot())
    return dispatch("gemm", (m, 512, 512), budget, device=H200)
