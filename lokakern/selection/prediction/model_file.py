"""The file of a fitted time model: JSON, validated, evaluated with NumPy alone.

A model holds, for each kernel, boosted trees that correct the base time of `features`, and the
quantiles of the speedups at sizes that the fit did not see; and `laws` of ops other than GEMMs. It
is data of a fit, never a fact: a measured time always comes first. It names the rows that it was
fitted from by their digest, and each kernel by its own, so that a kernel that changed since is not
predicted.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from lokakern.errors import DatabaseError
from lokakern.selection.prediction import features
from lokakern.selection.prediction.features import Rates
from lokakern.selection.prediction.laws import Fitted, Law, Laws, Spread, is_plain
from lokakern.types import Device, Problem

FORMAT: Literal["lokakern time model 1"] = "lokakern time model 1"
LARGEST_BYTES = 2_000_000
MOST_TREES, MOST_NODES, MOST_KERNELS = 2000, 127, 64
LEAF = 255  # in place of a feature
LARGEST_SUM = 300.0  # of leaves, one for each tree: exp of it is finite
_REMEDY = "fit it again with `python -m lokakern.bench fit`, or remove it"
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Finite = Annotated[float, Meta(ge=-50.0, le=50.0)]
_Size = Annotated[int, Meta(ge=1, le=2**40)]


class Trees(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Boosted trees of one kernel; nodes of all trees in depth-first order.

    Attributes:
        start: What the trees are added to.
        sizes: Number of nodes of each tree, uint8.
        feature: Feature of each node, uint8; `LEAF` of a leaf.
        value: Threshold of an inner node, which goes left up to it, or value of a leaf, float32.
        right: Distance to the right child, uint8; the left child is the next node.
    """

    start: _Finite
    sizes: bytes
    feature: bytes
    value: bytes
    right: bytes

    def __post_init__(self) -> None:
        sizes = np.frombuffer(self.sizes, np.uint8).astype(np.int64)
        feature = np.frombuffer(self.feature, np.uint8)
        right = np.frombuffer(self.right, np.uint8)
        if len(self.value) % 4 or not 1 <= len(sizes) <= MOST_TREES:
            raise ValueError(f"{len(sizes)} trees; expected 1 to {MOST_TREES} of float32 values")
        value = np.frombuffer(self.value, np.float32)
        if not len(feature) == len(right) == len(value) == int(sizes.sum()):
            raise ValueError("arrays of nodes have different lengths")
        if sizes.min() < 1 or sizes.max() > MOST_NODES or not np.isfinite(value).all():
            raise ValueError("a tree is empty or too large, or a value is not finite")
        inner = feature != LEAF
        if (feature[inner] >= features.FEATURES).any():
            raise ValueError(f"a feature is not below {features.FEATURES}")
        # Children come after their parent and within the tree, so that every walk ends.
        ends = np.repeat(np.cumsum(sizes), sizes)
        places = np.arange(len(feature))
        leaves = np.abs(np.where(inner, 0.0, value.astype(np.float64)))
        largest = abs(self.start) + np.maximum.reduceat(leaves, np.cumsum(sizes) - sizes).sum()
        if largest > LARGEST_SUM:
            raise ValueError(f"trees add up to {largest:g}; expected at most {LARGEST_SUM:g}")
        if (right[inner] < 2).any() or (places[inner] + right[inner] >= ends[inner]).any():
            raise ValueError("a child lies outside of its tree")


