"""Op ``gemm`` with outputs whose rows are not 16-byte aligned: quantizers, then a scaled GEMM."""

from __future__ import annotations

from lokakern.kernels.compositions import compose

for _gemm in ("tensor", "row", "block", "group"):
    compose("cuda.quantize", f"cuda.scaled_gemm_{_gemm}_unaligned")
