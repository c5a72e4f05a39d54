"""What sites of a conversion save of their inputs for the gradients of their weights, in bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from lokakern.nn.module_scan import shape_of
from lokakern.nn.routed_matmul import segments_of, traced_route
from lokakern.nn.saved_inputs import saved_bytes, saved_form

_MANY = 2**14  # samples, by which bytes for each sample are computed
_ALIGNMENT = 16  # divides each m that is asked about: some routes have other kernels elsewhere
READERS = "eager calls save one FP8 copy for each reader of an input, compiled code one for all"


class KeptInput(NamedTuple):
    """A site whose weight is trained.

    Attributes:
        site: Its name.
        k: Columns of its input, padding included.
        route: Of the gradient of its weight, as compiled models have it.
        is_on: Whether its input is saved in FP8 where it can be.
    """

    site: str
    k: int
    route: str
    is_on: bool

    def row(self, m: int) -> dict[str, Any]:
        """Bytes at m rows as plain data, see `Conversion.saved_inputs`."""
        form = saved_form(self.route, m) if self.route else ""
        before, after = saved_bytes("", m, self.k), saved_bytes(form, m, self.k)
        return {
            "site": self.site, "m": m, "k": self.k, "scales": form, "bytes_in_16_bits": before,
            "bytes_in_fp8": after, "bytes": after if self.is_on else before,
        }  # fmt: skip

    @property
    def per_sample(self) -> tuple[float, float]:
        """Bytes for each of many samples in 16 bits, and as saved where there is a kernel."""
        if not self.is_on:
            return (saved_bytes("", _MANY, self.k) / _MANY,) * 2
        starts = (start for start, has_kernel in segments_of(self.route)[0] if has_kernel)
        at = (max(start, _ALIGNMENT) for start in starts)
        form = next((form for m in at if (form := saved_form(self.route, m))), "")
        before, after = (saved_bytes(x, _MANY, self.k) / _MANY for x in ("", form))
        return before, after

    @property
    def words(self) -> str:
        """Bytes for each sample."""
        before, after = self.per_sample
        if after == before:
            return f"{before:.0f} bytes of each sample are saved in 16 bits"
        return f"{after:.0f} bytes of each sample are saved, where 16 bits take {before:.0f}"


def kept_inputs(sites: Iterable[Any], saving: Collection[str]) -> list[KeptInput]:
    """Of sites whose weight is trained, with the routes of a conversion.

    Args:
        sites: Sites of the conversion.
        saving: Names of those whose routes say to save the input in FP8.
    """
    found = []
    for site in sites:
        n, k, _, weight = shape_of(site.module)
        if weight.requires_grad and not site.module.is_mixing:
            route = next((r.text for r in site.routes if r.gemm == "grad_weight"), "")
            # Products of vectors are left to torch.
            route = traced_route(route) if min(n, k) > 1 else ""
            found.append(KeptInput(site.name, k, route, site.name in saving))
    return found


def total(found: Iterable[KeptInput], why_off: str) -> str:
    """How many inputs are saved in FP8, and the bytes of all for each sample.

    Args:
        found: What sites save.
        why_off: Why none is saved in FP8, or "".
    """
    if why_off:
        return f"inputs saved in 16 bits: {why_off}"
    pairs = [x.per_sample for x in found]
    count = sum(after < before for before, after in pairs)
    before, after = (sum(x) for x in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    inputs = "1 input" if count == 1 else f"{count} inputs"
    return (
        f"{inputs} saved in FP8: {before:.0f} -> {after:.0f} bytes per sample where each has one "
        "reader"
    )
