"""What was learned of a site as distributions that a bench draws: one for each of its GEMMs.

    X' = 1 mean^T + Z L^T         rows of inputs and of gradients
    W' = M + L_U Z L_V^T          weights

Where a sample says that the Gaussian misses its tails (`lokakern.probe.tails`), the sample itself
is drawn from, in random order. Of a weight's gradient both operands are always rows of the samples
that came together: what inputs and gradients have in common adds to the sums and not to their
rounding, so that independent draws would err by twice as much.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lokakern.bench.distributions import LearnedDistribution
from lokakern.errors import MeasurementError, ShapeError
from lokakern.probe.matrix_normal import DrawableWeight
from lokakern.probe.operand import OperandStatistics
from lokakern.probe.site import GEMMS, SiteStatistics
from lokakern.probe.tails import FEWEST_ROWS, Fit, fit_of

CHECKED_ROWS = 512  # drawn to be compared with a sample


def generator_of(*identity: object) -> torch.Generator:
    """A stream for an identity, the same everywhere."""
    digest = hashlib.sha256(repr(identity).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


class LearnedOperand:
    """Rows of one operand, to be drawn.

    Attributes:
        fit: How well a Gaussian stands for them.
        sample: Rows that were seen, float32 ``[count, columns]``.
        keys: Of these, by which rows of two operands are paired.
    """

    def __init__(self, statistics: OperandStatistics) -> None:
        self._mean = statistics.moments.mean.cpu()
        self._covariance = statistics.moments.covariance()
        self.columns = statistics.columns
        self.sample, self.keys = statistics.sample.kept()
        drawn = self.gaussian(min(len(self.sample), CHECKED_ROWS), generator_of("fit"))
        self.fit = fit_of(self.sample, drawn)

    def gaussian(self, rows: int, generator: torch.Generator) -> Tensor:
        """``1 mean^T + Z L^T``, ``[rows, columns]`` float64."""
        return self._mean + self._covariance.draw(rows, generator)

    def replayed(self, rows: int, generator: torch.Generator) -> Tensor:
        """Rows of the sample, each as often as the others, ``[rows, columns]`` float64."""
        return self.sample[_order(len(self.sample), rows, generator)].double()

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """Gaussian rows, or the sample's where the Gaussian misses its tails."""
        return (self.gaussian if self.fit.is_gaussian else self.replayed)(rows, generator)


def _order(count: int, rows: int, generator: torch.Generator) -> Tensor:
    rounds = -(-rows // count)
    return torch.cat([torch.randperm(count, generator=generator) for _ in range(rounds)])[:rows]


@dataclass(frozen=True, eq=False)
class LearnedSite:
    """A site, to be drawn.

    Attributes:
        name: Of the site.
        statistics: What was seen of it.
    """

    name: str
    statistics: SiteStatistics

    @cached_property
    def input(self) -> LearnedOperand:
        return LearnedOperand(self.statistics.input)

    @cached_property
    def grad_output(self) -> LearnedOperand:
        return LearnedOperand(self.statistics.grad_output)

    @cached_property
    def weight_fit(self) -> Fit:
        """How well a matrix-normal variable stands for the newest weight."""
        snapshot = self.statistics.snapshot
        if snapshot is None:
            raise MeasurementError(f"site {self.name!r} has no snapshot of its weight")
        rows = min(self.statistics.n, CHECKED_ROWS)
        drawn = self._drawable.draw(generator_of("fit"), rows, self.statistics.k)
        return fit_of(snapshot.cpu(), drawn)

    @cached_property
    def _drawable(self) -> DrawableWeight:
        return self.statistics.weight.drawable()

    def weight(self, seed: int, rows: int, columns: int) -> Tensor:
        """The first rows and columns of a weight, float64.

        Matrix-normal, or the newest itself, its rows repeated.
        """
        snapshot = self.statistics.snapshot
        if snapshot is None or self.weight_fit.is_gaussian:
            generator = generator_of(self.name, "weight", seed)
            return self._drawable.draw(generator, rows, columns)
        return snapshot[:, :columns].cpu().double()[torch.arange(rows) % len(snapshot)]

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits of all that was seen."""
        digest = hashlib.sha256()
        for name, x in self.statistics.tensors():
            digest.update(f"{name}{list(x.shape)}{x.dtype}".encode())
            digest.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    def gemms(self) -> tuple[str, ...]:
        """Those of which enough was seen: no gradients come by in inference."""
        seen = self.statistics
        if not seen.weight.count or not seen.input.sample.is_filled:
            return ()
        return GEMMS if seen.grad_output.sample.is_filled else GEMMS[:1]

    def distribution_name(self, gemm: str) -> str:
        """By which the bench knows the operands of one GEMM."""
        return f"site:{self.name}/{gemm}"

    def distribution(self, gemm: str) -> LearnedDistribution:
        """The operands of one GEMM, as `lokakern.bench` draws them."""
        draws = {
            "output": (self._inputs, self._weight),
            "grad_input": (self._gradients, self._weight_t),
            "grad_weight": (self._paired_gradients, self._paired_inputs),
        }
        rows, weight = draws[gemm]
        name = self.distribution_name(gemm)
        return LearnedDistribution(
            name, f"learned of {self.name}", (), False, self.digest, rows, weight
        )

    def _inputs(self, rows: int, k: int, seed: int) -> Tensor:
        self._check(k, self.statistics.k)
        return self.input.draw(rows, generator_of(self.name, "input", seed))

    def _gradients(self, rows: int, k: int, seed: int) -> Tensor:
        self._check(k, self.statistics.n)
        return self.grad_output.draw(rows, generator_of(self.name, "gradient", seed))

    def _weight(self, n: int, k: int, seed: int) -> Tensor:
        self._check(k, self.statistics.k)
        return self.weight(seed, n, k)

    def _weight_t(self, n: int, k: int, seed: int) -> Tensor:
        self._check(k, self.statistics.n)
        return self.weight(seed, k, n).t()

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor] | None:
        """Places in both samples of rows that came together; None where there are few."""
        left, right = self.grad_output, self.input
        places = {key: place for place, key in enumerate(right.keys.tolist())}
        both = [(i, places[key]) for i, key in enumerate(left.keys.tolist()) if key in places]
        if len(both) < FEWEST_ROWS:
            return None
        gradients, inputs = torch.tensor(both).t()
        return gradients, inputs

    def _paired(self, which: int, rows: int, columns: int, seed: int) -> Tensor:
        """Rows of an operand; its columns repeated, or the first of them.

        Columns of a gradient are rows of the product, of which an error is measured over 2048.
        """
        operand = (self.grad_output, self.input)[which]
        if self._pairs is None:
            found = operand.draw(rows, generator_of(self.name, "pair", which, seed))
        else:
            places = self._pairs[which]
            order = _order(len(places), rows, generator_of(self.name, "pairs", seed))
            found = operand.sample[places[order]].double()
        return found[:, torch.arange(columns) % operand.columns]

    def _paired_gradients(self, rows: int, k: int, seed: int) -> Tensor:
        return self._paired(0, rows, k, seed)

    def _paired_inputs(self, n: int, k: int, seed: int) -> Tensor:
        return self._paired(1, n, k, seed)

    def _check(self, asked: int, known: int) -> None:
        if asked != known:
            raise ShapeError(
                f"site {self.name!r} has operands of {known} columns; {asked} were asked for"
            )
