"""A digest changes with every change of its kernel, and with nothing else."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lokakern.registry import digests
from lokakern.registry.register import KERNELS, Kernel, load_kernels

load_kernels()
STANDALONE = Path(digests.__file__).resolve()
ROOT = STANDALONE.parent.parent

PYTHON = '''"""A kernel."""

import functools

from lokakern.kernels.demo.helper import double
from lokakern.registry.register import register

LIMIT = 448.0


@register("gemm")
def launch(a, b, out, bias, workspace):
    """Multiply."""
    scale = a * LIMIT  # the largest value
    if bias is None:
        out = scale
        out = out + 1
    return f"{scale:>{LIMIT}} # no comment" + double(b)
'''
CUDA = """// A kernel.
#include "common.cuh"
#include <cuda_runtime.h>

/* Adds. */
__global__ void add(float* a, const char* b) {
    a[0] = 2.0f + LIMIT;  // here
    b = "a // string /* not a comment */";
}
"""
COMMON = '#pragma once\n#include "deep/limits.cuh"\n#define LIMIT LARGEST\n'
LIMITS = "#pragma once\n#define LARGEST 448\n"
FILES = {
    "kernels/demo/kernel.py": PYTHON,
    "kernels/demo/kernel.cu": CUDA,
    "kernels/demo/common.cuh": COMMON,
    "kernels/demo/deep/limits.cuh": LIMITS,
    "kernels/demo/helper.py": "from lokakern import numerics\n\nSOURCE = 'second.cu'\n\n"
    "def double(x):\n    return 2 * x\n",
    "kernels/demo/second.cu": "int second = 2;\n",
    "kernels/demo/other.py": "def unrelated():\n    return 3\n",
    "lokakern/numerics.py": "SMALLEST = 2.0**-126\n",
    "lokakern/formats.py": "GROUP = 128\n",
    "lokakern/jit.py": "from lokakern import formats\n",
    "lokakern/nvrtc.py": "OPTIONS = ()\n",
    "lokakern/driver.py": "from lokakern.nvrtc import OPTIONS\n",
    "lokakern/errors.py": "class ShapeError(ValueError): ...\n",
}
Digest = Callable[..., str]


@pytest.fixture
def digest_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Digest]:
    """Digest of the demo kernel above, in a tree of its own, with files replaced."""
    monkeypatch.setattr(digests, "KERNELS_ROOT", tmp_path / "kernels")
    monkeypatch.setattr(digests, "LIBRARY_ROOT", tmp_path / "lokakern")

    def digest(
        replaced: dict[str, str] | None = None,
        *,
        name: str = "demo.launch",
        modules: tuple[str, ...] = ("demo/kernel",),
    ) -> str:
        for relative, text in {**FILES, **(replaced or {})}.items():
            path = tmp_path / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        digests._read.cache_clear()  # files of one tick of the clock look unchanged
        return digests.kernel_digest(name, modules)

    yield digest
    digests._read.cache_clear()


def edited(relative: str, old: str, new: str) -> dict[str, str]:
    assert old in FILES[relative]
    return {relative: FILES[relative].replace(old, new)}


KERNEL, SOURCE = "kernels/demo/kernel.py", "kernels/demo/kernel.cu"


@pytest.mark.parametrize(
    "replaced",
    [
        edited(KERNEL, "  # the largest value", ""),
        edited(KERNEL, "the largest value", "another word"),
        edited(KERNEL, '"""A kernel."""', '"""Another\n\nkernel, "quoted".\n"""'),
        edited(KERNEL, '"""A kernel."""\n\n', ""),
        edited(KERNEL, '    """Multiply."""\n', ""),
        edited(KERNEL, "LIMIT = 448.0\n", "LIMIT = 448.0\n\n\n\n# more\n\n"),
        edited(KERNEL, "a * LIMIT", "a*LIMIT"),
        edited(KERNEL, "a, b, out, bias", "a,\n    b,  # second\n\n    out , bias"),
        edited(KERNEL, "scale = a * LIMIT", "scale = \\\n        a * LIMIT"),
        {KERNEL: PYTHON.replace("    ", "  ")},
        {KERNEL: PYTHON + "\n\n# the end"},
        {KERNEL: PYTHON.rstrip("\n")},
        {KERNEL: PYTHON.replace("\n", "\r\n")},
        edited(SOURCE, "  // here", ""),
        edited(SOURCE, "/* Adds. */", "/* Adds\n two. */\n\n"),
        edited(SOURCE, "    a[0] = 2.0f + LIMIT;", "\n\n  a[0] =   2.0f\n  + LIMIT;"),
        edited("kernels/demo/deep/limits.cuh", "LARGEST 448", "LARGEST   448  // of e4m3fn"),
        edited("kernels/demo/helper.py", "2 * x", "2 * x  # twice"),
        edited("lokakern/numerics.py", "SMALLEST", "# a comment\nSMALLEST"),
        edited("kernels/demo/other.py", "3", "4"),  # not included
        edited("lokakern/errors.py", "ValueError", "Exception"),  # not part of a kernel
    ],
)
def test_layout_does_not_change_a_digest(digest_of: Digest, replaced: dict[str, str]) -> None:
    assert digest_of() == digest_of(replaced)


def test_code_marked_digest_off_changes_no_digest(digest_of: Digest) -> None:
    numerics = FILES["lokakern/numerics.py"]
    later = (
        "# digest: off (scales of 32)\nfrom lokakern import jit\n\n# digest: on\n"
        f"{numerics}\n\ndef of(x):\n    # digest: off\n    if x:\n        return 32\n"
        "    # digest: on\n    return SMALLEST\n"
    )
    earlier = f"{numerics}\n\ndef of(x):\n    return SMALLEST\n"
    assert digest_of({"lokakern/numerics.py": later}) == digest_of(
        {"lokakern/numerics.py": earlier}
    )
    changed = later.replace("return SMALLEST", "return 2 * SMALLEST")
    assert digest_of({"lokakern/numerics.py": changed}) != digest_of(
        {"lokakern/numerics.py": later}
    )
    misspelled = later.replace("# digest: on\n", "# digest: on again\n", 1)
    twice = later.replace("    # digest: off\n", "    # digest: off\n    # digest: off\n")
    for broken in (later + "# digest: off\n", "# digest: on\n" + later, misspelled, twice):
        with pytest.raises(ValueError, match="must follow each other"):
            digest_of({"lokakern/numerics.py": broken})


def test_directives_marked_digest_off_in_a_header_change_no_digest(digest_of: Digest) -> None:
    header, source = "kernels/demo/common.cuh", SOURCE
    off = "// digest: off  for others\n#if !LATER\n// digest: on\n"
    end = "// digest: off\n#endif\n// digest: on\n"
    later = off + FILES[header] + end
    assert digest_of({header: later}) == digest_of()
    assert digest_of({header: later + "int more;\n"}) != digest_of()
    with pytest.raises(ValueError, match="'// digest: off' and '// digest: on' must follow"):
        digest_of({header: later + "// digest: off\n"})
    for more in ("int more;\n", "  int more;\n", "#if !LATER || 1\n", "#define SIZE 1\n"):
        with pytest.raises(ValueError, match="only '#if !NAME' and '#endif'"):
            digest_of({header: later.replace("#if !LATER\n", more)})
    # A kernel's own file has none: the comments are comments there.
    assert digest_of({source: off + FILES[source] + end}) != digest_of()


@pytest.mark.parametrize(
    "replaced",
    [
        edited(KERNEL, "448.0", "240.0"),
        edited(KERNEL, "a * LIMIT", "a / LIMIT"),
        edited(KERNEL, "is None", "is not None"),
        edited(KERNEL, "        out = out + 1", "    out = out + 1"),
        edited(KERNEL, "# no comment", "# other text"),
        edited(KERNEL, "{scale:>{LIMIT}}", "{scale:<{LIMIT}}"),
        edited(KERNEL, '@register("gemm")', '@register("gemm", unmeasured={})'),
        {KERNEL: PYTHON + '"""Not a docstring, but a statement."""\n'},
        edited(SOURCE, "2.0f", "2.5f"),
        edited(SOURCE, "+ LIMIT", "- LIMIT"),
        edited(SOURCE, "a // string", "b // string"),
        edited("kernels/demo/common.cuh", "LIMIT LARGEST", "LIMIT -LARGEST"),
        edited("kernels/demo/deep/limits.cuh", "448", "240"),
        edited("kernels/demo/helper.py", "2 * x", "3 * x"),
        edited("kernels/demo/second.cu", "2", "3"),
        edited("lokakern/numerics.py", "126", "125"),
        {"kernels/demo/kernel.hip": CUDA},
        {"kernels/demo/helper.cu": CUDA},
    ],
)
def test_code_changes_a_digest(digest_of: Digest, replaced: dict[str, str]) -> None:
    before = digest_of()
    assert before == digest_of()
    assert before != digest_of(replaced)


def test_names_and_places_are_part_of_a_digest(digest_of: Digest) -> None:
    before = digest_of()
    assert len(before) == 64
    assert before != digest_of(name="demo.launch_fast")
    assert before != digest_of(modules=("demo/kernel", "demo/other"))
    assert digest_of(modules=("demo/kernel", "demo/other")) == digest_of(
        modules=("demo/other", "demo/kernel", "demo/helper")
    )
    with pytest.raises(FileNotFoundError, match="demo/gone"):
        digest_of(modules=("demo/gone",))


def test_a_later_edit_is_seen(digest_of: Digest, tmp_path: Path) -> None:
    before = digest_of()
    path = tmp_path / KERNEL
    seen = path.stat().st_mtime_ns
    path.write_text(PYTHON.replace("448.0", "240.0"), encoding="utf-8")
    os.utime(path, ns=(seen + 1, seen + 1))
    assert digests.kernel_digest("demo.launch", ("demo/kernel",)) != before


@pytest.mark.parametrize(
    "statement",
    [
        "import lokakern.kernels.demo.helper",
        "from lokakern.kernels.demo import helper",
        "from lokakern.kernels.demo.helper import double",
        "def late():\n    from lokakern.kernels.demo import helper",
    ],
)
def test_any_import_of_a_kernel_module_is_followed(digest_of: Digest, statement: str) -> None:
    kernel = {KERNEL: f"{statement}\n"}
    helper = {"kernels/demo/helper.py": "def double(x):\n    return x + x\n"}
    assert digest_of(kernel) != digest_of({**kernel, **helper})


@pytest.mark.parametrize(
    ("statement", "file"),
    [
        ("import lokakern.numerics", "numerics"),
        ("from lokakern import numerics", "numerics"),
        ("from lokakern.numerics import SMALLEST", "numerics"),
        ("from lokakern.formats import GROUP", "formats"),
        ("from lokakern.types import GROUP", "formats"),  # which types hands out
        ("from lokakern.jit import TritonLauncher", "jit"),
        ("from lokakern.jit import TritonLauncher", "formats"),
        ("from lokakern.driver import CudaLaunch", "driver"),
        ("from lokakern.driver import CudaLaunch", "nvrtc"),
    ],
)
def test_modules_that_decide_results_are_part_of_a_digest(
    digest_of: Digest, statement: str, file: str
) -> None:
    kernel = {KERNEL: f"{statement}\n"}
    name = f"lokakern/{file}.py"
    assert digest_of(kernel) != digest_of({**kernel, name: FILES[name] + "more = 1\n"})


def test_a_module_outside_lokakern_is_found_where_it_was_loaded_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest never imports the module, because names also come from databases."""
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "kernels_of_a_user.py"
    path.write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match="not loaded"):
        digests.kernel_digest("user.x", ("python:kernels_of_a_user",))
    assert "kernels_of_a_user" not in sys.modules
    loaded = types.ModuleType("kernels_of_a_user")
    loaded.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "kernels_of_a_user", loaded)
    found = []
    for step, text in enumerate(("x = 1\n", "x = 1  # one\n", "x = 2\n")):
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(step, step))
        found.append(digests.kernel_digest("user.x", ("python:kernels_of_a_user",)))
    assert found[0] == found[1] != found[2]


