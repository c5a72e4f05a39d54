"""A click log that a user has, in files that FuxiCTR prepared, in place of the synthetic one.

FuxiCTR (`pip install fuxictr`) makes of public data sets such as Criteo, Avazu and MovieLens a
folder with ``feature_map.json`` and the parts train, valid and test: ``train.parquet`` (version
2.3, which this was tried with), ``train.npz``, or a folder ``train`` with several files. They are
read with NumPy and pyarrow, without FuxiCTR, into memory, and checked: they are data from
elsewhere.

- A numeric feature is a dense one. Without any, all samples have one dense feature, 1.
- A categorical feature is a table with one slot, a sequence one with as many as it is long. Id 0 is
  FuxiCTR's padding, an empty slot. Ids beyond a limit of rows share rows (id modulo rows).
- Models with a history read the first sequence that shares the embedding of another feature, whose
  table then is the first one. Ids that are padded at the end are moved there.
- Of several labels the first one is the click.
- Batches of training are drawn in an order that the seed decides, each epoch in another one. Those
  of evaluation are of valid, else of test, also in an order of the seed, each sample at most once:
  with one set of samples for all seeds an interval over seeds would not hold what depends on it.
- Nobody knows the probabilities of clicks, so the expected log loss is that of the labels.
"""

from __future__ import annotations

import importlib
import json
import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lokakern.bench.models.blocks import PADDING, Batch, Inputs
from lokakern.bench.models.catalog import fitting_rows
from lokakern.bench.models.click_log import HELD_OUT
from lokakern.errors import MeasurementError, UnsupportedError

