"""Check what users get: sdist, the wheel made from it, and dispatch from that wheel.

Run by `make wheel`. The tree is copied first, so that nothing ignored or built earlier gets in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "registry", "bench")  # lokakern/NAME is a link to NAME
SHIPPED = {
    ".py",
    ".cu",
    ".cuh",
    ".hip",
    ".hpp",
    ".cpp",
    ".h",
    ".sqlite",
    ".html",
    ".css",
    ".js",
    ".json",
    ".template",
}
SHAPE = (8192, 2048, 2048)

USE = f"""
import pathlib, sys
import lokakern, lokakern.bench.cli.main, lokakern.kernels, lokakern.registry

installed = pathlib.Path(sys.argv[1])
for module in (lokakern, lokakern.bench, lokakern.kernels, lokakern.registry):
    found = pathlib.Path(list(module.__path__)[0])
    assert found.is_relative_to(installed), f"{{module.__name__}} is {{found}}, not the wheel's"
from lokakern.bench.report.resources import resource_rows
assert resource_rows(), "nothing is recorded of HIP and Triton kernels"
from importlib.metadata import entry_points
(backend,) = entry_points(group="torch_dynamo_backends", name="lokakern")
assert callable(backend.load()), "torch.compile does not find its backend"
for device in sys.argv[2:]:
    choice = lokakern.dispatch("gemm", {SHAPE}, 0.06, device=device)
    print(choice.explain())
    assert not choice.is_miss, f"the shipped databases do not answer for {{device}}"
from lokakern.selection import dispatcher
from lokakern.registry.coverage import missing_evidence
from lokakern.registry.register import KERNELS
missing = missing_evidence(dispatcher.snapshot(), KERNELS.values())
assert KERNELS and not missing, f"the shipped databases lack {{missing}}"
"""
DATABASES = {
    "nvidia-h100.sqlite": "NVIDIA H100 80GB HBM3",
    "nvidia-h200.sqlite": "NVIDIA H200",
}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command and return its stdout; its output is shown where it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}check_wheel: failed")
    return done.stdout


def tree_files() -> list[str]:
    """Files of the tree that git does not ignore, links themselves included."""
    listed = run("git", "ls-files", "-z", "-co", "--exclude-standard", cwd=ROOT).split("\0")
    return sorted({name for name in listed if name and os.path.lexists(ROOT / name)})


def expected_in_wheel(files: list[str]) -> set[str]:
    """Names in the wheel of all files of the tree that belong into it."""
    expected = set()
    for name in files:
        top = name.split("/")[0]
        if Path(name).suffix not in SHIPPED and Path(name).name != "py.typed":
            continue
        if top in LINKED:
            expected.add(f"lokakern/{name}")
        elif name == "lokakern_cli.py" or (top == "lokakern" and not (ROOT / name).is_symlink()):
            expected.add(name)
    return expected


def copy_tree(files: list[str], target: Path) -> None:
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def check(folder: Path) -> None:
    files = tree_files()
    for name in LINKED:
        if not (ROOT / "lokakern" / name).is_symlink():
            sys.exit(f"check_wheel: lokakern/{name} is no link (Windows needs core.symlinks)")
    tree, built, installed = folder / "tree", folder / "built", folder / "installed"
    copy_tree(files, tree)
    run(sys.executable, "-m", "build", "--outdir", built, cwd=tree)  # the wheel from the sdist
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = expected_in_wheel(files)
    if missing := sorted(expected - inside):
        sys.exit(f"check_wheel: not in {wheel.name}: {', '.join(missing)}")
    if surplus := sorted(inside - expected):
        sys.exit(f"check_wheel: in {wheel.name} but not in the tree: {', '.join(surplus)}")
    print(f"{wheel.name}: {len(inside)} files, {wheel.stat().st_size / 2**10:.0f} KiB, all there")

    # Beside the dependencies of this environment, but before its editable install.
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--no-index", "--target", installed, wheel, cwd=folder,
    )  # fmt: skip
    databases = {Path(name).name for name in files if name.startswith("registry/databases/")}
    shipped = {name for name in databases if name.endswith(".sqlite")}
    if shipped != DATABASES.keys():
        strange = ", ".join(sorted(shipped ^ DATABASES.keys()))
        sys.exit(f"check_wheel: {strange}: expected in the tree and in DATABASES, or in neither")
    print(run(installed / "bin" / "lokakern", "--version", cwd=folder, PYTHONPATH=str(installed)))
    print(
        run(
            sys.executable, "-c", USE, installed, *DATABASES.values(),
            cwd=folder, PYTHONPATH=str(installed), LOKAKERN_DB=str(folder / "none.sqlite"),
        ),
        end="",
    )  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lokakern-wheel-") as folder:
        check(Path(folder).resolve())


if __name__ == "__main__":
    main()
