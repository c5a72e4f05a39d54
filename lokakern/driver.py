"""Launching programs of NVRTC through CUDA's driver, at the least host cost.

What the driver reads of a launch (grid, stream, arguments) lies in one block of memory made
beforehand, so a warm launch packs numbers into it and makes one foreign call.
"""

from __future__ import annotations

# digest: off
import copy

# digest: on
import ctypes
import functools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lokakern import jit
from lokakern.device import current_device
from lokakern.errors import LaunchError
from lokakern.nvrtc import Program, cubin

# Offsets and numbers of cuda.h, which its versions keep.
_CONFIG = "@7IPPI"  # CUlaunchConfig: grid, block, dynamic shared bytes, stream, attributes, count
_ATTRIBUTE = "@i4x3I52x"  # CUlaunchAttribute: id, then a union of 64 bytes
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6
_MAX_DYNAMIC_SHARED_BYTES, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_INVALID_CONTEXT = 201
_RELAXED_CAPTURE = 2  # CUstreamCaptureMode
_SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
_PORTABLE_CLUSTER = 8
_POINTER_BYTES = 8

# Tensor maps, of cuda.h too.
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_MAP_DTYPE = {1: 0, 2: 1, 4: 7}  # by bytes of an element: UINT8, UINT16, FLOAT32
_MAP_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
_MAP_L2_PROMOTION_256B = 3
_MOST_MAPS = 4096  # as many as signatures in lokakern.jit; 1 MiB


class _Arguments(NamedTuple):
    """Memory of one launch under way: what is packed, and where the driver reads it."""

    memory: Any
    config: ctypes.c_void_p
    table: ctypes.c_void_p


