"""Formats that a GPU which nobody measured would admit for each product: errors, and no times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lokakern.bench.fp8_gain.products import Product
from lokakern.types import Device, ErrorBudget
from lokakern.what_if.devices import formats_of
from lokakern.what_if.errors import SUMS, Bounds, bounds


@dataclass(frozen=True, slots=True)
class Row:
    """One product.

    Attributes:
        product: The product.
        found: Errors of each format of the device.
        why_not: Why a format is not within the budget; "" if it is.
    """

    product: Product
    found: dict[str, Bounds]
    why_not: dict[str, str]

    @property
    def within(self) -> list[str]:
        return [name for name, why in self.why_not.items() if not why]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """All products."""

    rows: tuple[Row, ...]
    device: Device
    budget: ErrorBudget

    def total(self) -> dict[str, dict[str, float]]:
        """For each format the products within the budget, and their share of the FLOPs."""
        every = sum(row.product.flops for row in self.rows)
        return {
            name: {
                "within": sum(name in row.within for row in self.rows),
                "flops_share": sum(r.product.flops for r in self.rows if name in r.within) / every,
            }
            for name in self.rows[0].found
        }

    def words(self) -> str:
        """What these are, and the formats that no product admits."""
        none = [name for name, sums in self.total().items() if not sums["within"]]
        lines = [f"Emulated errors, no times: nobody has measured {self.device}.", *self.notes()]
        if none:
            lines.append(f"Within {self.budget} for no product: {', '.join(none)}.")
        return " ".join(lines)

    def notes(self) -> list[str]:
        """Where errors are those of another k."""
        least, *_, most = SUMS
        sums = [row.product.k for row in self.rows]
        notes = [f"Below k = {least} errors are those at {least}."] if min(sums) < least else []
        if max(sums) > most:
            notes.append(f"Beyond k = {most} errors are those at {most}, and may be larger.")
        return notes

    def facts(self) -> list[dict[str, Any]]:
        """Rows as JSON has them."""
        return [
            {
                "layer": row.product.layer, "m": row.product.m, "n": row.product.n,
                "k": row.product.k, "count": row.product.count,
                "formats": {
                    name: {"within": not row.why_not[name], "why": row.why_not[name],
                           "worst_on": found.worst, "errors": found.errors}
                    for name, found in row.found.items()
                },
            }
            for row in self.rows
        ]  # fmt: skip

    def cells(self) -> list[dict[str, Any]]:
        """Rows as a table has them: the row_err of each format."""
        return [
            {
                "layer": row.product.layer,
                "m,n,k": f"{row.product.m},{row.product.n},{row.product.k}",
                "within the budget": ", ".join(row.within) or "none",
                **{name: found.errors.get("row_err") for name, found in row.found.items()},
            }
            for row in self.rows
        ]


def what_if(
    products: Sequence[Product],
    device: Device,
    budget: ErrorBudget,
    distributions: tuple[str, ...] | None = None,
) -> WhatIf:
    """Errors of the outputs of products in the formats of a device.

    Args:
        products: The products.
        device: One of `lokakern.what_if.devices`.
        budget: Largest accepted error.
        distributions: Those of the errors; None takes a product's own, or all realistic.

    Raises:
        UnknownNameError: The errors of a distribution were not emulated.
    """
    rows = []
    for product in products:
        judged = distributions or product.distributions.get("output")
        found = {f.name: bounds(f.name, product.k, judged) for f in formats_of(device)}
        why_not = {name: error.why_not(budget) for name, error in found.items()}
        rows.append(Row(product, found, why_not))
    return WhatIf(tuple(rows), device, budget)
