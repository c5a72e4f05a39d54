"""Digests of kernels, computed from their files and never by importing them.

A digest covers the normalized source of a kernel's modules (no comments, docstrings or white
space) and of everything they include: other modules of `lokakern.kernels`, and `numerics`,
`sums`, `formats`, `jit`, `nvrtc`, `driver`, `hip` and `mx` of lokakern, found by reading import
statements; `#include "..."` for CUDA and HIP. A module outside lokakern is named
``python:package.module``, and of a library that a kernel calls the version is:
``package:name==version``.

Nothing counts that stands between ``# digest: off`` and ``# digest: on``: what a shared module was
given after kernels that need none of it were measured, whose rows it would make stale for nothing.
It only adds branches that such kernels never take, and calls a module of its own, which kernels
that need it include; only modules of lokakern have it, never a kernel's own files. In a header of
CUDA (``// digest: off``) it is directives alone, for macros that only a file of later kernels sets.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
_IN_CHECKOUT = (PACKAGE / "lokakern").is_dir()
# A checkout keeps real folders beside lokakern/; an installed wheel keeps them inside it.
KERNELS_ROOT = PACKAGE / "kernels"
LIBRARY_ROOT = PACKAGE / "lokakern" if _IN_CHECKOUT else PACKAGE
_INCLUDED = {
    "lokakern.numerics",
    "lokakern.sums",
    "lokakern.formats",
    "lokakern.jit",
    "lokakern.nvrtc",
    "lokakern.driver",
    "lokakern.hip",
    "lokakern.mx",
}
_LATER_DIRECTIVE = re.compile(r"#if !\w+|#endif")
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_FSTRING_START = getattr(tokenize, "FSTRING_START", None)
_FSTRING_END = getattr(tokenize, "FSTRING_END", None)


def kernel_digest(name: str, modules: Iterable[str]) -> str:
    """SHA-256 of a kernel, in hex.

    Args:
        name: The kernel's registered name.
        modules: Files that hold it, relative to ``kernels/`` and without ending, such as
            ``triton/scaled_gemm``.

    Raises:
        FileNotFoundError: A module has no source file.
    """
    files: dict[str, str] = {}
    for module in modules:
        if module.startswith("package:"):
            files[module] = ""
        else:
            _collect(_module_file(module), files)
    digest = hashlib.sha256(name.encode())
    for relative, text in sorted(files.items()):
        digest.update(f"\0{relative}\0{text}".encode())
    return digest.hexdigest()


def _module_file(module: str) -> Path:
    path = KERNELS_ROOT / f"{module}.py"
    if module.startswith("python:"):
        return _outside_file(module.removeprefix("python:"))
    if not path.is_file():
        raise FileNotFoundError(f"kernel module {module!r} has no source file {path.name}")
    return path


def _outside_file(module: str) -> Path:
    """The file of a module that is loaded already: a database's word loads nothing."""
    found = getattr(sys.modules.get(module), "__file__", None)
    if found is None or not found.endswith(".py") or not Path(found).is_file():
        raise FileNotFoundError(f"kernel module {module!r} is not loaded from a source file")
    return Path(found)


def _collect(path: Path, files: dict[str, str]) -> None:
    known = _relative_name(path)
    if known in files:
        return
    text, includes = _read(path, path.stat().st_mtime_ns)
    files[known] = text
    for include in includes:
        _collect(include, files)
    for ending in (".cu", ".hip"):
        twin = path.with_suffix(ending)
        if path.suffix == ".py" and twin.is_file():
            _collect(twin, files)


@functools.lru_cache(maxsize=1024)  # asked 3500 times for the shipped kernels: 0.1 s
def _relative_name(path: Path) -> str:
    if path.is_relative_to(KERNELS_ROOT):
        return f"kernels/{path.relative_to(KERNELS_ROOT)}"
    if path.is_relative_to(LIBRARY_ROOT):
        return f"lokakern/{path.relative_to(LIBRARY_ROOT)}"
    return f"outside/{path.name}"


@functools.lru_cache(maxsize=256)
def _read(path: Path, _modified: int) -> tuple[str, tuple[Path, ...]]:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        if path.is_relative_to(LIBRARY_ROOT) and not path.is_relative_to(KERNELS_ROOT):
            source = without_later(source)
        nodes = list(ast.walk(ast.parse(source)))  # once for both: a fifth of a digest's time
        return _normalized(source, nodes), tuple(_python_includes(nodes, path))
    if path.suffix == ".cuh":
        source = without_later(source, "//")
    return normalize_c(source), tuple(_c_includes(source, path))