class CudaLaunch:
    """One program with all that decides its compilation and launch, but for addresses and m.

    The kernel's parameters stand in this order: pointers, scalars, tensor maps (each a
    ``const __grid_constant__ CUtensorMap``, 128 bytes aligned to 64).

    Args:
        program: What to compile; on each device at its first launch.
        pointers: How many.
        scalars: The `struct` code of each scalar: i and I for 32 bits, q and Q for 64, f, d.
        threads: Per block.
        shared_bytes: Dynamic shared memory of a block.
        tensor_maps: How many.
        cluster: Blocks of a cluster, along x.
        cooperative: All blocks of a grid run at once, or the launch is refused.
        programmatic: Begin while the kernel before in the stream still ends. The kernel must then
            wait (``griddepcontrol.wait``) before it touches any memory.

    Attributes:
        program: What is launched.
    """

    __slots__ = (
        "_attributes",
        "_attributes_memory",
        "_cluster",
        "_current_device",
        "_current_stream",
        "_functions",
        "_maps_at",
        "_maps_format",
        "_pack",
        "_parameters",
        "_shape",
        "_shared_bytes",
        "_spare",
        "_submit",
        "_values_format",
        "program",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        *,
        pointers: int,
        threads: int,
        scalars: str = "",
        shared_bytes: int = 0,
        tensor_maps: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
        programmatic: bool = False,
    ) -> None:
        self.program = program
        self._parameters = (pointers, len(scalars), tensor_maps)
        self._cluster = cluster
        self._shared_bytes = shared_bytes
        self._shape = (threads, 1, 1, shared_bytes)
        wanted = []
        if cluster > 1:
            wanted.append(struct.pack(_ATTRIBUTE, _CLUSTER_DIMENSION, cluster, 1, 1))
        if cooperative:
            wanted.append(struct.pack(_ATTRIBUTE, _COOPERATIVE, 1, 0, 0))
        if programmatic:
            wanted.append(struct.pack(_ATTRIBUTE, _PROGRAMMATIC_STREAM_SERIALIZATION, 1, 0, 0))
        self._attributes_memory = ctypes.create_string_buffer(b"".join(wanted) or b"\0")
        self._attributes = (ctypes.addressof(self._attributes_memory), len(wanted))
        self._values_format = f"{_CONFIG}{'P' * pointers}{scalars}"
        self._pack = struct.Struct(self._values_format).pack_into
        self._maps_format = struct.Struct("P" * tensor_maps)
        # The driver's table of parameters follows the values; maps are its last entries.
        self._maps_at = _round_up(struct.calcsize(self._values_format), _POINTER_BYTES)
        self._maps_at += _POINTER_BYTES * (pointers + len(scalars))
        # Blocks of memory that no launch uses. Taking one off a list and putting it back are each
        # one step of the interpreter, so threads share a CudaLaunch without a lock; 0.05 us for
        # both, where a lock takes 0.1. It grows to as many as were ever under way at once.
        self._spare: list[_Arguments] = []
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._current_device = getattr(torch._C, "_cuda_getDevice", None)
        self._current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._submit: Any = None

    def __call__(
        self,
        grid: tuple[int, int, int],
        pointers: tuple[Tensor, ...],
        scalars: tuple[int | float, ...] = (),
        tensor_maps: tuple[TensorMap, ...] = (),
    ) -> None:
        """Launch on the current stream of the first tensor's device.

        A warm launch neither synchronizes nor allocates on the device, so CUDA graphs may capture
        it. On tensors of the device "meta", while `lokakern.jit` records, it launches nothing and
        hands over its program.

        Args:
            grid: Blocks along x, y, z; none may be 0.
            pointers: Tensors, all on one device.
            scalars: Integers and floats, m among them.
            tensor_maps: What `tensor_map` made, alive until the call returns.

        Raises:
            CompilationError: The program does not compile here.
            LaunchError: The driver refuses, or the arguments are not those the launch was made for.
        """
        # Costs 0.1 us. A tensor map too few would leave a stale address in its place.
        if (len(pointers), len(scalars), len(tensor_maps)) != self._parameters:
            raise LaunchError(
                f"{self.program}: given {(len(pointers), len(scalars), len(tensor_maps))} "
                f"pointers, scalars and tensor maps; it was bound for {self._parameters}"
            )
        device = pointers[0].get_device()
        function = self._functions.get(device)
        if function is None or device != self._current_device():  # type: ignore[misc]
            self._launch_cold(grid, pointers, scalars, tensor_maps, device)
            return
        try:
            arguments = self._spare.pop()
        except IndexError:
            arguments = self._new_arguments()
        memory, config, table = arguments
        self._pack(
            memory, 0, *grid, *self._shape, self._current_stream(device), *self._attributes,
            *[pointer.data_ptr() for pointer in pointers], *scalars,
        )  # fmt: skip
        if tensor_maps:
            self._maps_format.pack_into(memory, self._maps_at, *[m.address for m in tensor_maps])
        failed = self._submit(config, function, table, None)
        if failed == _INVALID_CONTEXT:  # a thread whose first CUDA call this is
            _use_context(device)
            failed = self._submit(config, function, table, None)
        self._spare.append(arguments)
        if failed:
            raise LaunchError(
                f"{self.program}: grid {grid}, {self._shape[0]} threads, {self._shared_bytes} "
                f"bytes of shared memory, clusters of {self._cluster}: {_message(failed)}"
            )
        # digest: off  recording does not change what is launched
        if jit.recorder is not None:
            jit.recorder.launched(self, grid, pointers, scalars, tensor_maps, function.value)
        # digest: on

    # digest: off  of programs for float16
    def with_program(self, program: Program) -> CudaLaunch:
        """The launch of another program with the same parameters."""
        made = copy.copy(self)
        made.program, made._functions, made._spare = program, {}, []
        return made

    # digest: on
    def _new_arguments(self) -> _Arguments:
        """Memory: configuration, values, then a table with the address of each value."""
        pointers, scalars, tensor_maps = self._parameters
        size = self._maps_at + _POINTER_BYTES * tensor_maps
        memory = ctypes.create_string_buffer(size)
        start = ctypes.addressof(memory)
        table_at = self._maps_at - _POINTER_BYTES * (pointers + scalars)
        codes = self._values_format[len(_CONFIG) :]
        ends = (struct.calcsize(_CONFIG + codes[: i + 1]) for i in range(len(codes)))
        values = [
            start + end - struct.calcsize(code) for code, end in zip(codes, ends, strict=True)
        ]
        struct.pack_into("P" * len(values), memory, table_at, *values)
        return _Arguments(memory, ctypes.c_void_p(start), ctypes.c_void_p(start + table_at))

    def _launch_cold(
        self,
        grid: tuple[int, int, int],
        pointers: tuple[Tensor, ...],
        scalars: tuple[int | float, ...],
        tensor_maps: tuple[TensorMap, ...],
        device: int,
    ) -> None:
        """A launch that cannot go ahead at once: no code on the device, or not the current one."""
        recording = jit.recording
        if recording is not None and pointers[0].is_meta:
            recording.add(self.program)
            return
        if device < 0:
            raise LaunchError(
                f"{self.program}: the first operand is on {pointers[0].device}; pass CUDA tensors"
            )
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, pointers, scalars, tensor_maps)
            return
        self._functions[device] = self._load(device)
        self(grid, pointers, scalars, tensor_maps)

    def _load(self, device: int) -> ctypes.c_void_p:
        """The kernel on the current device, loaded for good."""
        _use_context(device)
        code = cubin(self.program, current_device("cuda", device).architecture)
        library, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        entry = self.program.entry.encode()
        limits = []
        if self._shared_bytes > _SHARED_BYTES_WITHOUT_ASKING:
            limits.append((_MAX_DYNAMIC_SHARED_BYTES, self._shared_bytes))
        if self._cluster > _PORTABLE_CLUSTER:
            limits.append((_NON_PORTABLE_CLUSTER, 1))
        with _anything_while_capturing():
            _call("cuLibraryLoadData", ctypes.byref(library), code, None, None, 0, None, None, 0)
            _call("cuLibraryGetKernel", ctypes.byref(kernel), library, entry)
            for limit, value in limits:
                _call("cuKernelSetAttribute", limit, value, kernel, device)
            # Loads the code now instead of at the first launch.
            _call("cuKernelGetFunction", ctypes.byref(function), kernel)
        self._submit = _driver().cuLaunchKernelEx
        return function


