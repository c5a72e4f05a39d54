"""What operands are drawn from: few rows on the CPU, each draw made once, many at a time.

A draw has at most 2048 rows and fewer of long rows; whatever is larger repeats it (`operands`).
Draws are float64 and kept as float32, of which bfloat16 operands are the same roundings.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from lokakern.errors import MeasurementError, ShapeError
from lokakern.problems import sums_over_samples
from lokakern.torchrun import cores_of_rank
from lokakern.types import GROUP, Format, Problem
from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight
from lokakern.workloads.gemm_cases import Case

DRAWN_ROWS = 2048  # rows drawn in float64 on the CPU; larger m repeats them in fresh order
# 128 MiB of float64. 2048 x 8192 values take 0.2-0.6 s of one core, 256 x 123200 take 0.4-0.8 s.
DRAWN_ELEMENTS = 2**24
FEWEST_ROWS = 2 * GROUP  # of longer rows than DRAWN_ELEMENTS allows for: 241 MiB at k = 123200
MOST_COLUMNS = 2**20  # 2 GiB of float64 in the fewest rows
DRAWN_BYTES = 4 * 2**30  # of draws kept on the CPU
DEVICE_BYTES = 2 * 2**30  # of draws kept on the device: neighbors in a suite share theirs
MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw: rows of x, or a weight."""

    distribution: str
    rows: int
    columns: int
    seed: int
    weight: bool

    @property
    def byte_count(self) -> int:
        return self.rows * self.columns * 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What a problem's operands repeat: the first ``x_rows`` and ``w_rows`` of two draws."""

    x: Draw
    x_rows: int
    w: Draw | None
    w_rows: int


def most_rows(columns: int) -> int:
    """Most rows drawn of so many columns; a multiple of 128, so that blocks repeat whole.

    Raises:
        MeasurementError: Even the fewest rows would take more than 2 GiB.
    """
    if columns > MOST_COLUMNS:
        raise MeasurementError(
            f"operands of {columns} columns are not drawn; expected at most {MOST_COLUMNS}"
        )
    fitting = DRAWN_ELEMENTS // columns // GROUP * GROUP
    return min(DRAWN_ROWS, max(FEWEST_ROWS, fitting))


def plan_of(problem: Problem, distribution: str, seed: int) -> Plan:
    """The draws of a problem: x always as many rows as may be, so that every m shares it.

    Where samples run along k, both operands are drawn by sample: the gradient ``[rows, m]`` and
    the activations ``[rows, n]``, these as the weight of the distribution.

    Raises:
        ShapeError: m is 0.
        MeasurementError: Rows are too long to draw.
    """
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    if m == 0:
        raise ShapeError(f"{problem.op}: m is 0; expected at least 1 to measure")
    if sums_over_samples(problem):
        most = min(most_rows(m), most_rows(n))
        rows = min(most, batch * k)
        return Plan(
            Draw(distribution, most, m, seed, False), rows,
            Draw(distribution, most, n, seed, True), rows,
        )  # fmt: skip
    most = most_rows(k)
    x = Draw(distribution, most, k, seed, False)
    if problem.b is None:
        return Plan(x, min(most, batch * m), None, 0)
    w_rows = min(most, batch * n)
    return Plan(x, min(most, batch * m), Draw(distribution, w_rows, k, seed, True), w_rows)


def _make(draw: Draw) -> Tensor:
    recipe = distribution_named(draw.distribution)
    maker = draw_weight if draw.weight else draw_rows
    return maker(recipe, draw.rows, draw.columns, draw.seed).float()


