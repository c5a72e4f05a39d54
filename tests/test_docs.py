"""The README runs as printed, and nothing public is missing from it.

A comment on the line before a block says how it is treated:
    <!-- needs a GPU -->     skipped where there is none
    <!-- output -->          what some run printed; not run
    <!-- exact output -->    what the block before it must print
    <!-- serves until Ctrl-C -->    tests/test_explore.py asks it
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import lokakern
from lokakern.bench.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OUTPUTS = ("output", "exact output")
SERVES = "serves until Ctrl-C"


@dataclass(frozen=True)
class Block:
    """A fenced block of the README."""

    line: int
    language: str
    mark: str
    text: str
    expected: str | None = None

    def __str__(self) -> str:
        return f"README.md:{self.line}"


def blocks_of(text: str) -> list[Block]:
    """Fenced blocks in order; an exact output becomes what the block before it expects."""
    found: list[Block] = []
    fence = r"^(?:<!-- *(?P<mark>.+?) *-->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$"
    for match in re.finditer(fence, text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start("text"))
        block = Block(line, match["language"], match["mark"] or "", match["text"])
        if block.mark == "exact output":
            before = found.pop()
            block = Block(before.line, before.language, before.mark, before.text, block.text)
        found.append(block)
    return found


def runnable(language: str) -> list[object]:
    return [
        pytest.param(b, marks=[pytest.mark.gpu] if b.mark == "needs a GPU" else [], id=str(b))
        for b in blocks_of(README)
        if b.language == language and b.mark not in (*OUTPUTS, SERVES)
    ]


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "LOKAKERN_DB": str(folder / "user.sqlite"), "COLUMNS": "120"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_readme_has_no_unknown_marks() -> None:
    marks = {block.mark for block in blocks_of(README)}
    assert marks <= {"", "needs a GPU", SERVES, *OUTPUTS}
    assert runnable("python")
    assert runnable("bash")


@pytest.mark.parametrize("block", runnable("python"))
def test_python_in_the_readme_runs(block: Block, tmp_path: Path) -> None:
    shown = run([sys.executable, "-c", block.text], tmp_path)
    assert block.expected in (None, shown)


@pytest.mark.parametrize("block", runnable("bash"))
def test_commands_in_the_readme_run(block: Block, tmp_path: Path) -> None:
    """Ours run; of the others, make's targets exist and pip is believed."""
    shown = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:3] == ["python", "-m", "lokakern.bench"]:
            shown += run([sys.executable, *words[1:]], tmp_path)
        elif words[:1] == ["make"]:
            run(["make", "--dry-run", *words[1:]], tmp_path)
        else:
            assert not words or words[0] == "pip", f"nothing checks {line!r}"
    assert block.expected in (None, shown)


@pytest.mark.parametrize("name", lokakern.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert re.search(rf"`(lokakern\.)?{name}`", README), f"README.md does not mention `{name}`"
    assert getattr(lokakern, name).__doc__, f"lokakern.{name} has no docstring"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    assert f"`{name}`" in README, f"README.md does not mention `{name}`"
    assert COMMANDS[name].help, f"{name} has no help"
