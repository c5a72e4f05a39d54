"""Compile Triton kernels for an absent GPU: ``python -m tests.support.cross_compile sm_90``.

Run by test_triton_compiled.py in a process of its own. Prints one JSON object per compiled kernel:
its name, the matrix or conversion instructions found, and what it takes of the hardware.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lokakern.kernels.triton import (
    added_products,
    dequantize,
    gelu,
    gemm_norm,
    norm_pieces,
    norm_quantize,
    quantize,
    scaled_gemm,
    short_attention,
    summed_norm,
    token_gradient,
)
from lokakern.problems import make_problem
from lokakern.registry.architectures import claimed, limit
from lokakern.types import Device
from tests.support import machine_code
from tests.support.whole_kernel import at_depths

TARGETS = {
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


@dataclass(frozen=True)
class Case:
    """One kernel with the arguments a launcher gives it.

    `tile` are the sums of a program that multiplies FP8. `may_spill` are bytes of a thread on
    NVIDIA; on AMD scalar registers, which go to lanes of a vector register. `kernels` are the
    registered ones that launch it, where that is not the one whose name comes first.
    """

    name: str
    function: Any
    pointers: tuple[str | None, ...]
    specialized: tuple[int, ...]
    unspecialized: int
    constants: tuple[Any, ...]
    num_warps: int
    num_stages: int
    may_spill: int = 0
    kernels: tuple[str, ...] = ()
    tile: tuple[int, int] | None = None
    is_registered: bool = True

    @property
    def launched_by(self) -> list[str]:
        if not self.is_registered:
            return []
        return [f"triton.{name}" for name in self.kernels or self.name.split()[:1]]


def formats(target: str) -> tuple[str, str]:
    """Triton's names of E4M3 and E5M2 there."""
    return ("fp8e4b8", "fp8e5b16") if target == "gfx942" else ("fp8e4nv", "fp8e5")


def format_constants(target: str, fp8: str) -> tuple[float, int]:
    """Result of `quantize.format_constants` for a target."""
    maximum = 57344.0 if fp8.startswith("fp8e5") else 240.0 if target == "gfx942" else 448.0
    return maximum, (0x80 if target == "gfx942" else 0x7F) if target.startswith("gfx") else 0


