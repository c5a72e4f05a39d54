"""Registers of compiled programs."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path

from tests.support.disassembly import tool


@functools.cache
def registers(code: bytes) -> tuple[int, int]:
    """Of a thread, and bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code)
        command = [tool("cuobjdump"), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used, stack, local = (
        int(re.search(rf"\b{what}:(\d+)", shown).group(1))  # type: ignore[union-attr]
        for what in ("REG", "STACK", "LOCAL")
    )
    return used, stack + local
