"""HIP kernels compile for gfx942 and gfx950 into the instructions that they ask for.

What they take is compared with kernels/hip/resources.json, which
`python -m tests.kernels.test_hip_compiled` writes. ROCm is not needed, only clang 22 and lld 22.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections import Counter
from typing import Any

import pytest

from lokakern.types import Format
from tests.support import instructions, machine_code
from tests.support.hip_compiler import (
    CLANG,
    GPUS,
    KERNELS,
    MATRIX,
    compiled,
    needs_clang,
)
from tests.support.machine_code import LOCAL_BYTES
from tests.support.whole_kernel import at_depths

RECORDED = KERNELS / "resources.json"
LARGEST = {
    "gfx942": instructions.bits_of(Format.E4M3FNUZ.maximum),
    "gfx950": instructions.bits_of(Format.E4M3FN.maximum),
}
TILES = ((32, 32), (128, 32), (64, 64), (128, 64), (64, 128), (128, 128), (256, 256))
# Whole rows of 64, 128, 192 and 256 columns, and blocks of 64 and 256, as they come and as FP8.
NORMED = ((64, 0, 1, 64, 0, 0), (128, 0, 1, 128, 0, 0), (192, 1, 0, 192, 0, 0),
          (256, 0, 1, 256, 0, 0), (256, 1, 1, 256, 1, 0), (128, 0, 2, 128, 3, 1),
          (256, 0, 2, 64, 2, 1), (256, 1, 2, 64, 2, 2), (256, 0, 2, 256, 2, 3),
          (64, 0, 2, 64, 3, 1), (256, 0, 2, 64, 3, 1), (64, 0, 0, 64, 4, 0), (256, 0, 0, 256, 5, 1),
          (256, 1, 1, 256, 4, 3), (128, 0, 0, 128, 5, 3), (256, 0, 2, 64, 4, 1))  # fmt: skip
VARIANTS = [
    *(("quantize", {"GROUP": group, "WIDE": wide, "ALIGNED": aligned})
      for group in (0, 128, 32) for wide in (0, 1) for aligned in (0, 1)),
    *(("dequantize", {"WIDE": wide, "ROWS_OF_SCALE": rows, "COLUMNS_OF_SCALE": columns})
      for wide in (0, 1) for rows, columns in ((1, 128), (128, 128), (1, 32))),
    *(("scaled_gemm", {"TILE_M": m, "TILE_N": n, "SCALES": scales})
      for m, n in TILES for scales in (0, 1, 2)),
    *(("gemm_norm", {"TILE_N": n, "BY_GROUP": group, "NORM": norm, "SPAN": span,
                     "ACTIVATION": activation, "OUT": out})
      for n, group, norm, span, activation, out in NORMED),
]  # fmt: skip
# Powers of two are for the GPU that multiplies with them.
ON_GFX950 = {("GROUP", 32), ("COLUMNS_OF_SCALE", 32), ("SCALES", 2)}
ON_GPUS = [
    (gpu, number)
    for gpu in GPUS
    for number, (_, macros) in enumerate(VARIANTS)
    if gpu == "gfx950" or not ON_GFX950 & set(macros.items())
]
# Registered kernels that launch a variant, by the macros that tell them apart.
LAUNCHED_BY: dict[str, tuple[tuple[str, ...], dict[tuple[int, ...], list[str]]]] = {
    "quantize": (("GROUP",), {
        (0,): ["quantize_row"], (128,): ["quantize_group"], (32,): ["quantize_mx"]}),
    "dequantize": (("ROWS_OF_SCALE", "COLUMNS_OF_SCALE"), {
        (1, 128): ["dequantize_tensor", "dequantize_row", "dequantize_group"],
        (128, 128): ["dequantize_block"], (1, 32): ["dequantize_mx"]}),
    "scaled_gemm": (("SCALES",), {
        (0,): ["scaled_gemm_row"], (1,): ["scaled_gemm_block"], (2,): ["scaled_gemm_mx"]}),
    "gemm_norm": (("BY_GROUP",), {(0,): ["gemm_norm_row"], (1,): ["gemm_norm_block"]}),
}  # fmt: skip


@functools.cache
def compiler() -> str:
    words = [str(CLANG), "--version"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split("\n")[0]


def check_order(text: str, gpu: str, reloaded: int) -> None:
    """In the main loop, the next step is under way before a product, and awaited after the last.

    So many loads are into registers that are free only behind some products.
    """
    blocks = machine_code.blocks_of(text)
    loop = machine_code.main_loop(blocks)
    assert loop is not None
    matrices = [at for at, each in enumerate(loop) if each.startswith("v_mfma_")]
    loads = [at for at, each in enumerate(loop) if each.startswith(("buffer_", "global_"))]
    assert loads and sum(at > matrices[0] for at in loads) == reloaded
    if gpu == "gfx950":  # before the last product, only loads of the turn before are awaited
        for at, each in enumerate(loop[: matrices[-1]]):
            for left in re.findall(r"vmcnt\((\d+)\)", each):
                assert int(left) >= sum(load < at for load in loads)


def name_of(kernel: str, macros: dict[str, int]) -> str:
    return f"{kernel} " + " ".join(f"{name}={value}" for name, value in macros.items())


@functools.cache
def assembly(gpu: str, number: int) -> str:
    kernel, macros = VARIANTS[number]
    return compiled(gpu, KERNELS / f"{kernel}.hip", macros)


def products(gpu: str, number: int) -> int:
    """Matrix instructions of a wave for 128 of k."""
    kernel, macros = VARIANTS[number]
    if kernel not in ("scaled_gemm", "gemm_norm"):
        return 0
    m, n = tile_of(macros)
    sums = m * n // waves_of(kernel, macros)
    return sums // 256 * (4 if gpu == "gfx942" else 1)  # of 16 x 16 sums, and 32 or 128 of k


def tile_of(macros: dict[str, int]) -> tuple[int, int]:
    return macros.get("TILE_M", 64), macros["TILE_N"]


def waves_of(kernel: str, macros: dict[str, int]) -> int:
    """Of a block that multiplies."""
    is_wide = kernel == "scaled_gemm" and macros["TILE_N"] == 256
    return 8 if is_wide and not is_alone(kernel, macros) else 4


def is_alone(kernel: str, macros: dict[str, int]) -> bool:
    """Whether a wave has a SIMD for itself."""
    return kernel == "scaled_gemm" and macros["TILE_N"] == 256 and macros["SCALES"] != 1


def exchanges(macros: dict[str, int]) -> int:
    """How often waves of gemm_norm exchange numbers of rows through local memory."""
    columns = {64: 32, 128: 64, 192: 192, 256: 64}[macros["TILE_N"]]  # of a wave
    of_norm = macros["NORM"] % 3 and (2 if macros["NORM"] == 1 else 1)
    of_scales = macros["OUT"] in (1, 2) and macros["TILE_N"] > columns
    return (of_norm if macros["SPAN"] > columns else 0) + of_scales


def outputs(number: int) -> dict[str, int]:
    """Bytes that a lane stores of a whole tile, without scales, and numbers that it converts."""
    sums = products("gfx950", number) * 256 // machine_code.WAVE
    if VARIANTS[number][1].get("OUT"):
        return {"stored": sums, "converted": sums}
    return {"stored": 2 * sums}


def resources(gpu: str, number: int) -> dict[str, Any]:
    """Resources of a variant, and the registered kernels that launch it."""
    kernel, macros = VARIANTS[number]
    telling, names = LAUNCHED_BY[kernel]
    launched_by = [f"hip.{name}" for name in names[tuple(macros[name] for name in telling)]]
    text = assembly(gpu, number)
    found = machine_code.resources(text, gpu)
    if products(gpu, number):
        found |= at_depths(
            text, tile_of(macros), waves_of(kernel, macros), found["occupancy"], **outputs(number)
        )
    return {"kernels": launched_by, **found}


def check_instructions(gpu: str, number: int) -> None:
    """They are those that the source and its formats ask for; amd.hpp's: test_hip_instructions."""
    kernel, macros = VARIANTS[number]
    text = assembly(gpu, number)
    ((name, code),) = instructions.functions_of(text).items()
    assert name == kernel
    counted = Counter(each.name for each in code)
    # float32 is rounded to nearest, and what is subnormal is kept
    assert ".amdhsa_float_round_mode_32 0\n" in text
    assert ".amdhsa_float_denorm_mode_32 3\n" in text
    assert instructions.unfinished_at_barriers(code) == []
    # sa * sb underflows: sums are multiplied by one after the other, or one is raised before
    assert instructions.products_of_loads(code) == []

    each_step = products(gpu, number)
    # In the loop, and in steps that come before and after it.
    copies = 3 if each_step else 0
    assert counted[MATRIX[gpu]] == copies * each_step
    assert sum(map(counted.__getitem__, machine_code.matrices(counted))) == copies * each_step
    found = machine_code.resources(text, gpu)["matrix"]
    assert found == ({MATRIX[gpu]: each_step} if each_step else {})
    barriers = 5 if each_step else 0
    if each_step and gpu == "gfx942":  # one stage is read before it is written
        barriers += 2
    if kernel == "gemm_norm":  # one tail, in the last step; the epilogue is there twice
        barriers += (gpu == "gfx942") + 2 * exchanges(macros) - 1
    assert counted["s_barrier"] == barriers

    if kernel == "scaled_gemm":  # tails of aligned rows are stored in words of 16 (8) bytes, too
        size = 8 if macros["TILE_N"] == 32 else 16
        whole = outputs(number)["stored"] // size
        whole *= 2 if is_alone(kernel, macros) else 1  # with and without a bias
        # clang merges the last rows of both.
        assert 1.9 * whole < counted[f"global_store_dwordx{size // 4}"] <= 2 * whole

    # Behind the last step, loads of scaled_gemm go 2^31 further, which is outside of every buffer.
    nowhere = any(
        (each.name == "s_brev_b32" and each.operands[1] == "1")
        or (each.name.startswith("s_") and 1 << 31 in instructions.literals([each]))
        for each in code
    )
    assert nowhere == (kernel == "scaled_gemm")

    conversions = {name for name in counted if re.search("(fp8|bf8)_f32|f32_(fp8|bf8)$", name)}
    own, other = LARGEST[gpu], LARGEST[GPUS[gpu == GPUS[0]]]
    written = {each & 0x7FFFFFFF for each in instructions.literals(code)}
    if kernel == "quantize" or macros.get("OUT"):
        assert conversions == {"v_cvt_pk_fp8_f32"}
        clamps = [x for x in instructions.traced(code) if x.instruction.name == "v_med3_f32"]
        # gemm_norm converts as often what a division has not brought past the largest.
        twice = kernel == "gemm_norm"
        if macros.get("OUT") == 3:  # under a given scale it clamps before it divides
            clamps = [each for each in clamps if set(each.values) != {None}]
            assert 2 * len(clamps) == counted["v_med3_f32"]
        assert len(clamps) == (1 if twice else 2) * counted["v_cvt_pk_fp8_f32"]
        for clamp in clamps:
            assert set(clamp.values) - {None} == {own, own | 0x80000000}, clamp
        assert own in written
    else:
        assert conversions == ({"v_cvt_f32_fp8"} if kernel == "dequantize" else set())
        assert counted["v_cvt_f32_fp8"] == (16 if kernel == "dequantize" else 0)
    assert other not in written


