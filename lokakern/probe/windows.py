"""Windows: what a watch keeps of one sampled step, and the numbers by which it compares steps.

Statistics are not updated while the model trains: a window keeps what was taken of operands as it
is, and makes statistics of a site (`SiteWindow.statistics`) only where it is judged. Of all sites
together a few launches bring some numbers to the host (`Transfer`), of DLRM-DCNv2's nine layers
2 MiB. A thread sorts them by calls of NumPy on all operands at once: with a call for each operand
the thread would take the interpreter from the training hundreds of times a window.

The numbers are those that decide how operands round, as in a fingerprint, but of more rows, and by
quantiles and medians, so that a window of 256 rows tells about as much as many. Zeros are left out,
which nothing rounds and training changes. Nothing is multiplied.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lokakern.probe.fingerprint import LEAST_VARIANCE
from lokakern.probe.hooks import Recorder
from lokakern.probe.statistics import (
    FEWEST_ROWS,
    PARTS,
    SiteStatistics,
    Update,
    coprime_from,
    snapshots_of,
)

ELEMENTS = 2**14  # of an operand, of which quantiles are taken
MOST_ELEMENTS = 2**24  # of float64 that are worked on together: 128 MiB
LEAST_SHARE = 0.01  # of rows that are smaller, or larger, than the ends of their spread
FEWEST_BELOW = 10  # rows: with three of 256, windows of one distribution differed by 2 octaves
LEAST_SIZE = 2.0**-126  # less is a zero
NONFINITE = "nonfinite_rows"
MEAN = "mean"  # of which half an octave is 1.4 times the size

Array = Any  # of NumPy


class OperandWindow:
    """What was taken of an operand: updates of its statistics that wait, and their tensors."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Update, tuple[Tensor, ...]]] = []

    @property
    def sampled_rows(self) -> int:
        return sum(len(rows) for _, (_, _, rows, _) in self.waiting)


class SiteWindow:
    """What was taken of a site, in the place of its `SiteStatistics`."""

    def __init__(self, n: int, k: int, device: torch.device, **options: Any) -> None:
        self.n, self.k, self.device, self._options = n, k, device, options
        self.input, self.grad_output = OperandWindow(), OperandWindow()
        self.waiting: list[tuple[Update, tuple[Tensor, ...]]] = []  # of weights' gradients
        self.norm: str = options.pop("norm", "")
        self.needs_input_gradient = False
        # W, of which a judgement reads what it is then: a parameter, or a copy.
        self.weight: Tensor | None = None
        self.weight_sizes: tuple[Tensor, ...] = ()  # of rows, and of columns
        self.half = torch.bfloat16  # of the newest Y, see `SiteStatistics`
        self.sizes: Counter[int] = Counter()

    def count(self, calls: Mapping[int, int]) -> None:
        """Count calls by their numbers of rows."""
        self.sizes.update(calls)

    def see_half(self, dtype: torch.dtype) -> None:
        """Take in the dtype of a Y."""
        self.half = dtype

    def statistics(self) -> SiteStatistics:
        """Statistics on the CPU, for which the host waits."""
        found = SiteStatistics(
            self.n, self.k, torch.device("cpu"), norm=self.norm,
            **{**self._options, "needs_input_gradient": self.needs_input_gradient},
        )  # fmt: skip
        copies: dict[int, Tensor] = {}  # rows of operands come in pairs, too

        def host(x: Tensor) -> Tensor:
            if id(x) not in copies:
                copies[id(x)] = x.cpu()
            return copies[id(x)][None]

        operands = [(getattr(self, part), getattr(found, part)) for part in PARTS]
        for taken, owner in (*operands, (self, found)):
            for update, tensors in taken.waiting:
                update([owner], *map(host, tensors))
        if self.weight is not None:
            # While the optimizer changes it: half of a step more or less is no matter.
            found.snapshot, found.snapshot_t = (
                x if x is None else x.cpu() for x in snapshots_of(self.weight)
            )
        found.count(self.sizes)
        found.see_half(self.half)
        return found


class WindowRecorder(Recorder):
    """Takes the same of operands as a `Recorder`, and computes nothing of it."""

    statistics: Any
    has_parameter = False  # whether the weight is one, which need not be copied

    def take_weight(self, weight: Tensor) -> None:
        if not self.has_parameter and weight.shape == (self.n, self.k):
            self.statistics.weight = weight.detach().clone()

    def empty_statistics(self, device: torch.device) -> Any:
        return SiteWindow(
            self.n, self.k, device, has_bias=self.has_bias, norm=self.norm, padding=self.padding
        )

    def statistics_on(self, device: torch.device) -> Any:
        """A window on a device; that of another device, from which the model moved, is dropped."""
        if self.statistics is None or self.statistics.device != device:
            self.statistics = self.empty_statistics(device)
        return self.statistics

    def _add(self, update: Update, owner: Any, *tensors: Tensor) -> None:
        owner.waiting.append((update, tensors))


