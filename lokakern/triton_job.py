"""One compilation by Triton for a GPU that need not be here.

Triton's own ``JITFunction.warmup`` does it, so that its cache on disk gets the very key that the
launch on that GPU asks for. Only the driver is ours: it names the target and owns no GPU.
"""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lokakern.errors import DeviceError

if TYPE_CHECKING:
    from lokakern.jit import Recording
    from lokakern.types import Device


@dataclass(frozen=True, slots=True)
class Pointer:
    """Stand-in for a tensor in ``JITFunction.warmup``, with the properties that Triton reads."""

    dtype: torch.dtype
    aligned: bool  # to 16 bytes
    within_2gib: bool  # whether AMD's buffer instructions reach all of it

    @classmethod
    def of(cls, x: Tensor, device: Device) -> Pointer:
        """Of a meta tensor, whose storage starts aligned."""
        aligned = x.storage_offset() * x.element_size() % 16 == 0
        return cls(x.dtype, aligned, device.vendor != "amd" or x.untyped_storage().size() < 2**31)

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
        pointers = tuple(Pointer.of(x, device) for x in tensors)
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
        function = _function(self.module, self.name)
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


@dataclass(eq=False)
class PluginJob:
    """One launch of a plugin's ``@triton.jit`` function, as its launcher wrote it.

    Attributes:
        module: Where the function is imported from.
        name: Its qualified name there.
        given: Arguments by name; a `Pointer` for each tensor.
        constants: Names of the ``tl.constexpr`` arguments.
        options: Such as ``num_warps``.
        resources: What the compiled kernel takes, after `compile`.
    """

    module: str
    name: str
    given: dict[str, Any]
    constants: frozenset[str]
    options: dict[str, Any]
    resources: str = field(default="", init=False)

    @classmethod
    def of(
        cls, function: Any, device: Device, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> PluginJob:
        """The job of a launch on meta tensors."""
        names = [parameter.name for parameter in function.params]
        given = dict(zip(names, arguments, strict=False)) | named
        options = {name: given.pop(name) for name in set(given) - set(names)}
        for name, value in given.items():
            if isinstance(value, Tensor):
                given[name] = Pointer.of(value, device)
        constants = frozenset(p.name for p in function.params if p.is_constexpr)
        return cls(function.fn.__module__, function.fn.__qualname__, given, constants, options)

    @functools.cached_property
    def key(self) -> Hashable:
        """Integers as Triton distinguishes them, other arguments as it writes them."""
        words = (
            (name, (_width(value), value == 1, value % 16 == 0))
            if type(value) is int and name not in self.constants
            else (name, repr(value))
            for name, value in sorted(self.given.items())
        )
        return self.module, self.name, *words, repr(sorted(self.options.items()))

    def compile(self, device: Device) -> bool:
        """Compile into Triton's cache on disk, unless it is there; as `TritonJob.compile`."""
        function = _function(self.module, self.name)
        while hasattr(function, "configs") or hasattr(function, "values"):
            function = function.fn  # of triton.autotune and triton.heuristics
        with _compiling_for(device) as hits:
            compiled = function.warmup(grid=(1,), **self.given, **self.options)
        self.resources = _resources(compiled)
        return all(hits)

    def __str__(self) -> str:
        types = ", ".join(
            str(x.dtype).removeprefix("torch.")
            for x in self.given.values()
            if isinstance(x, Pointer)
        )
        constants = {name: self.given[name] for name in self.given if name in self.constants}
        words = ", ".join(f"{name}={x}" for name, x in (constants | self.options).items())
        return f"{self.name}({types}; {words})"


@contextmanager
def recording_plugins(recording: Recording) -> Iterator[None]:
    """Launches of ``@triton.jit`` functions inside add jobs instead; of autotuned ones, each form.

    For processes that launch nothing meanwhile.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def add(function: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        recording.add(PluginJob.of(function, recording.device, arguments, named))

    def add_each(tuner: Any, *arguments: Any, **named: Any) -> None:
        for config in tuner.configs:
            tuner.fn.run(*arguments, **named, **config.all_kwargs())

    before = JITFunction.run, Autotuner.run
    JITFunction.run, Autotuner.run = add, add_each
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = before


def _function(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def _resources(compiled: Any) -> str:
    """Registers, spills and memory of a compiled kernel, such as "registers 128, shared 49152"."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        taken = {
            "vector registers": ".vgpr_count", "scalar registers": ".sgpr_count",
            "spilled vector registers": ".vgpr_spill_count",
            "spilled scalar registers": ".sgpr_spill_count",
            "bytes of scratch memory": ".private_segment_fixed_size",
        }  # fmt: skip
        found = {words: rf"\{name}:\s+(\d+)" for words, name in taken.items()}
    else:
        import triton

        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [str(tool), "--dump-resource-usage", file.name]
            try:
                text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):  # not every Triton brings it
                text = ""
        # ptxas spills to the stack.
        found = {"registers": r"REG:(\d+)", "bytes of stack": r"STACK:(\d+)",
                 "bytes of local memory": r"LOCAL:(\d+)"}  # fmt: skip
    counts = {words: re.search(pattern, text) for words, pattern in found.items()}
    told = [f"{count[1]} {words}" for words, count in counts.items() if count is not None]
    return ", ".join([*told, f"{compiled.metadata.shared} bytes of shared memory"])


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
