import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lokakern.bench.cli.main import app
from lokakern.bench.prediction import fit as fitting
from lokakern.errors import DatabaseError, MeasurementError
from lokakern.problems import make_problem
from lokakern.progress import Progress
from lokakern.registry.snapshot.facts import Facts, image_of
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.selection import dispatcher
from lokakern.selection.padded_rows import bytes_copied
from lokakern.selection.prediction.features import FEATURES, described
from lokakern.selection.prediction.model_file import (
    KINDS,
    Forest,
    file_of,
    load,
    parse,
)
from lokakern.types import Granularity
from tests.support.shipped import H200_FILE

A_ALIGNMENT = 24  # the feature of a's alignment; that of b is the next one


@pytest.fixture(scope="module")
def shipped():
    return Snapshot(Facts([image_of(H200_FILE)]), [H200_FILE.name])


@pytest.fixture(scope="module")
def h200(shipped):
    return shipped.find_device("NVIDIA H200")


@pytest.fixture(scope="module")
def timings(shipped, h200):
    return fitting.timings(shipped, h200, "graph-cold")


@pytest.fixture(scope="module")
def few_trees():
    patch = pytest.MonkeyPatch()
    patch.setitem(fitting._TREES, "n_estimators", 6)
    patch.setitem(fitting._TREES, "learning_rate", 0.5)
    patch.setattr("lokakern.bench.prediction.left_out.FOLDS", 2)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def few_kernels(few_trees, timings):
    """Both of bfloat16, and of FP8 one with and one without unaligned rows; after `timings`."""
    row = "cuda.quantize_row+cuda.scaled_gemm_row"
    names = ("torch.bf16", "torch.bf16_padded", row, f"{row}_unaligned")
    with pytest.MonkeyPatch.context() as patch:
        every = fitting.timings
        patch.setattr(
            fitting, "timings", lambda *words: [x for x in every(*words) if x.name in names]
        )
        yield


@pytest.fixture(scope="module")
def fitted(shipped, h200, few_kernels):
    pytest.importorskip("sklearn")
    return fitting.fit(shipped, h200, "graph-cold", Progress())


def test_kernels_of_the_library_and_of_pytorch_are_fitted_and_those_of_others_are_not(timings):
    names = {one.name for one in timings}
    assert {"torch.bf16", "cuda.quantize_row+cuda.scaled_gemm_row"} <= names
    assert not any("fbgemm" in name or "deep_gemm" in name or "emulated" in name for name in names)
    assert all(problem.batch == 1 for one in timings for problem in one.problems)


def test_a_time_of_several_runs_is_their_median(timings, shipped, h200):
    one = next(x for x in timings if x.name == "torch.bf16")
    cells: dict = {}
    for cell in shipped.timings_on(h200, "graph-cold"):
        if cell.kernel.name == "torch.bf16" and cell.status == "ok":
            cells.setdefault(cell.problem, []).append(cell.latency_us_p50)
    several = [i for i, p in enumerate(one.problems) if len(cells[p]) > 2]
    assert several
    for i in several:
        assert one.times_us[i] == np.median(cells[one.problems[i]])


@pytest.mark.rest  # fits models
def test_exported_trees_give_what_the_fitted_ones_give(timings, h200, few_trees):
    pytest.importorskip("sklearn")
    one = next(x for x in timings if x.name == "torch.bf16")
    base, rows = fitting._described(one, fitting.rates_of(timings, h200))
    assert rows.shape == (len(one.problems), FEATURES)
    assert np.isfinite(rows).all() and (base > 0).all()
    boosted = fitting._boosted(rows, np.log(one.times_us / base))
    found = Forest(fitting.exported(boosted))(rows)
    np.testing.assert_allclose(found, boosted.predict(rows), rtol=0, atol=1e-5)


def test_a_pair_of_sizes_is_left_out_whole_and_alike_for_every_kernel(timings):
    folds = [
        dict(zip(one.pairs, fitting.fold_of(one.pairs).tolist(), strict=True)) for one in timings
    ]
    whole = folds[0] | {pair: fold for one in folds for pair, fold in one.items()}
    assert all(whole[pair] == fold for one in folds for pair, fold in one.items())
    assert set(whole.values()) == set(range(fitting.folds.FOLDS))


