"""The rows of ``list``: kernels, libraries, suites, distributions, devices, coverage."""

from __future__ import annotations

import functools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lokakern import native
from lokakern.bench.report import library_smoke
from lokakern.bench.report.coverage import ALWAYS_TOLD, COUNTED, Holdings
from lokakern.device import current_device, current_environment
from lokakern.errors import UnknownNameError
from lokakern.progress import tell
from lokakern.registry import libraries
from lokakern.registry.coverage import Coverage, coverage_of
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.registry.snapshot.snapshot import Snapshot, without_garbage_collection
from lokakern.registry.staleness import is_current
from lokakern.registry.storage.paths import shipped_databases, user_database
from lokakern.render.did_you_mean import did_you_mean
from lokakern.selection import dispatcher
from lokakern.triton_interpreter import is_interpreted
from lokakern.types import Device, Problem
from lokakern.workloads.distributions import DISTRIBUTIONS
from lokakern.workloads.suites import SUITES

Row = dict[str, Any]


# Columns that fit a terminal of 100 characters; names of kernels contain the others.
BRIEF = {
    "kernels": ("kernel", "state", "architectures", "why"),
    "libraries": ("library", "version", "state", "won", "why"),
    "coverage": (
        "part", "of", "problems", "covered", "untimed", *COUNTED, "missing"
    ),
}  # fmt: skip

# What a kernel may declare beside these columns.
FLAGS = ("batched", "equal_groups", "accumulates", "k_slices", "batch_invariant", "pads")


def rows_of(what: str, *, brief: bool = False, device: str | None = None) -> list[Row]:
    """Rows of a listing.

    Args:
        what: "kernels", "libraries", "suites", "distributions", "device" or "coverage".
        brief: Whether to select the most useful columns.
        device: For "device" and "coverage", such as "NVIDIA H200"; None is this one.

    Raises:
        DeviceError: The device is not in the database.
    """
    listings: dict[str, Callable[[], list[Row]]] = {
        "kernels": _kernels,
        "libraries": _libraries,
        "suites": _suites,
        "distributions": _distributions,
        "device": functools.partial(_device, device),
        "coverage": functools.partial(_coverage, device),
    }
    with without_garbage_collection():  # 0.7 of 6 s of the device with the shipped rows
        rows = listings[what]()
    if brief and what in BRIEF:
        none = {word for word in COUNTED if not any(row.get(word) for row in rows)}
        columns = [name for name in BRIEF[what] if name not in none.difference(ALWAYS_TOLD)]
        return [{column: row[column] for column in columns} for row in rows]
    return rows


def _kernels() -> list[Row]:
    """A row for each kernel, state and vendor, with the architectures of that state."""
    tell("reading kernels", 0)
    unavailable = load_kernels()
    tell("reading kernels", 0.3)
    kernels = [kernel for _, kernel in sorted(KERNELS.items())]
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for found in _known_of(kernels):
        vendor = found.architecture.rstrip("0123456789")
        key = found.kernel, found.state, found.why, vendor
        alike.setdefault(key, []).append(found.architecture)
    tell("reading kernels", 1)
    rows = [
        {
            "kernel": name,
            "op": KERNELS[name].op,
            "scales": KERNELS[name].granularity.value,
            "accumulation": KERNELS[name].accumulation,
            "state": state,
            "architectures": ", ".join(sorted(architectures, key=lambda x: (len(x), x))),
            "why": why,
        }
        for (name, state, why, _), architectures in alike.items()
    ]
    for module, why in unavailable.items():
        plugin = libraries.plugins().get(module.removeprefix("plugin "))
        state, why = "unavailable", f"cannot be imported here: {why}"
        if plugin is not None:
            now, reason = library_smoke.state_of(plugin, current_device())
            if now in library_smoke.UNTRIED:
                state, why = now, reason
        unknown = dict.fromkeys(("op", "scales", "accumulation"), "-")
        rows.append(
            {
                "kernel": f"({module})",
                **unknown,
                "state": state,
                "architectures": "-",
                "why": why,
            }
        )
    return rows


def _known_of(kernels: Sequence[Kernel]) -> list[Coverage]:
    """`coverage_of`; of a plugin's kernels that nobody timed also where they were tried."""
    device = current_device()
    where = device.product if device.is_gpu else "a CPU"
    where += ", in the interpreter" if is_interpreted() else ""
    every = coverage_of(dispatcher.snapshot(), kernels)
    known = {found.kernel for found in every if found.state != "unmeasured"}
    told = []
    for found in every:
        kernel = KERNELS[found.kernel]
        plugin = libraries.plugins().get(kernel.library)
        if plugin and found.kernel not in known and libraries.trial_of(plugin, device):
            at = "any" if "any" in kernel.architectures else found.architecture
            found = replace(found, architecture=at, why=f"tried on {where}; {found.why}")
        told.append(found)
    return list(dict.fromkeys(told))  # one "any"


