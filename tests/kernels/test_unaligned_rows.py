"""Rows that start anywhere are written whole, once, and in aligned pieces: on the CPU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lokakern.kernels.cuda import scaled_gemm_unaligned
from tests.support.cuda_host_launch import COMPILER, HEADER, OPTIONS, runtime, sources
from tests.support.sharing import made_once

HARNESS = HEADER.with_name("unaligned_rows_on_host.cpp")
ROWS = Path(scaled_gemm_unaligned.SOURCE).with_name("unaligned_rows.cuh")


@pytest.fixture(scope="module")
def harness() -> Any:
    """`wrong_copies` of the C++ harness."""
    copies = {path.name: path for path in (HEADER, HARNESS, ROWS)}
    folder = sources("unaligned_rows", copies | {"ptx.cuh": HEADER})
    command = [*COMPILER, *OPTIONS, "-shared", folder / HARNESS.name, runtime(), "-o"]
    library = made_once(folder / "unaligned_rows.so",
                        lambda to: subprocess.run([*command, to], check=True))  # fmt: skip
    return ctypes.CDLL(str(library)).wrong_copies


@pytest.mark.parametrize(
    ("item", "pieces"),
    [(2, 1), (2, 2), (2, 3), (2, 8), (2, 16), (2, 32), (4, 2), (4, 6), (4, 16)],
)
def test_every_element_of_unaligned_rows_is_written_once(
    harness: Any, item: int, pieces: int
) -> None:
    """Every alignment and length, of rows side by side and with a gap, and tiles with few rows."""
    for offset in range(0, 16, item):
        widest = pieces * 16 // item
        for columns in (widest, widest + 1, widest + 3):
            for rows in (0, 1, 11, 16):
                wrong = harness(item, 16, pieces, offset, columns * item, rows)
                assert wrong == 0, f"offset {offset}, {columns} columns, {rows} rows"


@pytest.mark.parametrize(("item", "columns"), [(2, 1), (2, 13), (2, 31), (4, 1), (4, 13)])
def test_short_rows_side_by_side_are_written_as_one(harness: Any, item: int, columns: int) -> None:
    for offset in range(0, 16, item):
        assert harness(item, 1, columns * item, offset, 0, 1) == 0
        assert harness(item, 1, columns * item, offset, 0, 0) == 0