def test_a_conformal_quantile_counts_each_pair_once():
    many = [(1, 1)] * 97 + [(2, 2), (3, 3), (4, 4)]
    values = np.array([0.0] * 97 + [1.0, 2.0, 3.0])
    assert fitting.upper_quantile(values, many, 0.4) == 1.0  # 2 of 5, one of which is the next pair
    assert fitting.upper_quantile(values, many, 0.8) == 3.0
    assert fitting.upper_quantile(values, many, 0.99) == 3.0  # too few pairs: the largest


def test_a_model_is_read_back_and_names_its_rows(fitted, shipped, h200):
    content, quality = fitted
    model = parse(content, "model.json")
    assert model.device == h200
    assert model.content.rows_digest == shipped.digest
    assert set(model.content.spreads) == set(KINDS)
    assert all(s.low <= 0 <= s.high for s in model.content.spreads.values())
    assert 0 < quality.median_error < quality.p90_error
    assert file_of(model.content) == content
    assert model.covers(8192, 512, 1000) and not model.covers(8192, 512, 8)


def test_predictions_of_a_model_are_near_the_times_it_was_fitted_to(fitted, timings):
    model = parse(fitted[0], "model.json")
    one = next(x for x in timings if x.name == "torch.bf16")
    base, rows = fitting._described(one, model.content.rates)
    error = np.abs(np.exp(model.forest("torch.bf16")(rows)) * base / one.times_us - 1)
    assert np.median(error) < 0.08


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"features": 2', b'"features": 999'),
        (b'"lokakern time model 1"', b'"lokakern time model 9"'),
        (b'"coverage": 0.85', b'"coverage": 8'),
        (b'"vendor"', b'"seller"'),
        (b'"large"', b'"huge"'),
        (b'"right": "', b'"right": "////'),
    ],
)
def test_a_damaged_model_is_refused(fitted, old, new):
    assert old in fitted[0]
    with pytest.raises(DatabaseError, match=r"model 'm\.json'.*bench fit"):
        parse(fitted[0].replace(old, new, 1), "m.json")


def test_a_walk_that_would_not_end_is_refused(fitted):
    trees = parse(fitted[0], "m").content.kernels[0].trees
    for right in (bytes(len(trees.right)), bytes([200]) * len(trees.right)):
        with pytest.raises(ValueError, match="child"):
            type(trees)(start=0.0, sizes=trees.sizes, feature=trees.feature, value=trees.value,
                        right=right)  # fmt: skip


def test_too_few_rows_are_refused(h200, shipped):
    with pytest.raises(MeasurementError, match="too few times of NVIDIA H200 in eager"):
        fitting.fit(shipped, h200, "eager", Progress())


def test_features_do_not_depend_on_what_else_is_asked(timings, h200):
    one = timings[0]
    problem = one.problems[0]
    rates = fitting.rates_of(timings, h200)
    m = np.array([256, 4096, 262144])
    base, rows = described(problem, m, Granularity.ROW, rates)
    for i, x in enumerate(m):
        alone_base, alone = described(problem, np.array([x]), Granularity.ROW, rates)
        assert base[i] == alone_base[0]
        np.testing.assert_array_equal(rows[i], alone[0])


def test_a_kernel_that_pads_counts_copies_and_not_unaligned_rows(timings, h200):
    rates = fitting.rates_of(timings, h200)
    m = np.array([512, 8192])
    wide = make_problem("gemm", (16, 1680, 1680))
    odd = make_problem("gemm", (16, 1677, 1677))
    plain, padded, aligned = (
        described(problem, m, Granularity.NONE, rates, pads=pads)[0]
        for problem, pads in ((odd, False), (odd, True), (wide, False))
    )
    copied = [bytes_copied(replace(odd, m=x)) for x in m.tolist()]
    np.testing.assert_allclose(padded, aligned + np.array(copied) / rates.bytes_per_us, rtol=0.01)
    assert padded[1] < plain[1]


