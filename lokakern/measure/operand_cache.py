"""Operand matrices sampled on the CPU, each once and in parallel, and cached on CPU and device.

At most 2048 rows are sampled, fewer of long rows; larger operands repeat them (`operands`). Values
are sampled in float64 and kept in float32, which rounds to the same bfloat16 values.
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

SAMPLED_ROWS = 2048  # rows sampled in float64 on the CPU; larger m repeats them in a new order
# 128 MiB of float64. 2048 x 8192 values take 0.2-0.6 s of one core, 256 x 123200 take 0.4-0.8 s.
SAMPLED_ELEMENTS = 2**24
FEWEST_ROWS = 2 * GROUP  # also where SAMPLED_ELEMENTS allows fewer: 241 MiB at k = 123200
LONG_COLUMNS = 2**20  # 2 GiB of float64 in FEWEST_ROWS; of more columns GROUP rows are sampled
MOST_COLUMNS = 2 * LONG_COLUMNS
CPU_BYTES = 4 * 2**30  # capacity of the cache on the CPU
DEVICE_BYTES = 2 * 2**30  # capacity of the cache on the device: neighbors in a suite share operands
MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class OperandKey:
    """Identity of a sampled matrix: rows of x, or a weight."""

    distribution: str
    rows: int
    columns: int
    seed: int
    weight: bool

    @property
    def byte_count(self) -> int:
        return self.rows * self.columns * 4


@dataclass(frozen=True, slots=True)
class OperandPlan:
    """The operands of a problem: the first ``x_rows`` and ``w_rows`` of two sampled matrices."""

    x: OperandKey
    x_rows: int
    w: OperandKey | None
    w_rows: int


def most_rows(columns: int) -> int:
    """Most rows sampled of so many columns; a multiple of 128, so that scale blocks repeat whole.

    Raises:
        MeasurementError: Even the fewest rows would take more than 2 GiB.
    """
    if columns > MOST_COLUMNS:
        raise MeasurementError(
            f"operands of {columns} columns are not sampled; expected at most {MOST_COLUMNS}"
        )
    fitting = SAMPLED_ELEMENTS // columns // GROUP * GROUP
    fewest = FEWEST_ROWS if columns <= LONG_COLUMNS else GROUP
    return min(SAMPLED_ROWS, max(fewest, fitting))


def operand_plan(problem: Problem, distribution: str, seed: int) -> OperandPlan:
    """The operands of a problem; x has as many rows as possible, so that every m shares it.

    Where a GEMM sums over samples, both operands are sampled with samples as rows: the gradient
    ``[rows, m]``, and the activations ``[rows, n]`` as the weight of the distribution.

    Raises:
        ShapeError: m is 0.
        MeasurementError: Rows are too long to sample.
    """
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    if m == 0:
        raise ShapeError(f"{problem.op}: m is 0; expected at least 1 to measure")
    if sums_over_samples(problem):
        most = min(most_rows(m), most_rows(n))
        rows = min(most, batch * k)
        return OperandPlan(
            OperandKey(distribution, most, m, seed, False), rows,
            OperandKey(distribution, most, n, seed, True), rows,
        )  # fmt: skip
    most = most_rows(k)
    x = OperandKey(distribution, most, k, seed, False)
    if problem.b is None:
        return OperandPlan(x, min(most, batch * m), None, 0)
    w_rows = min(most, batch * n)
    w = OperandKey(distribution, w_rows, k, seed, True)
    return OperandPlan(x, min(most, batch * m), w, w_rows)


def _sample(key: OperandKey) -> Tensor:
    sample = draw_weight if key.weight else draw_rows
    return sample(distribution_named(key.distribution), key.rows, key.columns, key.seed).float()


class _TensorCache:
    """A thread-safe LRU cache of tensors with a limit on bytes; pending tensors count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: OrderedDict[Hashable, tuple[Future[Tensor], int]] = OrderedDict()
        self.byte_count = 0

    def claim(self, key: Hashable, byte_count: int, limit: int) -> tuple[Future[Tensor], bool]:
        """The future of a key, and whether the caller has to fulfill it."""
        with self._lock:
            if key in self._futures:
                self._futures.move_to_end(key)
                return self._futures[key][0], False
            future: Future[Tensor] = Future()
            self._futures[key] = (future, byte_count)
            self.byte_count += byte_count
            while self.byte_count > limit and len(self._futures) > 1:
                _, (_, freed) = self._futures.popitem(last=False)
                self.byte_count -= freed
            return future, True

    def fulfill(self, key: Hashable, future: Future[Tensor], make: Callable[[], Tensor]) -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            with self._lock:  # the next request tries again
                if key in self._futures and self._futures[key][0] is future:
                    self.byte_count -= self._futures.pop(key)[1]
            future.set_exception(error)

    def get(self, key: Hashable, byte_count: int, limit: int, make: Callable[[], Tensor]) -> Tensor:
        future, is_new = self.claim(key, byte_count, limit)
        if is_new:
            self.fulfill(key, future, make)
        return future.result()

    def clear(self) -> None:
        with self._lock:
            self._futures.clear()
            self.byte_count = 0


