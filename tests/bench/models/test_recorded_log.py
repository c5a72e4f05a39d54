"""Click logs of users, in the format of FuxiCTR 2.3: what is read, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lokakern.bench.cli.main import app
from lokakern.bench.models import recorded_log
from lokakern.bench.models.arms import Setting
from lokakern.bench.models.blocks import PADDING, Inputs
from lokakern.bench.models.catalog import config_named
from lokakern.bench.models.click_log import HELD_OUT
from lokakern.bench.models.learning import judged
from lokakern.bench.models.recorded_log import RecordedData, RecordedLog
from lokakern.errors import MeasurementError, UnsupportedError

FEATURES: list[dict[str, Any]] = [
    {"price": {"source": "", "type": "numeric"}},
    {"item": {"type": "categorical", "padding_idx": 0, "vocab_size": 52}},
    {"past": {"type": "sequence", "share_embedding": "item", "max_len": 5, "vocab_size": 52}},
    {"city": {"type": "categorical", "vocab_size": 7}},
    {"user": {"type": "meta"}},
]
MAP = {"dataset_id": "tiny", "labels": ["label"], "features": FEATURES}
COUNTS = {"train": 100, "valid": 40, "test": 30}


def columns_of(count: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    drawn = np.random.default_rng(seed)
    return {
        "price": drawn.random(count), "item": drawn.integers(0, 52, count),
        "past": drawn.integers(0, 52, (count, 5)), "city": drawn.integers(0, 7, count),
        "user": drawn.integers(0, 9, count), "label": drawn.integers(0, 2, count).astype(float),
    }  # fmt: skip


def in_order(columns: dict[str, np.ndarray[Any, Any]], seed: int = 0) -> dict[str, Any]:
    """Columns of held-out samples in the order of a seed."""
    order = recorded_log._order_of(len(columns["label"]), seed, recorded_log.HELD_OUT_EPOCH)
    return {name: column[order.numpy()] for name, column in columns.items()}


def folder_of(path: Path, facts: object = MAP, **changed: np.ndarray[Any, Any]) -> Path:
    """A folder with some columns of train replaced."""
    (path / "feature_map.json").write_text(json.dumps(facts))
    for seed, (part, count) in enumerate(COUNTS.items()):
        columns = columns_of(count, seed)
        np.savez(path / f"{part}.npz", **(columns | changed if part == "train" else columns))
    return path


@dataclass(frozen=True)
class Fed:
    """The config of a model."""

    inputs: Inputs


def log_of(folder: Path, history: int = 0, most_rows: int | None = None, **how: Any) -> RecordedLog:
    data = RecordedData.open(folder)
    config = data.config_of(Fed(Inputs(1, (1,), (1,), history)), most_rows)
    return RecordedLog(data, config.inputs, **how)


def test_a_batch_has_the_columns_of_its_samples(tmp_path: Path) -> None:
    log = log_of(folder_of(tmp_path))
    assert log.inputs.rows == (51, 51, 6) and log.inputs.slots == (1, 5, 1)
    batch = log.batch(HELD_OUT, 16)
    columns = {name: column[:16] for name, column in in_order(columns_of(40, 1)).items()}
    assert torch.equal(batch.dense[:, 0], torch.from_numpy(columns["price"]).float())
    assert torch.equal(batch.labels, torch.from_numpy(columns["label"]).float())
    ids = batch.ids.view(16, 7).numpy()
    starts = log.inputs.starts
    for place, column in ((slice(0, 1), columns["item"][:, None]), (slice(1, 6), columns["past"]),
                          (slice(6, 7), columns["city"][:, None])):  # fmt: skip
        start = starts[{0: 0, 1: 1, 6: 2}[place.start]]
        assert (ids[:, place] == np.where(column > 0, column - 1 + start, PADDING)).all()
    assert torch.equal(log.probabilities(batch), batch.labels)


def test_a_history_is_of_the_table_that_it_shares(tmp_path: Path) -> None:
    log = log_of(folder_of(tmp_path), history=7)
    assert log.inputs.rows == (51, 6)
    columns = columns_of(40, 1)
    columns["past"][:, -1] = 7  # not padded at the end
    np.savez(tmp_path / "valid.npz", **columns)
    log = log_of(tmp_path, history=7)
    past = in_order(columns)["past"][:16]
    history = log.batch(HELD_OUT, 16).history
    assert history.shape == (16, 7) and (history[:, :2] == PADDING).all()
    assert (history[:, 2:].numpy() == past).all()  # the first table begins at row 1
    newest = log_of(tmp_path, history=3).batch(HELD_OUT, 16).history
    assert torch.equal(newest, history[:, 4:])


def test_an_epoch_has_each_sample_once_in_an_order_of_the_seed(tmp_path: Path) -> None:
    log = log_of(folder_of(tmp_path), seed=3)
    prices = torch.cat([log.batch(step, 25).dense[:, 0] for step in range(8)])
    first, second = prices[:100], prices[100:]
    assert torch.equal(first.sort().values, second.sort().values) and not torch.equal(first, second)
    assert len(first.unique()) == 100
    again, other = (log_of(tmp_path, seed=seed).batch(5, 25) for seed in (3, 4))
    assert torch.equal(again.dense[:, 0], prices[125:150])
    assert not torch.equal(other.dense, again.dense)
    across = log.batch(1, 60).dense[:, 0]  # of two epochs
    assert torch.equal(across[:40], first[60:]) and torch.equal(across[40:], second[:20])


def test_seeds_judge_other_samples_each_once(tmp_path: Path) -> None:
    folder_of(tmp_path)
    found = {}
    for seed in (0, 1):
        log = log_of(tmp_path, seed=seed)
        assert log.held_out_batches(12) == 3
        found[seed] = torch.cat([log.batch(HELD_OUT + x, 12).dense[:, 0] for x in range(3)])
        assert len(found[seed].unique()) == 36
        with pytest.raises(MeasurementError, match="40 held-out samples; expected 48 for 4 batch"):
            log.batch(HELD_OUT + 3, 12)
        again = log_of(tmp_path, seed=seed).batch(HELD_OUT, 12).dense[:, 0]
        assert torch.equal(again, found[seed][:12])
    assert set(found[0][:12].tolist()) != set(found[1][:12].tolist())


@pytest.mark.parametrize(("step", "samples"), [(-1, 4), (0, 0), (HELD_OUT, -1)])
def test_there_is_no_such_batch(tmp_path: Path, step: int, samples: int) -> None:
    with pytest.raises(MeasurementError, match="expected a step from 0 on, and a sample"):
        log_of(folder_of(tmp_path)).batch(step, samples)


def test_a_history_that_is_padded_at_the_end_is_moved(tmp_path: Path) -> None:
    folder_of(tmp_path)
    columns = columns_of(40, 1)
    columns["past"][:] = [3, 9, 4, 0, 0]
    columns["past"][:5] = 0
    np.savez(tmp_path / "valid.npz", **columns)
    for length, expected in ((7, [0, 0, 0, 0, 3, 9, 4]), (5, [0, 0, 3, 9, 4]), (2, [9, 4])):
        history = log_of(tmp_path, history=length).batch(HELD_OUT, 40).history
        rows, counts = history.unique(dim=0, return_counts=True)
        assert rows.tolist() == [[0] * length, expected] and counts.tolist() == [5, 35]


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    """Samples are of one moment for all logs of a folder that was opened once."""
    data = RecordedData.open(folder_of(tmp_path))
    inputs = data.config_of(Fed(Inputs(1, (1,), (1,)))).inputs
    before = RecordedLog(data, inputs).batch(0, 100)
    columns = columns_of(100) | {"price": np.full(100, 7.0)}
    np.savez(tmp_path / "train.npz", **columns)
    assert torch.equal(RecordedLog(data, inputs).batch(0, 100).dense, before.dense)
    assert (log_of(tmp_path).batch(0, 100).dense == 7).all()


def test_rows_are_32_bit_numbers(tmp_path: Path) -> None:
    features = [{f"x{i}": {"type": "categorical", "vocab_size": 2**30}} for i in range(3)]
    data = RecordedData.open(folder_of(tmp_path, MAP | {"features": features}))
    fed = Fed(Inputs(1, (1,), (1,)))
    for most in (2**30, 715827883):
        with pytest.raises(MeasurementError, match="set --most-rows to 715827882 or less"):
            data.config_of(fed, most)
    inputs = data.config_of(fed, 715827882).inputs
    with pytest.raises(MeasurementError, match="expected fewer than 2\\^31"):
        RecordedLog(data, dataclasses.replace(inputs, rows=(2**30,) * 3))
    for part, count in COUNTS.items():
        np.savez(tmp_path / f"{part}.npz", label=np.arange(count) % 2,
                 **{f"x{i}": np.full(count, 715827882) for i in range(3)})  # fmt: skip
    ids = RecordedLog(data, inputs).batch(0, 4).ids.view(4, 3)
    assert ids[0].tolist() == [715827882 * (i + 1) for i in range(3)]


def test_headers_are_checked_before_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a header promises is neither allocated nor decompressed."""
    folder_of(tmp_path)
    read: list[Any] = []
    whole = np.lib.format.read_array
    monkeypatch.setattr(np.lib.format, "read_array", lambda file, **how: (
        read.append(file.name), whole(file, **how))[1])  # fmt: skip
    for city, words in (
        (np.zeros((100, 50), int), "has 50 numbers of dtype int64"),
        (np.zeros(10**6, int), "1000000 of 'city', 100 labels"),
    ):
        folder_of(tmp_path, city=city)
        with pytest.raises(MeasurementError, match=words):
            log_of(tmp_path)
    assert read and not any("city" in name for name in read)
    folder_of(tmp_path)
    with zipfile.ZipFile(tmp_path / "train.npz") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["label.npy"] = members["label.npy"].replace(b"(100,)", b"(999,)")
    with zipfile.ZipFile(tmp_path / "train.npz", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(MeasurementError, match="'label' has fewer bytes than its header says"):
        log_of(tmp_path)


def test_fewer_rows_share_ids(tmp_path: Path) -> None:
    log = log_of(folder_of(tmp_path), most_rows=10)
    batch = log.batch(HELD_OUT, 40)
    item = in_order(columns_of(40, 1))["item"]
    ids = batch.ids.view(40, 7)[:, 0].numpy()
    assert (ids == np.where(item > 0, (item - 1) % 10 + 1, PADDING)).all()
    assert int(batch.ids.max()) <= sum(log.inputs.rows)


@pytest.mark.parametrize("name", ["dlrm", "wukong", "interformer"])
def test_models_learn_from_it(tmp_path: Path, name: str) -> None:
    data = RecordedData.open(folder_of(tmp_path))
    config = data.config_of(config_named(name, "tiny"))
    setting = Setting(name, "tiny", config, 16, True, torch.device("cpu"), 0.06, data=data)
    model = setting.build(0)
    log = setting.log(0)
    batch = log.batch(0, 16)
    logits = model.interact(batch.dense, *model.embed(batch))
    assert logits.numel() == 16 and logits.isfinite().all()


def test_without_a_numeric_feature_there_is_a_constant_one(tmp_path: Path) -> None:
    facts = MAP | {"features": FEATURES[1:]}
    data = RecordedData.open(folder_of(tmp_path, facts))
    config = data.config_of(config_named("dlrm", "tiny"))
    assert config.inputs.dense == 1
    assert (RecordedLog(data, config.inputs).batch(0, 8).dense == 1).all()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"item": np.full(100, 52)}, "ids 52 to 52 of 'item'; expected 0 to 51"),
        ({"item": np.full(100, -1)}, "ids -1 to -1"),
        ({"item": np.full(100, 0.5)}, "fractions of dtype float64; expected 1 ids"),
        ({"item": np.full(100, np.nan)}, "ids nan to nan of 'item'"),
        ({"item": np.full(100, 2**63 + 5, np.uint64)}, "ids 9223372036854775813 to"),
        ({"item": np.full(100, "a")}, "train.npz: 'item' is of dtype <U1; expected 1 ids"),
        ({"item": np.zeros(100, "datetime64[s]")}, "is of dtype datetime64"),
        ({"item": np.ones(100, complex)}, "is of dtype complex128; expected 1 ids"),
        ({"price": np.ones(100, complex)}, "is of dtype complex128; expected a number"),
        ({"price": np.zeros(100, "f4,i4")}, "expected a number in a sample, as integers or floats"),
        ({"price": np.full(100, 1e300)}, "no column of finite numbers"),
        ({"price": np.zeros((100, 2))}, "has 2 numbers of dtype float64"),
        ({"label": np.full(100, "1")}, "'label' is of dtype <U1; expected a label"),
        ({"label": np.zeros((100, 2))}, "'label' has 2 numbers"),
        ({"label": np.zeros(())}, "one number of 'label'"),
        ({name: column[:0] for name, column in columns_of(4).items()}, "train has no samples"),
        ({"past": np.zeros((100, 4), int)}, "has 4 numbers of dtype int64"),
        ({"price": np.full(100, np.nan)}, "no column of finite numbers"),
        ({"label": np.full(100, 2.0)}, "other values than 0 and 1"),
        ({"city": np.zeros(99, int)}, "99 of 'city', 100 labels"),
        ({"city": np.array([{}] * 100, dtype=object)}, "is of dtype object"),
    ],
)
def test_columns_that_the_map_does_not_say_are_refused(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(MeasurementError, match=words):
        log_of(folder_of(tmp_path, **changed))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([], "expected a list of 1 to"),
        (MAP | {"labels": []}, "labels are"),
        (MAP | {"labels": ["label", 3]}, "labels are"),
        (MAP | {"labels": ["label", "city"]}, "'city' is a label and a feature"),
        (MAP | {"features": [*FEATURES, FEATURES[1]]}, "feature 'item' is there twice"),
        (MAP | {"features": FEATURES[:1]}, "no categorical or sequence feature"),
        (MAP | {"features": [{"x": {"type": "embedding"}}]}, "of type 'embedding'"),
        (MAP | {"features": [{"x": {"type": "categorical", "vocab_size": 1e9}}]}, "vocab_size"),
        (MAP | {"features": [{"x": {"type": "categorical", "vocab_size": 2**40}}]}, "vocab_size"),
        (MAP | {"features": [{"x": FEATURES[2]["past"] | {"max_len": 0}}]}, "max_len"),
        (MAP | {"features": ["x"]}, "expected a name"),
        (MAP | {"features": [{"x": 3}]}, "has no properties"),
    ],
)
def test_other_maps_are_refused(tmp_path: Path, facts: object, words: str) -> None:
    (tmp_path / "feature_map.json").write_text(json.dumps(facts))
    with pytest.raises(MeasurementError, match=words):
        RecordedData.open(tmp_path)


