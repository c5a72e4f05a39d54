"""List the tests that take long, of which `.ci/run` runs a part for each commit.

    make test ARGS=--junitxml=build/tests.xml
    python scripts/list_slow_tests.py build/tests.xml

Updates tests/slow_tests.txt: functions whose cases take 0.3 s or more in the mean, without those
that were skipped. What the report does not tell of stays as it is, unless its file or function is
gone. What is not in the list counts as fast, so that a new test runs for each commit; so do tests
of shipped databases and of programs for GPUs, which a commit is most likely to break.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LISTED = ROOT / "tests" / "slow_tests.txt"
# 1,594 of 12,547 cases of the core and a part of the rest, but five sixths of the time.
LONG_S = 0.3
ALWAYS = ("tests/registry/test_shipped.py", "tests/kernels/test_cuda_compiled.py")


def times_of(report: Path) -> dict[str, list[float]]:
    """Seconds of the cases of each function, from a report of pytest."""
    found: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is None:
            path = case.attrib["classname"].replace(".", "/") + ".py"
            function = case.attrib["name"].partition("[")[0]
            found[f"{path}::{function}"].append(float(case.attrib["time"]))
    return found


def slow(times: dict[str, list[float]]) -> Iterable[str]:
    """Names of the functions that take long, in order."""
    return sorted(
        name
        for name, found in times.items()
        if statistics.fmean(found) >= LONG_S and not name.startswith(ALWAYS)
    )


def is_there(name: str) -> bool:
    """Whether a listed function still is."""
    path, _, function = name.partition("::")
    file = ROOT / path
    return file.exists() and f"def {function}(" in file.read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="List the tests that take long.")
    parser.add_argument("report", type=Path, help="what --junitxml of pytest wrote")
    times = times_of(parser.parse_args().report)
    before = LISTED.read_text(encoding="utf-8").split() if LISTED.exists() else []
    kept = [x for x in before if x not in times and is_there(x) and not x.startswith(ALWAYS)]
    names = sorted({*slow(times), *kept})
    LISTED.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


if __name__ == "__main__":
    main()
