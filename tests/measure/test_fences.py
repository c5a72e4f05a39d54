"""Trials find writes outside of outputs in parts: quantized ones, and those of gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from lokakern.measure.time_problem import check_case
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Device, Format, Granularity, Layout, Operand
from lokakern.workloads.suites import Case

load_kernels()
HERE = Device("cpu", "some CPU", "x86_64", 2, 16)
NORM = "bias+layer+affine"
ROW = {
    "a": Operand(Format.E4M3FN, Granularity.ROW),
    "b": Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN),
}


def fp8(scales: Granularity) -> dict[str, Any]:
    return {"out_format": Format.E4M3FN, "out_granularity": scales}


CASES = {
    "gemm_norm": (Case.of("gemm_norm", (67, 90, 200), "X1", epilogue=NORM, **ROW,
                          **fp8(Granularity.ROW)), "torch.norm_emulated_row"),
    "norm_quantize": (Case.of("norm_quantize", (67, 200), "X1", epilogue="layer+affine",
                              **fp8(Granularity.GROUP)), "torch.norm_quantize"),
    "norm_backward": (Case.of("norm_backward", (67, 200), "X1", epilogue=NORM,
                              **fp8(Granularity.GROUP)), "torch.norm_backward"),
}  # fmt: skip
PARTS: list[tuple[str, str, Callable[[Any], Tensor]]] = [
    ("gemm_norm", "out.data", lambda out: out.data),
    ("gemm_norm", "out.scale", lambda out: out.scale),
    ("norm_quantize", "out.data", lambda out: out.data),
    ("norm_quantize", "out.scale", lambda out: out.scale),
    ("norm_backward", "outputs.quantized.data", lambda out: out.quantized.data),
    ("norm_backward", "outputs.quantized_t.data", lambda out: out.quantized_t.data),
    ("norm_backward", "outputs.quantized_t.scale", lambda out: out.quantized_t.scale),
    ("norm_backward", "outputs.sums", lambda out: out.sums),
]


@pytest.mark.parametrize(("op", "name", "part"), PARTS, ids=[name for _, name, _ in PARTS])
def test_writes_outside_of_parts_are_found(
    op: str, name: str, part: Callable[[Any], Tensor]
) -> None:
    case, kernel = CASES[op][0], KERNELS[CASES[op][1]]
    assert check_case(case, kernel, HERE).status == "ok"
    place = {"gemm_norm": 2, "norm_quantize": 1, "norm_backward": 2}[op]

    def launch(*given: Any) -> None:
        kernel.launch(*given)
        out = part(given[place])
        span = max(size * step for size, step in zip(out.shape, out.stride(), strict=True))
        behind = out.as_strided((3,), (1,), out.storage_offset() + span)
        behind.fill_(0.0)

    record = check_case(case, replace(kernel, launch=launch), HERE)
    assert record.status == "wrong"
    assert record.reason.startswith(f"writes 3 elements outside of {name} ["), record.reason
