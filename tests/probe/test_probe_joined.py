"""Probing layers that Mods fuse, pad, or multiply across tokens."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lokakern
from lokakern import mods
from lokakern.bench.fp8_gain.products import products_of_probe
from lokakern.errors import UnknownNameError
from lokakern.nn.module_scan import INNER, MIXING
from lokakern.probe import files
from lokakern.probe.session import Probe
from tests.support import probe_ranks

M, K, N = 96, 48, 64
SITE = "attend.fusedlinear_0"


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lokakern.problems.ACCURACY_ROWS", 128)
    yield


class Three(nn.Module):
    """Three layers that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(K, N), nn.Linear(K, N // 2)
        self.third = nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.first(x), self.second(x), self.third(x)
        return first * third + functional.pad(second, (0, N // 2))


class One(nn.Module):
    """The same with one layer."""

    def __init__(self, three: Three) -> None:
        super().__init__()
        parts = (three.first, three.second, three.third)
        self.fusedlinear_0 = nn.Linear(K, N + N // 2 + N)
        with torch.no_grad():
            self.fusedlinear_0.weight.copy_(torch.cat([p.weight for p in parts]))
            self.fusedlinear_0.bias.copy_(torch.cat([p.bias for p in parts]))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.fusedlinear_0(x).split((N, N // 2, N), -1)
        return first * third + functional.pad(second, (0, N // 2))


class Model(nn.Module):
    def __init__(self, attend: nn.Module, last: nn.Linear) -> None:
        super().__init__()
        self.attend, self.last = attend, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attend(x))


def pair() -> tuple[Any, Any]:
    """A model whose layers are fused, and one that has a layer of their weights."""
    torch.manual_seed(0)
    three, last = Three(), nn.Linear(N, 8)
    fused, plain = Model(three, last), Model(One(three), copy.deepcopy(last))
    mods.apply(fused, [mods.FuseShared()])
    return fused, plain


def inputs(step: int) -> Tensor:
    return torch.randn(M, 2, K, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, call: Any, steps: int = 3) -> list[float]:
    return probe_ranks.train(model, call, steps, 0.1, given=inputs)


@pytest.mark.parametrize("backend", ["", "aot_eager", "inductor"])
@pytest.mark.sample(every=3)
def test_fused_layers_are_sampled_like_one_layer(backend: str) -> None:
    """Inputs, outputs, gradients and weights: the same statistics, element by element.

    But for what cancels in a weight's gradient, which no parameter of the fused ones has whole.
    """
    found = []
    for model in pair():
        with Probe(model, every=2) as probe:
            call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
            train(model, call)
        found.append(probe.sites())
    assert found[0].keys() == found[1].keys() == {"last", SITE}
    fused, plain = found[0][SITE], found[1][SITE]
    assert (fused.n, fused.k, fused.has_bias) == (plain.n, plain.k, True)
    assert fused.sizes == plain.sizes == {2 * M: 2}
    assert fused.grad_output.rows_seen == 4 * M
    ours, theirs = dict(fused.tensors()), dict(plain.tensors())
    assert ours.keys() == theirs.keys() and "snapshot" in ours
    assert fused.cancellation == 0 < plain.cancellation
    ours.pop("cancellations")
    for name, x in ours.items():
        assert torch.allclose(x, theirs[name], rtol=1e-4, atol=1e-6), name


def test_probing_does_not_change_training_of_fused_models() -> None:
    """The results are bitwise equal."""
    alone, (watched, _) = pair()[0], pair()
    before = train(alone, alone, 4)
    with Probe(watched, every=2):
        assert train(watched, watched, 4) == before
    for mine, other in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_nested_outputs_are_unchanged() -> None:
    """Probe does not concatenate nested outputs of fused layers."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(K, N), nn.Linear(K, N)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) * self.second(x)

    model = Two()
    mods.apply(model, [mods.FuseShared()])
    x = torch.nested.nested_tensor([torch.randn(m, K) for m in (3, 5)], layout=torch.jagged)
    expected = model(x)
    with Probe(model) as probe:
        found = model(x)
        probe.step()
    assert torch.equal(found.values(), expected.values())
    assert probe.unseen()["fusedlinear_0"] == "its outputs are no plain tensors"


def test_padded_layers_are_judged_at_the_sizes_that_they_multiply(tmp_path: Path) -> None:
    """Zeros change no error; the operands of a file stay as they came."""
    reports = []
    for multiple in (1, 16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(60, 44))
        mods.apply(model, [mods.Pad(multiple, multiple)])
        with Probe(model) as probe:
            model(torch.randn(M, 60, requires_grad=True)).square().mean().backward()
            probe.step()
        reports.append(probe.report(budget=0.06, seeds=(0,)))
    plain, padded = reports
    assert [v.shape for v in plain] == [(M, 44, 60), (M, 60, 44), (44, 60, M)]
    assert [v.shape for v in padded] == [(M, 48, 64), (M, 64, 48), (48, 64, M)]
    for one, other in zip(plain, padded, strict=True):
        assert [c.scales for c in one.classes] == [c.scales for c in other.classes]
        for a, b in zip(one.classes, other.classes, strict=True):
            assert b.row_err == pytest.approx(a.row_err, rel=0.1)
    probe.save(tmp_path / "probe.bin")
    (site,) = files.load(tmp_path / "probe.bin").values()
    assert (site.n, site.k, site.shape) == (44, 60, (M, 48, 64))
    assert [(p.n, p.k) for p in products_of_probe({"0": site}, ["output"])] == [(48, 64)]


def test_layers_changed_by_mods_are_reported_without_warning() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.mix = Three(), nn.Linear(M, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(self.attend(x).transpose(0, 1).transpose(1, 2))

    model = Mixed()
    mods.apply(model, [mods.FuseShared(), mods.MixTokens()])
    with Probe(model) as probe, warnings.catch_warnings():
        warnings.simplefilter("error")
        model(inputs(0).requires_grad_()).square().mean().backward()
        probe.step()
        report = probe.report(budget=0.06, seeds=(0,))
    parts = {f"attend.{name}": INNER for name in ("first", "second", "third")}
    assert probe.unseen() == {**parts, "mix": MIXING}
    assert {v.site for v in report} == {SITE}
    assert {v.gemm for v in report} == {"output", "grad_input", "grad_weight"}
    conversion = lokakern.convert(model, report, device="NVIDIA H200")
    assert set(conversion.sites) == {SITE, "mix"}
    assert conversion.skipped == parts
    assert all("MixTokens" in route.why for route in conversion.sites["mix"].routes)


def test_models_without_sites_after_mods_are_refused_with_the_reason() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(M, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x.transpose(1, 2))

    model = Mixer()
    mods.apply(model, [mods.MixTokens()])
    with pytest.raises(UnknownNameError, match="mix: MixTokens makes it multiply"):
        Probe(model)


def test_loss_changes_of_fused_layers_equal_one_layer() -> None:
    found = []
    for model in pair():
        loss = lambda x, model=model: model(x).square().mean()  # noqa: E731
        found.append(Probe(model).loss_changes(loss, [inputs(i) for i in range(3)])[SITE])
    assert found[0].mean == pytest.approx(found[1].mean, rel=1e-3) and found[0].mean != 0


def test_models_may_have_an_attribute_named_parts() -> None:
    """An attribute of this name that is something else."""
    model: Any = nn.Sequential(nn.Linear(K, N))
    model.parts = 3
    model[0].parts = (model[0],)
    assert list(lokakern.convert(model, 0.06, device="NVIDIA H200").sites) == ["0"]
    assert Probe(model).unseen() == {"0": "it was not called in a sampled step"}
