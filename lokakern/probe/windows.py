"""Windows: what a watch keeps of one sampled step, and the numbers by which it compares steps.

Statistics are not updated while the model trains: a window keeps what was taken of operands as it
is, and makes statistics of a site (`SiteWindow.statistics`) only where it is judged. Of all sites
together a few launches bring some numbers to the host (`Transfer`), of DLRM-DCNv2's nine layers
2 MiB. A thread finds their quantiles in C++, without the interpreter, or where there is no library
by calls of NumPy on all operands at once: with a call for each operand the thread would take the
interpreter from the training hundreds of times a window.

The numbers are those that decide how operands round, as in a fingerprint, but of more rows, and by
quantiles and medians, so that a window of 256 rows tells about as much as many. Zeros are left out,
which nothing rounds and training changes. Nothing is multiplied.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lokakern.native import NATIVE
from lokakern.probe.fingerprint import LEAST_VARIANCE
from lokakern.probe.hooks import Recorder, Taken, Wanted
from lokakern.probe.statistics import (
    FEWEST_ROWS,
    PARTS,
    SiteStatistics,
    Update,
    add_rows,
    coprime_from,
    sizes_of,
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


_Waiting = tuple[Update, tuple[Tensor, ...] | Taken]


class OperandWindow:
    """What was taken of an operand: updates of its statistics that wait, and their tensors."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[_Waiting] = []

    def calls(self) -> list[tuple[Update, tuple[Tensor, ...]]]:
        """Updates with their tensors, of one call each."""
        return [
            (update, given.tensors() if isinstance(given, Taken) else given)
            for update, given in self.waiting
        ]


class SiteWindow:
    """What was taken of a site, in the place of its `SiteStatistics`."""

    def __init__(self, n: int, k: int, device: torch.device, **options: Any) -> None:
        self.n, self.k, self.device, self._options = n, k, device, options
        self.input, self.grad_output = OperandWindow(), OperandWindow()
        # Of weights' gradients: sizes, and pairs of rows or of what holds them.
        self.waiting: list[tuple[Update, tuple[Tensor | Taken, ...]]] = []
        self.norm: str = options.pop("norm", "")
        self.needs_input_gradient = False
        # W, of which a judgement reads what it is then: a parameter, or a copy.
        self.weight: Tensor | None = None
        self.weight_sizes: tuple[Tensor, ...] = ()  # of rows, and of columns
        self.half = torch.bfloat16  # of the newest Y, see `SiteStatistics`
        self.sizes: Counter[int] = Counter()

    def count(self, calls: Mapping[int, int]) -> None:
        """Count calls by their numbers of rows."""
        for rows, count in calls.items():  # `update` takes 2 us
            self.sizes[rows] += count

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

        for part in PARTS:
            for update, tensors in getattr(self, part).calls():
                update([getattr(found, part)], *map(host, tensors))
        for update, given in self.waiting:
            rows = (x.tensors()[2] if isinstance(x, Taken) else x for x in given)
            update([found], *map(host, rows))
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
    elements = ELEMENTS
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

    def keep_taken(self, wanted: Wanted, taken: Taken) -> None:
        wanted.operand.waiting.append((add_rows, taken))
        self._pair(wanted, taken)

    def _add(self, update: Update, owner: Any, *tensors: Any) -> None:
        owner.waiting.append((update, tensors))


def take_weight_sizes(windows: Sequence[SiteWindow]) -> None:
    """Keep the largest magnitudes of the rows and columns of the weights of sites."""
    weights: Any = [window.weight for window in windows]
    native = NATIVE.module
    if native is not None:  # which records no gradients
        found = native.sizes_of(weights)
    else:
        with torch.inference_mode(False), torch.no_grad():
            found = [*map(sizes_of, weights)]
    for window, sizes in zip(windows, found, strict=True):
        window.weight_sizes = sizes


KINDS = ("row", "weight_row", "column", "element", "deviation", "mean")
# Kind of what is transferred, site and part of it, and how many.
_Place = tuple[str, str, str, int]
_Columns = list[tuple[str, str, Tensor]]  # rows of operands, by site and part


