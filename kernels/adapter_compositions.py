"""Op ``gemm`` through libraries' GEMMs: our quantizers, then theirs."""

from __future__ import annotations

from lokakern.kernels.compositions import compose

_ON_HOPPER = ("fbgemm.rowwise", "fbgemm.rowwise_fast", "fbgemm.groupwise", "deep_gemm.block",
              "flashinfer.tensor_fast", "flashinfer.block", "transformer_engine.tensor",
              "transformer_engine.tensor_fast", "transformer_engine.block")  # fmt: skip
_OTHER_ALGORITHMS = [f"cublaslt.tensor_fast_{rank}" for rank in (2, 3, 4)]
for _gemm in (*_ON_HOPPER, *_OTHER_ALGORITHMS):
    compose("cuda.quantize", _gemm)
compose("triton.quantize", "aiter.row")
