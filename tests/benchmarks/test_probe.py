"""Host cost of Probe: a step of a small eager model alone, between samples, and sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lokakern.probe.session import Probe

LAYERS, WIDTH, ROWS = 8, 64, 16  # small, so that hooks are seen


@pytest.mark.parametrize("how", ["alone", "between", "sampled"])
def test_step(benchmark: Any, how: str) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    x = torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    if how == "alone":
        benchmark(step)
        return
    with Probe(model, every=1 if how == "sampled" else 10**9) as probe:
        step()  # the first is sampled
        benchmark(step)
    assert len(probe.sites()) == LAYERS
