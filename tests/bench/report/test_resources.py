"""`list kernels --resources`: every kernel for AMD GPUs, from possibly damaged snapshots."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lokakern.bench.cli.main import app
from lokakern.bench.report import resources
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.render import terminal

ARCHITECTURES = {"gfx942", "gfx950"}
PRODUCTS = ("scaled_gemm", "gemm_norm", "gemm_block_norm")
SHORT = json.dumps({"compiler": "clang", "gfx942": {"quantize": {"kernels": ["hip.quantize_row"]}}})


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app(("list", "kernels", "--resources", *words), prog_name="python -m lokakern.bench")
    found = capsys.readouterr()
    return int(ended.value.code or 0), found.out, found.err


def test_every_kernel_is_listed_for_every_amd_gpu_it_claims(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_kernels()
    code, out, err = run(capsys, "--json")
    assert (code, err) == (0, "")
    claimed = {
        (kernel.name, architecture)
        for kernel in KERNELS.values()
        if kernel.language in ("hip", "triton") and not kernel.parts
        for architecture in kernel.architectures & ARCHITECTURES
    }
    rows = json.loads(out)
    assert {(row["kernel"], row["architecture"]) for row in rows} == claimed
    names = [(row["kernel"], row["architecture"], row["variant"]) for row in rows]
    assert len(set(names)) == len(names)


def test_matrix_instructions_are_in_loops_and_scratch_is_unused() -> None:
    for row in resources.resource_rows():
        assert row["scratch_bytes"] == 0, row
        assert 0 <= row["agpr"] <= row["vgpr"] <= 512 and 1 <= row["occupancy"] <= 8, row
        if row["kernel"].partition(".")[2].startswith(PRODUCTS):
            assert "v_mfma_" in row["matrix"] and 0 < row["mfma_share"] < 1, row
        else:
            assert row["matrix"] is None and row["mfma_share"] is None, row


def test_whole_kernels_are_counted_where_they_multiply_fp8() -> None:
    for row in resources.resource_rows():
        shares = [row[f"share_k{k}"] for k in (256, 1024, 4096)]
        multiplies = row["kernel"].partition(".")[2].startswith(PRODUCTS)
        if not multiplies or row["kernel"].endswith("bf16"):
            assert [*shares, row["busy_k1024"]] == [None] * 4, row
            continue
        assert 0 < shares[0] < shares[1] < shares[2] < row["mfma_share"], row
        assert 0 < row["busy_k1024"] < 1, row
        assert row["matrix_k4096"] == 4 * row["matrix_k1024"] == 16 * row["matrix_k256"], row


@pytest.mark.parametrize(
    ("architecture", "tile", "least"),
    [("gfx942", 128, 0.63), ("gfx942", 256, 0.71), ("gfx950", 256, 0.67)],
)
def test_most_cycles_of_the_largest_tile_multiply(
    architecture: str, tile: int, least: float
) -> None:
    """At k = 1024, and while they do, nothing is waited for."""
    (row,) = [
        row
        for row in resources.resource_rows()
        if (row["kernel"], row["architecture"]) == ("hip.scaled_gemm_row", architecture)
        and row["variant"] == f"TILE_M={tile} TILE_N={tile} SCALES=0"
    ]
    assert row["share_k1024"] >= least and row["loop_waits_k1024"] == 0


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_hip_keeps_matrix_cores_busier_than_triton(architecture: str) -> None:
    """In the best tile of each, simulated: the order in which `dispatch` takes them by counts."""
    busy = {"hip": 0.0, "triton": 0.0}
    for row in resources.resource_rows():
        language, _, name = row["kernel"].partition(".")
        if name == "scaled_gemm_row" and row["architecture"] == architecture:
            busy[language] = max(busy[language], row["busy_k1024"])
    assert busy["hip"] > 1.4 * busy["triton"] > 0


def has_gelu(row: dict[str, Any]) -> bool:
    """Which takes a fifth more of vector instructions than silu."""
    return any(f"ACTIVATION={which} " in row["variant"] for which in (4, 5))


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_products_take_two_fifths_of_norms_of_256_columns(architecture: str) -> None:
    """At k = 1024, with bfloat16 and FP8, with and without silu, without waits in the loop."""
    rows = [
        row
        for row in resources.resource_rows()
        if (row["kernel"], row["architecture"]) == ("hip.gemm_norm_row", architecture)
        and row["variant"].startswith("TILE_N=256 ")
        and not has_gelu(row)
    ]
    assert len(rows) == 4
    for row in rows:
        least = {"gfx942": 0.56, "gfx950": 0.40}[architecture]
        assert row["share_k1024"] >= least and row["loop_waits_k1024"] == 0, row


@pytest.mark.parametrize(
    ("architecture", "kernel", "variant", "least"),
    [("gfx942", "scaled_gemm_block", "TILE_M=128 TILE_N=128", 0.53),
     ("gfx942", "scaled_gemm_block", "TILE_M=256 TILE_N=256", 0.60),
     ("gfx950", "scaled_gemm_block", "TILE_M=256 TILE_N=256", 0.50),
     ("gfx950", "scaled_gemm_mx", "TILE_M=256 TILE_N=256", 0.66),
     ("gfx942", "gemm_norm_block", "TILE_N=256", 0.53),
     ("gfx950", "gemm_norm_block", "TILE_N=256", 0.41),
     ("gfx950", "gemm_norm_row", "TILE_N=64", 0.24)],
)  # fmt: skip
def test_shares_stay_and_loops_do_not_wait(
    architecture: str, kernel: str, variant: str, least: float
) -> None:
    """At k = 1024, and nothing in the loop is waited for."""
    rows = [
        row
        for row in resources.resource_rows()
        if (row["kernel"], row["architecture"]) == (f"hip.{kernel}", architecture)
        and row["variant"].startswith(f"{variant} ")
        and not has_gelu(row)
    ]
    assert rows
    for row in rows:
        assert row["share_k1024"] >= least and row["loop_waits_k1024"] == 0, row


def test_table_csv_and_json_agree(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, "--json")[1])
    read = list(csv.DictReader(io.StringIO(run(capsys, "--format", "csv")[1])))
    assert read == [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows]
    table = run(capsys)[1]
    assert all(row["kernel"] in table and row["variant"] in table for row in rows)
    assert "16 scale 16x16x128 f8f6f4" in table


def test_a_table_fits_100_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "Console", lambda **given: Console(**given | {"width": 100}))
    code, out, _ = run(capsys)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    assert [word for word in out.splitlines()[0].split() if word.isidentifier()] == [
        *resources.BRIEF
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'compiler'"),
        ('{"compiler": "clang", "gfx942": 1}', "AttributeError"),
        (SHORT, "KeyError: 'matrix'"),
    ],
)
def test_an_unreadable_snapshot_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str | None,
    why: str,
) -> None:
    path = tmp_path / "resources.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(resources, "SNAPSHOTS", {path: "tests.kernels.test_hip_compiled"})
    code, out, err = run(capsys)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"DatabaseError: snapshot {str(path)!r} cannot be read: {why}")
    assert "python -m tests.kernels.test_hip_compiled" in err
