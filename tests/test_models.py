"""The models: forward and backward at tiny sizes, and the sizes that were published."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lokakern.bench.models import wukong
from lokakern.bench.models.batch import CRITEO, PADDING, Batch, Inputs, random_batch
from lokakern.bench.models.tables import Tables
from lokakern.errors import ShapeError


def multiply_adds(model: nn.Module, samples: int = 2) -> float:
    """Of a sample, all matrix products of a forward pass, counted where nothing is computed."""
    from torch.utils.flop_counter import FlopCounterMode

    batch = random_batch(model.config.inputs, samples)  # type: ignore[union-attr]
    with FlopCounterMode(display=False) as counter:
        model(Batch(*(tensor.to("meta") for tensor in batch)))
    return counter.get_total_flops() / 2 / samples


def test_bags_are_sums_of_rows_of_their_own_table() -> None:
    inputs = Inputs(dense=1, rows=(3, 5), slots=(2, 3))
    tables, batch = Tables(inputs, 4), random_batch(inputs, 6)
    ids = batch.ids.view(6, 5)
    assert ids[:, :2].min() >= 1 and ids[:, :2].max() <= 3
    assert ids[:, 2:].min() >= 4 and ids[:, 2:].max() <= 8
    ids[0, 2:] = PADDING
    found = tables(batch)
    torch.testing.assert_close(found[:, 0], tables.weight[ids[:, :2]].sum(1))
    torch.testing.assert_close(found[1:, 1], tables.weight[ids[1:, 2:]].sum(1))
    assert found[0, 1].count_nonzero() == 0


def test_tables_begin_as_wide_as_they_are_short() -> None:
    tables = Tables(Inputs(dense=1, rows=(4, 10_000), slots=(1, 1)), 64)
    short, long = tables.weight.detach()[1:].split([4, 10_000])
    assert short.abs().max() == pytest.approx(0.5, rel=0.02)
    assert long.abs().max() == pytest.approx(0.01, rel=0.02)


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="as many bags as tables"):
        Inputs(dense=1, rows=(3, 5), slots=(2,))


def test_tables_can_be_capped() -> None:
    assert max(CRITEO.capped(1000).rows) == 1000
    assert CRITEO.capped(1000).rows[5] == 3


@pytest.mark.parametrize("size", ["tiny"])
def test_wukong_learns_a_batch_by_heart(size: str) -> None:
    torch.manual_seed(0)
    config = wukong.SIZES[size]
    model, batch = wukong.Wukong(config), random_batch(config.inputs, 64)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(0.7, abs=0.1)
    assert losses[-1] < 0.2


# Training takes 6 floating-point operations for each multiply-add of a forward pass. 5.6 GFLOP is
# what the paper gives Wukong of n = k = 48, whose last perceptron and extra inputs it does not say.
@pytest.mark.parametrize(("size", "gflop"), [("M", 5.6)])
def test_wukong_is_as_large_as_published(size: str, gflop: float) -> None:
    with torch.device("meta"):
        model = wukong.Wukong(wukong.SIZES[size])
    assert 6 * multiply_adds(model) / 1e9 == pytest.approx(gflop, rel=0.1)


def test_wukong_has_the_gemms_of_the_suite() -> None:
    """Rows B1 to B12 of suite `lrm` are layers of S, C1 to C4 of M."""
    from lokakern.bench.lrm import layer_named

    for size, names in {
        "S": ("B1", "B3", "B4", "B5", "B6", "B7", "B8", "B10", "B11", "B12"),
        "M": ("C1", "C2", "C3", "C4"),
    }.items():
        with torch.device("meta"):
            model = wukong.Wukong(wukong.SIZES[size])
        found = {
            (module.out_features, module.in_features)
            for module in model.modules()
            if isinstance(module, nn.Linear)
        }
        for name in names:
            layer = layer_named(name)
            assert (layer.n, layer.k) in found, f"{size} has no {layer}"
