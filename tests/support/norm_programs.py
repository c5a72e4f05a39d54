"""Programs of the CUDA kernels with a norm, and of those that dequantize or read long or short
rows, with the macros their launchers choose.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lokakern.kernels.cuda import (
    activate_quantize,
    column_sums,
    cross_backward,
    dequantize,
    gemm_cross,
    gemm_norm,
    gradient_sums,
    norm_backward,
    norm_quantize,
    norm_tiles,
    quantize_long,
    quantize_short,
)
from lokakern.kernels.cuda.norm_quantize import Signature
from lokakern.kernels.cuda.norm_tiles import NormKind
from lokakern.kernels.cuda.tiles import Kind
from lokakern.nvrtc import Program

SMS = 132  # of an H200
# A size for each tile of the rule, m, n, k, and rows that end within a tile.
SIZES = (
    (2048, 128, 128), (32768, 128, 128), (2048, 256, 256), (8192, 256, 256), (32768, 256, 256),
    (2048, 512, 512), (8192, 512, 512), (2048, 1024, 1024), (8192, 1024, 1024),
    (32768, 1024, 1024), (2048, 2048, 2048), (8192, 256, 1024), (2048, 1024, 256),
    (2048, 256, 1024), (4096, 192, 512), (4096, 720, 512), (256, 40, 96), (256, 8, 40),
    (2048, 512, 2048), (4096, 4096, 512),
)  # fmt: skip
KINDS = {
    "layer": NormKind("row", "layer", vectors=7),
    "layer bf16": NormKind("none", "layer", vectors=7, vector_item=2),
    "block_rms static": NormKind("row", "block_rms", 256, 1, last="hardswish", out="tensor"),
}
KINDS["layer fast"] = KINDS["layer"]._replace(scales="tensor", fast=True)
KINDS["block_rms static fast"] = KINDS["block_rms static"]._replace(scales="tensor", fast=True)
KINDS_AT = {
    "layer bf16": SIZES[1::3], "block_rms static": SIZES[::2], "layer fast": SIZES[::2],
    "block_rms static fast": SIZES[1::3],
}  # fmt: skip
ANY_SIZE = {
    "rms tensor to rows": NormKind("tensor", "rms", out="row"),
    "rms fast to rows": NormKind("row", "rms", out="row", fast=True),
    "residual fast": NormKind("tensor", "layer", vectors=7, residual=1, out="group", fast=True),
    "rms affine to rows": NormKind("row", "rms", vectors=6, last="silu", out="row"),
    "layer block to groups": NormKind("block", "layer", vectors=7, residual=1, out="group"),
    "block_rms narrow": NormKind("block", "block_rms", 64, last="relu", residual=2),
    "gate": NormKind("row", "rms", vectors=2, last="gate", residual=2),
    "cross": NormKind("none", "none", vectors=1, last="cross", out="tensor"),
    "e5m2": NormKind("row", "layer", a_type="e5m2"),
    "layer gelu to rows": NormKind("row", "layer", vectors=7, last="gelu", out="row"),
    "block_rms gelu_tanh static": NormKind("row", "block_rms", 256, last="gelu_tanh", out="tensor"),
    "gelu bf16 to rows": NormKind("none", vectors=1, last="gelu", out="row"),
}
# Of gemm_cross, n and k: of the last b is streamed, of the others it stays in shared memory.
CROSSES = ((72, 64), (3456, 256), (3456, 512), (1680, 1680))
COLUMNS = (8, 192, 1024, 2048, 8192)
SIGNATURES = {
    "layer": (2, "layer", 0, 6, 4, 0, "none", 2, 0),
    "rms to rows": (2, "rms", 0, 0, 4, 0, "none", 1, 2),
    "block_rms static": (2, "block_rms", 64, 1, 2, 0, "hardswish", 1, 1),
    "layer to groups": (4, "layer", 0, 7, 4, 1, "silu", 1, 3),
    "gate": (2, "rms", 0, 2, 2, 2, "gate", 1, 2),
    "cross": (2, "none", 0, 0, 4, 0, "cross", 2, 0),
    "layer gelu to rows": (2, "layer", 0, 6, 2, 0, "gelu", 1, 2),
}
ACTIVATED = (
    (64, "relu"),
    (2048, "relu"),
    (2048, "silu"),
    (8191, "hardswish"),
    (16384, "silu"),
    (2048, "gelu"),
    (8191, "gelu_tanh"),
)
# Of norm_backward: parts of a tile, one, a cluster of them, two teams, and several for each team.
BACKWARD_COLUMNS = {"layer e5m2": (72, 128, 1024, 2048, 8192)}  # and of the others:
BACKWARD_COLUMNS_OF_OTHERS = (128, 2048)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BACKWARD = {
    "layer e5m2": ("layer", 0, 6, 4, "none", 7, True, E5M2),
    "layer silu e5m2": ("layer", 0, 6, 2, "silu", 7, True, E5M2),
    "rms hardswish": ("rms", 0, 2, 4, "hardswish", 3, False, E4M3),
    "block_rms hardswish e5m2": ("block_rms", 256, 0, 4, "hardswish", 1, False, E5M2),
    "block_rms narrow": ("block_rms", 8, 6, 4, "silu", 6, True, E4M3),
    "layer plain": ("layer", 0, 6, 4, "relu", 6, True, None),
    "layer gelu e5m2": ("layer", 0, 6, 2, "gelu", 7, True, E5M2),
    "none gelu_tanh": ("none", 0, 0, 4, "gelu_tanh", 1, True, E4M3),
    "none relu e5m2": ("none", 0, 0, 4, "relu", 1, False, E5M2),
}

# Of cross_backward: terms, whether there are x0 and sums of columns, types.
BEHIND_CROSSES = {
    "1 term": (1, True, True, torch.bfloat16, E4M3),
    "2 terms": (2, True, True, torch.bfloat16, E4M3),
    "3 terms": (3, True, True, torch.bfloat16, E4M3),
    "1 term alone": (1, False, True, torch.bfloat16, E4M3),
    "1 term e5m2": (1, True, False, torch.bfloat16, E5M2),
    "3 terms float16": (3, True, True, torch.float16, E4M3),
}


def crosses() -> Iterator[tuple[str, Program]]:
    """Of a product with a cross, by scales and sizes; a bias of each type, and none."""
    for scales in gemm_cross.SCALES:
        for (n, k), bias_bytes in zip(CROSSES, (4, 0, 2, 2), strict=True):
            kind = Kind(scales, bias_bytes=bias_bytes)
            for words, told in (("", ()), (" keeps", (True,)), (" keeps, of one", (True, True))):
                bound = gemm_cross.bind(n, k, gemm_cross.tile_for(n, k, kind), kind, *told)
                yield f"gemm_cross_{scales} {n}x{k}{words}", bound.program


# Whether rows start where pieces do and end within one, and rows of a thread.
DEQUANTIZED = {
    "bfloat16": (True, False, dequantize.ACCESSES, E4M3, torch.bfloat16),
    "float16 ragged": (True, True, 1, E4M3, torch.float16),
    "bfloat16 askew": (False, True, dequantize.ACCESSES, E5M2, torch.bfloat16),
    "float32": (True, False, dequantize.ACCESSES, E5M2, torch.float32),
    "float32 askew": (False, True, 1, E4M3, torch.float32),
}


def dequantizers() -> Iterator[tuple[str, Program]]:
    """Of every granularity, to plain elements of every format; of rows that start anywhere, too."""
    for granularity in dequantize.SCALES:
        for words, rest in DEQUANTIZED.items():
            bound = dequantize.bind(granularity, *rest)
            yield f"dequantize_{granularity.suffix} to plain {words}", bound.program


LONG_ROWS = (17280, 69120, 123200, 262144, 17283)  # columns; 1, 2, 4, 8 blocks for 2 bytes, 1
LONG_KINDS = (
    (torch.bfloat16, E4M3, "bfloat16->e4m3fn"),
    (torch.float32, E5M2, "float32->e5m2"),
    (torch.float16, E4M3, "float16->e4m3fn"),
)


def long_rows() -> Iterator[tuple[str, Program]]:
    """Of every cluster; of rows that end within the columns of a thread; of data that lie askew."""
    for source, target, kind in LONG_KINDS:
        for columns in LONG_ROWS:
            if quantize_long.plan_for(columns, source.itemsize, 8):
                plan = quantize_long.plan_of(columns, source.itemsize)
                bound = quantize_long.bind(columns, plan, True, source, target)
                yield f"quantize_long_row {columns} {kind}", bound.program
        plan = quantize_long.plan_of(17283, source.itemsize)
        bound = quantize_long.bind(17283, plan, False, source, target)
        yield f"quantize_long_row 17283 askew {kind}", bound.program
        bound = quantize_long.bind(17283, plan, True, source, target, power_of_two=True)
        yield f"quantize_long_row_power_of_two 17283 {kind}", bound.program


# Columns and types, in rows of 1, 2 and 4 threads. Both kernels run the same programs.
SHORT = {
    "row 39": (39, torch.bfloat16, E4M3),
    "row 13 e5m2": (13, torch.bfloat16, E5M2),
    "row 100": (100, torch.bfloat16, E4M3),
    "row 39 float16": (39, torch.float16, E4M3),
    "row 39 float32": (39, torch.float32, E4M3),
    "group 121 e5m2": (121, torch.bfloat16, E5M2),
}


def short_rows() -> Iterator[tuple[str, Program]]:
    """Of rows in one thread or more."""
    for words, (columns, source, target) in SHORT.items():
        tile = quantize_short.tile_of(columns, source.itemsize)
        bound = quantize_short.bind(columns, tile, source, target)
        yield f"quantize_short_{words}", bound.program


def programs() -> Iterator[tuple[str, Program]]:
    """Programs by kernel, size and words."""
    for words, kind in (KINDS | ANY_SIZE).items():
        for m, n, k in KINDS_AT.get(words, SIZES) if words in KINDS else ((8192, 512, 512),):
            blocks = kind._replace(block=min(kind.block, n))
            if blocks.block and n % blocks.block:
                continue
            tile = norm_tiles.tile_for(m, n, k, blocks, SMS)
            assert tile is not None, (m, n, k, words)
            name = "bf16" if kind.scales == "none" else kind.scales + "_fast" * kind.fast
            yield (
                f"gemm_norm_{name} {m}x{n}x{k} {words}",
                gemm_norm.bind(n, k, tile, blocks).program,
            )
    yield from crosses()
    for words, fields in SIGNATURES.items():
        for columns in COLUMNS:
            if fields[2] and columns % fields[2]:
                continue
            bound = norm_quantize.bind(Signature(columns, *fields))
            yield f"norm_quantize {columns} {words}", bound.launch.program
    for columns, activation in ACTIVATED:
        easy = columns % 8 == 0
        activated = activate_quantize.bind(columns, activation, easy, easy, torch.bfloat16, E4M3)
        name = f"activate_quantize_row {columns} {activation} bfloat16->e4m3fn"
        yield name, activated.launch.program
    wide = activate_quantize.bind(1024, "relu", True, True, torch.float32, E5M2)
    yield "activate_quantize_row 1024 relu float32->e5m2", wide.launch.program
    for words, rest in BACKWARD.items():
        for columns in BACKWARD_COLUMNS.get(words, BACKWARD_COLUMNS_OF_OTHERS):
            if rest[1] and columns % rest[1]:
                continue
            backward = norm_backward.bind(norm_backward.Signature(columns, *rest))
            yield f"norm_backward {columns} {words}", backward.launch.program
    for words, signature in BEHIND_CROSSES.items():
        yield f"cross_backward {words}", cross_backward.bind(*signature).program
    yield "norm_backward adds bfloat16", gradient_sums.bind().program
    yield "norm_backward of a bias", column_sums.bind().program
    yield from dequantizers()
    yield from long_rows()
    yield from short_rows()
