"""CUDA kernels compile for all GPUs they claim, without spills, to the instructions they are for.

What they take of the hardware is kept in kernels/cuda/resources.json. Beside this file is kept from
what each program was compiled that passed these tests: text, macros, options and compiler, which
decide its bytes. What differs from that is compiled and tested, and one of eight of the others; all
of them (10 minutes of a core) with LOKAKERN_CHECK_ALL=1, or once these tests themselves change.
After a change on purpose, or with another NVRTC:

    python -m tests.kernels.test_cuda_compiled
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lokakern import nvrtc
from lokakern.errors import CompilationError
from lokakern.kernels.cuda import (
    added_products,
    fast_tiles,
    gelu,
    half,
    quantize,
    quantize_sums,
    quantize_tensor,
    quantize_tile,
    quantize_together,
    relu_backward,
    scaled_gemm,
    scaled_gemm_fast,
    scaled_gemm_split,
    scaled_gemm_turned,
    scaled_gemm_unaligned,
    tiles,
    token_gradient,
    window_samples,
)
from lokakern.kernels.cuda.fast_tiles import FastTile
from lokakern.kernels.cuda.tiles import ROWS, Kind, Tile
from lokakern.nvrtc import Program
from lokakern.registry.digests import KERNELS_ROOT
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import GROUP, Granularity
from tests.support import disassembly, norm_programs
from tests.support.disassembly import disassembled, tool
from tests.support.half_norm_programs import PROGRAMS as HALF_NORMS
from tests.support.sharing import made_once, shared_folder

FOLDER = KERNELS_ROOT / "cuda"
RECORD = FOLDER / "resources.json"
# One size of every kind of tile: parts of a warp, a warp, a block, a cluster, two reads.
ROW_COLUMNS = (64, 128, 256, 512, 1024, 2048, 4096, 7168, 8192, 16384, 34560, 115200, 300000)
GROUP_COLUMNS = (1024, 200)
BATCH = 10  # programs that are disassembled at once
UNALIGNED_COLUMNS = (13, 39, 479, 8191, 9001)
KINDS = (
    (torch.bfloat16, torch.float8_e4m3fn, "bfloat16->e4m3fn"),
    (torch.float32, torch.float8_e5m2, "float32->e5m2"),
    (torch.float16, torch.float8_e4m3fn, "float16->e4m3fn"),
)


def cases() -> dict[str, Program]:
    """Programs with the macros their launchers choose, by kernel, size and types."""
    found: dict[str, Program] = {}
    for source, target, kind in KINDS:
        types = (source, target)
        for columns in (*ROW_COLUMNS, *UNALIGNED_COLUMNS):
            bound = quantize.bind(columns, columns, columns in ROW_COLUMNS, True, *types)
            found[f"quantize_row {columns} {kind}"] = bound.launch.program
        for columns in (*GROUP_COLUMNS, UNALIGNED_COLUMNS[0]):
            bound = quantize.bind(columns, GROUP, columns in GROUP_COLUMNS, True, *types)
            found[f"quantize_group {columns} {kind}"] = bound.launch.program
        for columns in (64, 39):
            bound = quantize.bind(columns, columns, columns == 64, True, *types, many=True)
            found[f"quantize_row {columns} many {kind}"] = bound.launch.program
        for name, span in (("row", 1024), ("group", GROUP)):
            bound = quantize.bind(1024, span, True, True, *types, power_of_two=True)
            found[f"quantize_{name}_power_of_two 1024 {kind}"] = bound.launch.program
        found |= {f"{name} {kind}": program for name, program in both_ways(types)}
        found |= {f"{name} {kind}": program for name, program in tensors(types)}
        found |= {f"{name} {kind}": program for name, program in together(types)}
    found |= (
        dict(gemms())
        | dict(unaligned_gemms())
        | dict(fast_gemms())
        | dict(turned_gemms())
        | dict(split_gemms())
        | dict(half_gemms())
    )
    return found | dict(norm_programs.programs())


# A size for each tile of the rule, m, n, k; and what comes after the sums, at a few of them.
GEMM_SIZES = (
    (2048, 128, 128), (2048, 256, 256), (2048, 512, 512), (8192, 512, 512), (8192, 1024, 1024),
    (8192, 2048, 2048), (32768, 128, 128), (32768, 1024, 256), (20480, 24, 720), (20480, 8, 39),
    (2048, 512, 2048), (256, 512, 115200), (2048, 512, 115200), (256, 2048, 17280),
    (327680, 24, 64), (327680, 16, 128),
)  # fmt: skip
GEMM_KINDS = {
    "relu to e4m3": Kind("row", 1, 2, activation="relu"),
    "hardswish to e4m3": Kind("row", 1, 2, activation="hardswish"),
    "silu": Kind("row", 2, 2, activation="silu"),
    "gelu": Kind("row", 2, 2, activation="gelu"),
    "gelu_tanh to e4m3": Kind("tensor", 1, 4, activation="gelu_tanh"),
    "cross": Kind("row", 2, 2, cross=2),
    "cross of odd rows": Kind("row", 2, 2, False, cross=1, direct=True),
    "float32": Kind("row", 4, 4),
    "accumulate e5m2": Kind("group", 4, accumulate=True, a_type="e5m2"),
    "groups": Kind("row", batch=2),
    "offsets": Kind("row", batch=0),
    "offsets in blocks": Kind("block", batch=0),
    "slices": Kind("block", a_steps=(3, 7, 8)),
}


SMS = 132


def gemms() -> Iterator[tuple[str, Program]]:
    """Of every kind of scales at every tile, and of everything else after the sums."""
    sms = SMS
    for scales in ("tensor", "row", "block", "group"):
        for m, n, k in GEMM_SIZES:
            kind = Kind(scales, folds=n < 32)  # rows of bfloat16 under 64 bytes
            tile = gemm_tile(m, n, k, kind, sms)
            program = scaled_gemm.bind(n, k, tile, kind).program
            yield f"scaled_gemm_{scales} {m}x{n}x{k}", program
    for words, kind in GEMM_KINDS.items():
        for m in (2048, 8192):
            tile = gemm_tile(m, 1024, 1024, kind, sms)
            program = scaled_gemm.bind(1024, 1024, tile, kind).program
            yield f"scaled_gemm_{kind.scales} {m} {words}", program


UNALIGNED_SIZES = (
    (8192, 1677, 1677), (2048, 479, 1024), (8192, 1029, 256), (32768, 1021, 256),
    (256, 479, 115200), (1024, 91, 512), (8192, 45, 720), (8192, 13, 479), (327680, 13, 64),
    (327680, 23, 128), (8192, 1, 39),
)  # fmt: skip
UNALIGNED_KINDS = {
    "bias silu": Kind("row", 2, 2, False, activation="silu", direct=True),
    "bias gelu": Kind("row", 2, 2, False, activation="gelu", direct=True),
    "cross": Kind("row", 2, 2, False, cross=1, direct=True),
    "float32": Kind("row", 4, 4, False, direct=True),
    "groups": Kind("row", batch=2, direct=True),
    "offsets": Kind("row", batch=0, direct=True),
    "e5m2 slices": Kind("block", a_type="e5m2", a_steps=(3, 7, 8), direct=True),
}


def unaligned_gemms() -> Iterator[tuple[str, Program]]:
    """The same of outputs that no bulk copy can write."""
    module = scaled_gemm_unaligned
    for scales in ("tensor", "row", "block", "group"):
        for m, n, k in UNALIGNED_SIZES:
            kind = Kind(scales, direct=True, folds=n * 2 < module.DENSE_BYTES)
            program = module.bind(n, k, module.tile_of(m, n, k, kind, 1, True, SMS), kind).program
            yield f"scaled_gemm_{scales}_unaligned {m}x{n}x{k}", program
    for words, kind in UNALIGNED_KINDS.items():
        for m in (2048, 8192):
            tile = module.tile_of(m, 1029, 1000, kind, 1, True, SMS)
            program = module.bind(1029, 1000, tile, kind).program
            yield f"scaled_gemm_{kind.scales}_unaligned {m} {words}", program


FAST_SIZES = (
    (8192, 2048, 2048), (8192, 1680, 1680), (2432, 1024, 4608), (640, 2048, 1952),
    (8192, 512, 512), (256, 512, 115200), (1024, 64, 512),
    (8192, 192, 512), (8192, 288, 1024), (8192, 96, 4096),
    (3183, 128, 7728), (956, 112, 8192), (24668, 64, 912), (7949, 48, 1312),
)  # fmt: skip
NARROW_SIZES = ((24668, 64, 912), (7949, 48, 1312), (8960, 48, 688))
FAST_TILES = (
    *(FastTile(x, warpgroups=1) for x in (64, 112, 224)), *map(FastTile, (80, 144, 208, 256)),
    FastTile(128, in_turn=True), FastTile(144, above=2, in_turn=True),
    FastTile(160, warpgroups=3, chunks=1), FastTile(192, above=2, warpgroups=3, chunks=1),
    FastTile(32, warpgroups=3, above=2), FastTile(192, warpgroups=1, parts=8),
    FastTile(96, warpgroups=1, parts=4, above=2),
)  # fmt: skip
FAST_KINDS = {
    "fp8 silu": Kind("row", out_bytes=1, bias_bytes=2, activation="silu"),
    "float32 sums": Kind("row", out_bytes=4, bias_bytes=4, accumulate=True),
}


PAIRED_TILES = (
    FastTile(64, warpgroups=1, along=2), FastTile(192, warpgroups=1, above=2), FastTile(80),
    FastTile(128, above=2, along=2), FastTile(160, along=2), FastTile(192, above=2, along=2),
    FastTile(112, warpgroups=3, chunks=1, above=2, along=2), FastTile(64, warpgroups=3, chunks=1),
    FastTile(96, warpgroups=1, parts=4, above=2), FastTile(128, parts=4, along=2),
)  # fmt: skip


def fast_gemms() -> Iterator[tuple[str, Program]]:
    """The same in tiles of any width, with and without promotion, of every shape of tiles."""
    module = scaled_gemm_fast
    for suffix, promotes in (("fast", False), ("paired", True)):

        def program(
            n: int, k: int, tile: tiles.Tile, kind: Kind, promotes: bool = promotes
        ) -> Program:
            return module.bind(n, k, tile, promotes, kind).program

        def chosen(m: int, n: int, k: int, kind: Kind, promotes: bool = promotes) -> tiles.Tile:
            level = fast_tiles.askew(k)
            return fast_tiles.tile_of(m, n, k, kind, level, True, SMS, promotes)

        for scales in ("tensor", "row"):
            for m, n, k in FAST_SIZES:
                made = program(n, k, chosen(m, n, k, Kind(scales)), Kind(scales))
                yield f"scaled_gemm_{scales}_{suffix} {m}x{n}x{k}", made
        for words, kind in GEMM_KINDS.items():
            if kind.scales in ("tensor", "row") and kind.batch == 1:
                for k in (1024, 1680):
                    made = program(1024, k, chosen(8192, 1024, k, kind), kind)
                    yield f"scaled_gemm_{kind.scales}_{suffix} {k} {words}", made
        for tile in PAIRED_TILES if promotes else FAST_TILES:
            made = program(1040, 1040, tile, Kind("row"))
            yield f"scaled_gemm_row_{suffix} {_named(tile)}", made
        for words, kind in FAST_KINDS.items():
            found = [x for x in fast_tiles.tiles_of(kind.out_bytes, 0, False, promotes)
                     if promotes or x.block_n in (112, 144, 160, 208, 224)]  # fmt: skip
            found += [x for x in fast_tiles.tiles_of(kind.out_bytes, 0, True, promotes)
                      if x.parts > 1 and x.block_n == 160]  # fmt: skip
            for tile in found:
                made = program(1040, 1040, tile, kind)
                yield f"scaled_gemm_row_{suffix} {_named(tile)} {words}", made
            for m, n, k in NARROW_SIZES:
                made = program(n, k, chosen(m, n, k, kind), kind)
                yield f"scaled_gemm_row_{suffix} {m}x{n}x{k} {words}", made


def _named(tile: FastTile) -> str:
    rows = ROWS * tile.warpgroups
    turn = " in turn" if tile.in_turn else ""
    pairs = {(1, 1): "", (2, 1): " pairs", (1, 2): " beside", (2, 2): " quads"}
    parts = f" {tile.parts} parts" if tile.parts > 1 else ""
    return f"{rows}x{tile.block_n}{turn}{pairs[tile.above, tile.along]}{parts}"


TURNED_TILES = (
    *map(FastTile, (64, 112, 144, 160, 208, 256)), FastTile(80, warpgroups=1),
    FastTile(224, warpgroups=1, above=2), FastTile(176, warpgroups=3, chunks=1),
    FastTile(192, warpgroups=3, chunks=1, along=2), FastTile(160, above=2, along=2),
)  # fmt: skip
PROMOTED_TURNED_TILES = (
    *map(FastTile, (80, 112, 160)), FastTile(192, above=2), FastTile(96, warpgroups=1, along=2),
    FastTile(112, warpgroups=3, chunks=1, above=2, along=2),
)  # fmt: skip
TURNED_KINDS = {
    "bias": Kind("row", bias_bytes=2), "relu": Kind("row", bias_bytes=4, activation="relu"),
    "plain": Kind("tensor", a_type="e5m2"),
}  # fmt: skip


def turned_gemms() -> Iterator[tuple[str, Program]]:
    """Products in tiles whose rows are the weight's."""
    module = scaled_gemm_turned
    for suffix, promotes in (("turned_fast", False), ("turned", True)):
        for m, n, k in (
            (1547, 768, 4096),
            (4736, 512, 5856),
            (8832, 1024, 7376),
            (33792, 9216, 2048),
        ):
            tile = module.tile_of(m, n, k, fast_tiles.askew(k), SMS, promotes)
            made = module.bind(n, k, tile, promotes, Kind("row")).program
            yield f"scaled_gemm_row_{suffix} {m}x{n}x{k}", made
        for tile in PROMOTED_TURNED_TILES if promotes else TURNED_TILES:
            made = module.bind(1040, 1040, tile, promotes, Kind("row")).program
            yield f"scaled_gemm_row_{suffix} {_named(tile)}", made
        wide = FastTile(192, above=2)  # where a bias takes the last registers
        for words, kind in TURNED_KINDS.items():
            for tile in (FastTile(112, warpgroups=3, chunks=1), FastTile(160, above=2), wide):
                made = module.bind(1040, 1040, tile, promotes, kind).program
                yield f"scaled_gemm_{kind.scales}_{suffix} {_named(tile)} {words}", made


