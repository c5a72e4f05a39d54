"""`ChainChoice`: the result of `dispatch_chain`, with its alternatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lokakern.chain.candidates import CONVERSIONS, NONE, Chain, Step
from lokakern.chain.runner import ChainRun
from lokakern.chain.search import Path
from lokakern.device import current_device, devices_here
from lokakern.errors import FormatError, ShapeError, UnsupportedError
from lokakern.selection import remedies
from lokakern.selection.table import Origin
from lokakern.selection.ties import within_noise
from lokakern.types import REALISTIC_DISTRIBUTIONS, Granularity, Problem

SHOWN_PATHS = 6  # in `explain`


@dataclass(frozen=True)
class ChainChoice:
    """Dispatch's answer for a chain of layers at one m.

    Attributes:
        chain: The request.
        budget: Largest accepted row error of the chain; None for unquantized kernels only.
        steps: Launches, in order.
        plain: Launches of the fastest unquantized chain.
        paths: Pareto-optimal measured chains, the fastest first.
        missing: Problems whose measurement may change the answer.
        note: Reason of a miss, or "".
        origin: The frozen choices that it is of, which have no times and errors; or None.
    """

    chain: Chain
    budget: float | None
    steps: tuple[Step, ...]
    plain: tuple[Step, ...]
    paths: tuple[Path, ...] = ()
    missing: tuple[Problem, ...] = ()
    note: str = ""
    origin: Origin | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of kernels in the order of launches, with conversions."""
        return tuple(step.kernel for step in self.steps)

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of the input, of the tensors between layers, and of the output."""
        layers = [step.problem for step in self.steps if step.problem.op not in CONVERSIONS]
        written = [problem.out_granularity for problem in layers]
        return tuple(self._format(scales) for scales in (self.chain.reads, *written))

    def _format(self, granularity: Granularity) -> str:
        return self.chain.half.value if granularity is NONE else f"{self.chain.fp8}/{granularity}"

    @property
    def latency_us(self) -> float | None:
        """Sum of the layers' times; None if one was not measured."""
        return time_of(self.steps)

    @property
    def row_err(self) -> float | None:
        """Error of the chain from those of the layers; None if one was not measured."""
        return _error_of(self.steps)

    @property
    def interpolated(self) -> bool:
        return any(step.interpolated for step in self.steps)

    @property
    def is_miss(self) -> bool:
        """Whether measurements are missing, so that the unquantized chain is used."""
        return bool(self.note)

    @property
    def unquantized(self) -> ChainChoice:
        """The fastest unquantized chain."""
        return ChainChoice(self.chain, None, self.plain, self.plain, origin=self.origin)

    @property
    def sweep_command(self) -> str:
        """The command that measures missing problems, or ""."""
        commands = map(remedies.sweep_command, self.missing)
        words = " ".join(command.partition(" sweep ")[2] for command in commands)
        return f"python -m lokakern.bench sweep {words}" if words else ""

    def prepare(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] | None = None,
        norm_weights: Sequence[Tensor | None] | None = None,
        norm_biases: Sequence[Tensor | None] | None = None,
        *,
        eps: float = 1e-5,
    ) -> ChainRun:
        """Check and quantize weights, and allocate tensors between layers.

        Args:
            weights: One for each layer, ``[n, k]``, as in a linear layer, in the chain's dtype,
                row-major.
            biases: One for each layer, ``[n]``, in the chain's dtype or float32, as
                ``norm_weights`` and ``norm_biases``; None for layers without bias.
            norm_weights: As ``biases``, for layers whose epilogue has "affine".
            norm_biases: As ``norm_weights``.
            eps: Of the norms.

        Returns:
            A callable ``run(x)``, which can be captured in a CUDA graph.

        Raises:
            UnsupportedError: The choice is for another device.
            ShapeError: The number of weights, or the shape of one, does not fit.
            FormatError: A dtype is not supported, or an argument is not a sequence.
        """
        if self.chain.device not in devices_here():
            raise UnsupportedError(
                f"this chain is for {self.chain.device.product}; here is "
                f"{current_device().product}; dispatch without device= to run it"
            )
        given: dict[str, Any] = {
            "weights": weights, "biases": biases, "norm_weights": norm_weights,
            "norm_biases": norm_biases,
        }  # fmt: skip
        count = len(self.chain.layers)
        columns = []
        for name, x in given.items():
            if x is not None and not isinstance(x, Sequence):
                kind = type(x).__name__
                raise FormatError(f"prepare: {name} is {kind}; expected a sequence, one a layer")
            column = [None] * count if x is None else list(x)
            if len(column) != count:
                found = len(column)
                raise ShapeError(f"prepare: {found} {name} of {count} layers; expected one each")
            columns.append(column)
        return ChainRun(self.chain, self.steps, list(zip(*columns, strict=True)), eps)

    def explain(self) -> str:
        """Each launch with its time and error, the alternatives, and missing measurements."""
        chain, within = self.chain, "" if self.budget is None else f" within row_err {self.budget}"
        lines = [f"chain of {len(chain.layers)} layers, m={chain.m}, on {chain.device.product}"
                 f"{within}: {_words(self.steps)}"]  # fmt: skip
        if self.note:
            lines.append(f"  miss: {self.note}")
        elif self.origin is not None:
            lines.append(f"  by the choices of {self.origin}, without times and errors")
        rows = [["layer", "n x k", "kernel", "reads", "writes", "us", "row_err"]]
        rows += [self._row(step) for step in self.steps]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if self.steps != self.plain:
            lines.append(f"  unquantized: {_words(self.plain)}: {_names(self.plain)}")
        others = [path for path in self.paths if steps_of(path) not in (self.steps, self.plain)]
        for path in others[:SHOWN_PATHS]:
            lines.append(
                f"  {self._against(path)}: {_words(steps_of(path))}: {_names(steps_of(path))}"
            )
        if len(others) > SHOWN_PATHS:
            lines.append(f"  and {len(others) - SHOWN_PATHS} that take longer and err less")
        lines.append(f"  summed from the layers; errors are the worst on {self._judged}")
        if self.missing:
            count = len(self.missing)
            lines.append(f"  {count} not measured, which may be faster: {self.sweep_command}")
        return "\n".join(lines)

    def _row(self, step: Step) -> list[str]:
        problem = step.problem
        reads = problem.a.granularity
        mark = " (interpolated)" if step.interpolated else ""
        us = f"{step.time.latency_us:.2f}{mark}" if step.time else "not measured"
        is_layer = problem.op not in CONVERSIONS
        error = "not measured" if step.row_err is None else f"{step.row_err:.4g}"
        return [
            f"{step.place + 1}",
            f"{problem.n} x {problem.k}" if is_layer else "",
            step.kernel,
            self._format(reads),
            self._format(problem.out_granularity),
            us,
            error if is_layer else "",
        ]

    @property
    def _judged(self) -> str:
        names = self.chain.distributions
        left_out = [name for name in REALISTIC_DISTRIBUTIONS if name not in names]
        if len(names) + len(left_out) > len(REALISTIC_DISTRIBUTIONS) or len(left_out) > len(names):
            return ", ".join(names)
        return " but ".join(["all realistic distributions", *filter(None, [", ".join(left_out)])])

    def _against(self, path: Path) -> str:
        """Why a chain is not the answer."""
        if self.budget is None:
            return "rejected, no budget"
        if math.sqrt(path.square) > self.budget:
            return "rejected, over the budget"
        if self.note:
            return "rejected, as the unquantized chain was not measured"
        return "no faster, or not beyond noise"

    def __repr__(self) -> str:
        return f"ChainChoice({_names(self.steps)}, m={self.chain.m}, {_words(self.steps)})"


