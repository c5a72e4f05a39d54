"""`Conversion.limit_loss`: which products a limit of the model's loss admits."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lokakern
from lokakern.conversion import loss_limit
from lokakern.conversion.convert import Conversion
from lokakern.conversion.loss_limit import (
    BINS,
    LossLimit,
    Option,
    _unjudged_site,
    best_within,
)
from lokakern.conversion.tune import tune
from lokakern.errors import ChoicesError, MeasurementError, UnsupportedError
from lokakern.nn.rectified import KERNEL as RELU_KERNEL
from lokakern.nn.routed_matmul import kernel_at
from lokakern.problems import make_problem
from lokakern.selection import dispatcher
from lokakern.selection.weight_forms import with_weight
from tests.conversion.test_tune import On, Script
from tests.conversion.test_tuned_chains import tuned as tune_chains
from tests.support.chained_models import is_chained, tower
from tests.support.chained_models import rows as rows_of_tower
from tests.support.measurements import BF16, H200, ROW, Book, accuracy, gemm, time

M, WIDTH = 64, 32
convert = functools.partial(lokakern.convert, distribution="X1", device=H200, inference=True)


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Book]:
    """Square layers are faster in FP8."""
    problem = with_weight(gemm(M, WIDTH, WIDTH), "row", H200)
    found = [time(BF16, problem, 9.0), time(ROW, problem, 4.0), accuracy(ROW, problem, 0.04)]
    relu = make_problem("gemm_norm", (512, 8, 8), epilogue="bias+relu")
    found.append(time(RELU_KERNEL, relu, 3.0))
    yield Book(tmp_path / "rows.sqlite").write(*found).use()
    dispatcher.use_snapshot(None)


class Branches(nn.Module):
    """A sum of layers of which the third counts ten times as much as the others."""

    SHARES = (1.0, 1.0, 10.0, 1.0)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.SHARES)

    def forward(self, x: Tensor) -> Tensor:
        made = zip(self.SHARES, self.parts, strict=True)
        return torch.stack([share * part(x).float() for share, part in made]).sum(0)


def model_of() -> Branches:
    return Branches().bfloat16().eval().requires_grad_(False)


def batches(count: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(count, M, WIDTH, generator=generator).bfloat16())


def loss_by(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """One, and the squared distance from what the model is without FP8."""
    plain = model_of().double()
    return lambda x: 1.0 + (model(x) - plain(x.double())).square().mean()


def limited(
    model: nn.Module, relative: float, given: list[Any] | None = None, **options: Any
) -> tuple[LossLimit, Conversion]:
    handle = convert(model, 0.06, **options)
    return handle.limit_loss(loss_by(model), given or batches(), relative=relative), handle


def in_fp8(handle: Conversion) -> list[str]:
    return [name for name, s in handle.sites.items() if kernel_at(s.routes[0].text, M)]


class AtRows(Script):
    """A timer whose times follow from the products in FP8 at `M`."""

    def on(self) -> On:
        return {(name, "output") for name in in_fp8(self.handle)}


EVERY = [f"parts.{place}" for place in range(4)]


def test_within_a_wide_limit_everything_stays(known: Book) -> None:
    found, handle = limited(model_of(), 1.0)
    assert [site.name for site in found.sites] == EVERY == in_fp8(handle)
    assert all(site.is_kept and site.gain_us == 5.0 for site in found.sites)
    assert all(site.kernels == (ROW,) for site in found.sites)
    assert found.change.batches == 4 and found.change.high <= 1.0
    # Independent errors of layers that are added: squares add up.
    assert found.added == pytest.approx(found.change.mean, rel=0.2)
    assert found.predicted == found.before
    assert found.before.mean == pytest.approx(found.change.mean, rel=0.2)
    # Without FP8, twice more of one batch, with all on both halves, and four alone.
    assert found.runs == 8 + 2 + 4 + 4 + 4 * 4
    assert "4 of 4 products and chains kept, 20 of 20 us" in found.summary
    assert found.summary in repr(found)
    assert [limit for limit, _, _ in found.front] == [0.25, 0.5, 1.0, 2.0, 4.0]
    found.table()


def test_the_layer_that_costs_the_loss_goes(known: Book) -> None:
    wide, _ = limited(model_of(), 1.0)
    changes = {site.name: site.change.mean for site in wide.sites}
    assert changes[EVERY[2]] > 30 * changes[EVERY[0]]
    limit = 0.5 * changes[EVERY[2]]
    found, handle = limited(model_of(), limit)
    assert in_fp8(handle) == [EVERY[0], EVERY[1], EVERY[3]]
    assert [site.is_kept for site in found.sites] == [True, True, False, True]
    assert 0 < found.change.high <= limit
    assert found.added == pytest.approx(found.change.mean, rel=0.3)
    assert found.predicted.batches == 4 and found.predicted.mean != found.change.mean
    assert found.predicted.mean == pytest.approx(found.change.mean, rel=0.3)
    gains = [gain_us for _, _, gain_us in found.front]
    assert gains == sorted(gains) and gains[2] == 15.0 and gains[-1] == 20.0
    why = handle.sites[EVERY[2]].routes[0].why
    assert why == f"the loss may rise by {limit:.1e} at most"
    whys = [row["why"] for row in found.rows]
    assert (
        whys[2] == f"change {changes[EVERY[2]]:+.1e} > {limit:.1e} on the first half of the batches"
    )
    assert whys[:2] == ["", ""] and "not confirmed on the second" in found.summary


def test_a_product_in_fp8_in_eager_calls_alone_is_marked() -> None:
    """By the shipped times a compiler pads rows of 479, and eager calls take FP8."""
    dispatcher.use_snapshot(None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(479, 1024, bias=False, dtype=torch.bfloat16)).eval()
    plain = copy.deepcopy(model).double()
    handle = lokakern.convert(model, 0.06, device=H200, inference=True, m_range=(256, 8192))
    given = [torch.randn(256, 479).bfloat16() for _ in range(4)]
    found = handle.limit_loss(
        lambda x: 1.0 + (model(x) - plain(x.double())).square().mean(), given, relative=1.0
    )
    (site,) = found.sites
    assert site.is_kept and not site.is_compiled
    assert "0: in FP8 in eager calls only" in found.summary
    assert "compiled code leaves it in bf16" in found.rows[0]["why"]


def test_within_no_limit_nothing_stays_and_bits_are_those_of_nn_linear(known: Book) -> None:
    model, plain = model_of(), model_of()
    found, handle = limited(model, 1e-12)
    assert not in_fp8(handle) and not any(site.is_kept for site in found.sites)
    assert (found.change.mean, found.predicted.mean, found.added) == (0.0, 0.0, 0.0)
    assert all(torch.equal(model(x), plain(x)) for x in batches())
    handle.undo()
    assert all(type(part) is nn.Linear for part in model.parts)


def test_a_set_that_loses_more_than_its_layers_is_made_smaller(
    known: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is that of what is measured together, not of a sum."""
    monkeypatch.setattr(Branches, "SHARES", (1.0, 1.0, 1.0, 1.0))
    one = limited(model_of(), 1.0)[0].sites[0].change.mean
    plain = model_of().double()

    def loss(x: Tensor) -> Tensor:
        """Two layers in FP8 lose a hundred times as much as one."""
        distance = (model(x) - plain(x.double())).square().mean()
        return 1.0 + (100 * distance if distance > 1.5 * one else distance)

    model = model_of()
    handle = convert(model, 0.06)
    found = handle.limit_loss(loss, batches(), relative=4 * one)
    assert len(in_fp8(handle)) == 1 and found.change.high <= 4 * one


