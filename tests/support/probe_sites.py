"""Sites that saw a distribution of the bench, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from lokakern.probe.hooks import SAMPLED_ROWS
from lokakern.probe.statistics import SiteStatistics
from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight

CPU = torch.device("cpu")


def site_of(
    x: Tensor, w: Tensor, gradient: Tensor | None = None, *, norm: str = ""
) -> SiteStatistics:
    """Statistics of a site after batches of 256 rows, all of them sampled."""
    site = SiteStatistics(*w.shape, CPU, norm=norm)
    generator = torch.Generator().manual_seed(7)
    site.add_weight(w)
    for start in range(0, len(x), SAMPLED_ROWS):
        rows = x[start : start + SAMPLED_ROWS]
        keys = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        site.count({len(rows): 1})
        site.input.add(rows, rows.double(), keys)
        if gradient is not None:
            g = gradient[start : start + SAMPLED_ROWS]
            site.grad_output.add(g, g.double(), keys)
    return site


def drawn(name: str, n: int, k: int, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """1024 rows that a site sees, 1024 that are held out, and the weight, float32."""
    recipe = distribution_named(name)
    x = draw_rows(recipe, 2048, k, seed).float()
    return x[:1024], x[1024:], draw_weight(recipe, n, k, seed).float()
