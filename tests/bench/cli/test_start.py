"""How the command line starts: what it imports, and what `import lokakern` still does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from lokakern import types
from lokakern.bench.cli import host, options
from lokakern.bench.cli.main import app
from lokakern.registry.schema.records import HOST_REGIMES
from lokakern.render import did_you_mean
from lokakern.version import __version__

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
LATE = "('torch', 'numpy', 'sqlalchemy', 'triton')"  # what only commands need


def python(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def script(*runs: tuple[str, ...], then: str) -> str:
    """A program that runs the command `lokakern` with each of these words, and then this."""
    return f"""
import sys
from lokakern_cli import main
codes = []
for words in {runs!r}:
    sys.argv = ["lokakern", *words]
    try:
        main()
    except SystemExit as ended:
        codes.append(int(ended.code or 0))
{then}
"""


def test_help_and_wrong_usage_import_no_torch() -> None:
    runs = [("--version",), ("--help",), *((name, "--help") for name in COMMANDS),
            ("swep",), ("sweep", "--suit", "lrm"), ("list", "devise")]  # fmt: skip
    then = f"print(codes, [name for name in {LATE} if name in sys.modules])"
    ran = python("-c", script(*runs, then=then))
    assert ran.returncode == 0, ran.stderr
    codes = [0] * (len(COMMANDS) + 2) + [2] * 3
    assert ran.stdout.splitlines()[-1] == f"{codes} []"
    assert ran.stdout.startswith(f"lokakern {__version__}\n")
    assert "Usage: lokakern sweep" in ran.stdout
    assert "Did you mean 'sweep'?" in ran.stderr
    assert "--suite" in ran.stderr


def test_python_m_helps_without_torch() -> None:
    for words in (("--help",), ("explain", "--help")):
        ran = python("-X", "importtime", "-m", "lokakern.bench", *words)
        assert ran.returncode == 0, ran.stderr
        assert "Usage: python -m lokakern.bench" in ran.stdout
        imported = {line.rsplit("|", 1)[-1].strip() for line in ran.stderr.splitlines()}
        assert "lokakern.bench.cli.main" in imported
        assert "torch" not in imported


def test_a_command_imports_the_library_before_it_runs(tmp_path: Path) -> None:
    """A user's own module finds the ops, as it does without the command line."""
    then = """
import lokakern, torch
assert {"gemm", "dispatch", "register"} <= vars(lokakern).keys(), "imported in part"
assert torch.ops.lokakern.gemm
print(codes)
"""
    ran = python("-c", script(("list", "distributions", "--json"), then=then))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[0]"


def test_the_garbage_collector_never_walks_what_a_command_imports() -> None:
    then = """
import gc
import torch
assert gc.isenabled()
walked = {id(found) for found in gc.get_objects()}
assert not {id(torch.nn.Linear), id(torch.nn.Module.__dict__)} & walked
print(codes)
"""
    ran = python("-c", script(("list", "distributions", "--json"), then=then))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[0]"


def test_a_command_freezes_nothing_where_torch_was_imported_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = gc.get_freeze_count()
    app(["list", "distributions"], standalone_mode=False)
    assert "X1" in capsys.readouterr().out and gc.get_freeze_count() == before


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("how", ["script", "words", "another module"])
def test_importing_the_library_registers_its_ops(tmp_path: Path, how: str) -> None:
    """Also in a program called like the command, or with its words, or a package that uses it."""
    code = "import lokakern, sys\nassert sys.modules['torch'].ops.lokakern.gemm, 'not registered'\n"
    (tmp_path / "lokakern").write_text(code)
    (tmp_path / "user_package").mkdir()
    (tmp_path / "user_package" / "__init__.py").write_text(code)
    (tmp_path / "user_package" / "run.py").write_text("")
    words = {
        "script": [str(tmp_path / "lokakern"), "lokakern.bench", "--help"],
        "words": ["-c", f"import lokakern_cli\n{code}", "-m", "lokakern.bench"],
        "another module": ["-m", "user_package.run", "-m", "lokakern.bench"],
    }[how]
    ran = python(*words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_the_package_declares_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    module, _, function = project["project"]["scripts"]["lokakern"].partition(":")
    assert (ROOT / f"{module}.py").is_file()
    assert module in project["tool"]["setuptools"]["py-modules"]
    assert function == "main"
    assert project["project"]["version"] == __version__


def test_options_name_the_regimes_of_the_library() -> None:
    assert tuple(options.ChoiceRegime) == types.CHOICE_REGIMES
    assert tuple(options.TimingRegime) == types.REGIMES
    assert tuple(host.HostRegime) == tuple(HOST_REGIMES)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"new-kernel"}))  # which reads none
def test_every_command_takes_a_database(name: str) -> None:
    assert any("--db" in parameter.opts for parameter in COMMANDS[name].params)


def test_each_exit_code_has_words() -> None:
    page = (ROOT / "docs" / "measure.md").read_text("utf-8")
    for code in options.ExitCode:
        assert f" {code.value} " in options.EXIT_CODES
        assert f"| {code.value} | " in page


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("torch.bf61", "torch.bf16"),
        ("TORCH.BF16", "torch.bf16"),
        ("h200", "NVIDIA H200"),
        ("NVIDIA H100", "NVIDIA H100 80GB HBM3"),  # more like "NVIDIA H200"
        ("nothing like it", ""),
        ("", ""),
    ],
)
def test_the_nearest_name_is_meant(asked: str, meant: str) -> None:
    known = ["cuda.gemm_row", "torch.bf16", "NVIDIA H200", "NVIDIA H100 80GB HBM3"]
    found = did_you_mean.did_you_mean(asked, known)
    assert found == (f"did you mean {meant!r}? " if meant else "")


def test_the_script_finds_modules_of_the_current_folder(tmp_path: Path) -> None:
    """As `python -m` does; a script has its own folder in place of the current one."""
    file = tmp_path / "bin" / "lokakern"
    file.parent.mkdir()
    file.write_text("from lokakern_cli import main\nmain()\n")
    (tmp_path / "my_model.py").write_text(
        "import torch\ndef made(): return torch.nn.Linear(64, 64), torch.zeros(16, 64)\n"
    )
    words = (str(file), "explain", "--model", "my_model:made", "--device", "NVIDIA H200")
    ran = python(*words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "was not found" in python("-P", *words, cwd=tmp_path).stderr
