"""Kernels with a norm at random sizes, values and epilogues.

A few seeds of each kernel that is no composition; LOKAKERN_FUZZ=1000 tries as many. A failure names
its seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lokakern.registry.register import KERNELS
from lokakern.types import Rejected
from tests.support.kernel_cases import drawn, kernel_here
from tests.support.norm_runs import CASES as EVERY
from tests.support.norm_runs import (
    LASTS,
    OUTPUTS,
    VECTORS,
    Run,
    epilogue_of,
)

SEEDS = tuple(range(int(os.environ.get("LOKAKERN_FUZZ", "12"))))
WIDTHS = (1, 7, 8, 24, 40, 64, 96, 100, 128, 192, 256, 320, 384, 512, 720, 768, 1024, 1536, 2048)
# Of rows and of weights: what a scale has to follow, and a common mean.
VALUES = ("normal", "spread", "mean", "sparse")


def cases() -> Iterator[Any]:
    for case in EVERY:
        name, where = case.values
        if not KERNELS[name].parts:
            yield pytest.param(name, where, id=f"{name}-{where}", marks=case.marks)


def values(rows: int, columns: int, kind: str, where: str, seed: int) -> torch.Tensor:
    x = drawn(rows, columns, where=where, seed=seed, dtype=torch.float32)
    if kind == "spread":
        x *= 10 ** (4 * drawn(rows, 1, where=where, seed=seed + 1, dtype=torch.float32).sigmoid())
    elif kind == "mean":
        x += 5
    elif kind == "sparse":
        x *= drawn(rows, columns, where=where, seed=seed + 1, dtype=torch.float32) > 1
    return x.bfloat16()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "where"), list(cases()))
def test_random_calls_are_correct(name: str, where: str, seed: int) -> None:
    kernel = kernel_here(name, where)
    rng = np.random.default_rng(seed)
    for _ in range(20 if where == "cuda" else 1):  # until it takes one
        n = int(rng.choice(WIDTHS))
        k = int(rng.choice(WIDTHS)) if rng.random() < 0.7 else int(rng.integers(1, 3000))
        m = int(rng.integers(1, 5000 if where == "cuda" else 200))
        blocks = [block for block in (8, 32, 64, 128, 256, 512) if n % block == 0]
        norms = ["layer", "rms", "none", *[f"block_rms({block})" for block in blocks]]
        norm, kind = str(rng.choice(norms)), str(rng.choice(VALUES))
        last = LASTS[int(rng.integers(len(LASTS)))]
        vectors = VECTORS[int(rng.integers(len(VECTORS)))]
        weight = None
        if kernel.op == "norm_quantize":
            k, vectors = n, tuple(word for word in vectors if word != "bias")
        else:
            weight = values(n, k, str(rng.choice(VALUES)), where, seed + 50)
        epilogue = epilogue_of(norm, last, vectors, bool(rng.random() < 0.5), m, n, where)
        x = values(m, k, kind, where, seed)
        found = Run(kernel, x, weight, epilogue, OUTPUTS[int(rng.integers(4))])
        if not isinstance(found.answer, Rejected):
            found.check()
            break
