"""Operands of errors, drawn ahead of use by threads and forgotten after their last one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from lokakern.measure.operand_cache import operand_digest
from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight

# Distribution, rows, columns, seed, and whether it is a weight.
Draw = tuple[str, int, int, int, bool]
# Distribution, seed, k, m, n, and whether samples run along k.
Key = tuple[str, int, int, int, int, bool]


def draws_of(key: Key) -> Iterator[Draw]:
    """Rows of x ``[m, k]`` and of w ``[n, k]``; samples of both where these run along k."""
    distribution, seed, k, m, n, along_k = key
    yield (distribution, k, m, seed, False) if along_k else (distribution, m, k, seed, False)
    if n:
        yield (distribution, k, n, seed, True) if along_k else (distribution, n, k, seed, True)


class Drawer:
    """Draws operands ahead of use, each once, and forgets what no later group needs."""

    AHEAD = 12

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        keys: list[Key],
        alive: Callable[[], None],
    ) -> None:
        self.pool = pool
        self.keys = keys
        self.alive = alive
        self.last_use: dict[Draw, int] = {}
        for place, key in enumerate(keys):
            for draw in draws_of(key):
                self.last_use[draw] = place
        self.pending: dict[Draw, Future[tuple[Tensor, str]]] = {}

    def ahead(self, place: int) -> None:
        for key in self.keys[place : place + self.AHEAD]:
            for draw in draws_of(key):
                if draw not in self.pending:
                    self.pending[draw] = self.pool.submit(_draw, *draw)

    def get(self, draw: Draw) -> tuple[Tensor, str]:
        while True:
            self.alive()
            with contextlib.suppress(TimeoutError):
                return self.pending[draw].result(timeout=1.0)

    def forget(self, place: int) -> None:
        for draw in draws_of(self.keys[place]):
            if self.last_use[draw] <= place:
                self.pending.pop(draw, None)


def _draw(distribution: str, rows: int, k: int, seed: int, weight: bool) -> tuple[Tensor, str]:
    recipe = distribution_named(distribution)
    found = draw_weight(recipe, rows, k, seed) if weight else draw_rows(recipe, rows, k, seed)
    single = found.float()  # bfloat16 and float32 operands are both roundings of this
    return single, operand_digest(single)