def test_everything_stays_if_together_it_is_within_the_limit(known: Book) -> None:
    """Also where single changes add up to more, as noise does that counts only above zero."""
    model = model_of()
    handle = convert(model, 0.06)

    def loss(x: Tensor) -> float:
        model(x)
        return 1.0 + (1e-3 if len(in_fp8(handle)) == 1 else 1e-4 * bool(in_fp8(handle)))

    found = handle.limit_loss(loss, batches(), relative=2e-4)
    assert in_fp8(handle) == EVERY
    assert found.change.mean == found.predicted.mean == pytest.approx(1e-4, rel=1e-6)
    assert found.added == pytest.approx(4e-3, rel=1e-6)


def test_layers_alone_run_on_few_batches(known: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_limit, "MOST_ALONE", 2)
    found, _ = limited(model_of(), 1.0)
    assert {site.change.batches for site in found.sites} == {2}
    assert found.before.batches == found.predicted.batches == found.change.batches == 4


def test_the_second_half_of_the_batches_has_a_say(known: Book) -> None:
    model, seen = model_of(), batches()
    plain = model_of().double()

    def loss(place: int) -> Tensor:
        share = 1.0 if place < 4 else 1e6
        return 1.0 + share * (model(seen[place]) - plain(seen[place].double())).square().mean()

    handle = convert(model, 0.06)
    found = handle.limit_loss(loss, range(8), relative=1.0)
    assert not in_fp8(handle) and found.change.mean == 0.0
    words = r"change \+.* > 1.0e\+00 on the second half of the batches(, with \d more in FP8)?"
    assert all(re.fullmatch(words, row["why"]) for row in found.rows)


