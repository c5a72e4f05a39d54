"""Code in the README and docs/ runs and prints the output shown; every public name is there.

A comment on the line before a block says how it is treated:
    <!-- needs a GPU -->     skipped where there is none
    <!-- output -->          what some run printed; not run
    <!-- exact output -->    what the block before it must print
    <!-- serves until Ctrl-C -->    tests/bench/explorer/test_explorer.py asks it
    <!-- run by tests/... -->       not run here
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import lokakern
from lokakern import mods
from lokakern.bench.cli.main import app
from lokakern.device import current_device
from lokakern.measure import operands
from lokakern.selection import dispatcher, misses
from lokakern.sweep import engine
from lokakern.workloads.suite_files import suite_from_file
from tests.support.inline_worker import run_tasks_here

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "api.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LINKED = [*PAGES, ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*/*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OUTPUTS = ("output", "exact output")
BELIEVED = ("pip", "python3", "source")  # of an installation
SERVES = "serves until Ctrl-C"
ELSEWHERE = (
    "run by tests/bench/exchange/test_export.py",
    "run by tests/bench/new_kernel/test_new_kernel.py",
    "run by tests/bench/models/test_public_models.py",
    "run by tests/bench/models/test_recorded_log.py",
    "run by tests/native/test_serve_gpu.py",
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    mark: str
    text: str
    expected: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """Fenced blocks in order; an exact output becomes what the block before it expects."""
    found: list[Block] = []
    page, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    fence = r"^(?:<!-- *(?P<mark>.+?) *-->\n+)?```(?P<language>[^`\n]*)\n(?P<text>.*?)^```$"
    for match in re.finditer(fence, text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start("text"))
        block = Block(page, line, match["language"], match["mark"] or "", match["text"])
        if block.mark == "exact output":
            before = found.pop()
            block = Block(page, before.line, before.language, before.mark, before.text, block.text)
        found.append(block)
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def runnable(language: str) -> list[object]:
    return [
        pytest.param(b, marks=[pytest.mark.gpu] if b.mark == "needs a GPU" else [], id=str(b))
        for b in BLOCKS
        if b.language == language and b.mark not in (*OUTPUTS, SERVES, *ELSEWHERE)
    ]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to write in, a database of its own, and sweeps of few operands in this process.

    A process for each block would import torch each time; workers: tests/sweep/test_worker.py.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "user.sqlite"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["a snippet"])
    monkeypatch.setattr(misses, "_COUNTS", type(misses._COUNTS)())
    if not torch.cuda.is_available():
        monkeypatch.setattr(operands, "l2_bytes", lambda: 20_000)
        monkeypatch.setattr(engine, "run_tasks", run_tasks_here)
    dispatcher.use_snapshot(None)
    yield tmp_path
    dispatcher.use_snapshot(None)


def command(words: list[str]) -> str:
    """Run our command line here, and return what it wrote to stdout."""
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, f"{shlex.join(words)}\n{ended.output}\n{ended.exception}"
    dispatcher.use_snapshot(None)  # another process reads files again
    return ended.stdout


def write_suites(page: str, folder: Path) -> list[Path]:
    """The suites that a page shows, as files: its commands read them."""
    written: list[Path] = []
    for block in BLOCKS:
        if block.page == page and (name := re.match(r'name = "(.+)"\n', block.text)):
            written.append(folder / f"{name[1]}.toml")
            written[-1].write_text(block.text)
    return written


def test_pages_have_no_unknown_marks() -> None:
    assert {block.mark for block in BLOCKS} <= {"", "needs a GPU", SERVES, *ELSEWHERE, *OUTPUTS}
    assert runnable("python")
    assert runnable("bash")


@pytest.mark.rest
@pytest.mark.parametrize("block", runnable("python"))
def test_python_in_the_docs_runs(
    block: Block, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
    assert block.expected in (None, capsys.readouterr().out)


@pytest.mark.rest
@pytest.mark.parametrize("block", runnable("bash"))
def test_commands_in_the_docs_run(block: Block, elsewhere: Path) -> None:
    """Ours run; of the others, make's targets exist and an installation is believed."""
    write_suites(block.page, elsewhere)
    shown = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["lokakern"]:
            shown += command(words[1:])
        elif words[:3] == ["python", "-m", "lokakern.bench"]:
            shown += command(words[3:])
        elif words[:1] == ["make"]:
            subprocess.run(["make", "-C", ROOT, "--dry-run", *words[1:]], check=True)
        else:
            assert not words or words[0] in BELIEVED, f"nothing checks {line!r}"
    assert block.expected in (None, shown)


