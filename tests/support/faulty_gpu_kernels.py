"""Kernels that misbehave on a GPU on purpose: each loses its process or its context."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from lokakern.registry.register import register


@triton.jit
def _write_nowhere(out: tl.tensor) -> None:
    tl.store(out + (1 << 45) + tl.program_id(0).to(tl.int64), 1.0)


@register("gemm", name="gpu_segfault")
def gpu_segfault(*_operands: Any) -> None:
    ctypes.string_at(8)


@register("gemm", name="gpu_loop")
def gpu_loop(*_operands: Any) -> None:
    """A device loop of 2^60 cycles: 18 years at 2 GHz."""
    Path(os.environ["LOKAKERN_TESTS"], f"hangs-{os.getpid()}").touch()  # faulty_kernels.hang_of
    torch.cuda._sleep(1 << 60)


@register("gemm", name="gpu_illegal_access")
def gpu_illegal_access(a: Any, b: Any, out: Any, *_rest: Any) -> None:
    _write_nowhere[(1,)](out)


@register("gemm", name="gpu_out_of_memory")
def gpu_out_of_memory(*_operands: Any) -> None:
    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
