"""Compare verdicts of Probe with fresh batches, for operands that depend on each other.

    python scripts/probe_cases.py                40 random cases and those of sums that cancel
    python scripts/probe_cases.py --seed 7       40 others

A case is a generator of batches (inputs and gradients), a weight and a budget. A Probe watches four
batches; "told" and "upper" are its error and limit of each way to scale, and "true" is the root
mean square over four batches that it never saw, of operands quantized as kernels do, against
float64. Two counts decide: verdicts of "safe" whose true error is more than 10 % above the budget
(none), and the share of "undecided" among what is within the budget (15 % at most).
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lokakern import Probe, numerics
from lokakern.types import Format, Granularity

SEEN, HELD_OUT = 4, 4  # batches
BUDGETS = (0.04, 0.045, 0.05, 0.06, 0.08, 0.1)
WAYS = {
    "row": (Granularity.ROW, Granularity.ROW),
    "1x128": (Granularity.GROUP, Granularity.GROUP),
    "tensor": (Granularity.TENSOR, Granularity.TENSOR),
}
Batch = Callable[[int, torch.Generator], Tensor]  # rows to a matrix of them


@dataclass
class Case:
    """A layer, its inputs and its output gradients.

    Attributes:
        name: What is unusual about it.
        weight: ``[n, k]``.
        batch: Draws inputs ``[m, k]`` and gradients ``[m, n]``.
        m: Rows of a batch.
        budget: Largest row error.
        mean: Of inputs, where the case has one.
    """

    name: str
    weight: Tensor
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    m: int = 1024
    budget: float = 0.05
    mean: float = 0.0


@dataclass
class Judgment:
    """One way to scale one GEMM of a case."""

    case: str
    gemm: str
    scales: str
    budget: float
    told: float
    upper: float
    true: float
    verdict: str

    @property
    def is_false(self) -> bool:
        """Whether the verdict is safe but the error exceeds the budget by more than a tenth."""
        return self.verdict == "safe" and self.true > 1.1 * self.budget

    @property
    def is_safe(self) -> bool:
        return self.true <= self.budget


@dataclass
class Tally:
    """Judgments of all cases, and shares of them."""

    judged: list[Judgment] = field(default_factory=list)

    @property
    def false(self) -> list[Judgment]:
        return [j for j in self.judged if j.is_false]

    @property
    def undecided_share(self) -> float:
        """Share of the truly safe GEMMs that are undecided."""
        safe = [j for j in self.judged if j.is_safe]
        return sum(j.verdict == "undecided" for j in safe) / max(len(safe), 1)

    @property
    def unsafe_share(self) -> float:
        """Share of the truly safe GEMMs that are called unsafe."""
        safe = [j for j in self.judged if j.is_safe]
        return sum(j.verdict == "unsafe" for j in safe) / max(len(safe), 1)


def judge(case: Case, seed: int = 0) -> list[Judgment]:
    """Compare Probe's verdicts on a case with the true errors."""
    n, k = case.weight.shape
    layer = nn.Linear(k, n, bias=False)
    with torch.no_grad():
        layer.weight.copy_(case.weight)
    generator = torch.Generator().manual_seed(1000 + seed)
    with Probe(layer, every=1, seed=seed) as probe:
        for _ in range(SEEN):
            x, gradient = case.batch(generator)
            layer(x.requires_grad_()).backward(gradient)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = probe.report(budget=case.budget)
    held_out = torch.Generator().manual_seed(2000 + seed)
    squares: dict[tuple[str, str], list[float]] = {}
    for _ in range(HELD_OUT):
        x, gradient = case.batch(held_out)
        for gemm, left, right in gemms(x, gradient, case.weight):
            for scales, ways in WAYS.items():
                squares.setdefault((gemm, scales), []).append(error_of(left, right, *ways) ** 2)
    found = []
    for verdict in report.verdicts:
        for scales in WAYS:
            one = verdict.of(scales)
            assert one is not None
            true = math.sqrt(sum(squares[verdict.gemm, scales]) / HELD_OUT)
            told = (one.row_err, one.row_err_upper, true, one.safety)
            found.append(Judgment(case.name, verdict.gemm, scales, case.budget, *told))
    return found


