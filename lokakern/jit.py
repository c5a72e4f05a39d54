"""Launching compiled kernels at the least host cost.

`function[grid](...)` of a Triton function takes about 9 us of host time, most of it to find the
compiled kernel again. `TritonLauncher` finds it with one dictionary look-up, so that a warm launch
costs little more than the driver's own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Keys hold exact sizes and strides. A process that meets this many has strides that never come
# back: forget them rather than grow; Triton's own cache still spares the compilation.
_MOST_KEYS = 4096
_HIP = torch.version.hip is not None
_dtype = operator.attrgetter("dtype")


class TritonLauncher:
    """Launches one ``@triton.jit`` function.

    Its parameters stand in this order: pointers, integers that Triton may specialize on (divisible
    by 16, equal to 1), integers named in its ``do_not_specialize``, constants.

    Args:
        function: What ``@triton.jit`` returned.
    """

    def __init__(self, function: Any) -> None:
        from triton import knobs  # here: importing lokakern needs no Triton

        self.function = function
        self._hooks = knobs.runtime
        self._warm: dict[tuple[Any, ...], tuple[Callable[..., None], Any, Any]] = {}
        # Under TRITON_INTERPRET=1 the decorator returns a class that compiles nothing.
        self._compiles = hasattr(function, "device_caches")

    def __call__(
        self,
        programs: int,
        pointers: tuple[Tensor, ...],
        specialized: tuple[int, ...],
        unspecialized: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
    ) -> None:
        """Launch on the current stream of the first tensor's device.

        A warm launch neither synchronizes nor allocates, so CUDA graphs may capture it.

        Args:
            programs: Size of the one-dimensional grid.
            pointers: Tensors; one that is not used may be any.
            specialized: Integers that may decide what is compiled.
            unspecialized: Integers that must not, m above all; less than 2^31.
            constants: ``tl.constexpr`` arguments.
            num_warps: Warps per program.
            num_stages: Depth of software pipelines.
        """
        device = pointers[0].get_device()
        if self._compiles and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(
                    programs, pointers, specialized, unspecialized, constants,
                    num_warps, num_stages,
                )  # fmt: skip
            return
        addresses = tuple(map(Tensor.data_ptr, pointers))
        # Holds all that Triton specializes on and more, so one key never means two kernels.
        key = (
            device, num_warps, num_stages, specialized, constants, tuple(map(_dtype, pointers)),
            functools.reduce(operator.or_, addresses) & 15 and tuple(a & 15 for a in addresses),
            _HIP and _within_2_gib(pointers),
        )  # fmt: skip
        warm = self._warm.get(key)
        hooks = self._hooks
        if warm is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            # Triton's own way: it compiles, and calls the hooks of a profiler.
            kernel = self.function[(programs,)](
                *pointers, *specialized, *unspecialized, *constants,
                num_warps=num_warps, num_stages=num_stages,
            )  # fmt: skip
            if self._compiles:
                if len(self._warm) >= _MOST_KEYS:
                    self._warm.clear()
                self._warm[key] = (kernel.run, kernel.function, kernel.packed_metadata)
            return
        run, function, metadata = warm
        # Addresses instead of tensors spare the launcher one driver call for each pointer.
        run(
            programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), function, metadata,
            None, None, None, *addresses, *specialized, *unspecialized, *constants,
        )  # fmt: skip


def _within_2_gib(pointers: tuple[Tensor, ...]) -> tuple[bool, ...]:
    """What else Triton specializes on for AMD: whether buffer instructions reach all of it."""
    return tuple(p.untyped_storage().size() < 2**31 for p in pointers)
