"""Hooks of Probe: which rows they sample, and that they leave nothing behind."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

from lokakern.probe.hooks import MANY_ROWS, READ_ROWS, SAMPLED_ROWS, Sample
from lokakern.probe.session import Probe
from lokakern.probe.statistics import ROWS, OperandStatistics, SiteStatistics, add_rows, sizes_of
from lokakern.probe.step_buffer import StepBuffer

CPU = torch.device("cpu")


def sample(share: float = 0.0) -> Sample:
    keys = torch.rand(SAMPLED_ROWS, dtype=torch.float64)
    return Sample(share, keys.device, keys)


@pytest.mark.parametrize("features", [7, 64, 160, 720])
@pytest.mark.parametrize("samples", [9, 100, 2048])
def test_sampled_rows_are_spread_evenly_over_features(samples: int, features: int) -> None:
    """Rows of samples by features: none has more than one row more than another."""
    x = torch.arange(samples * features, dtype=torch.float32).view(samples, features, 1)
    for share in (0.0, 0.5, 0.999):
        rows = sample(share).rows_of(x).flatten().long()
        assert len(rows) == min(SAMPLED_ROWS, samples * features) == len(rows.unique())
        if samples * features > SAMPLED_ROWS:
            counts = torch.bincount(rows % features, minlength=features)
            assert counts.max() - counts.min() <= 1, counts
            gaps = rows.sort().values.diff(prepend=torch.tensor([0]))
            assert gaps.max() < 4 * samples * features / SAMPLED_ROWS + 1


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 300, 511, 512, 1000, 65536])
def test_sampled_rows_are_distinct_and_in_range(count: int) -> None:
    x = torch.arange(count, dtype=torch.float32)[:, None]
    for share in (0.0, 0.37, 0.9999999):
        rows = sample(share).rows_of(x).flatten()
        assert len(rows) == len(rows.unique()) == min(SAMPLED_ROWS, count)


def test_statistics_do_not_depend_on_memory_layout() -> None:
    lying = torch.randn(6, 9, 100).transpose(1, 2)
    plain = lying.contiguous()
    taken = sample(0.3)
    assert torch.equal(taken.rows_of(lying), taken.rows_of(plain))
    found = [OperandStatistics(9, CPU), OperandStatistics(9, CPU)]
    for operand, x in zip(found, (lying, plain), strict=True):
        operand.add(x, taken.rows_of(x), taken.keys[:256])
    for (_, one), (_, other) in zip(*(x.tensors() for x in found), strict=True):
        assert torch.equal(one, other)


def test_sampled_rows_are_copies() -> None:
    x = torch.randn(10, 4)
    rows = sample().rows_of(x)
    before = rows.clone()
    x.zero_()
    assert torch.equal(rows, before)


def add(buffer: StepBuffer, operand: OperandStatistics, x: Tensor, *sample: Tensor) -> None:
    buffer.add(add_rows, operand, *sizes_of(x), *sample)


def test_updates_made_together_equal_updates_made_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    together, alone = ([OperandStatistics(5, CPU) for _ in range(3)] for _ in range(2))
    buffer = StepBuffer()
    for step in range(3):
        for place in range(3):
            x = torch.randn(40, 5, generator=generator) * 10.0**place + step
            x[place] = torch.nan if step == 1 else 0.0
            keys = torch.rand(40, generator=generator, dtype=torch.float64)
            add(buffer, together[place], x, x.clone(), keys)
            alone[place].add(x, x.clone(), keys)
        buffer.settle()
    for one, other in zip(together, alone, strict=True):
        for (name, x), (_, exact) in zip(one.tensors(), other.tensors(), strict=True):
            assert torch.allclose(x, exact, rtol=1e-12), name
        assert one.nonfinite_rows == 1


def test_updates_of_all_forms_and_of_several_calls_are_made() -> None:
    buffer, narrow, wide = StepBuffer(), SiteStatistics(3, 4, CPU), SiteStatistics(3, 1000, CPU)
    for rows in (300, 300, 5):
        for site in (narrow, wide):
            x, taken = torch.randn(rows, site.k), sample()
            kept = taken.rows_of(x)
            add(buffer, site.input, x, kept, taken.keys[: len(kept)])
    buffer.take_in(steps=100)
    assert 0 < narrow.input.rows_seen + wide.input.rows_seen < 1210  # one form of six
    buffer.settle()
    for site in (narrow, wide):
        assert site.input.rows_seen == 605
        assert len(site.input.kept()[0]) == ROWS  # of 517 that were taken


@pytest.mark.parametrize("every", [1, 2, 5, 20, 100])
def test_updates_are_made_before_the_next_sample_and_evenly(every: int) -> None:
    buffer, sites = StepBuffer(), [SiteStatistics(3, k, CPU) for k in range(4, 9)]
    for _ in range(2):
        for site in sites:
            x, taken = torch.randn(40, site.k), sample()
            add(buffer, site.input, x, x.clone(), taken.keys[:40])
        done = [sum(int(site.input.keys.isfinite().sum()) for site in sites)]
        for _ in range(every):
            buffer.take_in(steps=every)
            done.append(sum(int(site.input.keys.isfinite().sum()) for site in sites))
        assert not buffer._groups
        most = 40 * -(-len(sites) // every)  # rows of so many sites
        assert all(0 <= b - a <= most for a, b in itertools.pairwise(done))
    assert all(site.input.rows_seen == 80 for site in sites)


class Normed(nn.Module):
    """A site with a norm behind it, which has a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))  # type: ignore[no-any-return]


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickled])
def test_copies_of_a_probed_model_are_not_probed(copy_of: Callable[[nn.Module], Any]) -> None:
    """Nothing of it is learned, it has no hook after its first call, and may be saved itself."""
    model, x = Normed(), torch.randn(5, 4)
    with Probe(model, every=50) as probe:
        model(x)
        assert probe._sampler.buffer._added  # something waits
        copied = copy_of(model)
        exact = copied(1e6 * x)
        assert hooks_of(copied) == 0 and hooks_of(model) == 4
        assert torch.equal(copied(1e6 * x), exact)
        again = copy_of(copy_of(model))  # of one that was not called
        model(x)
    assert torch.equal(copied.layer.weight, model.layer.weight)
    assert probe.sites()["layer"].input.rows_seen == 5
    assert probe.sites()["layer"].input.amax == float(x.abs().max())
    again(x)
    assert hooks_of(again) == hooks_of(model) == 0
    assert torch.equal(pickled(again)(x), model(x))


