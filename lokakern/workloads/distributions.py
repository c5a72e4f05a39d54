"""Input distributions X1..X14: seeded recipes for the operands of a GEMM, float64 on the CPU.

Published facts behind each recipe are in the table of the documentation; here is what is computed.
Every recipe has one default parameter set. Another set is another distribution, with the parameters
in its name (``X14(spread=1e7)``), and counts as stress.

Streams depend on (name with all parameters, seed, operand): the same x comes out whatever n is, and
the same weight whatever m is. Drawing holds no state, so any number of threads may draw at once.
There are no matrix products, so values repeat bit for bit whatever the number of threads; another
NumPy or processor may differ in the last bit of exp or an FFT, which bfloat16 nearly always hides.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lokakern.errors import ShapeError, UnknownNameError
from lokakern.workloads import recipes

# A parameter means the same in every recipe that has it (but c: X10's slope, X13's shift).
LIMITS: dict[str, tuple[float, float]] = {
    "a": (0.0, 8.0),
    "mean": (0.0, 100.0),
    "s": (0.0, 4.0),
    "block": (1.0, 2.0**31),
    "alpha": (0.0, 8.0),
    "d": (1.0, 2.0**31),
    "p_block": (0.0, 1.0),
    "p_row": (0.0, 1.0),
    "mu": (-30.0, 30.0),
    "sigma": (0.0, 8.0),
    "p_zero": (0.0, 1.0),
    "rho": (-1.0, 1.0),
    "depth": (0.0, 8.0),
    "gate": (0.0, 100.0),
    "r": (0.0, 1.0),
    "scale": (1.0, 1e12),
    "nu": (0.5, 1e6),
    "p_spike": (0.0, 1.0),
    "ctr": (1e-6, 1.0 - 1e-6),
    "batch": (1.0, 1e9),
    "c": (0.0, 100.0),
    "spread": (1.0, 1e16),
}


@dataclass(frozen=True)
class Distribution:
    """A named recipe for operand values.

    Attributes:
        name: ``X1``; with the parameters that are not at their default, ``X14(spread=1e7)``.
        title: One line: what it stands for.
        parameters: Every parameter and its value, in canonical order.
        realistic: Counts in a kernel's default error; never True off the default parameters.
    """

    name: str
    title: str
    parameters: tuple[tuple[str, float], ...]
    realistic: bool

    @property
    def base(self) -> str:
        """The name without parameters."""
        return self.name.partition("(")[0]

    def with_parameters(self, **overrides: float) -> Distribution:
        """The same recipe with other parameters.

        Raises:
            UnknownNameError: The recipe has no such parameter, or the value is out of its range.
        """
        default = DISTRIBUTIONS[self.base]
        values = dict(self.parameters)
        for key, value in overrides.items():
            if key not in values:
                raise UnknownNameError(
                    f"distribution {self.base} has no parameter {key!r}; "
                    f"expected one of {', '.join(values) or '(none)'}"
                )
            low, high = LIMITS[key]
            if not low <= value <= high:  # also refuses NaN
                raise UnknownNameError(
                    f"distribution {self.base}: {key} is {value!r}; "
                    f"expected a number from {low:g} to {high:g}"
                )
            values[key] = float(value)
        parameters = tuple(values.items())
        changed = [pair for pair in parameters if pair not in default.parameters]
        if not changed:
            return default
        words = ",".join(f"{key}={_number_text(value)}" for key, value in changed)
        name = f"{self.base}({words})"
        return replace(self, name=name, parameters=parameters, realistic=False)

    def __str__(self) -> str:
        """The name."""
        return self.name


def _number_text(value: float) -> str:
    """The shortest text that reads back as the same number: ``1e7``, ``0.5``, ``30``."""
    plain = repr(value).removesuffix(".0")
    shortest = next(text for d in range(17) if float(text := f"{value:.{d}e}") == value)
    mantissa, _, exponent = shortest.partition("e")
    return min(plain, f"{mantissa}e{int(exponent)}", key=len)


@dataclass(frozen=True)
class LearnedDistribution(Distribution):
    """What somebody learned of operands: drawn by functions, known by a digest.

    Attributes:
        digest: Of what was learned; in place of parameters.
        rows: From rows, k and a seed to x ``[rows, k]`` float64 on the CPU.
        weight: From n, k and a seed to a weight ``[n, k]``.
    """

    digest: str
    rows: Callable[[int, int, int], Tensor]
    weight: Callable[[int, int, int], Tensor]

    def with_parameters(self, **overrides: float) -> Distribution:
        """What was learned has none.

        Raises:
            UnknownNameError: Always.
        """
        raise UnknownNameError(f"distribution {self.name} was learned; it has no parameters")


_LEARNED: dict[str, LearnedDistribution] = {}


@contextlib.contextmanager
def learned(*distributions: LearnedDistribution) -> Iterator[None]:
    """Know these by their names meanwhile.

    Raises:
        UnknownNameError: A name is taken.
    """
    names = [distribution.name for distribution in distributions]
    taken = {*DISTRIBUTIONS, *_LEARNED} & {*names}
    if taken or len({*names}) < len(names):
        raise UnknownNameError(f"distributions {', '.join(names)}: a name is there already")
    _LEARNED.update(zip(names, distributions, strict=True))
    try:
        yield
    finally:
        for name in names:
            del _LEARNED[name]


@dataclass(frozen=True, eq=False)
class Draw:
    """Operands of one problem.

    Attributes:
        x: ``[rows, k]`` float64 on the CPU.
        w: ``[n, k]`` float64 on the CPU.
    """

    x: Tensor
    w: Tensor

    @cached_property
    def digest(self) -> str:
        """SHA-256 of shapes and bytes, to store beside what was measured; computed when asked."""
        sha = hashlib.sha256()
        for operand in (self.x, self.w):
            sha.update(repr(tuple(operand.shape)).encode())
            sha.update(operand.contiguous().numpy().data)
        return sha.hexdigest()


def distribution_named(text: str) -> Distribution:
    """Read a name as written by `Distribution.with_parameters`, or that of a `learned` one.

    Raises:
        UnknownNameError: No such distribution or parameter, or the text is malformed.
    """
    if text in _LEARNED:
        return _LEARNED[text]
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if match is None or match[1] not in DISTRIBUTIONS:
        raise UnknownNameError(
            f"unknown distribution {text!r}; expected one of {', '.join(DISTRIBUTIONS)}, "
            "with parameters in brackets as in 'X14(spread=1e7)'"
        )
    overrides: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isnan(number) or key in overrides:
            raise UnknownNameError(
                f"distribution {text!r}: found {item!r}; expected each parameter once, as "
                "name=number"
            )
        overrides[key] = number
    return DISTRIBUTIONS[match[1]].with_parameters(**overrides)


def draw(distribution: Distribution, rows: int, n: int, k: int, seed: int) -> Draw:
    """Draw both operands: x ``[rows, k]`` and the weight ``[n, k]`` that is paired with it."""
    return Draw(draw_rows(distribution, rows, k, seed), draw_weight(distribution, n, k, seed))


def draw_rows(distribution: Distribution, rows: int, k: int, seed: int) -> Tensor:
    """Draw x, ``[rows, k]`` float64; cheaper than `draw` where there is no weight.

    Raises:
        ShapeError: A size is below 1.
    """
    _check_sizes(rows=rows, k=k)
    if isinstance(distribution, LearnedDistribution):
        return distribution.rows(rows, k, seed)
    rng = _stream(distribution, seed, operand=0)
    recipe = _ROWS[distribution.base]
    return torch.from_numpy(recipe(rng, rows, k, dict(distribution.parameters)))


def draw_weight(distribution: Distribution, n: int, k: int, seed: int) -> Tensor:
    """Draw the weight, ``[n, k]`` float64: N(0, 1/k), but matrix-normal for X2, shifted for X13.

    Raises:
        ShapeError: A size is below 1.
    """
    _check_sizes(n=n, k=k)
    if isinstance(distribution, LearnedDistribution):
        return distribution.weight(n, k, seed)
    rng = _stream(distribution, seed, operand=1)
    parameters = dict(distribution.parameters)
    if distribution.base == "X2":
        weight = recipes.matrix_normal(rng, n, k, parameters)
    else:
        weight = rng.standard_normal((n, k))
    if distribution.base == "X13":
        weight += parameters["c"]
    weight /= math.sqrt(k)
    return torch.from_numpy(weight)


def _check_sizes(**sizes: int) -> None:
    for axis, size in sizes.items():
        if size < 1:
            raise ShapeError(f"cannot draw {axis}={size}; expected at least 1")


def _stream(distribution: Distribution, seed: int, operand: int) -> np.random.Generator:
    values = ",".join(f"{key}={value!r}" for key, value in distribution.parameters)
    identity = hashlib.sha256(f"{distribution.base}({values})".encode()).digest()
    entropy = (int.from_bytes(identity[:16], "little"), seed)
    sequence = np.random.SeedSequence(entropy, spawn_key=(operand,))
    return np.random.Generator(np.random.PCG64(sequence))


_ROWS: dict[str, recipes.Recipe] = {}
DISTRIBUTIONS: dict[str, Distribution] = {}


def _define(
    recipe: recipes.Recipe, title: str, parameters: dict[str, float], realistic: bool = True
) -> None:
    name = recipe.__name__.upper()
    _ROWS[name] = recipe
    DISTRIBUTIONS[name] = Distribution(name, title, tuple(parameters.items()), realistic)


_CORRELATED = {"a": 1.0, "mean": 0.5}
_NORMED = _CORRELATED | {"s": 0.5}
_TABLES = {"alpha": 1.05, "d": 128.0}
_OUTLIERS = {"r": 0.01, "scale": 30.0, "nu": 4.0, "p_spike": 1e-5}
_define(recipes.x1, "white Gaussian: the control", {})
_define(recipes.x2, "correlated Gaussian with a mean: learned activations", _CORRELATED)
_define(recipes.x3, "layer-normed, learned gains: inputs of FMB, HSTU and heads", _NORMED)
_define(
    recipes.x4,
    "block-normed, hard-swish: inputs of layers modded as in LoKA",
    _CORRELATED | {"block": 256.0},
)
_define(recipes.x5, "concatenated embeddings from tables of unequal size", _TABLES)
_define(
    recipes.x6,
    "concatenated embeddings with missing features and empty samples",
    _TABLES | {"p_block": 0.5, "p_row": 0.01},
)
_define(
    recipes.x7,
    "dense features: log1p of skewed counts, some of them missing",
    {"mu": 0.0, "sigma": 2.0, "p_zero": 0.3},
)
_define(recipes.x8, "ReLU outputs: hidden layers of an MLP", _CORRELATED)
_define(
    recipes.x9,
    "products: an HSTU gate, then DCN cross layers",
    _CORRELATED | {"rho": 0.5, "depth": 1.0},
)
_define(recipes.x10, "gates and masks, between 0 and 1", _CORRELATED | {"c": 4.0})
_define(recipes.x11, "outlier columns and spikes: stress", _NORMED | _OUTLIERS, realistic=False)
_define(
    recipes.x12,
    "gradients: two-level rows, spikes, ReLU masks",
    {"ctr": 0.03, "batch": 32768.0},
)
_define(
    recipes.x13,
    "gates into weights that share a component: outputs with a large mean",
    _CORRELATED | {"gate": 4.0, "c": 0.5},
)
_define(recipes.x14, "heterogeneous samples: rows of widely spread size", {"spread": 1e5})
REALISTIC = tuple(name for name, entry in DISTRIBUTIONS.items() if entry.realistic)