def test_includes_may_form_a_circle(digest_of: Digest) -> None:
    circle = {"kernels/demo/deep/limits.cuh": '#include "../common.cuh"\n#define LARGEST 448\n'}
    assert digest_of(circle) != digest_of()


def test_c_directives_keep_their_lines() -> None:
    assert digests.normalize_c("#define A 1\nint a;") != digests.normalize_c("#define A 1 int a;")
    assert digests.normalize_c("int a; /* \n */\n\n int b;") == digests.normalize_c("int a; int b;")


# --- the same on every Python

SOURCES = (
    PYTHON,
    *(path.read_text(encoding="utf-8") for path in sorted(STANDALONE.parent.glob("*.py"))),
    "x = f'a{b!r:>{c}}d' f\"{e}\" 'g'\n",
    "x = f'''one\n   {two}\n # three'''\n",
    "x = f'{a}' f\"{f'{b}'}\" if f'''{c\n}''' else f'{{{d}}}'\n",
    "x = rf'{a}\\d' + F'{{}}' + f''\n",
    "é = 'ü'; x = 'ß' + f'ü{é}ö' + 'ä'\n",
    "def f():\n    'doc'\n    return f'{1}'\n",
    "if a:\n\tif b:\n\t\tc\n\td\nelse:\n e\n# end",
    "class A:\n    '''doc'''\n\n    x: int = 1\n\n    def f(self): '''doc'''; return 1\n",
    "x = (\n  1,\n\n  # two\n  2)\nasync def f(): await g()\nmatch x:\n    case 1: pass\n",
    "",
)


