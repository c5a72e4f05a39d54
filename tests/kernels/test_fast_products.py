"""Every tile of any width, with and without promoted sums, and the rule that chooses one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from lokakern import numerics
from lokakern.formats import Format
from lokakern.kernels.cuda import (
    map_strides,
    scaled_gemm,
    scaled_gemm_fast,
    scaled_gemm_unaligned,
    tiles,
)
from lokakern.kernels.cuda.fast_tiles import FastTile, askew, macros_for, tile_of, tiles_of
from lokakern.kernels.cuda.tiles import Kind, Tile
from lokakern.registry.register import (
    FAST_KERNEL_ERR_BOUND,
    KERNELS,
    PROMOTED_KERNEL_ERR_BOUND,
    load_kernels,
)
from lokakern.types import PLAIN, Epilogue, Granularity, QuantizedTensor, empty_data
from lokakern.workloads.drawn_sizes import drawn_sizes
from tests.support.fp8_rows import drawn

load_kernels()
H200_SMS = 132
PLAIN_TILE = FastTile(128)
# Blocks that share a, or both operands.
CLUSTERS_ALONG = (
    FastTile(128, along=2), FastTile(128, above=2, along=2), FastTile(256, above=2, along=2),
    FastTile(144, along=2, in_turn=True), FastTile(128, above=2, along=2, in_turn=True),
    FastTile(64, warpgroups=1, along=2), FastTile(160, warpgroups=3, chunks=1, above=2, along=2),
)  # fmt: skip
TILES = (
    FastTile(128, above=2), FastTile(128, in_turn=True), FastTile(128, above=2, in_turn=True),
    FastTile(192), FastTile(192, above=2), FastTile(256), FastTile(256, above=2),
    FastTile(64, above=2, in_turn=True), Tile(128, resident=True), Tile(256, resident=True),
    Tile(64, warpgroups=1, resident=True, blocks=2), Tile(64, warpgroups=1), Tile(128, parts=4),
    Tile(96, resident=True), Tile(96, warpgroups=1, resident=True, blocks=2),
    # Of each width one, each shape with and without pairs.
    FastTile(64, warpgroups=1), FastTile(80), FastTile(96), FastTile(112, warpgroups=1, above=2),
    FastTile(144), FastTile(144, in_turn=True), FastTile(144, above=2, in_turn=True),
    FastTile(160, warpgroups=1), FastTile(160, warpgroups=3, chunks=1, above=2),
    FastTile(176, above=2), FastTile(192, warpgroups=3, chunks=1), FastTile(208),
    FastTile(224, warpgroups=1), FastTile(224, above=2),
    *CLUSTERS_ALONG,
    # Narrow ones, of up to four warpgroups and several blocks of an SM.
    FastTile(16, warpgroups=1, above=2), FastTile(32, above=2), FastTile(48, above=2),
    FastTile(48, warpgroups=1, blocks=4), FastTile(32, warpgroups=1, blocks=2, above=2),
    FastTile(64, warpgroups=3, above=2), FastTile(64, warpgroups=4), FastTile(64, blocks=2),
    Tile(32, resident=True, blocks=2),
    Tile(64, warpgroups=3, resident=True), Tile(48, warpgroups=4, resident=True),
)  # fmt: skip
# Of clusters that share sums: single blocks, and pairs.
SPLIT_TILES = (
    FastTile(128, parts=4), FastTile(64, warpgroups=1, parts=8), FastTile(112, parts=2),
    FastTile(192, parts=4), FastTile(96, warpgroups=3, parts=2),
    FastTile(32, warpgroups=1, parts=4), FastTile(64, warpgroups=1, parts=2, blocks=2),
    FastTile(128, parts=2, above=2),
    FastTile(128, warpgroups=1, parts=4, above=2), FastTile(48, parts=2, above=2),
    FastTile(64, parts=4, along=2),
)  # fmt: skip
# With promoted sums: each width, shape and way to share operands.
PROMOTED_TILES = (
    FastTile(80), FastTile(160), FastTile(192, above=2), FastTile(128, above=2, along=2),
    FastTile(192, above=2, along=2), FastTile(112, along=2), FastTile(96, above=2),
    FastTile(64, warpgroups=1, along=2), FastTile(192, warpgroups=1, above=2),
    FastTile(64, warpgroups=3, chunks=1), FastTile(112, warpgroups=3, chunks=1, above=2, along=2),
    FastTile(96, warpgroups=3, chunks=1, along=2), Tile(128, resident=True),
    FastTile(48, warpgroups=2, above=2), FastTile(16, warpgroups=1, above=2),
    FastTile(96, warpgroups=1, parts=2, above=2), FastTile(128, parts=4, along=2),
    FastTile(64, warpgroups=1, parts=8),
)  # fmt: skip
ALL_TILES = (
    *((tile, False) for tile in (*TILES, *SPLIT_TILES)), *((tile, True) for tile in PROMOTED_TILES)
)  # fmt: skip
FEW_TILES = (
    *((tile, False) for tile in (*TILES[:7], *SPLIT_TILES, *CLUSTERS_ALONG)),
    *((tile, True) for tile in PROMOTED_TILES[2:6]),
)  # fmt: skip
# One tile; ends of pairs, of columns and of steps; several tiles of each block; steps that the ring
# has as many of, and one more.
SIZES = (
    (1, 8, 16), (128, 128, 128), (129, 136, 144), (200, 328, 1040), (257, 1000, 768),
    (3000, 2056, 896), (20000, 264, 272), (600, 136, 3984), (300, 328, 48),
)  # fmt: skip


def launched(
    tile: Tile,
    a: Any,
    b: Any,
    out: Any,
    bias: Any = None,
    epilogue: Epilogue = PLAIN,
    promotes: bool = False,
) -> Any:
    """The output of a product by a tile."""
    m, n = out.shape
    kind = scaled_gemm._kind_of("row", (a.data,), b.data.t(), out, bias, epilogue)
    plan = scaled_gemm_fast.make_plan(m, n, a.data.shape[1], kind, tile, H200_SMS, promotes)
    scaled_gemm.run(
        plan, kind, m, 1, (a.data,), (a.scale,), b.data.t(), b.scale, out, bias, epilogue
    )
    return out


def fits(tile: Tile, n: int, k: int, kind: Kind, promotes: bool = False) -> bool:
    try:
        macros_for(n, k, tile, kind, promotes)
    except ValueError:
        return False
    return not (tile.parts > 1 and k < 1024)


@pytest.mark.gpu
@pytest.mark.parametrize(("tile", "promotes"), ALL_TILES, ids=str)
def test_a_tile_multiplies_every_size(tile: Tile, promotes: bool) -> None:
    roundoff = Format.BFLOAT16.unit_roundoff
    bound = PROMOTED_KERNEL_ERR_BOUND if promotes else FAST_KERNEL_ERR_BOUND
    for seed, (m, n, k) in enumerate(SIZES):
        if not fits(tile, n, k, Kind("row"), promotes):
            continue
        a, b = drawn(m, n, k, seed)
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        launched(tile, a, b, out, promotes=promotes)
        left, right = numerics.dequantize(a).double(), numerics.dequantize(b).double().t()
        error = numerics.kernel_error(out, left @ right, left.abs() @ right.abs(), roundoff)
        assert error.maximum <= bound, (m, n, k)
        if tile.parts == 1:  # whole sums are the same wherever they are
            same = launched(PLAIN_TILE, a, b, torch.empty_like(out), promotes=promotes)
            assert torch.equal(out.view(torch.int16), same.view(torch.int16)), (m, n, k)


def agree(found: torch.Tensor, expected: torch.Tensor, tile: Tile) -> bool:
    """Whether an output is that of `PLAIN_TILE`: the same bits, or about those of shared sums."""
    one, other = found.float(), expected.float()
    if tile.parts == 1:
        return torch.equal(one, other)
    distance = float((one - other).norm() / other.norm())
    return distance < (0.03 if found.dtype.itemsize == 1 else 5e-3)  # of FP8 codes, neighbors


@pytest.mark.gpu
@pytest.mark.parametrize(("tile", "promotes"), ALL_TILES, ids=str)
def test_a_tile_has_every_epilogue(tile: Tile, promotes: bool) -> None:
    m, n, k = 515, 1040, 400 if tile.resident else 1040  # 256 columns of more do not stay
    a, b = drawn(m, n, k, 1)
    one = torch.tensor(0.02, device="cuda")
    x0, x = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for dtype, bias, epilogue in (
        (torch.bfloat16, torch.bfloat16, Epilogue(activation="silu")),
        (torch.bfloat16, None, Epilogue(x0=x0, x=x)),
        (torch.float32, torch.float32, Epilogue(activation="relu")),
        (torch.float32, None, Epilogue(accumulate=True)),
        (torch.float8_e4m3fn, torch.bfloat16, Epilogue(activation="hardswish", out_scale=one)),
        (torch.float16, torch.float16, PLAIN),
    ):
        vector = None if bias is None else torch.randn(n, device="cuda").to(bias)

        # Sums past the largest float16 have no distance from others.
        scale = a.scale / 4096 if dtype is torch.float16 else a.scale
        left = QuantizedTensor(a.data, scale, Granularity.ROW)

        def made(
            tile: Tile, a: Any = left, dtype: Any = dtype, bias: Any = vector, last: Any = epilogue
        ) -> Any:
            out = empty_data(m, n, dtype, a.data.device)
            if dtype.itemsize > 1:
                out.fill_(1.0)
            return launched(tile, a, b, out, bias, last, promotes)

        if not fits(tile, n, k, Kind("row", dtype.itemsize), promotes) and tile.parts > 1:
            continue  # a part of 8 columns in FP8
        found, expected = made(tile), made(PLAIN_TILE)
        assert agree(found, expected, tile), (dtype, epilogue)
        assert found.float().abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("tile", "promotes"), FEW_TILES, ids=str)
def test_a_tile_multiplies_slices_of_k(tile: Tile, promotes: bool) -> None:
    m, n, widths = 515, 1040, (768, 384, 128, 80)
    a, b = drawn(m, n, sum(widths), 4)
    slices = [x.contiguous() for x in a.data.split(widths, dim=1)]
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    kind = scaled_gemm._kind_of("row", slices, b.data.t(), out, None, PLAIN)
    plan = scaled_gemm_fast.make_plan(m, n, sum(widths), kind, tile, H200_SMS, promotes)
    scales = [a.scale] * len(slices)
    scaled_gemm.run(plan, kind, m, 1, slices, scales, b.data.t(), b.scale, out, None, PLAIN)
    same = launched(PLAIN_TILE, a, b, torch.empty_like(out), promotes=promotes)
    assert agree(out, same, tile)


@pytest.mark.gpu
@pytest.mark.parametrize(("tile", "promotes"), FEW_TILES, ids=str)
def test_many_launches_in_a_row_give_the_same_bits(tile: Tile, promotes: bool) -> None:
    """Blocks of a pair, warpgroups in turn and launches that overlap wait for each other."""
    a, b = drawn(5000, 1032, 1104, 2)
    first = torch.empty(5000, 1032, dtype=torch.bfloat16, device="cuda")
    launched(tile, a, b, first, promotes=promotes)
    outs = [torch.zeros_like(first) for _ in range(8)]
    for _ in range(25):
        for out in outs:
            launched(tile, a, b, out, promotes=promotes)
    assert all(torch.equal(out, first) for out in outs)


def test_the_rule_tells_where_rows_start() -> None:
    assert [askew(x) for x in (4096, 128, 1680, 1952, 64, 0)] == [0, 0, 2, 1, 1, 0]
    row = Kind("row")

    def tile(m: int, n: int, k: int, askew: int = 0) -> Tile:
        return tile_of(m, n, k, row, askew, True, H200_SMS)

    assert tile(32768, 2048, 2048) == FastTile(128, in_turn=True)
    assert tile(8192, 1024, 3056, 2) == FastTile(256, above=2)
    # Clusters share sums of few tiles, unless bits must not depend on the tile.
    assert tile(512, 512, 115200).parts > 1
    assert tile(956, 112, 8192) == FastTile(64, warpgroups=1, parts=4)
    for size in ((512, 512, 115200), (3183, 128, 7728), (956, 112, 8192)):
        assert tile_of(*size, row, 0, False, H200_SMS).parts == 1
    assert tile(2048, 128, 1024).parts == 1
    # Rows within sectors are always copied by clusters, along n where tiles along m are odd.
    assert tile(24668, 64, 912, 2) == FastTile(64, warpgroups=3, above=2)
    assert tile(8960, 48, 688, 2) == FastTile(48, warpgroups=1, above=2)
    assert tile(640, 3072, 2736, 2).along == 2
    assert tile(1280, 1760, 2928, 2).pairs == 4
    assert tile(12701, 64, 1792) == FastTile(64, warpgroups=3)
    assert tile(60000, 64, 1792) == Tile(64, resident=True)
    assert tile(7949, 48, 1312, 1) == FastTile(48, warpgroups=1)
    # Whole waves of tiles that leave no columns idle.
    assert tile(8192, 288, 4096, 1).block_n == 144
    assert tile(8192, 448, 4096) == FastTile(224)
    assert tile(8192, 576, 4096) == FastTile(192, warpgroups=3, chunks=1)
    assert tile(512, 2112, 4096) == FastTile(64)
    assert tile(32768, 2112, 2048).warpgroups < 3  # the GPU's power decides
    # A weight that stays, and one wave of the smallest tiles.
    assert tile(8192, 512, 512).resident
    assert tile(8192, 192, 512) == Tile(96, warpgroups=1, resident=True, blocks=2)
    assert tile(8192, 192, 640) == tile(32768, 192, 640) == Tile(96, resident=True)
    assert tile(32768, 1600, 1024) == FastTile(128, in_turn=True)
    assert tile(8192, 480, 512).block_n == 128
    assert tile(1024, 192, 512).block_n != 96  # most SMs would be idle
    assert tile(2048, 160, 1024) == Tile(64, warpgroups=1)


@pytest.mark.parametrize("item", [1, 2, 4])
def test_every_tile_that_the_rule_chooses_fits(item: int) -> None:
    for m, n, k in drawn_sizes(5, 200):
        for scales in ("tensor", "row"):
            for level in range(3):
                kind = Kind(scales, item, 4, cross=0)
                for promotes, splits, sms in (
                    (False, True, H200_SMS), (True, True, H200_SMS), (m % 2 > 0, False, 78)
                ):  # fmt: skip
                    tile = tile_of(m, n, k, kind, level, splits, sms, promotes)
                    assert splits or tile.parts == 1
                    stages = macros_for(n, k, tile, kind, promotes)["STAGES"]
                    assert 2 <= int(stages) <= tiles.MOST_STAGES


def test_what_a_pair_copies_is_half_of_a_tile() -> None:
    plan = scaled_gemm_fast.make_plan(1000, 600, 512, Kind("row"), FastTile(256, above=2), H200_SMS)
    assert plan.tile.block_n == 128
    assert plan.grid == (24, 1, 1)  # 4 pairs of tiles by 3, two blocks each
    most = scaled_gemm_fast.make_plan(
        99999, 600, 512, Kind("row"), FastTile(256, above=2), H200_SMS
    )
    assert most.grid == (132, 1, 1)


def test_a_tile_has_one_cluster_of_pairs_that_share_its_sums() -> None:
    tile = FastTile(128, warpgroups=1, parts=4, above=2)
    plan = scaled_gemm_fast.make_plan(9999, 600, 2000, Kind("row"), tile, H200_SMS)
    assert plan.tile.block_n == 64
    assert plan.grid == (8 * 79 * 5, 1, 1)  # not as many as the GPU has at once
    macros = dict(plan.launch.program.macros)
    assert (macros["PARTS"], macros["ABOVE"], plan.chunk) == (4, 2, 32)
    with pytest.raises(ValueError, match="too many parts"):
        macros_for(600, 384, tile, Kind("row"))
    with pytest.raises(ValueError, match="too many parts"):
        macros_for(600, 2000, FastTile(64, parts=8), Kind("row", out_bytes=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_launch_is_given_as_many_maps_as_it_was_bound_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of 112 columns in FP8 are no multiple of 16 bytes."""
    monkeypatch.setattr(scaled_gemm, "_map", lambda *_: "a map")
    a, b = (torch.empty(rows, 1040, dtype=torch.float8_e4m3fn) for rows in (512, 1040))
    out, scale = torch.empty(512, 1040, dtype=dtype), torch.ones(512, 1)
    kind = scaled_gemm._kind_of("row", (a,), b.t(), out, None, PLAIN)
    given: list[tuple[Tile, bool]] = [(tile, False) for tile in (*TILES, *SPLIT_TILES)]
    for level, promotes in itertools.product(range(3), (False, True)):
        given += [(x, promotes) for x in tiles_of(kind.out_bytes, level, True, promotes)]
    for tile, promotes in given:
        if not fits(tile, 1040, 1040, kind, promotes):  # FP8 of parts of 8 columns
            continue
        plan = scaled_gemm_fast.make_plan(512, 1040, 1040, kind, tile, H200_SMS, promotes)
        maps = scaled_gemm._make_maps(plan, kind, 512, 1, (a,), (scale,), b.t(), scale, out)
        assert len(maps) == plan.launch._parameters[-1], tile