class KernelModel(Fitted, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model of one kernel.

    Attributes:
        trees: See `Trees`.
    """

    trees: Trees


class _File(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["lokakern time model 1"]
    features: int
    device: dict[str, str | int]
    regime: str
    rows_digest: _Digest
    rates: Rates
    least: tuple[_Size, _Size, _Size]
    largest: tuple[_Size, _Size, _Size]
    coverage: Annotated[float, Meta(gt=0, lt=1)]
    spreads: dict[str, Spread]
    kernels: Annotated[list[KernelModel], Meta(min_length=1, max_length=MOST_KERNELS)]
    laws: dict[str, Laws] = {}  # by op
    fitted_by: str

    def __post_init__(self) -> None:
        if self.features != features.VERSION:
            raise ValueError(f"features {self.features}; this lokakern has {features.VERSION}")
        if set(self.spreads) != set(KINDS):
            raise ValueError(f"spreads of {sorted(self.spreads)}; expected {sorted(KINDS)}")
        if len({kernel.name for kernel in self.kernels}) < len(self.kernels):
            raise ValueError("a kernel occurs twice")


# Kinds of problems, whose predictions differ in quality; `kind_of` says which is which.
KINDS = ("large", "small", "narrow", "unaligned")
_LARGE_FLOPS, _NARROW = 1e10, 128


def kind_of(m: NDArray[np.int64], n: int, k: int, *, along_m: bool) -> NDArray[np.intp]:
    """Places in `KINDS` of problems.

    Args:
        m: Rows of a, ``[count]``.
        n: Columns of b.
        k: Columns of a.
        along_m: Whether a is contiguous along m.
    """
    kind = np.where(2.0 * m * n * k >= _LARGE_FLOPS, 0, 1)
    if min(n, k) < _NARROW:
        kind = np.full_like(kind, 2)
    unaligned = (m % 8 != 0) if along_m else np.zeros(len(m), bool)
    if n % 8 or k % 8:
        unaligned = np.ones(len(m), bool)
    return np.where(unaligned, 3, kind)


class Forest:
    """Trees of one kernel, ready to be evaluated."""

    def __init__(self, trees: Trees) -> None:
        sizes = np.frombuffer(trees.sizes, np.uint8).astype(np.int64)
        self._roots = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        feature = np.frombuffer(trees.feature, np.uint8).astype(np.int64)
        self._is_leaf = feature == LEAF
        self._feature = np.where(self._is_leaf, 0, feature)
        self._value = np.frombuffer(trees.value, np.float32)
        self._right = np.frombuffer(trees.right, np.uint8).astype(np.int64)
        self._start = trees.start

    def __call__(self, described: NDArray[np.float32]) -> NDArray[np.float64]:
        """The sum of the trees for rows of features, ``[rows]``."""
        rows = np.arange(len(described))[:, None]
        at = np.tile(self._roots, (len(described), 1))
        while True:
            inner = ~self._is_leaf[at]
            if not inner.any():
                break
            goes_left = described[rows, self._feature[at]] <= self._value[at]
            at += np.where(inner, np.where(goes_left, 1, self._right[at]), 0)
        found: NDArray[np.float64] = self._value[at].sum(1, dtype=np.float64)
        return found + self._start


class Model:
    """A fitted time model of one device and regime.

    Attributes:
        path: Its file, as it is shown.
        digest: SHA-256 of the file, in hex.
        content: What the file holds.
        transferred_from: The product that it was fitted to, if that is another; else "".
    """

    def __init__(self, content: _File, path: str, digest: str, transferred_from: str = "") -> None:
        self.content, self.path, self.digest = content, path, digest
        self.transferred_from = transferred_from
        self._forests: dict[str, Forest] = {}

    @cached_property
    def device(self) -> Device:
        """The type of GPU whose times it predicts."""
        return msgspec.convert(self.content.device, Device)

    @cached_property
    def kernels(self) -> dict[str, KernelModel]:
        """Models of kernels by name."""
        return {kernel.name: kernel for kernel in self.content.kernels}

    def covers(self, m: int, n: int, k: int) -> bool:
        """Whether sizes are within those that its trees were fitted to."""
        sizes = zip((m, n, k), self.content.least, self.content.largest, strict=True)
        return all(low <= size <= high for size, low, high in sizes)

    def laws_at(self, problem: Problem) -> list[Law]:
        """The laws that describe a problem at some m; none where trees do."""
        laws = self.content.laws.get(problem.op)
        if laws is None or not is_plain(problem):
            return []
        n, k = problem.n, problem.k
        return [
            law for law in laws.kernels
            if law.covers(problem) and law.spread_at(law.largest[0], n, k) is not None
        ]  # fmt: skip

    def forest(self, name: str) -> Forest:
        """The trees of a kernel."""
        if name not in self._forests:
            self._forests[name] = Forest(self.kernels[name].trees)
        return self._forests[name]


def file_of(content: _File) -> bytes:
    """A model as it is written."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def load(path: Path) -> Model:
    """Read the file of a model.

    Raises:
        DatabaseError: It cannot be read, or is none.
    """
    try:
        with path.open("rb") as file:
            found = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise DatabaseError(f"model {str(path)!r} cannot be read: {error.strerror}") from error
    return parse(found, str(path))


def parse(found: bytes, name: str) -> Model:
    """A model from the bytes of its file; `name` is for errors.

    Raises:
        DatabaseError: They are none.
    """
    if len(found) > LARGEST_BYTES:
        raise DatabaseError(f"model {name!r} is larger than {LARGEST_BYTES} bytes; {_REMEDY}")
    try:
        model = Model(msgspec.json.decode(found, type=_File), name, _sha256(found))
        model.device  # noqa: B018 -- checks its fields
    except (ValueError, RecursionError) as error:
        raise DatabaseError(
            f"model {name!r}: it is invalid JSON or has an invalid field: {str(error)!r}; {_REMEDY}"
        ) from None
    return model


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


File = _File
