"""Programs with norms in float16, each beside that for bfloat16."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lokakern.kernels.cuda import (
    activate_quantize,
    column_sums,
    gemm_cross,
    gemm_norm,
    gradient_sums,
    half,
    norm_backward,
    norm_quantize,
    norm_tiles,
)
from lokakern.kernels.cuda.norm_quantize import Signature
from lokakern.kernels.cuda.norm_tiles import NormKind
from lokakern.kernels.cuda.tiles import Kind
from lokakern.nvrtc import Program
from lokakern.registry.register import load_kernels
from tests.support.norm_programs import ACTIVATED, ANY_SIZE, BACKWARD, E4M3, KINDS, SIGNATURES, SMS

load_kernels()  # with what binds them for float16
# Of gemm_norm: tiles of 64 to 256 columns, one and two warpgroups, tails, rows of several blocks.
KINDS_IN_HALF = {
    "layer": ((32768, 256, 256), (8192, 1024, 1024), (4096, 720, 512), (256, 40, 96)),
    "layer bf16": ((2048, 128, 128), (8192, 256, 256), (8192, 1024, 1024), (256, 8, 40),
                   (4096, 4096, 512)),
    "layer block to groups": ((8192, 512, 512),),
    "block_rms narrow": ((8192, 512, 512),),
    "gate": ((8192, 512, 512),),
    "cross": ((8192, 512, 512),),
}  # fmt: skip
CROSSED = ((72, 64, 4), (3456, 256, 2), (1680, 1680, 2))
BACKWARD_COLUMNS = (72, 2048, 8192)


def programs() -> dict[str, tuple[Program, Program]]:
    """That for bfloat16, and that for float16."""
    found = {}
    for columns, activation in ACTIVATED:
        easy = columns % 8 == 0
        found[f"activate_quantize {columns} {activation}"] = tuple(
            activate_quantize.bind(columns, activation, easy, easy, dtype, E4M3).launch.program
            for dtype in (torch.bfloat16, torch.float16)
        )
    for words, fields in SIGNATURES.items():
        for columns in (192, 8192):
            is_to_fp8, is_of_halves = fields[-2] == 1, fields[0] == 2
            if is_to_fp8 and is_of_halves and not (fields[2] and columns % fields[2]):
                launch = norm_quantize.bind(Signature(columns, *fields)).launch  # type: ignore[arg-type]
                both = launch.program, half._in_half(launch).program
                found[f"norm_quantize {columns} {words}"] = both
    return found | products() | backward()


def both_of(programs: Iterable[Program]) -> tuple[Program, Program]:
    plain, halved = programs
    return plain, halved


def products() -> dict[str, tuple[Program, Program]]:
    """Of products with norms and crosses."""
    found = {}
    for words, sizes in KINDS_IN_HALF.items():
        kind = (KINDS | ANY_SIZE)[words]
        for m, n, k in sizes:
            tile = norm_tiles.tile_for(m, n, k, kind, SMS)
            assert tile is not None, (m, n, k, words)
            kinds: tuple[NormKind, NormKind] = kind, half.HalfNormKind(*kind)
            found[f"gemm_norm {m}x{n}x{k} {words}"] = both_of(
                gemm_norm.bind(n, k, tile, x).program for x in kinds
            )
    for n, k, bias_bytes in CROSSED:
        plain = Kind("row", bias_bytes=bias_bytes)
        crossed: tuple[Kind, Kind] = plain, half.HalfKind(*plain)
        for keeps, words in ((False, ""), (True, " keeps")):
            found[f"gemm_cross {n}x{k}{words}"] = both_of(
                gemm_cross.bind(n, k, gemm_cross.tile_for(n, k, x), x, keeps).program
                for x in crossed
            )
    return found


def backward() -> dict[str, tuple[Program, Program]]:
    """Of gradients of norms."""
    found = {}
    for words, rest in BACKWARD.items():
        for columns in BACKWARD_COLUMNS:
            if rest[1] and columns % rest[1]:
                continue
            launch = norm_backward.bind(norm_backward.Signature(columns, *rest)).launch
            pair = launch.program, half._in_half(launch).program
            found[f"norm_backward {columns} {words}"] = pair
    for module in (column_sums, gradient_sums):
        both = both_of(module.bind(x).program for x in (torch.bfloat16, torch.float16))
        found[both[0].entry] = both
    return found


PROGRAMS = programs()
