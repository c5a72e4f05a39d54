"""Differences beyond noise between two databases, GPUs or spans of time, cell by cell.

A cell is a kernel by name, a problem and a distribution; for times also a regime and, unless two
GPUs are compared, the GPU. The newest source of a kernel counts, with the rows of its best grade:
for times the median over runs, for errors the largest bound at the seeds that both sides have.
Other seeds are other operands: their errors differ by up to 1.5 times without any change. Where one
side has all rows of the other, as a merged file has those of its parts, nothing changed: the cell
is compared at the rows that both have.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from lokakern.progress import tell
from lokakern.registry.schema import row_keys
from lokakern.registry.schema.tables import COLUMNS
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.storage.reader import Rows
from lokakern.selection.candidates import LIMIT_COLUMNS
from lokakern.selection.ties import margin_us, within_noise
from lokakern.types import Device, Problem

# Errors of one seed within 1 % are equal: libraries may choose other kernels, with other sums.
ERROR_NOISE = 0.01
LIMITS = tuple(limit for limit in LIMIT_COLUMNS if limit != "sqnr_db")  # which is rel_err in dB
WORSE = ("slower", "less accurate", "fails")
MOST_NAMED = 3  # different rows in a message
NOT_COMPARED = ("other seeds", "only in A", "only in B")
VERDICTS = (*WORSE, "faster", "more accurate", "works", *NOT_COMPARED, "same")


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the comparison."""

    rows: Rows  # the rows of a database
    device: Device | None = None  # compare only rows of this GPU; None means all
    since_ms: float = -math.inf  # compare only rows measured from then on, UTC milliseconds
    until_ms: float = math.inf  # compare only rows measured before


@dataclass(frozen=True, slots=True)
class Found:
    """A cell of one side; ``value`` is NaN where the status is not "ok"."""

    status: str
    digest: str
    rows: frozenset[tuple[Any, ...]]
    value: float = math.nan
    p20: float = math.nan
    p80: float = math.nan
    margin: float = 0.0
    by_seed: Mapping[int, float] = field(default_factory=dict)  # of errors

    def at_seeds(self, seeds: Iterable[int]) -> Found:
        """The largest error of some seeds that it has."""
        errors = {seed: self.by_seed[seed] for seed in sorted(seeds)}
        return replace(self, value=max(errors.values()), by_seed=errors)


@dataclass(frozen=True, slots=True)
class Difference:
    """A cell of both sides, or of one."""

    verdict: str  # one of `VERDICTS`
    what: str  # "time_us", or the name of an error
    # Kernel, problem's key, distribution's key, regime ("" for errors), and device's key or
    # architecture ("" where two are compared).
    cell: tuple[str, ...]
    a: Found | None  # the cell of the first side
    b: Found | None  # the cell of the second side

    @property
    def effect(self) -> float | None:
        """The second value over the first; None if they are not compared or it is not finite."""
        if self.verdict in NOT_COMPARED or self.a is None or self.b is None or not self.a.value > 0:
            return None
        ratio = self.b.value / self.a.value
        return ratio if math.isfinite(ratio) else None

    @property
    def _order(self) -> tuple[Any, ...]:
        effect = self.effect
        size = abs(math.log(effect)) if effect else math.inf
        return (self.verdict in VERDICTS[-4:], self.verdict == "same", -size, self.what, self.cell)


def differences(a: Side, b: Side, *, limit: str = "row_err") -> list[Difference]:
    """Every cell of two sides, the largest effect first; cells of only one side come last.

    The errors compared are those of ``limit``, one of `LIMITS`.
    """
    across = a.device is not None and b.device is not None and a.device != b.device
    found = []
    for share, what in ((0.0, "time_us"), (0.5, limit)):
        sides: list[dict[tuple[str, ...], Found]] = []
        for side in (a, b):
            tell("comparing", share + 0.25 * len(sides))
            sides.append(_found(side, what, across))
        for cell in sides[0].keys() | sides[1].keys():
            one, other = sides[0].get(cell), sides[1].get(cell)
            if one and other and (one.rows <= other.rows or other.rows <= one.rows):
                one = other = min(one, other, key=lambda found: len(found.rows))
            if one and other and (seeds := one.by_seed.keys() & other.by_seed.keys()):
                one, other = one.at_seeds(seeds), other.at_seeds(seeds)
            found.append(Difference(_verdict(what, one, other), what, cell, one, other))
    tell("comparing", 1)
    return sorted(found, key=lambda difference: difference._order)


def _verdict(what: str, a: Found | None, b: Found | None) -> str:
    if a is None or b is None:
        return "only in B" if a is None else "only in A"
    if a.status != "ok" or b.status != "ok":
        if b.status == "ok":
            return "works"
        worse = "less accurate" if b.status == "wrong" else "fails"
        return "same" if a.status == b.status else worse
    if what != "time_us":
        if a.by_seed.keys() != b.by_seed.keys():
            return "other seeds"
        least = min(a.value, b.value)
        if a.value == b.value or abs(a.value - b.value) <= ERROR_NOISE * least:
            return "same"
        return "less accurate" if b.value > a.value else "more accurate"
    if within_noise(a.value, a.margin, b.value, b.margin):
        return "same"
    return "slower" if b.value > a.value else "faster"