def half_gemms() -> Iterator[tuple[str, Program]]:
    """The same of rowwise scales with outputs in float16."""
    for name, program in (*gemms(), *unaligned_gemms(), *fast_gemms(), *turned_gemms()):
        if name.startswith("scaled_gemm_row") and dict(program.macros)["OUT"] == 2:
            source = Path(program.source)
            half_source = source.with_name(half.SOURCES.get(source.name, source.name))
            of_half = gelu.in_half(program) or replace(program, source=str(half_source))
            yield f"{name} float16", of_half


# A size for each width of tiles, and two warpgroups.
SPLIT_SIZES = (
    (24, 64, 1310720), (24, 720, 327680), (256, 512, 115200), (1152, 32, 7344), (64, 8, 16384),
    (64, 24, 327680), (64, 96, 1310720), (8192, 16, 4096), (1024, 256, 65536),
)  # fmt: skip


def split_gemms() -> Iterator[tuple[str, Program]]:
    """Products whose parts of k go through memory, and what adds the parts."""
    module = scaled_gemm_split

    def program(m: int, n: int, k: int, kind: Kind, bias: torch.dtype | None = None) -> Program:
        tile = module.tile_of(m, n, k, kind, SMS)
        assert tile is not None
        return module.bind(n, k, tile, kind, bias).program

    for scales in scaled_gemm.SCALES:
        kind = Kind(scales, 4, direct=True)
        for m, n, k in SPLIT_SIZES:
            yield f"scaled_gemm_{scales}_split {m}x{n}x{k}", program(m, n, k, kind)
        for n in (64, 13):
            for bias in (torch.float16, torch.bfloat16, torch.float32):
                made = program(64, n, 79872, kind, bias)
                yield f"scaled_gemm_{scales}_split {n} {str(bias)[6:]}", made
            accumulates = kind._replace(accumulate=True, a_type="e5m2")
            yield f"scaled_gemm_{scales}_split {n} sums", program(64, n, 79872, accumulates)
    for lines in (1, 2, 32):
        for width, dtype in itertools.product((1, 4), module._OUTPUTS):
            name = f"scaled_gemm_row_split adds {lines} x {width} {str(dtype)[6:]}"
            yield name, module.bind_sums(lines, width, dtype).program


