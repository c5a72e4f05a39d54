"""Linear layers and activations, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn


def perceptron(
    sizes: Sequence[int],
    *,
    activation: type[nn.Module] = nn.ReLU,
    norm: bool = False,
    last: int | None = None,
) -> nn.Sequential:
    """``sizes[0]`` inputs, and layers of the others, each with an activation.

    Args:
        sizes: Inputs, then outputs of each layer.
        activation: After each of these layers.
        norm: Whether a LayerNorm comes before the activation.
        last: Outputs of one more linear layer with nothing after it.
    """
    layers: list[nn.Module] = []
    for k, n in itertools.pairwise(sizes):
        layers += [nn.Linear(k, n), nn.LayerNorm(n), activation()] if norm else [
            nn.Linear(k, n), activation()
        ]  # fmt: skip
    if last is not None:
        layers.append(nn.Linear(sizes[-1], last))
    return nn.Sequential(*layers)
