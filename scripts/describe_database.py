"""Write registry/README.md from the models: tables, columns, units, constraints, manifests.

    python scripts/describe_database.py

A test fails while the file is another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_origin, get_type_hints

from sqlalchemy import Double, Integer, Table

from lokakern.registry.schema.manifest import ENDING, Manifest
from lokakern.registry.schema.row_keys import FACT_IDENTITY
from lokakern.registry.schema.tables import COLUMNS, TABLES, unit_of
from lokakern.registry.schema.value_rules import constraints_of, rules_of
from lokakern.registry.sqlite_file import FACTS, SCHEMA_VERSION, VERSIONS
from lokakern.selection.ties import TOGETHER

_JSON_TYPES = {int: "integer", dict: "object", list: "list"}
PLACE = Path(__file__).resolve().parent.parent / "registry" / "README.md"


def text() -> str:
    """The expected content of registry/README.md."""
    versions = ", ".join(map(str, VERSIONS))
    parts = [
        "# The database",
        "<!-- Written by scripts/describe_database.py from registry/schema. -->",
        f"One SQLite file, schema version {SCHEMA_VERSION} (`PRAGMA user_version`; {versions} are "
        "read), application id `LOKA`. Rows are facts, written once. Why it is so: "
        "[DESIGN.md](../DESIGN.md#database).",
        "`python -m lokakern.bench explore FILE` shows it in a browser. Keys are bytes: "
        "`SELECT hex(key), latency_us_p50 FROM timing`. A timing with what it refers to:",
        "```sql\nSELECT kernel.name, m, n, k, latency_us_p50 FROM timing\n"
        "JOIN kernel ON kernel.id = timing.kernel JOIN problem ON problem.id = timing.problem\n"
        "WHERE status = 'ok' ORDER BY latency_us_p50;\n```",
        "An `import` also asks for what is in column *imported if*, for texts without control "
        "characters, and for rows whose key is that of their content.",
        f"Every row has a `key`: {TABLES['run'].c.key.doc}. Rows that others refer to have an "
        f"`id`: {TABLES['run'].c.id.doc}.",
        *(_table(name, table) for name, table in TABLES.items()),
        "## Gains",
        "A gain of a kernel is over the fastest of torch.bf16 and torch.bf16_padded at the same "
        "problem, device and regime. Where rows are not aligned (n or k is no multiple of 8) and "
        "torch.bf16_padded has no time, the file has no baseline: torch.bf16 takes up to 5 times "
        f"as long there. Where the weight is prepared, a kernel with `{TOGETHER}` in its name does "
        "not count: it was timed there, but launches what the one with `quantize` in its place "
        "does, and dispatch refuses it. The query `fastest` of `explore` "
        "(`bench/explorer/queries.py`) computes gains so; errors count for dispatch from three "
        "seeds on.",
        "## Manifest",
        f"`export FILE` writes `FILE{ENDING}` beside it, an object of JSON with these fields and "
        "no others. Commands that read the files of others refuse FILE if its manifest says "
        "something else, and remove the manifest of a file that they add rows to. The checksum "
        "finds damage; it is no signature.",
        _rows(("field", "type", "what"), [
            (f"`{name}`", _JSON_TYPES.get(get_origin(hint.__origin__) or hint.__origin__, "text"),
             hint.__metadata__[0].description)
            for name, hint in get_type_hints(Manifest, include_extras=True).items()
        ]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _table(name: str, table: Table) -> str:
    rules = rules_of(name, 0)
    rows = []
    for column in table.columns:
        if column.name in ("id", "key"):  # described once, above
            continue
        foreign = next(iter(column.foreign_keys), None)
        kind = "integer" if isinstance(column.type, Integer) else "text"
        kind = "real" if isinstance(column.type, Double) else kind
        kind = f"id of `{foreign.column.table.name}`" if foreign else kind
        says, unit = column.doc or "", unit_of(column.name)
        rule = rules.get(column.name)
        words = "" if rule is None or foreign else str(rule)
        if column.name.endswith("_utc_ms"):
            words = "from 2020 to ten years from now"
        rows.append((f"`{column.name}`", kind + (", NULL" if column.nullable else ""), unit, says,
                     words))  # fmt: skip
    fields = FACT_IDENTITY.get(name, tuple(c for c in COLUMNS[name] if c != "key"))
    identity = "a UUID" if name == "run" else ", ".join(f"`{field}`" for field in fields)
    checks = [f"- `{check}`" for check in constraints_of(name)]
    return "\n\n".join([
        f"## `{name}`",
        f"{table.info['about']} Identity: {identity}{' (as keys)' if name in FACTS else ''}.",
        _rows(("column", "type", "unit", "what", "imported if"), rows),
        *(["Constraints:\n\n" + "\n".join(checks)] if checks else []),
    ])  # fmt: skip


def _rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
                     for line in lines)  # fmt: skip


if __name__ == "__main__":
    PLACE.write_text(text(), encoding="utf-8")
