"""Output on terminals and pipes: progress bars, widths of tables, examples, and remedies."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from lokakern import progress
from lokakern.bench.cli import options
from lokakern.bench.cli.examples import EXAMPLES
from lokakern.bench.cli.main import app
from lokakern.errors import DatabaseError
from lokakern.registry.sharing.untrusted import open_guarded
from lokakern.render import terminal

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


class Terminal(io.StringIO):
    """A text file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def bar_on(file: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> terminal.TerminalProgress:
    monkeypatch.setattr(terminal, "A_MOMENT_S", -1.0)
    monkeypatch.setattr(terminal, "Console", lambda **_: Console(file=file, width=80))
    return terminal.TerminalProgress()


def work() -> None:
    for share in (0.0, 0.5, 0.9):
        progress.tell("checking timing", share)


def test_long_work_has_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with bar_on(file, monkeypatch) as bar:
        work()
        (task,) = bar._bar.tasks
        assert task.percentage == pytest.approx(90)
        progress.tell("checking timing", 1)
        assert not bar._bar.tasks
    assert "checking timing" in file.getvalue() and "50%" in file.getvalue()
    shown = file.getvalue()
    work()  # no progress is active
    assert file.getvalue() == shown


def test_work_inside_a_phase_shares_its_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with bar_on(file, monkeypatch) as bar:
        bar.begin("times", 3)
        work()
        bar.step("first")
        assert [(task.description, task.completed) for task in bar._bar.tasks] == [
            ("times", 1),
            ("checking timing", 0.9),
        ]
        progress.tell("checking timing", 1)
        assert [task.description for task in bar._bar.tasks] == ["times"]
    assert "1/3" in file.getvalue()


def test_short_work_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Terminal()
    bar = bar_on(file, monkeypatch)
    monkeypatch.setattr(terminal, "A_MOMENT_S", 600.0)
    with bar:
        work()
        progress.tell("checking timing", 1)
    assert "checking" not in file.getvalue()


def test_a_pipe_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    with bar_on(file, monkeypatch):
        work()
    assert file.getvalue() == ""


def test_a_pipe_gets_the_notes_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.TerminalProgress() as bar:
        bar.begin("times", 3)
        bar.step("first")
        bar.note("a note")
    assert capsys.readouterr().err == "a note\n"


def test_quiet_commands_show_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with options._showing_progress(quiet=True):
        assert not progress._LISTENERS
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    with options._showing_progress(quiet=False):
        assert progress._LISTENERS
    assert "importing torch" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert not progress._LISTENERS


def test_ctrl_c_prints_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    @options.says_errors
    def command() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        command()
    assert (ended.value.exit_code, capsys.readouterr().err) == (130, "stopped\n")


def test_a_narrow_terminal_gets_fewer_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"kernel": "cuda.scaled_gemm_row", "us": 1.5, "why": "w" * 90}]

    def shown(columns: str) -> str:
        file = Terminal()
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setenv("COLUMNS", columns)
        terminal.print_rows(rows, "table", spare=("why",))
        return file.getvalue()

    assert "w" * 90 in shown("200")
    narrow = shown("60")
    assert "www" not in narrow
    assert "cuda.scaled_gemm_row" in narrow
    assert "too narrow for why; --format csv or json has all" in narrow.replace("\n", " ")


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Terminal()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal.print_rows([{"kernel": "a"}], "table", title="title")
    assert not re.search(r"\x1b\[([0-9;]*;)?([349][0-7]|[34]8)[;m]", file.getvalue())


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("example", [e for found in EXAMPLES.values() for e in found])
def test_examples_parse(example: str) -> None:
    name, *words = shlex.split(example)
    assert example in EXAMPLES[name]
    assert len(example) <= 78, "it does not fit a terminal of 80 columns"
    with COMMANDS[name].make_context(name, words):
        pass


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_examples_at_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        app((name, "--help"), prog_name="python -m lokakern.bench")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert set(EXAMPLES[name]) <= set(lines)


def test_a_missing_database_has_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "mine.sqlite"
    with (
        pytest.raises(DatabaseError, match="is not there; check the path, or make one"),
        open_guarded(path),
    ):
        pass
    (tmp_path / "mine.sqlite.imports").mkdir()
    with (
        pytest.raises(
            DatabaseError, match=r"quarantine beside it.* LOKAKERN_DB=.*mine\.sqlite reads"
        ),
        open_guarded(path),
    ):
        pass
    path.touch()
    with pytest.raises(DatabaseError, match="is empty; expected a SQLite file"), open_guarded(path):
        pass
