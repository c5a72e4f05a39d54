"""Compiled CUDA kernels as files, for launchers of others such as ``cupy.RawModule(path=)``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from lokakern import nvrtc
from lokakern.build.prebuild import gpu_named, jobs_for
from lokakern.errors import UnsupportedError
from lokakern.registry.register import kernel_named
from lokakern.types import Device, Problem


class Cubin(NamedTuple):
    """The machine code of one function of a kernel.

    Attributes:
        path: Of the file; it stays in the cache of compiled programs.
        entry: The function's name. The kernel's ``.cu`` file tells its arguments and its grid.
        macros: What the function was specialized with.
    """

    path: Path
    entry: str
    macros: dict[str, int | str]


def cubins(kernel: str, problem: Problem, device: Device | str | None = None) -> list[Cubin]:
    """The functions that a kernel of CUDA C++ launches for a problem, compiled; needs no GPU.

    Args:
        kernel: Its registered name, such as "cuda.quantize_row".
        problem: What it computes, on contiguous operands.
        device: A product such as "NVIDIA H200", or a `Device`, which need not be present; None
            means the local GPU. The machine code runs on its architecture only.

    Raises:
        UnknownNameError: There is no such kernel.
        DeviceError: There is no such GPU.
        UnsupportedError: The kernel does not take the problem there, or is not CUDA C++ alone.
        CompilationError: NVRTC is missing, or refuses the source.
    """
    found, target = kernel_named(kernel), gpu_named(device)
    reason = found.refusal(problem, target)
    if reason is not None:
        raise UnsupportedError(f"{kernel} does not compute {problem} on {target}: {reason}")
    jobs = jobs_for([problem], target, [found])
    programs = [job for job in jobs if isinstance(job, nvrtc.Program)]
    if not programs or len(programs) < len(jobs):
        raise UnsupportedError(
            f"{kernel} is not CUDA C++ alone, so it has no machine code of its own; expected a "
            "kernel cuda.* of `list kernels`"
        )
    return [
        Cubin(_written(program, target.architecture), program.entry, dict(program.macros))
        for program in programs
    ]


def _written(program: nvrtc.Program, architecture: str) -> Path:
    """A file named by its content; entries of the cache end with a checksum, which is no ELF."""
    code = nvrtc.cubin(program, architecture)
    name = hashlib.sha256(code).hexdigest()[:16]
    path = nvrtc.cache_folder().parent / "files" / f"{program.entry}-{architecture}-{name}.cubin"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    beside.write_bytes(code)
    beside.replace(path)
    return path
