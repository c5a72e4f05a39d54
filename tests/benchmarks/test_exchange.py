"""Host time of importing another user's file; `many_rows.py` imports a million rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.many_rows import import_many, write_many


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 10 000 facts."""
    path = tmp_path_factory.mktemp("exchange") / "many.sqlite"
    write_many(path, 10_000)
    return path


def test_importing_a_file_of_others(file: Path, tmp_path: Path, benchmark: Any) -> None:
    """A private copy, every row checked, a new file written and renamed."""

    def import_into_nothing() -> float:
        (tmp_path / "target.sqlite").unlink(missing_ok=True)
        return import_many(file, tmp_path / "target.sqlite")["rows"]

    assert benchmark.pedantic(import_into_nothing, rounds=2) == 10_000
