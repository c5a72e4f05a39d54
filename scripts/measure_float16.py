"""Compare kernels with float16 and with bfloat16, on equal operands and in turn.

    python scripts/measure_float16.py [--language torch --tiny]

Prints a line of JSON for each problem: the kernel, medians in microseconds of both, and the ratio
of float16's to bfloat16's. Times are those of a sweep: CUDA graphs, cold operands, replays of both
in random order. On a CPU, for which there are kernels of torch only, times say nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lokakern.device import current_device
from lokakern.measure.operands import Operands
from lokakern.measure.time_problem import contender_of, floor_us, torch_device
from lokakern.measure.timing import quantiles, release, time_contenders
from lokakern.problems import make_problem
from lokakern.registry.register import fp8_format, kernel_named
from lokakern.types import Format, Granularity, Operand, Problem, Rejected

QUANTIZED = (
    ("quantize_row", (8192, 1024)),
    ("quantize_row", (32768, 64)),
    ("quantize_row", (2048, 16384)),  # takes 40 registers, 31 in bfloat16
    ("quantize_row", (8192, 479)),
    ("quantize_group", (8192, 2048)),
    ("quantize_block", (8192, 1024)),
    ("quantize_tensor", (2048, 1024)),
    ("quantize_tensor", (32768, 2048)),
    ("quantize_transpose_row", (8192, 1024)),
    ("quantize_transpose_group", (8192, 1024)),
)
PRODUCTS = (
    ("scaled_gemm_row", (8192, 1024, 1024), "none"),
    ("scaled_gemm_row", (32768, 512, 512), "bias+silu"),
    ("scaled_gemm_row_unaligned", (8192, 1677, 1677), "none"),
    ("scaled_gemm_block", (8192, 1024, 1024), "none"),
    ("scaled_gemm_group", (8192, 512, 2048), "none"),
)


def problems(fp8: Format, language: str) -> Iterator[tuple[str, Problem]]:
    """Kernels, and problems in bfloat16."""
    for name, shape in QUANTIZED:
        kernel = kernel_named(f"{language}.{name}")
        scales = kernel.granularity
        yield kernel.name, make_problem(kernel.op, shape, out_format=fp8, out_granularity=scales)
    for name, shape, epilogue in PRODUCTS:
        if language == "torch":
            name = name.replace("scaled_gemm", "emulated").removesuffix("_unaligned")
        kernel = kernel_named(f"{language}.{name}")
        fields: dict[str, Any] = {"a": Operand(fp8, kernel.granularity), "epilogue": epilogue}
        if kernel.b_granularity is Granularity.GROUP:
            fields["b"] = replace(make_problem("scaled_gemm", shape, **fields).b or fields["a"],
                                  granularity=Granularity.GROUP)  # fmt: skip
        yield kernel.name, make_problem("scaled_gemm", shape, **fields)


def in_float16(problem: Problem) -> Problem:
    a = problem.a
    if a.format.is_fp8:
        return replace(problem, out_format=Format.FLOAT16)
    return replace(problem, a=replace(a, format=Format.FLOAT16))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare times of float16 and bfloat16.")
    parser.add_argument("--language", default="cuda", choices=("cuda", "triton", "torch"))
    parser.add_argument("--tiny", action="store_true", help="16 rows of each problem")
    given = parser.parse_args(arguments)
    device, where = current_device(), torch_device()
    regime = "graph-cold" if device.is_gpu else "eager"
    for name, plain in problems(fp8_format(device), given.language):
        kernel = kernel_named(name)
        both = [replace(x, m=16) if given.tiny else x for x in (plain, in_float16(plain))]
        contenders = []
        for problem in both:
            answer = kernel.supports(problem, device)
            if isinstance(answer, Rejected):
                raise SystemExit(f"{name} does not take {problem}: {answer.reason}")
            operands = Operands(problem, "X1", where, device, cold=device.is_gpu)
            contenders.append(contender_of(operands, kernel, str(problem)))
        time_contenders(contenders, regime=regime, device=where, floor_us=floor_us(plain),
                        budget_ms=100.0, keep_all=True)  # fmt: skip
        failed = next((c for c in contenders if c.status != "ok"), None)
        if failed is not None:
            raise SystemExit(f"{name}, {failed.name}: {failed.status}: {failed.reason}")
        bf16_us, fp16_us = (quantiles(contender).p50 for contender in contenders)
        release(contenders)
        told = {"kernel": name, "problem": str(both[1]), "bfloat16_us": round(bf16_us, 3),
                "float16_us": round(fp16_us, 3), "ratio": round(fp16_us / bf16_us, 4)}  # fmt: skip
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
