"""Probing a model: which steps are sampled, files, ranks, and that the model is unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop as nop
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lokakern.bench.fp8_gain.products import products_of_probe
from lokakern.errors import DatabaseError, LokakernError, ShapeError, UnknownNameError
from lokakern.probe import files
from lokakern.probe.hooks import MOST_CALLS
from lokakern.probe.replay import LearnedSite
from lokakern.probe.session import STEPS_OF_OTHERS, Probe
from lokakern.probe.statistics import SiteStatistics
from lokakern.types import Format
from tests.support.probe_ranks import HIDDEN, KINDS, K, M, N, inputs, model_of, train


def expected(steps: list[int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean of the input, and of the gradient of the output, of both layers at some steps."""
    model = model_of()
    seen: dict[str, list[list[Tensor]]] = {"0": [[], []], "3": [[], []]}
    for step in steps:
        x = inputs(step)
        first = model[0](x)
        hidden = model[2](model[1](first))
        y = model[3](hidden)
        gradients = torch.autograd.grad(y.square().mean(), (first, y))
        for name, x_in, gradient in zip("03", (x, hidden), gradients, strict=True):
            seen[name][0].append(x_in.detach())
            seen[name][1].append(gradient)
    return {name: (torch.cat(a).mean(0), torch.cat(b).mean(0)) for name, (a, b) in seen.items()}


def check(sites: dict[str, SiteStatistics], steps: list[int]) -> None:
    assert list(sites) == ["0", "3"]
    for name, (x, gradient) in expected(steps).items():
        site = sites[name]
        assert site.sizes == {M: len(steps)}
        assert site.input.rows_seen == site.grad_output.rows_seen == M * len(steps)
        for mine, exact in ((site.input, x), (site.grad_output, gradient)):
            assert torch.allclose(mine.kept()[0].mean(dim=0), exact, rtol=1e-4, atol=1e-8)


def test_only_sampled_steps_are_recorded() -> None:
    model = model_of()
    with Probe(model, every=3) as probe:
        train(model, model, 7)
    check(probe.sites(), [0, 3, 6])
    assert (probe.sites()["0"].norm, probe.sites()["3"].norm) == ("layer", "")
    assert (probe.sites()["0"].has_bias, probe.sites()["3"].has_bias) == (True, False)
    train(model, model, 5)
    check(probe.sites(), [0, 3, 6])


def test_a_first_layer_has_no_gradient_of_its_input(tmp_path: Path) -> None:
    """What a graph computes is not known: there every layer has one."""
    model = model_of()
    with Probe(model, every=1) as probe:
        train(model, model, 2)
    probe.save(tmp_path / "probe.bin")
    again = Probe(model)
    again.load(tmp_path / "probe.bin")
    for sites in (probe.sites(), again.sites(), files.load(tmp_path / "probe.bin")):
        assert [site.needs_input_gradient for site in sites.values()] == [False, True]
        gemms = [LearnedSite(name, site).gemms() for name, site in sites.items()]
        assert gemms == [["output", "grad_weight"], ["output", "grad_input", "grad_weight"]]
        products = products_of_probe(sites, ["output"])
        assert [p.needs_input_gradient for p in products] == [False, True]
    compiled = torch.compile(model, backend="aot_eager")
    with Probe(model, every=1) as probe:
        train(model, compiled, 1)
    assert all(site.needs_input_gradient for site in probe.sites().values())


def test_probing_does_not_change_training() -> None:
    """The results are bitwise equal, dropout included."""

    def losses(watched: bool) -> list[float]:
        model = nn.Sequential(*model_of(), nn.Dropout(0.5))
        torch.manual_seed(1)
        if not watched:
            return train(model, model, 6, 0.1)
        with Probe(model, every=2):
            return train(model, model, 6, 0.1)

    assert losses(True) == losses(False)


def test_without_an_optimizer_calls_are_steps_until_step_is_called() -> None:
    model = model_of()
    with torch.no_grad(), Probe(model, every=2) as probe:
        for step in range(5):
            model(inputs(step))
        assert probe.sites()["0"].sizes == {M: 3}
        assert probe.is_sampling
        probe.step()
        for step in range(5):  # no steps any more
            model(inputs(step))
        assert probe.sites()["0"].sizes == {M: 3}
        probe.step()
        model(inputs(0))
        assert probe.sites()["0"].sizes == {M: 4}
    assert probe.sites()["0"].grad_output.rows_seen == 0


