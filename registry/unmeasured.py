"""What nobody has measured yet, or not by all tests, though a machine could.

It is said here, and not where a kernel is registered, when that would change the digests of others
in the same file, and so make their measurements stale. An entry goes with its first measurement.
"""

from __future__ import annotations

_NORMS_OF_GROUPS = (
    "tested on an NVIDIA H200, not timed: no suite has layers of 1x128 by 1x128 scales with a norm"
)
_PAIRED = "tested on an NVIDIA H200, timed as a product of FP8 operands only"
# By kernel and architecture: the reason.
UNMEASURED: dict[tuple[str, str], str] = {
    ("torch.norm_emulated_group", "sm_90"): _NORMS_OF_GROUPS,
    ("cuda.scaled_gemm_group+cuda.norm_quantize", "sm_90"): _NORMS_OF_GROUPS,
    ("cuda.scaled_gemm_group_unaligned", "sm_90"): (
        "tested on an NVIDIA H200, timed as a part of GEMMs only: no suite has unaligned operands "
        "with 1x128 by 1x128 scales"
    ),
    ("cuda.gemm_cross_tensor", "sm_90"): (
        "tested on an NVIDIA H100, timed as a part of compositions only: no suite has crosses of "
        "operands with one scale each"
    ),
}
# Kernels that are new, or have new parts, by kernel and architecture: the reason. They need neither
# a time nor a test result there; an entry goes when the kernel was timed and tested.
NEW_KERNELS: dict[tuple[str, str], str] = {
    ("cuda.quantize_long_row_power_of_two", "sm_90"): "tested on an NVIDIA H200, not timed",
    ("cuda.quantize_tensor+cuda.scaled_gemm_tensor_paired", "sm_90"): _PAIRED,
    ("cuda.quantize_row+cuda.scaled_gemm_row_paired", "sm_90"): _PAIRED,
    ("cuda.quantize_long_row+cuda.scaled_gemm_row_fast", "sm_90"): (
        "timed on an NVIDIA H200 with new tiles of its product; only tests of its parts ran"
    ),
}
# Ops that are new, by architecture, and why: not all of their kernels need have a time or a test
# result there. An entry goes when all were timed and tested.
NEW_OPS: dict[tuple[str, str], str] = {}
