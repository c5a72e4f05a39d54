"""FP8 scaled GEMM whose sums are not promoted. See scaled_gemm_fast.cu and fast_mainloop.cuh.

The same product, scales and epilogues as scaled_gemm.py with one scale or scales of rows, but the
tensor core's some 14 bits of each sum are kept for all of k, as `use_fast_accum` does in
`torch._scaled_mm`: `kernel_err` is bounded by `FAST_KERNEL_ERR_BOUND`. scaled_gemm_paired.py
launches the same program with promoted sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda import scaled_gemm
from lokakern.kernels.cuda.fast_tiles import FastTile, askew, macros_for, tile_of
from lokakern.kernels.cuda.scaled_gemm import SCALES, Plan
from lokakern.kernels.cuda.tiles import Kind, Tile, grid_of
from lokakern.registry.register import FAST_KERNEL_ERR_BOUND, KERNELS, register
from lokakern.types import EPILOGUES, PLAIN, Device, Epilogue, Problem, Support

SOURCE = str(Path(__file__).with_suffix(".cu"))
# Which products and sums of an epilogue the compiler contracts depends on the tile, and so would
# bits of float32 outputs.
OPTIONS = ("--fmad=false",)


@functools.lru_cache(maxsize=4096)
def bind(n: int, k: int, tile: Tile, promotes: bool, kind: Kind) -> CudaLaunch:
    """The launch of one signature."""
    macros = macros_for(n, k, tile, kind, promotes)
    program = nvrtc.Program(SOURCE, "scaled_gemm", tuple(macros.items()), OPTIONS)
    cluster = int(macros["PARTS"]) * int(macros["ABOVE"]) * int(macros["ALONG"])
    pointers = 3 + (kind.bias_bytes > 0) + 2 * (kind.cross > 0) + (kind.out_bytes == 1)
    return CudaLaunch(
        program, pointers=pointers, scalars="iq" + "qq" * (kind.cross > 0), threads=tile.threads,
        shared_bytes=int(macros["SHARED_BYTES"]),
        tensor_maps=1 + (not macros["DIRECT"]) + max(1, len(kind.a_steps)),
        cluster=cluster, programmatic=True,
    )  # fmt: skip


def make_plan(
    m: int, n: int, k: int, kind: Kind, tile: Tile, sms: int, promotes: bool = False
) -> Plan:
    """What a launch with a given tile needs."""
    launch = bind(n, k, tile, promotes, kind)
    macros = dict(launch.program.macros)
    width, fold = int(macros["CHUNK_BYTES"]), int(macros["FOLD"])
    swizzle_bytes = width if width in (32, 64, 128) and fold == 1 else 0
    if isinstance(tile, FastTile):
        groups = tile.groups(m, n)
        if tile.parts == 1:  # what shares sums has one tile: they lie where the next would
            groups = min(tile.resident_groups(sms), groups)
        grid = tile.pairs * tile.parts * groups
    else:
        grid = grid_of(tile, m, n, 1, sms)
    copied = tile.copied if isinstance(tile, FastTile) else tile
    return Plan(
        launch, copied, (grid, 1, 1), width // kind.out_bytes * fold, swizzle_bytes, fold, {}
    )


@jit.cached
def _plan(
    m: int, n: int, k: int, kind: Kind, askew: int, may_split: bool, promotes: bool, device: int
) -> Plan:
    sms = jit.compute_units(device)
    tile = tile_of(m, n, k, kind, askew, may_split, sms, promotes)
    return make_plan(m, n, k, kind, tile, sms, promotes)


def launch(
    scales: str,
    promotes: bool,
    a: Tensor | Sequence[Tensor],
    a_scale: Tensor | Sequence[Tensor],
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    _workspace: tuple[Tensor, ...],
    epilogue: Epilogue = PLAIN,
) -> None:
    """Launch the product, with or without promoted sums."""
    slices: Sequence[Tensor] = (a,) if isinstance(a, Tensor) else a
    slice_scales: Sequence[Tensor] = (a_scale,) if isinstance(a_scale, Tensor) else a_scale
    (m, n), k = out.shape, b.shape[0]
    kind = scaled_gemm._kind_of(scales, slices, b, out, bias, epilogue)
    starts = b.data_ptr() | b.stride(1)
    for x in slices:
        starts |= x.data_ptr() | x.stride(0)
    may_split = not epilogue.batch_invariant
    plan = _plan(m, n, k, kind, askew(starts), may_split, promotes, out.get_device())
    scaled_gemm.run(plan, kind, m, 1, slices, slice_scales, b, b_scale, out, bias, epilogue)


def supports(scales: str, problem: Problem, device: Device) -> Support:
    """As the kernel whose tiles have fewer widths."""
    return KERNELS[f"cuda.scaled_gemm_{scales}"].supports_problem(problem, device)


for _scales in ("tensor", "row"):
    register(
        "scaled_gemm",
        name=f"scaled_gemm_{_scales}_fast",
        architectures=frozenset({"sm_90"}),
        granularity=SCALES[_scales][0],
        b_granularity=SCALES[_scales][1],
        accumulation="fast",
        supports=functools.partial(supports, _scales),
        kernel_err_bound=FAST_KERNEL_ERR_BOUND,
        epilogues=EPILOGUES,
        accumulates=True,
        k_slices=True,
        batch_invariant=True,
    )(functools.partial(launch, _scales, False))