def test_only_an_optimizer_of_the_model_counts() -> None:
    model, other = model_of(), nn.Linear(2, 2)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    with Probe(model, every=2) as probe:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        assert not probe.is_sampling
        foreign.step()
        assert not probe.is_sampling
        optimizer.step()
        assert probe.is_sampling


def test_an_optimizer_that_steps_no_more_is_replaced() -> None:
    """But not by one that steps between its steps."""
    model = model_of()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.0) for _ in range(2))
    with Probe(model, every=10**6) as probe:
        for _ in range(3):
            first.step()
            for _ in range(STEPS_OF_OTHERS - 1):
                second.step()
        assert probe._steps == 3
        for _ in range(5):
            second.step()
        assert probe._steps == 8


def test_sampled_calls_in_a_step_are_bounded() -> None:
    model = model_of()
    with Probe(model) as probe:
        probe.step()
        assert not probe.is_sampling
    with Probe(model, every=1) as probe:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(inputs(0))
        optimizer.step()
        for step in range(MOST_CALLS + 9):
            model(inputs(step)).sum().backward()
    assert probe.sites()["0"].sizes == {M: MOST_CALLS + 1}


def test_checkpointed_calls_count_once() -> None:
    model = model_of()

    def call(x: Tensor) -> Tensor:
        return model[3](checkpoint(model[:3], x, use_reentrant=False))

    with Probe(model, every=2) as probe:
        train(model, call, 3)
    check(probe.sites(), [0, 2])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_the_whole_model_is_one_step(use_reentrant: bool) -> None:
    model = model_of()
    with Probe(model, every=2) as probe:
        for step in range(3):
            x = inputs(step).requires_grad_()
            checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    site = probe.sites()["0"]
    assert site.sizes == {M: 2} and site.grad_output.rows_seen == 2 * M


def test_empty_calls_and_other_precisions_are_handled() -> None:
    model = model_of()
    with Probe(model, every=1) as probe:
        model(torch.zeros(0, K)).sum().backward()
        assert probe.sites() == {}
        with torch.autocast("cpu", torch.bfloat16):
            model(inputs(0)).float().square().mean().backward()
        with torch.inference_mode():
            model(inputs(1))
        model(inputs(2)[0])  # a vector
    site = probe.sites()["0"]
    assert site.sizes == {M: 2, 1: 1}
    assert site.grad_output.rows_seen == M
    exact = torch.cat((inputs(0), inputs(1), inputs(2)[:1])).mean(dim=0)
    assert torch.allclose(site.input.kept()[0].mean(dim=0), exact, rtol=1e-5)


def test_gradients_are_assigned_to_their_own_call() -> None:
    model = model_of()
    with Probe(model) as probe:
        first = model(inputs(0))
        model(inputs(1))
        first.square().mean().backward()
    site = probe.sites()["0"]
    rows, keys = site.input.kept()
    known = dict(zip(keys.tolist(), rows, strict=True))
    mine = torch.stack([known[key] for key in site.grad_output.kept()[1].tolist()])
    assert len(mine) == M
    assert {tuple(row) for row in mine.tolist()} == {tuple(row) for row in inputs(0).tolist()}


class Shared(nn.Module):
    """One layer, called often in one graph."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.calls = nn.Linear(K, K), calls

    def forward(self, x: Tensor) -> Tensor:
        for place in range(self.calls):
            x = self.layer(x) * (place + 1)
        return x


@pytest.mark.parametrize("most", [2, 16])
def test_gradients_of_a_shared_layer_are_paired_with_their_inputs(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in a graph as run eagerly, also of a layer called more often than is looked at."""
    monkeypatch.setattr("lokakern.probe.hooks.MOST_CALLS", most)
    calls = 3
    torch.compiler.reset()
    found = []
    for compiles in (False, True):
        model = Shared(calls)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        with Probe(model) as probe:
            call(inputs(0)).sum().backward()
        site = probe.sites()["layer"]
        assert site.sizes == {M: min(calls, most)}
        assert torch.equal(site.input.keys, site.grad_output.keys)
        found.append(site.grad_output.kept()[0])
    assert torch.allclose(*found, rtol=1e-4)