def test_copies_keep_hooks_of_users() -> None:
    model = Normed()
    with Probe(model):
        model.layer.register_forward_hook(doubled)
        copied = copy.deepcopy(model)
    x = torch.randn(5, 4)
    assert torch.equal(copied(x), model(x)) and hooks_of(copied) == 1


def doubled(_module: Any, _args: Any, y: Tensor) -> Tensor:
    return 2 * y


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("calls", [1, 3])
def test_gradients_within_checkpoints_are_sampled_once(use_reentrant: bool, calls: int) -> None:
    layer = nn.Linear(6, 6)
    x = torch.randn(40, 6, requires_grad=True)
    with Probe(layer) as probe:
        probe._sampler.turn(True)  # all calls are of one step
        probe._source = 2
        hidden = x
        for _ in range(calls):
            hidden = checkpoint(layer, hidden, use_reentrant=use_reentrant)
        hidden.square().sum().backward()
    (site,) = probe.sites().values()
    assert site.sizes == {40: calls}
    assert site.grad_output.rows_seen == site.input.rows_seen == 40 * calls
    if calls == 1:
        assert torch.equal(site.input.keys, site.grad_output.keys)


def test_late_gradients_are_paired_with_their_inputs() -> None:
    """The same rows of the input and of the gradient are sampled."""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.eye_(layer.weight)
    x = torch.randn(3000, 4, requires_grad=True)
    with Probe(layer) as probe:
        y = layer(x)
        layer(x)  # another step
        y.square().sum().backward()
    (site,) = probe.sites().values()
    keys, order = site.grad_output.keys, site.input.keys
    assert torch.equal(keys, order)
    assert torch.allclose(site.grad_output.rows, 2 * site.input.rows)


