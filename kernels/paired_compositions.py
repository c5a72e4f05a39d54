"""Op ``gemm`` by CUDA products with promoted sums in tiles of any width, behind quantizers."""

from __future__ import annotations

from lokakern.kernels.compositions import compose

for _gemm in ("tensor", "row"):
    compose("cuda.quantize", f"cuda.scaled_gemm_{_gemm}_paired")