def gemms(x: Tensor, gradient: Tensor, weight: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Both operands of each GEMM, with the axis of the sum as columns."""
    yield "output", x, weight
    yield "grad_input", gradient, weight.t()
    yield "grad_weight", gradient.t(), x.t()


def error_of(left: Tensor, right: Tensor, a: Granularity, b: Granularity) -> float:
    """Row error of an emulated FP8 product, against float64 of its bfloat16 operands."""
    left, right = left.detach().bfloat16().contiguous(), right.detach().bfloat16().contiguous()
    made = [
        numerics.dequantize(numerics.quantize(x, Format.E4M3FN, g), torch.float64)
        for x, g in ((left, a), (right, b))
    ]
    out = (made[0] @ made[1].t()).bfloat16()
    return numerics.measure_errors(out, left.double() @ right.double().t()).row_err


# Inputs, weights and gradients, each with something that statistics of one of them do not tell.


def plain_weight(n: int, k: int, g: torch.Generator) -> Tensor:
    return torch.randn((n, k), generator=g) / math.sqrt(k)


def normal(m: int, k: int, g: torch.Generator) -> Tensor:
    return torch.randn((m, k), generator=g)


def shifted(mean: float, k: int, m: int, g: torch.Generator) -> Case:
    """Inputs N(mean, 1), and weight rows that sum to zero."""
    w = plain_weight(k, k, g)
    w -= w.mean(dim=1, keepdim=True)
    return Case(
        f"mean {mean:g}, weight rows sum to 0", w,
        lambda g: (normal(m, k, g) + mean, 1e-3 * normal(m, k, g)), m,
    )  # fmt: skip


def rank_one(size: float, n: int, k: int, m: int, g: torch.Generator, left: float = 0.0) -> Case:
    """One direction of inputs is large, and the weight orthogonal to it, but for a rest."""
    direction = torch.randn(k, generator=g)
    direction /= direction.norm()
    w = plain_weight(n, k, g)
    w -= (1 - left) * (w @ direction)[:, None] * direction
    return Case(
        f"direction x {size:g}, weight orthogonal but for {left:g}", w,
        lambda g: (
            normal(m, k, g) + size * normal(m, 1, g) * direction, 1e-4 * normal(m, n, g)
        ), m,
    )  # fmt: skip


def columns(octaves: float, n: int, k: int, m: int, g: torch.Generator) -> Case:
    """Columns of all magnitudes, and the inverse magnitudes in the weight."""
    sizes = 2.0 ** (octaves * (torch.rand(k, generator=g) - 0.5))
    w = plain_weight(n, k, g) / sizes
    return Case(
        f"columns over {octaves:.0f} octaves, inverse in the weight", w,
        lambda g: (normal(m, k, g) * sizes, normal(m, n, g)), m,
    )  # fmt: skip


def count_column(size: float, inverse: bool, n: int, k: int, m: int, g: torch.Generator) -> Case:
    """A raw count among features."""
    w = plain_weight(n, k, g)
    if inverse:
        w[:, 3] /= size

    def batch(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = normal(m, k, g)
        x[:, 3] = (x[:, 3].exp() * size).round()
        return x, normal(m, n, g)

    return Case(f"a count x {size:g}{', inverse in the weight' if inverse else ''}", w, batch, m)


def antipodal(mean: float, n: int, k: int, m: int, g: torch.Generator) -> Case:
    """Pairs +-v, of which the gradients are alike: the weight's gradient cancels."""
    w = plain_weight(n, k, g)

    def batch(g: torch.Generator) -> tuple[Tensor, Tensor]:
        half, gradient = normal(m // 2, k, g), normal(m // 2, n, g)
        x = torch.cat([half, -half]) + mean
        return x, torch.cat([gradient, gradient + 0.5 * normal(m // 2, n, g)])

    return Case(f"pairs +-v, mean {mean:g}", w, batch, m)


def duplicates(n: int, k: int, m: int, g: torch.Generator) -> Case:
    """A few users, many rows each; gradients of each user's rows nearly sum to zero."""
    w = plain_weight(n, k, g)

    def batch(g: torch.Generator) -> tuple[Tensor, Tensor]:
        users = normal(16, k, g)
        x = users[torch.randint(16, (m,), generator=g)] + 0.05 * normal(m, k, g)
        return x, normal(m, n, g)

    return Case("near duplicates of 16 rows", w, batch, m)


def sparse(share: float, zero_rows: float, n: int, k: int, m: int, g: torch.Generator) -> Case:
    """Few nonzero elements, and some rows of zeros."""
    w = plain_weight(n, k, g)

    def batch(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = normal(m, k, g) * (torch.rand((m, k), generator=g) < share)
        gradient = normal(m, n, g)
        x[torch.rand(m, generator=g) < zero_rows] = 0.0
        return x, gradient * (torch.rand((m, n), generator=g) < 0.5)

    return Case(f"{share:.0%} of elements, {zero_rows:.0%} of rows are 0", w, batch, m)


def heavy(nu: float, n: int, k: int, m: int, g: torch.Generator) -> Case:
    """Embeddings: blocks of columns of all sizes, elements with heavy tails."""
    w = plain_weight(n, k, g)
    tables = torch.exp(1.5 * torch.randn(k // 8, generator=g)).repeat_interleave(8)

    def batch(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = normal(m, k, g) * (nu / _gamma((m, k), nu, g)).sqrt() * tables
        rows = torch.exp(2.0 * torch.randn((m, 1), generator=g))
        return x, 1e-4 * rows * normal(m, n, g)

    return Case(f"tables of all sizes, Student's t of {nu:g}", w, batch, m)


def _gamma(shape: Sequence[int], nu: float, g: torch.Generator) -> Tensor:
    """Chi-squared of `nu` degrees, a whole number."""
    return torch.randn((int(nu), *shape), generator=g).square().sum(dim=0)


def low_rank(rank: int, mean: float, n: int, k: int, m: int, g: torch.Generator) -> Case:
    """A weight of low rank whose rows sum nearly to zero, before inputs with a mean."""
    w = torch.randn((n, rank), generator=g) @ torch.randn((rank, k), generator=g)
    w -= 0.9 * w.mean(dim=1, keepdim=True)
    w /= math.sqrt(rank * k)
    return Case(
        f"weight of rank {rank}, mean {mean:g}", w,
        lambda g: (normal(m, k, g) + mean, normal(m, n, g)), m,
    )  # fmt: skip


def spread_rows(octaves: float, n: int, k: int, m: int, g: torch.Generator) -> Case:
    """Rows of all magnitudes."""
    w = plain_weight(n, k, g)

    def batch(g: torch.Generator) -> tuple[Tensor, Tensor]:
        sizes = 2.0 ** (octaves * (torch.rand((m, 1), generator=g) - 0.5))
        return normal(m, k, g) * sizes, normal(m, n, g) * sizes.flip(0)

    return Case(f"rows over {octaves:.0f} octaves", w, batch, m)


def correlated(mean: float, n: int, k: int, m: int, g: torch.Generator) -> Case:
    """Gradients that depend on the inputs, as in a regression."""
    w, target = plain_weight(n, k, g), plain_weight(n, k, g)

    def batch(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.relu(normal(m, k, g) + mean)
        return x, (x @ (w - target).t() + 0.3 * normal(m, n, g)) / m

    return Case(f"gradients of a regression, mean {mean:g}", w, batch, m)


def normalized_after(mean: float, n: int, k: int, m: int, g: torch.Generator) -> Case:
    """Gradients through a BatchNorm: over a batch they sum to zero."""
    w = plain_weight(n, k, g)

    def batch(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = normal(m, k, g) + mean
        gradient = normal(m, n, g)
        return x, gradient - gradient.mean(dim=0)

    return Case(f"gradients sum to 0 over a batch, mean {mean:g}", w, batch, m)


def gradient_sums(mean: float, n: int, k: int, m: int, g: torch.Generator) -> Case:
    """Gradients with a mean that the weight's columns do not see."""
    w = plain_weight(n, k, g)
    w -= w.mean(dim=0)
    return Case(
        f"gradients of mean {mean:g}, weight columns sum to 0", w,
        lambda g: (normal(m, k, g), 1e-5 * (normal(m, n, g) + mean)), m,
    )  # fmt: skip


SIZES = (64, 96, 128, 200, 256, 384)


def random_cases(count: int, seed: int, sizes: Sequence[int] = SIZES) -> Iterator[Case]:
    """Kinds in turn, with sizes, strengths and budgets at random."""
    choose = random.Random(seed)
    for place in range(count):
        g = torch.Generator().manual_seed(seed * 1000 + place)
        n, k = choose.choice(sizes), choose.choice(sizes)
        m = choose.choice((256, 512, 1024, 2048))
        mean = choose.choice((0.0, 0.3, 0.7, 1.0, 2.0, 4.0))
        size = (n, k, m, g)
        few, some = choose.random() < 0.5, choose.choice((0, 1, 2))
        kinds = (
            functools.partial(shifted, mean, k, m, g),
            functools.partial(rank_one, (3.0, 1e2, 1e3)[some], *size, left=0.0 if few else 0.05),
            functools.partial(columns, (4.0, 8.0, 20.0)[some], *size),
            functools.partial(count_column, 1e2 if some else 1e6, few, *size),
            functools.partial(antipodal, mean, *size),
            functools.partial(duplicates, *size),
            functools.partial(sparse, (0.02, 0.1, 0.5)[some], 0.3 * few, *size),
            functools.partial(heavy, (2.0, 3.0, 5.0)[some], *size),
            functools.partial(low_rank, (1, 4, 32)[some], mean, *size),
            functools.partial(spread_rows, (4.0, 12.0, 20.0)[some], *size),
            functools.partial(correlated, mean, *size),
            functools.partial(normalized_after, mean, *size),
            functools.partial(gradient_sums, mean, *size),
        )
        case = kinds[place % len(kinds)]()
        case.budget = choose.choice(BUDGETS)
        yield case


def known_cases() -> Iterator[Case]:
    """Inputs N(c, 1) and weight rows that sum to zero, at k = n = 512."""
    for mean in (1.0, 2.0, 5.0):
        for budget in (0.05, 0.06):
            case = shifted(mean, 512, 1024, torch.Generator().manual_seed(0))
            case.budget, case.mean = budget, mean
            yield case


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=40, help="random cases")
    parser.add_argument("--seed", type=int, default=0, help="of them")
    options = parser.parse_args()
    tally = Tally()
    line = "{:52} {:12} {:7} {:>6} {:>7} {:>7} {:>7} {:9} {}"
    print(line.format("case", "gemm", "scales", "budget", "told", "upper", "true", "verdict", ""))
    for place, case in enumerate([*random_cases(options.count, options.seed), *known_cases()]):
        for j in judge(case, place):
            tally.judged.append(j)
            numbers = (f"{x:.4f}" for x in (j.told, j.upper, j.true))
            mark = "FALSE" if j.is_false else "" if (j.verdict == "safe") == j.is_safe else "*"
            print(
                line.format(j.case, j.gemm, j.scales, j.budget, *numbers, j.verdict, mark),
                flush=True,
            )
    print(
        f"{len(tally.false)} of {len(tally.judged)} are called safe and err by more than 1.1 "
        f"budgets; of those that are safe {tally.undecided_share:.1%} are undecided, "
        f"{tally.unsafe_share:.1%} called unsafe"
    )
    return bool(tally.false) or tally.undecided_share > 0.15


if __name__ == "__main__":
    sys.exit(main())
