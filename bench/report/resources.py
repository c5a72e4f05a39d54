"""Resources of HIP and Triton kernels on AMD GPUs, for ``list kernels --resources``.

They are read from snapshots, which tests compare with the compilers' output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lokakern.errors import DatabaseError
from lokakern.registry.digests import KERNELS_ROOT

Row = dict[str, Any]

# Snapshots and the modules that write them.
SNAPSHOTS = {
    KERNELS_ROOT / "hip" / "resources.json": "tests.kernels.test_hip_compiled",
    KERNELS_ROOT / "triton" / "resources.json": "tests.kernels.test_triton_compiled",
}
# Columns and their names in a snapshot.
COLUMNS = {
    "vgpr": "vector_registers",  # including accumulation registers
    "agpr": "accumulation_registers",
    "sgpr": "scalar_registers",
    "lds_bytes": "local_bytes",
    "scratch_bytes": "scratch_bytes",
    "occupancy": "occupancy",
    "mfma_share": "matrix_share",
}
# What is counted of a whole kernel, for each depth: cycles by what executes them, and the share of
# matrix instructions in them.
DEPTHS = ("k=256", "k=1024", "k=4096")
WHOLE = ("matrix", "vector", "scalar", "local", "memory", "waits", "loop_waits", "share")
# Columns that fit a terminal of 100 characters.
BRIEF = ("kernel", "variant", "architecture", "matrix", "occupancy", "share_k1024", "busy_k1024")
NOTE = (
    "occupancy in waves of a SIMD; share_k1024 is the counted share of matrix instructions in all "
    "cycles, busy_k1024 the simulated one of the time (kernels/hip/README.md); --format csv has "
    "all columns"
)


def resource_rows(*, brief: bool = False) -> list[Row]:
    """A row for each compiled kernel, architecture and variant.

    Args:
        brief: Whether to select the most useful columns and shorten names of instructions.

    Raises:
        DatabaseError: A snapshot is missing or malformed.
    """
    rows = [row for path, writer in SNAPSHOTS.items() for row in _rows_of(path, writer)]
    rows.sort(key=lambda row: (row["kernel"], row["architecture"]))
    return [_brief(row) for row in rows] if brief else rows


def _brief(row: Row) -> Row:
    short = {column: row[column] for column in BRIEF}
    if short["matrix"] is not None:
        words = short["matrix"].replace("v_mfma_", "").replace("f32_", "")
        short["matrix"] = words.replace("_", " ")  # lines break there
    return short


def _rows_of(path: Path, writer: str) -> list[Row]:
    try:
        return list(_read(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DatabaseError(
            f"snapshot {str(path)!r} cannot be read: {type(error).__name__}: {error}; install "
            f"lokakern again, or in a checkout write it with python -m {writer}"
        ) from None


def _read(recorded: dict[str, Any]) -> Iterator[Row]:
    compiler = recorded.pop("compiler")
    for architecture, variants in recorded.items():
        for variant, found in variants.items():
            for kernel in found["kernels"]:
                # The variant's first word is the function, usually part of the kernel's name.
                function, _, rest = variant.partition(" ")
                yield {
                    "kernel": kernel,
                    "variant": rest if function in kernel else variant,
                    "architecture": architecture,
                    "matrix": _matrix(found["matrix"]),
                    **{column: found[name] for column, name in COLUMNS.items()},
                    **_whole(found.get("whole", {})),
                    "busy_k1024": found.get("busy_k1024"),
                    "compiler": compiler,
                }


def _whole(counted: dict[str, dict[str, float]]) -> Row:
    """Such as share_k1024."""
    return {
        f"{name}_{depth.replace('=', '')}": counted.get(depth, {}).get(name)
        for depth in DEPTHS
        for name in WHOLE
    }


def _matrix(instructions: dict[str, int]) -> str | None:
    """Instructions with counts, such as "16 v_mfma_f32_32x32x16_fp8_fp8"."""
    return ", ".join(f"{count} {name}" for name, count in instructions.items()) or None