MAP = "feature_map.json"
TRAIN, HELD_OUT_PARTS = "train", ("valid", "test")
MOST_MAP_BYTES = 16 * 2**20
MOST_FEATURES, MOST_SLOTS, MOST_ROWS = 4096, 4096, 2**31
HELD_OUT_EPOCH = 1_000_002  # in whose order held-out samples are
CHUNK = 2**16  # samples that are converted at once
NUMBERS = "biuf"  # kinds of dtypes: booleans, integers and floats
NUMERIC, CATEGORICAL, SEQUENCE = "numeric", "categorical", "sequence"
UNUSED = ("meta",)  # such as ids of groups, by which FuxiCTR computes metrics


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of the map."""

    name: str
    kind: str  # `NUMERIC`, `CATEGORICAL` or `SEQUENCE`
    rows: int = 0  # ids from 1 to this one
    slots: int = 0  # of a sample
    shares: str = ""  # the feature whose embedding it shares


@dataclass(frozen=True, slots=True)
class RecordedData:
    """A prepared folder: what its samples have, and those that logs have read."""

    folder: Path
    features: tuple[Feature, ...]
    label: str
    _read: dict[str, tuple[Inputs, _Samples]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )  # by part, for the logs of all seeds

    @staticmethod
    def open(folder: Path) -> RecordedData:
        """Read the map of features.

        Raises:
            MeasurementError: It is missing, or not one of FuxiCTR's.
        """
        path = folder / MAP
        try:
            if path.stat().st_size > MOST_MAP_BYTES:
                raise MeasurementError(
                    f"{path}: more than {MOST_MAP_BYTES} bytes; expected a small file"
                )
            facts = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
        except (OSError, ValueError, RecursionError) as error:
            raise MeasurementError(
                f"{path}: {error}; expected a folder that FuxiCTR prepared, with {MAP} and train, "
                "valid and test as .npz or .parquet"
            ) from error
        features: dict[str, Feature] = {}
        for name, spec in _specs(facts, path):
            if name in features:
                raise MeasurementError(f"{path}: feature {name!r:.80} is there twice")
            features[name] = _feature(name, spec, path)
        used = [feature for feature in features.values() if feature.kind not in UNUSED]
        labels = facts.get("labels")
        is_list = isinstance(labels, list) and labels
        if not is_list or not all(isinstance(label, str) for label in labels):
            raise MeasurementError(f"{path}: labels are {labels!r:.80}; expected a list of names")
        told = [feature.name for feature in used if feature.name in labels]
        if told:
            raise MeasurementError(
                f"{path}: {told[0]!r:.80} is a label and a feature; a model that reads it knows "
                "the clicks"
            )
        if not any(feature.rows for feature in used):
            raise MeasurementError(
                f"{path}: no categorical or sequence feature; a model needs a table"
            )
        return RecordedData(folder, tuple(used), labels[0])

    def tables(self, history: int) -> tuple[tuple[Feature, ...], Feature | None]:
        """Features with tables, and of these the one that is the history.

        Args:
            history: Length that the model reads; 0 for none.

        Raises:
            MeasurementError: The model reads a history, and no sequence shares an embedding, or
                it has more ids than that.
        """
        tables = [feature for feature in self.features if feature.rows]
        if not history:
            return tuple(tables), None
        by_name = {feature.name: feature for feature in tables}
        others = (x for x in tables if x.kind == SEQUENCE and x.shares != x.name)
        past = next((x for x in others if x.shares in by_name), None)
        if past is None:
            raise MeasurementError(
                f"{self.folder / MAP}: the model reads a history of ids of another feature; no "
                "sequence has share_embedding; take a model without a history, such as wukong"
            )
        first = by_name[past.shares]
        if past.rows > first.rows:
            raise MeasurementError(
                f"{self.folder / MAP}: the history {past.name!r:.80} has vocab_size "
                f"{past.rows + 1}, and {first.name!r:.80}, whose embedding it shares, "
                f"{first.rows + 1}; expected no more ids than there"
            )
        return (first, *(x for x in tables if x not in (first, past))), past

    def config_of(self, config: Any, most_rows: int | None = None) -> Any:
        """The config of a model with these features.

        Args:
            config: One of the catalog.
            most_rows: Limit on the rows of a table; None is that of `fitting_rows`.

        Raises:
            MeasurementError: As of `tables`, or all tables have too many rows.
        """
        history = config.inputs.history
        tables, _ = self.tables(history)
        dense = sum(feature.kind == NUMERIC for feature in self.features)
        inputs = Inputs(
            max(1, dense), tuple(x.rows for x in tables), tuple(x.slots for x in tables), history
        )
        inputs = inputs.capped(most_rows or fitting_rows(inputs))
        _check_rows(inputs)
        return replace(config, inputs=inputs)

    def samples_of(self, part: str, inputs: Inputs) -> _Samples:
        """All samples of a part, which are read once.

        Raises:
            MeasurementError: See `RecordedLog`.
            UnsupportedError: See `RecordedLog`.
        """
        known = self._read.get(part)
        if known is None or known[0] != inputs:
            known = self._read[part] = inputs, _samples_of(self, part, inputs)
        return known[1]


def _check_rows(inputs: Inputs) -> None:
    rows = sum(inputs.rows)
    if rows >= MOST_ROWS:
        raise MeasurementError(
            f"all tables together have {rows} rows; expected fewer than 2^31: set --most-rows to "
            f"{(MOST_ROWS - 1) // len(inputs.rows)} or less"
        )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose names are there once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r:.80} is there twice")
    return found


def _specs(facts: Any, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    listed = facts.get("features") if isinstance(facts, dict) else None
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_FEATURES:
        raise MeasurementError(f"{path}: expected a list of 1 to {MOST_FEATURES} features")
    for each in listed:
        if not isinstance(each, dict):
            raise MeasurementError(
                f"{path}: feature {each!r:.80}; expected a name with its properties"
            )
        for name, spec in each.items():
            if not isinstance(spec, dict):
                raise MeasurementError(f"{path}: feature {name!r:.80} has no properties")
            yield name, spec


def _feature(name: str, spec: Mapping[str, Any], path: Path) -> Feature:
    kind = spec.get("type")
    if kind in (NUMERIC, *UNUSED):
        return Feature(name, str(kind))
    if kind not in (CATEGORICAL, SEQUENCE):
        raise MeasurementError(
            f"{path}: feature {name!r:.80} is of type {kind!r:.80}; expected {NUMERIC}, "
            f"{CATEGORICAL}, {SEQUENCE} or {', '.join(UNUSED)}"
        )
    vocabulary, slots = spec.get("vocab_size"), spec.get("max_len", 1) if kind == SEQUENCE else 1
    if type(vocabulary) is not int or not 1 < vocabulary <= MOST_ROWS:
        raise MeasurementError(
            f"{path}: {name!r:.80} has vocab_size {vocabulary!r:.80}; expected 2 or more"
        )
    if type(slots) is not int or not 0 < slots <= MOST_SLOTS:
        raise MeasurementError(
            f"{path}: {name!r:.80} has max_len {slots!r:.80}; expected 1 to {MOST_SLOTS}"
        )
    shares = spec.get("share_embedding")
    return Feature(name, kind, vocabulary - 1, slots, shares if isinstance(shares, str) else "")


class RecordedLog:
    """Batches by step, as of `ClickLog`.

    Args:
        data: A prepared folder.
        inputs: What the model is fed, of `RecordedData.config_of`.
        seed: Of the order of samples.
        device: Where batches are put.

    Raises:
        MeasurementError: A file is missing, or holds what its map does not say.
        UnsupportedError: pyarrow reads the files, and is not installed.
    """

    def __init__(
        self, data: RecordedData, inputs: Inputs, seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        _check_rows(inputs)
        self.inputs, self.seed, self.device = inputs, seed, torch.device(device)
        self._train = data.samples_of(TRAIN, inputs)
        found = [part for part in HELD_OUT_PARTS if _files_of(data.folder, part)]
        if not found:
            raise MeasurementError(
                f"{data.folder}: neither valid nor test; models are judged on these"
            )
        self._held_out = data.samples_of(found[0], inputs)
        self._order: tuple[int, Tensor] = -1, torch.empty(0, dtype=torch.int64)
        self._held_out_order = _order_of(len(self._held_out), seed, HELD_OUT_EPOCH)

    def held_out_batches(self, samples: int) -> int:
        """Number of batches of so many held-out samples, each sample at most once."""
        return len(self._held_out) // samples

    def batch(self, step: int, samples: int) -> Batch:
        """Samples of a step; steps from `HELD_OUT` on are never trained on.

        Raises:
            MeasurementError: There is no such step, or there are too few samples.
        """
        if step < 0 or samples < 1:
            raise MeasurementError(
                f"step {step} of {samples} samples; expected a step from 0 on, and a sample or more"
            )
        is_held_out = step >= HELD_OUT
        of = self._held_out if is_held_out else self._train
        if samples > len(of):
            raise MeasurementError(
                f"{len(of)} samples; expected those of a batch, {samples}, or more"
            )
        first = (step - HELD_OUT if is_held_out else step) * samples
        if is_held_out:
            if first + samples > len(of):
                raise MeasurementError(
                    f"{len(of)} held-out samples; expected {first + samples} for "
                    f"{step - HELD_OUT + 1} batches of {samples}"
                )
            within = self._held_out_order[first : first + samples]
            return of.batch(within, self.inputs, self.device)
        places = torch.arange(first, first + samples)
        within, epochs = places % len(of), places // len(of)
        within = torch.cat([
            self._order_in(epoch)[within[epochs == epoch]]
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
        ])  # fmt: skip
        return of.batch(within, self.inputs, self.device)

    def probabilities(self, batch: Batch) -> Tensor:
        """What is known of the probabilities of clicks, ``[batch]``: the labels."""
        return batch.labels

    def _order_in(self, epoch: int) -> Tensor:
        if self._order[0] != epoch:
            self._order = epoch, _order_of(len(self._train), self.seed, epoch)
        return self._order[1]


def _order_of(count: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)


@dataclass(frozen=True, slots=True)
class _Samples:
    """All samples of a part."""

    dense: Tensor  # ``[samples, dense]`` float32
    ids: Tensor  # ``[samples, slots]`` int32, rows of the concatenated tables
    history: Tensor  # ``[samples, length]`` int32
    labels: Tensor  # ``[samples]`` float32

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, places: Tensor, inputs: Inputs, device: torch.device) -> Batch:
        dense, ids, past, labels = (
            x[places].to(device) for x in (self.dense, self.ids, self.history, self.labels)
        )
        offsets = inputs.offsets(len(places), device)
        return Batch(dense, ids.long().flatten(), offsets, past.long(), labels)


def _samples_of(data: RecordedData, part: str, inputs: Inputs) -> _Samples:
    """Read column by column, each to its place and dtype, so that no more than one is there."""
    tables, past = data.tables(inputs.history)
    numeric = [feature for feature in data.features if feature.kind == NUMERIC]
    labels, counts = [], []
    files = _found_files(data.folder, part)
    for path in files:
        column = _read(path, data.label)
        labels.append(torch.empty(len(column)))
        counts.append(len(column))
        for rows, values in _numbers(column, path, data.label, 1, "a label"):
            if not ((values == 0) | (values == 1)).all():
                raise MeasurementError(f"{path}: {data.label!r:.80} has other values than 0 and 1")
            labels[-1][rows] = torch.from_numpy(values[:, 0].astype(np.float32))
    count = sum(counts)
    if not count:
        raise MeasurementError(f"{data.folder}: {part} has no samples; expected one or more")
    starts = dict(zip((x.name for x in tables), inputs.starts, strict=True))
    rows_of = dict(zip((x.name for x in tables), inputs.rows, strict=True))
    dense = torch.ones(count, inputs.dense)
    ids = torch.empty(count, sum(x.slots for x in tables), dtype=torch.int32)
    history = torch.zeros(count, inputs.history, dtype=torch.int32)
    first = 0
    for path, size in zip(files, counts, strict=True):
        here = slice(first, first := first + size)
        for place, feature in enumerate(numeric):
            _read_numeric(path, feature, dense[here, place])
        slot = 0
        for feature in tables:
            into = ids[here, slot : slot + feature.slots]
            for rows, found in _ids(path, feature, size):
                into[rows] = _placed(found, starts[feature.name], rows_of[feature.name])
            slot += feature.slots
        if past is not None:
            _read_history(path, past, history[here], rows_of[past.shares])
    return _Samples(dense, ids, history, labels[0] if len(labels) == 1 else torch.cat(labels))


def _read_numeric(path: Path, feature: Feature, into: Tensor) -> None:
    column = _read(path, feature.name, len(into), 1, "a number")
    for rows, values in _numbers(column, path, feature.name, 1, "a number"):
        with np.errstate(over="ignore"):  # to infinity, which is refused
            found = values[:, 0].astype(np.float32)
        if not np.isfinite(found).all():
            raise MeasurementError(
                f"{path}: {feature.name!r:.80} is no column of finite numbers; let FuxiCTR fill "
                "missing ones (fill_na)"
            )
        into[rows] = torch.from_numpy(found)


def _read_history(path: Path, past: Feature, into: Tensor, most: int) -> None:
    """The newest ids, padded at the front; the table is the first one."""
    length = min(into.shape[1], past.slots)
    for rows, found in _ids(path, past, len(into)):
        ends_empty = found[:, -1] == PADDING
        if ends_empty.any():
            moved = found[ends_empty]
            order = (moved != PADDING).int().argsort(dim=1, stable=True)
            found[ends_empty] = moved.gather(1, order)
        into[rows, into.shape[1] - length :] = _placed(found[:, past.slots - length :], 1, most)


def _placed(ids: Tensor, start: int, rows: int) -> Tensor:
    """Rows of the concatenated tables."""
    return torch.where(ids > 0, (ids - 1) % rows + start, PADDING).int()


def _ids(path: Path, feature: Feature, count: int) -> Iterator[tuple[slice, Tensor]]:
    """Ids of some samples at once, ``[samples, slots]`` int64."""
    expected = f"{feature.slots} ids"
    column = _read(path, feature.name, count, feature.slots, expected)
    for rows, values in _numbers(column, path, feature.name, feature.slots, expected):
        low, high = values.min(), values.max()
        if not (low >= 0 and high <= feature.rows):  # not a number, too
            raise MeasurementError(
                f"{path}: ids {low} to {high} of {feature.name!r:.80}; expected 0 to "
                f"{feature.rows}, as {MAP} says"
            )
        ids = values.astype(np.int64)
        if values.dtype.kind == "f" and (ids != values).any():
            raise MeasurementError(
                f"{path}: {feature.name!r:.80} has fractions of dtype {values.dtype}; expected "
                f"{expected} in a sample"
            )
        yield rows, torch.from_numpy(ids)


def _numbers(
    column: np.ndarray[Any, Any], path: Path, name: str, width: int, expected: str
) -> Iterator[tuple[slice, np.ndarray[Any, Any]]]:
    """Numbers of some samples at once, ``[samples, width]``, of a column of numbers or lists."""
    for start in range(0, len(column), CHUNK):
        values = column[start : start + CHUNK]
        if values.dtype == object:  # cells of parquet files
            try:
                values = np.stack([np.asarray(cell) for cell in values.tolist()])
            except ValueError as error:
                raise MeasurementError(
                    f"{path}: {name!r:.80} has missing cells or lists of several lengths; expected "
                    f"{expected} in a sample, as FuxiCTR pads them"
                ) from error
            if values.ndim > 2:
                raise MeasurementError(
                    f"{path}: {name!r:.80} has lists of lists; expected {expected} in a sample"
                )
        _check_shape(values.shape, values.dtype, path, name, len(values), width, expected)
        yield slice(start, start + len(values)), values.reshape(len(values), width)


def _check_shape(
    shape: tuple[int, ...], dtype: np.dtype[Any], path: Path, name: str, count: int | None,
    width: int, expected: str,
) -> None:  # fmt: skip
    if dtype.kind not in NUMBERS:
        raise MeasurementError(
            f"{path}: {name!r:.80} is of dtype {dtype!s:.80}; expected {expected} in a sample, "
            "as integers or floats"
        )
    if not shape or (count is not None and shape[0] != count):
        raise MeasurementError(
            f"{path}: {shape[0] if shape else 'one number'} of {name!r:.80}, {count} labels; "
            "expected equal"
        )
    if math.prod(shape[1:]) != width:
        raise MeasurementError(
            f"{path}: {name!r:.80} has {math.prod(shape[1:])} numbers of dtype {dtype} in a "
            f"sample; expected {expected}"
        )


def _files_of(folder: Path, part: str) -> list[Path]:
    """The files of a part, in order."""
    for suffix in (".npz", ".parquet"):
        single = folder / f"{part}{suffix}"
        if single.is_file():
            return [single]
        several = sorted((folder / part).glob(f"*{suffix}"))
        if several:
            return several
    return []


def _found_files(folder: Path, part: str) -> list[Path]:
    files = _files_of(folder, part)
    if not files:
        raise MeasurementError(
            f"{folder}: no {part}.npz, {part}.parquet or folder {part} with such files; FuxiCTR "
            "before 2.1 writes .h5: prepare the data with a later version"
        )
    return files


def _read(
    path: Path, name: str, count: int | None = None, width: int = 1, expected: str = "a label"
) -> np.ndarray[Any, Any]:
    """A column of a file; None takes any number of samples."""
    try:
        if path.suffix == ".npz":
            return _read_npz(path, name, count, width, expected)
        column: np.ndarray[Any, Any] = _parquet().read_table(path, columns=[name])[name].to_numpy()
    except (MeasurementError, UnsupportedError):
        raise
    except Exception as error:  # of a damaged file NumPy and pyarrow raise many
        raise MeasurementError(
            f"{path}: {name!r:.80}: {error}; expected the columns of {MAP}"
        ) from error
    if column.dtype == object:  # of whose cells `_numbers` looks at the shapes
        _check_shape(column.shape, np.dtype(int), path, name, count, 1, expected)
    else:
        _check_shape(column.shape, column.dtype, path, name, count, width, expected)
    return column


def _read_npz(
    path: Path, name: str, count: int | None, width: int, expected: str
) -> np.ndarray[Any, Any]:
    """An array whose header was checked before it is decompressed."""
    member = f"{name}.npy"
    with zipfile.ZipFile(path) as archive:
        with archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            else:
                shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        _check_shape(shape, dtype, path, name, count, width, expected)
        if math.prod(shape) * dtype.itemsize > archive.getinfo(member).file_size:
            raise MeasurementError(f"{path}: {name!r:.80} has fewer bytes than its header says")
        with archive.open(member) as file:
            found: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
    return found


def _parquet() -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UnsupportedError(
            "parquet files need pyarrow: pip install pyarrow; npz files need nothing"
        ) from error
