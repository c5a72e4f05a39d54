"""Compile CUDA files with NVRTC, once for all processes that share a disk cache.

A `Program` is a ``.cu`` file with the macros that specialize it. It compiles to machine code for
one architecture, with no GPU and no CUDA toolkit: the packages ``cuda-bindings`` and
``nvidia-cuda-nvrtc`` are enough, imported only here and only when something compiles.

The cache is ``$LOKAKERN_CACHE``, else the user's cache folder. An entry is named by all that
decides its bytes and ends with their checksum, so a torn or foreign file is a miss and is replaced.
Of many processes that need one entry, one compiles: that spares work, and where locks fail nothing
but work is lost.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from lokakern.device import devices_here, version_of
from lokakern.errors import CompilationError
from lokakern.types import Device

_log = logging.getLogger(__name__)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_CHECKSUM_BYTES = hashlib.sha256().digest_size
# A process that compiles longer than this is likely stuck: compile beside it. The largest kernel
# here takes under 1 s.
_LOCK_TIMEOUT_S = 60.0
# One lock file for the keys that begin with these hex digits: 256 files at most.
_LOCK_DIGITS = 2
INSTALL = "pip install 'lokakern[cuda]'"


@dataclass(frozen=True, slots=True)
class Program:
    """A CUDA file with the macros that specialize it.

    It can be pickled, hashed, and compiled in another process: what a recording of launches keeps.

    Attributes:
        source: Path of the ``.cu`` file. ``#include "..."`` is looked up beside the including file.
        entry: The kernel's name, which must be ``extern "C"``.
        macros: Names and values; m must not be among them.
        options: Further options of NVRTC.
    """

    source: str
    entry: str
    macros: tuple[tuple[str, int | str], ...] = ()
    options: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that identifies the program."""
        return ("cuda", self.source, self.entry, self.macros, self.options)

    def compile(self, device: Device) -> bool:
        """Put the machine code for a device, which need not be here, into the cache.

        Returns:
            Whether it was there already.

        Raises:
            CompilationError: See `cubin`.
        """
        key, _, _ = _identity(self, device.architecture)
        there = _read(cache_folder() / f"{key}.cubin") is not None
        cubin(self, device.architecture)
        return there

    def __str__(self) -> str:
        macros = " ".join(f"{name}={value}" for name, value in self.macros)
        return f"{Path(self.source).name}:{self.entry} {macros}".rstrip()


def why_not(device: Device) -> str | None:
    """Why nothing compiles on a device that is here, or None.

    What lacks here says nothing about other machines, so of a device that is elsewhere it is None.
    """
    if device not in devices_here():
        return None
    return _missing_package()


@functools.cache
def _missing_package() -> str | None:
    try:
        found = importlib.util.find_spec("cuda.bindings.nvrtc")
    except ImportError:  # no package `cuda` at all, or one that is blocked
        found = None
    if not found:
        return f"needs the package cuda-bindings ({INSTALL})"
    try:
        version()
    except CompilationError as error:  # the bindings may be here without the library
        return str(error)
    return None


def cubin(program: Program, architecture: str) -> bytes:
    """Machine code of a program, from the cache if it is there.

    Args:
        program: What to compile.
        architecture: Such as ``sm_90``; from there on with all of the architecture's instructions
            (``sm_90a``), so the code runs on no other.

    Raises:
        CompilationError: A file is missing, NVRTC is missing, or it refuses the source.
    """
    key, texts, options = _identity(program, architecture)
    return _cached(key, lambda: _compile(program, texts, options))


def _identity(
    program: Program, architecture: str
) -> tuple[str, list[tuple[str, str]], tuple[str, ...]]:
    """The key of a program's machine code, its texts, and NVRTC's options."""
    texts = _texts(Path(program.source).resolve())  # kernels/ is reached by a link
    target = _target(architecture)
    options = (f"--gpu-architecture={target}", "--std=c++17", *program.options)
    decisive = (texts, program.entry, program.macros, options, version())
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest(), texts, options


def _target(architecture: str) -> str:
    digits = architecture.removeprefix("sm_") if architecture.startswith("sm_") else ""
    number = int(digits) if digits.isascii() and digits.isdecimal() else 0
    if number == 0:
        raise CompilationError(f"CUDA kernels compile for sm_90 and its like, not {architecture}")
    return f"sm_{number}a" if number >= 90 else architecture


def _texts(source: Path) -> list[tuple[str, str]]:
    """The text of a file and of all it includes, each with the name it is included by."""
    found: dict[str, tuple[Path, str]] = {}
    waiting = [(source.name, source)]
    while waiting:
        name, path = waiting.pop()
        if name in found:
            if found[name][0] != path:
                raise CompilationError(
                    f'{source.name}: #include "{name}" means {found[name][0]} and {path}; NVRTC '
                    "tells included files apart by that name alone: rename one"
                )
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise CompilationError(f"{source.name}: cannot read {path}: {error.strerror}") from None
        found[name] = (path, text)
        waiting += [(other, (path.parent / other).resolve()) for other in _INCLUDE.findall(text)]
    return [(name, text) for name, (_, text) in found.items()]


