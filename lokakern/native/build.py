"""Build the native library once for each torch, Python and compiler, and load it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from lokakern.errors import CompilationError
from lokakern.nvrtc import cache_folder

FOLDER = Path(__file__).parent
_NAME = "lokakern_native"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
_LONGEST_S = 600
_FINISH = 'made=$1 path=$2; shift 2; "$@" && mv -f "$made" "$path" || { rm -f "$made"; exit 1; }'


def compiler() -> str | None:
    """The C++ compiler: that of CXX, else g++, else clang++; None if there is none."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def library_path(cxx: str) -> Path:
    """Path of the library that a compiler builds from these sources for this torch and Python."""
    decisive = hashlib.sha256()
    for source in sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")]):
        decisive.update(source.read_bytes())
    # Processes of several machines, and of several builds of one torch, may share a cache.
    compiler_file = os.path.realpath(cxx)
    size = os.stat(cxx).st_size if os.path.exists(cxx) else 0
    facts = (
        _FLAGS, torch.__version__, torch.version.git_version, torch._C._GLIBCXX_USE_CXX11_ABI,
        sysconfig.get_config_var("EXT_SUFFIX"), platform.libc_ver(), compiler_file, size,
    )  # fmt: skip
    decisive.update(repr(facts).encode())
    return cache_folder() / f"{_NAME}-{decisive.hexdigest()[:32]}.so"


def is_whole(path: Path) -> bool:
    """Whether a library is there, and not cut off: to load such a one ends the process.

    ELF64: the table of sections, whose place the header tells, is the last of a file.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            return False
        (start,) = struct.unpack_from("<Q", header, 40)
        size, count = struct.unpack_from("<2H", header, 58)
        return bool(start + size * count <= path.stat().st_size)
    except OSError:
        return False


def build(cxx: str) -> Path:
    """Compile the library unless it is in the cache; 15 to 20 s.

    Many processes may build at once: one compiles, the others wait for it.

    Raises:
        CompilationError: The compiler refuses, headers are missing, or a build, here or in another
            process, takes longer than 600 s.
    """
    path = library_path(cxx)
    if is_whole(path):
        return path
    from filelock import FileLock, Timeout  # a dependency of torch

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{path}.lock", timeout=_LONGEST_S):
            if not is_whole(path):
                _compile(cxx, path)
    except Timeout as error:
        raise CompilationError(
            f"another process has been building lokakern's native library for {_LONGEST_S} s, and "
            f"holds {path}.lock: wait for it, or end it"
        ) from error
    return path


def _compile(cxx: str, path: Path) -> None:
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    os.close(handle)
    os.chmod(made, 0o755)
    # A process may end before its thread has built, and its successors, too: what they started
    # goes on by itself, and only a whole library gets the name.
    command = ["/bin/sh", "-c", _FINISH, "sh", made, str(path), *_command(cxx, Path(made))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_S, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise CompilationError(
            f"{cxx} has been compiling lokakern's native library for {_LONGEST_S} s"
        ) from error
    if done.returncode:
        raise CompilationError(
            f"{cxx} does not compile lokakern's native library: {done.stderr[-2000:]}"
        )


def _command(cxx: str, made: Path) -> list[str]:
    root = Path(torch.__file__).parent
    include = (root / "include", root / "include/torch/csrc/api/include",
               sysconfig.get_path("include"))  # fmt: skip
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        cxx, *_FLAGS, f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(word for folder in include for word in ("-isystem", str(folder))),
        str(FOLDER / "unity.cpp"), "-o", str(made), f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu",
        "-lc10", "-ltorch_python", "-ldl",
    ]  # fmt: skip


def load(path: Path) -> Any:
    """Import the built library."""
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
    return module
