"""FP8 scaled GEMM for outputs whose rows are not 16-byte aligned. See scaled_gemm_unaligned.cu.

The same product, scales and epilogues as scaled_gemm.py, with the same bits. Outputs of bfloat16 or
float32 leave in pieces of 16 bytes; scaled_gemm.cu writes such rows one element at a time.

On an H200, 8192 x 1677 x 1677 moves 44 MB, which takes 10 us at 4.3 TB/s, and has 23 us of FLOPs.
For a tile of 128 x 128, each of 8 warps issues some 460 instructions more than for bulk copies, 8
of them stores of 16 bytes and 4 of elements: 900 cycles of a scheduler, in each of 7 tiles of some
13000.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda import scaled_gemm
from lokakern.kernels.cuda.scaled_gemm import SCALES, Plan
from lokakern.kernels.cuda.tiles import Kind, Tile, grid_of, macros_of, split_tile_for, tile_for
from lokakern.registry.register import KERNELS, PROMOTED_KERNEL_ERR_BOUND, register
from lokakern.types import EPILOGUES, PLAIN, Device, Epilogue, Format, Problem, Rejected, Support

SOURCE = str(Path(__file__).with_suffix(".cu"))
DENSE_BYTES = 64  # of a row, below which whole rows that lie side by side leave together


def macros_for(n: int, k: int, tile: Tile, kind: Kind) -> dict[str, int | str]:
    """All macros. The staged rows take the place that those of bulk copies would.

    Raises:
        ValueError: Shared memory does not hold the tile.
    """
    macros = macros_of(n, k, tile, _staged(kind))
    dense = kind.folds and tile.block_n >= n and tile.parts == 1
    return macros | {"DIRECT": 1, "DENSE": int(dense)}


def _staged(kind: Kind) -> Kind:
    return kind._replace(direct=False, folds=False)


def tile_of(m: int, n: int, k: int, kind: Kind, products: int, may_split: bool, sms: int) -> Tile:
    """The tile of an aligned output of these sizes."""
    tile = split_tile_for(m, n, k, products, sms) if may_split else None
    return tile or tile_for(m, n, k, _staged(kind), products, sms)


@functools.lru_cache(maxsize=4096)
def bind(n: int, k: int, tile: Tile, kind: Kind) -> CudaLaunch:
    """The launch of one signature: as `scaled_gemm.bind` for rows written directly."""
    macros = macros_for(n, k, tile, kind)
    program = nvrtc.Program(SOURCE, "scaled_gemm", tuple(macros.items()))
    pointers = 3 + (kind.bias_bytes > 0) + 2 * (kind.cross > 0) + (kind.batch == 0)
    scalars = "iq" + "qq" * (kind.cross > 0) + "i" * (kind.batch != 1)
    scalars += "ii" * (kind.scales == "block")
    slices = max(1, len(kind.a_steps)) * (2 if kind.in_mainloop else 1)
    return CudaLaunch(
        program, pointers=pointers, scalars=scalars, threads=tile.threads,
        shared_bytes=int(macros["SHARED_BYTES"]), tensor_maps=1 + (kind.scales == "group") + slices,
        cluster=tile.parts, programmatic=True,
    )  # fmt: skip


def make_plan(m: int, n: int, k: int, kind: Kind, tile: Tile, products: int, sms: int) -> Plan:
    """What a launch with a given tile needs."""
    # Rows of groups of any size are not known here: as if all were in one, and one tile more each.
    height = m + (products - 1) * tile.height if kind.batch == 0 else m
    grid = grid_of(tile, height, n, 1 if kind.batch == 0 else products, sms)
    return Plan(bind(n, k, tile, kind), tile, (grid, 1, 1), 0, 0, 1, {})


@jit.cached
def _plan(m: int, n: int, k: int, kind: Kind, products: int, may_split: bool, device: int) -> Plan:
    sms = jit.compute_units(device)
    tile = tile_of(m, n, k, kind, products, may_split, sms)
    return make_plan(m, n, k, kind, tile, products, sms)


def _launch(
    scales: str,
    a: Tensor | Sequence[Tensor],
    a_scale: Tensor | Sequence[Tensor],
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    bias: Tensor | None,
    _workspace: tuple[Tensor, ...],
    epilogue: Epilogue = PLAIN,
) -> None:
    slices: Sequence[Tensor] = (a,) if isinstance(a, Tensor) else a
    slice_scales: Sequence[Tensor] = (a_scale,) if isinstance(a_scale, Tensor) else a_scale
    n, k = out.shape[1], b.shape[0]
    is_dense = out.stride(0) == n and n * out.element_size() < DENSE_BYTES
    kind = scaled_gemm._kind_of(scales, slices, b, out, bias, epilogue)
    kind = kind._replace(direct=True, folds=is_dense)
    products = epilogue.groups if epilogue.offsets is None else len(epilogue.offsets) - 1
    m = out.shape[0] // products if kind.batch > 1 else out.shape[0]
    may_split = epilogue.offsets is None and not epilogue.batch_invariant
    plan = _plan(m, n, k, kind, products, may_split, out.get_device())
    scaled_gemm.run(
        plan, kind, m, products, slices, slice_scales, b, b_scale, out, bias, epilogue
    )  # fmt: skip


def _supports(scales: str, problem: Problem, device: Device) -> Support:
    if problem.out_format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"writes bfloat16 or float32, not {problem.out_format.value}")
    aligned = f"cuda.scaled_gemm_{scales}"
    if problem.n * problem.out_format.dtype.itemsize % 16 == 0:
        return Rejected(f"rows of n={problem.n} are 16-byte aligned: {aligned} is for them")
    return KERNELS[aligned].supports_problem(problem, device)


for _scales, (_a, _b) in SCALES.items():
    register(
        "scaled_gemm",
        name=f"scaled_gemm_{_scales}_unaligned",
        architectures=frozenset({"sm_90"}),
        granularity=_a,
        b_granularity=_b,
        accumulation="promoted",
        supports=functools.partial(_supports, _scales),
        kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
        batched=_scales != "block",  # where n must be a multiple of 128
        epilogues=EPILOGUES,
        k_slices=True,
        batch_invariant=True,
    )(functools.partial(_launch, _scales))