class Aside(nn.Module):
    """One layer, called twice on what does not depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(K, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * 1.0).sum() + (self.layer(x + 9.0) * 100.0).sum()


@pytest.mark.parametrize("is_reversed", [False, True])
def test_gradients_are_paired_in_any_order_of_the_graph(is_reversed: bool) -> None:
    torch.compiler.reset()
    model, orders = Aside(), []

    def compile_backward(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes = list(graph.graph.nodes)
        first, second = (n for n in nodes if "probe_tap_gradient" in str(n.target))
        if is_reversed:  # all that the second needs goes before the first
            needed = {second}
            for node in reversed(nodes[: nodes.index(second)]):
                if any(node in user.all_input_nodes for user in needed):
                    needed.add(node)
            assert first not in needed
            for node in nodes[nodes.index(first) : nodes.index(second) + 1]:
                if node in needed:
                    first.prepend(node)
            graph.recompile()
        found = list(graph.graph.nodes)
        orders.append(found.index(first) < found.index(second))
        return make_boxed_func(graph.forward)

    with Probe(model) as probe:
        backend = aot_autograd(fw_compiler=nop, bw_compiler=compile_backward)
        torch.compile(model, backend=backend, fullgraph=True)(inputs(0)).backward()
    assert orders == [not is_reversed]
    site = probe.sites()["layer"]
    rows = dict(zip(site.input.keys.tolist(), site.input.rows, strict=True))
    keys, gradients = (x.tolist() for x in site.grad_output.kept()[::-1])
    assert len(keys) == 2 * M
    for key, gradient in zip(keys, gradients, strict=True):
        assert gradient[0] == (100.0 if rows[key].mean() > 5 else 1.0)


def test_a_model_compiled_in_place_is_sampled() -> None:
    torch.compiler.reset()
    model = model_of()
    model.compile(backend="eager", fullgraph=True)
    with Probe(model, every=3) as probe:
        train(model, model, 7)
    check(probe.sites(), [0, 3, 6])


@pytest.mark.parametrize("first", ["probe", "compile"])
def test_a_compiled_model_stays_in_one_graph(first: str) -> None:
    """One graph for steps that are sampled and one for the others; whichever came first."""
    torch.compiler.reset()
    model = model_of()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    probe = Probe(model, every=3)
    if first == "compile":
        train(model, compiled, 2)
        counter.clear()
    with probe:
        train(model, compiled, 7)
        assert counter.frame_count == 2
    check(probe.sites(), [0, 3, 6])
    train(model, compiled, 4)
    assert counter.frame_count == 3  # that without hooks
    check(probe.sites(), [0, 3, 6])


@pytest.mark.parametrize("is_first", [False, True])
def test_code_of_another_model_without_hooks_is_not_reused(is_first: bool) -> None:
    torch.compiler.reset()
    guarded = torch._dynamo.config.skip_nnmodule_hook_guards
    watched, other = model_of(), model_of(1)
    calls = [torch.compile(m, backend="aot_eager", fullgraph=True) for m in (watched, other)]
    with Probe(watched, every=3) as probe:
        if is_first:
            train(other, calls[1], 2)
        train(watched, calls[0], 4)
        train(other, calls[1], 2)
        train(watched, calls[0], 3, first=4)
    check(probe.sites(), [0, 3, 6])
    assert torch._dynamo.config.skip_nnmodule_hook_guards == guarded


def taps_in(graph: torch.fx.GraphModule) -> int:
    inner = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
    tap = torch.ops.lokakern.probe_tap
    return sum(node.target in (tap, tap.default) for m in inner for node in m.graph.nodes)


def test_graphs_of_unsampled_steps_have_no_taps() -> None:
    torch.compiler.reset()
    model, taps = model_of(), []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        taps.append(taps_in(graph))
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with Probe(model, every=2):
        train(model, compiled, 4)
    assert taps == [2, 0]


def test_calls_of_a_compiled_model_that_is_probed_itself_are_steps() -> None:
    torch.compiler.reset()
    compiled = torch.compile(model_of(), backend="eager", fullgraph=True)
    with torch.no_grad(), Probe(compiled, every=2) as probe:
        for step in range(4):
            compiled(inputs(step))
    assert list(probe.sites()) == ["0", "3"]
    assert probe.sites()["0"].sizes == {M: 2}


def test_compiled_checkpoints_count_once() -> None:
    torch.compiler.reset()
    model = model_of()

    def call(x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(model[:3], x, use_reentrant=False)
        return model[3](hidden)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with Probe(model, every=2) as probe:
        train(model, compiled, 3)
    check(probe.sites(), [0, 2])


class Scaled(nn.Module):
    """A module of a user's that calls F.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, K))

    def forward(self, *, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight) * 2


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.plain, self.norm = Scaled(), nn.Linear(K, N), nn.RMSNorm(N)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.plain(x)) + self.scaled(input=x)


