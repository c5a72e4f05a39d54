"""Errors of delayed scaling beside those of dynamic scales, in emulated FP8 on a CPU.

Of an output ``x @ weight.t()`` with scales of the last 16 steps: in batches of one distribution, in
batches that grow or shrink, and in a training whose inputs do. Three minutes of two cores.

    python scripts/measure_delayed_scaling.py
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import lokakern
from lokakern import numerics
from lokakern.workloads.distributions import (
    REALISTIC_DISTRIBUTIONS,
    distribution_named,
    draw_rows,
    draw_weight,
)

M, N, K = 512, 256, 1024
HISTORY, SEEDS = 16, (0, 1, 2)
MAX = 448.0
STEPS, CHANGE, LAST = 600, 400, 50  # of a training; when inputs change; how many losses count


def amax_of(x: Tensor) -> float:
    return float(x.abs().max())


def row_error(
    x: Tensor, weight: Tensor, x_scale: float | None, granularity: str = "tensor"
) -> float:
    """The row error of an output; ``x_scale`` of None is dynamic."""
    given = None if x_scale is None else torch.tensor([max(x_scale, numerics.SMALLEST_SCALE)])
    left = lokakern.quantize(x, granularity, scale=given)
    right = lokakern.quantize(weight, granularity).t()
    out = lokakern.scaled_gemm(left, right)
    errors = numerics.row_errors(out.double(), x.double() @ weight.double().t())
    return math.sqrt(float(errors.clamp(max=1.0).square().mean()))


def batches_of(name: str, seed: int) -> tuple[list[Tensor], Tensor]:
    """Batches of one layer, and its weight."""
    distribution = distribution_named(name)
    rows = draw_rows(distribution, (HISTORY + 1) * M, K, seed).bfloat16()
    return list(rows.split(M)), draw_weight(distribution, N, K, seed).bfloat16()


def stationary() -> None:
    print("distribution: row error by rows, dynamic, delayed; share of elements that saturate")
    for name in REALISTIC_DISTRIBUTIONS:
        found, saturated = [], []
        for seed in SEEDS:
            (*before, x), weight = batches_of(name, seed)
            scale = max(map(amax_of, before)) / MAX
            saturated.append(float((x.float().abs() > MAX * scale).double().mean()))
            found.append([
                row_error(x, weight, None, "row"), row_error(x, weight, None),
                row_error(x, weight, scale),
            ])  # fmt: skip
        worst = " ".join(f"{max(column):.4f}" for column in zip(*found, strict=True))
        print(f"{name:4} {worst}  {max(saturated):.1e}")


def drift(sizes: Callable[[int], float], history: int, margin: int) -> tuple[float, float, int]:
    """The largest error of dynamic and delayed scales, and steps with more than 1.25 times as much.

    ``sizes`` is by what step 16 and the 31 after it multiply the batches.
    """
    batches, weight = batches_of("X1", 0)
    seen: list[float] = [amax_of(x) for x in batches[:HISTORY]]
    dynamic, delayed = [], []
    for step in range(2 * HISTORY):
        x = (batches[step % len(batches)].float() * sizes(step)).bfloat16()
        scale = max(seen[-history:]) * 2**margin / MAX
        dynamic.append(row_error(x, weight, None))
        delayed.append(row_error(x, weight, scale))
        seen.append(amax_of(x))
    above = sum(b > 1.25 * a for a, b in zip(dynamic, delayed, strict=True))
    return max(dynamic), max(delayed), above


DRIFTS: dict[str, Callable[[int], float]] = {
    "1.02 times as large each step": lambda step: 1.02**step,
    "1.2 times as large each step": lambda step: 1.2**step,
    "2 times as large each step": lambda step: 2.0**step,
    "at once 4 times as large": lambda _: 4.0,
    "at once 64 times as large": lambda _: 64.0,
    "one step 1000 times as large": lambda step: 1000.0 if step == 0 else 1.0,
    "one step 1e5 times as large": lambda step: 1e5 if step == 0 else 1.0,
    "at once 100 times as small": lambda _: 1e-2,
    "at once 1e4 times as small": lambda _: 1e-4,
}


def drifting() -> None:
    print("X1; history, margin: largest row error, steps of 32 with 1.25 times that of dynamic")
    for name, sizes in DRIFTS.items():
        words = []
        for history, margin in ((HISTORY, 0), (HISTORY, 2), (1, 0)):
            dynamic, delayed, above = drift(sizes, history, margin)
            words.append(f"{history}, {margin}: {delayed:.3f}, {above}")
        print(f"{name:32} dynamic {dynamic:.3f}; {'; '.join(words)}")


def losses(scaling: str | None, change: float, seed: int) -> list[float]:
    """Losses of an MLP whose inputs change their size; None is bfloat16."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    model.bfloat16()
    kernels = "bf16" if scaling is None else "tensor"
    handle = lokakern.convert(model, kernels=kernels, scaling=scaling or "dynamic")
    teacher = torch.randn(64, generator=torch.Generator().manual_seed(1)) / 8
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1000 * seed + step))
        score = (x @ teacher).tanh()
        size = change if step >= CHANGE else 1.0
        loss = (model((size * x).bfloat16())[:, 0].float() - score).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scaling == "delayed":
            handle.delayed_scaling.update()
        found.append(loss.item())
    return found


def trained() -> None:
    print(f"training: mean loss of {LAST} steps before {CHANGE}, of the 5 after it, at the end")
    for change in (1.0, 4.0, 0.01):
        for scaling in (None, "dynamic", "delayed"):
            runs = [losses(scaling, change, seed) for seed in SEEDS]

            def mean(part: slice, runs: Sequence[list[float]] = runs) -> str:
                return f"{statistics.mean(statistics.mean(run[part]) for run in runs):.5f}"

            parts = (slice(CHANGE - LAST, CHANGE), slice(CHANGE, CHANGE + 5), slice(-LAST, None))
            words = ", ".join(map(functools.partial(mean), parts))
            print(f"inputs times {change:g}, {scaling or 'bfloat16'}: {words}")


if __name__ == "__main__":
    stationary()
    drifting()
    trained()
