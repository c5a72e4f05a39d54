"""What one database holds by itself, without the shipped files: runs, and rows by how they ended.

Every row is counted, in every regime and also of errors at problems that were not timed. Freshness
is that of dispatch (`lokakern.selection.candidates.freshness_of`).
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from lokakern.device import devices_here
from lokakern.progress import tell
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.schema.tables import COLUMNS
from lokakern.registry.snapshot.cells import TimingHead
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.storage.reader import Rows
from lokakern.selection.candidates import FEWEST_SEEDS, FRESHNESS, freshness_of
from lokakern.selection.ties import UNSTEADY, is_unsteady
from lokakern.types import REALISTIC_DISTRIBUTIONS

Row = dict[str, Any]
WORDS = {"timing": "times", "accuracy": "errors", "test_result": "tests"}  # facts that have an end


@dataclass(frozen=True)
class Contents:
    """Tables of rows with equal columns.

    Attributes:
        facts: Devices, environments, and numbers of rows, as what and value.
        runs: Every run by date, with its numbers of rows.
        parts: Rows of an op on a device (errors and tests: an architecture), in a regime.
        failures: Rows that are not ok, by kernel and status, with the worst reason; wrong ones
            first.
    """

    facts: list[Row]
    runs: list[Row]
    parts: list[Row]
    failures: list[Row]


@dataclass
class _Part:
    statuses: Counter[str] = field(default_factory=Counter)
    words: Counter[str] = field(default_factory=Counter)
    problems: set[str] = field(default_factory=set)
    kernels: set[str] = field(default_factory=set)
    seeds: set[int] = field(default_factory=set)
    newest_utc_ms: int = 0


def contents_of(rows: Rows) -> Contents:
    """The contents of a database, whose rows `lokakern.registry.storage.reader` gives."""
    tables = {name: {row["key"]: row for row in _named(rows, name)} for name in COLUMNS}
    counted = {name: Counter(row[1] for row in rows[name]) for name in FACTS}  # by run
    parts: defaultdict[tuple[str, ...], _Part] = defaultdict(_Part)
    failures: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    not_ok: Counter[str] = Counter()
    where_run: defaultdict[str, set[str]] = defaultdict(set)
    torch_of: defaultdict[str, set[str]] = defaultdict(set)
    word_of = _freshness(rows)
    for share, (name, what) in enumerate(WORDS.items()):
        tell("counting rows", share / len(WORDS))
        for row in tables[name].values():
            kernel = tables["kernel"][row["kernel"]]
            device = tables["device"].get(row.get("device", ""))
            where = device["product"] if device else row["architecture"]
            where_run[row["run"]].add(where)
            torch_of[row["run"]].add(tables["environment"][row["environment"]]["torch"])
            part = parts[what, kernel["op"], where, row.get("regime", "")]
            part.statuses[row["status"]] += 1
            here = row["device"] if device else row["architecture"]
            part.words[word_of(row["kernel"], row["environment"], here)] += 1
            part.problems |= {row["problem"]} if "problem" in row else set()
            part.seeds |= {row["seed"]} if "seed" in row else set()
            part.kernels.add(kernel["name"])
            part.newest_utc_ms = max(part.newest_utc_ms, row["measured_utc_ms"])
            if row["status"] != "ok":
                not_ok[row["run"]] += 1
                place = row["status"], what, kernel["name"], where
                failures[place].append(row["reason"])
    for row in tables["host_cost"].values():
        where_run[row["run"]].add(tables["device"][row["device"]]["product"])
        torch_of[row["run"]].add(tables["environment"][row["environment"]]["torch"])
    tell("counting rows", 1)
    return Contents(
        facts=[*_facts(tables, parts), *_completeness(tables, word_of), *_steadiness(tables)],
        runs=[
            {
                "started (UTC)": _time(run["started_utc_ms"]),
                "suite": run["suite"],
                "grade": run["grade"],
                "where": ", ".join(sorted(where_run[key])) or "-",
                "torch": ", ".join(sorted(torch_of[key])) or "-",
                **{what: counted[name][key] for name, what in WORDS.items()},
                "host costs": counted["host_cost"][key],
                "not ok": not_ok[key],
                "command": run["command"],
            }
            for key, run in sorted(tables["run"].items(), key=lambda x: x[1]["started_utc_ms"])
        ],
        parts=[_part(place, parts[place]) for place in sorted(parts)],
        failures=[
            {"status": status, "of": what, "kernel": kernel, "where": where, "rows": len(reasons),
             "reason": min(reasons, key=lambda reason: (-_excess(reason), reason))}
            for (status, what, kernel, where), reasons in sorted(
                failures.items(), key=lambda item: (item[0][0] != "wrong", item[0])
            )
        ],
    )  # fmt: skip


def _excess(reason: str) -> float:
    """The number of a reason such as "kernel_err 20.5 > 16"; 0 if it has none."""
    found = re.search(r"([0-9.]+(?:e[+-]?[0-9]+)?|inf|nan) > ", reason)
    try:
        value = float(found[1]) if found else 0.0
    except ValueError:  # of a file of others
        value = 0.0
    return math.inf if math.isnan(value) else value


def _named(rows: Rows, table: str) -> Iterator[Row]:
    return (dict(zip(COLUMNS[table], row, strict=True)) for row in rows[table])


def _freshness(rows: Rows) -> Callable[[str, str, str], str]:
    """What gives the freshness of a row by its kernel, environment, and device or architecture."""
    facts = Snapshot(rows)
    kernels = {row["key"]: row_keys.from_row(KernelRow, row) for row in _named(rows, "kernel")}
    here = devices_here()
    local = {row_keys.key_of(device) for device in here} | {device.architecture for device in here}

    @functools.cache
    def word(kernel: str, environment: str, where: str) -> str:
        head = TimingHead(kernels[kernel], "", environment, "", 0, "")
        return freshness_of(head, where in local, facts)

    return word


def _facts(tables: dict[str, dict[str, Row]], parts: dict[tuple[str, ...], _Part]) -> Iterator[Row]:
    for device in tables["device"].values():
        name = f"device {device['product']}"
        yield {"what": name, "value": ", ".join(_words(device, ("key", "product")))}
    for number, environment in enumerate(tables["environment"].values(), 1):
        yield {"what": f"environment {number}", "value": ", ".join(_words(environment, ("key",)))}
    for name, what in WORDS.items():
        ended: Counter[str] = Counter()
        for place, part in parts.items():
            ended += part.statuses if place[0] == what else Counter()
        each = ", ".join(f"{count} {status}" for status, count in ended.most_common())
        yield {"what": what, "value": f"{len(tables[name])} rows: {each}" if each else "none"}
    costs = len(tables["host_cost"])
    yield {"what": "host costs", "value": f"{costs} rows" if costs else "none"}
    newest = max((part.newest_utc_ms for part in parts.values()), default=0)
    yield {"what": "last measured", "value": _time(newest) if newest else "never"}


def _completeness(
    tables: dict[str, dict[str, Row]], word_of: Callable[[str, str, str], str]
) -> Iterator[Row]:
    """For how many pairs of arithmetic and problem dispatch knows the error."""
    seeds: defaultdict[tuple[str, ...], defaultdict[str, set[int]]]
    seeds = defaultdict(lambda: defaultdict(set))
    for row in tables["accuracy"].values():
        kernel = tables["kernel"][row["kernel"]]
        arithmetic = (kernel[x] for x in ("op", "granularity", "b_granularity", "accumulation"))
        found = seeds[row["architecture"], row["problem"], *arithmetic]
        stale = word_of(row["kernel"], row["environment"], row["architecture"]) == "stale"
        if row["status"] == "ok" and not stale:
            found[tables["distribution"][row["distribution"]]["name"]].add(row["seed"])
    complete = sum(
        all(len(found[name]) >= FEWEST_SEEDS for name in REALISTIC_DISTRIBUTIONS)
        for found in seeds.values()
    )
    if seeds:
        each = f"{len(REALISTIC_DISTRIBUTIONS)} distributions, {FEWEST_SEEDS} seeds"
        words = f"{complete} of {len(seeds)} pairs of arithmetic and problem have all: {each}"
        yield {"what": "errors complete", "value": words}


def _steadiness(tables: dict[str, dict[str, Row]]) -> Iterator[Row]:
    times = [row for row in tables["timing"].values() if row["status"] == "ok"]
    unsteady = sum(is_unsteady(row["latency_us_p20"], row["latency_us_p80"]) for row in times)
    void = sum(bool(row["void_count"]) for row in times)
    if times:
        words = f"{unsteady} of {len(times)} vary by more than {UNSTEADY - 1:.0%} (p80/p20)"
        words += f"; {void} had void replays"
        yield {"what": "unsteady times", "value": words}


def _words(row: Row, left_out: tuple[str, ...]) -> list[str]:
    words = [f"{name.replace('_', ' ')} {value}" for name, value in row.items()
             if name not in left_out]  # fmt: skip
    return [word.replace(" gib ", " GiB ").replace(" cap w ", " cap W ") for word in words]


def _part(place: tuple[str, ...], part: _Part) -> Row:
    what, op, where, regime = place
    rows, ok, wrong = part.statuses.total(), part.statuses["ok"], part.statuses["wrong"]
    return {
        "of": what,
        "op": op,
        "where": where,
        "regime": regime or "-",
        "rows": rows,
        "ok": ok,
        "wrong": wrong,
        "failed": rows - ok - wrong,
        **{word: part.words[word] for word in FRESHNESS},
        "problems": len(part.problems),
        "kernels": len(part.kernels),
        "seeds": ", ".join(map(str, sorted(part.seeds))) or "-",
        "newest (UTC)": _time(part.newest_utc_ms),
    }


def _time(utc_ms: int) -> str:
    return f"{datetime.fromtimestamp(utc_ms / 1000, UTC):%Y-%m-%d %H:%M}"
