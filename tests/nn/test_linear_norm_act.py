"""`LinearNormAct`: its results, checkpoints and routes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lokakern.errors import UnknownNameError
from lokakern.nn.linear_norm_act import LinearNormAct
from tests.support.routed_layers import ROUTES, K, N, layer_of, rows

SEEDS = (0,)


@pytest.mark.parametrize("norm", ["layer", "rms", "block_rms(8)", "none"])
@pytest.mark.parametrize("activation", ["relu", "hardswish", "silu", None])
def test_a_norm_and_an_activation_follow_the_product(norm: str, activation: str | None) -> None:
    layer = LinearNormAct(K, N, norm=norm, activation=activation, dtype=torch.bfloat16)
    x, residual = rows(), rows(k=N, seed=4)
    y = nn.functional.linear(x, layer.weight, layer.bias) + residual
    expected = layer.norm(y)
    if activation is not None:
        expected = getattr(nn.functional, activation)(expected)
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
    with pytest.raises(UnknownNameError, match="activation is 'gelu'; expected one of none, relu"):
        LinearNormAct(K, N, activation="gelu")
    with pytest.raises(UnknownNameError, match="norm 'batch' is unknown"):
        LinearNormAct(K, N, norm="batch")
