"""Products in tiles whose rows are the weight's: every tile, and the rule that chooses one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lokakern import numerics
from lokakern.driver import CudaLaunch
from lokakern.formats import Format
from lokakern.kernels.cuda import scaled_gemm, scaled_gemm_fast, tiles
from lokakern.kernels.cuda import scaled_gemm_turned as kernel
from lokakern.kernels.cuda.fast_tiles import FastTile, askew
from lokakern.kernels.cuda.tiles import Kind
from lokakern.registry.register import (
    FAST_KERNEL_ERR_BOUND,
    KERNELS,
    PROMOTED_KERNEL_ERR_BOUND,
    load_kernels,
)
from lokakern.types import PLAIN, Epilogue, Granularity, QuantizedTensor
from lokakern.workloads.drawn_sizes import drawn_sizes
from tests.support.fp8_rows import drawn

load_kernels()
H200_SMS = 132
USUAL_TILE = FastTile(128)  # of the output as it is
# Each width, shape and way to share operands.
TILES = (
    *(FastTile(width) for width in (64, 80, 112, 128, 160, 208, 256)),
    *(FastTile(width, 1) for width in (64, 96, 144, 176, 224)),
    *(FastTile(width, 3, chunks=1) for width in (64, 112, 128, 160, 192)),
    FastTile(96, above=2), FastTile(224, along=2), FastTile(160, above=2, along=2),
    FastTile(144, 3, chunks=1, above=2, along=2), FastTile(128, 1, along=2),
)  # fmt: skip
PROMOTED_TILES = (
    *(FastTile(width) for width in (80, 112, 128, 160)), FastTile(64, 1),
    FastTile(192, 1, above=2), FastTile(96, 3, chunks=1, along=2),
    FastTile(192, above=2, along=2),
)  # fmt: skip
ALL_TILES = (*((tile, False) for tile in TILES), *((tile, True) for tile in PROMOTED_TILES))
FEW_TILES = (*ALL_TILES[16:22], *ALL_TILES[-3:])  # clusters, and promoted ones
# One tile; ends of pairs, of columns and of steps; several tiles of each block; steps that the ring
# has as many of, and one more; bands of a weight that the L2 does not hold.
SIZES = (
    (1, 72, 16), (128, 128, 128), (129, 136, 144), (200, 328, 1040), (257, 1000, 768),
    (3000, 2056, 896), (20000, 264, 272), (600, 136, 3984), (300, 328, 48), (700, 8200, 2064),
)  # fmt: skip


def launched(
    tile: FastTile, promotes: bool, a: Any, b: Any, out: Any, bias: Any = None,
    epilogue: Epilogue = PLAIN,
) -> Any:  # fmt: skip
    """The output of a product by a turned tile."""
    (m, n), k = out.shape, a.data.shape[1]
    kind = scaled_gemm._kind_of("row", (a.data,), b.data.t(), out, bias, epilogue)
    plan = kernel.make_plan(m, n, k, kind, tile, H200_SMS, promotes)
    kernel.run(plan, a.data, a.scale, b.data.t(), b.scale, out, bias)
    return out


def usual(
    promotes: bool, a: Any, b: Any, out: Any, bias: Any = None, epilogue: Epilogue = PLAIN
) -> Any:
    """The same by a tile of scaled_gemm_fast.py."""
    (m, n), k = out.shape, a.data.shape[1]
    kind = scaled_gemm._kind_of("row", (a.data,), b.data.t(), out, bias, epilogue)
    plan = scaled_gemm_fast.make_plan(m, n, k, kind, USUAL_TILE, H200_SMS, promotes)
    scaled_gemm.run(
        plan, kind, m, 1, (a.data,), (a.scale,), b.data.t(), b.scale, out, bias, epilogue
    )
    return out


@pytest.mark.gpu
@pytest.mark.parametrize(("tile", "promotes"), ALL_TILES, ids=str)
def test_a_tile_multiplies_every_size(tile: FastTile, promotes: bool) -> None:
    roundoff = Format.BFLOAT16.unit_roundoff
    bound = PROMOTED_KERNEL_ERR_BOUND if promotes else FAST_KERNEL_ERR_BOUND
    for seed, (m, n, k) in enumerate(SIZES):
        a, b = drawn(m, n, k, seed)
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        launched(tile, promotes, a, b, out)
        left, right = numerics.dequantize(a).double(), numerics.dequantize(b).double().t()
        error = numerics.kernel_error(out, left @ right, left.abs() @ right.abs(), roundoff)
        assert error.maximum <= bound, (m, n, k)
        same = usual(promotes, a, b, torch.empty_like(out))
        assert torch.equal(out.view(torch.int16), same.view(torch.int16)), (m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize(("tile", "promotes"), ALL_TILES, ids=str)
def test_a_tile_has_bias_and_relu(tile: FastTile, promotes: bool) -> None:
    m, n, k = 515, 1040, 1040
    a, b = drawn(m, n, k, 1)
    for dtype, bias, activation in (
        (torch.bfloat16, torch.bfloat16, "relu"), (torch.bfloat16, torch.float32, "none"),
        (torch.float16, torch.float16, "none"), (torch.float16, None, "relu"),
    ):  # fmt: skip
        vector = None if bias is None else torch.randn(n, device="cuda").to(bias)
        # Sums past the largest float16 have no distance from others.
        scale = a.scale / 4096 if dtype is torch.float16 else a.scale
        left = QuantizedTensor(a.data, scale, Granularity.ROW)
        out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
        given = (promotes, left, b)
        epilogue = PLAIN if activation == "none" else Epilogue(activation=activation)
        expected = usual(*given, torch.empty_like(out), vector, epilogue)
        launched(tile, *given, out, vector, epilogue)
        assert torch.equal(out, expected) and out.float().abs().sum() > 0, (dtype, bias, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("promotes", [False, True])
def test_nan_stays_in_its_row_and_its_column(promotes: bool) -> None:
    m, n, k = 300, 328, 1040
    a, b = drawn(m, n, k, 1)
    a.data.view(torch.uint8)[3, 500] = 0x7F
    b.data.view(torch.uint8)[7, 900] = 0x7F
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    launched(FastTile(160), promotes, a, b, out, None, Epilogue(activation="relu"))
    expected = torch.zeros(m, n, dtype=torch.bool, device="cuda")
    expected[3], expected[:, 7] = True, True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("tile", "promotes"), FEW_TILES, ids=str)
def test_many_launches_in_a_row_give_the_same_bits(tile: FastTile, promotes: bool) -> None:
    """Blocks of a pair and launches that overlap wait for each other."""
    a, b = drawn(5000, 1032, 1104, 2)
    first = torch.empty(5000, 1032, dtype=torch.bfloat16, device="cuda")
    launched(tile, promotes, a, b, first)
    outs = [torch.zeros_like(first) for _ in range(8)]
    for _ in range(25):
        for out in outs:
            launched(tile, promotes, a, b, out)
    assert all(torch.equal(out, first) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("suffix", ["", "_fast"])
def test_outputs_that_start_anywhere_have_the_same_bits(
    suffix: str, scales: str, dtype: torch.dtype
) -> None:
    found = KERNELS[f"cuda.scaled_gemm_{scales}_turned{suffix}"]
    generator = torch.Generator("cuda").manual_seed(5)
    for m, n, k in ((128, 128, 16384), (300, 328, 1040)):  # of the first others would split sums
        x, w = (torch.randn(rows, k, device="cuda", generator=generator) for rows in (m, n))
        a, b = (numerics.quantize(y, Format.E5M2, Granularity(scales)) for y in (x, w))
        outs = []
        for start in (0, 1):
            out = torch.full((m * n + start,), float("nan"), dtype=dtype, device="cuda")
            outs.append(out[start:].view(m, n))
            given = (a.data, a.scale, b.data.t(), b.scale.t(), outs[-1], None)
            found.launch(*given, found.workspace(*given))
        assert torch.equal(*outs)
        left, right = numerics.dequantize(a).double(), numerics.dequantize(b).double().t()
        roundoff = torch.finfo(dtype).eps / 2
        error = numerics.kernel_error(outs[0], left @ right, left.abs() @ right.abs(), roundoff)
        assert error.maximum <= found.kernel_err_bound, (m, n, k)


def test_the_rule_fills_the_sms() -> None:
    """In one wave, where others have 111, 130 and 130 tiles of other shapes."""
    assert kernel.tile_of(4736, 512, 5856, 1, H200_SMS, False) == FastTile(144, above=2)
    assert kernel.tile_of(1649, 1536, 768, 0, H200_SMS, False) == FastTile(160)
    assert kernel.tile_of(1547, 768, 4096, 0, H200_SMS, True) == FastTile(80)
    for m, n, k, promotes, count in (
        (4736, 512, 5856, False, 132), (1649, 1536, 768, False, 132), (1547, 768, 4096, True, 120)
    ):  # fmt: skip
        tile = kernel.tile_of(m, n, k, askew(k), H200_SMS, promotes)
        assert tile.groups(n, m) * tile.pairs == count
    # Of fewer rows than a tile has, what counts is how the weight is cut up.
    few = [kernel.tile_of(m, 4096, 4096, 0, H200_SMS, False) for m in (1, 40, 48)]
    assert few == [FastTile(64, warpgroups=1)] * 3  # 64 tiles, 32 of two warpgroups
    assert kernel.tile_of(40, 32768, 4096, 0, H200_SMS, False).warpgroups > 1


@pytest.mark.parametrize("sms", [78, H200_SMS])
def test_every_tile_that_the_rule_chooses_fits(sms: int) -> None:
    for m, n, k in drawn_sizes(5, 200):
        for level in range(3):
            for promotes in (False, True):
                tile = kernel.tile_of(m, n, k, level, sms, promotes)
                macros = kernel.macros_for(n, k, tile, Kind("row", 2, 4), promotes)
                assert 2 <= int(macros["STAGES"]) <= tiles.MOST_STAGES


@pytest.mark.parametrize("word", [
    {"activation": "silu"}, {"cross": 2}, {"accumulate": True}, {"out_bytes": 4}, {"batch": 0},
    {"a_steps": (3, 9)}, {"direct": True},
])  # fmt: skip
def test_what_the_program_does_not_compute_is_refused(word: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a bias and relu at most"):
        kernel.macros_for(1040, 1040, FastTile(160), Kind("row", **word), False)


@pytest.mark.parametrize("level", range(3))
@pytest.mark.parametrize("promotes", [False, True])
def test_what_tiles_stage_fits_and_is_aligned(level: int, promotes: bool) -> None:
    """As scaled_gemm_turned.cu lays out shared memory."""
    for tile in kernel.tiles_of(level, promotes):
        for k in (16, 64, 80, 4096):
            macros = {
                name: int(value)
                for name, value in kernel.macros_for(1040, k, tile, Kind("row"), promotes).items()
                if isinstance(value, int)
            }
            piece, chunks, stages = (macros[x] for x in ("PIECE", "CHUNKS", "STAGES"))
            depth = 128 if k > 64 else 64
            operands = stages * (tile.height + tile.block_n) * depth
            assert operands % 1024 == 0 == piece % 8
            assert tile.block_n % piece == 0 == tile.block_n // piece % chunks
            small = operands + tile.warpgroups * chunks * piece * 128
            vectors = -(-(small + stages * 16) // 16) * 16
            end = vectors + tile.warpgroups * tile.block_n * 4
            assert end <= macros["SHARED_BYTES"] <= tiles.SHARED_BYTES


def test_launches_have_maps_of_what_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Halves of the weight's rows where blocks share these, and of the data's."""
    given: list[Any] = []
    monkeypatch.setattr(
        kernel, "tensor_map", lambda x, box, swizzle: (tuple(x.shape), box, swizzle)
    )
    monkeypatch.setattr(CudaLaunch, "__call__", lambda _self, *launched: given.append(launched))
    m, n, k = 1000, 600, 512
    memory = torch.zeros(max(m, n) * 2 * k, dtype=torch.uint8).view(torch.float8_e4m3fn)
    a, b = memory.as_strided((m, k), (k, 1)), memory.as_strided((n, k), (k, 1))
    out, bias = torch.empty(m, n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.bfloat16)
    scales = torch.ones(m, 1), torch.ones(1, n)
    kind = scaled_gemm._kind_of("row", (a,), b.t(), out, bias, PLAIN)
    for tile, grid, boxes in (
        (FastTile(160), 5 * 7, ((128, 128), (80, 64), (160, 128))),
        (FastTile(96, 1, above=2), 2 * 5 * 11, ((64, 128), (96, 64), (48, 128))),
        (FastTile(112, 3, along=2), 2 * 4 * 5, ((96, 128), (112, 64), (112, 128))),
    ):
        given.clear()
        plan = kernel.make_plan(m, n, k, kind, tile, H200_SMS)
        for left in (a, a, memory.as_strided((m, k), (2 * k, 1))):
            kernel.run(plan, left, scales[0], b.t(), scales[1], out, bias)
        assert len(plan.maps) == 2  # the same memory with other strides is another operand
        blocks, pointers, scalars, maps = given[0]
        assert (blocks, scalars) == ((grid, 1, 1), (m,))
        assert [x.data_ptr() for x in pointers] == [x.data_ptr() for x in (*scales, bias)]
        sizes = ((n, k), (m, n), (m, k))
        assert maps == tuple((*given, 128) for given in zip(sizes, boxes, strict=True))
        assert plan.launch._parameters == (3, 1, 3)


def test_outputs_that_start_anywhere_have_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []
    monkeypatch.setattr(scaled_gemm_fast, "launch", lambda *given: launches.append(given))
    monkeypatch.setattr(kernel, "_plan", lambda *_: launches.append("turned"))
    monkeypatch.setattr(kernel, "run", lambda *_: None)
    a = torch.zeros(16, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.ones(16, 1), torch.ones(1, 16)
    for start in (0, 1):
        out = torch.empty(16 * 16 + 1, dtype=torch.bfloat16)[start:][:256].view(16, 16)
        kernel._launch("row", True, a, scales[0], a.t(), scales[1], out, None, ())
    assert launches[0] == "turned" and len(launches) == 2
    assert launches[1][:2] == ("row", True) and launches[1][6] is out
    assert launches[1][-1].batch_invariant  # else sums are split, and bits are others
