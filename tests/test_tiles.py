"""The rule that chooses tiles of the FP8 GEMM: always one that fits, and whole waves of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lokakern.kernels.cuda import scaled_gemm
from lokakern.kernels.cuda.scaled_gemm import Kind, Tile

SMS = 132
SIZES = st.integers(1, 9000)
LONG = st.one_of(SIZES, st.integers(1, 130000))
KINDS = st.tuples(
    st.sampled_from(["tensor", "row", "block", "group"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
).map(lambda drawn: Kind(drawn[0], drawn[1], batch=drawn[2], direct=drawn[3]))


@settings(deadline=None, max_examples=400)
@given(m=LONG, n=SIZES, k=LONG, kind=KINDS, products=st.integers(1, 40))
def test_every_problem_gets_a_tile_that_fits(
    m: int, n: int, k: int, kind: Kind, products: int
) -> None:
    products = 1 if kind.batch == 1 else products
    tile = scaled_gemm.tile_for(m, n, k, kind, products, SMS)
    macros = scaled_gemm.macros_of(n, k, tile, kind)
    assert 2 <= int(macros["STAGES"]) <= scaled_gemm.MOST_STAGES
    assert int(macros["SHARED_BYTES"]) <= scaled_gemm.SHARED_BYTES // tile.blocks
    assert kind.batch == 1 or not tile.resident
    split = scaled_gemm.split_tile_for(m, n, k, products, SMS)
    if split is not None and kind.batch:
        macros = scaled_gemm.macros_of(n, k, split, kind)
        partial_sums = split.warpgroups * 64 * split.block_n * 4
        stage = (split.height + split.block_n) * scaled_gemm.DEPTH
        assert partial_sums <= int(macros["STAGES"]) * stage
        assert split.columns % 8 == 0


@settings(deadline=None, max_examples=200)
@given(m=LONG, n=SIZES, k=LONG, direct=st.booleans())
def test_what_quantizes_on_the_way_gets_a_tile_that_fits(
    m: int, n: int, k: int, direct: bool
) -> None:
    kind = Kind("block", direct=direct, quantizes=True)
    tile = scaled_gemm.quantizing_tile_for(m, n, k, kind, SMS)
    macros = scaled_gemm.macros_of(n, k, tile, kind)
    assert int(macros["STAGES"]) >= 2 and macros["A_BFLOAT16"] == 1 and macros["DOUBLE"] == 0


@settings(deadline=None, max_examples=300)
@given(m=LONG, n=SIZES, k=SIZES, products=st.integers(1, 40))
def test_every_tile_of_an_output_has_a_block(m: int, n: int, k: int, products: int) -> None:
    """Walked as mainloop.cuh does, the blocks of a grid meet each tile once."""
    kind = Kind("row", batch=min(products, 2))
    tile = scaled_gemm.tile_for(m, n, k, kind, products, SMS)
    grid = scaled_gemm.grid_of(tile, m, n, products, SMS)
    assert 1 <= grid <= SMS * tile.blocks or tile.resident
    tiles_m, tiles_n = math.ceil(m / tile.height), math.ceil(n / tile.block_n)
    if tile.resident:
        assert grid % tiles_n == 0
        seen = [
            (place, block % tiles_n)
            for block in range(grid)
            for pipeline in range(tile.pipelines)
            for place in range(
                block // tiles_n * tile.pipelines + pipeline,
                tiles_m,
                grid // tiles_n * tile.pipelines,
            )
        ]
        assert len(seen) == len(set(seen)) == tiles_m * tiles_n
    else:
        assert grid <= tiles_m * tiles_n * products


@pytest.mark.parametrize(
    ("size", "tile"),
    [
        ((2048, 128, 128), Tile(32, warpgroups=1)),
        ((2048, 256, 1024), Tile(64, warpgroups=1)),
        ((2048, 512, 512), Tile(64, warpgroups=1, resident=True, blocks=2)),
        ((8192, 1024, 1024), Tile(128, resident=True)),
        ((32768, 2048, 2048), Tile(128)),
        ((32768, 1024, 256), Tile(256, resident=True, chunks=4)),
        ((163840, 24, 720), Tile(24, resident=True)),
    ],
)
def test_the_rule_takes_what_was_the_fastest(size: tuple[int, int, int], tile: Tile) -> None:
    assert scaled_gemm.tile_for(*size, Kind("row"), 1, SMS) == tile


def test_a_group_takes_scales_at_any_row() -> None:
    """Bulk copies start at multiples of 16 bytes: stages have room for a start in between."""
    tile = Tile(64, warpgroups=1)
    assert scaled_gemm.scale_rows(tile, Kind("block", batch=2)) == 64 + 32
    assert scaled_gemm.scale_rows(tile, Kind("block")) == 64


@pytest.mark.parametrize(
    ("columns", "item", "expected"),
    [(128, 2, 128), (32, 2, 64), (24, 2, 48), (24, 1, 0), (8, 1, 0), (96, 2, 64), (8, 4, 32)],
)
def test_rows_leave_in_pieces_that_bulk_copies_take(columns: int, item: int, expected: int) -> None:
    assert scaled_gemm.chunk_bytes(columns, item) == expected