class _Kept:
    """Tensors made once, by key; the least recently used go when the bytes pass a limit.

    Any number of threads may ask. What is being made counts already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: OrderedDict[Hashable, tuple[Future[Tensor], int]] = OrderedDict()
        self._bytes = 0

    def claim(self, key: Hashable, byte_count: int, limit: int) -> tuple[Future[Tensor], bool]:
        """The future of a key, and whether the caller has to fulfill it."""
        with self._lock:
            if key in self._futures:
                self._futures.move_to_end(key)
                return self._futures[key][0], False
            future: Future[Tensor] = Future()
            self._futures[key] = (future, byte_count)
            self._bytes += byte_count
            while self._bytes > limit and len(self._futures) > 1:
                _, (_, freed) = self._futures.popitem(last=False)
                self._bytes -= freed
            return future, True

    def fulfill(self, key: Hashable, future: Future[Tensor], make: Callable[[], Tensor]) -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            with self._lock:  # the next one who asks tries again
                if key in self._futures and self._futures[key][0] is future:
                    self._bytes -= self._futures.pop(key)[1]
            future.set_exception(error)

    def get(self, key: Hashable, byte_count: int, limit: int, make: Callable[[], Tensor]) -> Tensor:
        future, mine = self.claim(key, byte_count, limit)
        if mine:
            self.fulfill(key, future, make)
        return future.result()

    def clear(self) -> None:
        with self._lock:
            self._futures.clear()
            self._bytes = 0

    @property
    def byte_count(self) -> int:
        return self._bytes


_drawn = _Kept()
_on_device = _Kept()


def drawn(draw: Draw) -> Tensor:
    """A draw, float32 on the CPU, ``[rows, columns]``; shared, so never written to."""
    return _drawn.get(draw, draw.byte_count, DRAWN_BYTES, functools.partial(_make, draw))


def drawn_on(draw: Draw, rows: int, form: Format, device: torch.device) -> Tensor:
    """The first rows of a draw in an operand's format on a device; shared, so never written to."""
    whole = _on_device.get(
        (draw, form, device),
        draw.rows * draw.columns * form.dtype.itemsize,
        DEVICE_BYTES,
        lambda: drawn(draw).to(form.dtype).to(device),
    )
    return whole[:rows]


@functools.lru_cache(maxsize=4096)
def digest_of(draw: Draw, rows: int, form: Format) -> str:
    """Digest of the first rows of a draw in an operand's format; remembered, as hashing is slow."""
    return operand_digest(drawn(draw)[:rows].to(form.dtype))


def operand_digest(*operands: Tensor | None) -> str:
    """Sixteen hex digits that tell whether two measurements saw the same values."""
    digest = hashlib.sha256()
    for x in operands:
        if x is not None:
            # Flat first: of a matrix with one column torch leaves strides that are no use.
            digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    threads = min(MOST_THREADS, cores_of_rank())
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix="draw")


def _draws_of(case: Case, seed: int) -> list[Draw]:
    try:
        plan = plan_of(case.problem, case.distribution, seed)
    except (MeasurementError, ShapeError):
        return []  # `Operands` says so when the case's turn comes
    return [plan.x] if plan.w is None else [plan.x, plan.w]


def draw_ahead(cases: Iterable[Case], *, seed: int = 0) -> int:
    """Begin the draws of the next cases in a pool of threads; NumPy draws without the GIL.

    Returns at once. Stops before the draws of these cases would push each other out, so call it
    again with the rest when some are done; draws that are there already cost nothing.

    Returns:
        How many cases, from the first, have all their draws at hand or begun.
    """
    wanted: set[Draw] = set()
    byte_count = 0
    begun = 0
    for case in cases:
        new = [draw for draw in _draws_of(case, seed) if draw not in wanted]
        byte_count += sum(draw.byte_count for draw in new)
        if begun and byte_count > DRAWN_BYTES:
            break
        wanted.update(new)
        for draw in new:
            future, mine = _drawn.claim(draw, draw.byte_count, DRAWN_BYTES)
            if mine:
                _pool().submit(_drawn.fulfill, draw, future, functools.partial(_make, draw))
        begun += 1
    return begun


def finish_draws(
    cases: Sequence[Case], alive: Callable[[], None] = lambda: None, *, seed: int = 0
) -> int:
    """Make the draws of cases on all cores, as far as they fit; ``alive`` is called in between.

    For whoever times next: threads that draw meanwhile would hold up its launches.

    Returns:
        How many cases, from the first, have all their draws at hand.
    """
    begun = draw_ahead(cases, seed=seed)
    for case in cases[:begun]:
        for draw in _draws_of(case, seed):
            alive()
            with contextlib.suppress(Exception):  # `Operands` meets it again and says so
                drawn(draw)
    return begun


def in_turn(groups: Iterable[Sequence[Case]], *, seed: int = 0) -> Iterator[Sequence[Case]]:
    """Each group of cases when its draws are at hand; see `finish_draws`."""
    groups = list(groups)
    waiting = [case for group in groups for case in group]
    drawn = 0
    for group in groups:
        if drawn < len(group):
            drawn = finish_draws(waiting, seed=seed)
        drawn, waiting = drawn - len(group), waiting[len(group) :]
        yield group


def forget_draws() -> None:
    """Free every draw that is kept, on the CPU and on devices."""
    _drawn.clear()
    _on_device.clear()
    digest_of.cache_clear()
