"""Compare public calls of `gemm_norm` with torch.compile's bfloat16, in CUDA graphs, in turn.

    python scripts/measure_public_norms.py [--suite anchors] [--layer] [--block] [--modes MODE ...]

Two calls at each size: FP8 with row scales, LayerNorm with weight and bias, to bfloat16; and FP8
with row and with tensor scales, block norm and hard-swish, to FP8 with a static scale. Prints a
line of JSON for each size and a geometric mean for each call. Times are those of a sweep: CUDA
graphs, cold operands, replays in random order.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import lokakern
from lokakern.bench.compare import compiled_baselines
from lokakern.bench.compare.race import geometric_mean
from lokakern.device import current_device
from lokakern.measure.norm_operands import operands_of
from lokakern.measure.operands import Operands
from lokakern.measure.time_problem import contender_of, floor_us, torch_device
from lokakern.measure.timing import Contender, quantiles, release, time_contenders
from lokakern.registry.register import KERNELS, fp8_format
from lokakern.types import Device, Format, Granularity, Problem
from lokakern.workloads.norm_cases import LAYER, block_norm, gemm_norm_cases
from lokakern.workloads.suites import SUITES

SCALES = {"layer": (Granularity.ROW,), "block": (Granularity.ROW, Granularity.TENSOR)}


def calls_of(operands: Operands) -> list[Callable[[], Any]]:
    """The public call for each set of operands."""
    to_fp8 = operands.problem.out_format.is_fp8
    calls: list[Callable[[], Any]] = []
    for (a, b, out), (epilogue,) in zip(operands.sets, operands.epilogues, strict=True):
        where = {"out_scale": "static"} if to_fp8 else {"out": out}
        calls.append(
            functools.partial(
                lokakern.gemm_norm, a, b, norm=epilogue.norm, bias=epilogue.bias,
                norm_weight=epilogue.norm_weight, norm_bias=epilogue.norm_bias,
                activation=epilogue.activation, **where,
            )
        )  # fmt: skip
    return calls


def problems(shape: tuple[int, ...], kind: str, fp8: Format) -> tuple[Problem, list[Problem]]:
    """The unquantized problem of a size and kind, and the quantized ones."""
    m, n, k = shape
    epilogue = LAYER if kind == "layer" else block_norm(n)
    cases = gemm_norm_cases(m, n, k, "X1", fp8)
    plain, *found = [x.problem for x in cases if x.problem.epilogue == epilogue]
    return plain, [problem for problem in found if problem.a.granularity in SCALES[kind]]


def measure(
    shape: tuple[int, ...], kind: str, fp8: Format, device: Device, modes: Sequence[str]
) -> dict[str, float]:
    """Microseconds by contender."""
    where, regime = torch_device(), "graph-cold" if device.is_gpu else "eager"
    unquantized, asked = problems(shape, kind, fp8)
    contenders: list[Contender] = []
    for problem in asked:
        operands = operands_of(problem, "X1", where, device, cold=device.is_gpu)
        contenders.append(Contender(f"public {problem.a.granularity.value}", calls_of(operands)))
    plain = operands_of(unquantized, "X1", where, device, cold=device.is_gpu)
    contenders += [contender_of(plain, KERNELS[mode]) for mode in modes]
    time_contenders(contenders, regime=regime, device=where, floor_us=floor_us(asked[0]),
                    keep_all=True)  # fmt: skip
    failed = next((c for c in contenders if c.status != "ok"), None)
    if failed is not None:
        raise SystemExit(f"{failed.name} at {shape}: {failed.status}: {failed.reason}")
    times = {contender.name: quantiles(contender).p50 for contender in contenders}
    release(contenders)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare gemm_norm with torch.compile.")
    parser.add_argument("--suite", default="anchors")
    parser.add_argument("--layer", action="store_true", help="the call with LayerNorm only")
    parser.add_argument("--block", action="store_true", help="the call with block norm only")
    parser.add_argument("--modes", nargs="*", default=[*compiled_baselines.MODES],
                        choices=[*compiled_baselines.MODES])  # fmt: skip
    parser.add_argument("--sizes", type=int, help="that many sizes, the first ones")
    given = parser.parse_args(arguments)
    device, where = current_device(), torch_device()
    fp8 = fp8_format(device)
    kinds = [kind for kind in SCALES if getattr(given, kind)] or [*SCALES]
    found = (case.problem for case in SUITES[given.suite].cases(device))
    shapes = [*dict.fromkeys(p.shape for p in found if p.op == "scaled_gemm")][: given.sizes]
    ratios: dict[str, list[float]] = defaultdict(list)
    with compiled_baselines.registered():
        todo = [problems(shape, kind, fp8)[0] for kind in kinds for shape in shapes]
        note = functools.partial(print, file=sys.stderr, flush=True)
        compiled_baselines.compile_ahead(todo, given.modes, where, device, note)
        for kind in kinds:
            for shape in shapes:
                times = measure(shape, kind, fp8, device, given.modes)
                rival_us = min(times[mode] for mode in given.modes)
                print(json.dumps({"call": kind, "shape": shape} | {
                    name: round(us, 2) for name, us in times.items()}), flush=True)  # fmt: skip
                for name, us in times.items():
                    if name not in given.modes:
                        ratios[f"{kind}, {name}"].append(rival_us / us)
                best = min(us for name, us in times.items() if name not in given.modes)
                ratios[f"{kind}, best"].append(rival_us / best)
    for name, values in ratios.items():
        print(f"{name}: {geometric_mean(values):.3f} of torch.compile, least {min(values):.3f}")


if __name__ == "__main__":
    main()
