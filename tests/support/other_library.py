"""An array library on the CPU that knows DLPack and nothing else of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Array:
    """An array; `exports` counts how often its memory was asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.exports = 0

    @property
    def dtype(self) -> str:
        return str(self._tensor.dtype).removeprefix("torch.")

    def __dlpack__(self, **options: Any) -> Any:
        self.exports += 1
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __array_namespace__(self) -> type[Array]:
        return Array

    @staticmethod
    def from_dlpack(other: Any) -> Array:
        return Array(torch.from_dlpack(other))


def tensor_of(x: Array) -> Tensor:
    return x._tensor