def steps_of(path: Path) -> tuple[Step, ...]:
    return tuple(step for option in path.options for step in option.steps)


def time_of(steps: Sequence[Step]) -> float | None:
    times = [step.time.latency_us for step in steps if step.time is not None]
    return sum(times) if len(times) == len(steps) else None


def _error_of(steps: Sequence[Step]) -> float | None:
    shares = [step.share for step in steps if step.share is not None]
    return math.sqrt(sum(shares)) if len(shares) == len(steps) else None


def is_faster(steps: Sequence[Step], plain: Sequence[Step]) -> bool:
    """Whether the difference is larger than the noise."""
    us, plain_us = time_of(steps), time_of(plain)
    assert us is not None and plain_us is not None  # both are of measured steps
    margins = (math.hypot(*(s.time.margin_us for s in x if s.time)) for x in (steps, plain))
    margin, plain_margin = margins
    return us < plain_us and not within_noise(us, margin, plain_us, plain_margin)


def _words(steps: Sequence[Step]) -> str:
    us, error = time_of(steps), _error_of(steps)
    return (
        ("not measured" if us is None else f"{us:.2f} us")
        + (", interpolated" if any(step.interpolated for step in steps) else "")
        + ("" if error is None else f", row_err {error:.4g}")
    )


def _names(steps: Sequence[Step]) -> str:
    return ", ".join(step.kernel for step in steps)
