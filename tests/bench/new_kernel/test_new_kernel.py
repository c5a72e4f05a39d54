"""`new-kernel` writes packages that work as they are; what is wrong with a changed one is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lokakern.bench.cli.main import app
from lokakern.bench.cli.new_kernel import NewOp
from lokakern.bench.new_kernel.write import OPS, write_package
from lokakern.errors import UnknownNameError

ROOT = Path(__file__).resolve().parents[3]
PIP = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
       "--disable-pip-version-check", "--target", "installed")  # fmt: skip
LIST = ("-m", "lokakern.bench", "list")
# Calls both launchers as their author may, on rows that fill no tile.
USE = """if True:
    import acme_kernels, other_kernels
    import torch
    from lokakern import numerics
    from lokakern.types import Format, Granularity, empty_data

    torch.manual_seed(0)
    x, w = torch.randn(67, 200), torch.randn(90, 200)
    a, b = (numerics.quantize(t, Format.E4M3FN, Granularity.ROW) for t in (x, w))
    out = torch.empty(67, 90)
    acme_kernels.scaled_gemm_row(a.data, a.scale, *b.transpose, out, None, ())
    print(torch.allclose(out, numerics.dequantize(a, torch.float32)
                         @ numerics.dequantize(b, torch.float32).t(), atol=1e-4))
    data = empty_data(67, 200, torch.float8_e4m3fn, x.device)
    scale = Granularity.ROW.empty_scale(67, 200, x.device)
    other_kernels.quantize_row(x, data, scale, ())
    print(torch.equal(data.view(torch.uint8), a.data.view(torch.uint8)))
"""
# Asks both for e4m3fnuz and e4m3fn on a device of the former.
ON_MI300X = """if True:
    import acme_kernels, other_kernels
    from lokakern.problems import make_problem
    from lokakern.types import ACCEPTED, Device, Format, Granularity, Operand

    device = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
    for module, op in ((acme_kernels, "scaled_gemm"), (other_kernels, "quantize")):
        for fp8 in (Format.E4M3FNUZ, Format.E4M3FN):
            fields = {"a": Operand(fp8, Granularity.ROW)} if op == "scaled_gemm" else {
                "out_format": fp8, "out_granularity": Granularity.ROW}
            shape = (64, 64, 128) if op == "scaled_gemm" else (64, 128)
            print(module.supports(make_problem(op, shape, **fields), device) == ACCEPTED)
"""
# Compiles both kernels for a GPU that need not be here.
COMPILE = """if True:
    import acme_kernels, other_kernels
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def compile(function, pointers, **constants):
        signature = dict.fromkeys(function.arg_names, "i32") | pointers
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(function, signature, constants)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

    data = {"a": "*fp8e4nv", "b": "*fp8e4nv", "out": "*bf16", "bias": "*bf16"}
    scales = {"a_scale": "*fp32", "b_scale": "*fp32"}
    sizes = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128}
    text = compile(acme_kernels.scaled_gemm_row_kernel, data | scales, HAS_BIAS=True, **sizes)
    print("wgmma" in text and "e4m3" in text)
    pointers = {"x": "*bf16", "data": "*fp8e4nv", "scale": "*fp32"}
    text = compile(other_kernels.quantize_row_kernel, pointers, MAX=448.0, COLUMNS=512)
    print("div.rn" in text and "satfinite.e4m3" in text)
"""

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Python as a user has it who installed plugins into ``installed``, with Triton interpreted."""

    def run(*words: str, interpret: str = "1", code: int = 0) -> str:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "installed")]),
            "LOKAKERN_CACHE": str(tmp_path / "cache"),
            "LOKAKERN_DB": str(tmp_path / "user.sqlite"),
            "TRITON_INTERPRET": interpret,
        }
        ran = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, text=True,
                             capture_output=True, timeout=1800, check=False)  # fmt: skip
        assert ran.returncode == code, f"{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        return ran.stdout

    return run


def listed(run: Run, what: str, column: str, **options: Any) -> dict[str, dict[str, Any]]:
    return {row[column]: row for row in json.loads(run(*LIST, what, "--json", **options))}


@pytest.mark.rest
def test_written_packages_pass_their_trial_on_a_cpu_as_they_are(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    for name, op in (("acme", "scaled_gemm"), ("other", "quantize")):
        run("-m", "lokakern.bench", "new-kernel", name, "--op", op)
        run(*PIP, f"./{name}")
    found = listed(run, "libraries", "library")
    for name, kernel in (
        ("acme", "scaled_gemm_row (to m=2100, n=600, k=16384; also float32 out)"),
        ("other", "quantize_row (to m=520, k=5000; also float32 x)"),
    ):
        words = f"tried: it imports, and 1 of its kernels was right: {name}_kernels.{kernel}"
        assert found[name]["why"] == words
        assert (found[name]["state"], found[name]["kernels"]) == ("usable", 1)
    assert run("-c", USE).split() == ["True", "True"]
    assert run("-W", "ignore", "-c", COMPILE, interpret="0").split() == ["True", "True"]
    assert run("-c", ON_MI300X).split() == ["True", "False", "True", "False"]
    # A trial in the interpreter does not hold where Triton compiles.
    assert listed(run, "kernels", "kernel", interpret="0")["(plugin acme)"]["state"] == "untried"

    module = tmp_path / "installed" / "acme_kernels.py"
    text = module.read_text()
    module.write_text(text.replace("+ bias[n]", "+ bias[n], changed"))
    rows = listed(run, "kernels", "kernel")
    assert rows["(plugin acme)"]["state"] == "changed, untried"
    assert "other_kernels.quantize_row" in rows
    module.write_text(text.replace("    if HAS_BIAS:", "    if False:"))
    why = listed(run, "libraries", "library", code=5)["acme"]["why"]
    words = (
        r"acme_kernels.scaled_gemm_row: wrong: kernel_err \S+ > 1: \d+ of 6030 elements are wrong, "
        r"the first at row 0, column 0: \S+, not \S+; each column is off by a value of its own, as "
        r"without its bias at scaled_gemm m=67 n=90 k=200 a=e4m3fn/row b=e4m3fn/row bias "
        r"out=bfloat16: a \[67, 200\], a_scale \[67, 1\], "
        r"b \[200, 90\], b_scale \[1, 90\], out \[67, 90\], bias \[90\]"
    )
    assert re.fullmatch(words, why), why


def test_all_ops_with_a_template_are_offered() -> None:
    assert tuple(NewOp) == OPS


@pytest.mark.parametrize("name", ["Acme", "a-b", "7", "_x", "class", "cuda", "fbgemm", "", "a/b"])
def test_names_that_no_plugin_can_have_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(repr(name))):
        write_package(name, "quantize", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["new-kernel", "acme", "--out", str(tmp_path)])
    assert ended.exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("op", OPS)
def test_templates_are_formatted_as_lokakern_is(op: str, tmp_path: Path) -> None:
    for path in write_package("acme", op, tmp_path / "new"):
        assert "{" + "name}" not in path.read_text()
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["format", "--check"], ["check", "--config", "lint.isort.known-first-party=[]"]):
        ran = subprocess.run(
            [*ruff, *words, "--config", str(ROOT / "pyproject.toml"), str(tmp_path / "new")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout
