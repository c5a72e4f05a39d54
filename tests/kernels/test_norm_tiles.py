"""Tiles of GEMMs with a norm: one fits every problem, and all are correct.

On a GPU few blocks walk over several tiles, so that warpgroups take turns and exchanges come round.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lokakern import numerics
from lokakern.device import current_device
from lokakern.kernels.cuda import gemm_norm, norm_tiles, tiles
from lokakern.kernels.cuda.norm_tiles import NormKind, Tile
from lokakern.measure.norm_errors import norm_kernel_error
from lokakern.norm import norm_named
from lokakern.registry import ops
from lokakern.registry.register import FAST_KERNEL_ERR_BOUND
from lokakern.types import Format, NormEpilogue, QuantizedTensor
from tests.support.kernel_cases import drawn

SEEDS = (0,)  # of everything drawn here
SMS = 132
SIZES = st.integers(1, 5000)
KINDS = st.builds(
    NormKind,
    scales=st.sampled_from(["tensor", "row", "block", "none"]),
    norm=st.sampled_from(["none", "layer", "rms"]),
    block=st.just(0),
    vectors=st.integers(0, 7),
    vector_item=st.sampled_from([2, 4]),
    residual=st.integers(0, 2),
    last=st.sampled_from(["none", "silu", "gate", "cross"]),
    out=st.sampled_from(["none", "tensor", "row", "group"]),
    a_type=st.just("e4m3"),
    b_type=st.just("e4m3"),
    fast=st.booleans(),
)


@settings(deadline=None, max_examples=300)
@given(m=st.integers(1, 70000), n=SIZES, k=SIZES, kind=KINDS)
def test_a_tile_that_is_chosen_fits_and_its_blocks_can_wait_for_each_other(
    m: int, n: int, k: int, kind: NormKind
) -> None:
    tile = norm_tiles.tile_for(m, n, k, kind, SMS)
    if tile is None:
        assert n > 64  # one block has such rows whole
        return
    macros = norm_tiles.macros_of(n, k, tile, kind)
    assert 2 <= int(macros["STAGES"]) <= tiles.MOST_STAGES
    assert int(macros["SHARED_BYTES"]) <= tiles.SHARED_BYTES // tile.blocks
    assert int(macros["BLOCK_N"]) // 2 < tile.registers
    grid, tiles_n = norm_tiles.grid_of(tile, m, n, kind, SMS), -(-n // tile.block_n)
    assert grid % tiles_n == 0 and tiles_n % int(macros["CLUSTER"]) == 0
    if tile.memory:
        assert grid <= SMS * tile.blocks
        told = 4 * 2 * 16 * 16 * int(macros["CLUSTER"])  # warps, slots, rows, bytes
        exchanges = grid // int(macros["CLUSTER"]) * tile.warpgroups
        rounds = norm_tiles.rounds_of(n, tile, kind)
        size = 128 + exchanges * rounds * told if rounds else 0
        assert norm_tiles.told_bytes(tile, m, n, kind, SMS) == size


def test_every_epilogue_has_a_tile_up_to_4096_columns() -> None:
    """Promoted sums leave the fewest registers to residuals, gates and scales of rows."""
    for n in (2304, 3072, 4096):
        for residual, last in ((0, "none"), (1, "none"), (2, "gate"), (1, "cross")):
            kind = NormKind("row", "layer", 0, 7, 4, residual, last, "row")
            assert norm_tiles.tile_for(8192, n, 1024, kind, SMS) is not None, (n, residual, last)


class Trial(NamedTuple):
    """A tile, of a product as wide as `n`, with `lanes` rows of blocks."""

    n: int
    k: int
    tile: Tile
    scales: str = "tensor"

    @property
    def kind(self) -> NormKind:
        return NormKind(self.scales, "layer", 0, 7, 4, fast=self.k > tiles.DEPTH)

    def __str__(self) -> str:
        tile = self.tile
        ways = "memory" if tile.memory else "cluster"
        resident = " resident" if tile.resident else ""
        blocks = norm_tiles.cluster_of(self.n, tile, self.kind)
        return (f"{self.n}x{self.k} by {tile.block_n}x{tile.warpgroups}{resident}, "
                f"{ways} of {blocks}, {self.scales}")  # fmt: skip


TRIALS = [
    *(
        Trial(n, k, Tile(width, warpgroups=warpgroups, resident=resident, memory=memory), scales)
        for n, k, width in ((512, 320, 256), (512, 320, 128), (1024, 200, 128), (720, 200, 256))
        for warpgroups in (1, 2)
        for resident in (True, False)
        for memory in (False, True)
        for scales in ("tensor", "row")
    ),
    Trial(2048, 512, Tile(256, resident=True, memory=True)),
    Trial(2048, 512, Tile(256, resident=True)),
    Trial(2080, 160, Tile(256, resident=True, memory=True)),
    Trial(4096, 160, Tile(256, memory=True)),
    Trial(512, 256, Tile(128, warpgroups=1, resident=True, blocks=2, memory=True)),
]
ROWS = (1, 64, 65, 200, 330)  # to 6 tiles of 64


def launch(
    trial: Trial, m: int, sms: int, left: QuantizedTensor, right: QuantizedTensor,
    epilogue: NormEpilogue,
) -> torch.Tensor:  # fmt: skip
    kind = trial.kind
    plan = gemm_norm.make_plan(m, trial.n, trial.k, kind, trial.tile, sms)
    out = torch.full((m, trial.n), math.nan, dtype=torch.bfloat16, device="cuda")
    told = torch.zeros(max(plan.told_bytes, 1), dtype=torch.uint8, device="cuda")
    for _ in range(3):  # turns go on where the launch before left them
        gemm_norm.run(
            plan, kind, left.data, left.scale, right.data, right.scale, out, None, epilogue, told
        )
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_one_row_of_blocks_walks_over_all_rows(trial: Trial) -> None:
    """The grid has as many blocks as a row of the output has tiles."""
    if current_device("cuda").architecture != "sm_90":
        pytest.skip("needs a GPU of sm_90")
    if not norm_tiles.fits(trial.n, trial.k, trial.tile, trial.kind):
        pytest.fail(f"{trial} does not fit")
    sms = -(-trial.n // trial.tile.block_n)
    granularity = gemm_norm.SCALES[trial.scales][0]
    x, w = (drawn(size, trial.k, where="cuda", seed=i) for i, size in enumerate((330, trial.n)))
    right = numerics.quantize(w, Format.E4M3FN, granularity)
    vectors = [drawn(trial.n, where="cuda", seed=i, dtype=torch.float32) for i in (2, 3, 4)]
    epilogue = NormEpilogue(norm_named("layer"), *vectors)
    whole: torch.Tensor | None = None
    for m in reversed(ROWS):
        left = numerics.quantize(x[:m], Format.E4M3FN, granularity)
        out = launch(trial, m, sms, left, right, epilogue)
        exact, size = ops.normalized(*ops.norm_sums(left, right.t()), epilogue)
        error = norm_kernel_error(out, exact, size, Format.BFLOAT16.unit_roundoff).maximum
        assert error <= FAST_KERNEL_ERR_BOUND, (m, error)
        if granularity.value == "row":  # what a row becomes does not depend on the others
            whole = out if whole is None else whole
            assert torch.equal(out, whole[:m])


@pytest.mark.gpu
def test_launches_that_wait_in_memory_run_on_two_streams_at_once() -> None:
    if current_device("cuda").architecture != "sm_90":
        pytest.skip("needs a GPU of sm_90")
    trial = Trial(1024, 256, Tile(256, resident=True, memory=True))
    m, sms = 4000, 64
    granularity = gemm_norm.SCALES[trial.scales][0]
    x, w = (drawn(size, trial.k, where="cuda", seed=i) for i, size in enumerate((m, trial.n)))
    left, right = (numerics.quantize(each, Format.E4M3FN, granularity) for each in (x, w))
    vectors = [drawn(trial.n, where="cuda", seed=i, dtype=torch.float32) for i in (2, 3, 4)]
    epilogue = NormEpilogue(norm_named("layer"), *vectors)
    alone = launch(trial, m, sms, left, right, epilogue)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found: list[torch.Tensor] = []
    for _ in range(20):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(launch(trial, m, sms, left, right, epilogue))
    torch.cuda.synchronize()
    assert all(torch.equal(alone, out) for out in found)


@pytest.mark.gpu
def test_all_blocks_of_a_full_launch_are_there_at_once() -> None:
    """Two on each SM, as many as wait for each other."""
    if current_device("cuda").architecture != "sm_90":
        pytest.skip("needs a GPU of sm_90")
    trial = Trial(512, 256, Tile(128, warpgroups=1, resident=True, blocks=2, memory=True))
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    m = 64 * (2 * sms // 4)
    granularity = gemm_norm.SCALES[trial.scales][0]
    x, w = (drawn(size, trial.k, where="cuda", seed=i) for i, size in enumerate((m, trial.n)))
    left, right = (numerics.quantize(each, Format.E4M3FN, granularity) for each in (x, w))
    vectors = [drawn(trial.n, where="cuda", seed=i, dtype=torch.float32) for i in (2, 3, 4)]
    epilogue = NormEpilogue(norm_named("layer"), *vectors)
    out = launch(trial, m, sms, left, right, epilogue)
    exact, size = ops.normalized(*ops.norm_sums(left, right.t()), epilogue)
    error = norm_kernel_error(out, exact, size, Format.BFLOAT16.unit_roundoff).maximum
    assert error <= FAST_KERNEL_ERR_BOUND