def test_maps_that_are_no_maps_are_refused(tmp_path: Path) -> None:
    for text, words in (("[" * 200_000, "recursion"), ('{"a": 1, "a": 2}', "'a' is there twice")):
        (tmp_path / "feature_map.json").write_text(text)
        with pytest.raises(MeasurementError, match=words):
            RecordedData.open(tmp_path)


def test_a_history_has_no_more_ids_than_its_table(tmp_path: Path) -> None:
    past = FEATURES[2]["past"]
    facts = MAP | {"features": [*FEATURES[:2], {"past": past | {"vocab_size": 53}}, *FEATURES[3:]]}
    data = RecordedData.open(folder_of(tmp_path, facts))
    assert len(data.tables(0)[0]) == 3
    with pytest.raises(MeasurementError, match="'past' has vocab_size 53, and 'item'"):
        data.tables(5)
    own = MAP | {"features": [*FEATURES[:2], {"past": past | {"share_embedding": "past"}}]}
    with pytest.raises(MeasurementError, match="no sequence has share_embedding"):
        RecordedData.open(folder_of(tmp_path, own)).tables(5)


def test_the_first_of_several_labels_counts(tmp_path: Path) -> None:
    folder_of(tmp_path, MAP | {"labels": ["label", "other"]})
    log = log_of(tmp_path)
    assert log.batch(HELD_OUT, 40).labels.sum() == columns_of(40, 1)["label"].sum()


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasurementError, match="expected a folder that FuxiCTR prepared"):
        RecordedData.open(tmp_path)
    folder_of(tmp_path)
    with pytest.raises(MeasurementError, match="100 samples; expected those of a batch, 101"):
        log_of(tmp_path).batch(0, 101)
    data = RecordedData.open(folder_of(tmp_path, MAP | {"features": FEATURES[:2]}))
    with pytest.raises(MeasurementError, match="no sequence has share_embedding"):
        data.tables(5)
    (tmp_path / "valid.npz").write_bytes(b"PK")
    with pytest.raises(MeasurementError, match=r"valid\.npz"):
        log_of(tmp_path)
    for part in COUNTS:
        (tmp_path / f"{part}.npz").unlink()
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "part-0.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UnsupportedError, match="pip install pyarrow"):
        log_of(tmp_path)


