"""Op ``gemm`` by CUDA products whose sums are not promoted: quantizers, then a product."""

from __future__ import annotations

from lokakern.kernels import together_compositions
from lokakern.kernels.compositions import compose

for _gemm in ("tensor", "row"):
    compose("cuda.quantize", f"cuda.scaled_gemm_{_gemm}_fast")
together_compositions._compose("cuda.scaled_gemm_row_fast")
