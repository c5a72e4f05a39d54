"""What `lokakern.workloads.distributions` draws: transforms, populations, and one recipe per name.

A recipe takes a generator, rows, k and its parameters, and returns x ``[rows, k]`` in float64. It
draws a *population* first (spectrum, mean, gains, tables), then rows that are independent given it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Parameters = Mapping[str, float]
Sampler = Callable[[int], Array]  # count -> [count, k], the next independent rows of a population
Recipe = Callable[[np.random.Generator, int, int, Parameters], Array]

NORM_EPSILON = 1e-5
CHUNK_ELEMENTS = 1 << 18  # 2 MiB of float64 stay in the L2 cache through the steps of a recipe
LOW_RANK = 32  # of DCN's matrix, and of the strong directions of gradients
NOISE = 0.5  # of gradients, beside directions of unit variance
ZIPF_SUPPORT = 1 << 16  # an id beyond has under 1e-6 of the mass: it would hardly ever repeat
# Of layers as torch initializes them: a Linear multiplies second moments by 1/3, a ReLU by 1/2.
LINEAR_GAIN = 1.0 / math.sqrt(3.0)
MLP_GAIN = 1.0 / math.sqrt(18.0)  # Linear, ReLU, Linear
SPIKE_SHARE = 1e-4  # of gradient coordinates; Clippy: "drastic changes in a few coordinates"
SPIKE_FACTOR = 30.0
EXPONENT_LIMIT = 36.0  # sigmoid(37) is 1 in float64, and a gate never closes or opens fully
LARGEST_TABLE = 4e7  # rows of the largest embedding table of MLPerf DLRM-DCNv2
# Ids pooled per feature, MLPerf DLRM-DCNv2.
HOT_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


def _in_chunks(rows: int, k: int, sampler: Sampler) -> Array:
    """Fill ``[rows, k]`` a few rows at a time: temporaries stay in the cache and small."""
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
    """The same for a matrix of low rank: few equal eigenvalues, with a mean of 1, ``[k]``."""
    rank = min(LOW_RANK, k)
    return np.where(np.arange(k) < rank, k / rank, 0.0)


def _direction(rng: np.random.Generator, size: int) -> Array:
    """``[size]`` random values with a root mean square of exactly 1."""
    values = rng.standard_normal(size)
    return values / max(math.sqrt(float(np.mean(values * values))), 1e-300)


def _correlated(rng: np.random.Generator, k: int, p: Parameters) -> Sampler:
    """X2's population: ``mu + z L^T``; the norm of mu is ``mean`` times that of the deviation."""
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
    for start in range(0, k, step):  # the other axis, as contiguous rows of a small transpose
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


def x2(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """Correlated, with a mean."""
    return _in_chunks(rows, k, _correlated(rng, k, p))


def _normed(rng: np.random.Generator, k: int, p: Parameters) -> Sampler:
    source = _correlated(rng, k, p)
    gain = np.exp(p["s"] * rng.standard_normal(k))
    shift = 0.1 * rng.standard_normal(k)
    return lambda rows: _layer_norm(source(rows)) * gain + shift


def x3(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """``LN(X2) * gain + shift``, by row; gains lognormal(0, s), shifts N(0, 0.1)."""
    return _in_chunks(rows, k, _normed(rng, k, p))


def x4(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """``hardswish(BlockNorm(X2))``; BlockNorm is a parameter-free RMSNorm of blocks of columns."""
    source = _correlated(rng, k, p)

    def rows_of(count: int) -> Array:
        x = _block_norm(source(count), min(int(p["block"]), k))
        x *= np.clip(x + 3.0, 0.0, 6.0) / 6.0  # hard-swish
        return x

    return _in_chunks(rows, k, rows_of)


def x5(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """Blocks of d columns: rows of tables of V rows, U(+-sqrt(hot / V)), ids by Zipf(alpha)."""
    out = np.empty((rows, k))
    width = min(int(p["d"]), k)
    blocks = -(-k // width)
    # Before anything that depends on the number of rows, so that a seed always means these tables.
    sizes = np.exp(rng.uniform(math.log(3.0), math.log(LARGEST_TABLE), blocks))
    limits = np.sqrt(rng.choice(np.array(HOT_SIZES), blocks) / sizes)
    for block in range(blocks):
        part = out[:, block * width : (block + 1) * width]
        ids = _zipf(rng, rows, int(sizes[block]), p["alpha"])
        # Only the table rows that occur are drawn: a table has up to 4e7 of them.
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


def x7(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """``log1p(lognormal(mu, sigma))``, a share of it zero; not centered."""

    def rows_of(count: int) -> Array:
        x = rng.standard_normal((count, k))
        x *= p["sigma"]
        x += p["mu"]
        x = np.log1p(np.exp(x, out=x), out=x)
        np.copyto(x, 0.0, where=rng.random((count, k), dtype=np.float32) < p["p_zero"])
        return x

    return _in_chunks(rows, k, rows_of)


def x8(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """``relu(X2)``."""
    source = _correlated(rng, k, p)
    return _in_chunks(rows, k, lambda count: np.maximum(source(count), 0.0))


def x9(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """``x0 = silu(a) * LN(b)`` of correlated a, b; then depth times ``x <- x0 * (W x + b) + x``."""
    source = _correlated(rng, k, p)
    independent = math.sqrt(1.0 - p["rho"] ** 2)
    # W in transforms, because matrix products of a few rows would each wake all of BLAS's threads,
    # in every thread of a pool that draws.
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

    return _in_chunks(rows, k, rows_of)


def _gate(rng: np.random.Generator, rows: int, k: int, p: Parameters, slope: float) -> Array:
    source = _correlated(rng, k, p)
    hidden = _correlated(rng, k, p)  # stands for MLP(X): as correlated, in directions of its own

    def rows_of(count: int) -> Array:
        x = source(count)
        x *= hidden(count)
        x *= slope * MLP_GAIN
        return _sigmoid(x)

    return _in_chunks(rows, k, rows_of)


def x10(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """``sigmoid(c * X2 * MLP(X2))``."""
    return _gate(rng, rows, k, p, p["c"])


def x11(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """X3, a share r of its columns times scale, and a few coordinates times scale * Student-t."""
    out = _in_chunks(rows, k, _normed(rng, k, p))
    wide = rng.permutation(k)[: math.ceil(p["r"] * k)]
    out[:, wide] *= p["scale"]
    spikes = _random_places(rng, out, p["p_spike"])
    out.reshape(-1)[spikes] *= p["scale"] * rng.standard_t(p["nu"], spikes.size)
    return out


def x12(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """``(predicted - clicked) / batch * direction``: BCE through a ReLU; directions of low rank."""
    directions = _Rotation.draw(rng, _low_rank(k) + NOISE**2)
    active = rng.random(k, dtype=np.float32)  # share of samples for which the ReLU lets through
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

    return _in_chunks(rows, k, rows_of)


def x13(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """The rows of X10; its weight is what differs."""
    return _gate(rng, rows, k, p, p["gate"])


def x14(rng: np.random.Generator, rows: int, k: int, p: Parameters) -> Array:
    """White rows times a factor, log-uniform over the spread."""
    # Centered on 1 in the logarithm, so that the widest spread stays inside float32.
    factor = np.exp(math.log(p["spread"]) * (rng.random((rows, 1)) - 0.5))
    out = rng.standard_normal((rows, k))
    out *= factor
    return out