def test_filter_selects_sites_and_norms_are_found_by_their_input() -> None:
    model = Nested()
    x = torch.randn(3, 5, K)
    with Probe(model, filter=lambda m, name: hasattr(m, "weight") and name != "norm") as probe:
        model(x).sum().backward()
    assert list(probe.sites()) == ["scaled", "plain"]
    assert probe.sites()["scaled"].sizes == {15: 1}
    assert [site.norm for site in probe.sites().values()] == ["", "rms"]
    with Probe(model, norms={"plain": "block_rms(4)"}) as probe:
        model(x)
    assert probe.sites()["plain"].norm == "block_rms(4)"


def test_invalid_arguments_are_refused_with_the_reason() -> None:
    with pytest.raises(UnknownNameError, match=r"no module of ReLU is a site"):
        Probe(nn.ReLU())
    with pytest.raises(ShapeError, match=r"site '1' has a weight of shape \[20\]"):
        Probe(model_of(), filter=lambda m, _: isinstance(m, nn.LayerNorm))
    with pytest.raises(ShapeError, match="every is 0"):
        Probe(model_of(), every=0)
    with pytest.raises(UnknownNameError, match="names 7; sites are 0, 3"):
        Probe(model_of(), norms={"7": "layer"})


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[SiteStatistics]:
    """Sites, one for each weight that they keep."""
    kept: list[SiteStatistics] = []
    real = SiteStatistics.add_weight
    monkeypatch.setattr(
        SiteStatistics, "add_weight", lambda site, weight: (kept.append(site), real(site, weight))
    )
    return kept


def test_weights_are_kept_at_each_sampled_step(snapshots: list[SiteStatistics]) -> None:
    model = model_of()
    with Probe(model, every=2) as probe:
        train(model, model, 13, rate=0.1)
    site = probe.sites()["0"]
    assert snapshots.count(site) == 7
    assert site.snapshot is not None and site.snapshot.shape == (HIDDEN, K)


def saved(tmp_path: Path) -> tuple[Path, Probe]:
    model = model_of()
    with Probe(model, every=2) as probe:
        train(model, model, 5)
    path = tmp_path / "probe.bin"
    probe.save(path)
    return path, probe


def test_saved_statistics_can_be_loaded(tmp_path: Path) -> None:
    path, probe = saved(tmp_path)
    found = files.load(path)
    assert list(found) == ["0", "3"]
    for name, site in probe.sites().items():
        mine = dict(found[name].tensors())
        for tensor, exact in site.tensors():
            assert torch.equal(mine[tensor], exact) and mine[tensor].dtype == exact.dtype
        assert found[name].sizes == site.sizes and found[name].norm == site.norm
    again = Probe(model_of())
    again.load(path)
    assert again.sites()["0"].input.rows_seen == 3 * M
    assert os.listdir(tmp_path) == ["probe.bin"]


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])


