"""Gradients of a norm of rows and what follows, quantized both ways. See norm_backward.cu.

dd, y: [rows, columns], bfloat16, rows start at multiples of 16 bytes and have a multiple of 8
columns, at most 8192; dy: bfloat16, or e4m3 or e5m2 with 1x128 scales, together with its transpose.
Column sums are of 128 rows each there, and of all in quantize_sums.cu: in the order of
`lokakern.sums`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import nvrtc
from lokakern.driver import CudaLaunch
from lokakern.gradients import NormGradients, sums_of
from lokakern.kernels.cuda.quantize_sums import launch_sums
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
    Rejected,
    Support,
    norm_form,
)

SOURCE = str(Path(__file__).with_suffix(".cu"))
CHUNK = 8  # elements that a thread reads at once
TEAM = 256  # threads of a tile of 128 x 128
LONGEST_ROW = 8192
LARGEST_CLUSTER = 8  # that every GPU takes
LAST = {"none": 0, "relu": 1, "hardswish": 2, "silu": 3}
NORMS = {"none": 0, "layer": 1, "rms": 2, "block_rms": 2}


class Split(NamedTuple):
    """How a row is shared: teams of a block, tiles of a team, blocks of a cluster."""

    teams: int = 1
    steps: int = 1
    cluster: int = 1


class Signature(NamedTuple):
    """All that decides a compilation."""

    columns: int
    norm: str
    block: int
    vectors: int
    vector_item: int
    last: str
    sums: int
    plain: bool
    target: torch.dtype | None


class Bound(NamedTuple):
    """A launch and the size of its grid."""

    launch: CudaLaunch
    blocks: int  # along a row


def split_of(columns: int, span: int) -> Split:
    """How blocks share a row whose statistics are of `span` columns; 0: of none.

    Two tiles are two teams of a block, with all the registers of an SM, up to 16 tiles; of longer
    rows a team takes several, one after the other.
    """
    tiles = -(-span // GROUP)
    if tiles <= LARGEST_CLUSTER:
        return Split(cluster=max(tiles, 1))
    assert span == columns  # narrower spans have at most 256 columns
    if tiles <= 2 * LARGEST_CLUSTER:
        return Split(teams=2, cluster=-(-tiles // 2))
    steps = -(-tiles // LARGEST_CLUSTER)
    return Split(steps=steps, cluster=-(-tiles // steps))


@functools.lru_cache(maxsize=4096)
def bind(signature: Signature) -> Bound:
    """The launch of one signature."""
    columns, span = signature.columns, signature.block or signature.columns
    split = split_of(columns, 0 if signature.norm == "none" else span)
    macros = {
        "COLUMNS": columns, "TEAMS": split.teams, "STEPS": split.steps, "CLUSTER": split.cluster,
        "NORM": NORMS[signature.norm], "SPAN": span, "VECTORS": signature.vectors,
        "VECTOR_ITEM": signature.vector_item, "LAST": LAST[signature.last],
        "SUMS": signature.sums, "PLAIN": int(signature.plain),
        "QUANTIZES": int(signature.target is not None),
        "IS_E5M2": int(signature.target is torch.float8_e5m2),
        "INPUT_BYTES": 2, "IN_PLACE": 1, "WHOLE": 1, "POWER_OF_TWO": 0,
    }  # fmt: skip
    program = nvrtc.Program(SOURCE, "norm_backward", tuple(macros.items()))
    launch = CudaLaunch(
        program, pointers=10, scalars="ifqqqqqqq", threads=split.teams * TEAM,
        cluster=split.cluster, programmatic=True,
    )  # fmt: skip
    return Bound(launch, -(-columns // (GROUP * split.teams * split.steps)))


def supports(problem: Problem, device: Device) -> Support:
    if problem.a.format is not Format.BFLOAT16:
        return Rejected(f"takes bfloat16, not {problem.a.format.value}")
    plain = (Format.BFLOAT16, Granularity.NONE)
    kinds = (plain, *((form, Granularity.GROUP) for form in (Format.E4M3FN, Format.E5M2)))
    if (problem.out_format, problem.out_granularity) not in kinds:
        return Rejected(
            "writes bfloat16, and e4m3fn or e5m2 with 1x128 scales, not "
            f"{problem.out_format.value} with {problem.out_granularity.value} scales"
        )
    if problem.a.layout is not Layout.ROW or problem.a.alignment < 16:
        return Rejected("rows must be contiguous and start at multiples of 16 bytes")
    if problem.k % CHUNK or problem.k > LONGEST_ROW:
        return Rejected(f"rows must have a multiple of 8 columns, at most 8192; k={problem.k}")
    if problem.m > 2**31 - GROUP:
        return Rejected(f"m must be at most 2^31 - 128; m={problem.m}")
    form = norm_form(problem.epilogue)
    if form.last not in LAST:
        return Rejected(f"differentiates {', '.join(LAST)}, not {form.last}")
    span = form.norm.block
    if span and span != problem.k and (span & span - 1 or not CHUNK <= span <= 256):
        return Rejected(f"blocks must be a power of two from 8 to 256, or the row; not {span}")
    missing = nvrtc.why_not(device)
    return ACCEPTED if missing is None else Rejected(missing)


def _parts(
    dd: Tensor, _y: Tensor, _outputs: NormGradients, epilogue: NormEpilogue
) -> tuple[Tensor, ...]:
    """Room for the sums of every 128 rows, ``[ceil(rows / 128), sums, columns]``."""
    count = sums_of(epilogue).bit_count()
    if not count:
        return ()
    rows, columns = dd.shape
    shape = (-(-rows // GROUP), count * columns)
    return (torch.empty(shape, dtype=torch.float32, device=dd.device),)


@register("norm_backward", architectures=frozenset({"sm_90"}), supports=supports, workspace=_parts)
def norm_backward(
    dd: Tensor,
    y: Tensor,
    outputs: NormGradients,
    epilogue: NormEpilogue,
    workspace: tuple[Tensor, ...],
) -> None:
    rows, columns = dd.shape
    dy, made, turned = outputs.dy, outputs.quantized, outputs.quantized_t
    given = (epilogue.norm_weight, epilogue.norm_bias)
    signature = Signature(
        columns, epilogue.norm.kind, epilogue.norm.block,
        2 * (given[0] is not None) + 4 * (given[1] is not None),
        next((x.element_size() for x in given if x is not None), 4), epilogue.activation,
        sums_of(epilogue), dy is not None, None if made is None else made.data.dtype,
    )  # fmt: skip
    bound = bind(signature)
    parts = workspace[0] if workspace else dd
    tensors: list[Tensor | None] = [dd, y, *given, dy]
    strides = [dd.stride(0), y.stride(0), 0 if dy is None else dy.stride(0)]
    if made is None or turned is None or made.scale is None or turned.scale is None:
        tensors += [None] * 4
        strides += [0] * 4
    else:
        tensors += [made.data, made.scale, turned.data, turned.scale]
        strides += [made.data.stride(0), turned.data.stride(0)]
        strides += [made.scale.stride(1), turned.scale.stride(1)]
    bound.launch(
        (-(-rows // GROUP) * bound.blocks, 1, 1),
        (*[dd if x is None else x for x in tensors], parts),
        (rows, epilogue.norm.eps, *strides),
    )
    if outputs.sums is not None:
        launch_sums(parts, outputs.sums.view(-1))