def test_an_interval_that_is_too_wide_is_the_reason(known: Book) -> None:
    """The mean is within the limit, its upper end is not, on the second half alone."""
    model, seen = model_of(), batches()
    plain = model_of().double()
    shares = (1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 3.0)

    def loss(place: int) -> Tensor:
        distance = (model(seen[place]) - plain(seen[place].double())).square().mean()
        return 1.0 + shares[place] * distance

    handle = convert(model, 0.06)
    wide = handle.limit_loss(loss, range(8), relative=1.0)
    limit = 1.2 * wide.before.high
    found = handle.limit_loss(loss, range(8), relative=limit)
    dropped = [row["why"] for row in found.rows if not row["kept"]]
    assert any(
        re.fullmatch(
            rf"upper end (.*) > {limit:.1e} on the second half of the batches"
            r"(, with \d more in FP8)?; more batches would narrow it",
            why,
        )
        for why in dropped
    ), dropped


def test_tuning_and_files_leave_out_what_the_limit_gave_up(known: Book, tmp_path: Path) -> None:
    limit = 0.5 * limited(model_of(), 1.0)[0].sites[2].change.mean
    model = model_of()
    found, handle = limited(model, limit)
    kept = in_fp8(handle)
    found.save(tmp_path / "limit.json")
    other = convert(model_of(), 0.06, tuned=tmp_path / "limit.json")
    assert in_fp8(other) == kept
    script = AtRows(other, lambda on: 100.0 - 10 * len(on))
    tune(other, lambda: other.model(batches()[0]), make_timer=script)
    assert in_fp8(other) == kept and set(other.over_limit) == {(EVERY[2], "output")}
    script = AtRows(handle, lambda on: 100.0 - 10 * len(on))
    tuned = tune(handle, lambda: model(batches()[0]), make_timer=script)
    tried = [name for t in tuned.groups for name in t.group.sites]
    assert EVERY[2] not in tried and EVERY[2] not in in_fp8(handle)
    tuned.save(tmp_path / "tuned.json")
    assert EVERY[2] not in in_fp8(convert(model_of(), 0.06, tuned=tmp_path / "tuned.json"))
    handle.limit_loss(loss_by(model), batches(), relative=1.0)  # from the start
    assert in_fp8(handle) == EVERY
    handle.limit_loss(loss_by(model), batches(), relative=limit)
    handle.refresh()
    assert in_fp8(handle) == EVERY and not handle.over_limit


