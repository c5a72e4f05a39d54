"""Launching compiled kernels at the least host cost.

`function[grid](...)` of a Triton function takes about 12 us of host time on an H200's machine, most
of it to find the compiled kernel again. A `Launch` has found it: it costs 2 us more than
the 4 of the compiled launcher.

Under `record`, launchers given tensors of torch's "meta" device launch nothing: they tell what
their launch on a GPU would compile, as a `Job` that another process can do with no GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lokakern.types import Device

# Keys hold exact sizes and strides. A process that meets this many has strides that never come
# back: forget them rather than grow; Triton's own cache still spares the compilation.
_MOST_KEYS = 4096
_HIP = torch.version.hip is not None
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Job(Protocol):
    """One compilation, done in another process: it must pickle."""

    @property
    def key(self) -> Hashable:
        """Equal for jobs that compile the same on the same device."""

    def compile(self, device: Device) -> bool | None:
        """Compile for a GPU type that need not be here; True where it had been done before."""


class Recording:
    """Compile jobs of the launches on a GPU type, recorded without compiling.

    Attributes:
        device: The type of the GPU.
        jobs: By their keys, in the order they were met.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.jobs: dict[Hashable, Job] = {}

    def add(self, job: Job) -> None:
        self.jobs.setdefault(job.key, job)


recording: Recording | None = None
# digest: off  recording does not change what is launched
recorder: Any = None  # of `lokakern.native`, while a call is recorded
# digest: on
_RECORDING = threading.RLock()
_FORGET: list[Callable[[], None]] = []


@contextmanager
def record(device: Device) -> Iterator[Recording]:
    """Launches on meta tensors inside add jobs for a GPU type; one recording at a time.

    What `cached` functions and launchers remember is forgotten on entry and on exit, so that it
    never mixes two devices, and a warm launch need not look for a recording. Launches on real
    tensors go on meanwhile, at a higher host cost.

    Raises:
        RuntimeError: This thread is recording already.
    """
    global recording
    with _RECORDING:
        if recording is not None:
            raise RuntimeError(f"record({device}) inside record({recording.device})")
        recording = Recording(device)
        _forget()
        try:
            yield recording
        finally:
            recording = None
            _forget()


