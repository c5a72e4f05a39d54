"""Chains that `convert` would run in a user's model, which times of single products leave out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lokakern.bench.fp8_gain.gain import Worth
from lokakern.bench.fp8_gain.products import Product, factory_named
from lokakern.conversion.chain_spans import words_of
from lokakern.conversion.convert import convert
from lokakern.errors import LokakernError
from lokakern.nn.chain_plan import steps_at

UNKNOWN = "Chains of layers, which convert may run in inference, are not among these products."


def chains_of_model(spec: str, products: Sequence[Product], found: Worth) -> list[str]:
    """A line for each chain at the rows of the products, with its gain over the layers alone.

    The model is converted on the meta device. One that needs values there is not, and a line says
    that its chains are left out.
    """
    rows: dict[str, set[int]] = {}
    for p in products:
        rows.setdefault(p.layer, set()).add(p.m)
    try:
        with torch.device("meta"):
            made = factory_named(spec)()
            model = made[0] if isinstance(made, tuple) else made
        if not all(p.is_meta for p in model.parameters()):
            return [UNKNOWN]
        handle = convert(
            model.eval(), found.budget, inference=True, device=found.device, regime=found.regime
        )
    except LokakernError:
        return []
    except Exception:  # whatever the user's code raises without values
        return [UNKNOWN]
    return [
        f"convert(inference=True) runs {words_of(sites)} as a chain at m="
        f"{', '.join(map(str, held))}, which is in no sum: {chain.why}."
        for span in handle.spans
        for chain in span.plan.chains
        if (sites := span.sites_of(chain))
        and (held := [m for m in sorted(rows.get(sites[0], ())) if steps_at(chain.text, m)])
    ]
