"""A distribution that is like none that was measured."""

from __future__ import annotations

import lokakern
from lokakern.selection.dispatcher import OUTSIDE


def test_outside_what_was_measured_the_unquantized_kernel_is_taken() -> None:
    inside, outside = (
        lokakern.dispatch("gemm", (8192, 4096, 4096), 0.06, distribution=name, device="NVIDIA H200")
        for name in ("X3", ("X3", OUTSIDE))
    )
    assert inside.kernel != "torch.bf16"
    assert outside.kernel == "torch.bf16" and outside.latency_us is not None
    assert f"error not measured on {OUTSIDE}" in outside.explain()
