"""Models whose layers run as chains, and what their conversions chose and ran."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lokakern
from lokakern.conversion.convert import Conversion
from tests.support.conversions import H200

Run = Callable[[Any, Tensor], Tensor]
convert = functools.partial(lokakern.convert, device=H200, distribution="X1", inference=True)


def line(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules).bfloat16()


def tower() -> nn.Sequential:
    """The layers `WIDE` and `NARROW` of `chain_rows`."""
    torch.manual_seed(0)
    return line(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.LayerNorm(512), nn.ReLU())


class Given(nn.Module):
    """A forward that a test gives; modules of subclasses draw from one seed."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Apart(nn.Module):
    """A forward of its own, which calls one child."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def rows(m: int = 512) -> Tensor:
    return torch.randn(m, 512, generator=torch.Generator().manual_seed(1)).bfloat16()


def chains_of(handle: Conversion) -> list[str]:
    """Names of the layers of each chain."""
    return [" ".join(s.sites_of(chain)) for s in handle.spans for chain in s.plan.chains]


def is_chained(model: nn.Module, m: int = 512) -> bool:
    """Whether a call runs the op of a chain."""
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(rows(m))
    return any(event.name == "lokakern::routed_chain" for event in profile.events())