def test_a_chain_is_judged_beside_the_products_of_its_layers(
    tuning_book: Book,
    tmp_path: Path,
) -> None:
    model, plain = tower(), tower().double()
    handle = convert(model, 0.06)
    assert is_chained(model)
    seen = [rows_of_tower(512) * (1 + place / 8) for place in range(4)]

    def loss(x: Tensor) -> Tensor:
        return 1.0 + (model(x).double() - plain(x.double())).square().mean()

    found = handle.limit_loss(loss, seen, relative=10.0)
    assert [site.name for site in found.sites] == ["0 to 2", "0", "2"]
    assert [site.is_kept for site in found.sites] == [True, True, True]
    assert is_chained(model) and not handle.over_limit
    # Of 38 us in bf16 and 33 by the routes the chain leaves 12.
    assert sum(s.gain_us or 0.0 for s in found.sites) == pytest.approx(38.0 - 12.0)
    assert found.front[-1][2] == pytest.approx(38.0 - 12.0)
    chain, *products = (site.change for site in found.sites)
    assert all(chain.mean != product.mean > 0 for product in products)
    found = handle.limit_loss(loss, seen, relative=1e-12)
    assert not is_chained(model) and not any(site.is_kept for site in found.sites)
    assert torch.equal(model(seen[0]), tower()(seen[0]))
    assert handle.over_limit_chains == {("0", "2")}
    found.save(tmp_path / "limit.json")
    other = convert(tower(), 0.06, tuned=tmp_path / "limit.json")
    assert not is_chained(other.model)
    tuned, _, _ = tune_chains(other.model, {}, handle=other)
    assert not tuned.groups and not is_chained(other.model)
    handle.refresh()
    assert is_chained(model)


def test_the_products_of_a_chain_may_be_within_a_limit_that_it_is_not(
    tuning_book: Book,
) -> None:
    model = tower()
    handle = convert(model, 0.06)
    seen = [rows_of_tower(512) for _ in range(4)]

    def loss(x: Tensor) -> Tensor:
        model(x)
        return torch.tensor(2.0 if is_chained(model) else 1.0)

    found = handle.limit_loss(loss, seen, relative=0.5)
    assert [site.is_kept for site in found.sites] == [False, True, True]
    assert not is_chained(model) and not handle.over_limit


def test_a_model_without_fp8_keeps_its_loss(known: Book) -> None:
    model = nn.Linear(8, 8).bfloat16()
    handle = convert(model, 0.06)
    x = torch.ones(16, 8).bfloat16()
    found = handle.limit_loss(lambda _: model(x).float().square().mean(), range(4))
    assert found.sites == () and found.change.mean == 0.0
    assert found.summary == "no product is quantized at these rows: the loss is that of nn.Linear"
    found.table()


def test_rows_of_every_batch_count(known: Book) -> None:
    """The first batch has rows of which nothing was measured."""
    model = model_of()
    handle, loss = convert(model, 0.06, m_range=(M, M)), loss_by(model)
    seen = [torch.ones(0, WIDTH).bfloat16(), *batches()]
    assert not kernel_at(model.parts[0]._routes[0], 8)
    found = handle.limit_loss(lambda x: loss(x if len(x) else batches()[0]), seen, relative=1e-12)
    assert [site.name for site in found.sites] == EVERY and not in_fp8(handle)


