"""Write a package with one kernel, which passes its trial as it is."""

from __future__ import annotations

import keyword
from pathlib import Path

from lokakern.errors import UnknownNameError
from lokakern.registry import libraries, register

TEMPLATES = Path(__file__).parent
OPS = ("scaled_gemm", "quantize")


def write_package(name: str, op: str, folder: Path) -> list[Path]:
    """Write the files of a plugin, and return their paths.

    Args:
        name: Of the plugin; the module is ``<name>_kernels``.
        op: One of OPS.
        folder: Which is made.

    Raises:
        UnknownNameError: The name is no name of a module, or that of a library or language here.
        FileExistsError: The folder is there already.
    """
    if not (name.isidentifier() and name.isascii() and name == name.lower()) or (
        name.startswith("_") or keyword.iskeyword(name)
    ):
        raise UnknownNameError(
            f"the plugin's name is {name!r}; expected a name of a Python module in lower case, "
            "such as acme"
        )
    register.load_own()  # declares the libraries
    if name in libraries.OURS or name in libraries.LIBRARIES:
        raise UnknownNameError(f"the plugin's name is {name!r}, which lokakern uses itself")
    folder.mkdir(parents=True)
    written = []
    for template, path in (
        ("pyproject.toml", folder / "pyproject.toml"),
        (f"{op}.py", folder / f"{name}_kernels.py"),
    ):
        text = (TEMPLATES / f"{template}.template").read_text(encoding="utf-8")
        if template == "pyproject.toml":
            text = text.replace("{name}", name)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
