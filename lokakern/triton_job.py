"""One compilation by Triton for a GPU that need not be here.

Triton's own ``JITFunction.warmup`` does it, so that its cache on disk gets the very key that the
launch on that GPU asks for. Only the driver is ours: it names the target and owns no GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lokakern.errors import DeviceError

if TYPE_CHECKING:
    from lokakern.types import Device


@dataclass(frozen=True, slots=True)
class Pointer:
    """Stand-in for a tensor in ``JITFunction.warmup``, with the properties that Triton reads."""

    dtype: torch.dtype
    aligned: bool  # to 16 bytes
    within_2gib: bool  # whether AMD's buffer instructions reach all of it

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1

    def ptr_range(self) -> int:
        return 0 if self.within_2gib else 2**31


@dataclass(frozen=True, eq=False)
class TritonJob:
    """A ``@triton.jit`` function with all that decides its compilation.

    Attributes:
        module: Where the function is imported from.
        name: Its qualified name there.
        pointers: One for each tensor.
        specialized: Integers that may decide what is compiled; see `Launch`.
        unspecialized: Integers of which only the width does.
        constants: ``tl.constexpr`` arguments.
        options: ``num_warps`` and ``num_stages``.
    """

    module: str
    name: str
    pointers: tuple[Pointer, ...]
    specialized: tuple[int, ...]
    unspecialized: tuple[int, ...]
    constants: tuple[Any, ...]
    options: dict[str, int]

    @classmethod
    def of(
        cls,
        function: Any,
        device: Device,
        tensors: tuple[Tensor, ...],
        specialized: tuple[int, ...],
        unspecialized: tuple[int, ...],
        constants: tuple[Any, ...],
        options: dict[str, int],
    ) -> TritonJob:
        """The job of one launch; tensors are meta tensors, whose storage starts aligned."""
        pointers = tuple(
            Pointer(
                x.dtype,
                x.storage_offset() * x.element_size() % 16 == 0,
                device.vendor != "amd" or x.untyped_storage().size() < 2**31,
            )
            for x in tensors
        )
        return cls(function.fn.__module__, function.fn.__qualname__, pointers, specialized,
                   unspecialized, constants, options)  # fmt: skip

    @functools.cached_property
    def key(self) -> Hashable:
        """Integers as Triton distinguishes them, constants as it writes them."""
        return (
            self.module,
            self.name,
            self.pointers,
            tuple((_width(x), x == 1, x % 16 == 0) for x in self.specialized),
            tuple(_width(x) for x in self.unspecialized),
            repr(self.constants),
            tuple(sorted(self.options.items())),
        )

    def compile(self, device: Device) -> bool:
        """Compile into Triton's cache on disk, unless it is there.

        Returns:
            Whether it was there.

        Raises:
            DeviceError: Triton does not compile for such a device.
            Exception: Whatever Triton raises about the function.
        """
        function = functools.reduce(
            getattr, self.name.split("."), importlib.import_module(self.module)
        )
        with _compiling_for(device) as hits:
            function.warmup(
                *self.pointers, *self.specialized, *self.unspecialized, *self.constants,
                grid=(1,), **self.options,
            )  # fmt: skip
        # None where this process compiled the same before, and Triton did not even look.
        return all(hits)

    def __str__(self) -> str:
        types = ", ".join(str(p.dtype).removeprefix("torch.") for p in self.pointers)
        constants = ", ".join(map(str, self.constants))
        return f"{self.name}({types}; {', '.join(map(str, self.specialized))}; {constants})"


def _width(value: int) -> int:
    """Bits of the integer type that Triton gives a value."""
    return 32 if -(2**31) <= value < 2**31 else 64 if value < 2**63 else 65


def target_of(device: Device) -> Any:
    """Triton's name of a GPU type.

    Raises:
        DeviceError: It has none.
    """
    from triton.backends.compiler import GPUTarget

    kind, architecture = device.vendor, device.architecture
    if kind == "nvidia" and architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    if kind == "amd" and architecture.startswith("gfx9"):
        return GPUTarget("hip", architecture, 64)
    raise DeviceError(
        f"Triton is not known to compile for {device} ({kind}, {architecture}); expected nvidia "
        "with sm_NN or amd with gfx9NN"
    )


class _AbsentDriver:
    """Stand-in for Triton's driver, for compilation without launches."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> Any:
        return str(self._target)  # key of Triton's caches in memory: never that of a real GPU

    def get_current_stream(self, _device: Any) -> int:
        return 0


@contextmanager
def _compiling_for(device: Device) -> Iterator[list[bool]]:
    """Triton compiles for the device inside; yields, for each look into its cache, whether it hit.

    For processes that launch nothing meanwhile.
    """
    from triton import knobs
    from triton.runtime.driver import driver

    hits: list[bool] = []
    listener, active = knobs.compilation.listener, driver._active

    def listen(*, cache_hit: bool, **facts: Any) -> None:
        hits.append(cache_hit)
        if listener is not None:
            listener(cache_hit=cache_hit, **facts)

    driver.set_active(_AbsentDriver(target_of(device)))
    knobs.compilation.listener = listen
    try:
        yield hits
    finally:
        knobs.compilation.listener = listener
        driver.set_active(active)