_on_cpu = _TensorCache()
_on_device = _TensorCache()


def cpu_operand(key: OperandKey) -> Tensor:
    """The sampled matrix, float32 on the CPU; shared, so callers must not write to it."""
    return _on_cpu.get(key, key.byte_count, CPU_BYTES, functools.partial(_sample, key))


def device_operand(key: OperandKey, rows: int, form: Format, device: torch.device) -> Tensor:
    """The first rows of a sampled matrix in a format on a device; shared, as `cpu_operand`."""
    whole = _on_device.get(
        (key, form, device),
        key.rows * key.columns * form.dtype.itemsize,
        DEVICE_BYTES,
        lambda: cpu_operand(key).to(form.dtype).to(device),
    )
    return whole[:rows]


@functools.lru_cache(maxsize=4096)
def cached_digest(key: OperandKey, rows: int, form: Format) -> str:
    """`operand_digest` of the first rows of a sampled matrix in a format."""
    return operand_digest(cpu_operand(key)[:rows].to(form.dtype))


def operand_digest(*operands: Tensor | None) -> str:
    """Sixteen hex digits that differ where two measurements had different operands."""
    digest = hashlib.sha256()
    for x in operands:
        if x is not None:
            # Flat first: torch keeps arbitrary strides of a matrix with one column.
            digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    threads = min(MOST_THREADS, cores_of_rank())
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix="operands")


def _keys_of(case: Case, seed: int) -> list[OperandKey]:
    try:
        plan = operand_plan(case.problem, case.distribution, seed)
    except (MeasurementError, ShapeError):
        return []  # `Operands` raises the same when the case is measured
    return [plan.x] if plan.w is None else [plan.x, plan.w]


def prefetch_and_wait(
    cases: Iterable[Case], alive: Callable[[], None] = lambda: None, *, seed: int = 0
) -> int:
    """Sample the operands of the next cases in a thread pool; NumPy releases the GIL.

    Waits, because threads that sample during a timing would delay its launches. Stops before the
    cache is full; call it again with the remaining cases later.

    Returns:
        Number of leading cases whose operands are cached; ``alive`` is called for each operand.
    """
    pending: dict[OperandKey, Future[Tensor]] = {}
    byte_count = 0
    started = 0
    for case in cases:
        new = [key for key in _keys_of(case, seed) if key not in pending]
        byte_count += sum(key.byte_count for key in new)
        if started and byte_count > CPU_BYTES:
            break
        for key in new:
            pending[key], is_new = _on_cpu.claim(key, key.byte_count, CPU_BYTES)
            if is_new:
                sample = functools.partial(_sample, key)
                _pool().submit(_on_cpu.fulfill, key, pending[key], sample)
        started += 1
    for future in pending.values():
        alive()
        with contextlib.suppress(Exception):  # `Operands` raises it again
            future.result()
    return started


def prefetched_groups(
    groups: Iterable[Sequence[Case]], *, seed: int = 0
) -> Iterator[Sequence[Case]]:
    """Each group of cases once its operands are cached; see `prefetch_and_wait`."""
    groups = list(groups)
    waiting = [case for group in groups for case in group]
    cached = 0
    for group in groups:
        if cached < len(group):
            cached = prefetch_and_wait(waiting, seed=seed)
        cached, waiting = cached - len(group), waiting[len(group) :]
        yield group


def clear_operand_cache() -> None:
    """Free all cached operands, on the CPU and on devices."""
    _on_cpu.clear()
    _on_device.clear()
    cached_digest.cache_clear()


class Prefetcher:
    """Samples the operands of groups ahead of use, each once, and frees them after the last use.

    Args:
        pool: Threads that sample.
        groups: Operands of each group, in order of use.
        alive: Called once a second while `get` waits.
    """

    AHEAD = 12

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        groups: Sequence[Sequence[OperandKey]],
        alive: Callable[[], None],
    ) -> None:
        self.pool, self.groups, self.alive = pool, groups, alive
        self.last_use = {key: place for place, group in enumerate(groups) for key in group}
        self.pending: dict[OperandKey, Future[tuple[Tensor, str]]] = {}

    def start(self, place: int) -> None:
        """Sample the next groups from this one on."""
        for group in self.groups[place : place + self.AHEAD]:
            for key in group:
                if key not in self.pending:
                    self.pending[key] = self.pool.submit(_sample_and_digest, key)

    def get(self, key: OperandKey) -> tuple[Tensor, str]:
        """The operand in float32, and its digest."""
        while True:
            self.alive()
            with contextlib.suppress(TimeoutError):
                return self.pending[key].result(timeout=1.0)

    def free(self, place: int) -> None:
        """Free the operands of a group that no later group uses."""
        for key in self.groups[place]:
            if self.last_use[key] <= place:
                self.pending.pop(key, None)


def _sample_and_digest(key: OperandKey) -> tuple[Tensor, str]:
    x = _sample(key)  # bfloat16 and float32 operands are both roundings of this
    return x, operand_digest(x)
