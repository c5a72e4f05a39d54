"""Parameters and tensors of tests over all kernels of some ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern.device import current_device
from lokakern.registry.register import KERNELS, Kernel, load_kernels

load_kernels()
ACTIVATING = ("cuda.activate_quantize_row",)  # of op norm_quantize, without a norm
# Of op gemm_norm, without a norm.
CROSSING = tuple(sorted(name for name in KERNELS if "cuda.gemm_cross" in name))
RECTIFYING = ("torch.bf16_relu",)
LONG_ROWS = tuple(sorted(name for name in KERNELS if "cuda.quantize_long" in name))  # refuse others
LONG_SUMS = tuple(sorted(name for name in KERNELS if name.endswith("_split")))  # as well
BEHIND_CROSSES = ("torch.cross_backward", "cuda.cross_backward")  # of op norm_backward


def cases(*ops: str) -> list[Any]:
    """Each kernel of some ops and where to run it: on a GPU, and what runs anywhere on the CPU.

    Libraries' are in tests of their own (test_adapters*.py), because they do less, and so are those
    of long rows (test_quantize_long.py) and of long sums (test_split_products.py).
    """
    found = []
    for name, kernel in sorted(KERNELS.items()):
        if kernel.op in ops and not kernel.libraries and name not in (*LONG_ROWS, *LONG_SUMS):
            if kernel.architectures == {"any"}:
                found.append(pytest.param(name, "cpu", id=f"{name}-cpu"))
            found.append(pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu))
    return found


def kernel_here(name: str, where: str) -> Kernel:
    kernel = KERNELS[name]
    if not kernel.runs_on(current_device(where)):
        pytest.skip(f"needs a GPU of {', '.join(sorted(kernel.architectures))}")
    return kernel


def drawn(*shape: int, where: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(where)


def columns_for(kernel: Kernel, n: int) -> int:
    """A number of columns that a kernel takes: n, or one less where it is for unaligned rows."""
    return n - 1 if kernel.pads or "_unaligned" in kernel.name else n
