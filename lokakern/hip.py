"""Compile HIP files with HIPRTC and launch them through HIP's module interface, by ctypes.

Both libraries are those that a torch for ROCm has loaded; nothing here is imported or loaded before
a kernel is launched on such a GPU. Code objects are kept in the cache of `lokakern.nvrtc`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lokakern import jit
from lokakern.device import current_device
from lokakern.errors import CompilationError, LaunchError
from lokakern.nvrtc import _cached, _read, _texts, cache_folder
from lokakern.types import Device

_STD = "--std=c++17"


@dataclass(frozen=True, slots=True)
class Program:
    """A HIP file with the macros that specialize it; as `lokakern.nvrtc.Program`.

    Attributes:
        source: Path of the ``.hip`` file. ``#include "..."`` is looked up beside it.
        entry: The kernel's name, which must be ``extern "C"``.
        macros: Names and values; m must not be among them.
    """

    source: str
    entry: str
    macros: tuple[tuple[str, int], ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that identifies the program."""
        return ("hip", self.source, self.entry, self.macros)

    def compile(self, device: Device) -> bool:
        """Put the code object for a device, which need not be here, into the cache.

        Returns:
            Whether it was there already.

        Raises:
            CompilationError: See `code_object`.
        """
        there = _read(cache_folder() / f"{_key(self, device.architecture)}.cubin") is not None
        code_object(self, device.architecture)
        return there

    def __str__(self) -> str:
        macros = " ".join(f"{name}={value}" for name, value in self.macros)
        return f"{Path(self.source).name}:{self.entry} {macros}".rstrip()


def code_object(program: Program, architecture: str) -> bytes:
    """Machine code of a program for gfx942 or its like, from the cache if it is there.

    Raises:
        CompilationError: A file or HIPRTC is missing, or it refuses the source.
    """
    return _cached(_key(program, architecture), lambda: _compile(program, architecture))


def _key(program: Program, architecture: str) -> str:
    texts = _texts(Path(program.source).resolve())
    decisive = (texts, program.entry, program.macros, architecture, _STD, compiler_version())
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


# --- HIPRTC


@functools.cache
def _hiprtc() -> Any:
    return _library("libhiprtc.so")


@functools.cache
def _runtime() -> Any:
    return _library("libamdhip64.so")


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CompilationError(f"HIP kernels need ROCm's {name}: {error}") from error


@functools.cache
def _is_here() -> bool:
    try:
        _hiprtc()
    except CompilationError:
        return False
    return True


