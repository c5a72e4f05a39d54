"""GPU types that no shipped file has measurements of, and the formats that they multiply."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lokakern.types import Device
from lokakern.what_if.formats import FORMATS, WhatIf

# Products as torch reports them, with SMs or CUs and GiB of data sheets, and the formats that they
# multiply. B300 has int8 at a thirtieth of the rate of FP8, which is slower than bfloat16.
DEVICES = {
    Device("nvidia", "NVIDIA A100-SXM4-80GB", "sm_80", 108, 80): ("int8",),
    Device("nvidia", "NVIDIA L40S", "sm_89", 142, 48): ("fp8-row", "int8"),
    Device("nvidia", "NVIDIA B200", "sm_100", 148, 180): (
        "nvfp4", "mxfp4", "mxfp8", "fp8-row", "int8",
    ),
    Device("nvidia", "NVIDIA B300", "sm_103", 148, 288): ("nvfp4", "mxfp4", "mxfp8", "fp8-row"),
    Device("amd", "AMD Instinct MI355X", "gfx950", 256, 288): ("mxfp4", "mxfp8", "fp8-row", "int8"),
}  # fmt: skip


def formats_of(device: Device) -> tuple[WhatIf, ...]:
    """The formats that one of `DEVICES` multiplies, and those whose weights it dequantizes."""
    weights = (form for form in FORMATS.values() if form.weight_only)
    return *(FORMATS[name] for name in DEVICES[device]), *weights


def device_named(name: str, among: Iterable[Device] = tuple(DEVICES)) -> Device | None:
    """The device whose product has all words of a name, such as "b200"; None without one."""
    words = _words(name)
    found = [device for device in among if words and words <= _words(device.product)]
    return found[0] if len(found) == 1 else None


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