# --- tensor maps


class TensorMap:
    """A CUtensorMap in host memory: the layout of a tensor for a kernel's bulk copies (TMA).

    Attributes:
        address: Where its 128 bytes are.
    """

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        self.address = _round_up(ctypes.addressof(self._memory), _MAP_ALIGNMENT)


_maps: dict[tuple[Any, ...], TensorMap] = {}


def tensor_map(tensor: Tensor, box: tuple[int, ...], swizzle_bytes: int = 128) -> TensorMap:
    """The tensor map of a tensor, for boxes of a shape; what lies outside the tensor reads as 0.

    It holds the tensor's address and not the tensor. Made once: about 1 us of the driver's.

    Args:
        tensor: On a GPU, 1 to 5 dimensions of elements of 1, 2 or 4 bytes, the last contiguous;
            its address and the other strides are multiples of 16 bytes.
        box: Shape of what one copy moves, at most 256 along each dimension.
        swizzle_bytes: Span in which 16-byte pieces are permuted in shared memory: 0, 32, 64 or
            128. The innermost side of the box must not be longer, unless it is 0.

    Raises:
        LaunchError: The driver refuses such a map.
    """
    key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, box, swizzle_bytes)
    found = _maps.get(key)
    if found is None:
        found = _encode(tensor, box, swizzle_bytes)
        if len(_maps) >= _MOST_MAPS:
            _maps.clear()  # who holds one keeps it
        _maps[key] = found
    return found


