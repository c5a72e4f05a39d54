"""Merging into and out of a real PostgreSQL server, which these tests start."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from lokakern.errors import DatabaseError
from lokakern.registry.schema.tables import TABLES
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.storage.merge import merge, read_checked
from lokakern.registry.storage.reader import Rows, database_digest, read_rows
from lokakern.registry.storage.run_files import RunFile, collect_runs
from lokakern.registry.storage.writer import write_file
from tests.support.run_files import KERNEL, OK, add, begin, small_rows

pytest.importorskip("psycopg", reason="needs PostgreSQL")
NOBODY = 65534  # a server refuses to run as root


def server_folder() -> Path | None:
    """The folder of PostgreSQL's programs, which Debian does not put on the path."""
    found = shutil.which("pg_ctl")
    if found is not None:
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return folders[-1] if folders else None


PROGRAMS = server_folder()
pytestmark = pytest.mark.skipif(PROGRAMS is None, reason="needs PostgreSQL")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server of its own, without a network: the URL of a database on it, without its name."""
    assert PROGRAMS is not None
    as_whom: dict[str, Any] = {"user": NOBODY, "group": NOBODY} if os.geteuid() == 0 else {}
    # Not under pytest's folder: the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="lokakern-postgres-", dir="/tmp"))
    if as_whom:
        os.chown(folder, NOBODY, NOBODY)
    data = folder / "data"

    def run(program: str, *words: str) -> None:
        subprocess.run([str(PROGRAMS / program), *words], check=True, capture_output=True,
                       cwd=folder, timeout=1800, **as_whom)  # fmt: skip

    try:
        run("initdb", "-D", str(data), "-U", "lokakern", "--auth=trust", "--no-sync")
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "-D", str(data), "-l", str(folder / "log"), "-o", options, "-w", "start")
        yield f"postgresql+psycopg://lokakern@/{{}}?host={folder}"
        run("pg_ctl", "-D", str(data), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def url(server: str, request: pytest.FixtureRequest) -> str:
    """A new database on the server."""
    name = f"t{abs(hash(request.node.name))}"
    engine = sqlalchemy.create_engine(server.format("postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    return server.format(name)


def file_of(path: Path, rows: Rows) -> Path:
    write_file(path, rows)
    return path


def counts(rows: Rows) -> dict[str, int]:
    return {name: len(found) for name, found in rows.items()}


def test_a_file_survives_a_round_trip_through_a_server(url: str, tmp_path: Path) -> None:
    rows = small_rows()
    source = file_of(tmp_path / "a.sqlite", rows)
    report = merge([source], url)
    assert report.added == counts(rows)
    assert database_digest(url) == database_digest(source)  # to the last bit, infinity too
    back = tmp_path / "back.sqlite"
    merge([url], back)
    assert back.read_bytes() == source.read_bytes()


def test_merging_again_adds_nothing(url: str, tmp_path: Path) -> None:
    source = file_of(tmp_path / "a.sqlite", small_rows())
    merge([source], url)
    before = database_digest(url)
    assert not any(merge([source], url).added.values())
    assert not any(merge([url], url).added.values())
    assert database_digest(url) == before


def test_runs_end_on_the_server(url: str) -> None:
    with begin(url) as run:
        add(run)
    left = begin(url)
    add(left, regime="eager")
    left.close()  # its process died
    collect_runs(url)
    assert len(read_rows(url)["timing"]) == 2 and len(read_rows(url)["run"]) == 2
    found = load_snapshot([url])
    assert {row.name for row in found.kernels} == {KERNEL.name}


def test_many_merge_at_once(url: str, tmp_path: Path) -> None:
    """Each adds rows of its own and the same ones as all; the tables are made by one of them."""

    def one(number: int) -> Path:
        path = tmp_path / f"{number}.sqlite"
        with RunFile.create(path, suite="s", command="c", harness_digest="h") as run:
            add(run, OK)
        merge([file_of(tmp_path / f"same{number}.sqlite", small_rows())], path)
        return path

    sources = [one(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(lambda source: merge([source], url), sources))
    whole = tmp_path / "whole.sqlite"
    merge(sources, whole)
    assert database_digest(url) == database_digest(whole)
    for name in FACTS:  # no row was added twice, or by two
        assert sum(report.added[name] for report in reports) == len(read_rows(whole)[name])


def test_a_contradiction_changes_nothing(url: str, tmp_path: Path) -> None:
    rows = small_rows()
    merge([file_of(tmp_path / "a.sqlite", rows)], url)
    before = database_digest(url)
    changed = {name: list(found) for name, found in rows.items()}
    row = list(changed["timing"][0])
    row[-1] += 1
    changed["timing"][0] = tuple(row)
    edited = file_of(tmp_path / "b.sqlite", changed)
    with pytest.raises(DatabaseError):
        merge([edited], url)
    assert database_digest(url) == before


def test_foreign_tables_are_refused(url: str, tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE run (key text, note text)")
    engine.dispose()
    with pytest.raises(DatabaseError, match="has no table 'device'"):
        merge([file_of(tmp_path / "a.sqlite", small_rows())], url)
    with pytest.raises(DatabaseError):
        read_rows(url)


def test_an_edited_row_on_the_server_is_seen(url: str, tmp_path: Path) -> None:
    merge([file_of(tmp_path / "a.sqlite", small_rows())], url)
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        table = TABLES["timing"]
        connection.execute(table.update().values(regime="eager"))
    engine.dispose()
    with pytest.raises(DatabaseError, match="edited"):
        read_checked(url)
    with pytest.raises(DatabaseError, match="edited"):
        merge([url], tmp_path / "b.sqlite")
    assert not (tmp_path / "b.sqlite").exists()