def gemm_tile(m: int, n: int, k: int, kind: Kind, sms: int) -> Tile:
    split = tiles.split_tile_for(m, n, k, 1, sms)
    return split or tiles.tile_for(m, n, k, kind, 1, sms)


Types = tuple[torch.dtype, torch.dtype]


def together(types: Types) -> Iterator[tuple[str, Program]]:
    """Of every strip of columns, beside rows and alone; by tiles; of rows that start anywhere."""
    module = quantize_together
    words = module.Words(True, True, False, *types, power_of_two=False)
    hard = words._replace(in_place=False, whole=False, ragged=True)
    by_power = words._replace(power_of_two=True)
    strip = module.strip_of(2048)
    for rows in (256, 512, 1024, 2048, 4096, 8192, 32768):
        yield (
            f"quantize_together_row {rows}",
            module.bind((0,), module.strip_of(rows), words).program,
        )
    for teams in ((0, 0), (0, 8), (32, 256), (0, 64, 128)):
        name = f"quantize_together_row {'+'.join(map(str, teams))}"
        yield name, module.bind(teams, strip, words).program
    for name, teams in (("together", (0,)), ("transpose_together", (0, 64))):
        for suffix, given in (("row hard", hard), ("row_power_of_two", by_power)):
            yield f"quantize_{name}_{suffix}", module.bind(teams, strip, given).program
    yield "quantize_transpose_together_row", module.bind((0, 64), strip, words).program
    for name, block in (("group", False), ("block", True)):
        for suffix, given in (("", words), ("_power_of_two", by_power), (" hard", hard)):
            bound = module.bind_tiles((block,), given)
            yield f"quantize_together_{name}{suffix}", bound.program
        bound = module.bind_tiles((block, False), words)
        yield f"quantize_together_{name} and group", bound.program
    yield "quantize_together_group and block", module.bind_tiles((False, True), hard).program


