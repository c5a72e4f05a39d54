"""Op ``gemm`` through libraries' GEMMs: our quantizers, then theirs."""

from __future__ import annotations

from lokakern.kernels.compositions import compose

_ON_HOPPER = ("fbgemm.rowwise", "fbgemm.rowwise_fast", "fbgemm.groupwise", "deep_gemm.block",
              "flashinfer.tensor_fast", "flashinfer.block")  # fmt: skip
for _gemm in _ON_HOPPER:
    compose("cuda.quantize", _gemm)
compose("triton.quantize", "aiter.row")