@functools.cache
def other_pythons() -> tuple[str, ...]:
    """Interpreters of the Python versions that lokakern supports, this one first."""
    found = [sys.executable]
    for minor in (11, 12, 13, 14):
        if minor == sys.version_info.minor:
            continue
        beside = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3"))
        for candidate in (shutil.which(f"python3.{minor}"), *map(str, beside)):
            command = [candidate or "false", "-c", "import sys; print(sys.version_info[:2])"]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.stdout.strip() == f"(3, {minor})":  # pyenv's shims exist but may not run
                found.append(str(candidate))
                break
    return tuple(found)


def ask(python: str, program: str, given: Any) -> Any:
    """Run a program that has `digests` alone, and no installed package, on some Python."""
    load = (
        "import importlib.util, json, sys\n"
        f"spec = importlib.util.spec_from_file_location('digests', {str(STANDALONE)!r})\n"
        "digests = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(digests)\n"
        "given = json.load(sys.stdin)\n"
    )
    ran = subprocess.run(
        [python, "-I", "-S", "-B", "-c", load + program],
        input=json.dumps(given), capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{python}: {ran.stderr}"
    return json.loads(ran.stdout)


def test_every_python_computes_the_same_digests() -> None:
    """No kernel is imported for it: neither torch nor Triton is there."""
    given = {name: kernel.modules for name, kernel in KERNELS.items()}
    wanted = {name: kernel.digest for name, kernel in KERNELS.items()}
    program = (
        "assert not {'torch', 'triton'} & sys.modules.keys()\n"
        "json.dump({k: digests.kernel_digest(k, m) for k, m in given.items()}, sys.stdout)\n"
    )
    for python in other_pythons():
        assert ask(python, program, given) == wanted, python


def test_every_python_normalizes_alike() -> None:
    wanted = [digests.normalize_python(text) for text in SOURCES]
    program = "json.dump([digests.normalize_python(text) for text in given], sys.stdout)\n"
    for python in other_pythons():
        assert ask(python, program, SOURCES) == wanted, python


@pytest.mark.parametrize("text", SOURCES, ids=range(len(SOURCES)))
def test_normalized_python_is_one_line_apart_from_strings(text: str) -> None:
    normalized = digests.normalize_python(text)
    assert normalized == digests.normalize_python(text + "\n# more\n\n")
    assert "doc" not in normalized.split()


def test_f_strings_are_kept_whole() -> None:
    text = "x  =  f'a {b!r:>{c}}  # d' + rf\"{e}\"  # f\n"
    assert digests.normalize_python(text).split(" ; ")[0].rstrip(" ;") == (
        "x = f'a {b!r:>{c}}  # d' + rf\"{e}\""
    )


# --- the registered kernels


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=str)
def test_every_kernel_has_a_digest_of_its_own_files(kernel: Kernel) -> None:
    assert kernel.modules
    for module in kernel.modules:
        assert (digests.KERNELS_ROOT / f"{module}.py").is_file()
    # Pieced together here: the name, and each file that those of its modules include.
    read: dict[str, str] = {}
    for module in kernel.modules:
        one: dict[str, str] = {}
        digests._collect(digests.KERNELS_ROOT / f"{module}.py", one)
        assert f"kernels/{module}.py" in one
        read |= one
    spelled = "".join(f"\0{name}\0{read[name]}" for name in sorted(read))
    assert kernel.digest == hashlib.sha256((kernel.name + spelled).encode()).hexdigest()
    source = (digests.KERNELS_ROOT / f"{kernel.modules[0]}.py").read_text("utf-8")
    assert read[f"kernels/{kernel.modules[0]}.py"] == digests.normalize_python(source)