def both_ways(types: Types) -> Iterator[tuple[str, Program]]:
    """Of every granularity, as they lie and transposed; of rows that start anywhere, too."""
    easy, hard = ((True, True, True), False), ((False, False, False), True)
    both, across = (True, True), (False, True)
    row, group, block, tensor = (Granularity[n] for n in ("ROW", "GROUP", "BLOCK", "TENSOR"))
    for granularity in (row, group, block):
        name = f"quantize_transpose_{granularity.suffix}"
        yield f"{name} easy", quantize_tile.bind(granularity, both, *easy, *types).program
        yield f"{name} hard", quantize_tile.bind(granularity, both, *hard, *types).program
        if granularity is not row:
            for words, starts in (("easy", easy), ("hard", hard)):
                sums = quantize_tile.bind(granularity, both, *starts, *types, sums=True)
                yield f"{name} sums {words}", sums.program
        by_power = quantize_tile.bind(granularity, both, *easy, *types, power_of_two=True)
        yield f"{name}_power_of_two easy", by_power.program
        name = f"quantize_{granularity.suffix}"
        turned = quantize_tile.bind(granularity, across, *easy, *types)
        yield f"{name} column-major", turned.program
    for power_of_two in (False, True):
        name = f"quantize_block{'_power_of_two' if power_of_two else ''} easy"
        bound = quantize_tile.bind(block, (True, False), *easy, *types, power_of_two=power_of_two)
        yield name, bound.program
    yield "quantize_block hard", quantize_tile.bind(block, (True, False), *hard, *types).program
    gather = quantize_tile.bind(row, both, *easy, *types, gather=True)
    yield "quantize_transpose_row gather", gather.program
    for words, starts in (("easy", easy), ("hard", hard)):
        gather = quantize_tile.bind(row, both, *starts, *types, gather=True, sums=True)
        yield f"quantize_transpose_row gather sums {words}", gather.program
    yield "quantize_transpose_row adds", quantize_sums.bind().program
    for stage in (0, 1):
        scales = quantize_tile.bind_scales(stage, types[1], False)
        yield f"quantize_transpose_row scales-{stage}", scales.program
    yield (
        "quantize_transpose_tensor easy",
        quantize_tile.bind(tensor, both, *easy, *types).program,
    )
    for given in ("static", "delayed"):
        bound = quantize_tile.bind(tensor, both, *easy, *types, given=given)
        yield f"quantize_transpose_tensor_{given} easy", bound.program
        bound = quantize_tile.bind(tensor, both, *easy, *types, given=given, sums=True)
        yield f"quantize_transpose_tensor_{given} sums easy", bound.program
        bound = quantize_tile.bind(tensor, across, *hard, *types, given=given)
        yield f"quantize_tensor_{given} column-major", bound.program