# --- NVRTC


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompilationError(f"CUDA kernels need cuda-bindings ({error}): {INSTALL}") from error
    return nvrtc


@functools.cache
def version() -> str:
    """Version of NVRTC and of its package: patch releases compile differently.

    Raises:
        CompilationError: It is not installed.
    """
    nvrtc = _nvrtc()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are here, the library is not
        raise CompilationError(f"CUDA kernels need NVRTC ({error}): {INSTALL}") from error
    package = "nvidia-cuda-nvrtc" if major >= 13 else f"nvidia-cuda-nvrtc-cu{major}"
    return f"{major}.{minor} {version_of(package)}"


def _compile(program: Program, texts: list[tuple[str, str]], options: tuple[str, ...]) -> bytes:
    nvrtc = _nvrtc()
    (name, text), *headers = texts
    failed, handle = nvrtc.nvrtcCreateProgram(
        text.encode(), name.encode(), len(headers),
        [header.encode() for _, header in headers], [name.encode() for name, _ in headers],
    )  # fmt: skip
    _check(nvrtc, failed, f"{program}: create")
    try:
        words = [*options, *(f"--define-macro={name}={value}" for name, value in program.macros)]
        (failed,) = nvrtc.nvrtcCompileProgram(handle, len(words), [word.encode() for word in words])
        if failed:
            raise CompilationError(
                f"{program} for {options[0]}: {_message(nvrtc, failed)}\n{_logged(nvrtc, handle)}"
            )
        failed, size = nvrtc.nvrtcGetCUBINSize(handle)
        _check(nvrtc, failed, f"{program}: size of the machine code")
        made: bytes = b" " * size
        (failed,) = nvrtc.nvrtcGetCUBIN(handle, made)  # writes into the bytes, as its own tests do
        _check(nvrtc, failed, f"{program}: machine code")
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return made


def _logged(nvrtc: Any, handle: Any) -> str:
    failed, size = nvrtc.nvrtcGetProgramLogSize(handle)
    if failed or size <= 1:
        return "NVRTC logged nothing"
    text: bytes = b" " * size
    nvrtc.nvrtcGetProgramLog(handle, text)
    return text.rstrip(b"\0").decode(errors="replace")


def _check(nvrtc: Any, failed: Any, doing: str) -> None:
    if failed:
        raise CompilationError(f"{doing}: {_message(nvrtc, failed)}")


def _message(nvrtc: Any, failed: Any) -> str:
    _, text = nvrtc.nvrtcGetErrorString(failed)
    return text.decode() if isinstance(text, bytes) else str(text)


# --- the cache on disk


def cache_folder() -> Path:
    """Folder of compiled programs; it need not exist yet."""
    given = os.environ.get("LOKAKERN_CACHE")
    return (Path(given) if given else platformdirs.user_cache_path("lokakern")) / "cubin"


def _cached(key: str, make: Callable[[], bytes]) -> bytes:
    """Return a cache entry; compile it if it is missing or damaged."""
    folder = cache_folder()
    path = folder / f"{key}.cubin"
    found = _read(path)
    if found is not None:
        return found
    with _locked(folder, key) as writable:
        found = _read(path)  # another process may have made it while this one waited
        if found is not None:
            return found
        made = make()
        if writable:
            _write(path, made)
        return made


def _read(path: Path) -> bytes | None:
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    content, checksum = whole[:-_CHECKSUM_BYTES], whole[-_CHECKSUM_BYTES:]
    return content if hashlib.sha256(content).digest() == checksum else None


def _write(path: Path, content: bytes) -> None:
    """Beside its place, then renamed: readers see all of it or nothing."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            temporary = Path(file.name)
            file.write(content + hashlib.sha256(content).digest())
        temporary.replace(path)
    except OSError as error:
        _warn_once(f"cannot write to {path.parent}: {error.strerror}")
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path, key: str) -> Iterator[bool]:
    """Hold the lock of a key; gives whether the folder can be written to.

    The system drops the lock of a process that dies. Without a lock the worst is to compile twice.
    """
    lock = filelock.FileLock(folder / f".{key[:_LOCK_DIGITS]}.lock")
    writable = True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_LOCK_TIMEOUT_S)
    except filelock.Timeout:
        _log.warning("waited %g s for another process to compile; going on", _LOCK_TIMEOUT_S)
    except (OSError, NotImplementedError) as error:
        writable = False
        _warn_once(f"cannot write to {folder}: {error}")
    try:
        yield writable
    finally:
        lock.release()


@functools.cache
def _warn_once(problem: str) -> None:
    _log.warning("%s; CUDA kernels are compiled again in every process", problem)
