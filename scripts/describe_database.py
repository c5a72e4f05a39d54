"""Write registry/README.md from the models: tables, columns, units, constraints, manifests.

    python scripts/describe_database.py

A test fails while the file is another one.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Double, Integer, Table

from lokakern.registry.files import FACTS, SCHEMA_VERSION
from lokakern.registry.identity import FACT_IDENTITY
from lokakern.registry.manifest import ENDING, FIELDS
from lokakern.registry.reader import READERS
from lokakern.registry.rules import constraints_of, rules_of
from lokakern.registry.tables import COLUMNS, TABLES, Base, Key

PLACE = Path(__file__).resolve().parent.parent / "registry" / "README.md"
UNITS = {
    "_us": "us", "_utc_ms": "ms since 1970, UTC", "_mhz": "MHz", "_gib": "GiB", "_w": "W",
    "_db": "dB", "_share": "share, 0 to 1",
}  # fmt: skip
SAYS = {
    "key": "SHA-256 of the row's identity, 32 bytes (of a run: its UUID, 16 bytes)",
    "id": "number in this file only, never part of an identity",
    "vendor": "nvidia, amd or cpu", "product": "name of the GPU type",
    "architecture": "such as sm_90 or gfx942", "compute_units": "multiprocessors",
    "memory_gib": "memory", "partition": "MIG or compute partition; none",
    "driver": "version", "toolkit": "version of CUDA or ROCm", "torch": "version",
    "triton": "version", "libraries": "other versions that decide what a kernel becomes",
    "power_cap_w": "power limit, as text", "name": "as registered",
    "language": "what it is written in, or whose library it calls",
    "modules": "its files, and versions of packages, separated by commas",
    "digest": "SHA-256 of its source", "accumulation": "how sums are added up",
    "granularity": "scales of a", "b_granularity": "scales of b", "op": "what is computed",
    "m": "rows of a", "n": "columns of b", "k": "columns of a", "batch": "products at once",
    "a": "format, scales, layout and alignment of a", "b": "those of b; none",
    "prepared": "whether b was quantized ahead", "epilogue": "what comes after the product",
    "out_format": "format of the output", "out_granularity": "scales of the output",
    "out_strided": "whether the output is a slice", "accumulate": "whether it is added to",
    "parameters": "canonical JSON", "realistic": "whether errors are judged on it by default",
    "started_utc_ms": "when the process began", "harness_digest": "of the measuring code",
    "command": "how to do it again", "grade": "`quick` counts only where nothing is `full`",
    "run": "who measured", "kernel": "what was measured", "problem": "at which problem",
    "distribution": "of which values", "device": "on which GPU type",
    "environment": "under which software", "regime": "graph-cold, graph-hot or eager",
    "status": "how it ended", "reason": "why not `ok`; empty where it is",
    "latency_us_p20": "time of a call, 20th percentile", "latency_us_p50": "median",
    "latency_us_p80": "80th percentile", "replay_count": "measurements that count",
    "void_count": "measurements that do not, for the clock was low",
    "calls_per_replay": "calls in each", "clock_mhz": "median clock; NULL where none is readable",
    "kernel_err": "largest error against the exact product of what was given, in roundings",
    "kernel_err_row_p99": "its 99th percentile over rows", "timer": "what was read",
    "operand_digest": "of the values", "measured_utc_ms": "when", "seed": "of the values",
    "rows": "rows compared", "row_err": "root mean square over rows of min(e, 1), e a row's "
    "relative error", "row_p50": "median of e", "row_p99": "99th percentile of e",
    "row_max": "largest e", "rel_err": "relative error of the whole output",
    "sqnr_db": "signal to quantization noise", "mean_rel_err": "mean of |out - ref| / |ref|",
    "mean_rel_err_excluded_share": "elements that it leaves out, too close to 0",
    "mean_shift": "|mean(out - ref)| / rms(ref)", "nonfinite_count": "outputs not finite",
    "nonfinite_unexpected_count": "of these, where the reference is finite",
    "flushed_share": "operands that became 0",
    "saturated_share": "operands that became the largest",
    "seeds": "that the module's tests draw from", "passed_count": "tests",
    "failed_count": "tests", "skipped_count": "tests",
}  # fmt: skip
OWN = {  # where a name says something else
    ("run", "suite"): "what was measured", ("test_result", "suite"): "the test module",
    ("distribution", "name"): "such as X1",
}  # fmt: skip


def text() -> str:
    """What registry/README.md must say."""
    versions = ", ".join(map(str, READERS))
    parts = [
        "# The database",
        "<!-- Written by scripts/describe_database.py from registry/tables.py and manifest.py. -->",
        f"One SQLite file, schema version {SCHEMA_VERSION} (`PRAGMA user_version`; {versions} are "
        "read), application id `LOKA`. Rows are facts, written once. Why it is so: "
        "[DESIGN.md](../DESIGN.md#database).",
        "`explore` installs datasette: `datasette FILE` shows it. Keys are bytes: "
        "`SELECT hex(key), latency_us_p50 FROM timing`. A timing with what it refers to:",
        "```sql\nSELECT kernel.name, m, n, k, latency_us_p50 FROM timing\n"
        "JOIN kernel ON kernel.id = timing.kernel JOIN problem ON problem.id = timing.problem\n"
        "WHERE status = 'ok' ORDER BY latency_us_p50;\n```",
        "An `import` also asks for what is in column *imported if*, for texts without control "
        "characters, and for rows whose key is that of their content.",
        *(_table(name, table) for name, table in TABLES.items()),
        "## Manifest",
        f"`export FILE` writes `FILE{ENDING}` beside it, an object of JSON with these fields and "
        "no others; `import FILE` refuses a file whose manifest says something else. The checksum "
        "finds damage; it is no signature.",
        _rows(("field", "type", "what"), [
            (f"`{name}`", {"str": "text", "int": "integer", "dict": "object", "list": "list"}[
                kind.__name__], what)
            for name, (kind, _, what) in FIELDS.items()
        ]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _table(name: str, table: Table) -> str:
    model = next(m.class_ for m in Base.registry.mappers if m.local_table is table)
    rules = rules_of(name, 0)
    rows = []
    for column in table.columns:
        foreign = next(iter(column.foreign_keys), None)
        kind = "integer" if isinstance(column.type, Integer) else "text"
        kind = "real" if isinstance(column.type, Double) else kind
        kind = "bytes" if isinstance(column.type, Key) else kind
        kind = f"id of `{foreign.column.table.name}`" if foreign else kind
        says = OWN.get((name, column.name)) or _says(column.name)
        unit = next((u for end, u in UNITS.items() if _ends(column.name, end)), "")
        rule = rules.get(column.name)
        words = "" if rule is None or foreign else str(rule)
        if column.name.endswith("_utc_ms"):
            words = "from 2020 to ten years from now"
        rows.append((f"`{column.name}`", kind + (", NULL" if column.nullable else ""), unit, says,
                     words))  # fmt: skip
    fields = FACT_IDENTITY.get(name, tuple(c for c in COLUMNS[name] if c != "key"))
    identity = "a UUID" if name == "run" else ", ".join(f"`{field}`" for field in fields)
    about = " ".join((model.__doc__ or "").split())
    checks = [f"- `{check}`" for check in constraints_of(name)]
    return "\n\n".join([
        f"## `{name}`",
        f"{about} Identity: {identity}{' (as keys)' if name in FACTS else ''}.",
        _rows(("column", "type", "unit", "what", "imported if"), rows),
        *(["Constraints:\n\n" + "\n".join(checks)] if checks else []),
    ])  # fmt: skip


def _ends(name: str, end: str) -> bool:
    return name.endswith(end) or (f"{end}_" in name and name.startswith("latency"))


def _says(name: str) -> str:
    found = SAYS.get(name.removesuffix("_upper"))
    if found is None:
        raise KeyError(f"column {name} is not described; say in SAYS what it holds")
    return f"upper limit of it: {found}" if name.endswith("_upper") else found


def _rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
                     for line in lines)  # fmt: skip


if __name__ == "__main__":
    PLACE.write_text(text(), encoding="utf-8")
