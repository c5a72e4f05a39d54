"""Fixtures of several files."""

from __future__ import annotations

import pytest
import torch

from lokakern.selection.weight_forms import with_weight
from tests.support.chain_rows import NARROW, ROW, WIDE, both
from tests.support.measurements import BF16, H200, Book, accuracy, gemm, time
from tests.support.measurements import ROW as ROUTED


@pytest.fixture
def chain_book(book: Book) -> Book:
    """Times and errors with bfloat16 by which a chain of two layers gains."""
    return book.write(*both({512: 20.0, 2048: 60.0}, {512: 10.0, 2048: 30.0}))


@pytest.fixture
def tuning_book(book: Book) -> Book:
    """Chains are faster than routes, which are faster than bf16."""
    found = both({512: 20.0, 2048: 60.0}, {512: 5.0, 2048: 15.0})
    for place, layer in enumerate((WIDE, NARROW)):
        for m in (512, 2048):
            problem = with_weight(gemm(m, layer.n, layer.k), ROW, H200)
            found += [time(BF16, problem, 19.0), time(ROUTED, problem, 16.0 + place)]
        found.append(accuracy(ROUTED, problem, 0.04))
    return book.write(*found)


@pytest.fixture
def fresh_dynamo() -> None:
    """No compiled code of other tests, which counts towards dynamo's limit."""
    torch._dynamo.reset()
