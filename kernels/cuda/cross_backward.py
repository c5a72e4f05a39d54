"""Gradient of what a cross multiplies, quantized both ways. See cross_backward.cu.

    dy = (sum of terms) * x0

Without x0 it is the gradient of a layer behind which there is no cross. terms, x0: [rows, columns],
bfloat16 or float16, rows start at multiples of 16 bytes and have a multiple of 8 columns; dy: e4m3
or e5m2 with 1x128 scales, together with its transpose. Column sums are of 128 rows each there, and
of all in gradient_sums.cu, in the order of `lokakern.sums`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch, tensor_map
from lokakern.gradients import NormGradients
from lokakern.kernels.cuda.gradient_sums import launch_sums
from lokakern.registry.register import register
from lokakern.types import (
    ACCEPTED,
    GROUP,
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Problem,
    QuantizedTensor,
    Rejected,
    Support,
    norm_form,
)

SOURCE = str(Path(__file__).with_suffix(".cu"))
CHUNK = 8  # elements that a thread reads at once
TEAMS, TEAM = 2, 256  # threads of a tile of 128 x 128
MOST_TERMS = 3
BOXES, BOX_BYTES = 6, GROUP * GROUP * 2
SHARED_BYTES = BOXES * BOX_BYTES + TEAMS * (GROUP * GROUP + GROUP * 4) + BOXES * 24


@functools.lru_cache(maxsize=64)
def bind(
    terms: int, factor: bool, sums: bool, source: torch.dtype, target: torch.dtype
) -> CudaLaunch:
    """The launch for any size."""
    macros = {
        "TERMS": terms, "FACTOR": int(factor), "SUMS": int(sums),
        "IS_FLOAT16": int(source is torch.float16), "BOXES": BOXES,
        "IS_E5M2": int(target is torch.float8_e5m2), "INPUT_BYTES": 2, "IN_PLACE": 1, "WHOLE": 1,
        "POWER_OF_TWO": 0,
    }  # fmt: skip
    program = nvrtc.Program(SOURCE, "cross_backward", tuple(macros.items()))
    return CudaLaunch(
        program, pointers=5, scalars="iiqqqq", threads=TEAMS * TEAM + 32,
        shared_bytes=SHARED_BYTES, tensor_maps=terms + factor, programmatic=True,
    )  # fmt: skip


def launch(
    terms: Sequence[Tensor], x0: Tensor | None, made: QuantizedTensor, turned: QuantizedTensor,
    sums: Tensor | None,
) -> None:  # fmt: skip
    """Quantize ``(sum of terms) * x0`` and its transpose.

    Args:
        terms: At most 3, ``[m, n]``, bfloat16 or float16, as x0; n and the distance between rows
            are multiples of 8.
        x0: ``[m, n]``; None for the sum alone.
        made: ``[m, n]``, with 1x128 scales.
        turned: ``[n, m]``, of the same format.
        sums: Of columns, ``[n]``, float32, bfloat16 or float16, contiguous; None for none.
    """
    parts = None if sums is None else _empty_parts(terms[0])
    _launch(terms, x0, made, turned, parts)
    if sums is not None and parts is not None:
        launch_sums(parts, sums)


def _launch(
    terms: Sequence[Tensor], x0: Tensor | None, made: QuantizedTensor, turned: QuantizedTensor,
    parts: Tensor | None,
) -> None:  # fmt: skip
    assert made.scale is not None and turned.scale is not None  # FP8 has scales
    first = terms[0]
    rows, columns = first.shape
    operands = (*terms, *([] if x0 is None else [x0]))
    tiles = -(-rows // GROUP) * -(-columns // GROUP)
    box = (GROUP, GROUP)
    pointers = (made.data, made.scale, turned.data, turned.scale, first if parts is None else parts)
    strides = (
        made.data.stride(0), turned.data.stride(0), made.scale.stride(1), turned.scale.stride(1)
    )  # fmt: skip
    bind(len(terms), x0 is not None, parts is not None, first.dtype, made.data.dtype)(
        (min(tiles, jit.compute_units(first.get_device())), 1, 1), pointers,
        (rows, columns, *strides), tuple(tensor_map(x, box, 0) for x in operands),
    )  # fmt: skip


def _empty_parts(dd: Tensor) -> Tensor:
    """Room for the sums of every 128 rows, ``[ceil(rows / 128), columns]``."""
    rows, columns = dd.shape
    return torch.empty((-(-rows // GROUP), columns), dtype=torch.float32, device=dd.device)


def supports(problem: Problem, device: Device) -> Support:
    form = norm_form(problem.epilogue)
    if form.norm.kind != "none" or form.affine or form.last not in ("none", "cross"):
        return Rejected(f"differentiates a cross, or nothing, not {problem.epilogue}")
    if form.residual or form.residual_last:
        return Rejected("writes FP8 alone, no dy beside it")
    if problem.a.format is not Format.BFLOAT16:
        return Rejected(f"takes bfloat16, not {problem.a.format.value}")
    wanted = problem.out_format in (Format.E4M3FN, Format.E5M2)
    if not wanted or problem.out_granularity is not Granularity.GROUP:
        return Rejected(
            f"writes e4m3fn or e5m2 with 1x128 scales, not {problem.out_format.value} with "
            f"{problem.out_granularity.value} scales"
        )
    if problem.a.layout is not Layout.ROW or problem.a.alignment < 16:
        return Rejected("rows must be contiguous and start at multiples of 16 bytes")
    if problem.k % CHUNK:
        return Rejected(f"rows must have a multiple of 8 columns; k={problem.k}")
    if max(problem.m, problem.k) > 2**30:  # of tiles there are as many as memory has room for
        return Rejected(f"sizes must be at most 2^30; they are {problem.shape}")
    missing = nvrtc.why_not(device)
    return ACCEPTED if missing is None else Rejected(missing)


def _parts(
    dd: Tensor, _x0: Tensor, outputs: NormGradients, _epilogue: NormEpilogue
) -> tuple[Tensor, ...]:
    return () if outputs.sums is None else (_empty_parts(dd),)


@register("norm_backward", name="cross_backward", architectures=frozenset({"sm_90"}),
          supports=supports, workspace=_parts)  # fmt: skip
def cross_backward(
    dd: Tensor,
    x0: Tensor,
    outputs: NormGradients,
    epilogue: NormEpilogue,
    workspace: tuple[Tensor, ...],
) -> None:
    assert outputs.quantized is not None and outputs.quantized_t is not None  # as `supports` asks
    parts = workspace[0] if workspace else None
    factor = None if epilogue.x0 is None else x0
    _launch((dd,), factor, outputs.quantized, outputs.quantized_t, parts)
    if outputs.sums is not None and parts is not None:
        launch_sums(parts, outputs.sums.view(-1))
