"""Statistics in a file, without pickle: a header in JSON, then the bytes of tensors.

    8 bytes   length of the header, little-endian
    header    {"format": "lokakern.probe", "version": 2, "sites": {name: {n, k, bias, norm, ...}},
               "tensors": [[site, tensor, dtype, shape], ...]}
    tensors   in this order, without gaps, little-endian

Version 1 also held what Gaussian operands were drawn from, which nothing reads any more.

A file may come from anybody: it is bounded, its tensors must be exactly those that its sites ask
for, and what they hold must be what statistics can hold.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lokakern.errors import DatabaseError, LokakernError
from lokakern.norm import norm_named
from lokakern.probe.operand import TRACE
from lokakern.probe.site import DISTINCT_SIZES, SiteStatistics

FORMAT, VERSION, FIRST_VERSION = "lokakern.probe", 2, 1
# Of version 1, and left out.
_ADDED = "cancellations"  # by the second
_DROPPED = ("input.moments.products", "grad_output.moments.products",
            "weight.mean", "weight.u", "weight.v")  # fmt: skip
LARGEST_FILE = 16 * 2**30
LARGEST_HEADER = 16 * 2**20
LARGEST_AXIS = 2**24
LONGEST_NAME = 1000
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def save(path: str | Path, sites: Mapping[str, SiteStatistics]) -> None:
    """Write statistics of sites; the file is there as a whole or not at all.

    Raises:
        DatabaseError: It cannot be written.
    """
    entries: list[list[Any]] = []
    blobs: list[bytes] = []
    for name, site in sites.items():
        for tensor, x in site.tensors():
            dtype = str(x.dtype).removeprefix("torch.")
            entries.append([name, tensor, dtype, list(x.shape)])
            blobs.append(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    described = {name: _described(site) for name, site in sites.items()}
    content = {"format": FORMAT, "version": VERSION, "sites": described, "tensors": entries}
    header = json.dumps(content, allow_nan=False).encode()
    target = Path(path)
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            temporary = Path(file.name)
            file.write(len(header).to_bytes(8, "little") + header)
            for blob in blobs:
                file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise DatabaseError(f"{str(target)!r} cannot be written: {error.strerror}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _described(site: SiteStatistics) -> dict[str, Any]:
    return {
        "n": site.n,
        "k": site.k,
        "bias": site.has_bias,
        "norm": site.norm,
        "snapshots": site.snapshots,
        "steps": [site.input.steps, site.grad_output.steps],
        "strides": [site.input.stride, site.grad_output.stride],
        "sizes": sorted(site.sizes.items()),
    }


def load(path: str | Path) -> dict[str, SiteStatistics]:
    """Read what `save` wrote, on the CPU.

    Raises:
        DatabaseError: It is no such file, of a later version, or not in order.
    """
    try:
        return _load(Path(path))
    except OSError as error:
        raise DatabaseError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except DatabaseError:
        raise
    except (
        LokakernError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,  # also of a file that was cut meanwhile, and of headers nested too deep
        OverflowError,
    ) as error:
        raise DatabaseError(
            f"{str(path)!r} is not a file of statistics that is in order: {str(error)[:200]}"
        ) from None


def _load(path: Path) -> dict[str, SiteStatistics]:
    size = path.stat().st_size
    _ask(8 < size <= LARGEST_FILE, path, f"it has {size} bytes")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        is_ours = length <= min(size - 8, LARGEST_HEADER)
        _ask(is_ours, path, f"its header has {length} bytes; expected what `Probe.save` writes")
        header = json.loads(file.read(length))
        _ask(isinstance(header, dict) and header.get("format") == FORMAT, path, "it is another's")
        version = header.get("version")
        _ask(
            version in (FIRST_VERSION, VERSION), path,
            f"its version is {version!r}; this code reads up to {VERSION}: update lokakern",
        )  # fmt: skip
        sites = header["sites"]
        byte_count = sum(_byte_count(*entry) for entry in header["tensors"])
        _ask(byte_count == size - 8 - length, path, f"its tensors have {byte_count} bytes")
        held: dict[str, dict[str, Tensor]] = {name: {} for name in sites}
        if version == FIRST_VERSION:
            for tensors in held.values():
                tensors[_ADDED] = torch.zeros(2, dtype=torch.float64)
        for name, tensor, dtype, shape in header["tensors"]:
            _ask(tensor not in held[name], path, f"{name} has {tensor} twice")
            blob = bytearray(file.read(_byte_count(name, tensor, dtype, shape)))
            flat = torch.frombuffer(blob, dtype=DTYPES[dtype]) if blob else torch.empty(0)
            if version != FIRST_VERSION or tensor not in _DROPPED:
                held[name][tensor] = flat.view(shape)
    return {name: _site(path, name, sites[name], held[name]) for name in sites}


def _ask(holds: bool, path: Path, found: str) -> None:
    if not holds:
        raise DatabaseError(f"{str(path)!r} is not a file of statistics that is in order: {found}")


def _byte_count(_name: str, _tensor: str, dtype: str, shape: list[int]) -> int:
    for extent in shape:
        _whole(extent, 0, LARGEST_AXIS)
    return DTYPES[dtype].itemsize * math.prod(shape)


def _whole(value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"found {str(value)[:40]!r}; expected an integer of {low} to {high}")
    return value


def _site(
    path: Path, name: str, described: dict[str, Any], held: dict[str, Tensor]
) -> SiteStatistics:
    _ask(len(name) <= LONGEST_NAME and name.isprintable(), path, "a name cannot be printed")
    n, k = (_whole(described[axis], 1, LARGEST_AXIS) for axis in ("n", "k"))
    # Before anything is allocated for it: what a site of this size has.
    for tensor, wanted in SiteStatistics(n, k, torch.device("meta")).tensors():
        x = held.get(tensor)
        same = x is not None and x.shape == wanted.shape and x.dtype == wanted.dtype
        _ask(same, path, f"{name}.{tensor} is not what n={n} and k={k} ask for")
    norm = str(described["norm"])
    if norm:
        norm_named(norm).span(n)
    site = SiteStatistics(
        n, k, torch.device("cpu"), has_bias=described["bias"] is True,
        norm=str(norm_named(norm)) if norm else "",
    )  # fmt: skip
    site.snapshots = _whole(described["snapshots"], 0, 2**53)
    for part, steps, stride in zip(
        (site.input, site.grad_output), described["steps"], described["strides"], strict=True
    ):
        part.stride = _whole(stride, 1, 2**53)
        part.steps = _whole(steps, 0, TRACE * part.stride)
        _ask(part.stride.bit_count() == 1, path, f"{name} has a stride of {part.stride}")
    sizes = described["sizes"]
    _ask(len(sizes) <= DISTINCT_SIZES, path, f"{name} has {len(sizes)} sizes")
    for m, count in sizes:
        site.sizes[_whole(m, 0, 2**53)] = _whole(count, 1, 2**53)
    own = dict(site.tensors())
    for tensor, most, columns in (("snapshot", n, k), ("snapshot_t", k, n)):
        x = held.pop(tensor, None)
        if x is not None:
            fits = x.dim() == 2 and 1 <= len(x) <= most and x.shape[1] == columns
            _ask(fits, path, f"{name} has a {tensor} of {list(x.shape)}")
            setattr(site, tensor, x)
    _ask(own.keys() == held.keys(), path, f"{name} lacks or has more than its tensors")
    for tensor, mine in own.items():
        x = held[tensor]
        legal = ~torch.isnan(x) if tensor.endswith("keys") else torch.isfinite(x)
        if not tensor.endswith(("mean", "rows")):
            legal &= x >= 0
        _ask(bool(legal.all()), path, f"{name}.{tensor} holds what is not a statistic")
        mine.copy_(x)
    return site