def without_later(source: str, comment: str = "#") -> str:
    """Source without what came after kernels were measured, see above.

    Raises:
        ValueError: The two comments do not follow each other in turn, or one is misspelled.
    """
    expected = f"'{comment} digest: off' and '{comment} digest: on' must follow each other, in turn"
    kept, off = [], False
    for number, line in enumerate(source.splitlines(keepends=True), start=1):
        words = line.strip()
        if not words.startswith(f"{comment} digest:"):
            if not off:
                kept.append(line)
            elif comment == "//" and not _LATER_DIRECTIVE.fullmatch(words):
                raise ValueError(
                    f"line {number} is {words!r}; only '#if !NAME' and '#endif' are outside of "
                    "digests in a header"
                )
            continue
        begins = words.startswith(f"{comment} digest: off")
        if begins is off or not (begins or words == f"{comment} digest: on"):
            raise ValueError(f"line {number} is {words!r}; {expected}")
        off = begins
    if off:
        raise ValueError(expected)
    return "".join(kept)


def normalize_python(source: str) -> str:
    """Python source as one line of tokens, without comments, docstrings and layout.

    Equal on Python 3.11 and later: f-strings, which 3.12 splits into tokens, are kept whole.
    """
    return _normalized(source, ast.walk(ast.parse(source)))


def _normalized(source: str, nodes: Iterable[ast.AST]) -> str:
    docstrings = _docstring_starts(nodes)
    lines = source.splitlines(keepends=True)
    words: list[str] = []
    ends_docstring = False
    fstring_depth = 0
    fstring_start = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if _FSTRING_START is not None and token.type == _FSTRING_START:
            if fstring_depth == 0:
                fstring_start = token.start
            fstring_depth += 1
            continue
        if _FSTRING_END is not None and token.type == _FSTRING_END:
            fstring_depth -= 1
            if fstring_depth == 0:
                words.append(_slice(lines, fstring_start, token.end))
            continue
        if token.start in docstrings:
            ends_docstring = True
            continue
        if fstring_depth or token.type in _SKIPPED:
            continue
        if ends_docstring and token.type == tokenize.NEWLINE:
            ends_docstring = False
            continue
        if token.type == tokenize.INDENT:
            words.append("{")
        elif token.type == tokenize.DEDENT:
            words.append("}")
        elif token.type == tokenize.NEWLINE:
            words.append(";")
        else:
            words.append(token.string)
    return " ".join(words)


def _slice(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    middle = lines[start[0] : end[0] - 1]
    return lines[start[0] - 1][start[1] :] + "".join(middle) + lines[end[0] - 1][: end[1]]


def _docstring_starts(nodes: Iterable[ast.AST]) -> set[tuple[int, int]]:
    starts = set()
    for node in nodes:
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            starts.add((first.value.lineno, first.value.col_offset))
    return starts


def _python_includes(nodes: Iterable[ast.AST], path: Path) -> Iterable[Path]:
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Constant) and str(node.value).endswith((".cu", ".hip")):
            beside = path.with_name(str(node.value).rsplit("/", 1)[-1])  # a source it compiles
            if beside.is_file():
                yield beside
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            found = _included_file(name)
            if found is not None and found != path:
                yield found


def _included_file(name: str) -> Path | None:
    if name in _INCLUDED:
        return LIBRARY_ROOT / f"{name.removeprefix('lokakern.')}.py"
    if name == "lokakern.types":  # hands out the names of formats
        return LIBRARY_ROOT / "formats.py"
    if name.startswith("lokakern.kernels."):
        path = KERNELS_ROOT.joinpath(*name.split(".")[2:]).with_suffix(".py")
        return path if path.is_file() else None
    return None


def normalize_c(source: str) -> str:
    """CUDA or HIP source without comments and with single spaces."""
    pattern = r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/'
    bare = re.sub(
        pattern,
        lambda found: " " if found.group().startswith("/") else found.group(),
        source,
        flags=re.DOTALL,
    )
    # A directive ends with its line, so lines stay apart there and only there.
    lines = (" ".join(line.split()) for line in bare.splitlines())
    return " ".join(f"\n{line}\n" if line.startswith("#") else line for line in lines if line)


def _c_includes(source: str, path: Path) -> Iterable[Path]:
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', source, re.MULTILINE):
        found = (path.parent / name).resolve()
        if found.is_file() and found.is_relative_to(KERNELS_ROOT):
            yield found
