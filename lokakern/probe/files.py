"""Files of statistics, without pickle: a header in JSON, then the bytes of tensors.

    8 bytes   length of the header, little-endian
    header    {"format": "lokakern.probe", "version": 4, "sites": {name: {n, k, bias, norm, ...}}}
    tensors   of each site as `SiteStatistics.tensors` lists them, without gaps, little-endian

A file may be hostile: it is bounded, its tensors must be exactly as long as its sites ask for, and
their values must be legal.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta, Struct

from lokakern.errors import DatabaseError, LokakernError
from lokakern.norm import norm_named
from lokakern.probe.statistics import DISTINCT_SIZES, SiteStatistics
from lokakern.types import Format

FORMAT, VERSION = "lokakern.probe", 4
LARGEST_FILE, LARGEST_HEADER = 16 * 2**30, 16 * 2**20
Axis = Annotated[int, Meta(ge=1, le=2**24)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Zeros = Annotated[int, Meta(ge=0, le=2**24)]
Dtype = Literal["float64", "float32", "float16", "bfloat16"]
Half = Literal["bfloat16", "float16"]


class _Kind(Struct):
    """What a file of any version has."""

    format: str
    version: int


class _Site(Struct, forbid_unknown_fields=True):
    """A site; the dtype and the rows of its weight, and of the transpose, 0 without one.

    Files of before have neither padding nor `needs_input_gradient` nor the format of products.
    """

    n: Axis
    k: Axis
    bias: bool
    norm: str
    sizes: Annotated[list[tuple[Count, Count]], Meta(max_length=DISTINCT_SIZES)]
    dtype: Dtype
    snapshot: Annotated[int, Meta(ge=0, le=2**24)]
    snapshot_t: Annotated[int, Meta(ge=0, le=2**24)]
    padding: tuple[Zeros, Zeros] = (0, 0)
    needs_input_gradient: bool = True
    half: Half = "bfloat16"

    @classmethod
    def of(cls, site: SiteStatistics) -> _Site:
        rows, rows_t = (0 if x is None else len(x) for x in (site.snapshot, site.snapshot_t))
        dtype = torch.float32 if site.snapshot is None else site.snapshot.dtype
        word: Any = str(dtype).removeprefix("torch.")
        half: Any = site.half.value
        sizes = sorted(site.sizes.items())
        return cls(
            site.n, site.k, site.has_bias, site.norm, sizes, word, rows, rows_t, site.padding,
            site.needs_input_gradient, half,
        )  # fmt: skip

    def empty(self, device: torch.device) -> SiteStatistics:
        """Statistics of these sizes; on "meta" nothing is allocated."""
        if self.norm:
            norm_named(self.norm).span(self.n)
        is_part = 0 < self.snapshot < self.n  # then some rows of the transpose are there, too
        fits = self.snapshot <= self.n and self.snapshot_t <= self.k
        _ask(fits and is_part == (self.snapshot_t > 0), "a weight has other rows")
        norm = str(norm_named(self.norm)) if self.norm else ""
        site = SiteStatistics(
            self.n, self.k, device, has_bias=self.bias, norm=norm, padding=self.padding,
            needs_input_gradient=self.needs_input_gradient,
        )  # fmt: skip
        site.sizes, site.half = Counter(dict(self.sizes)), Format(self.half)
        dtype = getattr(torch, self.dtype)
        for name, rows, columns in (
            ("snapshot", self.snapshot, self.k), ("snapshot_t", self.snapshot_t, self.n)
        ):  # fmt: skip
            if rows:
                setattr(site, name, torch.empty((rows, columns), dtype=dtype, device=device))
        return site


class _Header(_Kind, forbid_unknown_fields=True):
    sites: dict[Annotated[str, Meta(max_length=1000)], _Site]


def save(path: str | Path, sites: Mapping[str, SiteStatistics]) -> None:
    """Write statistics of sites; the file is there as a whole or not at all.

    Raises:
        DatabaseError: It cannot be written.
    """
    described = {name: _Site.of(site) for name, site in sites.items()}
    header = msgspec.json.encode(_Header(FORMAT, VERSION, described))
    target, temporary = Path(path), ""
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            temporary = file.name
            file.write(len(header).to_bytes(8, "little") + header)
            for site in sites.values():
                for _, x in site.tensors():
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
        DatabaseError: It is no such file, of another version, or not in order.
    """
    try:
        return _load(Path(path))
    except OSError as error:
        raise DatabaseError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (
        LokakernError,
        msgspec.MsgspecError,
        ValueError,
        RuntimeError,  # also of a file that was cut meanwhile, and of headers nested too deep
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
        header = file.read(length)
        kind = msgspec.json.decode(header, type=_Kind)
        _ask(kind.format == FORMAT, "it has another format")
        _ask(kind.version == VERSION,
             f"its version is {kind.version}; expected {VERSION}: probe the model again with this "
             "version of lokakern, or read it with the one that wrote it")  # fmt: skip
        described = msgspec.json.decode(header, type=_Header).sites
        _ask(all(map(str.isprintable, described)), "a name cannot be printed")
        # Before anything is allocated.
        bare = (site.empty(torch.device("meta")) for site in described.values())
        byte_count = sum(x.nbytes for site in bare for _, x in site.tensors())
        _ask(byte_count == size - 8 - length, f"its sites ask for {byte_count} bytes of tensors")
        sites = {name: site.empty(torch.device("cpu")) for name, site in described.items()}
        for name, site in sites.items():
            for tensor, x in site.tensors():
                blob = torch.frombuffer(bytearray(file.read(x.nbytes)), dtype=torch.uint8)
                x.view(-1).view(torch.uint8).copy_(blob)
                if tensor.startswith("snapshot"):
                    continue  # a model may have any weight
                legal = ~torch.isnan(x) if tensor.endswith("keys") else torch.isfinite(x)
                if not tensor.endswith(".rows"):
                    legal &= x >= 0
                _ask(bool(legal.all()), f"{name}.{tensor} holds what is not a statistic")
    return sites


def _ask(holds: bool, found: str) -> None:
    if not holds:
        raise ValueError(found)