def test_features_tell_how_quantized_rows_are_aligned(timings, h200):
    """Odd rows of over 512 columns start at cache lines, rows of 1680 columns do not."""
    rates = fitting.rates_of(timings, h200)
    for k, bytes_aligned in ((1677, 256), (1680, 16), (1792, 256), (48, 16)):
        problem = make_problem("gemm", (8192, 1024, k))
        _, rows = described(problem, np.array([8192]), Granularity.ROW, rates)
        assert rows[0, A_ALIGNMENT : A_ALIGNMENT + 2].tolist() == [math.log2(bytes_aligned)] * 2


def test_intervals_are_of_the_kernel_that_would_be_chosen(timings):
    names = ("torch.bf16", "cuda.quantize_row+cuda.scaled_gemm_row")
    known = [one for one in timings if one.name in names]
    random = np.random.default_rng(0)
    left_out = [
        one.times_us * np.exp(0.05 * random.normal(size=len(one.times_us))) for one in known
    ]
    expected = fitting._spreads(known, left_out, fold=None)
    worse = replace(known[0] if "row" in known[0].name else known[1], name="predicted too slow")
    slower = np.full(len(worse.times_us), 1e9)
    for kernels, times in (
        ([*known, worse], [*left_out, slower]),
        ([worse, *known], [slower, *left_out]),
    ):
        assert fitting._spreads(kernels, times, fold=None) == expected


def test_bf16_is_the_faster_of_plain_and_padded_rows(timings):
    names = ("torch.bf16", "torch.bf16_padded", "cuda.quantize_row+cuda.scaled_gemm_row")
    known = [one for one in timings if one.name in names]
    exact = [one.times_us for one in known]
    found = {pair.problem: pair.plain for pair in fitting._pairs(known, exact)}
    plain = [dict(zip(x.problems, x.times_us, strict=True)) for x in known if "bf16" in x.name]
    assert len(plain) == 2
    both = [p for p in found if all(p in one for one in plain)]
    assert len(both) > 20
    for problem in both:
        assert found[problem] == pytest.approx(math.log(min(one[problem] for one in plain)))


def test_the_command_writes_a_model_that_dispatch_reads(few_kernels, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "mine.sqlite"))
    dispatcher.use_snapshot(None)
    app(["fit", "--device", "NVIDIA H200", "--quiet", "--json"], standalone_mode=False)
    (told,) = json.loads(capsys.readouterr().out)
    place = tmp_path / "models" / "nvidia-h200.json"
    assert told["file"] == str(place) and told["bytes"] == place.stat().st_size
    assert {kernel["kernel"] for kernel in told["kernels"]} >= {"torch.bf16"}
    # Without rows of the user, dispatch reads the shipped one.
    model = dispatcher.model_of(dispatcher.snapshot().find_device("NVIDIA H200"))
    assert model is not None and "registry/models" in model.path
    dispatcher.use_snapshot(None)


def test_the_model_of_a_shipped_file_is_of_that_file_alone(fitted, shipped, tmp_path, monkeypatch):
    """Else it would hold only while all shipped files, and no others, are read.

    The same rows give the same file.
    """
    pytest.importorskip("sklearn")
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "none.sqlite"))
    place = tmp_path / "model.json"
    words = ["fit", "--device", "NVIDIA H200", "--quiet", "--out", str(place)]
    app([*words, "--db", str(H200_FILE)], standalone_mode=False)
    assert load(place).content.rows_digest == shipped.digest
    assert place.read_bytes() == fitted[0]
    assert dispatcher.snapshot().digest != shipped.digest, "of both files"


def test_a_sweep_fits_into_a_file_and_after_measuring_only(capsys):
    with pytest.raises(SystemExit) as ended:
        app(["sweep", "--fit", "--prebuild"])
    assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        app(["sweep", "--fit", "--db", "postgresql://host/db"])
    assert ended.value.code == 1
    assert "is not a file" in capsys.readouterr().err