class Pair(nn.Module):
    """A module of a user's whose output is no matrix."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.weight, self.what = nn.Parameter(torch.randn(3, 4)), what

    def forward(self, x: Tensor) -> Any:
        return self.what(x @ self.weight.t())


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda y: (y, y), "no plain tensor of float16"),
        (lambda y: y.sum(dim=0), r"maps \[5, 4\] to \[3\]; expected \[..., 4\] to \[..., 3\]"),
        (lambda y: y.t(), r"maps \[5, 4\] to \[3, 5\]"),
    ],
)
def test_unsupported_sites_are_reported_with_the_reason(what: Any, why: str) -> None:
    model = nn.ModuleDict({"odd": Pair(what), "idle": nn.Linear(4, 3), "plain": nn.Linear(4, 3)})
    with Probe(model, filter=lambda m, _: hasattr(m, "weight")) as probe:
        for name in ("odd", "plain"):
            model[name](torch.randn(5, 4))
    unseen = probe.unseen()
    assert list(unseen) == ["odd", "idle"]
    assert unseen["idle"] == "it was not called in a sampled step"
    with pytest.warns(UserWarning, match=f"no verdict on what was not seen: odd: .*{why}"):
        report = probe.report(seeds=(0,))
    assert report.sites == ("plain",)


def test_wrapped_tensors_and_replicas_are_reported_with_the_reason() -> None:
    model = nn.Linear(4, 4)
    with Probe(model, every=1) as probe:
        torch.vmap(model)(torch.randn(5, 4))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model(mode.from_tensor(torch.randn(5, 4)))
    assert probe.sites() == {}
    assert "no plain tensor of float16" in probe.unseen()[""]
    model._is_replica = True
    with Probe(model) as probe:
        model(torch.randn(5, 4))
    assert "use DistributedDataParallel" in probe.unseen()[""]


def test_parametrized_weights_are_computed_in_sampled_steps_only() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    computed = []
    model.parametrizations.weight.register_forward_hook(lambda *_: computed.append(1))
    for watched in (False, True):
        with Probe(model, every=2) if watched else contextlib.nullcontext():
            for _ in range(4):
                model(torch.randn(5, 4)).sum().backward()
    assert len(computed) == 4 + 1 + 4 + 2  # one for its shape


@pytest.mark.parametrize("compiles", [False, True])
def test_spectral_norm_is_read_without_a_change(compiles: bool) -> None:
    """Its vectors take a step at each call in training; one more would change the model."""

    def outputs(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        with torch.no_grad():  # far from what its vectors were made for
            model.parametrizations.weight.original.copy_(torch.randn(3, 4))
        called = torch.compile(model, backend="eager") if compiles else model
        x = torch.randn(5, 4)
        if not watched:
            return [called(x) for _ in range(3)]
        with Probe(model, every=1) as probe:
            found = [called(x) for _ in range(3)]
        probe.report(seeds=(0,))
        snapshot = probe.sites()[""].snapshot
        assert snapshot is not None and model.training
        assert torch.allclose(x @ snapshot.t() + model.bias, found[-1], atol=1e-6)
        return found

    for one, other in zip(outputs(True), outputs(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("compiles", [False, True])
def test_lazy_layers_become_sites_at_their_first_call(compiles: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3, bias=False))
    called = torch.compile(model, backend="eager") if compiles else model
    with Probe(model, every=1) as probe:
        assert probe.unseen()["0"] == (
            "its weight is not initialized, and it was not called in a sampled step"
        )
        assert probe.merged_sites() == {}
        for _ in range(2):
            called(torch.randn(80, 4)).sum().backward()
            probe.step()
    assert probe.unseen() == {}
    assert [(s.n, s.k, s.has_bias) for s in probe.sites().values()] == [(6, 4, True), (3, 6, False)]
    assert {v.safety for v in probe.report(seeds=(0,))} <= {"safe", "unsafe", "undecided"}
    probe.save(tmp_path / "probe.bin")
    fresh = Probe(nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3, bias=False)))
    fresh.load(tmp_path / "probe.bin")
    assert fresh.sites()["2"].input.rows_seen == 160


def test_reports_use_the_current_weight() -> None:
    """Not those of the last sampled step, nor of what an earlier session saw."""
    model = nn.Linear(8, 8)
    with Probe(model, every=1) as probe:
        model(torch.randn(100, 8)).sum().backward()
        with torch.no_grad():
            model.weight.data.mul_(3.0)
    old = probe.sites()[""].snapshot
    assert old is not None and not torch.equal(old, model.weight)
    probe.report(seeds=(0,))
    assert torch.equal(probe.sites()[""].snapshot, model.weight)  # type: ignore[arg-type]
    other = Probe(nn.Linear(8, 8))
    other._recorders[""].statistics_on(torch.device("cpu")).merge(probe.sites()[""])
    other.report(seeds=(0,))
    assert torch.equal(other.sites()[""].snapshot, model.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("sums_to_zero", [False, True])
def test_cancellation_of_weight_gradients_is_measured(sums_to_zero: bool, compiles: bool) -> None:
    """Of inputs of mean 3 and gradients that sum to zero over a batch, nine parts in ten.

    A batch may come in parts, and go through the layer twice.
    """
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(32, 128, bias=False)
    called = torch.compile(layer, backend="aot_eager") if compiles else layer
    expected = []
    with Probe(layer, every=1) as probe:
        probe.step()  # calls are no steps from now on
        for _ in range(3):
            x = torch.randn((400, 32), generator=generator) + 3.0
            gradient = torch.randn((400, 128), generator=generator)
            if sums_to_zero:
                gradient -= gradient.mean(dim=0)
            y = torch.cat([called(x[:200]), called(x[200:])])
            y.backward(gradient)
            sums, terms = gradient.double().t() @ x.double(), gradient.double().square()
            terms = terms.t() @ x.double().square().sum(dim=1)
            expected.append((terms / sums.square().sum(dim=1)).mean())
            probe.step()
    assert layer.weight._backward_hooks in (None, {})
    found = probe.sites()[""].cancellation
    assert found == pytest.approx(float(sum(expected)) / 3, rel=0.05)
    assert (found > 9) == sums_to_zero


def test_saving_a_probed_weight_does_not_warn() -> None:
    model = nn.Linear(4, 4)
    with Probe(model, every=1), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(model.state_dict(keep_vars=True), io.BytesIO())
        copied = copy.deepcopy(model)
    assert copied.weight._backward_hooks in (None, {})


def test_loaded_statistics_and_new_rows_have_distinct_keys(tmp_path: Path) -> None:
    first, model = tmp_path / "first", nn.Linear(4, 4)
    probe = Probe(model, every=1)
    for _ in range(2):
        with probe:
            model(torch.randn(100, 4)).sum().backward()
        probe.save(first)
        probe = Probe(model, every=1)
        probe.load(first)
    keys = probe.sites()[""].input.kept()[1]
    assert len(keys) == len(keys.unique()) == 200


def test_forget_drops_statistics() -> None:
    model = nn.Linear(4, 4)
    with Probe(model, every=1) as probe:
        model(torch.randn(10, 4))
        probe.forget()
        assert probe.sites() == {}
        model(torch.randn(7, 4))
    assert probe.sites()[""].sizes == {7: 1}


def test_hooks_are_removed_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    before = len(_global_optimizer_post_hooks)
    with pytest.raises(ZeroDivisionError), Probe(model):
        model(torch.randn(3, 4))
        raise ZeroDivisionError
    assert len(_global_optimizer_post_hooks) == before
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_a_probe_can_be_restarted() -> None:
    model = nn.Linear(4, 4)
    probe = Probe(model, every=2)
    for _ in range(2):
        with probe:
            probe.start()  # without effect
            for _ in range(4):
                model(torch.randn(8, 4)).sum().backward()
    assert probe.sites()[""].sizes == {8: 4}
    assert not model._forward_hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert probe.unseen() == {}


def test_zeros_and_nonfinite_values_are_handled() -> None:
    model = nn.Linear(4, 4)
    with Probe(model, every=1) as probe:
        for x in (torch.zeros(9, 4), torch.full((9, 4), torch.nan), torch.randn(9, 4) * 1e30):
            model(x).square().sum().backward()
    (site,) = probe.sites().values()
    assert site.input.rows_seen == 27 and site.input.nonfinite_rows == 9
    assert site.grad_output.nonfinite_rows >= 9
    assert all(torch.isfinite(x).all() for name, x in site.tensors() if not name.endswith("keys"))
    (verdict,) = (v for v in probe.report(seeds=(0,)) if v.gemm == "output")
    assert "9 of 27 rows were not finite" in verdict.notes


@pytest.mark.parametrize("features", [1, 7, 13, 26, 52, 160, 720])
@pytest.mark.parametrize("samples", [9, 500, 2048, 8192])
@pytest.mark.parametrize("form", ["flat", "samples", "features", "turned"])
def test_part_of_many_rows_is_spread_evenly_over_features(
    form: str, samples: int, features: int
) -> None:
    count = samples * features
    whole = torch.arange(count, dtype=torch.float32)[:, None]
    feature = whole.flatten().long() % features
    if form in ("samples", "turned"):
        whole = whole.view(samples, features, 1)
    if form == "features":
        whole, feature = whole.view(features, samples, 1), whole.flatten().long() // samples
    if form == "turned":
        whole = whole.expand(-1, -1, 2).transpose(1, 2).contiguous().transpose(1, 2)
    assert whole.is_contiguous() is (form != "turned" or features == 1)
    for share in (0.0, 0.5, 0.999):
        part = sample(share).part_of(whole)
        rows = part[..., 0].flatten().long()
        if count < MANY_ROWS:
            assert len(rows) == count
            continue
        assert len(rows) == len(rows.unique()) and 0.8 * READ_ROWS <= len(rows) <= 1.2 * READ_ROWS
        counts = torch.bincount(feature[rows], minlength=features)
        assert counts.max() - counts.min() <= 1 + 0.1 * counts.min(), counts