def kernels_named(word: str, rows: list[Row]) -> list[Row]:
    """Rows of kernels whose name contains a word, in any case.

    Raises:
        UnknownNameError: No row has such a name.
    """
    found = [row for row in rows if word.lower() in row["kernel"].lower()]
    if not found:
        near = did_you_mean(word, (row["kernel"] for row in rows))
        if (plugin := libraries.plugin_meant(word)) is not None:
            here = [row for row in rows if row["kernel"] == f"(plugin {plugin.name})"]
            words = [f"plugin {plugin.name} is {row['state']}: {row['why']}; " for row in here]
            near = "".join(words) or near
        raise UnknownNameError(
            f"no kernel listed here has {word!r} in its name; {near}`list kernels` shows all"
        )
    return found


def facts_of(kernel: Kernel) -> list[Row]:
    """What a kernel declares, and its state on each architecture, a row for each."""
    facts: dict[str, Any] = {
        "kernel": kernel.name,
        "op": kernel.op,
        "scales of a, b": f"{kernel.granularity.value}, {kernel.b_granularity.value}",
        "accumulation": kernel.accumulation,
        "kernel_err_bound": kernel.kernel_err_bound,
        "epilogues": ", ".join(sorted(kernel.epilogues)),
        "also": ", ".join(word for word in FLAGS if getattr(kernel, word)) or "-",
        "architectures": ", ".join(sorted(kernel.architectures)),
        "libraries": ", ".join(sorted(kernel.libraries)) or "-",
        "modules": ", ".join(kernel.modules),
        "digest": kernel.digest,
    }
    for found in _known_of([kernel]):
        facts[f"on {found.architecture}"] = f"{found.state}: {found.why}"
    return [{"what": what, "value": value} for what, value in facts.items()]


def _libraries() -> list[Row]:
    """A row for each adapter and plugin; `won` counts problems where its kernel is the fastest."""
    device = current_device()
    tell("reading times", 0)
    won = wins_of(dispatcher.snapshot(), device)
    tell("reading times", 0.7)
    unavailable = load_kernels()
    rows = []
    tell("reading times", 1)
    for library in library_smoke.known():
        state, why = library_smoke.state_of(library, device)
        failure = unavailable.get(f"plugin {library.name}")
        if state in ("usable", "partly") and failure is not None:
            state, why = "broken", failure  # although its trial succeeded
        kernels = [k.name for k in KERNELS.values() if k.library == library.name and not k.parts]
        rows.append(
            {
                "library": library.name,
                "kind": "plugin" if library.is_plugin else "adapter",
                "package": library.here[0].name if library.here else library.packages[0].name,
                "version": library.here[1] if library.here else "-",
                "state": state,
                "kernels": len(kernels),
                "won": won.get(library.name, 0),
                "why": why,
            }
        )
    return rows


def wins_of(facts: Snapshot, device: Device) -> Counter[str]:
    """The number of problems at which a kernel of each library has the least time.

    Times are medians over runs of current kernels in the device's regime, at problems with at least
    two timed kernels; incorrect kernels are left out. A composition counts for the libraries of all
    its parts, a kernel without a library for "".
    """
    times: dict[Problem, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    wrong = set()
    for cell in facts.timings_on(device, dispatcher.default_regime(device)):
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


def _suites() -> list[Row]:
    device = current_device()
    return [
        {
            "suite": s.name,
            "problems": len({case.problem for case in s.cases(device)}),
            "what": s.title,
        }
        for s in SUITES.values()
    ]


def _distributions() -> list[Row]:
    return [
        {
            "distribution": d.name,
            "default": d.realistic,
            "parameters": ", ".join(f"{k}={v:g}" for k, v in d.parameters),
            "what": d.title,
        }
        for d in DISTRIBUTIONS.values()
    ]


def _device(name: str | None) -> list[Row]:
    facts = dispatcher.snapshot()
    device = current_device() if name is None else facts.find_device(name)
    pairs: dict[str, Any] = {
        "product": device.product,
        "vendor": device.vendor,
        "architecture": device.architecture,
        "compute units": device.compute_units,
        "memory GiB": device.memory_gib,
        "partition": device.partition,
    }
    if device == current_device():  # the software of another one is unknown
        environment = current_environment()
        pairs |= {
            "driver": environment.driver,
            "toolkit": environment.toolkit,
            "torch": environment.torch,
            "triton": environment.triton,
            "power cap W": environment.power_cap_w,
            "native calls": native.status(),
        }
    pairs |= {
        "user database": str(user_database()),
        "shipped databases": ", ".join(path.name for path in shipped_databases()) or "none",
        "devices in them": ", ".join(sorted(d.product for d in facts.devices)) or "none",
        "snapshot digest": facts.digest,
    }
    pairs["regime"] = dispatcher.default_regime(device)
    pairs |= Holdings(facts, device).totals()
    return [{"what": what, "value": value} for what, value in pairs.items()]


def _coverage(name: str | None) -> list[Row]:
    """A row for the times and one for the errors of each timed op, and one for each suite."""
    facts = dispatcher.snapshot()
    device = current_device() if name is None else facts.find_device(name)
    return Holdings(facts, device).rows()