@pytest.mark.sample(every=5, of=("gpu",))
@needs_clang
@pytest.mark.parametrize(
    ("gpu", "number"), ON_GPUS, ids=[f"{gpu}-{name_of(*VARIANTS[i])}" for gpu, i in ON_GPUS]
)
def test_a_kernel_has_its_instructions_and_recorded_resources(gpu: str, number: int) -> None:
    check_instructions(gpu, number)
    found = resources(gpu, number)
    kernel, macros = VARIANTS[number]
    assert found["scratch_bytes"] == 0
    assert found["local_bytes"] <= LOCAL_BYTES[gpu]
    text = assembly(gpu, number)
    if kernel in ("scaled_gemm", "gemm_norm"):
        assert set(found["matrix"]) == {MATRIX[gpu]} and found["matrix_share"] > 0  # in a loop
        assert "ds_read_b128" in text
        # None was moved past `settle` into a branch that some lanes do not take.
        assert gpu == "gfx942" or text.rindex("\tv_mfma") < text.rindex("ASMSTART")
        # Rows of b that one wave reads: four fragments of two loads. Scales of 8 rows and of b.
        reloaded = 8 if kernel == "gemm_norm" and macros["TILE_N"] == 256 else 0
        if gpu == "gfx942" and macros.get("TILE_M") == 256 and macros["SCALES"] == 1:
            reloaded = 9
        # Two steps ahead, behind half of the products: all of 512 rows, and scales of 256.
        if is_alone(kernel, macros):
            reloaded = 32 if macros["SCALES"] == 2 else 16
        check_order(text, gpu, reloaded)
        assert bool(re.search(r"buffer_load_dwordx4 .* lds\n", text)) == (gpu == "gfx950")
        assert found["occupancy"] >= (1 if is_alone(kernel, macros) else 2)
        assert not any(counted["loop_waits"] for counted in found["whole"].values())
    else:
        assert found["occupancy"] >= 8
        assert "v_cvt_" in text  # FP8 by the instruction, not by arithmetic
    recorded = json.loads(RECORDED.read_text())
    if recorded["compiler"] == compiler():  # another one may take other registers
        assert found == recorded[gpu][name_of(kernel, macros)], (
            "python -m tests.kernels.test_hip_compiled"
        )


def main() -> None:
    every: dict[str, Any] = {"compiler": compiler()}
    every |= {
        gpu: {name_of(*VARIANTS[i]): resources(gpu, i) for where, i in ON_GPUS if where == gpu}
        for gpu in GPUS
    }
    RECORDED.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()
