"""Who was the fastest where: problems won on a device, by library."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict

from lokakern.registry.freshness import is_current
from lokakern.registry.register import KERNELS
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.selection.dispatcher import default_regime
from lokakern.types import Device, Problem


def wins_of(facts: Snapshot, device: Device) -> Counter[str]:
    """At how many problems a kernel of each library has the least time, in the device's regime.

    Times are medians over runs, of kernels as they are now that were nowhere wrong, at problems
    where at least two were timed. A composition is of every library that a part of it is of; what
    is of none counts for "".
    """
    times: dict[Problem, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    wrong = set()
    for cell in facts.timings_on(device, default_regime(device)):
        if cell.kernel.name in KERNELS and is_current(cell.kernel):
            if cell.status == "ok":
                times[cell.problem][cell.kernel.name].append(cell.latency_us_p50)
            elif cell.status == "wrong":
                wrong.add(cell.kernel.name)
    won: Counter[str] = Counter()
    for found in times.values():
        medians = [(statistics.median(us), name) for name, us in found.items() if name not in wrong]
        if len(medians) > 1:
            won.update(KERNELS[min(medians)[1]].libraries or [""])
    return won