def tensors(types: Types) -> Iterator[tuple[str, Program]]:
    module = quantize_tensor
    easy, hard = (True, True, False, True), (False, False, True, False)
    for accesses in module.AT_ONCE_ACCESSES:
        bound = module.bind(module.AT_ONCE, accesses, *easy, *types)
        yield f"quantize_tensor at-once-{accesses}", bound.program
    askew = module.bind(module.AT_ONCE, module.MOST_ASKEW_ACCESSES, *hard, *types)
    yield "quantize_tensor at-once-hard", askew.program
    stages = {"gather": module.GATHER, "finish": module.FINISH, "cast": module.CAST}
    for name, stage in stages.items():
        for kind, starts in (("easy", easy), ("hard", hard)):
            bound = module.bind(stage, module.ACCESSES, *starts, *types)
            yield f"quantize_tensor {name}-{kind}", bound.program
    for name, stage in {"static": module.STATIC, "delayed": module.DELAYED}.items():
        for kind, starts in (("easy", easy), ("hard", hard)):
            bound = module.bind(stage, module.ACCESSES, *starts, *types)
            yield f"quantize_tensor_{name} {kind}", bound.program


CHECKED = Path(__file__).with_name("checked_programs.json")
AGAIN = 16  # one of so many that were checked before
ALL = cases()


def identities() -> dict[str, str]:
    """Of every program all that decides its machine code."""
    return {name: nvrtc._identity(program, "sm_90")[0][:16] for name, program in ALL.items()}


_IMPORTS = re.compile(r"^(?:from|import) [^\n(]*(?:\([^)]*\))?[^\n]*\n", re.MULTILINE)
_SAMPLES = re.compile(r"^@pytest\.mark\.sample.*\n", re.MULTILINE)


def checks() -> str:
    """Digest of these tests: of this file and its helper, without imports and samples."""
    texts = [Path(file).read_text(encoding="utf-8") for file in (__file__, disassembly.__file__)]
    kept = [_SAMPLES.sub("", _IMPORTS.sub("", text)) for text in texts]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def to_check() -> dict[str, Program]:
    recorded = json.loads(CHECKED.read_text(encoding="utf-8"))
    if os.environ.get("LOKAKERN_CHECK_ALL") or recorded["checks"] != checks():
        return ALL
    try:
        found = identities()
    except CompilationError:  # no NVRTC: tests say what they need
        return ALL
    return {name: program for place, (name, program) in enumerate(ALL.items())
            if place % AGAIN == 0 or recorded["programs"].get(name) != found[name]}  # fmt: skip


CASES = to_check()
NAMES = list(CASES)
LINES = [n for n, p in CASES.items() if p.entry in ("quantize", "activate_quantize")]
PRODUCTS = ("scaled_gemm", "gemm_norm", "gemm_cross")
GEMMS = [n for n, program in CASES.items() if program.entry in PRODUCTS]
NORMS = [n for n, program in CASES.items() if program.entry in ("gemm_norm", "norm_quantize")]
CLUSTERS = [n for n in NORMS if int(dict(CASES[n].macros).get("CLUSTER", 1)) > 1]
ALIGNED = [name for name in LINES if int(name.split()[1]) not in UNALIGNED_COLUMNS]
WITHOUT_DATA = ("gather", "finish", "scales", "adds", "plain", "of a bias")
# Bytes of a thread that are stored and loaded once, before the loop over rows: three blocks of 256
# threads leave 80 registers each, and times in the database are of this code.
# The last eight are of 192 columns with promoted sums, which with one product fill all registers.
SPILLED_BYTES = {
    "quantize_together_row 8192 bfloat16->e4m3fn": 8,
    "quantize_together_row 8192 float32->e5m2": 16,
    "quantize_together_row 8192 float16->e4m3fn": 8,
    "scaled_gemm_row_fast 128x144 in turn pairs": 8,
    "scaled_gemm_row_fast 128x144 in turn pairs float16": 8,
    "scaled_gemm_row_fast 128x144 in turn fp8 silu": 8,
    "scaled_gemm_row_fast 128x144 in turn float32 sums": 16,
    "scaled_gemm_row_paired 8192x1680x1680": 8,
    "scaled_gemm_row_paired 8192x1680x1680 float16": 8,
    "scaled_gemm_row_paired 64x192 pairs": 8,
    "scaled_gemm_row_paired 64x192 pairs float16": 8,
    "scaled_gemm_row_turned 128x192 pairs bias": 8,
    "scaled_gemm_row_turned 128x192 pairs bias float16": 8,
    "scaled_gemm_row_turned 128x192 pairs relu": 8,
    "scaled_gemm_row_turned 128x192 pairs relu float16": 8,
}


LATER = ("sm_100", "sm_103", "sm_120")  # of quantizers only