def test_files_of_before_are_of_products_in_bfloat16(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    edited(path, lambda h: [site.pop("half") for site in h["sites"].values()])
    assert {site.half for site in files.load(path).values()} == {Format.BFLOAT16}


@pytest.mark.parametrize("version", [1, 2, 3, 5])
def test_files_of_other_versions_are_refused(version: int, tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    edited(path, lambda h: h.update(version=version, tensors=[]))
    with pytest.raises(DatabaseError, match=f"its version is {version}; expected 4: probe the mod"):
        files.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.update(format="other"),
        lambda h: h.update(version="4"),
        lambda h: h.update(tensors=[]),
        lambda h: h["sites"]["0"].update(n=21),
        lambda h: h["sites"]["0"].update(k=2**30),
        lambda h: h["sites"]["0"].update(n=True),
        lambda h: h["sites"]["0"].update(n=2**20),
        lambda h: h["sites"].update({"\x1b[2J": h["sites"].pop("0")}),
        lambda h: h["sites"]["0"].update(norm="layer; drop"),
        lambda h: h["sites"]["0"].update(norm="block_rms(7)"),  # which divides no row
        lambda h: h["sites"]["0"].update(sizes=[[64, -1]]),
        lambda h: h["sites"]["0"].update(sizes=[[64, 1]] * 1025),
        lambda h: h["sites"]["0"].update(dtype="object"),
        lambda h: h["sites"]["0"].update(half="float32"),
        lambda h: h["sites"]["0"].update(snapshot=-1),
        lambda h: h["sites"]["0"].update(snapshot=19),
        lambda h: h["sites"]["0"].update(snapshot_t=1),
        lambda h: h["sites"]["0"].pop("bias"),
        lambda h: h["sites"].pop("0"),
        lambda h: h.pop("sites"),
    ],
)
def test_files_with_invalid_headers_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path, _ = saved(tmp_path)
    edited(path, change)
    with pytest.raises(DatabaseError, match="in order"):
        files.load(path)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    content = path.read_bytes()
    for other in (b"", b"x" * 100, content[:-1], content + b"\0", b"\xff" * 8 + content[8:]):
        path.write_bytes(other)
        with pytest.raises(DatabaseError, match="in order"):
            files.load(path)
    spoiled = bytearray(content)
    spoiled[-8 * 100 :] = b"\xff" * 800  # NaN
    path.write_bytes(spoiled)
    with pytest.raises(DatabaseError, match="in order"):
        files.load(path)
    with pytest.raises(DatabaseError, match="cannot be read"):
        files.load(tmp_path / "nowhere")
    with pytest.raises(LokakernError, match="cannot be written"):
        files.save(tmp_path / "no" / "folder", {})


@pytest.mark.rest
def test_statistics_of_two_ranks_equal_one_rank(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.probe_ranks", str(tmp_path)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    model = model_of()
    with Probe(model, every=2) as probe:
        train(model, model, 5)
    for kind in KINDS:
        check_ranks(files.load(tmp_path / kind), probe.sites())
    # The other rank had outputs in float16.
    halves = [files.load(tmp_path / kind)["0"].half for kind in KINDS]
    assert halves == [Format.FLOAT16, Format.BFLOAT16]


def check_ranks(found: dict[str, SiteStatistics], whole: dict[str, SiteStatistics]) -> None:
    assert list(found) == list(whole)
    for name, site in whole.items():
        mine = found[name]
        assert mine.sizes == {M // 2: 6} and mine.norm == site.norm
        # Of a mean over half as many rows each gradient is twice as large.
        for part, factor in (("input", 1.0), ("grad_output", 2.0)):
            one, both = getattr(site, part), getattr(mine, part)
            assert both.rows_seen == one.rows_seen
            assert torch.allclose(both.column_sizes, one.column_sizes * factor, rtol=1e-5)
            assert torch.allclose(both.largest, one.largest * factor, rtol=1e-5)
            assert len(both.kept()[0]) == 3 * M
        assert torch.equal(mine.input.keys, mine.grad_output.keys)


class NoHost(TorchDispatchMode):
    """Refuses whatever makes a host wait for its device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in str(func) for word in self.WAITS), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_sampled_steps_do_not_synchronize(snapshots: list[SiteStatistics]) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AssertionError, match="waits"), NoHost():
        float(torch.ones(1))
    with Probe(model, every=1) as probe, NoHost():
        for step in range(3):
            model(inputs(step)).square().mean().backward()
            optimizer.step()
    assert [snapshots.count(site) for site in probe.sites().values()] == [3, 3]


def test_transformed_and_exported_models_are_unchanged() -> None:
    """Within torch.func taps have no rule, and what is exported runs where no Probe is."""
    torch.compiler.reset()
    model = model_of()
    x = inputs(0)
    expected = model(x)
    with Probe(model, every=1):
        mapped = torch.vmap(lambda row: model(row))  # of a module it would trace its repr
        mapped = torch.compile(mapped, backend="aot_eager", fullgraph=True)
        assert torch.allclose(mapped(x[:, None])[:, 0], expected, atol=1e-6)
        exported = torch.export.export(model, (x,), strict=True).module()
        y = exported(x)
        assert torch.equal(y, expected) and y.requires_grad
        graph = torch.export.export(model, (x,)).graph
        assert not any("probe_tap" in str(node.target) for node in graph.nodes)