@pytest.mark.parametrize("scales", ["row", "group"])
def test_maps_are_those_of_all_strides(scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same addresses once more, with other rows of b, of a second slice, or of scales."""
    monkeypatch.setattr(scaled_gemm, "tensor_map", lambda x, *_: tuple(x.stride()))
    m, n, k = 64, 48, 256
    memory = torch.empty(4 * m * k, dtype=torch.float8_e4m3fn)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    given, seen = [], list[Any]()

    def rows(count: int, width: int, stride: int) -> torch.Tensor:
        return memory.as_strided((count, width), (stride, 1))

    numbers = torch.empty(4 * m * k)
    for b_stride, second_stride, scale_stride in (
        (k, k // 2, 64), (2 * k, k // 2, 64), (k, k, 64), (k, k // 2, 128), (k, k // 2, 64)
    ):  # fmt: skip
        slices = [rows(m, k // 2, k // 2), rows(m, k // 2, second_stride)]
        a_scale = numbers.as_strided((m, 1), (1, scale_stride))
        given.append((slices, [a_scale, a_scale], rows(n, k, b_stride).t()))
    plans: dict[Any, Any] = {}
    for slices, slice_scales, b in given:
        kind = scaled_gemm._kind_of(scales, slices, b, out, None, PLAIN)
        if kind not in plans:
            tile = Tile(64, warpgroups=1)
            plan = scaled_gemm.make_plan(m, n, k, kind, tile, 1, H200_SMS)
            plans[kind] = plan._replace(launch=lambda *arguments: seen.append(arguments[-1]))
        operands = (slices, slice_scales, b, slice_scales[0])
        scaled_gemm.run(plans[kind], kind, m, 1, *operands, out, None, PLAIN)
        wanted = scaled_gemm._make_maps(plans[kind], kind, m, 1, *operands, out)
        assert seen[-1] == wanted
    assert seen[0] is seen[-1]  # made once


def test_few_maps_are_kept_of_many_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_gemm, "tensor_map", lambda x, *_: tuple(x.stride()))
    monkeypatch.setattr(map_strides, "MOST_STRIDES", 4)
    m, n, k = 64, 48, 256
    a, memory = (torch.empty(rows, k, dtype=torch.float8_e4m3fn) for rows in (m, 4 * n))
    out, scale, seen = torch.empty(m, n, dtype=torch.bfloat16), torch.ones(m, 1), list[Any]()
    kind = scaled_gemm._kind_of("row", (a,), memory[:n].t(), out, None, PLAIN)
    plan = scaled_gemm.make_plan(m, n, k, kind, Tile(64, warpgroups=1), 1, H200_SMS)
    plan = plan._replace(launch=lambda *arguments: seen.append(arguments[-1]))
    for stride in (*range(k, 2 * k + 1, 32), k):
        b = memory.as_strided((n, k), (stride, 1)).t()
        scaled_gemm.run(plan, kind, m, 1, (a,), (scale,), b, scale, out, None, PLAIN)
        assert (stride, 1) in seen[-1]
        assert len(plan.maps) <= 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_boxes_of_narrow_outputs_are_none_too_large(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rows of 48 columns in FP8 were one of 384, which the driver refuses."""
    boxes = list[tuple[int, ...]]()
    monkeypatch.setattr(scaled_gemm, "tensor_map", lambda _x, box, *_: boxes.append(box))
    for m, k in ((17, 512), (5000, 1024), (8192, 1040), (20000, 1056), (40000, 4096)):
        a, scale = torch.empty(m, k, dtype=torch.float8_e4m3fn, device="meta"), torch.ones(1)
        for n in range(8, 65, 8):
            b, out = a.new_empty(n, k), a.new_empty(m, n, dtype=dtype)
            out.data_ptr = lambda: 0  # type: ignore[method-assign]
            kind = scaled_gemm._kind_of("row", (a,), b.t(), out, None, PLAIN)
            for level in range(3):
                tile = tile_of(m, n, k, kind, level, True, H200_SMS)
                plan = scaled_gemm_fast.make_plan(m, n, k, kind, tile, H200_SMS)
                scaled_gemm._make_maps(plan, kind, m, 1, (a,), (scale,), b.t(), scale, out)
    assert max(max(box) for box in boxes) <= 256


@pytest.mark.parametrize("module", [scaled_gemm, scaled_gemm_unaligned])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_programs_of_the_same_bits_have_no_contraction(module: Any, dtype: torch.dtype) -> None:
    """With a bias the sums of one row differed between tiles, so with the number of rows."""
    n = 1032 if module is scaled_gemm else 1029
    a, b = (torch.empty(rows, 1024, dtype=torch.float8_e4m3fn) for rows in (512, n))
    out, bias = torch.empty(512, n, dtype=dtype), torch.empty(n)
    for epilogue, given, options in (
        (Epilogue(batch_invariant=True), bias, scaled_gemm_fast.OPTIONS),
        (Epilogue(batch_invariant=True, activation="hardswish"), None, scaled_gemm_fast.OPTIONS),
        (Epilogue(batch_invariant=True), None, ()),  # nothing is added
        (PLAIN, bias, ()),
    ):
        kind = scaled_gemm._kind_of("row", (a,), b.t(), out, given, epilogue)
        kind = kind._replace(direct=module is scaled_gemm_unaligned)
        programs = {module.bind(n, 1024, tile, kind).program
                    for tile in (Tile(64, warpgroups=1), Tile(128, resident=True))}  # fmt: skip
        assert len(programs) == 2 and {x.options for x in programs} == {options}
        half = {"half_" in Path(x.source).name for x in programs}
        assert half == {dtype is torch.float16}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [
    f"cuda.scaled_gemm_row{suffix}" for suffix in ("", "_unaligned", "_fast", "_paired")
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_of_a_row_with_a_bias_do_not_depend_on_the_others(
    name: str, dtype: torch.dtype
) -> None:
    kernel = KERNELS[name]
    n = 1029 if name.endswith("unaligned") else 1024
    a, b = drawn(4096, n, 1024, 1)
    bias = torch.randn(n, device="cuda")
    seen = []
    for m in (4096, 1000, 512, 64, 7):
        for activation in ("none", "hardswish"):
            epilogue = Epilogue(activation=activation, batch_invariant=True)
            out = torch.empty(m, n, dtype=dtype, device="cuda")
            operands = (a.data[:m], a.scale[:m], b.data.t(), b.scale, out, bias)
            kernel.launch(*operands, (), epilogue)
            seen.append((activation, out[:7]))
    for activation, rows in seen:
        assert torch.equal(rows, dict(seen[:2])[activation])
