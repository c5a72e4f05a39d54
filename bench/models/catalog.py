"""Models by name and size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lokakern.bench.models import dhen, dlrm, interformer, wukong
from lokakern.bench.models.blocks import ClickModel, Inputs
from lokakern.bench.models.zoo.catalog import ZOO
from lokakern.errors import UnknownNameError

# Rows of all tables: at published sizes most models fit on no GPU, and a dense optimizer step on
# every row would dominate the time. Production optimizers update only the rows of a batch.
FITTING_ROWS = 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """A model, its sizes, and its published batch size."""

    build: Callable[[Any], ClickModel]
    sizes: Mapping[str, Any]
    default_size: str
    samples: int


CATALOG = {
    "wukong": Entry(wukong.Wukong, wukong.SIZES, "small", 2048),
    "interformer": Entry(interformer.InterFormer, interformer.SIZES, "taobao", 2048),
    "dhen": Entry(dhen.DHEN, dhen.SIZES, "medium", 2048),
    "dlrm": Entry(dlrm.DLRM, dlrm.SIZES, "mlperf", 8192),
}


def config_named(name: str, size: str | None = None, most_rows: int | None = None) -> Any:
    """The config of a model.

    Args:
        name: The model.
        size: One of its sizes; None is the default.
        most_rows: Limit on the rows of a table; None is that of `fitting_rows`.

    Raises:
        UnknownNameError: The model or size is unknown.
    """
    if name not in CATALOG:
        raise UnknownNameError(
            f"model {name!r} is unknown; expected one of {', '.join(CATALOG)}; zoo, or one of its "
            f"models: {', '.join(ZOO)}"
        )
    entry = CATALOG[name]
    size = size or entry.default_size
    if size not in entry.sizes:
        raise UnknownNameError(
            f"{name} has no size {size!r}; expected one of {', '.join(entry.sizes)}"
        )
    config = entry.sizes[size]
    return replace(config, inputs=config.inputs.capped(most_rows or fitting_rows(config.inputs)))


def fitting_rows(inputs: Inputs) -> int:
    """The largest power of ten that limits all tables together to `FITTING_ROWS`."""
    caps = (10**power for power in range(9, 0, -1))
    return next((c for c in caps if sum(inputs.capped(c).rows) <= FITTING_ROWS), 1)
