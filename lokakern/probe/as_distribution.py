"""What was learned of a site as distributions that a bench draws: one for each of its GEMMs.

Rows are those that were sampled, and the weight is the newest: how they lie to each other decides
about errors, and no statistics of either have it. Of inputs of mean c and weight rows that sum to
zero the sums lose what they have of c, and what rounding makes of c stays.

A scale may span more rows than were sampled. Where whole operands had larger magnitudes than the
sample, one row of it is scaled up to the largest; of a weight's gradient, whose scales span all
samples of a column, one sample has the largest of each column, and the other operand zeros there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lokakern.errors import ShapeError
from lokakern.probe.operand import OperandStatistics
from lokakern.probe.site import GEMMS, SiteStatistics, cancellation_of, places_of, terms_of
from lokakern.types import GROUP
from lokakern.workloads.distributions import LearnedDistribution

MOST_COLUMNS = 2048  # of gradients, of which cancellation is measured
FEWEST_PAIRS = 8  # of samples; with fewer none gives its place to the largest magnitudes


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
    def digest(self) -> str:
        """Sixteen hex digits of all that was seen."""
        digest = hashlib.sha256()
        for name, x in self.statistics.tensors():
            digest.update(f"{name}{list(x.shape)}{x.dtype}".encode())
            digest.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    @cached_property
    def _samples(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of inputs and gradients rows and their keys, on the CPU."""
        seen = self.statistics
        return {"input": seen.input.sample.kept(), "grad_output": seen.grad_output.sample.kept()}

    @cached_property
    def _weights(self) -> tuple[Tensor | None, Tensor | None]:
        """The newest weight and its transpose, or some rows of each, on the CPU."""
        seen = self.statistics
        weight, weight_t = seen.snapshot, seen.weight_t()
        return (
            None if weight is None else weight.cpu(), None if weight_t is None else weight_t.cpu()
        )  # fmt: skip

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        """Places in the samples of inputs and of gradients of rows that came together."""
        (_, left), (_, right) = self._samples["input"], self._samples["grad_output"]
        places = {key: place for place, key in enumerate(left.tolist())}
        both = [(places[key], i) for i, key in enumerate(right.tolist()) if key in places]
        inputs, gradients = torch.tensor(both, dtype=torch.int64).view(-1, 2).t()
        return inputs, gradients

    def gemms(self) -> tuple[str, ...]:
        """Those that can be drawn: no gradients come by in inference."""
        return tuple(gemm for gemm in GEMMS if self._is_drawable(gemm))

    def _is_drawable(self, gemm: str) -> bool:
        weight, weight_t = self._weights
        if weight is None or not self.statistics.input.sample.is_filled:
            return False
        if gemm == "output":
            return True
        # A file of the first version has no whole columns of a large weight.
        has_gradient = self.statistics.grad_output.sample.is_filled
        return has_gradient and (gemm == "grad_weight" or weight_t is not None)

    def rows_of(self, gemm: str) -> int:
        """Different rows that stand for the operands of a GEMM, or pairs of them."""
        if gemm == "grad_weight":
            return len(self._pairs[0])
        return len(self._samples["input" if gemm == "output" else "grad_output"][0])

    def unlike(self, gemm: str) -> float:
        """Share of the rows of a GEMM that are unlike any of the sample: an octave beyond in size.

        Nothing is known of their errors.
        """
        if gemm == "grad_weight":
            return 0.0
        name = "input" if gemm == "output" else "grad_output"
        sizes = self._samples[name][0].abs().amax(dim=1)
        sizes = sizes[sizes > 0]
        if not len(sizes):
            return 0.0
        operand: OperandStatistics = getattr(self.statistics, name)
        return operand.row_sizes.share_beyond(float(sizes.min()) / 2, float(sizes.max()) * 2)

    def lost(self, gemm: str) -> float:
        """How much more of a weight's gradient cancels in batches than in the sample, 1 or more.

        Samples of a batch may have in common what those of many have not: gradients through a
        BatchNorm sum to zero. Squares of errors are by so much larger.
        """
        pairs = self._pairs
        seen = self.statistics.cancellation
        if gemm != "grad_weight" or not len(pairs[0]) or not seen:
            return 1.0
        samples = (rows for rows, _ in self._samples.values())
        x, y = (rows[places].double() for rows, places in zip(samples, pairs, strict=True))
        y = y[:, places_of(min(y.shape[1], MOST_COLUMNS), y.shape[1])]
        sizes = torch.linalg.vector_norm(y.t() @ x, dim=1)
        return max(seen / max(float(cancellation_of(terms_of(y, x), sizes)), 1e-9), 1.0)

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

    def _inputs(self, rows: int, k: int, _seed: int) -> Tensor:
        return self._rows("input", rows, k)

    def _gradients(self, rows: int, k: int, _seed: int) -> Tensor:
        return self._rows("grad_output", rows, k)

    def _rows(self, name: str, rows: int, columns: int) -> Tensor:
        """Each of the sample as often as the others, in steps of 128 rows, as kernels want them."""
        sample = self._samples[name][0].double()
        self._check(columns, sample.shape[1])
        rows = min(rows, -(-len(sample) // GROUP) * GROUP)
        found = sample[torch.arange(rows) % len(sample)]
        sizes = found.abs().amax(dim=1)
        place, most = int(sizes.argmax()), getattr(self.statistics, name).amax
        if 0 < float(sizes[place]) < most:
            found[-1] = found[place] * (most / sizes[place])
        return found

    def _weight(self, n: int, k: int, _seed: int) -> Tensor:
        return self._part(self._weights[0], n, k)

    def _weight_t(self, n: int, k: int, _seed: int) -> Tensor:
        return self._part(self._weights[1], n, k)

    def _part(self, weight: Tensor | None, rows: int, columns: int) -> Tensor:
        assert weight is not None  # or its GEMM is not drawable
        self._check(columns, weight.shape[1])
        return weight[places_of(rows, len(weight))].double()

    def _paired(self, which: int, samples: int, columns: int, seed: int) -> Tensor:
        """Samples of an operand that came together with those of the other, each once.

        Seed 0 takes as many as there are, others three in four: how far errors differ says how
        certain they are. None is repeated, because a second copy under another scale would cancel
        the rounding of the first; what is left of 128 are zeros. Columns of a gradient are rows of
        the product, of which an error is measured over 2048.
        """
        names = ("input", "grad_output")
        sample = self._samples[names[which]][0]
        operand: OperandStatistics = getattr(self.statistics, names[which])
        pairs = self._pairs[which]
        if not len(pairs):  # there is no verdict on such
            pairs = torch.arange(min(len(rows) for rows, _ in self._samples.values()))
        extremes = 2 if samples >= FEWEST_PAIRS else 0
        count = min(samples - extremes, len(pairs) if seed == 0 else max(len(pairs) * 3 // 4, 1))
        order = torch.randperm(len(pairs), generator=_stream(seed))[:count]
        found = sample.new_zeros(
            min(samples, -(-(count + extremes) // GROUP) * GROUP), sample.shape[1]
        ).double()
        found[extremes : extremes + count] = sample[pairs[order]].double()
        if extremes:
            sizes = operand.column_sizes.cpu().double()
            found[which] = torch.where(
                torch.rand(len(sizes), generator=_stream()) < 0.5, sizes, -sizes
            )
        return found[:, places_of(columns, sample.shape[1])]

    def _paired_gradients(self, rows: int, k: int, seed: int) -> Tensor:
        return self._paired(1, rows, k, seed)

    def _paired_inputs(self, n: int, k: int, seed: int) -> Tensor:
        return self._paired(0, n, k, seed)

    def _check(self, asked: int, known: int) -> None:
        if asked != known:
            raise ShapeError(
                f"site {self.name!r} has operands of {known} columns; {asked} were asked for"
            )


def _stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
