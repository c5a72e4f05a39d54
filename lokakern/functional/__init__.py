"""The public functions on tensors: gemm, scaled_gemm, gemm_norm, quantize and others."""