KINDS = ("row", "weight_row", "column", "element", "deviation", "mean")
# Kind of what is transferred, site and part of it, and how many.
_Place = tuple[str, str, str, int]
_Columns = list[tuple[str, str, Tensor]]  # rows of operands, by site and part


class Transfer:
    """Numbers of the sites of one device, on their way to the host.

    Must be made where the current stream is the one that made the windows. Nothing waits for it.
    """

    def __init__(self, device: torch.device, sites: Mapping[str, SiteWindow]) -> None:
        self._sampled = {  # rows, by site and part
            (name, part): getattr(site, part).sampled_rows
            for name, site in sites.items()
            for part in PARTS
        }
        # By type: what PyTorch joins, of one type, takes one launch.
        taken: dict[torch.dtype, tuple[list[Tensor], list[_Place]]] = {}
        matrices: dict[Any, _Columns] = {}

        def take(x: Tensor, *places: _Place) -> None:
            tensors, known = taken.setdefault(x.dtype, ([], []))
            tensors.append(x)
            known += places

        for name, site in sites.items():
            for part in PARTS:
                calls = [tensors for _, tensors in getattr(site, part).waiting]
                for row_sizes, column_sizes, rows, _ in calls:
                    take(row_sizes, ("row", name, part, len(row_sizes)))
                    take(column_sizes, ("column", name, part, len(column_sizes)))
                    some = _some(rows, ELEMENTS // len(calls))
                    take(some, ("element", name, part, len(some)))
                    matrices.setdefault((len(rows), rows.dtype), []).append((name, part, rows))
            for kind, sizes in zip(("weight_row", "column"), site.weight_sizes, strict=False):
                take(sizes, (kind, name, "weight", len(sizes)))
        for many in matrices.values():
            for batch in _batches(many):
                wide = torch.cat([x for *_, x in batch], dim=1).double()
                for kind, x in zip(
                    ("deviation", "mean"), torch.std_mean(wide, 0, correction=0), strict=True
                ):
                    take(x, *((kind, name, part, rows.shape[1]) for name, part, rows in batch))
        self._places = tuple(place for _, places in taken.values() for place in places)
        flat = [torch.cat(tensors).float() for tensors, _ in taken.values()]
        self._values = torch.cat([*flat, torch.zeros(1, device=device)])
        self._ready: Any = None
        if device.type == "cuda":
            pinned = torch.empty(
                len(self._values), dtype=torch.float32, device="cpu", pin_memory=True
            )
            self._values = pinned.copy_(self._values, non_blocking=True)
            self._ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(device))

    def numbers(self) -> Numbers:
        """Numbers of all operands and weights, for which the host waits; some 40 calls of NumPy."""
        if self._ready is not None:
            self._ready.synchronize()
        sizes = np.abs(self._values.numpy())
        finite = np.isfinite(sizes)
        layouts = {kind: _layout(self._places, kind) for kind in KINDS}
        beyond = np.zeros(len(layouts["row"].keys))
        if not finite.all():
            beyond = (~finite)[layouts["row"].index].sum(axis=1) / layouts["row"].counts
            sizes = np.where(finite, sizes, np.float32(0.0))
        row, weight, column, element = (_Ordered(sizes[layouts[kind].index]) for kind in KINDS[:4])
        share = np.clip(FEWEST_BELOW / np.maximum(row.counts, 1), LEAST_SHARE, 0.25)
        tops = [
            row.at(np.ceil((1.0 - share) * row.counts) - 1), weight.at_share(1.0),
            column.at_share(1.0), element.at_share(0.999),
        ]  # fmt: skip
        bottoms = [
            row.at(np.ceil(share * row.counts) - 1),
            *(some.at_share(0.5) for some in (weight, column, element)),
        ]
        high, low = (np.concatenate(some, dtype=np.float64) for some in (tops, bottoms))
        variance, square = (
            np.square(sizes[layouts[kind].index], dtype=np.float64).sum(axis=1)
            for kind in KINDS[4:]
        )
        ratio = np.zeros(len(square))
        np.divide(square, variance, out=ratio, where=variance > LEAST_VARIANCE * square)
        values = np.concatenate((np.log2(high / low), beyond, 0.5 * np.log2(1.0 + ratio)))
        shares = dict(zip(layouts["row"].keys, beyond.tolist(), strict=True))
        nonfinite = {part for (_, part), share in shares.items() if share}
        parts: dict[str, set[str]] = {}
        for (site, part), rows in self._sampled.items():
            if rows * (1.0 - shares.get((site, part), 0.0)) >= FEWEST_ROWS:
                parts.setdefault(site, set()).add(part)
        return Numbers(_names(self._places), values, parts, nonfinite)


