"""Where the time of a step goes, by the names of its kernels, and what Amdahl allows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# The first that matches counts. Kernels that Inductor fused are named after what they hold.
KINDS = {
    "attention": r"attention|sdpa|fmha",  # some say cutlass as well
    "quantizing": r"quantize|float8|_fp8|amax",
    "GEMM": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|triton_tem|_mm\b|::mm|addmm|bmm|linear"
    r"|token_gradient",
    "norm": r"norm|rsqrt",
    "tables": r"embedding|segment|radix|sort",
    "optimizer": r"adam|multi_tensor",
}
OTHER = "other"
FP8_GAIN = 2.0  # of FP8 tensor cores over bf16's, at their peaks


@dataclass(frozen=True, slots=True)
class Shares:
    """Time of a step by kind of kernel.

    Attributes:
        us: By kind, of a step.
        timer: Whose clock: a GPU's kernels, or a CPU's operators.
    """

    us: dict[str, float]
    timer: str

    @property
    def total_us(self) -> float:
        """Of all kernels, without the gaps between them."""
        return sum(self.us.values())

    def share(self, *kinds: str) -> float:
        """Part of the total."""
        return sum(self.us[kind] for kind in kinds) / self.total_us if self.total_us else 0.0

    @property
    def bound(self) -> float:
        """Amdahl's: the speedup if GEMMs took half of their time and norms none."""
        return 1 / (1 - self.share("GEMM") * (1 - 1 / FP8_GAIN) - self.share("norm"))

    @property
    def limit(self) -> float:
        """The same if GEMMs and norms took no time at all."""
        left = 1 - self.share("GEMM", "norm")
        return 1 / left if left > 0 else float("inf")


def kind_of(kernel: str) -> str:
    """What a kernel, or an operator of a CPU, is for, by its name."""
    return next((k for k, words in KINDS.items() if re.search(words, kernel, re.I)), OTHER)


def shares_of(run: Callable[[], None], steps: int, device: torch.device) -> Shares:
    """Profile a few steps.

    Args:
        run: Takes them.
        steps: How many it takes.
        device: Where they run.
    """
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as found:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    us = dict.fromkeys((*KINDS, OTHER), 0.0)
    for event in found.key_averages():
        us[kind_of(event.key)] += _spent_us(event, on_gpu) / steps
    return Shares(us, "kernels of the GPU" if on_gpu else "operators of the CPU")


def _spent_us(event: Any, on_gpu: bool) -> float:
    if not on_gpu:
        return float(event.self_cpu_time_total)
    # Ranges that torch marks, such as an optimizer's step, hold kernels that count by themselves.
    is_kernel = event.device_type == DeviceType.CUDA and not event.is_user_annotation
    return float(event.self_device_time_total) if is_kernel else 0.0
