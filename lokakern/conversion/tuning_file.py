"""The file of a tuning: which products of a model gained in place, in JSON, read as untrusted.

The file names each product with the route that was timed, and each chain with its plan, and says
whether it is kept. Applied to a conversion that chose the same routes and plans, the worst that a
file can do is not to quantize. A file for another model, device or version is refused, because what
gained there may lose here. What a limit of the loss decided follows from times in the database and
from errors, which emulated kernels have, too: a file with nothing else names the device that the
conversion was for, wherever it ran.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct

from lokakern.conversion.chain_spans import ChainSites, chain_texts, words_of
from lokakern.device import current_device
from lokakern.errors import ChoicesError
from lokakern.functional.norm_gradient import KERNEL as GRADIENT_KERNEL
from lokakern.nn.chain_plan import read_plan
from lokakern.nn.crossed_gradients import KERNEL as CROSS_KERNEL
from lokakern.nn.module_scan import shape_of
from lokakern.nn.rectified import KERNEL as RELU_KERNEL
from lokakern.nn.routed_matmul import PLAIN, read_route
from lokakern.registry.register import KERNELS
from lokakern.registry.schema.records import now_utc_ms
from lokakern.selection.rank_agreement import readable_digest
from lokakern.types import Device
from lokakern.version import __version__

if TYPE_CHECKING:
    from lokakern.conversion.convert import Conversion

FORMAT, VERSION = "lokakern tuning", 5
LARGEST_FILE_BYTES = 16 * 2**20  # 10 000 layers
_REMEDY = "tune or limit again, and save"

_Name = Annotated[str, Meta(max_length=1000)]
_Text = Annotated[str, Meta(max_length=20_000)]
_Axis = Annotated[int, Meta(ge=0, le=2**48)]
_Positive = Annotated[float, Meta(gt=0, lt=1e6)]


class Product(Struct, forbid_unknown_fields=True, frozen=True):
    """A product of a site: its name, its route, whether the route is kept, or what gave it up."""

    gemm: _Name
    route: _Text
    is_kept: bool
    is_over_limit: bool = False  # of the loss


class TunedChain(Struct, forbid_unknown_fields=True, frozen=True):
    """A chain: the names of its layers, its plan, and whether it is kept."""

    sites: Annotated[list[_Name], Meta(max_length=1000)]
    plan: Annotated[str, Meta(max_length=200_000)]
    is_kept: bool
    is_over_limit: bool = False  # of the loss


class TunedSite(Struct, forbid_unknown_fields=True, frozen=True):
    """A converted layer; ``rows`` are those of its inputs in the step that was timed."""

    name: _Name
    n: _Axis
    k: _Axis
    has_bias: bool
    dtype: _Name
    rows: Annotated[list[_Axis], Meta(max_length=1000)]
    products: Annotated[list[Product], Meta(max_length=3)]


class TuningFile(Struct, forbid_unknown_fields=True, frozen=True):
    """The content of a file.

    ``gain`` is the step's, with its interval; 1 where nothing is kept. ``is_timed`` says whether
    steps were timed: then ``device`` is the model's, else that of the times in the database, and
    ``torch`` has no local part such as "+cpu". ``is_emulated``: whether a limit of the loss ran
    emulations of kernels.
    """

    format: str
    version: int
    lokakern: _Name
    torch: _Name
    tuned_utc_ms: Annotated[int, Meta(ge=0, le=1 << 45)]
    device: dict[_Name, _Name | int]
    is_inference: bool
    is_graph: bool
    gain: tuple[_Positive, _Positive, _Positive]
    kernels: dict[_Name, _Name]
    sites: Annotated[list[TunedSite], Meta(max_length=100_000)]
    chains: Annotated[list[TunedChain], Meta(max_length=100_000)]
    has_relus: bool  # relus in products, gradients behind layers in one op, forms of layers
    is_timed: bool
    is_emulated: bool
    digest: _Name = ""

    @property
    def dropped(self) -> set[tuple[str, str]]:
        """Products that are not kept, as site and gemm."""
        return {(s.name, p.gemm) for s in self.sites for p in s.products if not p.is_kept}

    @property
    def dropped_chains(self) -> set[ChainSites]:
        """Chains that are not kept, as names of their layers."""
        return {tuple(chain.sites) for chain in self.chains if not chain.is_kept}

    @property
    def over_limit(self) -> set[tuple[str, str]]:
        """Of the products that are not kept those that a limit of the loss gave up."""
        return {(s.name, p.gemm) for s in self.sites for p in s.products if p.is_over_limit}

    @property
    def over_limit_chains(self) -> frozenset[ChainSites]:
        """The same of chains."""
        return frozenset(tuple(chain.sites) for chain in self.chains if chain.is_over_limit)


def file_of(
    conversion: Conversion,
    routes: Mapping[str, tuple[str, ...]],
    rows: Mapping[str, list[int]],
    dropped: set[tuple[str, str]],
    gain: tuple[float, float, float],
    is_graph: bool,
    dropped_chains: Collection[ChainSites] = (),
    has_relus: bool = True,
    tried: Iterable[str] = (),
    is_timed: bool = True,
    is_emulated: bool = False,
) -> TuningFile:
    """The content for a conversion whose routes before the tuning are these.

    ``tried`` are kernels that were timed besides those of routes and chains.
    """
    over = conversion.over_limit
    sites, gemms = [], {s.name: [r.gemm for r in s.routes] for s in conversion.sites.values()}
    for name, texts in routes.items():
        n, k, has_bias, weight = shape_of(conversion.sites[name].module)
        products = [
            Product(gemm, text, (name, gemm) not in {*dropped, *over}, (name, gemm) in over)
            for gemm, text in zip(gemms[name], texts, strict=True)
        ]
        half = conversion.dtype_of(conversion.sites[name].module)
        words = [weight.dtype, half] if half is torch.float16 else [weight.dtype]
        dtype = " in ".join(str(x).removeprefix("torch.") for x in dict.fromkeys(words))
        sites.append(TunedSite(name, n, k, has_bias, dtype, rows.get(name, []), products))
    plans = chain_texts(conversion.spans)
    over_chains = conversion.over_limit_chains
    chains = [
        TunedChain([*x], text, x not in {*dropped_chains, *over_chains}, x in over_chains)
        for x, text in plans.items()
    ]
    every = {text for texts in routes.values() for text in texts}
    found = TuningFile(
        FORMAT, VERSION, __version__,
        str(torch.__version__) if is_timed else str(torch.__version__).partition("+")[0],
        now_utc_ms(), asdict(_device(conversion, is_timed)), conversion.is_inference, is_graph,
        gain, _kernels(every, plans.values(), tried), sites, chains, has_relus, is_timed,
        is_emulated,
    )  # fmt: skip
    return msgspec.structs.replace(found, digest=_digest(found))


def write(file: TuningFile, path: str | os.PathLike[str]) -> None:
    """Write a file, replacing it atomically.

    Raises:
        ChoicesError: It cannot be written, or would be too large to be read.
    """
    from lokakern.selection.frozen.write import write_atomically

    content = msgspec.json.format(msgspec.json.encode(file), indent=1)
    parse(content, os.fspath(path))  # a file that would be refused is not written
    write_atomically(Path(path), content, "save")


def read(path: str | os.PathLike[str]) -> TuningFile:
    """Read a file of `write`.

    Raises:
        ChoicesError: It cannot be read, or is damaged or of another format or version.
    """
    shown = os.fspath(path)
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # reading a pipe may never end
            raise ChoicesError(f"tuning {shown}: it is not a regular file; {_REMEDY}")
        with Path(path).open("rb") as file:
            return parse(file.read(LARGEST_FILE_BYTES + 1), shown)
    except (OSError, ValueError) as error:  # a name may hold a NUL
        raise ChoicesError(f"tuning {shown} cannot be read: {error}; {_REMEDY}") from None


def parse(content: bytes, path: str) -> TuningFile:
    """Read the content of a file.

    Raises:
        ChoicesError: As `read`.
    """
    if len(content) > LARGEST_FILE_BYTES:
        raise ChoicesError(f"tuning {path}: it has more than {LARGEST_FILE_BYTES >> 20} MiB")
    try:
        kind = msgspec.json.decode(content, type=_Kind)
        if kind.format != FORMAT or kind.version != VERSION:
            raise ChoicesError(
                f"tuning {path}: it is {kind.format!r} of version {kind.version}, and this "
                f"lokakern reads {FORMAT!r} of version {VERSION}; {_REMEDY}"[:400]
            )
        file = msgspec.json.decode(content, type=TuningFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ChoicesError(f"tuning {path}: {str(error)[:200]}; {_REMEDY}") from None
    if file.digest != _digest(file):
        raise ChoicesError(f"tuning {path}: it was changed since it was written; {_REMEDY}")
    words = [text for s in file.sites for text in (s.name, *(p.gemm for p in s.products))]
    words += [name for chain in file.chains for name in chain.sites]
    if not all(map(str.isprintable, words)) or not all(chain.sites for chain in file.chains):
        raise ChoicesError(f"tuning {path}: a name cannot be printed; {_REMEDY}")
    return file


def check(file: TuningFile, conversion: Conversion, path: str) -> None:
    """Check that a file is for this conversion, here.

    Raises:
        ChoicesError: It is for another model, device, version or choice of kernels.
    """
    routes = {s.name: tuple(r.text for r in s.routes) for s in conversion.sites.values()}
    # Files of before have no digests of these kernels.
    tried = [name for name in (RELU_KERNEL, GRADIENT_KERNEL, CROSS_KERNEL) if name in file.kernels]
    here = file_of(
        conversion, routes, {}, set(), (1.0, 1.0, 1.0), file.is_graph, tried=tried,
        is_timed=file.is_timed,
    )  # fmt: skip
    for name in ("device", "torch", "lokakern", "is_inference"):
        _check_equal(f"its {name}", getattr(file, name), getattr(here, name), path)
    tuned, found = ({s.name: s for s in x.sites} for x in (file, here))
    strange = sorted(tuned.keys() ^ found.keys())
    if strange or len(tuned) != len(file.sites):
        raise ChoicesError(
            f"tuning {path}: it is for another model, as {_shown(strange)} are not layers of both; "
            f"{_REMEDY}"
        )
    for name, site in found.items():
        other = tuned[name]
        for key in ("n", "k", "has_bias", "dtype"):
            _check_equal(f"{key} of {name}", getattr(other, key), getattr(site, key), path)
    then, now = (
        {(name, p.gemm): p.route for name, site in x.items() for p in site.products}
        for x in (tuned, found)
    )
    strange = [f"{x[0]}/{x[1]}" for x in dict.fromkeys((*now, *then)) if then.get(x) != now.get(x)]
    if strange:
        raise ChoicesError(
            f"tuning {path}: other kernels were chosen for {_few(strange)} when it was tuned, by "
            f"another budget, arguments of convert or measurements; {_REMEDY}"
        )
    plans, others = ({tuple(c.sites): c.plan for c in x.chains} for x in (here, file))
    for sites in dict.fromkeys((*plans, *others)):
        if plans.get(sites) != others.get(sites) or len(others) != len(file.chains):
            raise ChoicesError(
                f"tuning {path}: another chain was chosen for {words_of(sites)} when it was tuned, "
                f"by another budget, arguments of convert or measurements; {_REMEDY}"
            )
    # Last, because other routes take other kernels.
    every = sorted({*file.kernels, *here.kernels})
    changed = [name for name in every if file.kernels.get(name) != here.kernels.get(name)]
    if changed:
        digests = [x.kernels.get(changed[0], "absent")[:12] for x in (file, here)]
        raise ChoicesError(
            f"tuning {path}: other code was tuned of {_few(changed)}: the digest of {changed[0]} "
            f"is {digests[0]}, and here it is {digests[1]}; {_REMEDY}"
        )


class _Kind(Struct):
    """What a file of any version has."""

    format: str
    version: int


def _digest(file: TuningFile) -> str:
    """SHA-256, in hex, of all fields but the digest; detects damage."""
    content = msgspec.json.encode(msgspec.structs.replace(file, digest=""), order="sorted")
    return hashlib.sha256(content).hexdigest()


def _device(conversion: Conversion, is_timed: bool) -> Device:
    """The device of the model if its step was timed, else the one that kernels were chosen for."""
    weight = shape_of(next(iter(conversion.sites.values())).module)[3]
    if not is_timed:
        return conversion._device_for(weight)
    return current_device(weight.device.type, weight.device.index or 0)


def _kernels(routes: set[str], plans: Iterable[str], tried: Iterable[str]) -> dict[str, str]:
    """Digests of the kernels that routes, and plans of chains, name, and of others."""
    names = {
        name
        for route in routes
        if route != PLAIN
        for segments in read_route(route)[1:]
        for _, name in segments
        if name
    }
    for plan in plans:
        both = read_plan(plan)[1:]
        names |= {step.kernel for part in both for _, steps in part for step in steps}
    names.update(tried)
    return {name: readable_digest(KERNELS[name]) for name in sorted(names)}


def _check_equal(what: str, then: Any, now: Any, path: str) -> None:
    """Check that the file has what is here; of two dictionaries, show what differs."""
    if then == now:
        return
    if isinstance(then, dict) and isinstance(now, dict):
        then, now = (
            {key: x[key] for key in x if x[key] != y.get(key)}
            for x, y in ((then, now), (now, then))
        )
    raise ChoicesError(
        f"tuning {path}: {what} is {_shown(then)}, and here it is {_shown(now)}; {_REMEDY}"
    )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _shown(value: Any) -> str:
    return repr(value)[:120]
