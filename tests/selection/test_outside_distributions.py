"""Dispatch under a distribution unlike all measured ones."""

from __future__ import annotations

import lokakern
from lokakern.selection.dispatcher import OUTSIDE


def test_an_unmeasured_distribution_takes_the_unquantized_kernel() -> None:
    inside, outside = (
        lokakern.dispatch("gemm", (8192, 4096, 4096), 0.06, distribution=name, device="NVIDIA H200")
        for name in ("X3", ("X3", OUTSIDE))
    )
    assert inside.kernel != "torch.bf16"
    assert outside.kernel == "torch.bf16" and outside.latency_us is not None
    assert f"error not measured on {OUTSIDE}" in outside.explain()