def _cells(
    side: Side, table: str, columns: Sequence[str], where: str, across: bool
) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Rows of a side by cell, of the newest source of each kernel."""
    wanted = ("kernel", "run", "problem", "distribution", "status", "measured_utc_ms", where)
    names = tuple(dict.fromkeys((*wanted, *columns)))
    pick = itemgetter(*(COLUMNS[table].index(name) for name in names))
    kernels = _named(side.rows, "kernel", ("name", "digest"))
    grades = _named(side.rows, "run", ("grade",))
    only = None
    if side.device is not None:
        device = side.device
        only = row_keys.key_of(device) if where == "device" else device.architecture
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for whole in side.rows[table]:
        row = dict(zip(names, pick(whole), strict=True)) | {"row": whole}
        here = only is None or row[where] == only
        if not here or not side.since_ms <= row["measured_utc_ms"] < side.until_ms:
            continue
        name, row["digest"] = kernels[row["kernel"]]
        (row["grade"],) = grades[row["run"]]
        place = "" if across else row[where]
        regime = row.get("regime", "")
        cells.setdefault((name, row["problem"], row["distribution"], regime, place), []).append(row)
    return {cell: _newest(rows) for cell, rows in cells.items()}


def _named(rows: Rows, table: str, columns: Iterable[str]) -> dict[str, tuple[str, ...]]:
    places = [COLUMNS[table].index(column) for column in columns]
    return {row[0]: tuple(row[place] for place in places) for row in rows[table]}


def _newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the newest source; of the good ones those of the best grade."""
    digest = max(rows, key=lambda row: (row["measured_utc_ms"], row["digest"]))["digest"]
    rows = [row for row in rows if row["digest"] == digest]
    good = [row for row in rows if row["status"] == "ok"]
    if not good or any(row["status"] == "wrong" for row in rows):
        return [row for row in rows if row["status"] != "ok"]
    return [row for row in good if row["grade"] == "full"] or good


def _found(side: Side, what: str, across: bool) -> dict[tuple[str, ...], Found]:
    """Times or errors of a side, by cell."""
    if what == "time_us":
        columns = ("regime", "replay_count", "latency_us_p20", "latency_us_p50", "latency_us_p80")
        cells = _cells(side, "timing", columns, "device", across)
    else:
        column = LIMIT_COLUMNS[what]
        cells = _cells(side, "accuracy", ("seed", column), "architecture", across)
    found = {}
    for cell, rows in cells.items():
        digest, of_cell = rows[0]["digest"], frozenset(row["row"] for row in rows)
        if rows[0]["status"] != "ok":
            last = max(rows, key=lambda row: (row["status"] == "wrong", row["measured_utc_ms"]))
            found[cell] = Found(last["status"], last["digest"], of_cell)
        elif what == "time_us":
            found[cell] = _time(rows, digest, of_cell)
        else:
            errors: dict[int, float] = {}
            for row in rows:
                errors[row["seed"]] = max(row[column], errors.get(row["seed"], 0.0))
            found[cell] = Found("ok", digest, of_cell, by_seed=errors).at_seeds(errors)
    return found


def _time(rows: list[dict[str, Any]], digest: str, of_cell: frozenset[tuple[Any, ...]]) -> Found:
    by_run: dict[str, list[float]] = {}
    for row in rows:
        by_run.setdefault(row["run"], []).append(row["latency_us_p50"])
    spreads = [(row["latency_us_p20"], row["latency_us_p80"], row["replay_count"]) for row in rows]
    return Found(
        "ok",
        digest,
        of_cell,
        statistics.median(map(statistics.median, by_run.values())),
        min(p20 for p20, _, _ in spreads),
        max(p80 for _, p80, _ in spreads),
        max(margin_us(*spread) for spread in spreads),
    )


@dataclass(frozen=True, slots=True)
class EditedRow:
    """A measurement of one key whose values differ."""

    table: str
    key: str  # hex digits
    columns: Mapping[str, tuple[Any, Any]]  # what differs, with the values of the two databases

    def __str__(self) -> str:
        values = (f"{name} {a!r} and {b!r}" for name, (a, b) in self.columns.items())
        return f"{self.table} row {self.key}: {', '.join(values)}"


