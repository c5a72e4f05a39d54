"""Products of somebody's model: where they come from, whatever was measured of them.

A file of shapes is TOML as ``sweep --suite`` takes it (`lokakern/workloads/suite_files.py`), CSV
with a header, or JSON, a list of objects or of lists:

    m,n,k,count,layer           [{"m": 8192, "n": 512, "k": 1024, "count": 3}, [8192, 512, 512]]
    8192,512,1024,3,mlp.0
    8192,512,512,,mlp.1
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lokakern.errors import SuiteError
from lokakern.probe.statistics import SiteStatistics
from lokakern.progress import tell
from lokakern.types import Format
from lokakern.workloads.suite_files import (
    MOST_CASES,
    check_keys,
    layers_from_file,
    read_text,
    shown,
    size_of,
)

KEYS = ("m", "n", "k", "count", "layer")


@dataclass(frozen=True, slots=True)
class Product:
    """A layer ``Y[m, n] = X[m, k] W[n, k]^T`` at one m.

    Attributes:
        layer: Its name.
        m: Rows of X.
        n: Outputs.
        k: Inputs.
        count: How often it is multiplied.
        bias: Whether the output has one.
        batch: Products at once.
        format: Of X, W and Y.
        distributions: By GEMM, what its operands are like; a GEMM that is not there is judged on
            all realistic ones.
    """

    layer: str
    m: int
    n: int
    k: int
    count: int = 1
    bias: bool = False
    batch: int = 1
    format: Format = Format.BFLOAT16
    distributions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        """Of one of its GEMMs, as often as it is multiplied."""
        return 2 * self.m * self.n * self.k * self.batch * self.count


def products_from_file(path: Path) -> list[Product]:
    """Products that a file of shapes lists.

    Raises:
        SuiteError: It cannot be read, or is not as the module says.
    """
    readers = {".toml": _from_toml, ".csv": _from_csv, ".json": _from_json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise SuiteError(f"shapes {path}: expected a file that ends in {', '.join(readers)}")
    found = reader(path)
    if not 1 <= len(found) <= MOST_CASES:
        raise SuiteError(f"shapes {path}: holds {len(found)} products; expected 1 to {MOST_CASES}")
    return found


def _from_toml(path: Path) -> list[Product]:
    return [
        Product(layer.name, m, layer.n, layer.k, layer.count, layer.bias, layer.batch, layer.format)
        for layer in layers_from_file(path)
        if {"gemm", "prepared"} & set(layer.forms)  # others are no products that a model makes
        for m in layer.m
    ]


def _from_csv(path: Path) -> list[Product]:
    text = io.StringIO(read_text(path).removeprefix("\ufeff"), newline=None)  # Excel writes one
    try:
        lines = [line for line in csv.reader(text) if any(line)]
    except csv.Error as error:
        raise SuiteError(f"shapes {path}: is not CSV: {error}") from None
    head = [word.strip().lower() for word in lines[0]] if lines else []
    if not {"m", "n", "k"} <= set(head):
        raise SuiteError(
            f"shapes {path}: its first line is {shown(','.join(head))}; expected a header such as "
            "m,n,k or m,n,k,count,layer"
        )
    found = []
    for place, line in enumerate(lines[1:], 1):
        if len(line) > len(head):
            raise SuiteError(f"shapes {path}, row {place}: has {len(line)} values for {len(head)} "
                             "columns")  # fmt: skip
        entry = {key: word.strip() for key, word in zip(head, line, strict=False) if word.strip()}
        numbers = {k: int(v) if v.isascii() and v.isdigit() and len(v) < 20 else v
                   for k, v in entry.items()}  # fmt: skip
        if "layer" in entry:
            numbers["layer"] = entry["layer"]
        found.append(_product(numbers, place, path))
    return found


def _from_json(path: Path) -> list[Product]:
    try:
        entries = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise SuiteError(f"shapes {path}: is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise SuiteError(f"shapes {path}: is {shown(entries)}; expected a list of products")
    return [_product(entry, place, path) for place, entry in enumerate(entries, 1)]


def _product(entry: object, place: int, path: Path) -> Product:
    where = f"shapes {path}, row {place}"
    if isinstance(entry, list):
        entry = dict(zip(KEYS, entry, strict=False)) if 3 <= len(entry) <= len(KEYS) else None
    if not isinstance(entry, dict):
        raise SuiteError(f"{where}: expected m, n and k, such as [8192, 512, 1024]")
    check_keys(entry, KEYS, where)
    layer = entry.get("layer", f"row {place}")
    if not isinstance(layer, str) or not layer.isprintable():
        raise SuiteError(f"{where}: layer is {shown(layer)}; expected a name")
    m, n, k = (size_of(entry.get(key), key, where) for key in ("m", "n", "k"))
    return Product(layer, m, n, k, size_of(entry.get("count", 1), "count", where))


def products_of_probe(sites: Mapping[str, SiteStatistics], gemms: Sequence[str]) -> list[Product]:
    """Products that a Probe saw, judged on the benchmarked distributions that they are like.

    Nothing is replayed: `ProbeReport` judges by errors of the operands themselves.
    """
    found: list[Product] = []
    for place, (name, site) in enumerate(sites.items()):
        tell("reading layers", place / len(sites))
        found += _of_site(name, site, gemms)
    tell("reading layers", 1)
    return found


def _of_site(name: str, site: SiteStatistics, gemms: Sequence[str]) -> Iterator[Product]:
    from lokakern.probe.fingerprint import fingerprint_of, nearest, outside
    from lokakern.selection.dispatcher import OUTSIDE

    distributions = {}
    for gemm in gemms:
        print_ = fingerprint_of(site, gemm)
        words = outside(print_)
        distributions[gemm] = (f"{OUTSIDE}: {words}" if words else nearest(print_),)
    for m, count in sorted(site.sizes.items()):
        if m:
            yield Product(name, m, site.n, site.k, count, site.has_bias,
                          distributions=distributions)  # fmt: skip


def suite_of(missing: Mapping[tuple[int, int, int], Sequence[str]], name: str) -> str:
    """TOML for ``sweep --suite`` of products that were never measured.

    Args:
        missing: By m, n and k, the forms of a layer.
        name: Of the suite.
    """
    parts = [f"name = {json.dumps(name)}\n"]
    for (m, n, k), forms in missing.items():
        given: list[Any] = list(dict.fromkeys(forms))
        parts.append(f"[[layer]]\nm = {m}\nn = {n}\nk = {k}\nforms = {json.dumps(given)}\n")
    return "\n".join(parts)
