"""Import damaged files and see that each is refused, or that what it brought is right.

By hand, so many of them (seconds for a thousand), from a seed if one is named:

    python -m tests.support.fuzz_foreign 100000 [SEED]
"""

from __future__ import annotations

import functools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from lokakern.errors import DatabaseError
from lokakern.registry.schema.tables import COLUMNS
from lokakern.registry.sharing.import_file import import_file
from lokakern.registry.sharing.untrusted import Guards
from lokakern.registry.storage.merge import read_checked
from lokakern.registry.storage.reader import Rows, read_rows
from tests.support.foreign_files import (
    BYTES,
    STATEMENTS,
    Mutation,
    base_rows,
    mutate_bytes,
    mutate_rows,
    write_base,
)

GUARDS = Guards(deadline_s=1800.0)
LONGEST_S = 60.0  # of this process alone, however busy the machine is: a hang, where 0.1 is usual
Change = tuple[str, list[Mutation]]


def attempt(base: Path, folder: Path, change: Change) -> str:
    """Import a damaged copy of a file into a database.

    Returns:
        "same" if nothing came of the damage, "imported", or "refused".

    Raises:
        AssertionError: The import took too long, changed the database it refused to change, left
            something behind, or let in what no row may be.
    """
    damaged, target = folder / "damaged.sqlite", folder / "target.sqlite"
    mutate = mutate_bytes if change[0] == "bytes" else mutate_rows
    mutate(base, damaged, change[1])
    content, before = damaged.read_bytes(), target.read_bytes()
    start = time.process_time()
    try:
        import_file(damaged, target, guards=GUARDS, trusted=True)
    except DatabaseError as error:
        outcome = "refused"
        assert "damaged.sqlite" in str(error), f"{change}: {error}"
        assert target.read_bytes() == before, f"{change}: the target changed"
    else:
        outcome = "same" if content == base.read_bytes() else "imported"
        check_rows(base, target, change)
        target.write_bytes(before)
    assert time.process_time() - start < LONGEST_S, f"{change}: took too long"
    assert damaged.read_bytes() == content, f"{change}: the source changed"
    left = {path.name for path in folder.iterdir()} - {
        "base.sqlite", "damaged.sqlite", "target.sqlite", "target.sqlite.lock",
    }  # fmt: skip
    for name in left:
        assert name.startswith("damaged.sqlite-"), f"{change}: left {name}"
        (folder / name).unlink()
    return outcome


@functools.cache
def known_rows(base: Path | None) -> Rows:
    """Rows of the undamaged file, or of the target before."""
    return base_rows(2) if base is None else read_rows(base)


def check_rows(base: Path, target: Path, change: Change) -> None:
    """Only rows that the undamaged file has the keys of came in, and each value is one.

    The target's STRICT tables and CHECK constraints were met, or nothing would have come in.
    """
    found, known, own = read_checked(target), known_rows(base), known_rows(None)
    for name, rows in found.items():
        keys = {row[0] for row in (*known[name], *own[name])}
        for row in rows:
            assert row[0] in keys, f"{change}: {name} has {row}"
            for column, value in zip(COLUMNS[name], row, strict=True):
                where = f"{change}: {name} {row[0]}: {column} is {value!r}"
                assert value == value, where
                if isinstance(value, str):
                    assert len(value) <= 65_536 and "\x1b" not in value, where
                    value.encode()
                if column.endswith("_utc_ms"):
                    assert 1_577_836_800_000 <= value < 4_000_000_000_000, where
                if column.startswith("latency_") and value is not None:
                    assert 0 < value < 1e13, where


def drawn(random_: random.Random) -> Change:
    """Damage drawn at random."""
    if random_.random() < 0.6:
        count, kinds, how = random_.choice((1, 1, 2, 5, 20)), len(BYTES), "bytes"
    else:
        count, kinds, how = random_.choice((1, 1, 2)), len(STATEMENTS), "rows"
    return how, [
        Mutation(random_.randrange(kinds), random_.randrange(2**32), random_.randrange(2**32))
        for _ in range(count)
    ]


def main(count: int, seed: int) -> None:
    """Try so many, and print what became of them."""
    outcomes: Counter[str] = Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        folder = Path(name)
        write_base(folder / "base.sqlite")
        write_base(folder / "target.sqlite", run=2)
        random_ = random.Random(seed)
        for number in range(1, count + 1):
            change = drawn(random_)
            outcomes[f"{change[0]} {attempt(folder / 'base.sqlite', folder, change)}"] += 1
            if number % 1000 == 0 or number == count:
                words = ", ".join(f"{value} {key}" for key, value in sorted(outcomes.items()))
                print(f"{number} in {time.monotonic() - start:.0f} s: {words}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(2**32))
