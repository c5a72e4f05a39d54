"""What ``list`` shows: kernels with their evidence, suites, distributions, the device here."""

from __future__ import annotations

from typing import Any

from lokakern import selection
from lokakern.bench.distributions import DISTRIBUTIONS
from lokakern.bench.suites import SUITES
from lokakern.device import current_device, current_environment
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.store import shipped_databases, user_database

Row = dict[str, Any]


def rows_of(what: str) -> list[Row]:
    """Rows of a listing: "kernels", "suites", "distributions" or "device"."""
    return {
        "kernels": _kernels,
        "suites": _suites,
        "distributions": _distributions,
        "device": _device,
    }[what]()


def _kernels() -> list[Row]:
    unavailable = load_kernels()
    facts = selection.snapshot()
    measured: dict[tuple[str, str], set[str]] = {}
    for name, digest, product in facts.measured_kernels():
        measured.setdefault((name, digest), set()).add(product)
    stale: dict[str, set[str]] = {}
    for (name, digest), products in measured.items():
        if name in KERNELS and digest != KERNELS[name].digest:
            stale.setdefault(name, set()).update(products)
    rows = []
    for name, kernel in sorted(KERNELS.items()):
        on = measured.get((name, kernel.digest), set())
        words = [f"measured on {product}" for product in sorted(on)]
        words += [f"stale on {product}" for product in sorted(stale.get(name, set()) - on)]
        words += [f"compile only on {a}: {why}" for a, why in sorted(kernel.compile_only.items())]
        words += [f"unmeasured on {a}: {why}" for a, why in sorted(kernel.unmeasured.items())]
        rows.append(
            {
                "kernel": name,
                "op": kernel.op,
                "scales": kernel.granularity.value,
                "accumulation": kernel.accumulation,
                "architectures": ", ".join(sorted(kernel.architectures)),
                "evidence": "; ".join(words) or "unmeasured",
            }
        )
    for module, why in unavailable.items():
        rows.append(
            {
                "kernel": f"({module})",
                "op": "-",
                "scales": "-",
                "accumulation": "-",
                "architectures": "-",
                "evidence": f"cannot be imported here: {why}",
            }
        )
    return rows


def _suites() -> list[Row]:
    device = current_device()
    return [
        {"suite": s.name, "problems": len(s.cases(device)), "what": s.title}
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


def _device() -> list[Row]:
    device, environment = current_device(), current_environment()
    facts = selection.snapshot()
    pairs = {
        "product": device.product,
        "vendor": device.vendor,
        "architecture": device.architecture,
        "compute units": device.compute_units,
        "memory GiB": device.memory_gib,
        "partition": device.partition,
        "driver": environment.driver,
        "toolkit": environment.toolkit,
        "torch": environment.torch,
        "triton": environment.triton,
        "power cap W": environment.power_cap_w,
        "user database": str(user_database()),
        "shipped databases": ", ".join(path.name for path in shipped_databases()) or "none",
        "devices in them": ", ".join(sorted(d.product for d in facts.devices)) or "none",
        "snapshot digest": facts.digest,
    }
    return [{"what": name, "value": value} for name, value in pairs.items()]
