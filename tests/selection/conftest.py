"""Fixtures of tests on measurements of this machine and imported ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lokakern.selection import dispatcher
from tests.support.imported_measurements import ELSEWHERE, HERE, own
from tests.support.measurements import BF16, time


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A database with bf16's times of two layers, and no shipped file."""
    path = tmp_path / "mine.sqlite"
    monkeypatch.setenv("LOKAKERN_DB", str(path))
    monkeypatch.setattr("lokakern.registry.storage.paths.shipped_databases", list)
    own(path, time(BF16, HERE, 20.0), time(BF16, ELSEWHERE, 40.0))
    yield path
    dispatcher.use_snapshot(None)
