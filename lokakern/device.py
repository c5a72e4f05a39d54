"""The local hardware and software: the Device and Environment of a measurement."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from lokakern.types import Device, Environment


@functools.cache
def current_device(kind: str = "auto", index: int = 0) -> Device:
    """The device type of a torch device.

    Args:
        kind: "cuda" (NVIDIA, and AMD with ROCm), "cpu", or "auto" for a GPU if there is one.
        index: Index of the GPU.
    """
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        return _gpu(index)
    return _cpu()


@functools.cache
def devices_here() -> frozenset[Device]:
    """Types of all devices of this machine: its CPU and every GPU."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return frozenset({current_device("cpu"), *(current_device("cuda", i) for i in gpus)})


def _gpu(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    major, minor = torch.cuda.get_device_capability(index)
    architecture = found.gcnArchName.split(":")[0] if amd else f"sm_{major}{minor}"
    product = torch.cuda.get_device_name(index)
    mig = re.search(r"MIG (\S+)", product)
    partition = _amd_partition(found) if amd else mig.group(1) if mig else "none"
    return Device(
        vendor="amd" if amd else "nvidia",
        product=product,
        architecture=architecture,
        compute_units=found.multi_processor_count,
        memory_gib=round(found.total_memory / 2**30),
        partition=partition,
    )


_SYS = Path("/sys")  # files of Linux drivers
_WHOLE = ("SPX", "NPS1")  # compute and memory partition of an undivided MI300


def _amd_folder(properties: Any) -> Path:
    """The driver's folder of an AMD GPU; its partitions share function 0."""
    domain, bus = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_bus_id", 0)
    device = getattr(properties, "pci_device_id", 0)
    return _SYS / "bus" / "pci" / "devices" / f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _amd_partition(properties: Any) -> str:
    """The partition, such as "CPX/NPS4"; "none" if the GPU is undivided or it is unknown."""
    folder = _amd_folder(properties)
    found = [
        _first_word(folder / f"current_{what}_partition") or whole
        for what, whole in zip(("compute", "memory"), _WHOLE, strict=True)
    ]
    return "none" if tuple(found) == _WHOLE else "/".join(found)


def _first_word(path: Path) -> str:
    try:
        return (path.read_text(encoding="ascii", errors="replace").split() or [""])[0]
    except OSError:
        return ""


def _cpu() -> Device:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Device(
        vendor="cpu",
        product=_cpu_name(),
        architecture=platform.machine() or "unknown",
        compute_units=os.cpu_count() or 1,
        memory_gib=round(pages * page_bytes / 2**30),
    )


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = match.group(1) if match else platform.processor() or platform.machine()
    return " ".join(name.split()) or "unknown CPU"


@functools.cache
def current_environment(kind: str = "auto") -> Environment:
    """Versions and power limit; "unknown" where they cannot be read."""
    gpu = kind == "cuda" or (kind == "auto" and torch.cuda.is_available())
    driver, power_cap = _driver_and_power_cap() if gpu else ("none", "none")
    toolkit = torch.version.cuda or torch.version.hip or "none"
    return Environment(
        driver=driver,
        toolkit=toolkit if gpu else "none",
        torch=torch.__version__.split("+")[0],
        triton=version_of("triton"),
        libraries=_libraries(),
        power_cap_w=power_cap,
    )


def _libraries() -> str:
    """Other compilers of kernels, with versions."""
    packages = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
    found = {package: version_of(package) for package in packages}
    return (
        ", ".join(f"{name} {version}" for name, version in found.items() if version != "none")
        or "none"
    )


def version_of(package: str) -> str:
    """Installed version of a package, or "none"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _driver_and_power_cap() -> tuple[str, str]:
    if torch.version.hip is not None:
        return _amd_driver_and_power_cap()
    try:
        shown = subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=driver_version,power.limit",
                "--format=csv,noheader,nounits",
            ],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.splitlines()[0]
        driver, power = (word.strip() for word in shown.split(","))
        return driver, str(round(float(power)))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "unknown", "unknown"


def _amd_driver_and_power_cap() -> tuple[str, str]:
    folder = _amd_folder(torch.cuda.get_device_properties(0))
    caps = sorted(folder.glob("hwmon/hwmon*/power1_cap"))
    microwatts = _first_word(caps[0]) if caps else ""
    power = str(round(int(microwatts) / 1e6)) if microwatts.isdigit() else "unknown"
    return _first_word(_SYS / "module" / "amdgpu" / "version") or "unknown", power


def l2_bytes(index: int = 0) -> int:
    """Size of the GPU's last-level cache, or an estimate for a CPU, in bytes."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(index).L2_cache_size)
    for level in ("index3", "index2"):
        path = Path(f"/sys/devices/system/cpu/cpu0/cache/{level}/size")
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        digits = text.rstrip("KM")
        if digits.isdigit():
            return int(digits) * unit
    return 32 * 2**20
