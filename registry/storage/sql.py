"""SQL text that reads, writes and unites tables.

It does without SQLAlchemy, whose import takes longer than reading the shipped file. Names of tables
and columns are those of the schema, never a file's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lokakern.errors import DatabaseError
from lokakern.registry.sqlite_file import DIMENSIONS, FACTS

Columns = Mapping[str, tuple[str, ...]]  # by table, without ids


def names_text(columns: Iterable[str], table: str = "") -> str:
    """Columns, separated by commas."""
    prefix = f"{table}." if table else ""
    return ", ".join(f'{prefix}"{column}"' for column in columns)


def rows_text(name: str, columns: Iterable[str]) -> str:
    """Every row of a table; facts by key, as they lie."""
    return f"SELECT {names_text(columns)} FROM {name}" + (
        ' ORDER BY "key"' if name in FACTS else ""
    )


def insert_text(name: str, columns: tuple[str, ...]) -> str:
    """A row into a table, with its id where it has one."""
    columns = ("id", *columns) if name in DIMENSIONS else columns
    return f"INSERT INTO {name} ({names_text(columns)}) VALUES ({', '.join('?' * len(columns))})"


class Union:
    """Adds the rows of a part to the tables of a target, by key.

    The rows of `DIMENSIONS` come first. Each of them has an id in the part and another one in the
    target, and temporary tables of the target (`numbers_text`) map one to the other.

    Args:
        columns: By table.
        execute: Runs a statement on the target's connection.
        part: What comes before the names of the part's tables: `part.` for an attached file.
        equal: The operator that compares NULL as a value.
        key: The part's key in the target's form.
    """

    def __init__(
        self,
        columns: Columns,
        execute: Callable[[str], Any],
        *,
        part: str = "part.",
        equal: str = "IS",
        key: str = 'p."key"',
    ) -> None:
        self._columns, self._execute, self._part = columns, execute, part
        self._equal, self._key = equal, key

    def number(self) -> None:
        """Map the ids of the part to those of the target, which has its dimensions."""
        for name in DIMENSIONS:
            self._execute(
                f"CREATE TEMPORARY TABLE IF NOT EXISTS numbers_of_{name} "
                "(old INTEGER PRIMARY KEY, new INTEGER)"
            )
            self._execute(f"DELETE FROM numbers_of_{name}")
            self._execute(
                f"INSERT INTO numbers_of_{name} SELECT p.id, t.id FROM {self._part}{name} AS p "
                f'JOIN {name} AS t ON t."key" = {self._key}'
            )

    def add_all(self, source: str = "") -> dict[str, int]:
        """`add` of every table."""
        added = {name: self.add(name, source=source) for name in DIMENSIONS}
        self.number()
        return added | {name: self.add(name, source=source) for name in FACTS}

    def add(
        self, name: str, *, where: str = "true", source: str = "", is_empty: bool = False
    ) -> int:
        """Add the rows of a table that the target lacks.

        Args:
            name: The table.
            where: Which rows `p` of the part, in SQL.
            source: What errors call the part.
            is_empty: Whether the target has no row of the table, so that none can differ.

        Returns:
            How many were added.

        Raises:
            DatabaseError: One key has two contents.
        """
        columns = self._columns[name]
        selected = ", ".join(self._selected(name))
        content = f"SELECT {selected} FROM {self._part}{name} AS p WHERE {where}"
        if not is_empty:
            self._refuse_conflicts(name, content, source)
        # Other constraints than that of the key still refuse a row.
        result = self._execute(
            f"INSERT INTO {name} ({names_text(columns)}) SELECT {names_text(columns)} "
            f'FROM ({content}) AS p WHERE true ORDER BY "key" ON CONFLICT ("key") DO NOTHING'
        )
        return int(result.rowcount)

    def _refuse_conflicts(self, name: str, content: str, source: str) -> None:
        columns = self._columns[name]
        same = " AND ".join(f't."{c}" {self._equal} p."{c}"' for c in columns if c != "key")
        found = self._execute(
            f"SELECT {names_text(columns, 't')}, {names_text(columns, 'p')} FROM ({content}) AS p "
            f'CROSS JOIN {name} AS t WHERE t."key" = p."key" AND NOT ({same}) LIMIT 1'
        ).fetchone()
        if found is not None:
            one, other = found[: len(columns)], found[len(columns) :]
            raise conflict(name, columns, one, other, source)

    def _selected(self, name: str) -> list[str]:
        found = []
        for column in self._columns[name]:
            value = self._key if column == "key" else f'p."{column}"'
            if name in FACTS and column in DIMENSIONS:
                # A missing row gives NULL, which the table refuses.
                value = f"(SELECT new FROM numbers_of_{column} WHERE old = {value})"
            found.append(f'{value} AS "{column}"')
        return found


def conflict(
    name: str, columns: Iterable[str], one: tuple[Any, ...], other: tuple[Any, ...], source: str
) -> DatabaseError:
    """The error of one key with two contents, the second in `source`."""
    key = one[0].hex() if isinstance(one[0], bytes) else one[0]
    differing = ", ".join(
        f"{column} {a!r} and {b!r}"
        for column, a, b in zip(columns, one, other, strict=True)
        if column != "key" and a != b
    )
    second = f", the second in {source}" if source else ""
    return DatabaseError(
        f"merge: {name} row {key} has two contents ({differing}{second}); rows are facts and "
        "never change, so one of the files was edited: leave it out"
    )
