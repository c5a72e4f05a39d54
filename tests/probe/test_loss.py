"""The change of a loss with one layer in FP8."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lokakern import numerics
from lokakern.errors import MeasurementError
from lokakern.probe.loss import interval_of
from lokakern.probe.session import Probe
from lokakern.types import Format, Granularity

D = 32


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.ReLU(), nn.Linear(D, 1))
    with torch.no_grad():  # exact in FP8, as are inputs of small integers
        model[0].weight.copy_(torch.randint(-2, 3, (D, D)))
        model[0].weight[:, 0] = 448.0
    return model


def batch(seed: int) -> Tensor:
    found = torch.randint(-3, 4, (64, D), generator=torch.Generator().manual_seed(seed)).float()
    found[:, 0] = 448.0  # so that scales of rows are 1
    return found


def test_changes_are_paired_and_limited_to_the_site() -> None:
    """The first layer is exact in FP8: without pairs dropout alone would change its loss."""
    model = model_of()
    with Probe(model) as probe:
        found = probe.loss_changes(lambda x: model(x).square().mean(), [batch(i) for i in range(6)])
        assert probe.is_sampling and probe.sites() == {}
        model(batch(0))
        assert probe.is_sampling and probe.sites()["0"].sizes == {64: 1}
    assert found["0"].mean == found["0"].low == found["0"].high == 0.0
    assert not found["0"].is_told
    assert 0 < abs(found["3"].mean) < 0.1 and found["3"].batches == 6
    assert all(not module._forward_hooks for module in model)


def test_changes_equal_the_change_of_the_loss() -> None:
    model = model_of().eval()
    batches = [batch(i) for i in range(3)]
    found = Probe(model).loss_changes(lambda x: model(x).square().mean(), batches)["3"]
    changes = []
    for x in batches:
        with torch.no_grad():
            hidden = model[:3](x)
            a, b = (
                numerics.dequantize(numerics.quantize(o.bfloat16(), Format.E4M3FN, Granularity.ROW))
                for o in (hidden, model[3].weight)
            )
            after = float((a @ b.t() + model[3].bias).square().mean())
            before = float(model(x).square().mean())
        changes.append((after - before) / before)
    assert found.mean == pytest.approx(sum(changes) / 3, rel=1e-4, abs=1e-9)
    half = 4.303 * torch.tensor(changes).std().item() / math.sqrt(3)
    assert found.high - found.mean == pytest.approx(half, rel=1e-3)


def test_intervals_have_their_nominal_coverage() -> None:
    """95 % of 2000 intervals of four normal numbers, within 3 deviations of that share."""
    draws = torch.randn(2000, 4, generator=torch.Generator().manual_seed(3)) + 1.0
    covered = sum(one.low <= 1.0 <= one.high for one in map(interval_of, draws.tolist()))
    assert abs(covered / 2000 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 2000)


def test_intervals_need_two_batches_and_finite_losses() -> None:
    with pytest.raises(MeasurementError, match="at least 2 batches; there were 1"):
        interval_of([0.1])
    assert interval_of([0.1, math.nan]).high == math.inf


def test_buffers_are_restored_after_each_run() -> None:
    """Or the loss after would be that of another model, and training would go on with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, momentum=0.5), nn.Linear(D, 1))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    Probe(model).loss_changes(lambda x: model(x).square().mean(), [batch(0), batch(1)])
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_relative_change_of_a_zero_loss_is_infinite() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    x = torch.tensor([[1.0, -0.7]])
    with torch.no_grad():
        target = model(x)
    found = Probe(model).loss_changes(lambda _: (model(x) - target).abs().sum(), [0, 1])[""]
    assert found.mean == math.inf
