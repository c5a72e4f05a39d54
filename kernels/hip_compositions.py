"""Ops ``gemm`` and ``gemm_norm`` from HIP's parts: quantizers, then a scaled GEMM, then a norm.

HIP has no norm of its own beside `hip.gemm_norm_*`, nor a quantizer of 128x128: these are Triton's.
"""

from __future__ import annotations

from lokakern.kernels import compositions, norm_compositions

for _stem, _gemm in (("hip", "row"), ("triton", "block")):
    _name = f"hip.scaled_gemm_{_gemm}"
    _made = compositions.compose(f"{_stem}.quantize", _name)
    norm_compositions.compose(_name, "triton.norm_quantize")
    if _made is not None:
        norm_compositions.compose(_made.name, "triton.norm_quantize")
for _gemm in ("row", "row_fast"):  # hipBLASLt's
    compositions.compose("hip.quantize", f"torch.scaled_mm_{_gemm}")
