"""Op ``gemm`` through libraries' GEMMs: our quantizers, then theirs."""

from __future__ import annotations

from lokakern.kernels.compositions import compose

for _gemm in ("fbgemm.rowwise", "fbgemm.rowwise_fast", "fbgemm.groupwise", "deep_gemm.block"):
    compose("cuda.quantize", _gemm)