@pytest.mark.rest
def test_make_oldest_tests_the_lowest_torch_that_is_admitted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (lowest,) = (x[7:] for x in project["dependencies"] if x.startswith("torch>="))
    call = ["make", "-C", ROOT, "--dry-run", "oldest"]
    shown = subprocess.run(call, check=True, capture_output=True, text=True).stdout
    assert f" TORCH={lowest}.0 " in shown


def test_suites_in_the_docs_are_suites(tmp_path: Path) -> None:
    suites = [
        path for page in PAGES for path in write_suites(str(page.relative_to(ROOT)), tmp_path)
    ]
    assert suites
    for path in suites:
        assert list(suite_from_file(path).cases(current_device()))


@pytest.mark.rest
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert "Prints" in (runpy.run_path(str(path), run_name="__main__")["__doc__"] or "")
    assert capsys.readouterr().out
    assert f"`examples/{path.name}`" in "".join(page.read_text("utf-8") for page in PAGES)
    assert not list(elsewhere.iterdir()) or {p.name for p in elsewhere.iterdir()} <= {"user.sqlite"}


def test_links_between_pages_lead_somewhere() -> None:
    relinked: Callable[[str, Path], str] = runpy.run_path(str(DOCS / "conf.py"))["relinked"]
    for page in LINKED:
        relinked(page.read_text(encoding="utf-8"), page.parent)


def test_included_parts_of_files_exist() -> None:
    include = re.compile(r"```\{include\} (?P<path>\S+)\n(?P<options>(?::.+\n)*)```")
    found = [(page, match) for page in PAGES for match in include.finditer(page.read_text("utf-8"))]
    assert found
    for page, match in found:
        text = (page.parent / match["path"]).read_text(encoding="utf-8")
        for part in re.findall(r': "(.+)"', match["options"]):
            assert part in text, f"{page.name} includes a part of {match['path']}: no {part!r}"


def test_pages_link_to_what_they_include() -> None:
    """Where nothing builds the pages, the line before an include leads to its text."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in re.finditer(r"```\{include\} (\S+)", text):
            before = text[: match.start()].rstrip("\n").rpartition("\n")[2]
            assert before.startswith("% ") and f"]({match[1]}" in before, f"{page.name}: {match[0]}"


@pytest.mark.rest
def test_the_picture_of_gains_shows_the_shipped_rows(elsewhere: Path) -> None:
    rows = runpy.run_path(str(ROOT / "scripts" / "draw_gains.py"))["rows"]()
    drawn = (DOCS / "gains.svg").read_text(encoding="utf-8")
    assert drawn.count("; times as fast as bf16: ") == 2 * len(rows)  # a bar and its number
    for row in rows:
        bar = f"layer: {row['layer']}; times as fast as bf16: {row['speedup']:g}; chosen: "
        assert bar + row["chosen"] in drawn, "docs/gains.svg is old; run scripts/draw_gains.py"
        if row["row_err"] is not None:
            assert f"layer: {row['layer']}; row error: {row['row_err']:g}; " in drawn


def test_the_index_names_every_page() -> None:
    listed = re.findall(r"^([a-z_-]+)$", (DOCS / "index.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in PAGES[1:] if page.stem != "index")


@pytest.mark.parametrize("name", lokakern.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert f"| `{name}`" in REFERENCE or f"`, `{name}`" in REFERENCE, f"docs/api.md lacks `{name}`"
    kinds = "module" if name == "mods" else "function|class"
    directive = rf"^\.\. auto({kinds}):: lokakern\.{name}$"
    assert re.search(directive, REFERENCE, re.MULTILINE), f"docs/api.md has no reference of {name}"
    assert getattr(lokakern, name).__doc__, f"lokakern.{name} has no docstring"


@pytest.mark.parametrize("name", mods.__all__)
def test_every_mod_is_documented(name: str) -> None:
    assert getattr(mods, name).__doc__, f"lokakern.mods.{name} has no docstring"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    """Each command is in the table of commands, and has a help text, as do its options."""
    measure = (DOCS / "measure.md").read_text(encoding="utf-8")
    assert f"| `{name}` |" in measure, f"docs/measure.md does not mention `{name}`"
    assert COMMANDS[name].help, f"{name} has no help"
    for parameter in COMMANDS[name].params:
        assert parameter.help, f"{name} {parameter.opts[0]} has no help"


def test_the_reference_of_commands_is_current(elsewhere: Path) -> None:
    """The page is written by typer in `make docs`."""
    from typer.cli import app as typer_app

    recipe = re.search(r"-m typer (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe
    words = shlex.split(recipe[1])
    assert words[-1] == "docs/commands.md"
    ended = CliRunner().invoke(typer_app, [*words[:-1], "commands.md"])
    assert ended.exit_code == 0, ended.output
    written = (elsewhere / "commands.md").read_text(encoding="utf-8")
    committed = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert written == committed, "docs/commands.md is old; run make docs"
