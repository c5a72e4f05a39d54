"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern.nn import chain_call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Arguments of the chains that modules run."""
    made: list[tuple[Any, ...]] = []
    real = chain_call.run_chain

    def spy(x: Tensor, operands: list[Tensor | None], plan: str) -> Tensor:
        made.append((x, operands, plan))
        return real(x, operands, plan)

    monkeypatch.setattr(chain_call, "run_chain", spy)
    with torch.no_grad():
        yield made
