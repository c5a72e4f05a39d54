"""Host cost of calls with CuPy's arrays beside the same calls with tensors.

The difference of two medians of one run counts: what CuPy's callers pay more for a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lokakern
from tests.support import native

M, N, K = 2048, 512, 512
CALLS = 20
NAMES = ("gemm", "quantize", "scaled_gemm", "gemm_norm")


def calls(kind: str) -> dict[str, Callable[[], Any]]:
    a = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    if kind == "cupy":
        cupy = pytest.importorskip("cupy", reason="needs a GPU of a machine with it")
        pytest.importorskip("ml_dtypes", reason="needs a GPU of a machine with it")
        a, w = cupy.from_dlpack(a), cupy.from_dlpack(w)
    left, right, b = lokakern.quantize(a), lokakern.quantize(w).t(), w.T
    return {
        "gemm": lambda: lokakern.gemm(a, b),
        "quantize": lambda: lokakern.quantize(a),
        "scaled_gemm": lambda: lokakern.scaled_gemm(left, right),
        "gemm_norm": lambda: lokakern.gemm_norm(left, right, norm="layer"),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["torch", "cupy"])
@pytest.mark.parametrize("name", NAMES)
def test_host_cost(benchmark: Any, name: str, kind: str) -> None:
    with native.in_use(), torch.no_grad():
        call = calls(kind)[name]

        def many() -> None:
            for _ in range(CALLS):
                call()

        many()
        benchmark.pedantic(many, setup=torch.cuda.synchronize, rounds=40, warmup_rounds=3)
        torch.cuda.synchronize()
