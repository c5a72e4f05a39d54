"""Op ``gemm`` with 1x32 scales: quantizers, then a scaled GEMM. The first runs anywhere."""

from __future__ import annotations

from lokakern.kernels.compositions import compose

compose("torch.quantize", "torch.emulated_mx")
compose("torch.quantize", "torch.scaled_mm_mx")
compose("hip.quantize", "hip.scaled_gemm_mx")
