"""A norm of rows, and what follows, in one read. See norm_quantize.cu.

    d = last(norm(x [+ bias] [+ residual]) * weight + shift) [+ residual]

x: [rows, columns], bfloat16 or float32; d: bfloat16, or e4m3 with one scale that is given, or with
scales of rows or of 128 of their columns. Rows of all of them start at multiples of 16 bytes, and
have a multiple of 8 columns, at most 8192.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda.norm_tiles import LAST, NORMS
from lokakern.registry.register import register
from lokakern.types import (
    ACCEPTED,
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
THREADS = 256
LONGEST_ROW = 8192
# Of a thread: chunks of a row, and rows at a time. 2 and 1 were as fast as any of 8 choices on an
# H200 (9 sizes, layer and rms; 80 to 85 % of 4.3 TB/s where there is much to read).
ACCESSES, LINES = 2, 1

OUT_SCALES = {Granularity.TENSOR: 1, Granularity.ROW: 2, Granularity.GROUP: 3}


class Signature(NamedTuple):
    """All that decides a compilation."""

    columns: int
    input_bytes: int
    norm: str
    block: int
    vectors: int
    vector_item: int
    residual: int
    last: str
    out: int
    out_scales: int


class Bound(NamedTuple):
    """A launch with what its grid is made of."""

    launch: CudaLaunch
    rows: int  # of a block at a time
    blocks: int  # of an SM


@functools.lru_cache(maxsize=4096)
def bind(signature: Signature) -> Bound:
    """The launch of one signature."""
    columns, span = signature.columns, signature.block or signature.columns
    chunks = columns // CHUNK
    least = span // CHUNK if span < columns else 1  # threads that have a part of a span
    team = 1 << (max(-(-chunks // ACCESSES), least, min(chunks, 16)) - 1).bit_length()
    team = min(team, THREADS)
    accesses = -(-chunks // team)
    # Blocks for whose registers an SM has room: nothing spills.
    beside = signature.input_bytes == 4 or signature.residual or signature.last in ("gate", "cross")
    most, beside = (3, beside) if accesses <= ACCESSES else (2, beside or signature.vectors > 5)
    blocks = most - bool(beside)
    macros = {
        "COLUMNS": columns, "TEAM": team, "ACCESSES": accesses, "LINES": LINES, "SM_BLOCKS": blocks,
        "INPUT_BYTES": signature.input_bytes, "NORM": NORMS[signature.norm], "SPAN": span,
        "VECTORS": signature.vectors, "VECTOR_ITEM": signature.vector_item,
        "RESIDUAL": signature.residual, "LAST": LAST[signature.last], "OUT": signature.out,
        "OUT_SCALES": signature.out_scales,
    }  # fmt: skip
    program = nvrtc.Program(SOURCE, "norm_quantize", tuple(macros.items()))
    launch = CudaLaunch(program, pointers=9, scalars="ifqqqqqq", threads=THREADS, programmatic=True)
    return Bound(launch, THREADS // team * LINES, blocks)


def vectors_of(epilogue: NormEpilogue) -> tuple[int, int]:
    """Which of bias, weight and shift there are, as bits, and the bytes of their elements."""
    given = (epilogue.bias, epilogue.norm_weight, epilogue.norm_bias)
    item = next((x.element_size() for x in given if x is not None), 4)
    return sum(1 << i for i, x in enumerate(given) if x is not None), item


def residual_of(epilogue: NormEpilogue) -> int:
    """0: none; 1: before the norm; 2: at the end."""
    return 0 if epilogue.residual is None else 1 + epilogue.residual_last


def supports(problem: Problem, device: Device) -> Support:
    if problem.a.format not in (Format.BFLOAT16, Format.FLOAT32):
        return Rejected(f"takes bfloat16 or float32, not {problem.a.format.value}")
    if problem.out_format not in (Format.BFLOAT16, Format.E4M3FN):
        return Rejected(f"writes bfloat16 or e4m3fn, not {problem.out_format.value}")
    if problem.out_format.is_fp8 and problem.out_granularity not in OUT_SCALES:
        return Rejected(f"makes no {problem.out_granularity.value} scales")
    if problem.a.layout is not Layout.ROW or problem.a.alignment < 16:
        return Rejected("rows must be contiguous and start at multiples of 16 bytes")
    if problem.k % CHUNK or problem.k > LONGEST_ROW:
        return Rejected(f"rows must have a multiple of 8 columns, at most 8192; k={problem.k}")
    if problem.m >= 2**31:
        return Rejected(f"m must be less than 2^31; m={problem.m}")
    span = norm_form(problem.epilogue).norm.block
    if span and span != problem.k and (span & span - 1 or not CHUNK <= span <= 256):
        return Rejected(f"blocks must be a power of two from 8 to 256, or the row; not {span}")
    missing = nvrtc.why_not(device)
    return ACCEPTED if missing is None else Rejected(missing)


@register("norm_quantize", architectures=frozenset({"sm_90"}), supports=supports)
def norm_quantize(
    x: Tensor,
    out: Tensor | QuantizedTensor,
    epilogue: NormEpilogue,
    _workspace: tuple[Tensor, ...],
) -> None:
    rows, columns = x.shape
    if isinstance(out, QuantizedTensor):
        data, scale, out_scales = out.data, out.scale, OUT_SCALES[out.granularity]
    else:
        data, scale, out_scales = out, None, 0
    form = epilogue.form
    item = x.element_size()
    signature = Signature(
        columns, item, form.norm.kind, form.norm.block, *vectors_of(epilogue),
        residual_of(epilogue), form.last, data.element_size(), out_scales,
    )  # fmt: skip
    bound = bind(signature)
    grid = min(-(-rows // bound.rows), jit.compute_units(x.get_device()) * bound.blocks)
    first = epilogue.x0 if epilogue.gate is None else epilogue.gate
    others = (epilogue.residual, first, epilogue.x)
    strides = [0 if y is None else y.stride(0) for y in others]
    scale_stride = scale.stride(1) if scale is not None and out_scales == 3 else 0
    given = (epilogue.bias, epilogue.norm_weight, epilogue.norm_bias, *others, data, scale)
    bound.launch(
        (grid, 1, 1),
        (x, *[x if y is None else y for y in given]),
        (rows, epilogue.norm.eps, x.stride(0), data.stride(0), scale_stride, *strides),
        (),
    )
