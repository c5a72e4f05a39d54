"""What the values of each column must be: types from `tables.py`, and ranges."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import CheckConstraint, Double, Integer

from lokakern.formats import Granularity
from lokakern.registry.schema.records import HOST_PATHS, HOST_REGIMES
from lokakern.registry.schema.tables import TABLES, TEST_STATUSES
from lokakern.registry.sqlite_file import GRADES, STATUSES
from lokakern.types import REGIMES

EARLIEST_UTC_MS = 1_577_836_800_000  # 2020-01-01: before there was FP8
# Clocks may be ahead, ours too: a database must not be refused when its clock was put right.
LATEST_AHEAD_MS = 10 * 365 * 24 * 3600 * 1000
_BIGGEST = 2**53  # whole numbers that JSON and doubles hold
MOST = {
    **dict.fromkeys(("m", "n", "k", "batch", "rows"), 2**48),
    **dict.fromkeys(("compute_units", "memory_gib"), 10**6),
    **dict.fromkeys(("latency_us_p20", "latency_us_p50", "latency_us_p80"), 1e12),  # 12 days
    "clock_mhz": 1e5,
    **dict.fromkeys(("host_us_p20", "host_us_p50", "host_us_p80"), 1e5),  # 0.1 s a call
}
LONGEST = {  # characters; of other texts LONGEST_NAME
    "reason": 500,  # as the writer cuts them
    **dict.fromkeys(("command", "parameters", "modules"), 65_536),
}
LONGEST_NAME = 1_000
WORDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("run", "grade"): GRADES,
    ("timing", "status"): STATUSES,
    ("accuracy", "status"): STATUSES,
    ("test_result", "status"): TEST_STATUSES,
    ("timing", "regime"): REGIMES,
    ("host_cost", "regime"): HOST_REGIMES,
    ("host_cost", "path"): HOST_PATHS,
    ("kernel", "granularity"): tuple(Granularity),
    ("kernel", "b_granularity"): tuple(Granularity),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """What the values of a column must be.

    Attributes:
        kind: int, float, str, or bytes.
        nullable: Whether NULL ("not measured") is one.
        least: The least number.
        most: The largest.
        finite: Whether infinity is none.
        longest: Characters of a text.
        words: All texts, where they are known.
    """

    kind: type
    nullable: bool
    least: float = -math.inf
    most: float = math.inf
    finite: bool = False
    longest: int = 0
    words: frozenset[str] = frozenset()

    def __str__(self) -> str:
        names = {int: "a whole number", float: "a number", str: "text", bytes: "bytes"}
        found = names[self.kind]
        if self.words:
            found = f"one of {', '.join(sorted(self.words))}"
        elif self.kind is str:
            found += f" of at most {self.longest} printable characters"
        if not math.isinf(self.least):
            found += f" from {self.least:.17g} to {self.most:.17g}"
        elif not math.isinf(self.most):
            found += f" of at most {self.most:.17g}, finite"
        elif self.finite:
            found += ", finite"
        return found + (" or NULL" if self.nullable else "")

    def breach(self, values: Sequence[Any]) -> int | None:
        """The place of the first invalid value, if there is one."""
        kinds = set(map(type, values))
        if self.nullable:
            kinds.discard(type(None))
        if kinds <= {self.kind}:
            if self.kind is str:
                values_seen: Sequence[Any] = list(set(values) - {None})
            elif self.nullable:
                values_seen = [value for value in values if value is not None]
            else:
                values_seen = values
            if self._holds(values_seen):
                return None
        return next((i for i, value in enumerate(values) if not self._is(value)), None)

    def _is(self, value: Any) -> bool:
        if value is None:
            return self.nullable
        return type(value) is self.kind and self._holds([value])

    def _holds(self, values: Sequence[Any]) -> bool:
        if not values:
            return True
        if self.kind is str:
            if self.words:
                return self.words.issuperset(values)
            return max(map(len, values)) <= self.longest and all(map(str.isprintable, values))
        if self.kind is bytes:
            return True
        # SQLite hands out no NaN: it is NULL.
        if math.isinf(self.least) and math.isinf(self.most) and not self.finite:
            return True
        least, most = min(values), max(values)
        return self.least <= least and most <= self.most and not (
            self.finite and (math.isinf(least) or math.isinf(most))
        )  # fmt: skip


def rules_of(table: str, now_ms: int) -> dict[str, Rule]:
    """The rule of each column of a table, but for its key and id."""
    rules = {}
    for column in TABLES[table].columns:
        name, nullable = column.name, bool(column.nullable)
        if name in ("key", "id"):
            continue
        if column.foreign_keys:
            rules[name] = Rule(int, False)
        elif name.endswith("_utc_ms"):
            rules[name] = Rule(int, nullable, EARLIEST_UTC_MS, now_ms + LATEST_AHEAD_MS)
        elif isinstance(column.type, Double):
            finite = name.startswith(("latency_", "clock_", "host_"))  # errors may be infinite
            rules[name] = Rule(float, nullable, most=MOST.get(name, math.inf), finite=finite)
        elif isinstance(column.type, Integer):
            most = MOST.get(name, _BIGGEST)
            rules[name] = Rule(int, nullable, -most if name == "seed" else 0, most)
        else:
            words = frozenset(WORDS.get((table, name), ()))
            rules[name] = Rule(str, nullable, longest=LONGEST.get(name, LONGEST_NAME), words=words)
    return rules


@functools.cache
def constraints_of(table: str) -> tuple[str, ...]:
    """CHECK constraints of the models, as SQL; the database's own, never a file's."""
    checks = (c for c in TABLES[table].constraints if isinstance(c, CheckConstraint))
    found = [str(check.sqltext) for check in checks]
    return tuple(sorted(check for check in found if not check.startswith("length(key)")))
