"""Models of small integers, whose products are exact in every order of summation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def whole(*shape: int) -> Tensor:
    """Small integers: sums of their products are exact in float64, whatever their order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(1)).double()


def with_whole_weights(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-4, 5, p.shape, generator=generator))
    return model.double()


def passed(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item, union-attr]