@dataclass(frozen=True, slots=True)
class Shared:
    """What two databases have in common.

    Attributes:
        runs: Number of runs of both.
        rows: Number of measurements of equal keys.
        different: Those of them with other values: one of the databases was edited or damaged.
        only: Numbers of measurements that only the first and only the second have.
        of_shared_runs: Whether any of these is of a run of both, so that rows were left out.
        of_other_runs: Whether any of these is of another run.
    """

    runs: int
    rows: int
    different: tuple[EditedRow, ...]
    only: tuple[int, int]
    of_shared_runs: bool
    of_other_runs: bool

    def __str__(self) -> str:
        count = len(self.different)
        how = f", {count or 'none'} of them different" if self.rows else ""
        words = (f"A and B share {self.runs} runs and {self.rows} rows{how}; "
                 f"only in A: {self.only[0]} rows, only in B: {self.only[1]}")  # fmt: skip
        if count:
            named = [f"  {row}" for row in self.different[:MOST_NAMED]]
            if count > MOST_NAMED:
                named.append(f"  and {count - MOST_NAMED} more: --json has all")
            words = "\n".join(
                [words, "a row never changes: one of the files was edited or damaged", *named]
            )
        if not all(self.only):
            return words
        if not self.of_other_runs:
            why = "of the runs of both, each file has a part"
        else:
            why = "of other runs" + ", and of parts of the same ones" * self.of_shared_runs
        return f"{words}\ncells compare these other rows, too, which vary without an edit: {why}"

    def facts(self) -> dict[str, Any]:
        """The counts, and the different rows, as JSON has them."""
        return {
            "shared": {
                "runs": self.runs,
                "rows": self.rows,
                "different": len(self.different),
                "only_in_a": self.only[0],
                "only_in_b": self.only[1],
            },
            "different": [
                {
                    "table": row.table,
                    "key": row.key,
                    "columns": {
                        name: {"a": _finite(a), "b": _finite(b)}
                        for name, (a, b) in row.columns.items()
                    },
                }
                for row in self.different
            ],
        }


def shared_by(a: Rows, b: Rows) -> Shared:
    """Compare the keys of two databases, and the rows of equal ones."""
    runs = {row[0] for row in a["run"]} & {row[0] for row in b["run"]}
    one, other = ({row[0]: row for name in FACTS for row in rows[name]} for rows in (a, b))
    different = [
        EditedRow(name, key, {
            column: (mine, its)
            for column, mine, its in zip(COLUMNS[name], row, other[key], strict=True)
            if mine != its
        })
        for name in FACTS for key, *_ in a[name]
        if key in other and (row := one[key]) != other[key]
    ]  # fmt: skip
    both = one.keys() & other.keys()
    is_shared = {
        row[COLUMNS[name].index("run")] in runs
        for rows in (a, b) for name in FACTS for row in rows[name] if row[0] not in both
    }  # fmt: skip
    return Shared(
        len(runs), len(both), tuple(different),
        (len(one) - len(both), len(other) - len(both)), True in is_shared, False in is_shared,
    )  # fmt: skip


def counts_of(found: Iterable[Difference]) -> dict[str, int]:
    """Number of cells of each verdict, in the order of `VERDICTS`."""
    counts = Counter(difference.verdict for difference in found)
    return {verdict: counts[verdict] for verdict in VERDICTS}


def rows_of(found: Iterable[Difference], a: Side, b: Side, *, brief: bool) -> list[dict[str, Any]]:
    """Differences as rows to print; brief ones have only the columns of a table."""
    problems: dict[str, str] = {}
    names: dict[str, str] = {}
    for side in (a, b):
        for row in side.rows["problem"]:
            if row[0] not in problems:
                values = dict(zip(COLUMNS["problem"], row, strict=True))
                problems[row[0]] = str(row_keys.from_row(Problem, values))
        for table, column in (("distribution", "name"), ("device", "product")):
            names |= {key: name for key, (name,) in _named(side.rows, table, (column,)).items()}
    return [_row(difference, problems, names, brief) for difference in found]


def _row(
    found: Difference, problems: Mapping[str, str], names: Mapping[str, str], brief: bool
) -> dict[str, Any]:
    kernel, problem, distribution, regime, place = found.cell
    a, b = found.a, found.b
    row: dict[str, Any] = {
        "verdict": found.verdict,
        "b_over_a": found.effect,
        "what": found.what,
        "a": _shown(a),
        "b": _shown(b),
        "kernel": kernel,
        "problem": problems[problem],
        "distribution": names[distribution],
        "regime": regime or "-",
    }
    if brief:
        del row["what"]  # that of the whole table
        row["b_over_a"] = "-" if found.effect is None else f"{found.effect:.3f}"
        return row
    spreads: dict[str, float | str | None] = {}
    for name, side in (("a", a), ("b", b)):
        timed = side is not None and found.what == "time_us" and side.status == "ok"
        for quantile in ("p20", "p80", "margin"):
            spreads[f"{name}_{quantile}"] = getattr(side, quantile) if timed else None
        seeds = side.by_seed if side is not None else ()
        spreads[f"{name}_seeds"] = ", ".join(map(str, seeds)) or None
    changed = a is not None and b is not None and a.digest != b.digest
    return row | {"where": names.get(place, place) or "-", **spreads, "kernel_changed": changed}


def _shown(found: Found | None) -> Any:
    if found is None:
        return "-"
    if found.status != "ok":
        return found.status
    return _finite(found.value)


def _finite(value: Any) -> Any:
    """A value that JSON has."""
    return "infinite" if value == math.inf else value
