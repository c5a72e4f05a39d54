"""Validation of the rows of a foreign file.

Values are checked by column, which is ten times as fast as by row. The CHECK constraints are those
of the models, as SQL queries of the file. Row keys are computed again.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lokakern.errors import DatabaseError, LokakernError
from lokakern.progress import tell
from lokakern.registry.ops import EPILOGUE_OPS, OPS
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import DistributionRow, KernelRow, canonical_json, now_utc_ms
from lokakern.registry.schema.tables import (
    BOUNDED,
    COLUMNS,
    KEYS_IN_BYTES_SINCE,
    REFERENCES,
    TABLES,
    tables_of,
)
from lokakern.registry.schema.value_rules import Rule, constraints_of, rules_of
from lokakern.registry.sharing import plausibility
from lokakern.registry.sharing.untrusted import Foreign
from lokakern.registry.sqlite_file import DIMENSIONS, FACTS, names_text
from lokakern.types import Device, Granularity, Problem, norm_form

# A batch is in memory at once, however long its rows are: at most 320 MB.
BATCH_ROWS, FACT_BYTES = 20_000, 1 << 14  # facts have 300 bytes, at most 14 KiB
FEW_ROWS = 500  # of what facts refer to
# A kernel's files are looked for by these: none outside of kernels/ may be read.
MODULE = re.compile(r"[A-Za-z0-9_]+(/[A-Za-z0-9_]+)*|python:[\w.]+|package:[\w.+=!~-]+")


@dataclass(slots=True)
class Checked:
    """The content of a file with valid rows only.

    Attributes:
        dimensions: By table and id, rows in the order of `tables.COLUMNS`, keys as hex digits.
        counts: Rows, by table.
        used: Ids that facts refer to, by table of dimensions.
    """

    dimensions: dict[str, dict[int, tuple[Any, ...]]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    used: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in DIMENSIONS})


def check(opened: Foreign) -> Checked:
    """Read and check every row of a foreign file.

    Raises:
        DatabaseError: A page is damaged, or a value is invalid: with its table, key and the
            expected value.
    """
    complaint = _quick_check(opened)
    now_ms = now_utc_ms()
    checked = Checked()
    keys: dict[str, dict[int, str]] = {}
    for name in tables_of(opened.version):
        rules = rules_of(name, now_ms)
        if name in DIMENSIONS:
            checked.dimensions[name] = found = _dimension(opened, name, rules)
            keys[name] = {number: row[0] for number, row in found.items()}
            checked.counts[name] = len(found)
        else:
            bounds = _Bounds(opened, checked.dimensions)
            checked.counts[name] = _facts(opened, name, rules, keys, checked.used, bounds)
        _check_constraints(opened, name)
    opened.limit_rows()
    checked.counts |= {name: 0 for name in TABLES if name not in checked.counts}
    if complaint is not None:
        raise complaint
    if opened.manifest is not None:
        opened.manifest.check_content(opened.name, opened.version, checked.counts)
    return checked


def _quick_check(opened: Foreign) -> DatabaseError | None:
    """Run SQLite's check. Complaints about single values are kept, as ours name the row."""
    found = [str(row[0]) for row in opened.connection.execute("PRAGMA quick_check(5)")]
    if found == ["ok"]:
        return None
    complaint = DatabaseError(
        f"database {opened.name} is damaged: {found[0].splitlines()[0][:200]}; expected a file as "
        "SQLite wrote it; ask for it again"
    )
    of_values = ("CHECK constraint failed", "NULL value in", "non-", "NUMERIC value in")
    if not all(words.startswith(of_values) for words in found):
        raise complaint
    return complaint