def test_products_at_other_rows_are_named(known: Book) -> None:
    class Sliced(Branches):
        def forward(self, x: Tensor) -> Tensor:
            return self.parts[0](x).float().sum(0) + self.parts[1](x[:17]).float().sum(0)

    model = Sliced().bfloat16().eval().requires_grad_(False)
    handle = convert(model, 0.06, m_range=(M, M))
    found = handle.limit_loss(lambda x: 1.0 + model(x).square().mean(), batches(), relative=1e-12)
    assert [site.name for site in found.sites] == EVERY[:1]
    (other,) = found.unjudged
    assert (other.name, other.kernels, other.least_m, other.rows) == (EVERY[1], (ROW,), M, (17,))
    words = "quantized at m=64; the batches have 17 rows: not judged"
    assert found.rows[1]["why"] == f"{words}, stays in FP8" == other.why and found.rows[1]["kept"]
    assert (
        "the first half of the batches" in found.rows[0]["why"]
        and found.rows[0].keys() == found.rows[1].keys()
    )
    assert (
        "0 of 1 products and chains kept" in found.summary
        and "; 1 not judged: their rows are others than those of the batches (17);" in found.summary
        and "the least m" not in found.summary
    )
    assert in_fp8(handle) == EVERY[1:]
    found.table()


def test_where_nothing_is_judged_the_least_rows_are_told(known: Book) -> None:
    wide = list(torch.randn(4, 2 * M, WIDTH).bfloat16())
    found, handle = limited(model_of(), 1e-12, wide, m_range=(M, M))
    assert found.sites == () and [site.name for site in found.unjudged] == EVERY
    assert found.summary == (
        "no product is quantized at these rows: the loss is that of nn.Linear; 4 not judged: their "
        "rows are others than those of the batches (128); the least m at which one runs is 64"
    )
    assert in_fp8(handle) == EVERY
    assert found.file.dropped == set() and not found.file.is_emulated


@pytest.mark.parametrize(
    ("parts", "least_m", "words"),
    [
        (([(0, ()), (6280, ("x",))], [(0, ())]), 6288, "m=6288.. that 16 divides;"),
        (([(0, ()), (6280, ("x",)), (7000, ("y",)), (8001, ())], [(0, ()), (9001, ("x",))]), 6288,
         "m=6280..8000;"),
        (([(0, ())], [(0, ("x",)), (9, ()), (20, ("y",)), (31, ())]), 1, "m=1..8, 20..30;"),
        (([(0, ("x",)), (512, ())], [(0, ())]), 16, "m=16..511 that 16 divides;"),
    ],
)  # fmt: skip
def test_ranges_of_rows_in_words(parts: Any, least_m: int, words: str) -> None:
    found = _unjudged_site("layer", parts, [5])
    assert found.least_m == least_m and found.why.startswith(f"quantized at {words}")


def test_chains_at_other_rows_are_named(tuning_book: Book) -> None:
    model = tower()
    handle = convert(model, 0.06, m_range=(512, 2048))
    seen = [rows_of_tower(64) for _ in range(5)]
    seen += [rows_of_tower(m) for m in (16, 32, 48, 80)]
    found = handle.limit_loss(lambda x: 1.0 + model(x).float().square().mean(), seen)
    assert [site.name for site in found.unjudged] == ["0 to 2", "0", "2"]
    assert found.unjudged[0].why.startswith("a chain at m=512..2048")
    assert "the batches have 16 to 80 rows" in found.unjudged[0].why
    assert len(found.unjudged[0].kernels) > 0 and is_chained(model)


def test_a_loss_in_float32_is_refused_and_under_autocast_judged(known: Book) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).eval()
    handle = convert(model, kernels={"output": "row"}, device=None)
    routes = {name: site.routes for name, site in handle.sites.items()}
    given = list(torch.randn(4, M, WIDTH))

    def loss(x: Tensor) -> Tensor:
        return 1.0 + model(x).float().square().mean()

    words = (
        "the loss multiplies torch.float32 by weights in torch.float32, unquantized, so that "
        "nothing runs in FP8.*run the loss under torch.autocast in bfloat16"
    )
    with pytest.raises(UnsupportedError, match=words):
        handle.limit_loss(loss, given)
    assert {name: site.routes for name, site in handle.sites.items()} == routes

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(x)

    found = handle.limit_loss(cast, given, relative=1.0)
    assert [site.name for site in found.sites] == ["0", "2"] and not found.unjudged
    assert all(site.change.mean != 0 for site in found.sites)


