"""Input distributions X1..X14: seeded recipes for the operands of a GEMM, in float64 on the CPU.

The documentation has a table of the published facts behind each recipe. A recipe has one set of
default parameters. Another set is another distribution, named with its parameters
(``X14(spread=1e7)``), and counts as stress.

Random streams depend on the name with all parameters, the seed and the operand: x does not depend
on n, nor the weight on m. Functions have no state, so that threads may draw in parallel. There are
no matrix products, so that values are the same for any number of threads; another NumPy or
processor may differ in the last bit of exp or an FFT, which rounding to bfloat16 usually removes.

A recipe takes a generator, rows, k and its parameters, and returns x ``[rows, k]``. It first draws
a *population* (spectrum, mean, gains, tables), then rows that are independent given the population.
A `Population` is a function of its own where all rows can be drawn in small chunks.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lokakern.errors import ShapeError, UnknownNameError
from lokakern.types import REALISTIC_DISTRIBUTIONS

Array = NDArray[np.float64]
Parameters = Mapping[str, float]
Sampler = Callable[[int], Array]  # count -> [count, k]: the next independent rows of a population
Population = Callable[[np.random.Generator, int, Parameters], Sampler]
Recipe = Callable[[np.random.Generator, int, int, Parameters], Array]

NORM_EPSILON = 1e-5
CHUNK_ELEMENTS = 1 << 18  # 2 MiB of float64, which stay in the L2 cache
LOW_RANK = 32  # rank of DCN's matrix and of the dominant gradient directions
NOISE = 0.5  # of gradients, relative to directions of unit variance
ZIPF_SUPPORT = 1 << 16  # larger ids have a probability below 1e-6 and hardly repeat
# Layers as torch initializes them: a Linear multiplies second moments by 1/3, a ReLU by 1/2.
LINEAR_GAIN = 1.0 / math.sqrt(3.0)
MLP_GAIN = 1.0 / math.sqrt(18.0)  # Linear, ReLU, Linear
SPIKE_SHARE = 1e-4  # of gradient coordinates; Clippy: "drastic changes in a few coordinates"
SPIKE_FACTOR = 30.0
EXPONENT_LIMIT = 36.0  # sigmoid(37) is 1 in float64, but a gate is never fully open
LARGEST_TABLE = 4e7  # rows of the largest embedding table of MLPerf DLRM-DCNv2
# Ids pooled per feature, MLPerf DLRM-DCNv2.
HOT_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


def _in_chunks(rows: int, k: int, sampler: Sampler) -> Array:
    """Fill ``[rows, k]`` a few rows at a time, so that temporaries stay in the cache."""
    out = np.empty((rows, k))
    step = max(1, CHUNK_ELEMENTS // k)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        out[start:stop] = sampler(stop - start)
    return out


def hartley(x: Array) -> Array:
    """Orthonormal Hartley transform of the last axis: symmetric, its own inverse, O(k log k).

    ``Re F - Im F`` of the Fourier transform; the upper half follows from the lower by symmetry.
    """
    k = x.shape[-1]
    spectrum = np.fft.rfft(x, norm="ortho")
    half = spectrum.shape[-1]
    out = np.empty(x.shape)
    np.subtract(spectrum.real, spectrum.imag, out=out[..., :half])
    mirror = spectrum[..., k - half : 0 : -1]
    np.add(mirror.real, mirror.imag, out=out[..., half:])
    return out


@dataclass(frozen=True, eq=False)
class _Rotation:
    """``L`` with ``L L^T = Q diag(spectrum) Q^T``.

    Q is the Hartley transform with its outputs signed at random and the spectrum assigned to its
    modes at random. Signs *before* the transform would cancel against the diagonal spectrum, and
    in natural order the strongest modes would be the smoothest, correlating neighboring columns.
    """

    roots: Array  # [k] square roots of the eigenvalues, in random order
    signs: Array  # [k]

    @classmethod
    def draw(cls, rng: np.random.Generator, spectrum: Array) -> _Rotation:
        signs = rng.choice(np.array([-1.0, 1.0]), spectrum.size)
        return cls(np.sqrt(rng.permutation(spectrum)), signs)

    def apply(self, white: Array) -> Array:
        """``white L^T``: white rows of ``[rows, k]`` get the covariance. Overwrites ``white``."""
        white *= self.roots
        out = hartley(white)
        out *= self.signs
        return out


def _decaying(k: int, decay: float) -> Array:
    """Eigenvalues proportional to ``i^-decay`` with a mean of 1, ``[k]``."""
    spectrum = np.arange(1, k + 1, dtype=np.float64) ** -decay
    spectrum /= spectrum.mean()
    return spectrum


def _low_rank(k: int) -> Array:
    """Eigenvalues of a matrix of low rank: few, equal, with a mean of 1, ``[k]``."""
    rank = min(LOW_RANK, k)
    return np.where(np.arange(k) < rank, k / rank, 0.0)


def _direction(rng: np.random.Generator, size: int) -> Array:
    """``[size]`` random values with a root mean square of exactly 1."""
    values = rng.standard_normal(size)
    return values / max(math.sqrt(float(np.mean(values * values))), 1e-300)


def _correlated(rng: np.random.Generator, k: int, p: Parameters) -> Sampler:
    """X2: ``mu + z L^T``; the norm of mu is ``mean`` times that of the deviation."""
    rotation = _Rotation.draw(rng, _decaying(k, p["a"]))
    mu = p["mean"] * _direction(rng, k)

    def rows_of(rows: int) -> Array:
        out = rotation.apply(rng.standard_normal((rows, k)))
        out += mu
        return out

    return rows_of


def matrix_normal(rng: np.random.Generator, n: int, k: int, p: Parameters) -> Array:
    """``M + L_U Z L_V^T``, ``[n, k]``, variance 1; M is white, with X2's share of mean."""
    left = _Rotation.draw(rng, _decaying(n, p["a"]))
    right = _Rotation.draw(rng, _decaying(k, p["a"]))
    out = _in_chunks(n, k, lambda rows: right.apply(rng.standard_normal((rows, k))))
    step = max(1, CHUNK_ELEMENTS // n)
    for start in range(0, k, step):  # the other axis, transposed in small parts
        columns = out[:, start : start + step]
        columns[...] = left.apply(np.ascontiguousarray(columns.T)).T
    if p["mean"] > 0.0:
        mean = rng.standard_normal((n, k))
        mean *= p["mean"]
        out += mean
    return out


def _layer_norm(x: Array) -> Array:
    """Rows of ``[rows, k]`` to mean 0 and variance 1, in place."""
    x -= x.mean(axis=1, keepdims=True)
    x /= np.sqrt(np.einsum("ij,ij->i", x, x)[:, None] / x.shape[1] + NORM_EPSILON)
    return x


def _block_norm(x: Array, block: int) -> Array:
    """Divide each row's ``block`` columns by their root mean square, in place; last one shorter."""
    for start in range(0, x.shape[1], block):
        part = x[:, start : start + block]
        part /= np.sqrt(np.einsum("ij,ij->i", part, part)[:, None] / part.shape[1] + NORM_EPSILON)
    return x


def _sigmoid(x: Array) -> Array:
    """In place."""
    np.clip(x, -EXPONENT_LIMIT, EXPONENT_LIMIT, out=x)
    np.negative(x, out=x)
    np.exp(x, out=x)
    x += 1.0
    return np.reciprocal(x, out=x)


def _random_places(rng: np.random.Generator, x: Array, share: float) -> NDArray[np.int64]:
    """Flat indices of about ``share`` of the coordinates of x."""
    return rng.integers(0, x.size, int(rng.binomial(x.size, share)))


@lru_cache(maxsize=8)
def _zipf_sums(alpha: float) -> Array:
    sums = np.cumsum(np.arange(1, ZIPF_SUPPORT + 1, dtype=np.float64) ** -alpha)
    sums.flags.writeable = False  # shared between calls and threads
    return sums


def _zipf(rng: np.random.Generator, count: int, ids: int, alpha: float) -> NDArray[np.intp]:
    """``[count]`` ids of 0..ids-1, the i-th with probability proportional to ``(i + 1)^-alpha``."""
    sums = _zipf_sums(alpha)[: min(ids, ZIPF_SUPPORT)]
    ranks: NDArray[np.intp] = np.searchsorted(sums[:-1], rng.random(count) * sums[-1], side="right")
    return ranks


def x1(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """White."""
    return rng.standard_normal((rows, k))


def _normed(rng: np.random.Generator, k: int, p: Parameters) -> Sampler:
    """X3: ``LN(X2) * gain + shift``, by row; gains lognormal(0, s), shifts N(0, 0.1)."""
    source = _correlated(rng, k, p)
    gain = np.exp(p["s"] * rng.standard_normal(k))
    shift = 0.1 * rng.standard_normal(k)
    return lambda rows: _layer_norm(source(rows)) * gain + shift


def x4(rng: np.random.Generator, k: int, p: Parameters) -> Sampler:
    """``hardswish(BlockNorm(X2))``; BlockNorm is a parameter-free RMSNorm of blocks of columns."""
    source = _correlated(rng, k, p)

    def rows_of(count: int) -> Array:
        x = _block_norm(source(count), min(int(p["block"]), k))
        x *= np.clip(x + 3.0, 0.0, 6.0) / 6.0  # hard-swish
        return x

    return rows_of


def x5(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """Blocks of d columns: rows of tables of V rows, U(+-sqrt(hot / V)), ids by Zipf(alpha)."""
    out = np.empty((rows, k))
    width = min(int(p["d"]), k)
    blocks = -(-k // width)
    # Drawn before anything that depends on the number of rows: a seed determines the tables.
    sizes = np.exp(rng.uniform(math.log(3.0), math.log(LARGEST_TABLE), blocks))
    limits = np.sqrt(rng.choice(np.array(HOT_SIZES), blocks) / sizes)
    for block in range(blocks):
        part = out[:, block * width : (block + 1) * width]
        ids = _zipf(rng, rows, int(sizes[block]), p["alpha"])
        # Only the table rows that occur are drawn: a table has up to 4e7.
        seen, inverse = np.unique(ids, return_inverse=True)
        table = rng.uniform(-limits[block], limits[block], (seen.size, part.shape[1]))
        part[...] = table[inverse]
    return out


def x6(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """X5 with a share of (row, block) pairs zero, and a share of whole rows."""
    out = x5(rng, rows, k, p)
    width = min(int(p["d"]), k)
    for start in range(0, k, width):
        # Assigned, not multiplied by 0: a missing feature is +0, never -0.
        out[rng.random(rows) < p["p_block"], start : start + width] = 0.0
    out[rng.random(rows) < p["p_row"]] = 0.0
    return out


def x7(rng: np.random.Generator, k: int, p: Parameters) -> Sampler:
    """``log1p(lognormal(mu, sigma))``, a share of it zero; not centered."""

    def rows_of(count: int) -> Array:
        x = rng.standard_normal((count, k))
        x *= p["sigma"]
        x += p["mu"]
        x = np.log1p(np.exp(x, out=x), out=x)
        np.copyto(x, 0.0, where=rng.random((count, k), dtype=np.float32) < p["p_zero"])
        return x

    return rows_of


def x8(rng: np.random.Generator, k: int, p: Parameters) -> Sampler:
    """``relu(X2)``."""
    source = _correlated(rng, k, p)
    return lambda count: np.maximum(source(count), 0.0)


def x9(rng: np.random.Generator, k: int, p: Parameters) -> Sampler:
    """``x0 = silu(a) * LN(b)`` of correlated a, b; then depth times ``x <- x0 * (W x + b) + x``."""
    source = _correlated(rng, k, p)
    independent = math.sqrt(1.0 - p["rho"] ** 2)
    # W as transforms: matrix products of a few rows would start all threads of BLAS in each thread
    # of the pool.
    down = LINEAR_GAIN * rng.choice(np.array([-1.0, 1.0]), k)
    up = _Rotation.draw(rng, _low_rank(k))
    bias = 0.1 * rng.standard_normal(k)

    def rows_of(count: int) -> Array:
        a = source(count)
        b = p["rho"] * a + independent * source(count)
        x0 = a * _sigmoid(a.copy()) * _layer_norm(b)
        x = x0
        for _ in range(int(p["depth"])):
            x = x0 * (up.apply(hartley(x * down)) + bias) + x
        return x

    return rows_of


def _gate(rng: np.random.Generator, k: int, p: Parameters) -> Sampler:
    """X10 and X13, which differ in the weight: ``sigmoid(slope * X2 * MLP(X2))``."""
    source = _correlated(rng, k, p)
    # In the place of MLP(X): equally correlated, in other directions.
    hidden = _correlated(rng, k, p)
    slope = p["gate"] if "gate" in p else p["c"]

    def rows_of(count: int) -> Array:
        x = source(count)
        x *= hidden(count)
        x *= slope * MLP_GAIN
        return _sigmoid(x)

    return rows_of


def x11(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """X3, a share r of its columns times scale, and a few coordinates times scale * Student-t."""
    out = _in_chunks(rows, k, _normed(rng, k, p))
    wide = rng.permutation(k)[: math.ceil(p["r"] * k)]
    out[:, wide] *= p["scale"]
    spikes = _random_places(rng, out, p["p_spike"])
    out.reshape(-1)[spikes] *= p["scale"] * rng.standard_t(p["nu"], spikes.size)
    return out


def x12(rng: np.random.Generator, k: int, p: Parameters) -> Sampler:
    """``(predicted - clicked) / batch * direction``: BCE through a ReLU; directions of low rank."""
    directions = _Rotation.draw(rng, _low_rank(k) + NOISE**2)
    active = rng.random(k, dtype=np.float32)  # share of samples in which the ReLU is active
    logit = math.log(p["ctr"] / (1.0 - p["ctr"]))

    def rows_of(count: int) -> Array:
        direction = directions.apply(rng.standard_normal((count, k)))
        direction.reshape(-1)[_random_places(rng, direction, SPIKE_SHARE)] *= SPIKE_FACTOR
        # Binary cross-entropy: d loss / d logit = (predicted - clicked) / batch.
        predicted = _sigmoid(logit + 0.5 * rng.standard_normal((count, 1)))
        clicked = rng.random((count, 1)) < p["ctr"]
        direction *= (predicted - clicked) / p["batch"]
        masked = rng.random((count, k), dtype=np.float32) >= active
        np.copyto(direction, 0.0, where=masked)
        return direction

    return rows_of


def x14(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """White rows times a factor, log-uniform over the spread."""
    # Geometric mean 1, so that the widest spread stays in the range of float32.
    factor = np.exp(math.log(p["spread"]) * (rng.random((rows, 1)) - 0.5))
    out = rng.standard_normal((rows, k))
    out *= factor
    return out


# A parameter has one meaning in all recipes, except c: X10's slope, X13's shift.
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
    "c": (0.0, 1e6),
    "spread": (1.0, 1e16),
}


@dataclass(frozen=True)
class Distribution:
    """A named recipe for operand values.

    Attributes:
        name: ``X1``; with the parameters that are not at their default, ``X14(spread=1e7)``.
        title: One line of description.
        parameters: All parameters and values, in canonical order.
        realistic: Whether it counts in the default error; only with default parameters.
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
            UnknownNameError: The parameter is unknown, or the value is out of range.
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
    """A distribution with functions that draw operands, learned from recorded ones.

    Attributes:
        digest: Digest of the learned data, in the place of parameters.
        rows: Function of rows, k and seed to x ``[rows, k]``, float64 on the CPU.
        weight: Function of n, k and seed to a weight ``[n, k]``.
    """

    digest: str
    rows: Callable[[int, int, int], Tensor]
    weight: Callable[[int, int, int], Tensor]

    def with_parameters(self, **overrides: float) -> Distribution:
        """Not possible: a learned distribution has no parameters.

        Raises:
            UnknownNameError: Always.
        """
        raise UnknownNameError(f"distribution {self.name} was learned; it has no parameters")


_LEARNED: dict[str, LearnedDistribution] = {}


@contextlib.contextmanager
def learned(*distributions: LearnedDistribution) -> Iterator[None]:
    """Register learned distributions inside the context.

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


def distribution_named(text: str) -> Distribution:
    """The distribution of a name, with parameters or learned.

    Raises:
        UnknownNameError: The distribution or a parameter is unknown, or the text is malformed.
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


def draw_rows(distribution: Distribution, rows: int, k: int, seed: int) -> Tensor:
    """Draw x, ``[rows, k]`` float64.

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
    """Draw the weight, ``[n, k]`` float64: N(0, 1/k); matrix-normal for X2, shifted for X13.

    Raises:
        ShapeError: A size is below 1.
    """
    _check_sizes(n=n, k=k)
    if isinstance(distribution, LearnedDistribution):
        return distribution.weight(n, k, seed)
    rng = _stream(distribution, seed, operand=1)
    parameters = dict(distribution.parameters)
    if distribution.base == "X2":
        weight = matrix_normal(rng, n, k, parameters)
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


_ROWS: dict[str, Recipe] = {}
DISTRIBUTIONS: dict[str, Distribution] = {}


def _define(name: str, title: str, recipe: Recipe, parameters: dict[str, float]) -> None:
    realistic = name in REALISTIC_DISTRIBUTIONS
    _ROWS[name] = recipe
    DISTRIBUTIONS[name] = Distribution(name, title, tuple(parameters.items()), realistic)


def _rows_of(population: Population) -> Recipe:
    return lambda rng, rows, k, p: _in_chunks(rows, k, population(rng, k, p))


_CORRELATED = {"a": 1.0, "mean": 0.5}
_NORMED = _CORRELATED | {"s": 0.5}
_TABLES = {"alpha": 1.05, "d": 128.0}
_OUTLIERS = {"r": 0.01, "scale": 30.0, "nu": 4.0, "p_spike": 1e-5}
_define("X1", "white Gaussian: the control", x1, {})
_define("X2", "correlated Gaussian with a mean: learned activations",
        _rows_of(_correlated), _CORRELATED)  # fmt: skip
_define("X3", "layer-normed, learned gains: inputs of FMB, HSTU and heads",
        _rows_of(_normed), _NORMED)  # fmt: skip
_define("X4", "block-normed, hard-swish: inputs of layers modded as in LoKA",
        _rows_of(x4), _CORRELATED | {"block": 256.0})  # fmt: skip
_define("X5", "concatenated embeddings from tables of unequal size", x5, _TABLES)
_define("X6", "concatenated embeddings with missing features and empty samples",
        x6, _TABLES | {"p_block": 0.5, "p_row": 0.01})  # fmt: skip
_define("X7", "dense features: log1p of skewed counts, some of them missing",
        _rows_of(x7), {"mu": 0.0, "sigma": 2.0, "p_zero": 0.3})  # fmt: skip
_define("X8", "ReLU outputs: hidden layers of an MLP", _rows_of(x8), _CORRELATED)
_define("X9", "products: an HSTU gate, then DCN cross layers",
        _rows_of(x9), _CORRELATED | {"rho": 0.5, "depth": 1.0})  # fmt: skip
_define("X10", "gates and masks, between 0 and 1", _rows_of(_gate), _CORRELATED | {"c": 4.0})
_define("X11", "outlier columns and spikes: stress", x11, _NORMED | _OUTLIERS)
_define("X12", "gradients: two-level rows, spikes, ReLU masks",
        _rows_of(x12), {"ctr": 0.03, "batch": 32768.0})  # fmt: skip
_define("X13", "gates into weights that share a component: outputs with a large mean",
        _rows_of(_gate), _CORRELATED | {"gate": 4.0, "c": 0.5})  # fmt: skip
_define("X14", "heterogeneous samples: rows of widely spread size", x14, {"spread": 1e5})
