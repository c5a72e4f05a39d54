"""List the tests that take long, of which `.ci/run` runs a part for each commit.

    make test ARGS=--junitxml=build/tests.xml
    python scripts/list_slow_tests.py build/tests.xml

Writes tests/slow_tests.txt: functions whose cases take 0.3 s or more in the mean, without those
that were skipped. What is not in the list counts as fast, so that a new test runs for each commit.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

LISTED = Path(__file__).resolve().parents[1] / "tests" / "slow_tests.txt"
LONG_S = (
    0.3  # 1,700 of 21,000 cases of the core and a part of the rest, but five sixths of the time
)


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
    return sorted(name for name, found in times.items() if statistics.fmean(found) >= LONG_S)


def main() -> None:
    parser = argparse.ArgumentParser(description="List the tests that take long.")
    parser.add_argument("report", type=Path, help="what --junitxml of pytest wrote")
    names = slow(times_of(parser.parse_args().report))
    LISTED.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


if __name__ == "__main__":
    main()
