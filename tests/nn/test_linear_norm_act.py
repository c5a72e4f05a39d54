"""`LinearNormAct`: its results, checkpoints and routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lokakern.epilogue import ACTIVATIONS
from lokakern.errors import UnknownNameError
from lokakern.nn.activations import APPLY
from lokakern.nn.linear_norm_act import LinearNormAct
from tests.support.routed_layers import ROUTES, K, N, layer_of, rows

SEEDS = (0,)


@pytest.mark.parametrize("norm", ["layer", "rms", "block_rms(8)", "none"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS[1:], None])
def test_a_norm_and_an_activation_follow_the_product(norm: str, activation: str | None) -> None:
    layer = LinearNormAct(K, N, norm=norm, activation=activation, dtype=torch.bfloat16)
    x, residual = rows(), rows(k=N, seed=4)
    y = nn.functional.linear(x, layer.weight, layer.bias) + residual
    expected = layer.norm(y)
    if activation is not None:
        expected = APPLY[activation](expected)
    assert torch.equal(layer(x, residual=residual), expected)
    keys = {"layer": ["norm.weight", "norm.bias"], "rms": ["norm.weight"]}.get(norm, [])
    assert list(layer.state_dict()) == ["weight", "bias", *keys]
    plain = {"weight": layer.weight.detach(), "bias": layer.bias.detach()}
    assert not layer.load_state_dict(plain, strict=False).unexpected_keys


def test_a_layer_with_a_norm_has_routes() -> None:
    layer = LinearNormAct(K, N, norm="none", activation=None, dtype=torch.bfloat16)
    layer.take_routes(ROUTES, layer.weight)
    other = layer_of()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(rows()), other(rows()))
    with pytest.raises(UnknownNameError, match="activation is 'elu'; expected one of none, relu"):
        LinearNormAct(K, N, activation="elu")
    with pytest.raises(UnknownNameError, match="norm 'batch' is unknown"):
        LinearNormAct(K, N, norm="batch")


@pytest.mark.parametrize("norm", ["layer", "rms", "block_rms(8)", "none"])
@pytest.mark.parametrize("routes", [None, ROUTES], ids=["plain", "routed"])
def test_a_layer_trains_in_one_graph(norm: str, routes: tuple[str, str, str] | None) -> None:
    """Compiled gradients have the bits of eager ones; those of routes are near the exact ones."""
    torch._dynamo.reset()
    layer = LinearNormAct(K, N, norm=norm, activation="silu", dtype=torch.bfloat16)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    if routes is not None:
        layer.take_routes(routes, layer.weight)
    exact = LinearNormAct(K, N, norm=norm, activation="silu", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)

    def gradients(module: Any, m: int, dtype: torch.dtype, own: nn.Module) -> list[torch.Tensor]:
        x, residual = rows(m).to(dtype), rows(m, N, seed=4).to(dtype)
        leaves = [x.requires_grad_(), residual.requires_grad_(), *own.parameters()]
        y = module(x, residual=residual)
        return [y.detach(), *torch.autograd.grad(y, leaves, rows(m, N, seed=5).to(dtype))]

    # Row errors of bfloat16 steps, and of products of E4M3 operands.
    bound = 0.02 if routes is None else 0.08
    for m in (48, 32):
        ours = gradients(compiled, m, torch.bfloat16, layer)
        eager = gradients(layer, m, torch.bfloat16, layer)
        wanted = gradients(exact, m, torch.float64, exact)
        for one, other, right in zip(ours, eager, wanted, strict=True):
            assert torch.equal(one, other)
            assert (one.double() - right).norm() <= bound * right.norm()
