"""The result of `dispatch` at one m."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lokakern.device import current_device
from lokakern.errors import UnsupportedError
from lokakern.registry import libraries
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.selection.candidates import ERRORS_ELSEWHERE
from lokakern.selection.remedies import miss_words
from lokakern.selection.table import Pick, Table, Undecided
from lokakern.types import REALISTIC_DISTRIBUTIONS, Problem, Rejected

if TYPE_CHECKING:
    from lokakern.selection.prediction.forecast import Prediction

# `lokakern.functional.run.run`, which is in a layer above and always imported with lokakern.
_runner: Callable[..., Any] | None = None


def set_runner(run: Callable[..., Any]) -> None:
    """Set the function that runs a kernel on tensors when a `Choice` is called."""
    global _runner
    _runner = run


class Choice:
    """The result of `dispatch` at one m; all but the kernel's name is computed on access.

    Its errors are those on the measured distributions and no bounds for other inputs.
    """

    __slots__ = ("_pick", "m", "table")

    def __init__(self, table: Table, m: int) -> None:
        self.table = table
        self.m = m
        self._pick: Pick | None = None

    @property
    def pick(self) -> Pick:
        if self._pick is None:
            self._pick = self.table.pick(self.m)
        return self._pick

    @property
    def kernel(self) -> str:
        """Name of the chosen kernel."""
        table = self.table
        return table.winners[bisect_right(table.breakpoints, self.m) - 1]

    @property
    def problem(self) -> Problem:
        return replace(self.table.problem, m=self.m)

    @property
    def latency_us(self) -> float | None:
        """The median time in microseconds, measured or interpolated; None if not measured.

        In the regimes "eager" and "compiled", where host costs are known, it is the longer of
        `gpu_us` and `host_us`.
        """
        return self.pick.time.latency_us if self.pick.time else None

    @property
    def gpu_us(self) -> float | None:
        """The median time on the GPU in microseconds; None if not measured."""
        return self.pick.time.gpu_us if self.pick.time else None

    @property
    def host_us(self) -> float | None:
        """The median time of the host for a call, in microseconds.

        None in a CUDA graph, and where it was not measured on this class of machines.
        """
        time = self.pick.time
        return time.host.us if time is not None and time.host is not None else None

    @property
    def predicted(self) -> Prediction | None:
        """Predicted times where nothing was measured, by which the kernel was chosen.

        If they rest on another GPU type (`transferred_from`), they are shown only.
        """
        return self.pick.prediction

    @property
    def interpolated(self) -> bool:
        return self.pick.interpolated

    @property
    def is_miss(self) -> bool:
        """Whether the database has no answer.

        Then the unquantized kernel is used, or one that is `predicted` to be faster.
        """
        return self.pick.is_miss

    @property
    def undecided(self) -> Undecided | None:
        """The kernel that beats this unquantized one, if its unknown error is within the budget."""
        return self.table.undecided(self.m, self.pick)

    @property
    def tied(self) -> tuple[str, ...]:
        """Kernels in a tie with the winner."""
        return self.pick.tied

    @property
    def rejected(self) -> dict[str, str]:
        """The reason against every other kernel."""
        return dict(self.pick.rejected)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Why plugins here have no kernel among these, such as "x changed since it was tried".

        Of another device, also why kernels of those that were tried have no place there.
        """
        unavailable = load_kernels()
        words = [why for module, why in unavailable.items() if module.startswith("plugin ")]
        return (*words, *(() if self.table.callable_here else self._unmeasured_plugins()))

    def _unmeasured_plugins(self) -> Iterator[str]:
        """Why kernels of plugins have no time on another device than this one."""
        device, problem = self.table.device, self.problem
        told = {*self.rejected, self.kernel, *self.tied}
        for name, kernel in sorted(KERNELS.items()):
            is_asked = kernel.op == problem.op and kernel.library in libraries.plugins()
            if not is_asked or kernel.parts or name in told:
                continue
            why = f"was not measured on {device.product}"
            if not kernel.runs_on(device):
                why = f"does not run on {device.architecture}"
            elif isinstance(answer := kernel.supports(problem, device), Rejected):
                why = f"does not take it: {answer.reason}"
            yield f"{kernel.library}: {name} {why}"

    @property
    def errors(self) -> dict[str, float]:
        """The largest stored bounds of the winner over the distributions."""
        return dict(self.pick.candidate.errors) if self.pick.candidate else {}

    @property
    def callable(self) -> bool:
        """Whether the kernel can run on a local device."""
        return self.table.callable_here and self._kernel() is not None

    def _kernel(self) -> Kernel | None:
        return self.table.kernel_at(self.m)

    def explain(self) -> str:
        """A text with the winner, its time and error, and the reason against every other kernel."""
        pick, table = self.pick, self.table
        within = f" within {table.budget}" if table.budget else ""
        how = "not measured" if table.origin is None or pick.is_miss else "frozen"
        time, interpolated = pick.time, pick.interpolated
        if time is None and pick.candidate and pick.excess:  # a miss has no time of its own
            time, interpolated = pick.candidate.time_at(self.m) or (None, False)
        if time is not None:
            kind = "interpolated" if interpolated else "measured"
            kind = "estimated" if pick.candidate and pick.candidate.estimated else kind
            count = time.run_count  # 0 of a predicted time
            runs = [f"{count} run" + ("s" if count > 1 else "")] if count else []
            facts = [kind, *runs, table.regime]
            facts += [time.freshness] if time.freshness != "fresh" else []
            facts += [] if time.is_steady else ["unsteady"]
            facts += [] if time.is_verified else ["imported and not verified"]
            how = f"{time.latency_us:.2f} us ({', '.join(facts)})"
        how += f", over budget: {pick.excess}" if pick.excess else ""
        if pick.prediction is not None and not pick.prediction.transferred_from:
            how = f"predicted, not measured: {pick.prediction}"
        name = pick.name or "no kernel"
        lines = [f"{self.problem} on {table.device.product}{within}: {name}, {how}"]
        if pick.is_miss:
            lines.append(f"  miss: {miss_words(table, pick, self.m)}")
        if self.undecided is not None:
            lines.append(f"  undecided: {self.undecided}")
        if table.host:
            lines.append(f"  host cost: {_host_words(pick, table)}")
        if pick.prediction is not None and pick.prediction.transferred_from:
            lines.append(f"  transferred from {pick.prediction.transferred_from}, never chosen by: "
                         f"{pick.prediction}")  # fmt: skip
        if pick.candidate and pick.candidate.estimated:
            lines.append(f"  time: {pick.candidate.estimated}; the kernel itself was not measured")
        if table.origin is not None:
            lines.append(f"  answers are those of {table.origin}")
        if pick.tied:
            lines.append(f"  tied with {', '.join(pick.tied)}: larger errors lose a tie")
        if self.errors:
            words = ", ".join(f"{k} {v:.4g}" for k, v in self.errors.items() if math.isfinite(v))
            worst = pick.candidate.worst_distribution if pick.candidate else ""
            lines.append(f"  error: {words} (row_err worst on {worst})")
        if pick.candidate:
            if pick.candidate.errors_predicted:
                lines.append("  error: a bound from measurements at other n and k")
            if pick.candidate.errors_at:
                lines.append(f"  error: {ERRORS_ELSEWHERE:g} times what was measured at "
                             f"{pick.candidate.errors_at}, other sizes equal")  # fmt: skip
            if not pick.candidate.errors_verified:
                lines.append("  error: imported and not verified: the worse of it and of what is "
                             "known here of such arithmetic")  # fmt: skip
            lines += [f"  set aside, imported and not verified: {words}"
                      for words in pick.candidate.set_aside]  # fmt: skip
        if len(table.distributions) < len(REALISTIC_DISTRIBUTIONS):
            lines.append(f"  judged on {', '.join(table.distributions)} only")
        width = max((len(name) for name, _ in pick.rejected), default=0)
        lines += [f"  {name:<{width}}  rejected: {why}" for name, why in sorted(pick.rejected)]
        lines += [f"  plugin left out: {why}" for why in self.left_out]
        return "\n".join(lines)

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Run the chosen kernel on operands as the public function of the op does.

        Raises:
            UnsupportedError: The choice is for another device.
        """
        kernel = self._kernel()
        if kernel is None and self.pick.is_miss and self.table.callable_here:
            raise UnsupportedError(f"{self.problem}: {self.pick.note}")
        if not self.table.callable_here or kernel is None:
            raise UnsupportedError(
                f"{self.kernel or 'this choice'} is for {self.table.device.product}; "
                f"here is {current_device().product}; dispatch without device= to run it"
            )
        assert _runner is not None
        return _runner(kernel, *operands, **options)

    def __repr__(self) -> str:
        time = "not measured" if self.table.origin is None or self.is_miss else "frozen"
        time = f"over budget: {self.pick.excess}" if self.pick.excess else time
        if self.predicted is not None and not self.predicted.transferred_from:
            time = f"predicted {self.predicted.latency_us:.2f} us"
        time = time if self.latency_us is None else f"{self.latency_us:.2f} us"
        return f"Choice({self.kernel!r}, {self.problem}, {time})"


def _host_words(pick: Pick, table: Table) -> str:
    time = pick.time
    if time is None or time.host is None:
        return table.host
    which = "assumed to be that of bf16" if time.host.is_assumed else table.host
    if time.host.least_us > time.host.us:
        which += f"; counted as bf16's, {time.host.least_us:.2f} us"
    longer = "host" if time.is_of_host else "GPU"
    return (
        f"{time.host.us:.2f} us a call ({which}); {time.gpu_us:.2f} us on the GPU; the longer "
        f"counts, that of the {longer}"
    )
