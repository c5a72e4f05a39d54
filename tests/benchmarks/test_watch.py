"""Host cost of what a watch adds to a sampled step, and of its thread for a window, on a CPU.

With operands so small that a launch is all they cost: nine layers as of DLRM-DCNv2. The thread gets
sizes and rows as many as those have at 8192 samples. Medians of one run count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lokakern.conversion.drift_watch import _WindowProbe
from lokakern.probe.drift import Ranges
from lokakern.probe.windows import SiteWindow, transfers_of
from tests.support import native

SAMPLES, ROWS = 8192, 256
SHAPES = [(3456, 512), (512, 3456)] * 3 + [(3456, 1024), (1024, 1024), (1024, 512)]
TINY = 2


@pytest.fixture(params=["python", "cpp"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.in_use() if request.param == "cpp" else contextlib.nullcontext():
        yield request.param


@pytest.mark.usefixtures("path")
def test_sampled_step(benchmark: Any) -> None:
    """Both ops of a graph, hooks of the weights, and the end of the step; of five, one weighs."""
    model = nn.Sequential(*(nn.Linear(TINY, TINY) for _ in SHAPES)).bfloat16()
    probe = _WindowProbe(model, 1, transfers_of, lambda: None, check="off", seed=0)
    xs = [torch.randn(TINY, TINY).bfloat16() for _ in SHAPES]
    weights: Any = [layer.weight for layer in model]
    sites = [recorder.number for recorder in probe._recorders.values()]
    ops = torch.ops.lokakern

    def step() -> None:
        calls = ops.probe_taps(xs, xs, weights, sites, [True] * len(xs))
        ops.probe_tap_gradients(xs[0], xs, calls, sites)
        for weight, gradient in zip(weights, xs, strict=True):
            for hook in weight._backward_hooks.values():
                hook(gradient)
        probe.step()

    with probe:
        benchmark.pedantic(step, rounds=500, warmup_rounds=20)


@pytest.mark.usefixtures("path")
def test_window(benchmark: Any) -> None:
    """Of a window the numbers, and their comparison; ``beside_compute_us`` is Python's."""
    torch.manual_seed(0)
    sites = {}
    for place, (k, n) in enumerate(SHAPES):
        site = sites[str(place)] = SiteWindow(n, k, torch.device("cpu"))
        for part, columns in ((site.input, k), (site.grad_output, n)):
            sizes = (torch.rand(size).add(3).bfloat16() for size in (SAMPLES, columns))
            rows = torch.randn(ROWS, columns).bfloat16()
            part.waiting.append(((lambda *_: None), (*sizes, rows, torch.rand(ROWS))))
    ranges = Ranges({})
    (transfer,) = transfers_of(sites)
    compute, spent = transfer._compute, [0.0]

    def timed() -> Any:
        begun = time.thread_time()
        found = compute()
        spent[0] += time.thread_time() - begun
        return found

    transfer._compute = timed
    for _ in range(5):
        ranges.see(transfer.numbers(), set())
    spent[0], begun, rounds = 0.0, time.thread_time(), 100
    for _ in range(rounds):
        ranges.see(transfer.numbers(), set())
    beside = time.thread_time() - begun - spent[0]
    benchmark.extra_info["beside_compute_us"] = beside / rounds * 1e6
    benchmark.pedantic(lambda: ranges.see(transfer.numbers(), set()), rounds=200, warmup_rounds=3)
