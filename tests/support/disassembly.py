"""Machine code of NVIDIA's GPUs as text, of many programs at once: nvdisasm takes half a second
to begin, which for a cubin each would be nine tenths of the time.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")


def tool(name: str) -> Path:
    """One that comes with Triton."""
    triton = pytest.importorskip("triton", reason="needs Triton")
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def disassembled(cubins: Sequence[bytes], architecture: str = "sm_90") -> list[str]:
    """Two lines for each instruction of programs: text and first word, second word."""
    programs = [_code(cubin) for cubin in cubins]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code.bin")
        path.write_bytes(b"".join(programs))
        command = [
            tool("nvdisasm"),
            "--binary",
            architecture.upper().replace("_", ""),
            "-hex",
            "-ndf",
            path,
        ]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in printed.splitlines() if re.search(r"/\* 0x[0-9a-f]{16} \*/", line)]
    assert len(lines) == sum(map(len, programs)) // 8, "nvdisasm skips instructions"
    found, begin = [], 0
    for program in programs:
        end = begin + len(program) // 8  # 16 bytes each
        found.append("\n".join(lines[begin:end]))
        begin = end
    return found


def _code(cubin: bytes) -> bytes:
    """The machine code of an ELF file with one program."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    count, of_names = struct.unpack_from("<HH", cubin, 0x3C)
    sections = [_SECTION_HEADER.unpack_from(cubin, headers + _SECTION_HEADER.size * number)
                for number in range(count)]  # fmt: skip
    names = sections[of_names][4]
    (code,) = (cubin[at : at + size] for name, _, _, _, at, size, *_ in sections
               if cubin.startswith(b".text.", names + name))  # fmt: skip
    return code
