"""Damage to database files, as by a bad disk, a careless tool or an attacker.

A mutation is three numbers, so that hypothesis can shrink it and a failure can be said in a line.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from lokakern.registry.schema.row_keys import row_key
from lokakern.registry.schema.tables import COLUMNS as COLUMNS_OF
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.storage.reader import Rows
from lokakern.registry.storage.writer import write_file
from tests.support.run_files import small_rows

PAGE_BYTES = 8192
FIRST = "(SELECT min(key) FROM {0})"


class Mutation(NamedTuple):
    """One change: which, where, and to what."""

    kind: int
    where: int
    what: int


def flip(content: bytearray, where: int, what: int) -> None:
    content[where % len(content)] ^= 1 << what % 8


def set_byte(content: bytearray, where: int, what: int) -> None:
    content[where % len(content)] = what % 256


def in_header(content: bytearray, where: int, what: int) -> None:
    content[where % min(100, len(content))] = what % 256


def in_page_header(content: bytearray, where: int, what: int) -> None:
    page = where // 16 % max(len(content) // PAGE_BYTES, 1)
    place = page * PAGE_BYTES + (100 if page == 0 else 0) + where % 16
    content[place % len(content)] = what % 256


def truncate(content: bytearray, where: int, what: int) -> None:
    kept = where % len(content)
    del content[kept - kept % PAGE_BYTES if what % 2 else kept :]


def grow(content: bytearray, where: int, what: int) -> None:
    content += bytes([what % 256]) * (where % (2 * PAGE_BYTES))


def zero(content: bytearray, where: int, what: int) -> None:
    start = where % len(content)
    length = min(what % PAGE_BYTES, len(content) - start)
    content[start : start + length] = bytes(length)


def swap_pages(content: bytearray, where: int, what: int) -> None:
    pages = len(content) // PAGE_BYTES
    if pages:
        one, two = where % pages * PAGE_BYTES, what % pages * PAGE_BYTES
        first, second = content[one : one + PAGE_BYTES], content[two : two + PAGE_BYTES]
        content[one : one + PAGE_BYTES], content[two : two + PAGE_BYTES] = second, first


def copy_page(content: bytearray, where: int, what: int) -> None:
    pages = len(content) // PAGE_BYTES
    if pages:
        one, two = where % pages * PAGE_BYTES, what % pages * PAGE_BYTES
        content[one : one + PAGE_BYTES] = content[two : two + PAGE_BYTES]


def set_number(content: bytearray, where: int, what: int) -> None:
    """Four bytes, such as the page that a pointer points to."""
    start = where % len(content)
    content[start : start + 4] = (what % 2**32).to_bytes(4, "big")[: len(content) - start]


BYTES: tuple[Callable[[bytearray, int, int], None], ...] = (
    flip, set_byte, in_header, in_page_header, truncate, grow, zero, swap_pages, copy_page,
    set_number,
)  # fmt: skip

NUMBERS = ("-1", "0", "1e999", "-1e999", "1e308", "9223372036854775807", "-9223372036854775808",
           "NULL", "'text'", "x'7ff8000000000000'", "1e999 - 1e999", "0.5", "2")  # fmt: skip
TEXTS = ("''", "'?'", "NULL", "7", "x'ff'", "CAST(x'c328' AS TEXT)", "CAST(x'eda080' AS TEXT)",
         "char(27) || '[2J'", "char(0)", "replace(hex(zeroblob(40000)), '0', 'x')",
         "'../../../../etc/passwd'", "'none'", "'wrong'", "'ok'", "zeroblob(2000000)",
         "'{\"a\":1e999}'")  # fmt: skip
KEYS = ("zeroblob(32)", "zeroblob(31)", "hex(key)", "NULL", "x''", "randomblob(32)", "7")
COLUMNS = {
    "timing": (
        ("latency_us_p20", NUMBERS), ("latency_us_p50", NUMBERS), ("latency_us_p80", NUMBERS),
        ("clock_mhz", NUMBERS), ("replay_count", NUMBERS), ("kernel_err", NUMBERS),
        ("measured_utc_ms", NUMBERS), ("kernel", NUMBERS), ("run", NUMBERS), ("status", TEXTS),
        ("reason", TEXTS), ("regime", TEXTS), ("timer", TEXTS), ("key", KEYS),
    ),
    "accuracy": (
        ("row_err", NUMBERS), ("row_err_upper", NUMBERS), ("flushed_share", NUMBERS),
        ("sqnr_db", NUMBERS), ("nonfinite_count", NUMBERS), ("seed", NUMBERS), ("rows", NUMBERS),
        ("status", TEXTS), ("architecture", TEXTS), ("operand_digest", TEXTS), ("key", KEYS),
    ),
    "test_result": (
        ("passed_count", NUMBERS), ("failed_count", NUMBERS), ("seeds", TEXTS), ("status", TEXTS),
        ("reason", TEXTS), ("environment", NUMBERS), ("key", KEYS),
    ),
    "host_cost": (
        ("host_us_p20", NUMBERS), ("host_us_p50", NUMBERS), ("host_us_p80", NUMBERS),
        ("round_count", NUMBERS), ("cpu", TEXTS), ("regime", TEXTS), ("path", TEXTS),
        ("device", NUMBERS), ("key", KEYS),
    ),
    "problem": (
        ("id", NUMBERS), ("m", NUMBERS), ("a", TEXTS), ("b", TEXTS), ("out_format", TEXTS),
        ("prepared", NUMBERS), ("epilogue", TEXTS), ("key", KEYS),
    ),
    "kernel": (
        ("name", TEXTS), ("modules", TEXTS), ("digest", TEXTS), ("granularity", TEXTS),
        ("key", KEYS), ("id", NUMBERS),
    ),
    "distribution": (("parameters", TEXTS), ("name", TEXTS), ("realistic", NUMBERS)),
    "run": (("grade", TEXTS), ("started_utc_ms", NUMBERS), ("command", TEXTS), ("key", KEYS)),
    "device": (("product", TEXTS), ("memory_gib", NUMBERS), ("compute_units", NUMBERS)),
    "environment": (("driver", TEXTS), ("power_cap_w", TEXTS)),
}  # fmt: skip
VALUES = tuple(
    f"UPDATE {table} SET {column} = {value} WHERE key = {FIRST.format(table)}"
    for table, columns in COLUMNS.items()
    for column, values in columns
    for value in values
)
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
DECLARED = "UPDATE sqlite_schema SET sql = replace(sql, {0}, {1}) WHERE name = {2}"
SCHEMA = (
    "ALTER TABLE timing ADD COLUMN note TEXT",
    "ALTER TABLE timing DROP COLUMN timer",
    "ALTER TABLE timing RENAME COLUMN timer TO clock",
    "ALTER TABLE device ADD COLUMN late TEXT AS (hex(zeroblob(1000000000))) VIRTUAL",
    f"CREATE VIEW endless AS {ENDLESS}",
    f"DROP TABLE accuracy; CREATE VIEW accuracy AS {ENDLESS}",
    "CREATE TRIGGER t AFTER INSERT ON run BEGIN DELETE FROM run; END",
    "CREATE VIRTUAL TABLE words USING fts5(x)",
    "CREATE VIRTUAL TABLE boxes USING rtree(id, x0, x1)",
    "CREATE TABLE extra (x)",
    "CREATE TABLE sqlite (x)",
    "CREATE INDEX i ON timing (kernel)",
    "CREATE INDEX i ON timing (hex(zeroblob(1000000000)))",
    "CREATE TEMP TABLE timing (x)",
    "DROP TABLE test_result",
    "DROP TABLE host_cost",
    "DELETE FROM kernel",
    "DELETE FROM run",
    "DELETE FROM problem WHERE id = 1",
    "UPDATE timing SET kernel = 99",
    "PRAGMA user_version = 1",
    "PRAGMA user_version = 2",
    "PRAGMA user_version = 3",
    "PRAGMA application_id = 7",
    "PRAGMA journal_mode = WAL",
    "PRAGMA encoding = 'UTF-16'; VACUUM",
    "PRAGMA auto_vacuum = 1; VACUUM",
    "PRAGMA page_size = 512; VACUUM",
    "INSERT INTO environment SELECT 9, randomblob(32), driver, toolkit, torch, triton, libraries, "
    "power_cap_w FROM environment",
    # Declared as something else than it is.
    DECLARED.format("'STRICT'", "''", "'timing'"),
    DECLARED.format("'latency_us_p20 > 0'", "'load_extension(''/tmp/x'') IS NULL'", "'timing'"),
    DECLARED.format("'latency_us_p20 > 0'", "'hex(zeroblob(1000000000)) <> 1'", "'timing'"),
    DECLARED.format("'CHECK (m >= 0)'", "'CHECK (m >= -9)'", "'problem'"),
    DECLARED.format("'WITHOUT ROWID,'", "''", "'timing'"),
    "UPDATE sqlite_schema SET rootpage = (SELECT rootpage FROM sqlite_schema WHERE name = 'run') "
    "WHERE name = 'kernel'",
    "UPDATE sqlite_schema SET rootpage = 1 WHERE name = 'timing'",
    "UPDATE sqlite_schema SET rootpage = 99999 WHERE name = 'timing'",
    "UPDATE sqlite_schema SET sql = 'CREATE TABLE timing(' WHERE name = 'timing'",
    "UPDATE sqlite_schema SET type = 'view' WHERE name = 'timing'",
    "DELETE FROM sqlite_schema WHERE name = 'accuracy'",
    "INSERT INTO sqlite_schema VALUES ('trigger', 'x', 'run', 0, 'CREATE TRIGGER x AFTER UPDATE ON "
    "run BEGIN SELECT 1; END')",
)  # fmt: skip
STATEMENTS = (*VALUES, *SCHEMA)


def base_rows(run: int = 1) -> Rows:
    """Rows of every table that a file of others may hold, as one run measured them."""
    key = f"{run:032x}"
    found: Rows = {}
    for name, rows in small_rows().items():
        columns = COLUMNS_OF[name]
        found[name] = []
        for values in rows:
            row = dict(zip(columns, values, strict=True))
            row |= {"key": key} if name == "run" else {}
            row |= {"run": key} if name in FACTS else {}
            row |= {"measured_utc_ms": 1_700_000_000_000} if name in FACTS else {}
            found[name].append((row_key(name, row), *(row[c] for c in columns[1:])))
    return found


def write_base(path: Path, run: int = 1) -> None:
    """A file of `base_rows`."""
    write_file(path, base_rows(run))


def mutate_bytes(source: Path, target: Path, mutations: list[Mutation]) -> None:
    """Change bytes of a copy of a file."""
    content = bytearray(source.read_bytes())
    for kind, where, what in mutations:
        if content:
            BYTES[kind % len(BYTES)](content, where, what)
    target.write_bytes(content)


def mutate_rows(source: Path, target: Path, mutations: list[Mutation]) -> None:
    """Change rows and schema of a copy of a file in SQL.

    Values may be of any type: while they are written, no table is STRICT and no constraint holds.
    """
    shutil.copyfile(source, target)
    for kind, _, what in mutations:
        with suppress(sqlite3.Error):  # after one change the next may be impossible
            _execute(target, STATEMENTS[kind % len(STATEMENTS)], loose=what % 4 != 0)


def _execute(target: Path, statement: str, *, loose: bool) -> None:
    loose = loose and statement in VALUES
    with closing(sqlite3.connect(target, isolation_level=None)) as connection:
        declared = connection.execute("SELECT name, sql FROM sqlite_schema").fetchall()
        texts = [(name, sql) for name, sql in declared if sql]
        connection.execute("PRAGMA writable_schema = ON")
        if loose:
            _declare(connection, [(name, _loose(sql)) for name, sql in texts])
    with closing(sqlite3.connect(target, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("PRAGMA ignore_check_constraints = ON")
        with suppress(sqlite3.Error):
            connection.executescript(statement)
        if loose:
            _declare(connection, texts)


def _loose(sql: str) -> str:
    return re.sub(r",?\s*STRICT|(?<! IS) NOT NULL", "", sql)


def _declare(connection: sqlite3.Connection, declared: list[tuple[str, str]]) -> None:
    for name, sql in declared:
        connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (sql, name))
    (version,) = connection.execute("PRAGMA schema_version").fetchone()
    connection.execute(f"PRAGMA schema_version = {int(version) + 1}")
