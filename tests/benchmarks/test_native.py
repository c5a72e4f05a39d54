"""Host cost of a call, twenty at a time and then a synchronization, beside torch's products.

The ratios of one run count, because machines differ by a factor of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lokakern
from lokakern.functional.run import run
from lokakern.native import replayed
from lokakern.registry.register import KERNELS
from tests.support import native

M, N, K = 8192, 1024, 1024
CALLS = 20
NAMES = ("torch.mm", "torch._scaled_mm", "gemm prepared", "gemm", "scaled_gemm", "quantize",
         "quantize_transpose", "gemm_norm", "norm_quantize", "scaled_mm_row_fast")  # fmt: skip


@pytest.fixture
def calls() -> Iterator[dict[str, Callable[[], Any]]]:
    a = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    prepared = lokakern.prepare_weight(w, 0.06, (1024, 65536))
    left, right = lokakern.quantize(a), lokakern.quantize(w).t()
    b = w.t()
    kernel = KERNELS["torch.scaled_mm_row_fast"]
    by_torch = replayed(lambda a, b: run(kernel, a, b))
    with native.in_use(), torch.no_grad():
        yield {
            "torch.mm": lambda: torch.mm(a, b),
            "torch._scaled_mm": lambda: torch._scaled_mm(
                left.data, right.transpose[0], left.scale, right.transpose[1],
                out_dtype=torch.bfloat16),
            "gemm prepared": lambda: lokakern.gemm(a, prepared),
            "gemm": lambda: lokakern.gemm(a, b, budget=0.06),
            "scaled_gemm": lambda: lokakern.scaled_gemm(left, right),
            "quantize": lambda: lokakern.quantize(a),
            "quantize_transpose": lambda: lokakern.quantize_transpose(a),
            "gemm_norm": lambda: lokakern.gemm_norm(left, right, norm="layer"),
            "norm_quantize": lambda: lokakern.norm_quantize(a, norm="layer"),
            "scaled_mm_row_fast": lambda: by_torch(left, right),
        }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_host_cost(benchmark: Any, calls: dict[str, Callable[[], Any]], name: str) -> None:
    call = calls[name]

    def many() -> None:
        for _ in range(CALLS):
            call()

    many()
    benchmark.pedantic(many, setup=torch.cuda.synchronize, rounds=40, warmup_rounds=3)
    torch.cuda.synchronize()
