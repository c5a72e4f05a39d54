"""Samples that one op takes at the end of a compiled graph, where there are CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch.utils.checkpoint import checkpoint

from lokakern.nn import graph_passes, late_taps
from lokakern.probe.session import Probe
from tests.support.routed_layers import layer_of, rows
from tests.support.traced_graphs import graphs_of

ONE, ALL, GRADIENT, GRADIENTS = (
    f"lokakern.{name}.default"
    for name in ("probe_tap", "probe_taps", "probe_tap_gradient", "probe_tap_gradients")
)


class Model(nn.Module):
    """Three sites, of which one is called twice; the last one makes the output."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.first, self.twice, self.last = (layer_of(n=64, k=64).to(device) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.first(x).square()).relu()  # whose gradient reads the first output
        return self.last(self.twice(x).relu())


class Repeated(Model):
    """The calls of two sites are repeated in the backward pass, where they have no number."""

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return self.twice(self.twice(self.first(x).sin()).relu()).relu()

        return self.last(checkpoint(block, x, use_reentrant=False))


def change(graph: fx.Graph) -> None:
    # As Inductor does; the first graph that it compiles is the forward pass.
    results = len(graph.output_node().args[0])
    is_forward = "tangents" not in str([node.target for node in graph.nodes])
    places = [0] if is_forward else range(results)
    graph.output_node().meta["user_visible_output_idxs"] = [*places]
    graph_passes.Passes(None)(graph, is_inference=False)


def run(
    is_late: bool, trains: bool = True, kind: type[Model] = Model
) -> tuple[list[Tensor], dict[str, Any], list[str]]:  # fmt: skip
    """Output and gradients, what was sampled, and the graphs."""
    torch.manual_seed(0)
    model, x = kind(), rows().requires_grad_()
    with Probe(model, every=1) as probe, config.patch({"triton.cudagraphs": is_late}):
        y, graphs = graphs_of(model, x, change=change, trains=trains)
        if trains:
            y.float().square().sum().backward()
        found = {}
        for name, site in probe.sites().items():
            parts = [part.kept() for part in (site.input, site.grad_output)]
            found[name] = site.sizes, site.cancellation, [x for part in parts for x in part]
    given = [x, *model.parameters()] if trains else []
    results = [y.detach(), *(p.grad for p in given)]
    return results, found, [graph.python_code("self").src for graph in graphs]  # type: ignore[misc]


def test_samples_and_results_are_the_same() -> None:
    results, found, _ = run(is_late=True)
    expected, sampled, _ = run(is_late=False)
    assert all(map(torch.equal, results, expected))
    assert found.keys() == sampled.keys() == {"first", "twice", "last"}
    assert found["twice"][0] == {48: 2}
    for name, (sizes, cancellation, taken) in found.items():
        assert (sizes, cancellation) == sampled[name][:2] and cancellation is not None
        assert all(len(x) for x in taken) and all(map(torch.equal, taken, sampled[name][2]))


def test_nothing_cuts_the_graphs() -> None:
    _, _, (forward, backward) = run(is_late=True)
    assert forward.count(ONE) == 1 and forward.count(ALL) == 1  # the copy that is returned
    assert backward.count(GRADIENT) == 0 and backward.count(GRADIENTS) == 1
    behind = forward.split(ALL)[1]
    assert "routed_gemm.default(" not in behind
    assert ".default(" not in backward.split(GRADIENTS)[1]


def test_taps_stay_where_no_cuda_graph_is_made_or_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, _, graphs = run(is_late=False)
    assert [text.count(ALL) + text.count(GRADIENTS) for text in graphs] == [0, 0]
    monkeypatch.setattr(late_taps, "MOST_BYTES", 2 * 48 * 64 * 2 + 1)  # of two outputs
    _, _, (forward, backward) = run(is_late=True)
    assert forward.count(ONE) == 2 and forward.count(ALL) == 1
    assert backward.count(GRADIENT) == 2 and backward.count(GRADIENTS) == 1


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 5, 100])
def test_repeated_calls_are_sampled_where_memory_is_short(
    outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_taps, "MOST_BYTES", outputs * 48 * 64 * 2 + 1)
    results, found, (_, backward) = run(is_late=True, kind=Repeated)
    expected, sampled, _ = run(is_late=False, kind=Repeated)
    assert all(map(torch.equal, results, expected))
    assert backward.count(GRADIENTS) == 1
    for name, (sizes, cancellation, taken) in found.items():
        assert (sizes, cancellation) == sampled[name][:2] and cancellation is not None
        assert len(taken[2]) and all(map(torch.equal, taken, sampled[name][2]))


def test_an_output_too_large_to_keep_does_not_hold_others_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = iter(
        [1, 2**31]
    )  # from the last output on: the second call of a site, which stays whole
    monkeypatch.setattr(late_taps, "_bytes_of", lambda x: next(sizes, 1))
    _, _, (forward, _) = run(is_late=True)
    assert forward.count(ONE) == 3 and forward.count(ALL) == 1


def test_calls_without_gradients_are_sampled() -> None:
    results, found, _ = run(is_late=True, trains=False)
    expected, sampled, _ = run(is_late=False, trains=False)
    assert torch.equal(results[0], expected[0])
    assert {name: x[0] for name, x in found.items()} == {"first": {48: 1}, "twice": {48: 2},
                                                         "last": {48: 1}}  # fmt: skip
    for name, (*_, taken) in found.items():
        assert all(map(torch.equal, taken[:2], sampled[name][2][:2]))


@pytest.mark.gpu
def test_samples_are_the_same_in_cuda_graphs() -> None:
    found = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Model("cuda"), rows(4096).cuda()
        call = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
        with Probe(model, every=1) as probe:
            for _ in range(6):
                torch.compiler.cudagraph_mark_step_begin()
                model.zero_grad()
                call(x).float().square().sum().backward()
                probe.step()
            sites = probe.sites()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append((gradients, {name: (s.sizes, s.input.kept(), s.grad_output.kept())
                                  for name, s in sites.items()}))  # fmt: skip
    (gradients, samples), (others, expected) = found
    assert all(map(torch.equal, gradients, others)) and samples.keys() == expected.keys()
    for name, (sizes, *parts) in samples.items():
        assert sizes == expected[name][0] and sizes
        for part, other in zip(parts, expected[name][1:], strict=True):
            assert len(part[0]) and all(map(torch.equal, part, other))