def test_code_outside_all_digests_has_not_changed() -> None:
    """Code marked `digest: off` decides results of 1x32 kernels, but is in no digest."""
    later = hashlib.sha256()
    for module in ("formats", "numerics"):
        source = (ROOT / "lokakern" / f"{module}.py").read_text("utf-8")
        off = False
        for line in map(str.strip, source.splitlines()):
            if line.startswith("# digest:"):
                off = line.startswith("# digest: off")
            elif off and not line.startswith("#"):
                later.update(" ".join(line.split()).encode())
    assert later.hexdigest()[:16] == "c2957e56a7765bcd", (
        "kernels of 1x32 scales have to be measured again (`sweep --suite mx --fresh`), since what "
        "formats and numerics say of them changed; then put the new value here"
    )


def test_no_two_kernels_share_a_digest() -> None:
    assert len({kernel.digest for kernel in KERNELS.values()}) == len(KERNELS)


def test_kernels_that_quantize_exactly_depend_on_numerics() -> None:
    files: dict[str, str] = {}
    digests._collect(digests.KERNELS_ROOT / "torch" / "quantize.py", files)
    assert {"kernels/torch/quantize.py", "lokakern/numerics.py"} <= set(files)


def test_only_cuda_and_hip_digests_cover_compilation_and_launch() -> None:
    def files_of(module: str) -> set[str]:
        files: dict[str, str] = {}
        digests._collect(digests._module_file(module), files)
        return set(files)

    # Those of HIP share the cache of compiled programs.
    route = {"lokakern/nvrtc.py", "lokakern/driver.py"}
    source = {"kernels/cuda/quantize.cu", "kernels/cuda/ptx.cuh"}
    assert route | source <= files_of("cuda/quantize")
    for kernel in KERNELS.values():
        if not any(module.startswith(("cuda/", "hip/")) for module in kernel.modules):
            assert not route & set().union(*map(files_of, kernel.modules)), kernel


def test_a_composition_depends_on_the_files_of_all_its_parts() -> None:
    compositions = [kernel for kernel in KERNELS.values() if kernel.parts]
    assert compositions
    for kernel in compositions:
        for part in kernel.parts:
            assert set(KERNELS[part].modules) <= set(kernel.modules)
        own = "norm_compositions" if kernel.op == "gemm_norm" else "compositions"
        assert own in kernel.modules