class Transfer:
    """Numbers of the sites of one device, on their way to the host.

    Must be made where the current stream is the one that made the windows. Nothing waits for it.
    """

    def __init__(self, device: torch.device, sites: Mapping[str, SiteWindow]) -> None:
        self.device = device
        self.ready: Any = None  # a CUDA event, after which all that windows hold is there, too
        operands = {
            (name, part): operand
            for name, site in sites.items()
            for part, operand in (("input", site.input), ("grad_output", site.grad_output))
            if operand.waiting
        }
        weights = {
            (name, "weight"): site.weight_sizes for name, site in sites.items() if site.weight_sizes
        }
        is_native = NATIVE.module is not None
        start: Any = _start_native if is_native else _Joined
        compute = start(operands, weights).compute
        if device.type == "cuda":
            self.ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self.ready.record(torch.cuda.current_stream(device))
        # In C++ the thread waits in the same call: each return to Python takes the interpreter.
        waits = is_native and self.ready is not None and torch.version.hip is None
        self._event = self.ready.cuda_event if waits else 0
        self._compute = functools.partial(compute, self._event) if is_native else compute
        self._operands, self._weights = tuple(operands), tuple(weights)

    def numbers(self) -> Numbers:
        """Numbers of all operands and weights, for which the host waits."""
        if self.ready is not None and not self._event:
            self.ready.synchronize()
        found, count = self._compute(), len(self._operands)
        beyond, sampled = found[-2 * count :].reshape(2, count).tolist()
        parts: dict[str, set[str]] = {}
        nonfinite = set[str]()
        for (site, part), share, rows in zip(self._operands, beyond, sampled, strict=True):
            if share:
                nonfinite.add(part)
            if rows * (1.0 - share) >= FEWEST_ROWS:
                parts.setdefault(site, set()).add(part)
        names = _names(self._operands, self._weights)
        return Numbers(names, found[: -2 * count], parts, nonfinite)


_Operands = Mapping[tuple[str, str], OperandWindow]  # by site and part
# By site and "weight", sizes of rows and of columns.
_Weights = Mapping[tuple[str, str], tuple[Tensor, ...]]


def _start_native(operands: _Operands, weights: _Weights) -> Any:
    """`_Joined` in C++, where an operand of a single call may be told by its launch."""
    tensors: list[list[Tensor]] = []
    passes: list[tuple[Any, int]] = []
    for operand in operands.values():
        _, given = operand.waiting[0]
        if len(operand.waiting) == 1 and isinstance(given, Taken):
            tensors.append([])
            passes.append((given.by, given.place))
        else:
            tensors.append([x for _, call in operand.calls() for x in call[:3]])
            passes.append((None, 0))
    return NATIVE.module.window_numbers(
        tensors, passes, list(weights.values()), ELEMENTS, MOST_ELEMENTS, FEWEST_BELOW, LEAST_SHARE,
        LEAST_SIZE, LEAST_VARIANCE,
    )  # fmt: skip


