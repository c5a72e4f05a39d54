"""Measure the energy of FP8 products on a GPU, which decides where it is at its power limit.

    python scripts/measure_energy.py [--shape 32768,2048,2048] [--seconds 2] [--out FILE]

Each kernel multiplies the same operands again and again for some seconds, as a CUDA graph, while
NVML counts millijoules: those of the whole board, idle power included. Kernels take turns, in two
rounds of opposite order, because a warm chip draws more. Prints, for each kernel, the time of a
product, watts, and picojoules for each FLOP, of both rounds; and the same of bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lokakern.device import current_device
from lokakern.measure.operands import Operands
from lokakern.measure.time_problem import contender_of, torch_device
from lokakern.measure.timing import warm
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, Kernel, fp8_format, load_kernels
from lokakern.types import Format, Granularity, Operand, Problem, Rejected

DISTRIBUTION = "X1"
CALLS = 8  # of a graph, on operand sets in turn


def problems(shape: tuple[int, int, int], fp8: Format) -> list[Problem]:
    """bfloat16, and operands with one scale, scales of rows, and 1x128 by 128x128."""
    scaled = [
        make_problem("scaled_gemm", shape, a=Operand(fp8, granularity))
        for granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP)
    ]
    return [make_problem("gemm", shape), *scaled]


def kernels_of(problem: Problem) -> list[Kernel]:
    """Kernels that take it and are one launch: quantizers draw other power."""
    device = current_device()
    return [
        kernel
        for kernel in KERNELS.values()
        if kernel.op == problem.op
        and (problem.op != "gemm" or kernel.name == "torch.bf16")
        and not isinstance(kernel.supports(problem, device), Rejected)
    ]


def energy_reader() -> Callable[[], float]:
    """A function that reads the joules of the GPU since its driver was loaded.

    Raises:
        SystemExit: There is no GPU, or NVML does not count its energy.
    """
    if not torch.cuda.is_available():
        raise SystemExit("measure_energy: no GPU is available; energy is that of one")
    try:
        import pynvml
    except ImportError:
        raise SystemExit(
            "measure_energy: joules are read by pynvml: pip install nvidia-ml-py"
        ) from None
    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        raise SystemExit(f"measure_energy: NVML counts no energy of this GPU: {error}") from None
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


def captured(kernel: Kernel, problem: Problem) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of `CALLS` launches on cold operands, and what has to live as long."""
    operands = Operands(problem, DISTRIBUTION, torch_device(), current_device(), cold=True)
    calls = contender_of(operands, kernel).calls
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for number in range(CALLS):
            calls[number % len(calls)]()
    return graph, (operands, calls)


def measured(
    graph: torch.cuda.CUDAGraph, seconds: float, joules: Callable[[], float]
) -> tuple[float, float]:
    """Microseconds of a product, and watts."""
    graph.replay()
    torch.cuda.synchronize()
    begun, before, replays = time.perf_counter(), joules(), 0
    while time.perf_counter() - begun < seconds:
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        replays += 10
    spent = time.perf_counter() - begun
    return spent / (replays * CALLS) * 1e6, (joules() - before) / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="32768,2048,2048", help="m,n,k")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a kernel in a round")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    m, n, k = map(int, asked.shape.split(","))
    joules, graphs = energy_reader(), {}
    load_kernels()
    for problem in problems((m, n, k), fp8_format(current_device())):
        for kernel in kernels_of(problem):
            try:
                graphs[kernel.name] = captured(kernel, problem)
            except Exception as error:  # a library may refuse or fail
                print(f"{kernel.name}: left out: {type(error).__name__}: {str(error)[:120]}")
    warm(torch_device())
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in graphs}
    for order in (list(graphs), list(graphs)[::-1]):
        for name in order:
            found[name].append(measured(graphs[name][0], asked.seconds, joules))
    rows: list[dict[str, Any]] = []
    for name, rounds in found.items():
        latency_us = statistics.mean(us for us, _ in rounds)
        picojoules = [us * 1e-6 * watts / (2 * m * n * k) * 1e12 for us, watts in rounds]
        rows.append({
            "kernel": name, "latency_us": latency_us,
            "watts": statistics.mean(watts for _, watts in rounds),
            "pj_per_flop": statistics.mean(picojoules), "pj_per_flop_of_rounds": picojoules,
        })  # fmt: skip
    for row in sorted(rows, key=lambda row: row["latency_us"]):
        both = ", ".join(f"{x:.4f}" for x in row["pj_per_flop_of_rounds"])
        print(
            f"{row['kernel']:40} {row['latency_us']:8.1f} us {row['watts']:6.0f} W "
            f"{row['pj_per_flop']:.4f} pJ/FLOP ({both})"
        )
    if asked.out is not None:
        asked.out.write_text(json.dumps({"shape": [m, n, k], "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
