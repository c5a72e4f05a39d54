"""Every Triton kernel compiles for every GPU it claims, to FP8 instructions and without spills.

What they take of AMD's GPUs is compared with kernels/triton/resources.json, which
`python -m tests.kernels.test_triton_compiled` writes.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lokakern.registry.digests import KERNELS_ROOT
from lokakern.registry.register import KERNELS, load_kernels
from tests.support.sharing import made_once, shared_folder

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.rest  # each target takes 15 s
ROOT = Path(__file__).resolve().parents[2]
RECORDED = KERNELS_ROOT / "triton" / "resources.json"
COUNTED = frozenset({"whole", "matrix_share", "busy_k1024"})
# What multiplies FP8 there, for E4M3 by E4M3; mixed formats differ in the last letters.
MATRIX_INSTRUCTION = {
    "sm_89": ("mma.sync", ".e4m3.e4m3"),
    "sm_90": ("wgmma.mma_async", ".e4m3.e4m3"),
    "sm_100": ("tcgen05.mma", "kind::f8f6f4"),
    "sm_103": ("tcgen05.mma", "kind::f8f6f4"),
    "sm_120": ("mma.sync", ".e4m3.e4m3"),
    "gfx942": ("v_mfma_f32_", "_fp8_fp8"),
    "gfx950": ("v_mfma_f32_", "f8f6f4"),
}
# KiB a program may have.
SHARED_MEMORY = {"sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99,
                 "gfx942": 64, "gfx950": 160}  # fmt: skip
TARGETS = sorted(MATRIX_INSTRUCTION)
AMD = [target for target in TARGETS if target.startswith("gfx")]
GEMMS = ("scaled_gemm", "gemm_norm", "gemm_block_norm")


def cross_compile(target: str) -> str:
    """Output of a process without the interpreter, for each kernel."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.cross_compile", target],
        cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{target}: {ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


def parsed(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines()]


@functools.cache
def compiled(target: str) -> list[dict[str, Any]]:
    """All kernels for a target."""
    path = shared_folder("triton") / target
    printed = made_once(path, lambda to: to.write_text(cross_compile(target))).read_text()
    found = parsed(printed)
    for kernel in found:
        print(target, kernel)
    return found


def working(target: str, *kinds: str) -> list[dict[str, Any]]:
    chosen = [k for k in compiled(target) if k["kernel"].startswith(kinds) and "error" not in k]
    assert chosen, f"{target}: no {kinds} compiled"
    return chosen


@pytest.mark.parametrize("target", TARGETS)
def test_every_registered_kernel_is_compiled(target: str) -> None:
    load_kernels()
    own = [k for k in KERNELS.values() if k.language == "triton" and not k.parts]
    names = {k.name for k in own if target in k.architectures}
    assert len(names) >= 10
    found = {name for kernel in compiled(target) for name in kernel["launched_by"]}
    assert names == found


@pytest.mark.parametrize("target", TARGETS)
def test_everything_compiles(target: str) -> None:
    failed = [f"{k['kernel']}: {k['error']}" for k in compiled(target) if "error" in k]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills(target: str) -> None:
    spilled = [
        f"{k['kernel']}: {k['spilled']} bytes, {k['registers']} registers"
        for k in compiled(target)
        if k.get("spilled", 0) > k.get("may_spill", 0)
    ]
    assert not spilled, "\n".join(spilled)


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_fits(target: str) -> None:
    limit = SHARED_MEMORY[target] * 1024
    large = [
        f"{k['kernel']}: {k['shared']}" for k in compiled(target) if k.get("shared", 0) > limit
    ]
    assert not large, f"over {limit} bytes: {large}"


@pytest.mark.parametrize("target", TARGETS)
def test_products_use_the_fp8_instruction(target: str) -> None:
    start, end = MATRIX_INSTRUCTION[target]
    for kernel in working(target, *GEMMS):
        found = kernel["matrix"]
        if kernel["kernel"].split()[0].endswith("bf16"):
            plain = "kind::f16" if start == "tcgen05.mma" else "bf16"
            assert found and all(plain in name for name in found), f"{kernel['kernel']}: {found}"
            continue
        mixed = "e5" in kernel["kernel"]
        assert found and all(
            name.startswith(start) and (mixed or name.endswith(end)) for name in found
        ), f"{kernel['kernel']}: {found}"


@pytest.mark.parametrize("target", TARGETS)
def test_quantizers_use_the_conversion_instruction_and_wide_loads(target: str) -> None:
    """The conversion's rounding is the hardware's, to nearest even; loads are 16 bytes."""
    for kernel in working(target, "quantize", "norm_quantize"):
        plain = kernel["kernel"].endswith("none")  # bfloat16 is written
        assert plain or kernel["converts"], f"{kernel['kernel']}: converts in software"
        assert kernel["widest_load"] == 16, f"{kernel['kernel']}: {kernel['widest_load']} bytes"
    for kernel in working(target, *GEMMS[1:]):
        plain = kernel["kernel"].endswith("none")
        assert plain or kernel["converts"], f"{kernel['kernel']}: converts in software"


@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm")])
def test_operands_are_copied_asynchronously(target: str) -> None:
    """16-byte cp.async means that the loop along k is pipelined."""
    for kernel in working(target, *GEMMS):
        assert kernel["async_copies"] >= 8, f"{kernel['kernel']}: {kernel['async_copies']}"


@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm")])
def test_sums_over_tokens_are_pipelined_products(target: str) -> None:
    for kernel in working(target, "token_gradient"):
        assert kernel["async_copies"] >= 8, kernel
        plain = "kind::f16" if MATRIX_INSTRUCTION[target][0] == "tcgen05.mma" else "bf16"
        assert kernel["matrix"] and all(plain in name for name in kernel["matrix"]), kernel


@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm")])
def test_norms_of_sums_have_wide_loads(target: str) -> None:
    for kernel in working(target, "summed_norm"):
        assert kernel["widest_load"] == 16, kernel


@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm")])
def test_short_attentions_are_products_of_tensor_cores(target: str) -> None:
    for kernel in working(target, "short_attention"):
        assert kernel["widest_load"] == 16, kernel
        assert kernel["matrix"] or "fp16" in kernel["kernel"], kernel  # only bfloat16 is looked for


def test_added_products_are_pipelined() -> None:
    for kernel in working("sm_90", "added_products"):
        assert kernel["widest_load"] == 16 and kernel["async_copies"] >= 6, kernel


def test_promoted_sums_are_added_in_float32() -> None:
    """One addition for every sum a thread holds, where the fast twin has the scales' only."""
    by_name = {k["kernel"]: k for k in working("sm_90", "scaled_gemm")}
    twins = [(k, by_name.get(n.replace(" ", "_fast ", 1))) for n, k in by_name.items()]
    twins = [(k, twin) for k, twin in twins if twin is not None and "_fast" not in k["kernel"]]
    assert len(twins) >= 8
    for promoted, fast in twins:
        block_m, block_n = map(int, promoted["kernel"].split()[1].split("x")[:2])
        held = block_m * block_n // 256  # by a thread, of at most 8 warps
        extra = promoted["additions"] - fast["additions"]
        assert extra >= held, f"{promoted['kernel']}: {extra} more additions for {held} sums"


def test_sums_that_are_normalized_are_promoted() -> None:
    """FP8 products then have one more addition per sum than bfloat16 products."""
    found = {k["kernel"]: k for k in working("sm_90", *GEMMS[1:])}
    for name, kernel in found.items():
        # 1x128 scales add up products of 128 themselves.
        assert kernel["promotes"] is not ("bf16" in name or "_block " in name), name
    same = "64x128x2x{} layer n=256 k=512 hardswish none row"
    fp8 = found[f"gemm_norm_row {same.format(128)}"]["additions"]
    bf16 = found[f"gemm_norm_bf16 {same.format(64)}"]["additions"]
    held = 64 * 256 // 256  # by a thread, of 8 warps
    assert fp8 - bf16 >= held, f"{fp8} and {bf16} additions for {held} sums"


@pytest.mark.parametrize("target", AMD)
def test_no_amd_kernel_uses_scratch_memory(target: str) -> None:
    scratch = [k["kernel"] for k in working(target, "") if k["resources"]["scratch_bytes"]]
    assert not scratch


@pytest.mark.parametrize("target", AMD)
def test_products_are_in_a_loop(target: str) -> None:
    for kernel in working(target, *GEMMS):
        assert kernel["resources"]["matrix_share"] > 0, kernel["kernel"]


@pytest.mark.parametrize("target", AMD)
def test_amd_resources_are_as_recorded(target: str) -> None:
    """Exactly, but for numbers of instructions: of one program 4 of 7776 depend on the folder."""
    recorded = json.loads(RECORDED.read_text())
    if recorded["compiler"] == compiler():  # another one may take other registers
        found, expected = (resources(compiled(target)), recorded[target])
        assert found.keys() == expected.keys()
        for name, program in found.items():
            assert without_counts(program) == without_counts(expected[name]), (
                f"{name}: python -m tests.kernels.test_triton_compiled"
            )
            near = pytest.approx(counts(expected[name]), rel=0.005, abs=0.002)
            assert counts(program) == near, name


def without_counts(program: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in program.items() if key not in COUNTED}


def counts(program: dict[str, Any]) -> dict[str, float]:
    """Numbers of instructions and what is made of them, by name."""
    found: dict[str, float] = {}
    for key in COUNTED & program.keys():
        given = program[key]
        parts = given.items() if isinstance(given, dict) else [("", {"": given})]
        for size, each in parts:
            found |= {f"{key} {size} {name}": -1.0 if x is None else x for name, x in each.items()}
    return found


def compiler() -> str:
    return f"Triton {triton.__version__}"


def resources(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    return {k["kernel"]: {"kernels": k["launched_by"], **k["resources"]} for k in kernels}


def main() -> None:
    every: dict[str, Any] = {"compiler": compiler()}
    every |= {target: resources(parsed(cross_compile(target))) for target in AMD}
    RECORDED.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()
