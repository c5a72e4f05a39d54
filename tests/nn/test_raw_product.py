"""Raw products in modules: beside crosses, in graphs of torch.export, and after changes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lokakern.nn.adoption import Chosen, adopt, apply_choice, remove_choice
from lokakern.nn.crossed_forward import (
    crossed_of,
    graphs_of,
    remove_crosses,
    renew_products,
    set_crosses,
)
from lokakern.nn.linear import Linear
from lokakern.nn.raw_pattern import products_in
from lokakern.nn.raw_product import CHILD, RawProduct, products_of
from tests.nn.test_crossed_forward import A_CROSS, N, rows
from tests.support.routed_layers import ROUTE


class Mixed(nn.Module):
    """A cross, and products that read one another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Linear(N, N)
        self.w = nn.Parameter(torch.randn(N, N) * N**-0.5)
        self.v = nn.Parameter(torch.randn(N, N) * N**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.w
        return (x * self.a(x) + x) @ self.v @ self.w


def mixed(routes: tuple[str, str, str] = (ROUTE, ROUTE, "")) -> tuple[Any, list[RawProduct]]:
    torch.manual_seed(0)
    model = Mixed().bfloat16()
    graphs, _ = graphs_of(model)
    matrices = dict.fromkeys(x.matrix for graph in graphs for x in products_in(graph, model))
    products = [RawProduct(model, matrix, False) for matrix in matrices]
    assert [x.matrix.key for x in products] == ["w/t", "v/t"]
    for product in products:
        adopt(product)
        apply_choice(product, Chosen("raw", routes, False))
    renew_products(model)
    return model, products


def drop(model: Any, products: list[RawProduct]) -> None:
    for product in products:
        remove_choice(product, "raw")
    renew_products(model)


def calls_of_raw(model: nn.Module, x: Tensor) -> int:
    with torch.profiler.profile() as profile:
        model(x)
    return sum(event.name == "lokakern::routed_gemm" for event in profile.events())


def test_crosses_and_raw_products_share_a_forward(calls: list[Any]) -> None:
    for is_raw_first in (True, False):
        for is_raw_gone_first in (True, False):
            model, products = mixed()
            if not is_raw_first:
                drop(model, products)
                set_crosses(model, A_CROSS, "cross")
                for product in products:
                    adopt(product)
                    apply_choice(product, Chosen("raw", (ROUTE, ROUTE, ""), False))
                renew_products(model)
            else:
                set_crosses(model, A_CROSS, "cross")
            calls.clear()
            with torch.no_grad():
                assert calls_of_raw(model, rows()) == 3 and len(calls) == 1
                for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                    assert torch.equal(twin(rows()), model(rows()))
                calls.clear()
                if is_raw_gone_first:
                    drop(model, products)
                    assert calls_of_raw(model, rows()) == 0 and len(calls) == 1
                    remove_crosses(model, "cross")
                else:
                    remove_crosses(model, "cross")
                    assert calls_of_raw(model, rows()) == 3 and not calls
                    drop(model, products)
                assert torch.equal(model(rows()), Mixed.forward(model, rows()))
            assert "forward" not in vars(model) and CHILD not in model._modules
            assert not list(model.buffers())


def test_a_forward_without_routes_is_removed_unless_it_is_kept() -> None:
    model, products = mixed()
    for product in products:
        apply_choice(product, Chosen("raw", ("", "", ""), False))
    renew_products(model, is_kept=True)
    assert crossed_of(model) is not None
    renew_products(model)
    assert crossed_of(model) is None and len(products_of(model)) == 2


def test_a_forward_that_was_set_since_stays() -> None:
    model, products = mixed()
    inner, x = model.forward, rows()
    y = model(x)
    own = model.forward = lambda x: inner(x) * 2
    renew_products(model)
    assert torch.equal(model(x), y * 2) and vars(model)["forward"] is own
    drop(model, products)
    assert vars(model)["forward"] is own
    assert torch.equal(model(x), Mixed.forward(model, x) * 2)


def test_a_product_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = mixed()
    monkeypatch.setattr(Mixed, "forward", lambda self, x: self.a(x))
    del model._modules[CHILD]._modules["v/t"]  # a change of children, which is looked for
    with pytest.warns(UserWarning, match="Mixed has no product with w.t: its own forward runs"):
        renew_products(model)
    assert torch.equal(model(rows()), model.a(rows()))


def test_compiled_and_exported_modules() -> None:
    model, products = mixed()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        y = model(rows())
        assert torch.equal(compiled(rows()), y)
        exported = torch.export.export(model, (rows(),))
        assert torch.equal(exported.module()(rows()), y)
        targets = [str(node.target) for node in exported.graph.nodes]
        assert targets.count("lokakern.routed_gemm.default") == 3
        drop(model, products)
        plain = Mixed.forward(model, rows())
        assert torch.equal(compiled(rows()), plain) and not torch.equal(plain, y)


def test_transforms_run_the_original_calls() -> None:
    model, _ = mixed()
    x = rows()
    with torch.no_grad(), pytest.warns(UserWarning, match="unquantized"):
        found = torch.func.vmap(model)(x)
    assert torch.allclose(found, Mixed.forward(model, x), rtol=0.05, atol=0.05)