class Numbers(NamedTuple):
    """Numbers of one window.

    Attributes:
        names: Of each number its site, and ``part.name``.
        values: Octaves, and shares of rows, ``[count]``.
        parts: Of sites the operands of which enough rows were sampled that were finite.
        nonfinite: Operands of which some row of some site was not, such as {"grad_output"}.
    """

    names: tuple[tuple[str, str], ...]
    values: Array
    parts: dict[str, set[str]]
    nonfinite: set[str]

    def of(self, site: str) -> dict[str, float]:
        """Those of a site, by ``part.name``."""
        named = zip(self.names, self.values.tolist(), strict=True)
        return {name: value for (its, name), value in named if its == site}


class _Ordered:
    """The magnitudes in each row of a table, in ascending order, zeros first."""

    def __init__(self, table: Array) -> None:
        table.sort(axis=1)
        self._table, self._rows, self._end = table, np.arange(len(table)), table.shape[1]
        self.counts = (table >= LEAST_SIZE).sum(axis=1)  # of those that are no zeros

    def at(self, place: Array) -> Array:
        """The one at a place among those that are no zeros; the least size where there is none."""
        places = self._end - self.counts + np.maximum(place, 0).astype(np.int64)
        found = self._table[self._rows, np.minimum(places, self._end - 1)]
        return np.maximum(found, LEAST_SIZE)

    def at_share(self, share: float) -> Array:
        return self.at(np.rint(share * (self.counts - 1)))


class _Layout(NamedTuple):
    """Where the numbers of a kind are: for each operand, filled up with the zero at the end."""

    index: Array  # ``[operands, most]``
    keys: tuple[tuple[str, str], ...]  # site and part
    counts: Array  # ``[operands]``


# The same for all windows of a model with batches of one size, but for weights.
@functools.lru_cache(maxsize=4 * len(KINDS))
def _layout(places: tuple[_Place, ...], kind: str) -> _Layout:
    found: dict[tuple[str, str], list[Array]] = {}
    end = 0
    for its, site, part, count in places:
        if its == kind:
            found.setdefault((site, part), []).append(np.arange(end, end + count))
        end += count
    counts = np.array([sum(map(len, some)) for some in found.values()], dtype=np.int64)
    index = np.full((len(found), max(counts, default=0)), end)
    for row, some in zip(index, found.values(), strict=True):
        joined = np.concatenate(some)
        row[: len(joined)] = joined
    return _Layout(index, tuple(found), counts)


@functools.lru_cache(maxsize=4)
def _names(places: tuple[_Place, ...]) -> tuple[tuple[str, str], ...]:
    """Names of numbers, in the order of `Transfer.numbers`."""
    kinds = {"row_spread": "row", "row_crest": "weight_row", "column_crest": "column",
             "crest": "element", NONFINITE: "row", MEAN: "mean"}  # fmt: skip
    return tuple(
        (site, f"{part}.{name}")
        for name, kind in kinds.items()
        for site, part in _layout(places, kind).keys
    )


def transfers_of(sites: Mapping[str, SiteWindow]) -> list[Transfer]:
    """The transfer of the numbers of each device."""
    devices: dict[torch.device, dict[str, SiteWindow]] = {}
    for name, site in sites.items():
        if site.input.waiting or site.grad_output.waiting:
            devices.setdefault(site.device, {})[name] = site
    with torch.inference_mode(False), torch.no_grad():
        return [Transfer(device, some) for device, some in devices.items()]


def _some(rows: Tensor, most: int) -> Tensor:
    """Some elements of rows, evenly spread over rows and columns, as a view."""
    count = rows.numel()
    stride = coprime_from(-(-count // max(most, 1)), rows.shape[1])
    return rows.reshape(-1)[::stride]


def _batches(many: _Columns) -> Iterable[_Columns]:
    """Matrices that are worked on together."""
    some: _Columns = []
    elements = 0
    for entry in many:
        if some and elements + entry[2].numel() > MOST_ELEMENTS:
            yield some
            some, elements = [], 0
        some.append(entry)
        elements += entry[2].numel()
    yield some
