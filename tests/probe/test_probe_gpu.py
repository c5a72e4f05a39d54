"""Probe on a GPU: under Inductor, with CUDA graphs, and without synchronization."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lokakern.probe.hooks import SAMPLED_ROWS
from lokakern.probe.session import Probe

K, N, ROWS = 96, 64, SAMPLED_ROWS

pytestmark = pytest.mark.gpu


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.ReLU(), nn.Linear(N, 8)).cuda()


def inputs(step: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(step)
    return torch.randn(ROWS, K, device="cuda", generator=generator) + 1.0


@pytest.mark.parametrize("compiles", [False, True])
def test_sampled_steps_do_not_synchronize_and_have_exact_statistics(compiles: bool) -> None:
    torch.compiler.reset()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    call = torch.compile(model, fullgraph=True) if compiles else model

    def train(steps: range) -> None:
        for step in steps:
            call(batches[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    batches = [inputs(step) for step in range(7)]
    with Probe(model, every=2) as probe:
        train(range(3))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(range(3, 7))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    site = probe.sites()["0"]
    assert site.sizes == {ROWS: 4}
    exact_x = torch.cat(batches[::2])
    gradients = []
    for x in batches[::2]:
        first = model[0](x).detach().requires_grad_()
        gradients += torch.autograd.grad(model[1:](first).square().mean(), first)
    for operand, exact in ((site.input, exact_x), (site.grad_output, torch.cat(gradients))):
        true, kept = exact.double().square().mean(dim=1), operand.rows.double().square().mean(dim=1)
        apart = (kept[:, None] - true).abs().amin(dim=1)  # each kept row is one of them
        assert (apart <= 1e-3 * kept).all()
        assert operand.rows_seen == len(exact) and operand.nonfinite_rows == 0
        assert torch.allclose(operand.column_sizes, exact.abs().amax(dim=0), rtol=1e-4)
    assert torch.equal(site.input.keys, site.grad_output.keys)


def test_captured_cuda_graphs_are_not_sampled() -> None:
    model = model_of()
    x = inputs(0)
    with torch.no_grad(), Probe(model, every=1) as probe:
        for _ in range(3):
            model(x)
        seen = dict(probe.sites()["0"].sizes)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
        for _ in range(3):
            graph.replay()
        assert probe.sites()["0"].sizes == seen
        model(x)
    assert probe.sites()["0"].sizes[ROWS] > seen[ROWS]
