"""One command measures, verifies and exports; here on a CPU, whose kernels take a fixed time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lokakern.bench.cli.main import app
from lokakern.bench.exchange import verify
from lokakern.device import current_device
from lokakern.measure import operands
from lokakern.registry.schema.manifest import place_of
from lokakern.registry.schema.tables import COLUMNS
from lokakern.registry.sharing.import_file import import_file
from lokakern.registry.storage.reader import Rows, read_rows
from lokakern.sweep import engine
from tests.support.inline_worker import launches_take, run_tasks_here

LAYER = '[[layer]]\nname = "{0}"\nm = 64\nn = {1}\nk = 32\nforms = ["gemm"]\n'


def quick(name: str) -> float:
    """Microseconds of a launch: emulations are fast, so that their errors are needed."""
    return 1e4 if "emulated" in name else 2e4


def workers(microseconds: Callable[[str], float]) -> Callable[..., bool]:
    def run_tasks(*given: Any, **more: Any) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            launches_take(patch, microseconds)
            return run_tasks_here(*given, **more)

    return run_tasks


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lokakern.problems.ACCURACY_ROWS", 64)
        patch.setattr(operands, "l2_bytes", lambda: 20_000)
        patch.setattr(engine, "run_tasks", workers(quick))
        patch.setattr(verify, "run_tasks", workers(quick))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        current_device.cache_clear()
        yield
    current_device.cache_clear()
    torch.set_num_threads(threads)


class Contributor:
    """A folder with a suite, a database and the file to send."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.suite, self.db = folder / "mine.toml", folder / "mine.sqlite"
        self.out, self._capsys = folder / "sent.sqlite", capsys
        self.layers("up")

    def layers(self, *names: str) -> None:
        text = "".join(LAYER.format(name, 32 * (at + 1)) for at, name in enumerate(names))
        self.suite.write_text(f'name = "mine"\n{text}')

    def run(self, *words: object) -> tuple[int, str]:
        given = ("contribute", "--suite", self.suite, "--db", self.db, "--out", self.out,
                 "--quiet", *words)  # fmt: skip
        self._capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr("sys.argv", ["lokakern", *map(str, given)])
            app([str(word) for word in given], prog_name="lokakern")
        return int(ended.value.code or 0), self._capsys.readouterr().err

    @property
    def sent(self) -> Rows:
        return read_rows(self.out)


@pytest.fixture
def contributor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Contributor:
    return Contributor(tmp_path, capsys)


def column(rows: Rows, table: str, name: str) -> list[Any]:
    place = COLUMNS[table].index(name)
    return [row[place] for row in rows[table]]


def test_one_command_writes_a_file_that_others_accept(
    contributor: Contributor, tmp_path: Path
) -> None:
    code, said = contributor.run()
    assert code == 0
    assert f"send {contributor.out} (" in said and " and sent.sqlite.manifest.json: " in said
    assert place_of(contributor.out).is_file()
    assert "verified" in said and "measured again" in said
    assert len(contributor.sent["timing"]) > 3 and len(contributor.sent["accuracy"]) > 30
    report = import_file(contributor.out, tmp_path / "theirs.sqlite")
    assert report.added["timing"] == len(contributor.sent["timing"])
    for command in column(contributor.sent, "run", "command"):
        assert command == "python -m lokakern.bench contribute --suite mine.toml --quiet"


@pytest.mark.rest
def test_the_same_command_goes_on_where_it_stopped(contributor: Contributor) -> None:
    assert contributor.run()[0] == 0
    first = contributor.sent
    assert contributor.run()[0] == 0
    assert contributor.sent["timing"] == first["timing"], "nothing is measured twice"
    contributor.layers("up", "down")
    code, said = contributor.run("--time-limit", 0)
    assert code == 3 and "the same command adds the rest" in said
    assert contributor.sent["timing"] == first["timing"], "what is there is sent"
    assert contributor.run()[0] == 0
    assert set(contributor.sent["timing"]) > set(first["timing"])


def test_a_limit_too_short_for_a_row_is_no_failure(contributor: Contributor) -> None:
    code, said = contributor.run("--time-limit", 0)
    assert code == 3 and "nothing was measured within 0 s" in said and "longer" in said
    assert not contributor.out.exists() and not place_of(contributor.out).exists()


@pytest.mark.rest  # three sweeps
def test_measurements_that_do_not_repeat_are_not_sent(
    contributor: Contributor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(name: str) -> float:
        return quick(name) * (3 if "emulated" in name else 1)

    monkeypatch.setattr(verify, "run_tasks", workers(slower))
    code, said = contributor.run()
    assert code == 6 and "no file is written" in said and "out of place" in said
    assert f"`sweep --suite {contributor.suite} --fresh --db {contributor.db}`" in said
    assert not contributor.out.exists() and not place_of(contributor.out).exists()
    monkeypatch.setattr(verify, "run_tasks", workers(quick))
    assert contributor.run()[0] == 0, "the database has kept the measurements"


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda c: setattr(c, "out", c.out.parent / "no" / "x.sqlite"), 2, "no folder"),
        (lambda c: setattr(c, "out", c.out.parent), 2, "is a folder"),
        (lambda c: setattr(c, "out", c.db), 2, "would lose rows"),
        (lambda c: c.suite.write_text("layer = 1"), 2, "SuiteError"),
        (lambda c: c.db.write_text("no database"), 1, "DatabaseError"),
    ],
    ids=["no folder", "folder", "source", "suite", "database"],
)
def test_a_command_that_cannot_do_its_work_ends_at_once(
    contributor: Contributor, change: Callable[[Contributor], object], code: int, words: str
) -> None:
    change(contributor)
    found, said = contributor.run()
    assert found == code and words in " ".join(said.replace("│", "").split())
    assert not contributor.out.is_file()
