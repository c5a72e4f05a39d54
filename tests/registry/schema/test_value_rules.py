"""Limits of the values of each database column: the last accepted, the first refused."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lokakern.registry.schema.tables import TABLES
from lokakern.registry.schema.value_rules import Rule, rules_of

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def ms(when: datetime) -> int:
    return round(when.timestamp() * 1000)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (Rule(int, False), [0, -7, 2**60], [None, 1.0, "1", True]),
        (Rule(int, True, 0, 5), [0, 5, None], [-1, 6]),
        (Rule(float, True), [0.5, -1e300, math.inf, -math.inf, None], [1, "0.5"]),
        (Rule(float, False, most=4.0), [4.0, -math.inf], [4.5, math.inf, None]),
        (Rule(float, False, finite=True), [-1e308, 1e308], [math.inf, -math.inf]),
        (Rule(str, False, longest=3), ["", "abc", "äöü"], ["abcd", "a\n", b"abc", None]),
        (Rule(str, True, longest=3), ["abc", None], ["abcd"]),
        (Rule(str, False, words=frozenset({"ok", "wrong"})), ["ok", "wrong"], ["", "okay", None]),
        (Rule(bytes, False), [b"", b"\0\xff"], ["", None]),
    ],
    ids=str,
)
def test_a_rule_names_the_first_value_that_breaks_it(
    rule: Rule, good: list[Any], bad: list[Any]
) -> None:
    assert rule.breach([]) is None
    assert rule.breach(good) is None and rule.breach(good * 3) is None
    for value in bad:
        assert rule.breach([value]) == 0
        assert rule.breach([*good, value, *bad]) == len(good)


@pytest.mark.parametrize(
    ("table", "column", "good", "bad"),
    [
        ("timing", "measured_utc_ms", ms(datetime(2020, 1, 1, tzinfo=UTC)),
         ms(datetime(2019, 12, 31, 23, tzinfo=UTC))),
        ("timing", "measured_utc_ms", ms(NOW + 3650 * DAY), ms(NOW + 3650 * DAY + HOUR)),
        ("run", "started_utc_ms", ms(NOW), None),
        ("timing", "latency_us_p50", 1e12, 2e12),
        ("timing", "latency_us_p50", None, math.inf),
        ("timing", "clock_mhz", 1e5, 1.1e5),
        ("timing", "replay_count", 0, -1),
        ("accuracy", "row_err_upper", math.inf, 1),
        ("accuracy", "seed", -(2**53), -(2**53) - 1),
        ("accuracy", "seed", 2**53, 2**53 + 1),
        ("problem", "m", 2**48, 2**48 + 1),
        ("problem", "k", 0, -1),
        ("device", "compute_units", 10**6, 10**6 + 1),
        ("timing", "status", "out_of_memory", "slow"),
        ("timing", "regime", "graph-cold", "lukewarm"),
        ("run", "grade", "full", "best"),
        ("kernel", "granularity", "1x128", "2x128"),
        ("timing", "reason", "r" * 500, "r" * 501),
        ("run", "command", "c" * 65_536, "c" * 65_537),
        ("kernel", "name", "n" * 1000, "n" * 1001),
        ("timing", "kernel", 1, "1"),
    ],
)  # fmt: skip
def test_column_rules_accept_limits_and_refuse_larger_values(
    table: str, column: str, good: Any, bad: Any
) -> None:
    rule = rules_of(table, ms(NOW))[column]
    assert rule.breach([good]) is None
    assert rule.breach([bad]) == 0


def test_every_column_except_keys_has_a_rule_with_a_description() -> None:
    for name, table in TABLES.items():
        columns = {column.name for column in table.columns} - {"key", "id"}
        rules = rules_of(name, ms(NOW))
        assert rules.keys() == columns and columns
    assert str(rules_of("timing", 0)["regime"]) == "one of eager, graph-cold, graph-hot"
    assert str(rules_of("problem", 0)["m"]) == "a whole number from 0 to 281474976710656"
    reason = str(rules_of("timing", 0)["reason"])
    assert reason.startswith("text of at most 500 printable characters")
    latency = str(rules_of("timing", 0)["latency_us_p50"])
    assert latency == "a number of at most 1000000000000, finite or NULL"
