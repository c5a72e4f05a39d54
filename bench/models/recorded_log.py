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
  table then is the first one.
- Batches of training are drawn in an order that the seed decides, each epoch in another one. Those
  of evaluation are of valid, else of test, from its first sample on, and begin again at its end.
- Nobody knows the probabilities of clicks, so the expected log loss is that of the labels.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """A prepared folder: what its samples have, before they are read."""

    folder: Path
    features: tuple[Feature, ...]
    label: str

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
            facts = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise MeasurementError(
                f"{path}: {error}; expected a folder that FuxiCTR prepared, with {MAP} and train, "
                "valid and test as .npz or .parquet"
            ) from error
        features = [_feature(name, spec, path) for name, spec in _specs(facts, path)]
        used = [feature for feature in features if feature.kind not in UNUSED]
        labels = facts.get("labels")
        if not isinstance(labels, list) or not labels or not isinstance(labels[0], str):
            raise MeasurementError(f"{path}: labels are {labels!r:.80}; expected a list of names")
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
            MeasurementError: The model reads a history, and no sequence shares an embedding.
        """
        tables = [feature for feature in self.features if feature.rows]
        if not history:
            return tuple(tables), None
        by_name = {feature.name: feature for feature in tables}
        past = next((x for x in tables if x.kind == SEQUENCE and x.shares in by_name), None)
        if past is None:
            raise MeasurementError(
                f"{self.folder / MAP}: the model reads a history of ids of another feature; no "
                "sequence has share_embedding; take a model without a history, such as wukong"
            )
        first = by_name[past.shares]
        return (first, *(x for x in tables if x not in (first, past))), past

    def config_of(self, config: Any, most_rows: int | None = None) -> Any:
        """The config of a model with these features.

        Args:
            config: One of the catalog.
            most_rows: Limit on the rows of a table; None is that of `fitting_rows`.
        """
        history = config.inputs.history
        tables, _ = self.tables(history)
        dense = sum(feature.kind == NUMERIC for feature in self.features)
        inputs = Inputs(
            max(1, dense), tuple(x.rows for x in tables), tuple(x.slots for x in tables), history
        )
        return replace(config, inputs=inputs.capped(most_rows or fitting_rows(inputs)))


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
        seed: Of the order of training samples.
        device: Where batches are put.

    Raises:
        MeasurementError: A file is missing, or holds what its map does not say.
        UnsupportedError: pyarrow reads the files, and is not installed.
    """

    def __init__(
        self, data: RecordedData, inputs: Inputs, seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.inputs, self.seed, self.device = inputs, seed, torch.device(device)
        self._train = _samples_of(data, TRAIN, inputs)
        found = [part for part in HELD_OUT_PARTS if _files_of(data.folder, part)]
        if not found:
            raise MeasurementError(
                f"{data.folder}: neither valid nor test; models are judged on these"
            )
        self._held_out = _samples_of(data, found[0], inputs)
        self._order: tuple[int, Tensor] = -1, torch.empty(0, dtype=torch.int64)

    def batch(self, step: int, samples: int) -> Batch:
        """Samples of a step; steps from `HELD_OUT` on are never trained on."""
        is_held_out = step >= HELD_OUT
        of = self._held_out if is_held_out else self._train
        if samples > len(of):
            raise MeasurementError(
                f"{len(of)} samples; expected those of a batch, {samples}, or more"
            )
        first = (step - HELD_OUT if is_held_out else step) * samples
        places = torch.arange(first, first + samples)
        within = places % len(of)
        if not is_held_out:
            epochs = places // len(of)
            within = torch.cat([
                self._order_of(epoch)[within[epochs == epoch]]
                for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
            ])  # fmt: skip
        return of.batch(within, self.inputs, self.device)

    def probabilities(self, batch: Batch) -> Tensor:
        """What is known of the probabilities of clicks, ``[batch]``: the labels."""
        return batch.labels

    def _order_of(self, epoch: int) -> Tensor:
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = epoch, torch.randperm(len(self._train), generator=generator)
        return self._order[1]


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


@functools.lru_cache(maxsize=2)  # train and valid, of all seeds
def _samples_of(data: RecordedData, part: str, inputs: Inputs) -> _Samples:
    tables, past = data.tables(inputs.history)
    numeric = [feature for feature in data.features if feature.kind == NUMERIC]
    wanted = [*numeric, *tables, *([past] if past else [])]
    columns = _columns(data.folder, part, [*(x.name for x in wanted), data.label])
    count = len(columns[data.label])
    for name, column in columns.items():
        if len(column) != count:
            raise MeasurementError(
                f"{part}: {len(column)} of {name!r:.80}, {count} labels; expected equal"
            )
    labels = torch.from_numpy(columns[data.label].astype(np.float32)).flatten()
    if len(labels) != count or not ((labels == 0) | (labels == 1)).all():
        raise MeasurementError(f"{part}: {data.label!r:.80} has other values than 0 and 1")
    dense = torch.ones(count, inputs.dense)
    for place, feature in enumerate(numeric):
        values = torch.from_numpy(columns[feature.name].astype(np.float32))
        if values.shape != (count,) or not values.isfinite().all():
            raise MeasurementError(
                f"{part}: {feature.name!r:.80}, {tuple(values.shape)}, is no column of finite "
                "numbers; let FuxiCTR fill missing ones (fill_na)"
            )
        dense[:, place] = values
    starts = dict(zip((x.name for x in tables), inputs.starts, strict=True))
    rows = dict(zip((x.name for x in tables), inputs.rows, strict=True))
    found = []
    for feature in [*tables, *([past] if past else [])]:
        table = feature.shares if feature is past else feature.name
        ids = _ids(columns[feature.name], feature, part, count)
        placed = torch.where(ids > 0, (ids - 1) % rows[table] + starts[table], PADDING)
        found.append(placed.int())
    history = found.pop() if past else torch.zeros(count, 0, dtype=torch.int32)
    short = inputs.history - history.shape[1]
    history = torch.nn.functional.pad(history, (short, 0))  # or the newest ids, where it is longer
    return _Samples(dense, torch.cat(found, 1), history, labels)


def _ids(column: np.ndarray[Any, Any], feature: Feature, part: str, count: int) -> Tensor:
    """Ids of a feature, ``[samples, slots]`` int64."""
    if column.dtype == object:  # lists of parquet files
        try:
            column = np.stack(column.tolist()) if count else np.zeros((0, feature.slots), np.int64)
        except ValueError as error:
            raise MeasurementError(
                f"{part}: {feature.name!r:.80} has lists of several lengths; expected "
                f"{feature.slots} ids, as FuxiCTR pads them"
            ) from error
    ids = column.astype(np.int64).reshape(count, -1)
    if ids.shape[1] != feature.slots or (ids != column.reshape(count, -1)).any():
        raise MeasurementError(
            f"{part}: {feature.name!r:.80} has {ids.shape[1]} numbers of dtype {column.dtype} in a "
            f"sample; expected {feature.slots} ids"
        )
    if count and not 0 <= ids.min() <= ids.max() <= feature.rows:
        raise MeasurementError(
            f"{part}: ids {ids.min()} to {ids.max()} of {feature.name!r:.80}; expected 0 to "
            f"{feature.rows}, as {MAP} says"
        )
    return torch.from_numpy(ids)


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


def _columns(folder: Path, part: str, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    files = _files_of(folder, part)
    if not files:
        raise MeasurementError(
            f"{folder}: no {part}.npz, {part}.parquet or folder {part} with such files; FuxiCTR "
            "before 2.1 writes .h5: prepare the data with a later version"
        )
    read = [_read(path, names) for path in files]
    try:
        return {name: np.concatenate([columns[name] for columns in read]) for name in names}
    except ValueError as error:
        raise MeasurementError(
            f"{folder}: files of {part} differ in their columns: {error}"
        ) from error


def _read(path: Path, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in names}
        table = _parquet().read_table(path, columns=list(names))
        return {name: table[name].to_numpy() for name in names}
    except UnsupportedError:
        raise
    except Exception as error:  # of a damaged file NumPy and pyarrow raise many
        raise MeasurementError(f"{path}: {error}; expected the columns of {MAP}") from error


def _parquet() -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UnsupportedError(
            "parquet files need pyarrow: pip install pyarrow; npz files need nothing"
        ) from error
