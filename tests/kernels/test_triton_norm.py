"""Problems that Triton kernels with a norm accept, and their compiled variants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lokakern.build.prebuild import jobs_for
from lokakern.registry.register import kernel_named, kernels_for
from lokakern.types import Device, Format, Granularity, Layout, Operand, Problem, Rejected

pytest.importorskip("triton", reason="needs Triton")
from lokakern.kernels.triton import gemm_norm, norm_pieces
from lokakern.triton_job import TritonJob

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
MI355X = Device("amd", "AMD Instinct MI355X", "gfx950", 256, 288)
B200 = Device("nvidia", "NVIDIA B200", "sm_100", 148, 180)
KINDS = {
    "tensor": (Granularity.TENSOR, Granularity.TENSOR),
    "row": (Granularity.ROW, Granularity.ROW),
    "block": (Granularity.GROUP, Granularity.BLOCK),
    "bf16": (Granularity.NONE, Granularity.NONE),
}
FP8, ROW, GROUP, TENSOR = Format.E4M3FN, Granularity.ROW, Granularity.GROUP, Granularity.TENSOR


def product(
    kind: str,
    epilogue: str,
    n: int = 256,
    m: int = 4096,
    k: int = 512,
    out: Granularity = Granularity.NONE,
    form: Format = FP8,
) -> Problem:
    a, b = (
        Operand(Format.BFLOAT16 if g is Granularity.NONE else form, g, layout)
        for g, layout in zip(KINDS[kind], (Layout.ROW, Layout.COLUMN), strict=True)
    )
    return Problem(
        op="gemm_norm", m=m, n=n, k=k, a=a, b=b, epilogue=epilogue, out_granularity=out,
        out_format=Format.BFLOAT16 if out is Granularity.NONE else form,
    )  # fmt: skip


def rows(epilogue: str, k: int = 512, out: Granularity = ROW) -> Problem:
    return Problem(
        op="norm_quantize", m=4096, n=1, k=k, a=Operand(Format.BFLOAT16), epilogue=epilogue,
        out_granularity=out, out_format=Format.BFLOAT16 if out is Granularity.NONE else FP8,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stem", "epilogue", "n", "out"),
    [
        ("gemm_norm", "bias+layer+affine+hardswish", 512, ROW),
        ("gemm_norm", "residual+rms+gate", 1, GROUP),
        ("gemm_norm", "bias+cross+residual_last", 479, Granularity.NONE),
        ("gemm_block_norm", "block_rms(256)+hardswish", 2048, TENSOR),
        ("gemm_block_norm", "bias+block_rms(128)+affine+silu", 384, GROUP),
        ("gemm_block_norm", "block_rms(64)", 64, ROW),
    ],
)
def test_they_support_rows_that_fit_in_a_program(
    kind: str, stem: str, epilogue: str, n: int, out: Granularity
) -> None:
    kernel = kernel_named(f"triton.{stem}_{kind}")
    assert not isinstance(kernel.supports(product(kind, epilogue, n, out=out), H200), Rejected)
    takers = [
        k.name
        for k in kernels_for("gemm_norm", H200)
        if k.language == "triton" and not k.parts
        and not isinstance(k.supports(product(kind, epilogue, n, out=out), H200), Rejected)
    ]  # fmt: skip
    assert takers == [kernel.name]


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("gemm_norm_row", product("row", "layer", 513), "up to 512 columns, not 513"),
        ("gemm_norm_row", product("row", "block_rms(64)"), "whole rows, not block_rms"),
        ("gemm_norm_row", product("tensor", "layer"), "takes row x row scales"),
        ("gemm_norm_row", product("row", "layer", form=Format.E5M2), "E5M2 by E5M2"),
        ("gemm_norm_row", product("row", "layer", form=Format.E4M3FNUZ), "does not multiply"),
        ("gemm_norm_bf16", product("bf16", "layer", k=2**22 + 8), "2^22"),
        ("gemm_block_norm_row", product("row", "layer"), "blocks, not layer"),
        ("gemm_block_norm_row", product("row", "block_rms(48)", 96), "blocks of 32, 64, 128, 256"),
        ("gemm_block_norm_row", product("row", "block_rms(64)", 96), "not 64 of 96"),
        ("gemm_block_norm_row", product("row", "block_rms(64)", out=ROW), "64 of the 256"),
        ("gemm_block_norm_row", product("row", "block_rms(64)", out=GROUP), "not of 64"),
        ("norm_quantize", rows("layer", 8193), "up to 8192 elements"),
        ("norm_quantize", rows("block_rms(48)", 96), "powers of two that divide"),
        ("norm_quantize", rows("layer", out=Granularity.BLOCK), "no 128x128 scales"),
        ("norm_quantize", replace(rows("layer"), a=Operand(FP8, ROW)), "bfloat16 or float32"),
    ],
)
def test_unsupported_problems_are_rejected_with_a_reason(
    name: str, problem: Problem, reason: str
) -> None:
    verdict = kernel_named(f"triton.{name}").supports(problem, H200)
    assert isinstance(verdict, Rejected) and reason in verdict.reason, verdict


@pytest.mark.parametrize("device", [H200, B200, MI300X, MI355X], ids=str)
def test_m_is_in_no_compile_key(device: Device) -> None:
    """Over all m a layer compiles one kernel for each tile of the rule, a norm one."""
    fp8 = Format.E4M3FNUZ if device is MI300X else FP8
    kernel = kernel_named("triton.gemm_block_norm_row")
    problems = [
        replace(
            product("row", "bias+block_rms(256)+affine+hardswish", 1024, m, 1024, TENSOR),
            a=Operand(fp8, ROW), b=Operand(fp8, ROW, Layout.COLUMN), out_format=fp8,
        )
        for m in (1, 2, 16, 129, 1000, 4096, 32768, 99999)
    ]  # fmt: skip
    found = jobs_for(problems, device, [kernel])
    assert len(found) == 2 and all(isinstance(job, TritonJob) for job in found)
    assert {job.constants[1:3] for job in found} == {("rms", 1e-5)}  # type: ignore[attr-defined]
    norm = kernel_named("triton.norm_quantize")
    shapes = [replace(rows("layer+affine"), m=m, out_format=fp8) for m in (1, 7, 16, 5000)]
    assert len(jobs_for(shapes, device, [norm])) == 1


@pytest.mark.parametrize("columns", [1, 32, 33, 64, 128, 129, 256, 257, 384, 385, 512])
@pytest.mark.parametrize("item_bytes", [1, 2])
def test_tiles_hold_all_columns_and_fit_the_hardware(columns: int, item_bytes: int) -> None:
    """227 KiB of an SM, 64 KiB of a CDNA 3 compute unit, where one stage is in registers."""
    for m in (1, 4096, 99999):
        for k in (64, 4096):
            for hopper, amd in ((True, False), (False, False), (False, True)):
                tile = gemm_norm.tile_for(
                    m, columns, 1, k, item_bytes, 132,
                    light=columns == 256, hopper=hopper, amd=amd,
                )  # fmt: skip
                width = tile.part_n * tile.parts
                stages = tile.num_stages - amd
                stage = (tile.block_m + width) * tile.block_k * item_bytes
                assert columns <= width < columns + 128
                assert stages * stage <= (64 if amd else 227) * 1024, tile
                # Sums of a thread, twice over for one part.
                threads = (64 if amd else 32) * tile.num_warps
                assert tile.block_m * (width + tile.part_n) / threads <= 192, tile


@pytest.mark.parametrize(
    ("sizes", "grain"), [((1000, 1008), 8), ((1024, 1024), 1), ((1000, 1001), 1), ((0, 24), 8)]
)
def test_grain_is_8_where_8_but_not_16_divides_all_row_lengths(
    sizes: tuple[int, ...], grain: int
) -> None:
    assert norm_pieces.grain(*sizes) == grain