def test_parquet_files_are_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lists, as FuxiCTR writes sequences; pyarrow is not among the packages of the tests."""
    expected = log_of(folder_of(tmp_path)).batch(HELD_OUT, 40)
    files = {}
    for part in ("train", "valid"):
        (tmp_path / part).mkdir()
        columns = dict(np.load(tmp_path / f"{part}.npz"))
        for place in range(2):
            path = tmp_path / part / f"part-{place}.parquet"
            path.touch()
            half = slice(0, 15) if place == 0 else slice(15, None)
            files[path] = {name: column[half] for name, column in columns.items()}
        (tmp_path / f"{part}.npz").unlink()

    class Column:
        def __init__(self, values: np.ndarray[Any, Any]) -> None:
            self.values = values

        def to_numpy(self) -> np.ndarray[Any, Any]:
            if self.values.ndim == 1:
                return self.values
            lists = np.empty(len(self.values), dtype=object)
            lists[:] = list(self.values)
            return lists

    read: Callable[..., Any] = lambda path, columns: {x: Column(files[path][x]) for x in columns}  # noqa: E731
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    module = types.ModuleType("pyarrow.parquet")
    module.read_table = read  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    found = log_of(tmp_path).batch(HELD_OUT, 40)
    assert all(map(torch.equal, found, expected))
    monkeypatch.setattr(Column, "to_numpy", lambda self: self.values)
    row = [1, 2, 3, 4, 5]
    for cells, words in (
        ([[1, 2], [3]], "'past' has missing cells or lists of several lengths; expected 5 ids"),
        ([None, row], "missing cells"),
        ([None, None], "is of dtype object; expected 5 ids"),
        (["ab", "ab"], "is of dtype <U2"),
        ([{"a": 1}, {"a": 1}], "is of dtype object"),
        ([[row], [row]], "has lists of lists; expected 5 ids"),
        ([row + row, row + row], "has 10 numbers of dtype int64"),
        ([[1.0, np.nan, 3, 4, 5], row], "ids nan to nan"),
    ):
        column = np.empty(15, dtype=object)
        column[:] = [cells[0], *[cells[1]] * 14]
        files[tmp_path / "train" / "part-0.parquet"]["past"] = column
        with pytest.raises(MeasurementError, match=words):
            log_of(tmp_path)


def test_quality_is_that_of_the_clicks(tmp_path: Path) -> None:
    data = RecordedData.open(folder_of(tmp_path))
    config = data.config_of(config_named("dlrm", "tiny"))
    setting = Setting("dlrm", "tiny", config, 16, True, torch.device("cpu"), 0.06, data=data)

    class Constant:
        model = torch.nn.Identity()
        embed = staticmethod(lambda batch: batch)
        logits = staticmethod(lambda batch: torch.zeros(len(batch.dense)))

    quality = judged(Constant(), setting.log(0), 16, 2)  # type: ignore[arg-type]
    every = judged(Constant(), setting.log(0), 16)  # type: ignore[arg-type]
    assert every.samples == quality.samples == 32  # of 40
    assert quality.log_loss == quality.expected_log_loss == pytest.approx(np.log(2), rel=1e-6)


@pytest.mark.rest
def test_the_command_takes_a_folder(tmp_path: Path) -> None:
    given = ["model", "dlrm", "--size", "tiny", "--data", str(folder_of(tmp_path)), "--batch", "16"]
    given += ["--steps", "2", "--seeds", "1", "--arm", "as-written", "--json", "--quiet"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["best"] is None and facts["data"] == str(tmp_path)
    assert facts["config"]["inputs"]["rows"] == [51, 51, 6]
