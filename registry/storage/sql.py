"""SQL of the models as text for SQLite, compiled once: that takes longer than running it."""

from __future__ import annotations

import functools
from typing import Any

from sqlalchemy import insert, select, text
from sqlalchemy.dialects import sqlite

from lokakern.registry.schema.tables import COLUMNS, TABLES
from lokakern.registry.sqlite_file import FACTS


def compiled(statement: Any) -> str:
    """A statement of Core as text."""
    return str(statement.compile(dialect=sqlite.dialect()))


@functools.cache
def rows_text(name: str, *more: str) -> str:
    """Every row of a table: columns `more`, then `tables.COLUMNS`; facts by key, as they lie."""
    table = TABLES[name]
    statement = select(*(table.c[c] for c in (*more, *COLUMNS[name])))
    return compiled(statement.order_by(table.c.key) if name in FACTS else statement)


@functools.cache
def insert_text(name: str) -> str:
    """A row into a table, with its id where it has one."""
    return compiled(insert(TABLES[name]))


@functools.cache
def breaches_text(name: str, check: str) -> str:
    """Keys of rows for which a constraint of ours does not hold."""
    return compiled(select(TABLES[name].c.key).where(text(f"NOT ({check})")))
