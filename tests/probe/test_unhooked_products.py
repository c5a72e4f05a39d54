"""Products outside of sites: their parameter, number and share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lokakern import Probe
from lokakern.mods import FuseShared, apply
from lokakern.probe.unhooked_products import BETWEEN, products_elsewhere

SEEDS = (0,)
M, D = 12, 8


class Mixed(nn.Module):
    """Products of every kind; a forward that says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(D, D), kind
        self.own = nn.Parameter(torch.randn(2, D, D))
        self.table = nn.Embedding(5, D)
        self.filters = nn.Conv1d(D, 3, 2)

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        parts = h.view(3, 4, D)
        y = {
            "matmul": lambda: torch.matmul(self.own[1].t(), h.unsqueeze(2)),
            "einsum": lambda: torch.einsum("bi,oi->bo", h, self.own[0].bfloat16().float()),
            "stacked": lambda: h @ torch.stack([self.own[0, 0], self.own[1, 2]]).t(),
            "vector": lambda: h @ self.own[0, 0],
            "tied": lambda: functional.linear(parts, self.table.weight),
            "convolution": lambda: self.filters(parts.transpose(1, 2)),
            "attention": lambda: functional.scaled_dot_product_attention(*[parts[:, None]] * 3),
            "by hand": lambda: torch.softmax(parts @ parts.transpose(1, 2), -1) @ parts,
            "nothing": lambda: h * self.own[0, 0],
        }[self.kind]()
        return {"y": [y], "count": 3}


# Name, products and multiply-adds.
EXPECTED: dict[str, tuple[str, int, int]] = {
    "matmul": ("own", 1, M * D * D),
    "einsum": ("own", 1, M * D * D),
    "stacked": ("own", 1, M * 2 * D),
    "vector": ("own", 1, M * D),
    "tied": ("table.weight", 1, M * 5 * D),
    "convolution": ("filters.weight", 1, 3 * 3 * 3 * D * 2),
    "attention": (BETWEEN, 1, 2 * 3 * 4 * 4 * D),
    "by hand": (BETWEEN, 2, 2 * 3 * 4 * 4 * D),
}


@pytest.mark.parametrize("kind", [*EXPECTED, "nothing"])
@pytest.mark.parametrize("autocast", [False, True])
def test_products_outside_of_sites_are_named_with_their_share(kind: str, autocast: bool) -> None:
    model = Mixed(kind)
    with Probe(model) as probe, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(torch.randn(M, D))
    if kind == "nothing":
        assert probe.unseen() == {}
        return
    name, count, work = EXPECTED[kind]
    ((found, words),) = probe.unseen().items()
    assert found == name
    assert words.startswith(f"{count} product{'s' * (count > 1)} ")
    assert f" {work / (work + M * D * D):.1%} of all multiply-adds" in words


def test_nothing_is_reported_without_a_graph() -> None:
    model = Mixed("matmul")
    with Probe(model, every=1) as probe:
        with torch.no_grad():
            model(torch.randn(M, D))
        assert probe.unseen() == {}
        torch.compile(model, backend="eager")(torch.randn(M, D))
        assert probe.unseen() == {}
        model(torch.randn(M, D))
        assert list(probe.unseen()) == ["own"]


class Framework(nn.Module):
    """A model like FuxiCTR's, whose training step calls a method and no module's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mixed("matmul")
        self.head = nn.Parameter(torch.randn(D, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.layer(x) @ self.inner.own[0]

    def loss(self, x: Tensor) -> Tensor:
        return (self.forward(x) @ self.head).square().mean()


def test_calls_of_methods_are_steps_until_an_optimizer_is_one() -> None:
    model, x = Framework(), torch.randn(M, D)
    with Probe(model, every=2) as probe:
        for _ in range(5):
            checkpoint(model.loss, x, use_reentrant=False).backward()
        (site,) = probe.sites().values()
        assert site.sizes == {M: 3}
        model(x)  # the sixth: from now on calls of the model are steps, and those of methods none
        assert site.sizes == {M: 3} and len(model.inner.layer._forward_pre_hooks) == 0
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        for _ in range(3):
            model.forward(x)
        assert site.sizes == {M: 6}
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_ignored(layout: torch.layout) -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.own = nn.Linear(D, D), nn.Parameter(torch.randn(2, D, D))

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(torch.nested.nested_tensor([x[:5], x[5:]], layout=layout))
            if layout is torch.strided:
                h = torch.bmm(h, torch.nested.as_nested_tensor(self.own))
            return h  # type: ignore[no-any-return]

    with Probe(Ragged()) as probe:
        probe.model(torch.randn(M, D))
    assert list(probe.unseen()) == ["layer"]
    assert "no plain tensor" in probe.unseen()["layer"]


def test_reports_list_unseen_products() -> None:
    model = nn.Sequential(Mixed("matmul"))
    with Probe(model, filter=lambda _, name: name == "0.layer") as probe:
        model(torch.randn(M, D))
    with pytest.warns(UserWarning, match="no verdict on what was not seen: 0.own: 1 product with"):
        report = probe.report(seeds=(0,))
    assert list(report.unseen) == ["0.own"]
    assert report.content()["unseen"] == report.unseen


def test_layers_that_a_filter_leaves_out_are_named_as_such() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D, bias=False))
    with Probe(model, filter=lambda _, name: name == "0") as probe:
        model(torch.randn(M, D))
    words = "1 product of this layer, 50.0% of all multiply-adds of a forward pass"
    assert probe.unseen() == {"2": f"{words}, left out by filter="}


def test_fused_layers_are_not_reported_as_products() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.b(x)], -1)

    model = Pair()
    apply(model, [FuseShared()])
    with Probe(model) as probe:
        model(torch.randn(M, D))
    assert set(probe.unseen()) == {"a", "b"}  # which are no longer called


def test_frozen_weights_are_not_activations() -> None:
    """Autograd keeps nothing of it to tell whose it was: it has no name, and no wrong one."""
    model = Mixed("nothing")
    model.layer.weight.requires_grad_(False)
    x = torch.randn(M, D, requires_grad=True)
    assert products_elsewhere(model(2 * x), {id(model.own): "own"}, set()) == {}


def test_share_is_unknown_with_foreign_parameters() -> None:
    """Gathered parameters of FSDP2 belong to no module when the graph is read."""
    model = Mixed("attention")
    x = torch.randn(M, D)
    (words,) = products_elsewhere(model(x), {}, set()).values()
    assert "%" not in words
    (words,) = products_elsewhere(model(x), {}, {id(model.layer.weight)}).values()
    assert "%" in words