def test_a_layer_that_the_loss_calls_in_float32_is_not_judged(known: Book) -> None:
    class Half(Branches):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.parts[0](x).float()
            return y + self.parts[1](x)

    model = Half().eval().requires_grad_(False)
    handle = convert(model, 0.06)
    given = list(torch.randn(4, M, WIDTH))
    found = handle.limit_loss(lambda x: 1.0 + model(x).square().mean(), given, relative=1e-12)
    assert [site.name for site in found.sites] == EVERY[:1]
    assert [(site.name, site.is_unfit) for site in found.unjudged] == [(EVERY[1], True)]
    assert found.rows[1]["why"] == (
        "the loss multiplies torch.float32 by weights in torch.float32, unquantized, as kernels "
        "need bfloat16: not judged, stays"
    )
    assert f"; not judged, as kernels do not take the operands: {EVERY[1]}" in found.summary
    assert "rows are others" not in found.summary
    assert in_fp8(handle) == EVERY[1:]


def test_a_chain_that_the_loss_calls_in_float32_is_refused(tuning_book: Book) -> None:
    model = tower().float()
    handle = convert(model, 0.06)
    seen = [rows_of_tower(512).float() for _ in range(4)]
    with pytest.raises(UnsupportedError, match="run the loss under torch"):
        handle.limit_loss(lambda x: 1.0 + model(x).square().mean(), seen)


def test_forced_kernels_are_judged_at_any_rows(known: Book) -> None:
    model = model_of()
    handle = convert(model, kernels={"output": "row"}, device=None)
    seen = list(torch.randn(4, 256, WIDTH).bfloat16())
    found = handle.limit_loss(loss_by(model), seen, relative=1.0)
    assert [site.name for site in found.sites] == EVERY and not found.unjudged
    assert [site.gain_us for site in found.sites] == [None] * 4
    assert all(site.is_kept for site in found.sites) and "emulated" not in found.summary