@functools.cache
def architectures() -> list[str]:
    load_kernels()
    kernels = [k for k in KERNELS.values() if k.language == "cuda" and not k.parts]
    return sorted({architecture for kernel in kernels for architecture in kernel.architectures})


def names_on(architecture: str, names: Iterable[str]) -> list[str]:
    """Those of the programs whose kernel claims an architecture."""
    load_kernels()
    return [n for n in names if architecture in KERNELS[f"cuda.{n.split()[0]}"].architectures]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile afresh, once for all processes that test, and leave the user's cache alone."""
    monkeypatch.setenv("LOKAKERN_CACHE", str(shared_folder("compiled")))


@functools.cache
def compiled(name: str, architecture: str = "sm_90") -> bytes:
    return nvrtc.cubin(CASES[name], architecture)


@functools.cache
def batch(number: int) -> list[str]:
    """What some programs are, beside what was compiled: for all processes that test."""
    path = Path(os.environ["LOKAKERN_CACHE"], f"{number}.sass.json")
    names = NAMES[BATCH * number : BATCH * (number + 1)]
    return json.loads(made_once(
        path, lambda to: to.write_text(json.dumps(disassembled(list(map(compiled, names)))))
    ).read_text())  # fmt: skip


def machine_code(name: str) -> str:
    at = NAMES.index(name)
    return batch(at // BATCH)[at % BATCH]


@functools.cache
def instructions(name: str) -> list[str]:
    """Machine instructions with their suffixes, such as LDG.E.NA.128."""
    code = machine_code(name)
    return re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)", code)


class Issued(NamedTuple):
    """A machine instruction with what its control bits say."""

    text: str
    writes: int  # which of 6 scoreboards its result releases; 7: none
    waits: int  # for which scoreboards, as bits


@functools.cache
def issued(name: str) -> list[Issued]:
    """Bits 41 to 63 of an instruction's second word: stall, yield, two scoreboards, waits."""
    lines = machine_code(name).splitlines()
    found = []
    for line, following in itertools.pairwise(lines):
        text = re.match(r"\s+/\*[0-9a-f]{4,6}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/", line)
        word = re.search(r"/\* 0x([0-9a-f]{16}) \*/", following)
        if text and word:
            control = int(word.group(1), 16) >> 41
            found.append(Issued(text.group(1), control >> 5 & 7, control >> 11 & 63))
    return found


def resources(name: str, architecture: str) -> dict[str, int]:
    """Of one thread, and the shared memory of a block (of which the system takes 1 KiB)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled(name, architecture))
        command = [tool("cuobjdump"), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, shared, local = (
        int(re.search(rf"\b{what}:(\d+)", shown).group(1))  # type: ignore[union-attr]
        for what in ("REG", "STACK", "SHARED", "LOCAL")
    )
    return {"registers": registers, "shared_bytes": shared, "spilled_bytes": stack + local}


@functools.cache
def measured() -> dict[str, Any]:
    return {a: {name: resources(name, a) for name in names_on(a, NAMES)} for a in architectures()}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_wait_for_the_one_before_and_let_the_next_begin(name: str) -> None:
    """As a programmatic launch must, before the first access of memory; and in this order."""
    words = instructions(name)
    wait = words.index("ACQBULK")
    assert wait < words.index("PREEXIT")
    moves = ("LDG", "STG", "UTMALDG")
    assert wait < next(at for at, word in enumerate(words) if word.startswith(moves))


def test_what_was_checked_was_checked_by_these_tests() -> None:
    """Else all programs are checked each time, which takes 20 minutes of a slow core."""
    recorded = json.loads(CHECKED.read_text(encoding="utf-8"))
    assert recorded["checks"] == checks(), "run python -m tests.kernels.test_cuda_compiled"


def test_every_cuda_file_is_compiled_here() -> None:
    halved = [program for _, program in HALF_NORMS.values()]
    found = {Path(program.source).resolve() for program in (*ALL.values(), *halved)}
    # In test_added_products_compiled.py and the like.
    elsewhere = added_products, relu_backward, token_gradient, window_samples
    found |= {Path(module.SOURCE).resolve() for module in elsewhere}
    assert found == set(FOLDER.glob("*.cu"))


def test_every_registered_cuda_kernel_is_compiled_here() -> None:
    load_kernels()
    registered = {k.name for k in KERNELS.values() if k.language == "cuda" and not k.parts}
    assert {f"cuda.{name.split()[0]}" for name in ALL} == registered


def test_nothing_spills() -> None:
    for architecture, found in measured().items():
        spilled = {n: r for n, r in found.items() if r["spilled_bytes"] > SPILLED_BYTES.get(n, 0)}
        assert not spilled, f"{architecture}: {spilled}"


def test_resources_are_as_recorded() -> None:
    """Figures are exact: a change of them is seen, and measured, before it is recorded."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    found = measured()
    for architecture in architectures():
        assert recorded[architecture].keys() == set(names_on(architecture, ALL))
    if recorded["nvrtc"] == nvrtc.version():
        kept = {a: {n: recorded[a][n] for n in names_on(a, NAMES)} for a in architectures()}
        assert found == kept, (
            "if this is on purpose, run python -m tests.kernels.test_cuda_compiled"
        )
        return
    for architecture in architectures():  # another compiler: about as many
        for name, resources_found in found[architecture].items():
            most = 1.25 * recorded[architecture][name]["registers"]
            assert resources_found["registers"] <= most, f"{architecture}: {name}"


