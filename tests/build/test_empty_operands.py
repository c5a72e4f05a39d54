"""docs/kernels.md says what launchers get: its tables are compared with operands of launches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lokakern.build.empty_operands import OPERANDS, launch_arguments, named_operands
from lokakern.problems import make_problem
from lokakern.quantized_tensor import pitch_of
from lokakern.registry.ops import OPS
from lokakern.types import Format, Granularity, Layout, Operand, Problem

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
SIZES = {"m": 67, "n": 90, "k": 200}  # of no multiple of a tile, a group, or 16 bytes
E4M3, ROW, GROUP = Format.E4M3FN, Granularity.ROW, Granularity.GROUP
DTYPES = {
    "FP8": {torch.float8_e4m3fn},
    "bfloat16": {torch.bfloat16},
    "float32": {torch.float32},
    "float8_e8m0fnu": {torch.float8_e8m0fnu},
}


def rows_of(header: str) -> Iterator[list[str]]:
    """Cells of the table under a header."""
    lines = PAGE.partition(f"{header}\n|---")[2].splitlines()[1:]
    assert lines, f"no table has the header {header!r}"
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


OPERAND_ROWS = {
    (op.strip("`"), name.strip("`")): cells
    for op, name, *cells in rows_of("| op | operand | shape | dtype | strides |")
}
SCALE_ROWS = {
    name.strip("`"): cells
    for name, *cells in rows_of("| scales of [rows, columns] | shape | dtype | strides |")
}


def number(text: str, **sizes: int) -> Any:
    """A shape or strides as the page writes them; "any" is None."""
    names: dict[str, Any] = {
        "up": lambda x, step: -(-x // step) * step,
        "ceil": lambda x: -int(-x // 1),
        "pitch": pitch_of,
        "any": None,
        "sums": 3,
    }
    return eval(text, {"__builtins__": {}}, names | sizes)


def check(name: str, x: Tensor, shape: str, dtype: str, strides: str, **sizes: int) -> None:
    assert list(x.shape) == number(shape.removesuffix(", or None"), **sizes), name
    words = re.findall("|".join(DTYPES), dtype)
    if words:  # others are as of another operand
        assert x.dtype in set().union(*(DTYPES[word] for word in words)), (name, x.dtype)
    if strides == "any":
        return
    expected = number(strides.split(" or ")[0], **sizes)
    for size, have, want in zip(x.shape, x.stride(), expected, strict=True):
        assert size == 1 or want in (None, have), (name, x.stride(), expected)


def problems() -> Iterator[Problem]:
    m, n, k = SIZES.values()
    prepared = {"b": Operand(E4M3, ROW, Layout.COLUMN), "prepared": True}
    for granularity in (Granularity.TENSOR, ROW, GROUP, Granularity.BLOCK, Granularity.MX):
        form = {"out_format": E4M3, "out_granularity": granularity}
        yield make_problem("quantize", (m, k), **form)
        yield make_problem("quantize_transpose", (m, k), epilogue="column_sums", **form)
        yield make_problem("dequantize", (m, k), a=Operand(E4M3, granularity))
        if granularity is not Granularity.BLOCK:
            a = Operand(E4M3, granularity)
            yield make_problem("scaled_gemm", (m, n, k), a=a, epilogue="bias")
    yield make_problem("gemm", (m, n, k), epilogue="bias")
    yield make_problem("gemm", (m, n, k), **prepared)
    norm = {"epilogue": "bias+layer+affine"}
    quantized = norm | {"out_format": E4M3, "out_granularity": GROUP}
    yield make_problem("gemm_norm", (m, n, k), **norm)
    yield make_problem("gemm_norm", (m, n, k), **norm, **prepared)
    yield make_problem("gemm_norm", (m, n, k), **quantized, a=Operand(E4M3, ROW))
    yield make_problem("norm_quantize", (m, k), **norm, out_format=Format.BFLOAT16)
    yield make_problem("norm_quantize", (m, k), **quantized)
    backward = {"epilogue": "bias+residual+layer+affine", "out_format": E4M3}
    yield make_problem("norm_backward", (m, k), **backward, out_granularity=GROUP)


def scales_of(problem: Problem, name: str) -> Granularity:
    """Granularity of the scales of that name."""
    if problem.b is not None and name.startswith("b"):
        return problem.b.granularity
    if name.startswith("a") or problem.op == "dequantize":
        return problem.a.granularity
    return problem.out_granularity


def test_launchers_get_what_the_page_says() -> None:
    met = set()
    for problem in problems():
        for name, x in named_operands(problem).items():
            shape, dtype, strides = OPERAND_ROWS[problem.op, name]
            met.add((problem.op, name))
            where = f"{problem}: {name}"
            if not shape.startswith("scales of "):
                check(where, x, shape, dtype, strides, **SIZES)
                continue
            inner = re.search(r"\[(.), (.)\]", shape)
            assert inner is not None
            rows, columns = (SIZES[axis] for axis in inner.groups())
            x = x.mT if shape.endswith(", transposed") else x
            found = SCALE_ROWS[scales_of(problem, name).value]
            check(where, x, *found, rows=rows, columns=columns)
    assert met == set(OPERAND_ROWS), "no launch here has these operands"


def test_launchers_and_workspaces_get_their_arguments_in_the_order_of_the_page() -> None:
    """A stand-in for a kernel notes what its workspace is called with."""
    header = "| op | launcher | `workspace` is called with |"
    rows = {op.strip("`"): cells for op, *cells in rows_of(header)}
    for op, (launcher, seen) in rows.items():
        names = re.findall(r"\w+", launcher)[1:]
        noted: list[str] = []

        def workspace(*given: str, noted: list[str] = noted) -> str:
            noted += given
            return "workspace"

        kernel: Any = SimpleNamespace(op=op, workspace=workspace)
        epilogue = ("epilogue",) if "epilogue" in names else ()
        assert list(launch_arguments(kernel, OPERANDS[op], epilogue)) == names
        assert noted == re.findall(r"\w+", seen), op
    assert rows.keys() == OPS.keys()


def test_the_page_has_all_granularities_and_ops() -> None:
    assert set(SCALE_ROWS) == {x.value for x in Granularity} - {"none"}
    assert {op for op, _ in OPERAND_ROWS} == set(OPS) == set(OPERANDS)