def cached(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``lru_cache`` for what depends on the device launched on, or leads to a `Launch`."""
    wrapper = functools.lru_cache(maxsize=_MOST_KEYS)(function)
    _FORGET.append(wrapper.cache_clear)
    return cast("Callable[_P, _R]", wrapper)


def _forget() -> None:
    for forget in _FORGET:
        forget()


def compute_units(index: int) -> int:
    """Multiprocessors of a tensor's GPU, by ``get_device()``; of the recorded type for -1."""
    if index >= 0:
        return int(torch.cuda.get_device_properties(index).multi_processor_count)
    return 4 if recording is None else recording.device.compute_units  # 4: interpreted


def for_amd() -> bool:
    """Whether launches are for a GPU of AMD, here or recorded."""
    return _HIP if recording is None else recording.device.vendor == "amd"


class Launch:
    """One Triton function with all that decides its compilation, but for the addresses.

    The function's parameters stand in this order: pointers, integers that Triton may specialize on
    (divisible by 16, equal to 1), integers named in its ``do_not_specialize``, constants.

    Args:
        function: What ``@triton.jit`` returned.
        specialized: Integers that may decide what is compiled.
        constants: ``tl.constexpr`` arguments.
        num_warps: Warps per program.
        num_stages: Depth of software pipelines.
    """

    __slots__ = ("_compiles", "_constants", "_direct", "_function", "_hooks", "_options",
                 "_specialized", "_warm")  # fmt: skip

    def __init__(
        self,
        function: Any,
        specialized: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
    ) -> None:
        from triton import knobs  # here: importing lokakern needs no Triton

        self._function = function
        self._specialized = specialized
        self._constants = constants
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        self._hooks = knobs.runtime
        self._warm: dict[Any, tuple[Callable[..., None], Any, Any]] = {}
        # Under TRITON_INTERPRET=1 the decorator returns a class that compiles nothing.
        self._compiles = hasattr(function, "device_caches")
        # One bound while recording gets meta tensors, where torch cannot tell the current GPU.
        self._direct = self._compiles and recording is None

    def __call__(
        self, programs: int, pointers: tuple[Tensor, ...], unspecialized: tuple[int, ...]
    ) -> None:
        """Launch on the current stream of the first tensor's device.

        A warm launch neither synchronizes nor allocates, so CUDA graphs may capture it.

        Args:
            programs: Size of the one-dimensional grid.
            pointers: Tensors, always of the same dtypes; one that is not used may be any.
            unspecialized: Integers that must not decide what is compiled, m above all; below 2^31.
        """
        device = pointers[0].get_device()
        if not self._direct or device != torch._C._cuda_getDevice():
            self._launch_cold(programs, pointers, unspecialized, device)
            return
        # digest: off
        if recorder is not None:
            recorder.refuse("launches a kernel of Triton")
        # digest: on
        addresses = [pointer.data_ptr() for pointer in pointers]
        together = 0
        for address in addresses:
            together |= address
        key: Any = device
        if together & 15:  # Triton specializes on 16-byte alignment of each pointer
            key = (device, *[address & 15 for address in addresses])
        if _HIP:  # and for AMD on whether buffer instructions reach all of it
            key = (key, *[p.untyped_storage().size() < 2**31 for p in pointers])
        warm = self._warm.get(key)
        hooks = self._hooks
        if warm is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            kernel = self._launch_cold(programs, pointers, unspecialized, device)
            self._warm[key] = (kernel.run, kernel.function, kernel.packed_metadata)
            return
        run, function, metadata = warm
        # Addresses instead of tensors spare the launcher one driver call for each pointer.
        run(
            programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), function, metadata,
            None, None, None, *addresses, *self._specialized, *unspecialized, *self._constants,
        )  # fmt: skip

    def _launch_cold(
        self,
        programs: int,
        pointers: tuple[Tensor, ...],
        unspecialized: tuple[int, ...],
        device: int,
    ) -> Any:
        """Triton's own way: it compiles, and calls the hooks of a profiler."""
        # digest: off
        if recorder is not None:
            recorder.refuse("launches a kernel of Triton")
        # digest: on
        if recording is not None and device < 0:
            if self._compiles:
                self._record(recording, pointers, unspecialized)
            return None
        if self._compiles and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(programs, pointers, unspecialized)
            return None
        return self._function[(programs,)](
            *pointers, *self._specialized, *unspecialized, *self._constants, **self._options
        )

    def _record(
        self, target: Recording, pointers: tuple[Tensor, ...], unspecialized: tuple[int, ...]
    ) -> None:
        from lokakern.triton_job import TritonJob  # here: no part of a kernel's digest

        target.add(
            TritonJob.of(
                self._function, target.device, pointers, self._specialized, unspecialized,
                self._constants, self._options,
            )
        )  # fmt: skip


class TritonLauncher:
    """Launches one ``@triton.jit`` function; keeps a `Launch` for each signature it meets."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._launches: dict[tuple[Any, ...], Launch] = {}
        _FORGET.append(self._launches.clear)

    def bind(
        self,
        specialized: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
    ) -> Launch:
        """The `Launch` of one signature, for callers that keep it themselves."""
        return Launch(self._function, specialized, constants, num_warps, num_stages)

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
        """Launch; the arguments are those of `Launch`."""
        key = (specialized, constants, num_warps, num_stages, *[p.dtype for p in pointers])
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _MOST_KEYS:
                self._launches.clear()
            launch = self.bind(specialized, constants, num_warps, num_stages)
            self._launches[key] = launch
        launch(programs, pointers, unspecialized)