class _Joined:
    """The numbers of all operands and weights of a device, on their way to the host."""

    def __init__(self, operands: _Operands, weights: _Weights) -> None:
        samples = {
            place: [tensors[:3] for _, tensors in operand.calls()]
            for place, operand in operands.items()
        }
        self._sampled = [sum(len(rows) for *_, rows in calls) for calls in samples.values()]
        # By type: what PyTorch joins, of one type, takes one launch.
        taken: dict[torch.dtype, tuple[list[Tensor], list[_Place]]] = {}
        matrices: dict[Any, _Columns] = {}

        def take(x: Tensor, *places: _Place) -> None:
            tensors, known = taken.setdefault(x.dtype, ([], []))
            tensors.append(x)
            known += places

        for place, calls in samples.items():
            for row_sizes, column_sizes, rows in calls:
                take(row_sizes, ("row", *place, len(row_sizes)))
                take(column_sizes, ("column", *place, len(column_sizes)))
                some = _some(rows, ELEMENTS // len(calls))
                take(some, ("element", *place, len(some)))
                matrices.setdefault((len(rows), rows.dtype), []).append((*place, rows))
        for place, many in weights.items():
            for kind, sizes in zip(("weight_row", "column"), many, strict=True):
                take(sizes, (kind, *place, len(sizes)))
        for some_rows in matrices.values():
            for batch in _batches(some_rows):
                wide = torch.cat([x for *_, x in batch], dim=1).double()
                for kind, x in zip(
                    ("deviation", "mean"), torch.std_mean(wide, 0, correction=0), strict=True
                ):
                    take(x, *((kind, name, part, rows.shape[1]) for name, part, rows in batch))
        self._places = tuple(place for _, places in taken.values() for place in places)
        self._order = tuple(operands), tuple(weights)
        flat = [torch.cat(tensors).float() for tensors, _ in taken.values()]
        self._values = torch.cat([*flat, flat[0].new_zeros(1)])
        if not self._values.is_cpu:
            pinned = torch.empty(
                len(self._values), dtype=torch.float32, device="cpu", pin_memory=True
            )
            self._values = pinned.copy_(self._values, non_blocking=True)

    def compute(self) -> Array:
        """See `WindowNumbers` in C++; some 40 calls of NumPy."""
        sizes = np.abs(self._values.numpy())
        finite = np.isfinite(sizes)
        operands, weights = self._order
        keys = {kind: operands for kind in KINDS} | {
            "weight_row": weights, "column": (*operands, *weights),
        }  # fmt: skip
        layouts = {kind: _layout(self._places, kind, keys[kind]) for kind in KINDS}
        beyond = np.zeros(len(operands))
        if not finite.all():
            beyond = (~finite)[layouts["row"].index].sum(axis=1) / layouts["row"].counts
            sizes = np.where(finite, sizes, np.float32(0.0))
        row, weight, column, element = (_Ordered(sizes[layouts[kind].index]) for kind in KINDS[:4])
        share = np.clip(FEWEST_BELOW / np.maximum(row.counts, 1), LEAST_SHARE, 0.25)
        high = [
            row.at(np.ceil((1.0 - share) * row.counts) - 1), weight.at_share(1.0),
            column.at_share(1.0), element.at_share(0.999),
        ]  # fmt: skip
        low = [
            row.at(np.ceil(share * row.counts) - 1),
            *(some.at_share(0.5) for some in (weight, column, element)),
        ]
        ends = np.concatenate(high, dtype=np.float64) / np.concatenate(low, dtype=np.float64)
        variance, square = (  # added in order, as in C++
            np.square(sizes[layouts[kind].index], dtype=np.float64).cumsum(axis=1)[:, -1]
            for kind in KINDS[4:]
        )
        ratio = np.zeros(len(operands))
        np.divide(square, variance, out=ratio, where=variance > LEAST_VARIANCE * square)
        octaves = [math.log2(x) for x in (*ends.tolist(), *(1.0 + ratio).tolist())]  # as in C++
        means = 0.5 * np.array(octaves[len(ends) :])
        return np.concatenate((octaves[: len(ends)], beyond, means, beyond, self._sampled))


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
    counts: Array  # ``[operands]``


# The same for all windows of a model with batches of one size, but for weights.
@functools.lru_cache(maxsize=4 * len(KINDS))
def _layout(places: tuple[_Place, ...], kind: str, keys: tuple[tuple[str, str], ...]) -> _Layout:
    found: dict[tuple[str, str], list[Array]] = {key: [] for key in keys}
    end = 0
    for its, site, part, count in places:
        if its == kind:
            found[site, part].append(np.arange(end, end + count))
        end += count
    counts = np.array([sum(map(len, some)) for some in found.values()], dtype=np.int64)
    index = np.full((len(found), max(counts, default=1)), end)
    for row, some in zip(index, found.values(), strict=True):
        joined = np.concatenate(some)
        row[: len(joined)] = joined
    return _Layout(index, counts)


@functools.lru_cache(maxsize=8)
def _names(
    operands: tuple[tuple[str, str], ...], weights: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """Names of numbers, in the order of `Transfer.numbers`."""
    kinds = {"row_spread": operands, "row_crest": weights, "column_crest": (*operands, *weights),
             "crest": operands, NONFINITE: operands, MEAN: operands}  # fmt: skip
    return tuple((site, f"{part}.{name}") for name, keys in kinds.items() for site, part in keys)


def transfers_of(sites: Mapping[str, SiteWindow]) -> list[Transfer]:
    """The transfer of the numbers of each device."""
    devices: dict[torch.device, dict[str, SiteWindow]] = {}
    for name, site in sites.items():
        if site.input.waiting or site.grad_output.waiting:
            devices.setdefault(site.device, {})[name] = site
    if NATIVE.module is not None:  # which records no gradients
        return [Transfer(device, some) for device, some in devices.items()]
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
