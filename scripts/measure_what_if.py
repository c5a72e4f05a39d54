"""Emulate products in formats that no kernel multiplies: write lokakern/what_if/errors.json.

    python scripts/measure_what_if.py

Needs no GPU; 10 minutes of two cores. Run it after a change of `lokakern/what_if/formats.py`.
"""

from __future__ import annotations

import msgspec

from lokakern.render.terminal import TerminalProgress
from lokakern.what_if import errors
from lokakern.what_if.formats import FORMATS
from lokakern.workloads.distributions import DISTRIBUTIONS


def main() -> None:
    """Write the file."""
    with TerminalProgress() as progress:
        count = len(FORMATS) * len(DISTRIBUTIONS) * len(errors.SUMS) * 3
        progress.begin("emulating", count)
        found = errors.measure(step=progress.step)
    lines = msgspec.json.encode(found).replace(b"]],", b"]],\n")  # one for each distribution
    errors.FILE.write_bytes(lines + b"\n")
    print(f"{errors.FILE}: digest {found.digest[:16]}")


if __name__ == "__main__":
    main()
