"""The rule that chooses tiles of the FP8 GEMM: every tile fits, and waves are full.

On a GPU every tile computes something in which all its pipelines come round several times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lokakern import jit, numerics
from lokakern.device import current_device
from lokakern.kernels.cuda import scaled_gemm, tiles
from lokakern.kernels.cuda.tiles import Kind, Tile
from lokakern.registry import ops
from lokakern.registry.register import PROMOTED_KERNEL_ERR_BOUND
from lokakern.types import PLAIN, Format, QuantizedTensor

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
    tile = tiles.tile_for(m, n, k, kind, products, SMS)
    macros = tiles.macros_of(n, k, tile, kind)
    assert 2 <= int(macros["STAGES"]) <= tiles.MOST_STAGES
    assert int(macros["SHARED_BYTES"]) <= tiles.SHARED_BYTES // tile.blocks
    assert kind.batch == 1 or not tile.resident
    split = tiles.split_tile_for(m, n, k, products, SMS)
    if split is not None and kind.batch:
        macros = tiles.macros_of(n, k, split, kind)
        partial_sums = split.warpgroups * 64 * split.block_n * 4
        stage = (split.height + split.block_n) * tiles.DEPTH
        assert partial_sums <= int(macros["STAGES"]) * stage
        assert split.columns % 8 == 0


@settings(deadline=None, max_examples=200)
@given(m=LONG, n=st.integers(1, 70), k=LONG, out=st.sampled_from([1, 2, 4]), direct=st.booleans())
def test_only_whole_short_rows_are_folded(m: int, n: int, k: int, out: int, direct: bool) -> None:
    kind = Kind("row", out, direct=direct, folds=n * out < 64)
    tile = tiles.tile_for(m, n, k, kind, 1, SMS)
    macros = tiles.macros_of(n, k, tile, kind)
    if macros["FOLD"] != 1:
        assert macros["CHUNK_BYTES"] == n * out and not macros["DIRECT"]
        assert n * tiles.FOLD <= 256  # elements of a box along each axis


def test_short_rows_are_folded_and_short_sums_have_short_steps() -> None:
    for n, k, fold in [(8, 720, 8), (24, 64, 8), (32, 64, 1), (20, 64, 1)]:
        kind = Kind("row", folds=n * 2 < 64)
        tile = tiles.tile_for(327680, n, k, kind, 1, SMS)
        assert tiles.macros_of(n, k, tile, kind)["FOLD"] == fold
    assert [tiles.depth_of(k) for k in (1, 64, 65, 128, 720)] == [64, 64, 128, 128, 128]


@settings(deadline=None, max_examples=300)
@given(m=LONG, n=SIZES, k=SIZES, products=st.integers(1, 40))
def test_every_tile_of_an_output_has_a_block(m: int, n: int, k: int, products: int) -> None:
    """Walked as mainloop.cuh does, the blocks of a grid meet each tile once."""
    kind = Kind("row", batch=min(products, 2))
    tile = tiles.tile_for(m, n, k, kind, products, SMS)
    grid = tiles.grid_of(tile, m, n, products, SMS)
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
def test_the_rule_chooses_the_fastest_measured_tile(size: tuple[int, int, int], tile: Tile) -> None:
    assert tiles.tile_for(*size, Kind("row"), 1, SMS) == tile


def test_a_group_takes_scales_at_any_row() -> None:
    """Bulk copies start at multiples of 16 bytes: stages have room for a start in between."""
    tile = Tile(64, warpgroups=1)
    assert tiles.scale_rows(tile, Kind("block", batch=2)) == 64 + 32
    assert tiles.scale_rows(tile, Kind("block")) == 64


@pytest.mark.parametrize(
    ("columns", "item", "expected"),
    [(128, 2, 128), (32, 2, 64), (24, 2, 48), (24, 1, 0), (8, 1, 0), (96, 2, 64), (8, 4, 32)],
)
def test_rows_leave_in_pieces_that_bulk_copies_take(columns: int, item: int, expected: int) -> None:
    assert tiles.chunk_bytes(columns, item) == expected


# --- what each tile computes

# Sizes of test_cuda_compiled.py, one for each tile of the rule, and outputs of few columns.
TILE_SIZES = (
    (2048, 128, 128), (2048, 256, 256), (2048, 512, 512), (8192, 512, 512), (8192, 1024, 1024),
    (8192, 2048, 2048), (32768, 128, 128), (32768, 1024, 256), (20480, 24, 720), (20480, 8, 39),
    (2048, 512, 2048), (256, 512, 115200), (2048, 512, 115200), (256, 2048, 17280),
    *((327680, n, k) for n in (8, 16, 24) for k in (40, 128)),
    *((m, n, k) for m in (256, 8192, 163840) for n in (1, 8, 16, 24, 32, 64)
      for k in (39, 256, 720, 4096, 17280)),
)  # fmt: skip
RUNS = 5  # with the same bits: a race changes some
LOOPS = 3  # of every pipeline over the stages of its ring, and over tiles


class Trial(NamedTuple):
    """A tile, and what it is tried on."""

    kind: Kind
    tile: Tile
    short: bool = False  # k in one step of half the depth

    def __str__(self) -> str:
        parts = f"{self.tile.block_n}x{self.tile.warpgroups}"
        parts += f" resident {self.tile.chunks}" if self.tile.resident else ""
        parts += f" of {self.tile.parts}" if self.tile.parts > 1 else ""
        parts += f" {self.tile.blocks} an SM" if self.tile.blocks > 1 else ""
        parts += " short" if self.short else ""
        return f"scaled_gemm_{self.kind.scales} {parts}"

    def size(self, sms: int) -> tuple[int, int, int]:
        """m, n and k, each with a tail, at which every pipeline comes round LOOPS times."""
        tile = self.tile
        across = 1 if tile.block_n < 32 else (2 if tile.resident else 5)
        n = across * tile.block_n - (8 if tile.block_n > 24 else 0)
        steps = self.steps(n)
        loops = max(LOOPS, math.ceil(LOOPS * self.stages(n, steps) * tile.parts / steps))
        if tile.resident:
            down = loops * tile.pipelines * (sms * tile.blocks // across)
        else:
            down = math.ceil(loops * sms * tile.blocks / across / tile.parts)
        return down * tile.height - 24, n, self.depth(steps)

    def steps(self, n: int) -> int:
        """Along k: more than the ring has stages, if that fits, else as many as fit."""
        if self.short:
            return 1
        fitting = [
            steps
            for steps in range(1, 41 if self.tile.parts == 1 else 121)
            if tiles.fits(n, steps * tiles.DEPTH, self.tile, self.kind)
        ]
        longer = (s for s in fitting if s >= (self.stages(n, s) + 3) * self.tile.parts)
        return next(longer, fitting[-1])

    def stages(self, n: int, steps: int) -> int:
        macros = tiles.macros_of(n, self.depth(steps), self.tile, self.kind)
        return int(macros["STAGES"])

    def depth(self, steps: int) -> int:
        return 40 if self.short else steps * tiles.DEPTH - 40


def trials() -> Iterator[Trial]:
    for scales in ("tensor", "row", "block", "group"):
        kind = Kind(scales)
        for m, n, k in TILE_SIZES:
            yield Trial(kind, tiles.tile_for(m, n, k, kind, 1, SMS), k <= tiles.DEPTH // 2)
            split = tiles.split_tile_for(m, n, k, 1, SMS)
            if split is not None:
                yield Trial(kind, split)


TRIALS = list(dict.fromkeys(trials()))
trial_of = pytest.mark.parametrize("trial", TRIALS, ids=str)


@trial_of
def test_trials_wrap_every_pipeline_around_its_ring(trial: Trial) -> None:
    tile = trial.tile
    m, n, k = trial.size(SMS)
    assert m % tile.height and k % tiles.DEPTH
    steps = math.ceil(k / tiles.DEPTH / tile.parts)
    stages = trial.stages(n, math.ceil(k / tiles.DEPTH))
    count = tile.count(m, n)
    pipelines = tiles.grid_of(tile, m, n, 1, SMS) * tile.pipelines
    if tile.parts == 1:
        assert count >= LOOPS * pipelines
        assert count // pipelines * steps >= LOOPS * stages or steps > stages
    else:
        assert count * tile.parts >= LOOPS * SMS and steps > stages
    assert m * n * k < 2**38 and max(m * k, m * n) < 2**29  # seconds, and GiB of float64


@pytest.mark.gpu
@trial_of
def test_every_tile_is_correct_and_reproducible(trial: Trial) -> None:
    if current_device("cuda").architecture != "sm_90":
        pytest.skip("needs a GPU of sm_90")
    kind, tile = trial
    sms = jit.compute_units(torch.cuda.current_device())
    m, n, k = trial.size(sms)
    torch.manual_seed(0)
    x = torch.randn(m, k, device="cuda").bfloat16()
    w = torch.randn(n, k, device="cuda").bfloat16()
    a_granularity, b_granularity = scaled_gemm.SCALES[kind.scales]
    left = numerics.quantize(x, Format.E4M3FN, a_granularity)
    right = numerics.quantize(w, Format.E4M3FN, b_granularity).t()
    b, b_scale = right.transpose
    assert left.scale is not None and b_scale is not None  # made by `quantize`
    slices, scales = [left.data], [left.scale]
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    kind = scaled_gemm._kind_of(kind.scales, slices, b, out, None, PLAIN)
    plan = scaled_gemm.make_plan(m, n, k, kind, tile, 1, sms)
    written = []
    for _ in range(RUNS):
        out.fill_(math.nan)
        scaled_gemm.run(plan, kind, m, 1, slices, scales, b, b_scale, out, None, PLAIN)
        written.append(out.view(torch.int16).clone())
    changed = [int((bits != written[0]).sum()) for bits in written]
    assert not any(changed), f"m={m} n={n} k={k}: so many outputs changed: {changed}"
    assert_right(out, left, right)


def assert_right(out: torch.Tensor, left: QuantizedTensor, right: QuantizedTensor) -> None:
    """The bound is of the sums: outputs are rounded once."""
    exact, size = ops.scaled_sums(left, right)
    roundoff = Format.BFLOAT16.unit_roundoff
    error = numerics.kernel_error(out, exact, PROMOTED_KERNEL_ERR_BOUND * size, roundoff)
    assert error.maximum <= 1 + roundoff, f"{error.maximum:.3g} times what is allowed"