def quantize_cases(target: str) -> Iterator[Case]:
    for fp8, source in zip(formats(target), ("bf16", "fp32"), strict=True):
        constants = format_constants(target, fp8)
        x, data, scale = f"*{source}", f"*{fp8}", "*fp32"
        suffix = f"{source}->{fp8}"
        for columns in (256, 1024, 8192, 16384):
            height, width, num_warps = quantize.row_tile(columns)
            yield Case(
                f"quantize_row {columns} {suffix}", quantize.quantize_row_kernel,
                (x, data, scale), (columns, columns, columns), 1,
                (*constants, height, width, columns <= width), num_warps, 1,
            )  # fmt: skip
        for name, height, whole, num_warps in (
            ("group", quantize.TILE // 128, False, 4), ("block", 128, True, 16),
        ):  # fmt: skip
            yield Case(
                f"quantize_{name} {suffix}", quantize.quantize_tile_kernel,
                (x, data, scale), (1024, 1024, 1024), 2, (*constants, height, whole), num_warps, 1,
            )  # fmt: skip
        height, width, num_warps = quantize.row_tile(1024)
        yield Case(
            f"amax {source}", quantize.amax_kernel, (x, scale), (1024, 1024), 1,
            (height, width), num_warps, 1, kernels=("quantize_tensor",),
        )  # fmt: skip
        yield Case(
            f"quantize_tensor {suffix}", quantize.quantize_tensor_kernel,
            (x, data, scale, "*fp32"), (1024, 1024, 1024), 1,
            (*constants, height, width, quantize.PARTIALS), num_warps, 1,
        )  # fmt: skip
        for kinds, rows_of_scale in ((("tensor", "row", "group"), 1), (("block",), 128)):
            yield Case(
                f"dequantize rows_of_scale={rows_of_scale} {fp8}->{source}",
                dequantize.dequantize_kernel,
                (data, scale, x), (1024, 1024, 1024), 3, (dequantize.ROWS, rows_of_scale), 4, 1,
                kernels=tuple(f"dequantize_{kind}" for kind in kinds),
            )  # fmt: skip


def gemm_cases(target: str) -> Iterator[Case]:
    four, five = formats(target)
    large, medium = scaled_gemm.LARGE, scaled_gemm.TILES[0]
    variants = [
        (kind, promoted, tile, (four, four), "bf16", 1024)
        for kind, promoted in (("tensor", True), ("tensor", False), ("row", True), ("row", False),
                               ("block", True))
        for tile in (scaled_gemm.TILES if promoted else (large, *scaled_gemm.TILES))
    ]  # fmt: skip
    # Once each: mixed formats, float32 out, and a k that needs masks.
    variants.append(("row", True, medium, (five, four), "bf16", 1024))
    variants.append(("row", False, large, (four, five), "bf16", 1040))
    variants.append(("block", True, medium, (four, four), "fp32", 1040))
    for kind, promoted, tile, (a, b), out, k in variants:
        if not promoted and not claimed(f"triton.scaled_gemm_{kind}_fast", frozenset({target})):
            continue
        depth = 2 if target.startswith("gfx") else tile.num_stages
        scale_stride = 16 if kind == "block" else 1
        yield Case(
            f"scaled_gemm_{kind}{'' if promoted else '_fast'} "
            f"{tile.block_m}x{tile.block_n}x{tile.block_k} {a} {b} {out} k={k}",
            scaled_gemm.scaled_gemm_kernel,
            (f"*{a}", "*fp32", f"*{b}", "*fp32", f"*{out}", f"*{out}"),
            (1024, k, k, k, 1024, scale_stride), 1,
            (kind, promoted, True, k % tile.block_k == 0,
             tile.block_m, tile.block_n, tile.block_k, depth),
            tile.num_warps, depth, tile=(tile.block_m, tile.block_n),
        )  # fmt: skip


# Kernel, norm, columns normalized together, n, k, what comes after, scales of the output. Tiles of
# all widths, a k and an n that need masks, tails of one and two matrices beside.
GEMM_NORMS = (
    ("gemm_norm_row", "layer", 128, 128, 512, "cross", "before", "row"),
    ("gemm_norm_row", "layer", 256, 256, 512, "hardswish", "none", "row"),
    ("gemm_norm_bf16", "layer", 256, 256, 512, "hardswish", "none", "row"),
    ("gemm_norm_block", "layer", 256, 256, 512, "silu", "none", "none"),
    ("gemm_norm_tensor", "layer", 200, 200, 1040, "gate", "before", "group"),
    ("gemm_norm_row", "layer", 512, 512, 512, "hardswish", "none", "row"),
    ("gemm_norm_block", "none", 384, 384, 512, "silu", "last", "none"),
    ("gemm_block_norm_row", "rms", 256, 1024, 1024, "hardswish", "none", "static"),
    ("gemm_block_norm_block", "rms", 128, 1024, 512, "none", "none", "group"),
    ("gemm_block_norm_row", "rms", 128, 1024, 512, "hardswish", "none", "row"),
    ("gemm_block_norm_tensor", "rms", 64, 1024, 512, "gate", "none", "none"),
    ("gemm_block_norm_bf16", "rms", 32, 1024, 512, "none", "none", "none"),
    ("gemm_norm_row", "layer", 256, 256, 512, "gelu", "none", "row"),
    ("gemm_norm_block", "none", 384, 384, 512, "gelu", "last", "none"),
    ("gemm_block_norm_row", "rms", 256, 1024, 1024, "gelu_tanh", "none", "static"),
)
NORMS = (
    ("layer", 0, 256, "bf16", "hardswish", "none", "row"),
    ("layer", 0, 1000, "bf16", "none", "before", "none"),
    ("rms", 128, 1024, "fp32", "cross", "none", "group"),
    ("rms", 0, 8192, "bf16", "gate", "before", "static"),
    ("layer", 0, 256, "bf16", "gelu", "none", "row"),
    ("none", 0, 2048, "bf16", "gelu_tanh", "none", "group"),
)


def norm_cases(target: str) -> Iterator[Case]:
    amd, four = target.startswith("gfx"), formats(target)[0]
    for name, norm, columns, n, k, last, residual, scales in GEMM_NORMS:
        problem = make_problem(
            "gemm_norm", (65536, n, k),
            epilogue=f"block_rms({columns})" if "block_norm" in name else norm,
        )  # fmt: skip
        if limit(f"triton.{name}", problem, Device("nvidia", target, target, 132, 80)):
            continue
        kind = name.rpartition("_")[2].replace("bf16", "none")
        tile = gemm_norm.tile_for(
            65536, columns, n // columns, k, 2 if kind == "none" else 1, 132,
            light=kind != "block" and columns == 256, hopper=target == "sm_90", amd=amd,
        )  # fmt: skip
        operand, out = "*bf16" if kind == "none" else f"*{four}", "*bf16"
        constants = (0.0, 0)
        if scales != "none":
            out, constants = f"*{four}", format_constants(target, four)
        yield Case(
            f"{name} {tile.block_m}x{tile.part_n}x{tile.parts}x{tile.block_k} {norm} n={n} k={k} "
            f"{last} {residual} {scales}",
            (gelu if last in gelu.ACTIVATIONS else gemm_norm).gemm_norm_kernel,
            (operand, "*fp32", operand, "*fp32", out, "*fp32", "*fp32", "*fp32", "*fp32",
             "*bf16", "*bf16", "*bf16"),
            (n, k, k, k, n, 16 if kind == "block" else 1, n, n, n), 1,
            (kind, norm, 1e-5, True, True, True, last, residual, scales, *constants,
             "block_norm" not in name, norm_pieces.grain(n),
             columns == tile.part_n * tile.parts, k % tile.block_k == 0,
             tile.block_m, tile.part_n, tile.parts, tile.block_k, tile.num_stages),
            tile.num_warps, tile.num_stages, 64 if tile.parts > 2 else 0,
            tile=None if kind == "none" else (tile.block_m, tile.part_n * tile.parts),
        )  # fmt: skip
    for norm, span, columns, source, last, residual, scales in NORMS:
        height, width, num_warps = quantize.row_tile(columns)
        out, constants = "*bf16", (0.0, 0)
        if scales != "none":
            out, constants = f"*{four}", format_constants(target, four)
        yield Case(
            f"norm_quantize {norm} {columns} {source} {last} {residual} {scales}",
            (gelu if last in gelu.ACTIVATIONS else norm_quantize).norm_quantize_kernel,
            (f"*{source}", out, "*fp32", *["*bf16"] * 6),
            (columns,) * 6, 1,
            (norm, span, 1e-5, False, True, True, last, residual, scales, *constants,
             norm_pieces.grain(columns), columns == width, height, width),
            num_warps, 1, 8 if target == "sm_120" else 0,
        )  # fmt: skip


def token_cases() -> list[Case]:
    k = token_gradient
    return [
        Case(
            f"token_gradient bf16 {d}", k.token_gradient_kernel, ("*bf16", "*bf16", "*fp32"),
            (192, 720, d, 192 * d, d, 720 * d, d), 2, (k.COUNT, k.N, inner, -(-d // inner)),
            k.WARPS, k.STAGES, is_registered=False,
        )
        for d, inner in ((160, k.D), (64, k.D), (32, 32), (16, 16))
    ]  # fmt: skip


def summed_norm_cases() -> list[Case]:
    k = summed_norm
    return [
        Case(
            f"summed_norm {dtype} {parts} {adds:d} {outer:d}", k.summed_norm_kernel,
            (*(f"*{dtype}",) * 4, "*fp32" if outer else f"*{dtype}", *(f"*{dtype}",) * 2),
            (48, 48, 0, 7680, 160, 19200, 160, 7680, 160, 15360, 160, 160), 1,
            (1e-5, parts, adds, outer, 128, 32, k.ROWS), k.WARPS, k.STAGES, is_registered=False,
        )
        for dtype, parts, adds, outer in (
            ("bf16", 2, True, True), ("bf16", 2, True, False), ("fp16", 3, False, False),
        )
    ]  # fmt: skip


ATTENTIONS = (  # queries, keys, columns, kind of bias, of each query, silu, causal
    ("bf16", 54, 54, 16, short_attention.ADDS.value, False, 0.0, False),
    ("bf16", 2, 54, 16, short_attention.EXCLUDES.value, False, 0.0, False),
    ("bf16", 128, 128, 64, short_attention.NO_BIAS, False, 0.0078125, False),
    ("fp16", 128, 128, 64, short_attention.ADDS.value, True, 0.0, True),
)


def attention_cases(target: str, *, gradients: bool) -> list[Case]:
    k, found = short_attention, []
    for dtype, queries, keys, d, bias, *settings in ATTENTIONS:
        operands, of_bias = (f"*{dtype}",) * 3, {2: "*u8"}.get(bias, f"*{dtype}")
        steps, (each, silu, causal) = (3456 * 4, d, 4 * d), settings
        pointers = (f"*{dtype}", *operands, of_bias, *operands)
        # At 128 x 64 the fastest of nine tiles spills: 52 us of an H200, 74 the next.
        spills = 160 if gradients and keys * d == 128 * 64 else 0
        activates = TARGETS[target].arch // 10 in k.ACTIVATING
        for activated in [()] if gradients else [(False,), (True,)][: 1 + activates]:
            if gradients:
                *tile, warps = k.gradient_tile_of(queries, keys, d)
            else:
                *tile, warps = k.tile_of(queries, keys, d, activated=any(activated))
            found.append(
                Case(
                    f"short_attention{'_gradients' * gradients} {dtype} {queries}x{keys}x{d} "
                    f"{bias} {silu}{' activated' * any(activated)}",
                    k.short_attention_gradients_kernel if gradients else k.short_attention_kernel,
                    pointers if gradients else (*operands, of_bias, f"*{dtype}"),
                    (4, d, *steps * (4 if gradients else 3), keys, 0, 0, 1), 2,
                    (0.25, bias, each, silu, causal, True, *tile, *activated), warps, 1,
                    is_registered=False, may_spill=spills,
                )
            )  # fmt: skip
    return found


def added_cases() -> list[Case]:
    k = added_products
    found = []
    shapes = ("bf16", 24, 120), ("bf16", 48, 192), ("bf16", 64, 256), ("fp16", 24, 120)
    for dtype, count, r in shapes:
        tile = k.tile_of(count, r)
        strides = 720 * count, count, 160 * count, 160, 1, 720, 160 * r, 160
        found.append(
            Case(
                f"added_products {dtype} {count} {r}", k.added_products_kernel,
                (f"*{dtype}",) * 5, (720, 160, count, r, 8192, 22, *strides), 0, tile[:-1],
                tile.warps, k.STAGES,
                is_registered=False,
            )
        )  # fmt: skip
    return found


def cases(target: str) -> list[Case]:
    found = [*gemm_cases(target), *norm_cases(target), *quantize_cases(target)]
    if target.startswith("sm"):
        found += token_cases() + summed_norm_cases() + attention_cases(target, gradients=False)
    if target == "sm_90":  # others do not run them
        found += attention_cases(target, gradients=True) + added_cases()
    return found


def compile_case(target: str, case: Case) -> dict[str, Any]:
    """Compile as the launcher would, with its specializations; read what came out."""
    arguments = [*case.pointers, *case.specialized, *[None] * case.unspecialized, *case.constants]
    signature, constants, attributes = {}, {}, {}
    pointer_attributes = [["tt.divisibility", 16]]
    if target.startswith("gfx"):
        pointer_attributes.append(["tt.pointer_range", 32])
    numbers = len(case.pointers) + len(case.specialized) + case.unspecialized
    for index, (name, value) in enumerate(zip(case.function.arg_names, arguments, strict=True)):
        if index >= numbers or value == 1:
            signature[name] = "constexpr"
            constants[name] = value
        elif index < len(case.pointers):
            signature[name] = value
            attributes[(index,)] = pointer_attributes
        else:
            signature[name] = "i32"
            if value is not None and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(case.function, signature, constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    found = {
        "kernel": case.name, "launched_by": case.launched_by,
        "shared": compiled.metadata.shared, "may_spill": case.may_spill,
        "promotes": "maxNumImpreciseAcc = 128" in compiled.asm["ttgir"],
    }  # fmt: skip
    if target.startswith("sm"):
        return found | read_nvidia(target, compiled.asm)
    gcn = compiled.asm["amdgcn"]
    taken = machine_code.resources(gcn, target, compiled.metadata.shared)
    if case.tile is not None:
        lane = case.tile[0] * case.tile[1] // (case.num_warps * machine_code.WAVE)
        size = {"*bf16": 2, "*fp32": 4}.get(str(case.pointers[4]), 1)
        taken |= at_depths(
            gcn, case.tile, case.num_warps, taken["occupancy"],
            stored=lane * size, converted=lane if size == 1 else 0,
        )  # fmt: skip
    return found | read_amd(gcn) | {"resources": taken}


def read_nvidia(target: str, asm: Any) -> dict[str, Any]:
    ptx = asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        shown = subprocess.run(
            [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
    stack, local = (int(x) for x in re.search(r"STACK:(\d+).* LOCAL:(\d+)", shown).groups())
    return {
        "registers": int(re.search(r"REG:(\d+)", shown).group(1)),
        "spilled": stack + local,
        "matrix": sorted(set(re.findall(
            r"wgmma\.mma_async\S*\.(?:e[45]m[23]\.e[45]m[23]|bf16\.bf16)"
            r"|mma\.sync\S*\.(?:e[45]m[23]\.e[45]m[23]|bf16\.bf16)"
            r"|tcgen05\.mma\S*kind::(?:f8f6f4|f16)", ptx
        ))),
        "converts": sorted(set(re.findall(r"cvt\.rn\.satfinite\S*\.e[45]m[23]x2\.f32", ptx))),
        "additions": len(re.findall(r"\badd\.(?:rn\.)?(?:ftz\.)?f32|\bfma\.rn\.f32", ptx)),
        "async_copies": len(re.findall(r"cp\.async\.cg", ptx)),
        "widest_load": max(
            [int(n or 1) * int(bits) // 8 for n, bits in re.findall(
                r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)] or [0]
        ),
    }  # fmt: skip


def read_amd(gcn: str) -> dict[str, Any]:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", gcn).group(1))

    return {
        "registers": number("vgpr_count"),
        "spilled": number("vgpr_spill_count") + number("sgpr_spill_count")
        + number("private_segment_fixed_size"),
        "matrix": sorted(set(re.findall(r"v_mfma_\S*(?:fp8|bf8|f8f6f4|bf16)\S*", gcn))),
        "converts": sorted(set(re.findall(r"v_cvt_(?:scalef32_)?pk_(?:fp8|bf8)_f32", gcn))),
        "async_copies": 0,
        "widest_load": max(
            [int(n or 1) * 4 for n in re.findall(
                r"(?:buffer|global)_load_dword(?:x(\d))?\b", gcn)] or [0]
        ),
    }  # fmt: skip


def run_case(target: str, index: int) -> dict[str, Any]:
    case = cases(target)[index]
    try:
        return compile_case(target, case)
    except Exception as error:  # reported by the test, which shows all of them at once
        words = f"{type(error).__name__}: {error}"[-2000:]
        return {"kernel": case.name, "launched_by": case.launched_by, "error": words}


def main(target: str, pattern: str = "") -> None:
    chosen = [i for i, case in enumerate(cases(target)) if re.search(pattern, case.name)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for found in pool.map(run_case, itertools.repeat(target), chosen):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
