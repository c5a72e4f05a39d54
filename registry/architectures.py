"""The GPUs that kernels claim beyond what their files say, and their limits there.

The text of a kernel's file is part of the digest of its rows, most of which were measured on sm_90.
What other architectures add, take away or limit stands here, where it makes no row stale.
"""

from __future__ import annotations

import torch
from packaging.version import Version

from lokakern.types import Device, Format, Problem, norm_form

# L4, L40S, RTX 4090; H100, H200; B200; B300; RTX 50, RTX PRO; MI300X; MI350X.
FP8_GPUS = frozenset({"sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950"})
# A block may have 99 KiB of shared memory there, 227 on sm_90.
_SMALL = frozenset({"sm_89", "sm_120"})
# Triton does not promote the sums of their mma.sync. An FP8 sum that is never promoted reaches 4.34
# of the bound of 8 at k = 2048 on sm_90, in proportion to k (`PROMOTED_KERNEL_ERR_BOUND`).
_UNPROMOTED_LARGEST_K = 2048
# With the launches of sm_90 (griddepcontrol, clusters), and without its products.
_BLACKWELL = frozenset({"sm_100", "sm_103", "sm_120"})
# The first torch whose row-wise kernel for sm_89 runs on the current stream (pytorch issue 177651).
_ON_ITS_STREAM = Version("2.12")


def claimed(kernel: str, architectures: frozenset[str]) -> frozenset[str]:
    """Where a kernel of lokakern runs or compiles, if its file names these architectures."""
    if kernel.startswith("triton.scaled_gemm") and kernel.endswith("_fast"):
        return architectures - _SMALL  # its largest tile takes 144 KiB
    # Where two tensors are quantized together, registers spill on sm_100 and sm_120. What long rows
    # take of shared memory does not fit sm_120.
    is_own = "_together_" in kernel or "_long_" in kernel
    if kernel.startswith(("cuda.quantize_", "cuda.dequantize_")) and not is_own:
        return architectures | _BLACKWELL
    return architectures


def limit(kernel: str, problem: Problem, device: Device) -> str | None:
    """Why a kernel of lokakern does not do on a device what its file says, or None.

    Crosses with the weight of a norm are refused here, not in the file of the kernel that ignored
    it, for the sake of its rows, none of which has one.

    The parts of a composition are asked themselves.
    """
    gpu = device.architecture
    if "+" in kernel:
        return None
    if kernel.startswith("cuda.gemm_cross_") and norm_form(problem.epilogue).affine:
        return "reads no weight or bias of a norm"
    if gpu in _SMALL and kernel.startswith("triton."):
        return _limit_of_triton(kernel, problem, gpu)
    if gpu in _SMALL | _BLACKWELL and kernel.startswith("torch.scaled_mm_row"):
        return _limit_of_torch(problem, gpu)
    return None


def _limit_of_triton(kernel: str, problem: Problem, gpu: str) -> str | None:
    if problem.op not in ("scaled_gemm", "gemm_norm"):
        return None
    if kernel.endswith(("_tensor", "_row")) and problem.k > _UNPROMOTED_LARGEST_K:
        return f"Triton promotes no sums on {gpu}, up to k={_UNPROMOTED_LARGEST_K}; k={problem.k}"
    if problem.op == "scaled_gemm":
        return None
    # Tiles of 384 and 512 columns take 112 and 144 KiB, and so does that of 128 rows by 256, which
    # a program has where k is long or a row has several blocks.
    columns = norm_form(problem.epilogue).norm.block or problem.n
    if columns < 256 or (columns == problem.n == 256 and problem.k <= 512):
        return None
    return (
        f"{columns} columns together, k={problem.k}, do not fit 99 KiB of shared memory on {gpu}; "
        "less than 256 do, and rows of 256 with k <= 512"
    )


def _limit_of_torch(problem: Problem, gpu: str) -> str | None:
    if problem.b is not None and problem.b.format is not Format.E4M3FN:
        return f"b is {problem.b.format.value}; row by row torch multiplies by e4m3fn only"
    if gpu == "sm_89" and Version(torch.__version__) < _ON_ITS_STREAM:
        return f"torch {torch.__version__} ignores streams row by row on sm_89; 2.12 does not"
    return None
