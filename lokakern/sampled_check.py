"""The sampled check: in some calls a few rows of an FP8 product are also computed in float32.

Dispatch compares budgets with errors that were measured on named distributions. The check measures
the error on the actual operands of a program, on their device: the host does not wait, and a later
call of the same product reads the result. If the error of the sampled rows exceeds the budget, that
call issues an `ErrorBudgetWarning`.

A check is text, ``every:rows``: in every ``every``-th call of a product at most ``rows`` evenly
spaced rows are compared, different ones each time. For a module it is the last part of the route
(`lokakern.nn.routed_matmul`), with the site's name and budget, so that compiled graphs include it::

    row;16:0=...;1:0=...;check=1000:64:0.06:1:layers.0/output
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lokakern import jit
from lokakern.errors import BudgetError, FormatError
from lokakern.types import ErrorBudget

VARIABLE = "LOKAKERN_CHECK"
_MARK = ";check="
_CHUNK = 2**24  # elements of an operand in float32 at a time: 64 MiB
_OF_GEMM = 0  # owner of the checks of `lokakern.gemm`; conversions have 1, 2, ...
_OWNERS = itertools.count(_OF_GEMM + 1)


class ErrorBudgetWarning(UserWarning):
    """The error of sampled rows of an FP8 product exceeds its budget."""


class _Pending(NamedTuple):
    """A result that the device may still compute."""

    value: Tensor  # on the host: the mean over rows of min(e, 1) squared
    event: Any  # torch.cuda.Event after the copy; None on a CPU
    rows: int
    shape: tuple[int, int, int]
    kernel: str


class Watch:
    """The check of one product, and its results.

    Args:
        every: Calls from one checked call to the next; the first call is checked.
        rows: Most rows of a checked call.
        limit: The budget, a row error.
        owner: Number of the conversion; 0 for `lokakern.gemm`.
        site: Name of the product in warnings.
    """

    def __init__(self, every: int, rows: int, limit: float, owner: int, site: str) -> None:
        self.every, self.rows, self.limit, self.owner, self.site = every, rows, limit, owner, site
        self.calls = self.checks = 0
        self.worst = self.last = math.nan
        self._worst_of = ("", 0)  # kernel and rows of the worst check
        self._wake = self._due = 1  # the next calls with any work, and with a check
        self._warned = limit  # warn of larger errors
        self._reasons: set[str] = set()
        self._pending: deque[_Pending] = deque()

    def see(self, a: Tensor | None, b: Tensor | None, out: Tensor, bias: Tensor | None,
            kernel: str) -> None:  # fmt: skip
        """Count a call, and check it if it is due.

        Args:
            a: ``[m, k]``, unquantized; None: not available.
            b: ``[k, n]``, unquantized; None: not available.
            out: ``[m, n]``, output of the FP8 kernel.
            bias: ``[n]``, or None.
            kernel: Name of the kernel.
        """
        if jit.recorder is not None:
            jit.recorder.refuse("counts calls")
        self.calls += 1
        if self.calls >= self._wake:
            self._look(a, b, out, bias, kernel)

    @property
    def is_due(self) -> bool:
        """Whether the next call will be checked."""
        return self.calls + 1 >= self._due

    def read(self, wait: bool = False) -> None:
        """Read the available results; with ``wait`` all, after the device computed them."""
        while self._pending:
            try:
                found = self._pending.popleft()  # atomic: threads of replicas share a watch
            except IndexError:
                return
            if found.event is not None:
                if wait:
                    found.event.synchronize()
                elif not found.event.query():
                    self._pending.appendleft(found)
                    return
            self._judge(found)

    def _look(self, a: Tensor | None, b: Tensor | None, out: Tensor, bias: Tensor | None,
              kernel: str) -> None:  # fmt: skip
        if out.is_cuda and torch.cuda.is_current_stream_capturing():
            self._warn_unchecked("the replays of a captured CUDA graph, in which no Python runs")
            return  # events must not be queried during capture
        self.read()
        if self.calls >= self._due:
            if a is None:
                self._warn_unchecked(
                    "a call whose input is quantized before it reaches the product"
                )
            elif b is None:
                self._warn_unchecked("a call whose unquantized weight is not kept")
            else:
                self._due = self.calls + self.every
                self._sample(a, b, out, bias, kernel)
        self._wake = self.calls + 1 if self._pending else self._due

    @torch.no_grad()
    def _sample(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, kernel: str) -> None:
        m, k = a.shape
        step = -(-m // self.rows)
        start = (self.checks + len(self._pending)) % step
        with torch.autocast(out.device.type, enabled=False):
            found = errors_of_rows(a[start::step], b, out[start::step], bias)
        value, event = found.square().mean(), None
        if out.is_cuda:
            value = value.to("cpu", non_blocking=True)  # into pinned memory
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(out.device))
        self._pending.append(_Pending(value, event, len(found), (m, b.shape[1], k), kernel))
        if event is None:
            self.read()

    def _judge(self, found: _Pending) -> None:
        self.last = math.sqrt(found.value.item())
        self.checks += 1
        if not self.last <= self.worst:  # also the first one
            self.worst, self._worst_of = self.last, (found.kernel, found.rows)
        if self.last > self._warned:
            self._warned = 2.0 * self.last  # warn again after it doubles
            m, n, k = found.shape
            warnings.warn(
                f"{self.site}: row error {self.last:.3g} of {found.rows} sampled rows, budget "
                f"{self.limit:g} ({found.kernel}, m={m} n={n} k={k}). The operands differ from "
                f"the distributions that the kernel was measured on: {self._remedy}",
                ErrorBudgetWarning, stacklevel=2,
            )  # fmt: skip

    @property
    def _remedy(self) -> str:
        if self.owner == _OF_GEMM:
            return "pass budget=None, or let lokakern.Probe judge the layer on its own inputs"
        return "leave the layer out (skip=), or convert by a report of lokakern.Probe"

    def _warn_unchecked(self, what: str) -> None:
        if what not in self._reasons:
            self._reasons.add(what)
            warnings.warn(f"{self.site}: not checked ({VARIABLE}, check=): {what}", stacklevel=2)

    def row(self) -> dict[str, Any]:
        """Plain data, see `results`."""
        kernel, rows = self._worst_of
        return {
            "site": self.site, "calls": self.calls, "checks": self.checks, "row_err": self.worst,
            "last": self.last, "budget": self.limit, "kernel": kernel, "rows": rows,
        }  # fmt: skip


def errors_of_rows(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """``min(e, 1)`` of rows of a product, e the relative L2 error as in `numerics.row_errors`.

    The reference is ``a @ b + bias`` of unquantized operands, summed in float32: products of
    bfloat16 values are exact, and the error of sums is about 1e-7 of the sum of magnitudes, which
    is 1e-4 of a row whose terms cancel to a thousandth. (If TF32 is allowed, float32 operands are
    rounded to 11 bits: 3e-4 of a row.) The error includes the rounding of ``out`` to bfloat16,
    0.0017. In float16, elements that overflow in both have none: a loss scale may be too large.

    This takes 25 launches, 27 in float16; `numerics.row_errors`, for any float64, takes 60.

    Args:
        a: ``[rows, k]``, bfloat16, float16 or float32.
        b: ``[k, n]``, alike.
        out: ``[rows, n]``, alike.
        bias: ``[n]``, or None.

    Returns:
        ``[rows]``, float64.
    """
    exact = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    if bias is not None:
        exact += bias
    step = max(_CHUNK // max(len(a), b.shape[1]), 1)
    for start in range(0, len(b), step):  # the gradient of a weight sums over all samples
        part = slice(start, start + step)
        exact.addmm_(a[:, part].float(), b[part].float())
    unknown = torch.isfinite(exact).logical_not_()
    value = out.double()
    if out.dtype is torch.float16:  # beyond whose range torch's product is infinite, too
        most = torch.finfo(torch.float16).max
        exact, value = exact.clamp_(-most, most), value.clamp_(-most, most)
    reference = exact.double()  # squares of float32 values do not overflow or underflow
    size = (value - reference).masked_fill_(unknown, 0.0).norm(dim=1)
    norm = reference.masked_fill_(unknown, 0.0).norm(dim=1)
    error: Tensor = (size / norm).masked_fill_(size == 0.0, 0.0)
    return error.nan_to_num_(nan=1.0, posinf=1.0).clamp_max_(1.0)


# ---- which products are checked, and how often ----


def read_check(check: str | None) -> tuple[int, int] | None:
    """``every`` and ``rows`` of a check, or of the variable LOKAKERN_CHECK for None.

    Returns:
        None without a check: no variable, or "off".

    Raises:
        FormatError: ``check`` is neither text nor None.
        BudgetError: The text is not ``every:rows``.
    """
    name, text = "check", check
    if text is None:
        name, text = VARIABLE, os.environ.get(VARIABLE) or "off"
    if not isinstance(text, str):
        raise FormatError(
            f"check is a {type(text).__name__}; expected text, 'every:rows' such as '1000:64'"
        )
    if text == "off":
        return None
    parts = text.split(":")
    if len(parts) != 2 or not all(x.isascii() and x.isdigit() and int(x) for x in parts):
        raise BudgetError(
            f"{name} is {text!r}; expected 'every:rows', two integers of at least 1 such as "
            "'1000:64' (of every 1000th call 64 rows), or 'off'"
        )
    return int(parts[0]), int(parts[1])


class Marker:
    """Adds the check of a conversion to its routes; ``check`` is that of `read_check`."""

    def __init__(self, check: str | None) -> None:
        self._check = read_check(check)
        self._owner = next(_OWNERS)

    @property
    def is_on(self) -> bool:
        """Whether products are checked."""
        return self._check is not None

    def mark(self, route: str, budget: ErrorBudget | None, site: str) -> str:
        """The route with the check of its site, if there is one and the route quantizes.

        Without a budget, as of forced kernels, errors are measured and cause no warning.
        """
        if not route or self._check is None:
            return route
        text = _text(self._check, budget, self._owner, site)
        return route + _MARK + text if text else route


def watch_of_gemm(check: str | None, budget: ErrorBudget, site: str) -> Watch | None:
    """The check of calls of `lokakern.gemm` with operands of one kind, if any."""
    found = read_check(check)
    text = "" if found is None else _text(found, budget, _OF_GEMM, site)
    return watch_named(text) if text else None


def watch_of_site(check: str | None, limit: float, site: str) -> Watch | None:
    """The check of the outputs of a site of Probe, if any."""
    found = read_check(check)
    return None if found is None else Watch(*found, limit, next(_OWNERS), site)


def _text(check: tuple[int, int], budget: ErrorBudget | None, owner: int, site: str) -> str:
    limit = math.inf if budget is None else budget.row_err
    if limit is None:
        warnings.warn(
            f"{site}: not checked ({VARIABLE}, check=): the check measures row errors, and the "
            f"budget limits {budget}; add row_err=", stacklevel=3,
        )  # fmt: skip
        return ""
    return f"{check[0]}:{check[1]}:{limit!r}:{owner}:{site}"


_WATCHES: dict[str, Watch] = {}


def watch_named(text: str) -> Watch:
    """The watch of a text; one in each process."""
    found = _WATCHES.get(text)
    if found is None:
        every, rows, limit, owner, site = text.split(":", 4)
        found = _WATCHES[text] = Watch(int(every), int(rows), float(limit), int(owner), site)
    return found


def is_checked(route: str) -> bool:
    """Whether a route has a check."""
    return _MARK in route


def check_of(route: str) -> str:
    """The check of a route, as text; "" where it has none."""
    return route.partition(_MARK)[2]


def unchecked(route: str) -> str:
    """A route without its check."""
    return route.partition(_MARK)[0]


def is_due(route: str) -> bool:
    """Whether the next call of a route is to be checked."""
    return is_checked(route) and watch_named(check_of(route)).is_due


def results(routes: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Results as plain data: a row for each checked product, the worst first.

    A row has the number of ``calls`` in FP8 and of ``checks``, the largest (``row_err``) and the
    ``last`` row error, the ``budget`` (inf for forced kernels), and the ``kernel`` and number of
    ``rows`` of the largest error. Waits for results that the device still computes.

    Args:
        routes: Routes of the products; None: all products of this process, including calls of
            `lokakern.gemm`.
    """
    if routes is None:
        wanted = list(_WATCHES.values())
    else:
        wanted = [_WATCHES[t] for t in map(check_of, routes) if t in _WATCHES]
    return rows_of(wanted)


def rows_of(watches: Iterable[Watch]) -> list[dict[str, Any]]:
    """Results of some checks, see `results`."""
    rows = []
    for watch in watches:
        watch.read(wait=True)
        rows.append(watch.row())
    return sorted(rows, key=lambda row: -row["row_err"] if row["checks"] else 1.0)