@functools.cache
def compiler_version() -> str:
    """Of HIPRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _hiprtc().hiprtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _compile(program: Program, architecture: str) -> bytes:
    library = _hiprtc()
    (name, text), *headers = _texts(Path(program.source).resolve())
    handle = ctypes.c_void_p()
    count = len(headers)

    def texts(of: list[str]) -> Any:
        return (ctypes.c_char_p * count)(*[one.encode() for one in of])

    def check(failed: int, doing: str) -> None:
        if failed:
            library.hiprtcGetErrorString.restype = ctypes.c_char_p
            words = library.hiprtcGetErrorString(failed).decode()
            raise CompilationError(
                f"{program} for {architecture}: {doing}: {words}{_logged(handle)}"
            )

    check(
        library.hiprtcCreateProgram(
            ctypes.byref(handle), text.encode(), name.encode(), count,
            texts([text for _, text in headers]), texts([name for name, _ in headers]),
        ),
        "create",
    )  # fmt: skip
    try:
        words = [f"--offload-arch={architecture}", _STD, "-O3"]
        words += [f"-D{name}={value}" for name, value in program.macros]
        given = (ctypes.c_char_p * len(words))(*[word.encode() for word in words])
        check(library.hiprtcCompileProgram(handle, len(words), given), "compile")
        size = ctypes.c_size_t()
        check(library.hiprtcGetCodeSize(handle, ctypes.byref(size)), "size of the code")
        code = ctypes.create_string_buffer(size.value)
        check(library.hiprtcGetCode(handle, code), "code")
        return code.raw
    finally:
        library.hiprtcDestroyProgram(ctypes.byref(handle))


def _logged(handle: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    if not handle or _hiprtc().hiprtcGetProgramLogSize(handle, ctypes.byref(size)):
        return ""
    text = ctypes.create_string_buffer(size.value + 1)
    _hiprtc().hiprtcGetProgramLog(handle, text)
    return f"\n{text.value.decode(errors='replace')}" if text.value else ""


# --- launches


class HipLaunch:
    """One program with the number and kinds of its arguments; as `lokakern.driver.CudaLaunch`.

    Args:
        program: What is launched.
        pointers: How many tensors; they are the first arguments. None stands for no tensor.
        scalars: The `struct` code of each scalar: i and I for 32 bits, q and Q for 64, f, d.
        threads: Per block.
    """

    __slots__ = ("_format", "_functions", "_parameters", "_threads", "program")

    def __init__(self, program: Program, *, pointers: int, threads: int, scalars: str = "") -> None:
        self.program = program
        self._parameters = (pointers, len(scalars))
        self._format = f"{'P' * pointers}{scalars}"
        self._threads = threads
        self._functions: dict[int, ctypes.c_void_p] = {}

    def __call__(
        self,
        blocks: int,
        pointers: tuple[Tensor | None, ...],
        scalars: tuple[int | float, ...] = (),
    ) -> None:
        """Launch on the current stream of the first tensor's device.

        A warm launch neither synchronizes nor allocates on the device, so graphs may capture it. On
        tensors of the device "meta", while `lokakern.jit` records, it hands over its program where
        HIPRTC is here.

        Args:
            blocks: Of the one-dimensional grid; not 0.
            pointers: Tensors, all on one device, and None.
            scalars: Integers and floats, m among them.

        Raises:
            CompilationError: The program does not compile here.
            LaunchError: HIP refuses, or the arguments are not those the launch was made for.
        """
        if (len(pointers), len(scalars)) != self._parameters:
            raise LaunchError(
                f"{self.program}: given {(len(pointers), len(scalars))} pointers and scalars; it "
                f"was bound for {self._parameters}"
            )
        first = pointers[0]
        assert first is not None  # by convention of all kernels here
        if jit.recording is not None and first.is_meta:
            if _is_here():  # else they are compiled where they are launched
                jit.recording.add(self.program)
            return
        device = first.get_device()
        if device < 0:
            raise LaunchError(f"{self.program}: the first operand is on {first.device}; pass CUDA")
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(blocks, pointers, scalars)
            return
        function = self._functions.get(device)
        if function is None:
            function = self._functions[device] = self._load(device)
        addresses = [0 if pointer is None else pointer.data_ptr() for pointer in pointers]
        # digest: off
        if jit.recorder is not None:
            codes = zip(self._format[len(pointers) :], scalars, strict=True)
            jit.recorder.launched_by_hip(blocks, self._threads, pointers, codes, function.value)
        # digest: on
        _memory, table = self.packed((*addresses, *scalars))
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        _call(
            "hipModuleLaunchKernel", function, blocks, 1, 1, self._threads, 1, 1, 0, stream, table,
            None, about=f" of {self.program}, {blocks} blocks",
        )  # fmt: skip

    def packed(self, values: tuple[int | float, ...]) -> tuple[Any, Any]:
        """Arguments as they lie in memory, which must live on, and the table of their addresses."""
        memory = ctypes.create_string_buffer(struct.calcsize(self._format))
        struct.pack_into(self._format, memory, 0, *values)
        start = ctypes.addressof(memory)
        table = (ctypes.c_void_p * len(self._format))()
        for place, code in enumerate(self._format):
            end = struct.calcsize(self._format[: place + 1])
            table[place] = start + end - struct.calcsize(code)
        return memory, table

    def _load(self, device: int) -> ctypes.c_void_p:
        """The kernel on the current device, loaded for good."""
        code = code_object(self.program, current_device("cuda", device).architecture)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("hipModuleLoadData", ctypes.byref(module), code)
        entry = self.program.entry.encode()
        _call("hipModuleGetFunction", ctypes.byref(function), module, entry)
        return function


def _call(name: str, *arguments: Any, about: str = "") -> None:
    library = _runtime()
    failed = getattr(library, name)(*arguments)
    if failed:
        library.hipGetErrorString.restype = ctypes.c_char_p
        words = library.hipGetErrorString(failed).decode(errors="replace")
        raise LaunchError(f"{name}{about}: {words} ({failed})")