def _encode(tensor: Tensor, box: tuple[int, ...], swizzle_bytes: int) -> TensorMap:
    item, rank = tensor.dtype.itemsize, tensor.dim()
    if item not in _MAP_DTYPE or swizzle_bytes not in _MAP_SWIZZLE or len(box) != rank:
        raise LaunchError(
            f"tensor_map: {rank} dimensions of {tensor.dtype}, box {box}, swizzle "
            f"{swizzle_bytes}; expected elements of 1, 2 or 4 bytes, a box of as many dimensions, "
            "and a swizzle of 0, 32, 64 or 128 bytes"
        )
    if tensor.stride(-1) != 1:
        raise LaunchError(
            f"tensor_map: strides are {tensor.stride()}; the last must be 1 (pass .contiguous())"
        )
    made = TensorMap()
    if tensor.is_meta:  # a recording launches nothing
        return made
    sizes = (ctypes.c_uint64 * rank)(*reversed(tensor.shape))
    # Of an axis of size 1 torch gives any stride, and the driver wants a multiple of 16 bytes.
    steps_bytes = [
        item * stride if size > 1 else _round_up(item * stride, 16)
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    strides = (ctypes.c_uint64 * rank)(*reversed(steps_bytes))
    steps = (ctypes.c_uint32 * rank)(*[1] * rank)
    sides = (ctypes.c_uint32 * rank)(*reversed(box))
    _call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(made.address), _MAP_DTYPE[item], rank,
        ctypes.c_void_p(tensor.data_ptr()), sizes, strides, sides, steps, 0,
        _MAP_SWIZZLE[swizzle_bytes], _MAP_L2_PROMOTION_256B, 0,
        about=f" of {list(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}, box {box}, "
        f"swizzle {swizzle_bytes}",
    )  # fmt: skip
    return made


# digest: off  what a recording asks; no launch needs it
class LaunchFacts(NamedTuple):
    """What a `CudaLaunch` is bound to."""

    threads: int
    shared_bytes: int
    cluster: int
    scalars: str  # the `struct` codes
    attributes: bytes  # CUlaunchAttributes


def launch_facts(launch: CudaLaunch) -> LaunchFacts:
    """Facts of a launch for its recording."""
    pointers = launch._parameters[0]
    memory = launch._attributes_memory.raw[: struct.calcsize(_ATTRIBUTE) * launch._attributes[1]]
    scalars = launch._values_format[len(_CONFIG) + pointers :]
    return LaunchFacts(launch._shape[0], launch._shared_bytes, launch._cluster, scalars, memory)


def make_room_for_maps() -> None:
    """Forget all tensor maps if many are known, so that none is forgotten while a call is recorded.

    A call makes a few dozen at most.
    """
    if len(_maps) >= _MOST_MAPS // 2:
        _maps.clear()


class MapFacts(NamedTuple):
    """The arguments of cuTensorMapEncodeTiled."""

    address: int
    item: int
    swizzle: int
    sizes: list[int]
    strides_bytes: list[int]
    box: list[int]


def map_facts(tensor_map: TensorMap) -> MapFacts | None:
    """What a tensor map was made of; None if that was forgotten."""
    for key, found in list(_maps.items()):
        if found is tensor_map:
            address, shape, strides, dtype, box, swizzle_bytes = key
            item = dtype.itemsize
            steps = [
                item * stride if size > 1 else _round_up(item * stride, 16)
                for size, stride in zip(shape[:-1], strides[:-1], strict=True)
            ]
            return MapFacts(address, item, _MAP_SWIZZLE[swizzle_bytes], list(reversed(shape)),
                            steps[::-1], list(reversed(box)))  # fmt: skip
    return None


# digest: on
# --- the driver


@functools.cache
def _driver() -> Any:
    """The driver's library. Calls let other threads run: a full queue may block a launch."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"CUDA kernels need NVIDIA's driver: {error}") from error


def _call(name: str, *arguments: Any, about: str = "") -> None:
    failed = getattr(_driver(), name)(*arguments)
    if failed:
        raise LaunchError(f"{name}{about}: {_message(failed)}")


def _message(failed: int) -> str:
    """Name and text of a driver's error."""
    words = []
    for function in ("cuGetErrorName", "cuGetErrorString"):
        text = ctypes.c_char_p()
        getattr(_driver(), function)(failed, ctypes.byref(text))
        words.append((text.value or b"unknown error").decode())
    return f"{words[0]} ({failed}): {words[1]}"


def _use_context(device: int) -> None:
    """Make the device's primary context, torch's, current in this thread if none is."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if context.value is None:
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call("cuCtxSetCurrent", context)


@contextmanager
def _anything_while_capturing() -> Iterator[None]:
    """Let this thread load code, or wait, though a stream is being captured into a graph."""
    mode = ctypes.c_int(_RELAXED_CAPTURE)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