def _brief(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 100 else f"{words[:97]}..."


def _wrong(opened: Foreign, table: str, key: Any, found: str, expected: str) -> DatabaseError:
    shown = key.hex() if isinstance(key, bytes) else _brief(key).strip("'")
    return DatabaseError(
        f"database {opened.name}: {table} row {shown}: {found}; expected {expected}; the file was "
        "damaged or edited, or is of a newer lokakern: ask for it again"
    )


def _batches(opened: Foreign, name: str, *more: str) -> Iterator[list[tuple[Any, ...]]]:
    """Rows as the driver gives them; those of facts by key."""
    is_fact = name in FACTS
    most = opened.guards.most_facts if is_fact else opened.guards.most_dimensions
    opened.limit_rows(FACT_BYTES if is_fact else None)
    count = 0
    try:
        order = ' ORDER BY "key"' if is_fact else ""  # as they lie
        columns = names_text((*more, *COLUMNS[name]))
        cursor = opened.connection.execute(f"SELECT {columns} FROM {name}{order}")
        while batch := cursor.fetchmany(BATCH_ROWS if is_fact else FEW_ROWS):
            count += len(batch)
            if count > most:
                raise DatabaseError(
                    f"database {opened.name}: {name} has more than {most} rows; expected at most "
                    "that of a file of others; ask for one of fewer rows (`export`)"
                )
            yield batch
    except Exception as error:
        if "decode" not in str(error):
            raise
        raise _not_text(opened, name) from error


def _not_text(opened: Foreign, name: str) -> DatabaseError:
    """Find the text that is not UTF-8, which the driver does not name."""
    opened.connection.text_factory = bytes
    columns = COLUMNS[name]
    for row in opened.connection.execute(f"SELECT {names_text(columns)} FROM {name}"):
        for column, value in zip(columns[1:], row[1:], strict=True):
            if isinstance(value, bytes):
                try:
                    value.decode()
                except UnicodeDecodeError:
                    return _wrong(opened, name, row[0], f"{column} is {_brief(value)}",
                                  "UTF-8")  # fmt: skip
    return DatabaseError(
        f"database {opened.name}: {name} holds what is not UTF-8; ask for it again"
    )


def _check_columns(
    opened: Foreign, name: str, columns: Mapping[str, Sequence[Any]], rules: Mapping[str, Rule]
) -> None:
    for column, rule in rules.items():
        place = rule.breach(columns[column])
        if place is not None:
            found = f"{column} is {_brief(columns[column][place])}"
            raise _wrong(opened, name, columns["key"][place], found, str(rule))


def _digits(opened: Foreign, name: str, found: Sequence[Any]) -> list[str]:
    """Keys as hex digits."""
    in_bytes = opened.version >= KEYS_IN_BYTES_SINCE
    place = Rule(bytes if in_bytes else str, False, longest=64).breach(found)
    if place is not None:
        expected = "bytes" if in_bytes else "64 hex digits"
        raise _wrong(opened, name, found[place], f"key is {_brief(found[place])}", expected)
    return [key.hex() for key in found] if in_bytes else list(found)


def _dimension(opened: Foreign, name: str, rules: Mapping[str, Rule]) -> dict[int, tuple[Any, ...]]:
    """Rows by id, each with the key of its content and read as what it stands for."""
    found: dict[int, tuple[Any, ...]] = {}
    seen: set[str] = set()
    characters = 0
    for batch in _batches(opened, name, "id"):
        columns = dict(zip(("id", *COLUMNS[name]), zip(*batch, strict=True), strict=True))
        _check_columns(opened, name, columns, {"id": Rule(int, False), **rules})
        characters += sum(len(v) for row in batch for v in row if isinstance(v, str))
        if characters > opened.guards.most_characters:
            raise DatabaseError(
                f"database {opened.name}: {name} has more than {opened.guards.most_characters} "
                "characters; expected at most that of a file of others; ask for one of fewer rows"
            )
        keys = _digits(opened, name, columns["key"])
        for key, row in zip(keys, batch, strict=True):
            _check_content(
                opened, name, key, dict(zip(COLUMNS[name], (key, *row[2:]), strict=True))
            )
            if row[0] in found or key in seen:
                raise _wrong(opened, name, key, f"id {row[0]} or the key is there twice", "it once")
            found[row[0]] = (key, *row[2:])
            seen.add(key)
    return found


def _check_content(opened: Foreign, name: str, key: str, row: dict[str, Any]) -> None:
    try:
        has_its_key = row_keys.row_key(name, row) == key
        kind = row_keys.ENTITIES.get(name) if has_its_key else None
        entity = row_keys.from_row(kind, row) if kind is not None else None
    except DatabaseError as error:
        found, expected = str(error).split("; ")[0], "what this lokakern reads"
        raise _wrong(opened, name, key, found, expected) from None
    if not has_its_key:
        raise _wrong(opened, name, key, "it does not have the key of its content", "that")
    if isinstance(entity, Problem):
        reason = _why_no_problem(entity)
        if reason is not None:
            raise _wrong(opened, name, key, reason, "a problem of an op of this lokakern")
    if isinstance(entity, DistributionRow) and not _is_canonical(entity.parameters):
        found = f"parameters is {_brief(entity.parameters)}"
        raise _wrong(opened, name, key, found, "a JSON object, canonical")
    if isinstance(entity, KernelRow):
        strange = [module for module in entity.modules if not MODULE.fullmatch(module)]
        if strange:
            raise _wrong(opened, name, key, f"modules has {_brief(strange[0])}",
                         "names of files in kernels/, python:... or package:...")  # fmt: skip


def _why_no_problem(problem: Problem) -> str | None:
    """The reason why a problem is invalid, or None."""
    if problem.op not in OPS:
        return f"op is {problem.op!r}"
    multiplies = len(OPS[problem.op].axes) == 3
    if (problem.b is not None) is not multiplies:
        return f"b of {problem.op} is {problem.b}"
    if problem.m < 0 or min(problem.n, problem.k, problem.batch) < 1:
        return f"sizes are m={problem.m} n={problem.n} k={problem.k} batch={problem.batch}"
    if problem.op in EPILOGUE_OPS:
        try:
            length = problem.n if multiplies else problem.k
            norm_form(problem.epilogue).norm.span(length)
        except LokakernError as error:
            return f"epilogue is {problem.epilogue!r} ({error})"
    return None


def _is_canonical(parameters: str) -> bool:
    try:
        found = json.loads(parameters)
        return isinstance(found, dict) and canonical_json(found) == parameters
    except (ValueError, RecursionError, DatabaseError):
        return False


def _facts(
    opened: Foreign,
    name: str,
    rules: Mapping[str, Rule],
    keys: Mapping[str, Mapping[int, str]],
    used: Mapping[str, set[int]],
    bounds: _Bounds,
) -> int:
    """Check a table of facts.

    Returns:
        How many rows it has.
    """
    count, last = 0, ""
    for batch in _batches(opened, name):
        columns: dict[str, Sequence[Any]] = dict(
            zip(COLUMNS[name], zip(*batch, strict=True), strict=True)
        )
        _check_columns(opened, name, columns, rules)
        given = dict(columns)
        present = _digits(opened, name, columns["key"])
        for table in REFERENCES[name].values():
            strangers = set(columns[table]) - keys[table].keys()
            if strangers:
                place = next(i for i, v in enumerate(columns[table]) if v in strangers)
                raise _wrong(opened, name, columns["key"][place],
                             f"it refers to {table} {columns[table][place]}, which is not there",
                             f"an id of table {table}")  # fmt: skip
            used[table].update(columns[table])
            columns[table] = [keys[table][number] for number in columns[table]]
        bounds.check(name, given)
        expected = row_keys.fact_keys(name, columns)
        if present != expected:
            place = next(i for i, pair in enumerate(zip(present, expected, strict=True))
                         if pair[0] != pair[1])  # fmt: skip
            raise _wrong(opened, name, columns["key"][place],
                         "it does not have the key of its content", expected[place])  # fmt: skip
        _check_order(opened, name, last, present)
        last = present[-1]
        count += len(batch)
        # Keys are hashes, in order: how far the last one is, is how much has been seen.
        tell(f"checking {name}", int(last[:8], 16) / 16**8)
    tell(f"checking {name}", 1)
    return count


class _Bounds:
    """Physical bounds of facts, see `plausibility`."""

    def __init__(self, opened: Foreign, dimensions: Mapping[str, Mapping[int, tuple[Any, ...]]]):
        self._opened, self._dimensions = opened, dimensions
        self.problem = functools.cache(self._problem)
        self._least_us = functools.cache(self._find_least_us)
        self._least_error = functools.cache(self._find_least_error)

    def check(self, name: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Refuse rows, by column, that cannot have been measured."""
        if name == "timing":
            self._check_times(columns)
        if name == "accuracy":
            self._check_errors(columns)
        if name == "host_cost":
            self._check_host_costs(columns)

    def _row(self, table: str, number: int) -> dict[str, Any]:
        return dict(zip(COLUMNS[table], self._dimensions[table][number], strict=True))

    def _problem(self, number: int) -> Problem:
        return row_keys.from_row(Problem, self._row("problem", number))

    def _find_least_us(self, problem: int, device: int, regime: str) -> float:
        found = row_keys.from_row(Device, self._row("device", device))
        return plausibility.least_us(self.problem(problem), found, regime)

    def _find_least_error(self, problem: int, distribution: int, kernel: int) -> float:
        quantizes = self._row("kernel", kernel)["granularity"] != Granularity.NONE
        name = self._row("distribution", distribution)["name"]
        return plausibility.least_error(self.problem(problem), name, quantizes)

    def _check_times(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """No time is shorter than the FLOPs and the bytes take."""
        wanted = ("problem", "device", "regime", "latency_us_p20", "key")
        for problem, device, regime, us, key in zip(*map(columns.get, wanted), strict=True):
            if us is not None and us < (least := self._least_us(problem, device, regime)):
                raise _wrong(self._opened, "timing", key, f"latency_us_p20 is {us:g}",
                             f"at least {least:.3g}, which {self.problem(problem)} takes on "
                             f"{self._row('device', device)['product']}")  # fmt: skip

    def _check_host_costs(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """No call costs the host less than a launch."""
        least = plausibility.LEAST_HOST_US
        for us, key in zip(columns["host_us_p20"], columns["key"], strict=True):
            if us < least:
                raise _wrong(self._opened, "host_cost", key, f"host_us_p20 is {us:g}",
                             f"at least {least:g}, which no launch undercuts")  # fmt: skip

    def _check_errors(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """No error is smaller than rounding leaves, nor its upper limit than the error."""
        places = zip(*map(columns.get, ("problem", "distribution", "kernel", "key")), strict=True)
        measured = zip(*map(columns.get, BOUNDED), strict=True)
        limits = zip(*(columns[f"{name}_upper"] for name in BOUNDED), strict=True)
        for (*place, key), errors, uppers in zip(places, measured, limits, strict=True):
            for name, error, upper in zip(BOUNDED, errors, uppers, strict=True):
                if error is None or upper is None:
                    continue
                if name != "mean_shift" and error < (least := self._least_error(*place)):
                    raise _wrong(self._opened, "accuracy", key, f"{name} is {error:g}",
                                 f"at least {least:.3g}, which rounding leaves")  # fmt: skip
                if upper < abs(error):
                    raise _wrong(self._opened, "accuracy", key, f"{name}_upper is {upper:g}",
                                 f"at least {name}, which is {error:g}")  # fmt: skip


def _check_order(opened: Foreign, name: str, last: str, keys: Iterable[str]) -> None:
    """Require ascending distinct keys, as merges and lookups do."""
    for key in keys:
        if key <= last:
            raise _wrong(opened, name, key, f"it comes after {last}", "keys in order, each once")
        last = key


def _check_constraints(opened: Foreign, name: str) -> None:
    """Check CHECK constraints of rows whose types were checked."""
    checks = [f"({check})" for check in constraints_of(name)]
    if not checks:
        return
    found = opened.connection.execute(
        f'SELECT "key", {", ".join(checks)} FROM {name} WHERE NOT ({" AND ".join(checks)}) LIMIT 1'
    ).fetchall()
    for key, *holds in found:
        raise _wrong(opened, name, key, "it breaks a constraint", checks[holds.index(0)][1:-1])