def test_the_file_of_a_limit_is_for_the_device_of_the_conversion(
    known: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a limit alone; a tuning behind it timed steps here."""
    limit = 0.5 * limited(model_of(), 1.0)[0].sites[2].change.mean
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    found, handle = limited(model_of(), limit)
    assert found.file.is_emulated and "; errors were emulated" in found.summary
    assert found.file.device["product"] == H200.product and found.file.torch == "2.13.0"
    found.save(tmp_path / "limit.json")
    script = AtRows(handle, lambda on: 100.0 - 10 * len(on))
    tuned = tune(handle, lambda: handle.model(batches()[0]), make_timer=script)
    assert tuned.file.is_timed and tuned.file.device["vendor"] == "cpu"
    assert tuned.file.torch == "2.13.0+cpu" and tuned.file.over_limit == {(EVERY[2], "output")}
    tuned.save(tmp_path / "both.json")
    with pytest.raises(ChoicesError, match=r"its device is .*; tune or limit again"):
        convert(model_of(), 0.06, device=None, tuned=tmp_path / "limit.json")

    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")  # as on the GPU
    monkeypatch.setattr("lokakern.conversion.convert.device_of", lambda _: H200)
    monkeypatch.setattr("lokakern.conversion.tuning_file.current_device", lambda *_: H200)
    other = convert(model_of(), 0.06, device=None, tuned=tmp_path / "limit.json")
    assert in_fp8(other) == [EVERY[0], EVERY[1], EVERY[3]]
    with pytest.raises(ChoicesError, match="its device is"):
        convert(model_of(), 0.06, device=None, tuned=tmp_path / "both.json")
    monkeypatch.setattr(torch, "__version__", "2.14.0+cu130")
    with pytest.raises(ChoicesError, match=r"its torch is '2\.13\.0', and here it is '2\.14\.0'"):
        convert(model_of(), 0.06, device=None, tuned=tmp_path / "limit.json")


def test_layers_that_no_batch_calls_are_told(known: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06)
    plain = model_of().parts[0].double()

    def loss(x: Tensor) -> Tensor:
        return 1.0 + (model.parts[0](x) - plain(x.double())).square().mean()

    found = handle.limit_loss(loss, batches(), relative=1e-12)
    assert [site.name for site in found.sites] == [EVERY[0]] and found.unseen == tuple(EVERY[1:])
    assert found.summary.endswith("not called, and as before: parts.1, parts.2, parts.3")
    assert in_fp8(handle) == EVERY[1:]
    with pytest.raises(MeasurementError, match="calls none of the converted layers"):
        handle.limit_loss(lambda _: torch.tensor(1.0), batches())
    assert in_fp8(handle) == EVERY[1:]


@pytest.mark.parametrize("hurts", [2, 3])
def test_sets_of_layers_that_cost_nothing_alone_become_smaller(known: Book, hurts: int) -> None:
    model = model_of()
    handle = convert(model, 0.06)

    def loss(x: Tensor) -> Tensor:
        model(x)
        count = sum(bool(kernel_at(part._routes[0], M)) for part in model.parts)
        return torch.tensor(1.0 + 0.1 * (count >= hurts))

    found = handle.limit_loss(loss, batches(), relative=1e-2)
    assert len(in_fp8(handle)) == hurts - 1 and found.change.mean == 0.0


def test_a_noisy_layer_is_over_the_limit_by_its_interval(known: Book) -> None:
    """The mean of the first half is 0, and the second half is within the limit."""
    model = model_of()
    handle, seen = convert(model, 0.06), list(range(8))

    def loss(place: int) -> Tensor:
        model(batches()[place])
        is_on = bool(kernel_at(model.parts[0]._routes[0], M))
        return torch.tensor(1.0 + 0.1 * is_on * (-1) ** place * (place < 4))

    found = handle.limit_loss(loss, seen, relative=1e-2)
    assert in_fp8(handle) == EVERY[1:] and found.sites[0].change.mean == pytest.approx(0, abs=1e-6)


def test_what_cannot_be_limited(known: Book) -> None:
    model = model_of()
    handle, loss = convert(model, 0.06), loss_by(model)
    for relative in (0.0, -1.0, math.nan, math.inf, "1"):
        with pytest.raises(MeasurementError, match="expected a finite number above 0"):
            handle.limit_loss(loss, batches(), relative=relative)  # type: ignore[arg-type]
    with pytest.raises(MeasurementError, match="there are 3 batches; expected at least 4"):
        handle.limit_loss(loss, batches(3))
    with pytest.raises(MeasurementError, match="batches is a mapping"):
        handle.limit_loss(loss, dict.fromkeys(range(4)))  # type: ignore[arg-type]
    training = convert(model_of().requires_grad_(), 0.06, inference=False)
    with pytest.raises(UnsupportedError, match="convert with inference=True"):
        training.limit_loss(loss, batches())
    calls = itertools.count()
    losses: dict[str, Callable[[Tensor], Any]] = {
        "without FP8 the loss of batch 0 is nan": lambda x: loss(x) * math.nan,
        "hides changes under a thousandth": lambda x: loss(x).bfloat16(),
        r"has the shape \(2,\)": lambda x: loss(x).expand(2),
        "is of type str": lambda x: str(loss(x)),
        "in two runs": lambda x: loss(x) + next(calls),
    }
    for words, other in losses.items():
        with pytest.raises(MeasurementError, match=words):
            handle.limit_loss(other, batches())
        assert in_fp8(handle) == EVERY  # as before


def test_a_loss_that_raises_changes_nothing(known: Book) -> None:
    model = model_of()
    found, handle = limited(model, 1e-12)
    loss, calls = loss_by(model), itertools.count()

    def failing(x: Tensor) -> Tensor:
        if next(calls) == 30:
            raise ValueError("no more")
        return loss(x)

    with pytest.raises(ValueError, match="no more"):
        handle.limit_loss(failing, batches(), relative=1.0)
    assert not in_fp8(handle) and set(handle.over_limit) == {(name, "output") for name in EVERY}
    assert not any(site.is_kept for site in found.sites)
    handle.refresh()
    script = AtRows(handle, lambda on: 100.0 + len(on))
    tune(handle, lambda: model(batches()[0]), make_timer=script)
    calls = itertools.count()
    with pytest.raises(ValueError, match="no more"):
        handle.limit_loss(failing, batches(), relative=1.0)
    assert not in_fp8(handle)  # a tuning stays


def test_relus_in_products_are_not_given_up(known: Book) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH)
    ).bfloat16()
    plain = copy.deepcopy(model).double()
    handle = convert(model.requires_grad_(False), 0.06)
    relus = handle.rectified
    assert list(relus) == ["0"]

    def loss(x: Tensor) -> Tensor:
        return 1.0 + (model(x) - plain(x.double())).square().mean()

    found = handle.limit_loss(loss, batches(), relative=1e-12)
    assert [(site.name, site.is_kept) for site in found.sites] == [("3", False)]
    assert handle.rectified == relus and not in_fp8(handle)
    three = nn.Sequential(*model[:3])
    handle.undo()
    found = convert(three, 0.06).limit_loss(lambda x: three(x).float().square().mean(), batches())
    assert not found.sites and not found.file.is_emulated


def test_a_product_whose_loss_is_not_finite_goes(known: Book) -> None:
    model = model_of()
    handle, loss = convert(model, 0.06), loss_by(model)
    calls = itertools.count()

    def broken(x: Tensor) -> Tensor:
        is_on = kernel_at(model.parts[1]._routes[0], M)
        return loss(x) + (math.inf * (-1) ** next(calls) if is_on else 0.0)

    found = handle.limit_loss(broken, batches(), relative=1.0)
    assert in_fp8(handle) == [EVERY[0], EVERY[2], EVERY[3]]
    assert found.change.high <= 1.0 and found.before.high == math.inf


def test_buffers_and_random_numbers_are_the_same_in_each_run(known: Book) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop = model_of(), nn.Dropout(0.5)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.drop(self.inner(x)) + self.count

    model = Noisy().train()
    handle = convert(model, 0.06)
    plain = model_of().double()

    def loss(x: Tensor) -> Tensor:
        return 1.0 + (model(x) - plain(x.double())).square().mean()

    state = torch.get_rng_state()
    found = handle.limit_loss(loss, batches(), relative=1.0)
    assert model.count == 0 and torch.equal(torch.get_rng_state(), state)
    assert 0 < abs(found.before.mean) < 0.1


options = st.builds(
    Option, st.just(frozenset({0})), st.integers(0, BINS + 5).map(lambda x: x / BINS),
    st.integers(1, 20).map(float),
)  # fmt: skip


@given(st.lists(st.lists(options, min_size=1, max_size=2), max_size=6))
@settings(max_examples=200, deadline=None)
def test_the_knapsack_is_the_best_one(items: list[list[Option]]) -> None:
    best = 0.0
    for chosen in itertools.product(*([None, *ways] for ways in items)):
        some = [option for option in chosen if option is not None]
        if sum(round(option.loss * BINS) for option in some) <= BINS:
            best = max(best, sum(option.gain_us for option in some))
    found = best_within(items, 1.0)
    assert sum(option.gain_us for option in found) >= best - 1e-9 or _is_rounded(items)
    assert sum(option.loss for option in found) <= 1.0 + 1e-9


def _is_rounded(items: list[list[Option]]) -> bool:
    """Whether a loss is rounded up by a part of a thousandth, as of floats."""
    losses = [option.loss for ways in items for option in ways]
    return any(math.ceil(loss * BINS) != round(loss * BINS) for loss in losses)