def test_m_is_in_no_program() -> None:
    for program in ALL.values():
        assert not {"M", "m", "rows"} & {name for name, _ in program.macros}


@pytest.mark.parametrize("name", [
    n for n in NAMES if n not in (*GEMMS, *NORMS) and not any(w in n for w in WITHOUT_DATA)
])  # fmt: skip
def test_quantizers_convert_in_hardware(name: str) -> None:
    form = "E5M2" if "e5m2" in name else "E4M3"
    assert any(word.startswith(f"F2FP.SATFINITE.{form}") for word in instructions(name))


@pytest.mark.parametrize("name", ALIGNED)
def test_aligned_rows_are_read_16_bytes_at_a_time_before_any_is_used(name: str) -> None:
    words = instructions(name)
    loads = [at for at, word in enumerate(words) if word.startswith("LDG")]
    assert loads and all(words[at].endswith(".128") for at in loads)
    macros = dict(CASES[name].macros)
    together = int(macros["ACCESSES"]) * int(macros.get("LINES", 1))
    first = [word for word in words[loads[0] : loads[together - 1]] if word.startswith("FFMA")]
    assert len(loads) >= together and not first, f"{name}: {len(first)} FFMA among the first loads"


@pytest.mark.parametrize("name", [n for n in ALIGNED if "bfloat16" in n])
def test_bfloat16_rows_are_written_8_bytes_at_a_time(name: str) -> None:
    stores = [word for word in instructions(name) if word.startswith("STG")]
    scales = int(dict(CASES[name].macros).get("LINES", 1))
    assert sum(not word.endswith(".64") for word in stores) == scales, stores


def test_every_later_architecture_has_ten_kernels() -> None:
    assert set(LATER) == set(architectures()) - {"sm_90"}
    for architecture in LATER:
        names = {name.split()[0] for name in names_on(architecture, ALL)}
        assert len(names) >= 10, f"{architecture}: {names}"


@pytest.mark.parametrize("architecture", LATER)
def test_quantizers_convert_in_hardware_and_read_16_bytes_there(architecture: str) -> None:
    names = [n for n in names_on(architecture, ALIGNED) if n in ALIGNED[::4]]
    codes = disassembled([compiled(name, architecture) for name in names], architecture)
    assert len(codes) == len(names) > 0
    for name, code in zip(names, codes, strict=True):
        form = "E5M2" if "e5m2" in name else "E4M3"
        assert f"F2FP.SATFINITE.{form}" in code, name
        loads = re.findall(r"\bLDG\.\S+", code)
        assert loads and all(".128" in load for load in loads), f"{name}: {set(loads)}"


def is_whole(macros: dict[str, int | str]) -> bool:
    """Whether sums stay where the tensor core makes them, as norm_mainloop.cuh says it."""
    if "ABOVE" in macros:  # fast_mainloop.cuh
        return not macros["PROMOTE"]
    few = bool(macros.get("FAST")) or int(macros["K"]) <= 128
    return "FAST" in macros and bool(macros["BF16"] or (not macros["SCALES"] and few))


@pytest.mark.parametrize("name", [
    name for name in GEMMS
    if dict(CASES[name].macros).get("PERMUTED") and dict(CASES[name].macros)["OUT_SCALES"] in (0, 1)
])  # fmt: skip
def test_nothing_branches_between_stores_of_a_tile(name: str) -> None:
    """Behind a branch each waits until the one before has read its registers."""
    words, macros = instructions(name), dict(CASES[name].macros)
    wide = "STG.E.128" if macros["OUT"] == 2 else "STG.E.64"
    stores = [at for at, word in enumerate(words) if word == wide]
    of_a_tile = int(macros["BLOCK_N"]) // 16  # of 8 columns, 2 rows
    assert len(stores) >= of_a_tile
    between = words[stores[0] : stores[of_a_tile - 1]]
    assert not [word for word in between if word.startswith(("BRA", "BSYNC"))]


@pytest.mark.parametrize("name", GEMMS)
def test_gemms_use_what_hopper_has(name: str) -> None:
    """Products of warpgroups, bulk copies both ways, and registers moved to who multiplies.

    What leaves from registers leaves 8 values at a time.
    """
    words, macros = instructions(name), dict(CASES[name].macros)
    kinds = f"{macros['A_TYPE']}.{macros['B_TYPE']}".upper()
    product, ending = ("HGMMA", "BF16") if macros.get("BF16") else ("QGMMA", kinds)
    assert any(word.startswith(product) and word.endswith(ending) for word in words)
    assert any(word.startswith("UTMALDG") for word in words)
    stores = "UTMAREDG" if macros.get("ACCUMULATE") else "UTMASTG"
    permuted = bool(macros.get("PERMUTED"))
    in_bulk = not (macros.get("DIRECT") or permuted)
    assert any(word.startswith(stores) for word in words) is in_bulk
    assert any(word.startswith("UTMALDG.5D") for word in words) is permuted
    if permuted:
        wide = "STG.E.128" if macros["OUT"] == 2 else "STG.E.64"
        assert sum(word == wide for word in words) >= int(macros["BLOCK_N"]) // 16
    if is_whole(macros) and macros["BLOCK_N"] == 256:
        assert any("64x256x" in word for word in words if word.startswith(product))
    moved = sum(word.startswith("USETMAXREG") for word in words)
    assert moved == (2 if int(macros["WARPGROUPS"]) > 1 else 0)


