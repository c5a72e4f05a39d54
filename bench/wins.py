"""Who was the fastest where: problems won on a device, by library."""

from __future__ import annotations

from collections import Counter

from lokakern.registry.freshness import is_current
from lokakern.registry.register import KERNELS
from lokakern.registry.snapshot import Snapshot
from lokakern.selection import default_regime
from lokakern.types import Device


def wins_of(facts: Snapshot, device: Device) -> Counter[str]:
    """At how many problems a kernel of each library has the least median time.

    Kernels as they are now, in the device's regime. A composition is of every library that a part
    of it is of; what is of none counts for "".
    """
    best: dict[str, tuple[float, str]] = {}
    for cell in facts.timings_on(device, default_regime(device)):
        if cell.status == "ok" and is_current(cell.kernel):
            key = str(cell.problem)
            found = (cell.latency_us_p50, cell.kernel.name)
            best[key] = min(best.get(key, found), found)
    winners = [KERNELS[name] for _, name in best.values() if name in KERNELS]
    return Counter(library for kernel in winners for library in kernel.libraries or [""])
