"""Kernels for AMD GPUs that nobody measured are ordered by cycles counted from instructions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import lokakern
from lokakern.problems import make_problem
from lokakern.registry.register import kernels_for
from lokakern.selection import counted
from lokakern.selection.counted import counted_cycles
from lokakern.types import Format, Granularity, Layout, Operand
from tests.selection.test_amd_dispatch import MI300X, MI350X, OWN, rocm

__all__ = ["rocm"]  # a fixture
NAMES = ("hip.scaled_gemm_row", "triton.scaled_gemm_row")
KINDS = ("matrix", "vector", "scalar", "local", "memory", "waits")


def recorded(cycles: dict[int, int], tile: tuple[int, int], waves: int, name: str) -> Any:
    """A variant whose cycles, of six kinds, make these sums."""
    whole = {f"k={k}": dict.fromkeys(KINDS, total / len(KINDS)) for k, total in cycles.items()}
    return {"kernels": [name], "tile": list(tile), "waves": waves, "whole": whole}


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Write what is recorded of HIP's and of Triton's kernels for gfx942."""

    def write(**variants: list[Any]) -> None:
        for language in counted.LANGUAGES:
            path = tmp_path / language / "resources.json"
            path.parent.mkdir(exist_ok=True)
            numbered = {str(n): each for n, each in enumerate(variants.get(language, []))}
            path.write_text(json.dumps({"compiler": "none", "gfx942": numbered}))
        monkeypatch.setattr(counted, "KERNELS_ROOT", tmp_path)
        counted._variants.cache_clear()

    yield write
    monkeypatch.undo()
    counted._variants.cache_clear()


def problem_of(m: int, n: int, k: int, op: str = "scaled_gemm", **more: Any) -> Any:
    return make_problem(op, (m, n, k), **more)


def test_cycles_are_those_of_the_busiest_simd_in_the_best_tile(snapshots: Any) -> None:
    hip, triton = NAMES
    large = recorded({256: 1000, 4096: 1000 + 3840 * 2}, (128, 128), 4, hip)
    small = recorded({256: 400, 4096: 400 + 3840}, (64, 64), 4, hip)
    wide = recorded({256: 1000, 4096: 1000 + 3840}, (256, 256), 8, triton)
    snapshots(hip=[large, small], triton=[wide])
    one_each = problem_of(128 * 304, 128, 1024)  # blocks of 128 x 128 for all compute units
    assert counted_cycles(hip, one_each, MI300X) == 1000 + 768 * 2
    assert counted_cycles(hip, problem_of(128 * 304 + 1, 128, 1024), MI300X) == 2 * (1000 + 768 * 2)
    assert counted_cycles(hip, problem_of(64, 64, 1024), MI300X) == 400 + 768
    assert counted_cycles(triton, problem_of(64, 64, 1024), MI300X) == 2 * (1000 + 768)
    assert counted_cycles("triton.quantize_row", one_each, MI300X) == math.inf
    assert counted_cycles(hip, one_each, MI350X) == math.inf


def test_what_is_outside_of_the_loop_of_a_norm_is_left_out(snapshots: Any) -> None:
    hip = "hip.gemm_norm_row"
    snapshots(hip=[recorded({256: 5000, 4096: 5000 + 3840}, (64, 256), 4, hip)])
    found = counted_cycles(hip, problem_of(64, 256, 512, "gemm_norm", epilogue="layer"), MI300X)
    assert found == 512


def test_a_norm_of_whole_rows_has_a_tile_that_holds_them(snapshots: Any) -> None:
    narrow = ((64, 64), 4)
    snapshots(
        hip=[recorded({256: 0, 4096: 3840}, *narrow, "hip.gemm_norm_row")],
        triton=[recorded({256: 0, 4096: 3840}, *narrow, "triton.gemm_block_norm_row")],
    )
    problem = problem_of(64, 128, 512, "gemm_norm", epilogue="block_rms(64)")
    assert counted_cycles("hip.gemm_norm_row", problem, MI300X) == math.inf
    assert counted_cycles("triton.gemm_block_norm_row", problem, MI300X) == 512


def dispatched(fp8: Format) -> Any:
    return lokakern.dispatch(
        "scaled_gemm", (4096, 1024, 1024), a=Operand(fp8, Granularity.ROW),
        b=Operand(fp8, Granularity.ROW, Layout.COLUMN),
    )  # fmt: skip


@pytest.mark.parametrize("fewest", NAMES)
def test_dispatch_follows_the_count_and_says_so(fewest: str, rocm: Any, snapshots: Any) -> None:
    rocm(MI300X)
    variants = {
        name.partition(".")[0]: [
            recorded({256: 1000 + 500 * (name != fewest), 4096: 9000}, (128, 128), 4, name)
        ]
        for name in NAMES
    }
    quick = recorded({256: 1, 4096: 2}, (128, 128), 4, "triton.scaled_gemm_row_fast")
    snapshots(hip=variants["hip"], triton=[*variants["triton"], quick])
    choice = dispatched(Format.E4M3FNUZ)
    assert choice.kernel == fewest
    assert choice.is_miss and choice.latency_us is None
    assert "by cycles counted from instructions, not measured: " + fewest in choice.explain()
    assert f"{fewest}, not measured\n" in choice.explain()


@pytest.mark.parametrize("gpu", OWN, ids=str)
def test_without_times_hip_multiplies_on_amd(gpu: Any, rocm: Any) -> None:
    """As shipped: its kernels have the fewest counted cycles."""
    rocm(gpu)
    assert dispatched(OWN[gpu]).kernel == "hip.scaled_gemm_row"


@pytest.mark.parametrize("gpu", OWN, ids=str)
@pytest.mark.parametrize("op", ["scaled_gemm", "gemm_norm"])
def test_every_single_kernel_of_fp8_is_counted(gpu: Any, op: str) -> None:
    names = [
        kernel.name
        for kernel in kernels_for(op, gpu)
        if kernel.language in ("hip", "triton") and not kernel.parts
        and kernel.granularity is not Granularity.NONE
    ]  # fmt: skip
    assert len(names) >= 7
    problem = problem_of(4096, 256, 512, op, **({"epilogue": "layer"} if op == "gemm_norm" else {}))
    assert all(math.isfinite(counted_cycles(name, problem, gpu)) for name in names)