@pytest.mark.parametrize("name", [name for name in GEMMS if "DENSE" in dict(CASES[name].macros)])
def test_unaligned_rows_leave_16_bytes_at_a_time(name: str) -> None:
    """Nothing branches between the stores of pieces; single elements are few."""
    words, macros = instructions(name), dict(CASES[name].macros)
    wide = [at for at, word in enumerate(words) if word == "STG.E.128"]
    narrow = [word for word in words if word.startswith("STG") and word != "STG.E.128"]
    columns = int(macros["BLOCK_N"]) // int(macros["PARTS"])
    if macros["DENSE"]:
        pieces = int(macros["N"]) * int(macros["OUT"])  # 16 rows are one
        assert (len(wide), len(narrow)) == (-(-pieces // 32), 1)
        return
    staged_bytes = int(macros["CHUNK_BYTES"]) * int(macros["CHUNKS"])  # of a row
    rounds = -(-columns * int(macros["OUT"]) // staged_bytes)
    of_a_round = -(-16 * staged_bytes // 16 // 32)  # 16 rows in 32 threads
    assert len(wide) == rounds * of_a_round
    assert len(narrow) == rounds * 16 * 16 // int(macros["OUT"]) // 32
    between = words[wide[0] : wide[of_a_round - 1]]
    assert not [word for word in between if word.startswith(("BRA", "BSYNC"))]


HALVES = [name for name, program in CASES.items() if Path(program.source).stem.startswith("half_")]


@pytest.mark.parametrize("name", HALVES)
def test_float16_is_converted_in_hardware(name: str) -> None:
    words = instructions(name)
    assert not any("BF16" in word for word in words)
    if "OUT" in dict(CASES[name].macros):
        assert any(word.startswith(("F2FP.F16", "F2FP.RELU.F16")) for word in words)
    elif not any(word in name for word in WITHOUT_DATA):
        assert any(word.startswith("HADD2.F32") for word in words)


@pytest.mark.parametrize("name", GEMMS)
def test_products_of_a_step_do_not_take_turns(name: str) -> None:
    """ptxas waits after every product where it sees its sums read too early (C7514)."""
    words, macros = instructions(name), dict(CASES[name].macros)
    products = sum(word.startswith(("QGMMA", "HGMMA")) for word in words)
    waits = sum(word.startswith("WARPGROUP.DEPBAR") for word in words)
    of_a_step = 4 if int(macros["K"]) > 96 else 2
    last = is_whole(macros)  # whose loop waits for the step before, and its end for all
    assert (waits - last) * of_a_step <= products


@pytest.mark.parametrize("name", GEMMS)
def test_nothing_arrives_before_what_was_read(name: str) -> None:
    """A stage is overwritten after all warps arrived: none may have loads from it under way."""
    under_way: set[int] = set()
    arrivals = 0
    for word in issued(name):
        under_way -= {board for board in under_way if word.waits >> board & 1}
        if "SYNCS.ARRIVE" in word.text and "A1T0" in word.text:
            arrivals += 1
            assert not under_way, word.text
        if re.search(r"\bLDS\b", word.text) and word.writes < 7:
            under_way.add(word.writes)
    assert arrivals


@pytest.mark.parametrize("name", [n for n in NORMS if int(dict(CASES[n].macros)["OUT"]) == 1])
def test_norms_convert_to_fp8_in_hardware(name: str) -> None:
    assert any(word.startswith("F2FP.SATFINITE.E4M3") for word in instructions(name))


@pytest.mark.parametrize("name", CLUSTERS)
def test_blocks_tell_each_other_of_rows_they_share(name: str) -> None:
    """Stores into their memory that count at their barriers, or 16 bytes at once through the L2."""
    words, macros = instructions(name), dict(CASES[name].macros)
    told = macros["NORM"] and int(macros["SPAN"]) > int(macros["BLOCK_N"])
    told = bool(told or int(macros["OUT_SCALES"]) == 2)
    within = told and not macros["THROUGH_MEMORY"]
    assert any(word.startswith("STAS") for word in words) is within, set(words)
    strong = [word for word in words if word.startswith(("LDG", "STG")) and "STRONG" in word]
    assert bool(strong) is (told and not within)
    assert all(".128" in word for word in strong)  # values arrive with the number of their turn


if __name__ == "__main__":
    os.environ["LOKAKERN_CHECK_ALL"] = "1"
    CASES, NAMES = ALL, list(ALL)
    # What the tests compile is not compiled again below.
    os.environ["LOKAKERN_TESTS"] = tempfile.mkdtemp()
    os.environ["LOKAKERN_CACHE"] = str(shared_folder("compiled"))
    others = "not resources_are_as_recorded and not was_checked_by"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", __file__, "-k", others]
    if subprocess.run(command, check=False).returncode:
        sys.exit("nothing is written: these programs are not as they should be")
    RECORD.write_text(json.dumps({"nvrtc": nvrtc.version(), **measured()}, indent=1) + "\n")
    was_checked = {"checks": checks(), "programs": identities()}
    CHECKED.write_text(json.dumps(was_checked, indent=1) + "\n")
    print(f"wrote {RECORD} and {CHECKED}")
