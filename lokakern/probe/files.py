"""Files of statistics, without pickle: a header in JSON, then the bytes of tensors.

    8 bytes   length of the header, little-endian
    header    {"format": "lokakern.probe", "version": 3, "sites": {name: {n, k, bias, norm, ...}},
               "tensors": [[site, tensor, dtype, shape], ...]}
    tensors   in this order, without gaps, little-endian

Version 2 had means and centered squares in the place of sums. Version 1 also held parameters of
Gaussian operands, which nothing reads any more.

A file may be hostile: it is bounded, its tensors must be exactly those that its sites ask for, and
their values must be legal.
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
from lokakern.probe.statistics import DISTINCT_SIZES, PARTS, TRACE, SiteStatistics

FORMAT, VERSION = "lokakern.probe", 3
_DROPPED = ("input.moments.products", "grad_output.moments.products",
            "weight.mean", "weight.u", "weight.v")  # of version 1  # fmt: skip
LARGEST_FILE, LARGEST_HEADER = 16 * 2**30, 16 * 2**20
LARGEST_AXIS, LONGEST_NAME, MOST = 2**24, 1000, 2**53
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


def save(path: str | Path, sites: Mapping[str, SiteStatistics]) -> None:
    """Write statistics of sites; the file is there as a whole or not at all.

    Raises:
        DatabaseError: It cannot be written.
    """
    tensors = [(name, *found) for name, site in sites.items() for found in site.tensors()]
    content = {
        "format": FORMAT,
        "version": VERSION,
        "sites": {name: site.numbers() for name, site in sites.items()},
        "tensors": [[name, tensor, str(x.dtype).removeprefix("torch."), list(x.shape)]
                    for name, tensor, x in tensors],
    }  # fmt: skip
    header = json.dumps(content, allow_nan=False).encode()
    target, temporary = Path(path), ""
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            temporary = file.name
            file.write(len(header).to_bytes(8, "little") + header)
            for _, _, x in tensors:
                flat = x.detach().cpu().contiguous().view(-1)
                file.write(flat.view(torch.uint8).numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise DatabaseError(f"{str(target)!r} cannot be written: {error.strerror}") from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def load(path: str | Path) -> dict[str, SiteStatistics]:
    """Read what `save` wrote, on the CPU.

    Raises:
        DatabaseError: It is no such file, of a later version, or not in order.
    """
    try:
        return _load(Path(path))
    except OSError as error:
        raise DatabaseError(f"{str(path)!r} cannot be read: {error.strerror}") from error
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
    _ask(8 < size <= LARGEST_FILE, f"it has {size} bytes")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        _ask(length <= min(size - 8, LARGEST_HEADER), f"its header has {length} bytes")
        header = json.loads(file.read(length))
        version, sites = header.get("version"), header.get("sites")
        _ask(header.get("format") == FORMAT, "it has another format")
        _ask(version in range(1, VERSION + 1),
             f"its version is {version!r}; expected up to {VERSION}: update lokakern")  # fmt: skip
        byte_count = sum(_byte_count(*entry) for entry in header["tensors"])
        _ask(byte_count == size - 8 - length, f"its tensors have {byte_count} bytes")
        held: dict[str, dict[str, Tensor]] = {name: {} for name in sites}
        for name, tensor, dtype, shape in header["tensors"]:
            _ask(tensor not in held[name], f"{name} has {tensor} twice")
            blob = bytearray(file.read(_byte_count(name, tensor, dtype, shape)))
            flat = torch.frombuffer(blob, dtype=DTYPES[dtype]) if blob else torch.empty(0)
            held[name][tensor] = flat.view(shape)
    for tensors in held.values():
        _upgrade(version, tensors)
    return {name: _site(name, sites[name], held[name]) for name in sites}


def _upgrade(version: int, held: dict[str, Tensor]) -> None:
    """Turn tensors of an earlier version into those of this one."""
    if version == 1:
        for name in _DROPPED:
            held.pop(name, None)
        _ask("cancellations" not in held, "version 1 has no cancellations")
        held["cancellations"] = torch.zeros(2, dtype=torch.float64)
    for part in PARTS if version < VERSION else ():
        count, mean, squares = (held.pop(f"{part}.moments.{name}")
                                for name in ("count", "mean", "squares"))  # fmt: skip
        _ask(not count.dim() and mean.shape == squares.shape, f"{part} has other moments")
        held[f"{part}.count"], held[f"{part}.sums"] = count, count * mean
        held[f"{part}.squares"] = squares + count * mean.square()
        for name in ("rows", "keys"):
            held[f"{part}.{name}"] = held.pop(f"{part}.sample.{name}")


def _ask(holds: bool, found: str) -> None:
    if not holds:
        raise ValueError(found)


def _byte_count(_name: str, _tensor: str, dtype: str, shape: list[int]) -> int:
    return DTYPES[dtype].itemsize * math.prod(_whole(axis, 0, LARGEST_AXIS) for axis in shape)


def _whole(value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"found {str(value)[:40]!r}; expected an integer of {low} to {high}")
    return value


def _site(name: str, described: dict[str, Any], held: dict[str, Tensor]) -> SiteStatistics:
    _ask(len(name) <= LONGEST_NAME and name.isprintable(), "a name cannot be printed")
    n, k = (_whole(described[axis], 1, LARGEST_AXIS) for axis in ("n", "k"))
    # Before anything is allocated for it: tensors of a site of this size.
    for tensor, wanted in SiteStatistics(n, k, torch.device("meta")).tensors():
        x = held.get(tensor)
        same = x is not None and x.shape == wanted.shape and x.dtype == wanted.dtype
        _ask(same, f"{name}.{tensor} is not what n={n} and k={k} ask for")
    norm = str(described["norm"])
    if norm:
        norm_named(norm).span(n)
        norm = str(norm_named(norm))
    site = SiteStatistics(n, k, torch.device("cpu"), has_bias=described["bias"] is True, norm=norm)
    site.snapshots = _whole(described["snapshots"], 0, MOST)
    for part, steps, stride in zip(
        (site.input, site.grad_output), described["steps"], described["strides"], strict=True
    ):
        part.stride = _whole(stride, 1, MOST)
        part.steps = _whole(steps, 0, TRACE * part.stride)
        _ask(part.stride.bit_count() == 1, f"{name} has a stride of {part.stride}")
    _ask(len(described["sizes"]) <= DISTINCT_SIZES, f"{name} has too many sizes")
    for m, count in described["sizes"]:
        site.sizes[_whole(m, 0, MOST)] = _whole(count, 1, MOST)
    own = dict(site.tensors())
    for tensor, most, columns in (("snapshot", n, k), ("snapshot_t", k, n)):
        x = held.pop(tensor, None)
        if x is not None:
            fits = x.dim() == 2 and 1 <= len(x) <= most and x.shape[1] == columns
            _ask(fits, f"{name} has a {tensor} of {list(x.shape)}")
            setattr(site, tensor, x)
    _ask(own.keys() == held.keys(), f"{name} lacks or has more than its tensors")
    for tensor, mine in own.items():
        x = held[tensor]
        legal = ~torch.isnan(x) if tensor.endswith("keys") else torch.isfinite(x)
        if not tensor.endswith(("sums", "rows")):
            legal &= x >= 0
        _ask(bool(legal.all()), f"{name}.{tensor} holds what is not a statistic")
        mine.copy_(x)
    return site
