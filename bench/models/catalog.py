"""Models by name and size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lokakern.bench.models import dhen, dlrm, interformer, wukong
from lokakern.bench.models.blocks import ClickModel, Inputs
from lokakern.errors import UnknownNameError

# Of all tables: as published most fit on no GPU, and what an optimizer does to each row at each
# step would hide all else. Production's optimizers look at the rows of a batch only.
FITTING_ROWS = 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """A model, its sizes, and the batch that they were published with."""

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
    """The sizes of a model.

    Args:
        name: Of the model.
        size: Of its sizes; None: the default one.
        most_rows: No table has more; None: the power of ten with which all have `FITTING_ROWS`.

    Raises:
        UnknownNameError: There is no such model or size.
    """
    if name not in CATALOG:
        raise UnknownNameError(f"model {name!r} is unknown; expected one of {', '.join(CATALOG)}")
    entry = CATALOG[name]
    size = size or entry.default_size
    if size not in entry.sizes:
        raise UnknownNameError(
            f"{name} has no size {size!r}; expected one of {', '.join(entry.sizes)}"
        )
    config = entry.sizes[size]
    return replace(config, inputs=config.inputs.capped(most_rows or fitting_rows(config.inputs)))


def fitting_rows(inputs: Inputs) -> int:
    """The largest power of ten that, as the cap of each table, leaves `FITTING_ROWS` or fewer."""
    caps = (10**power for power in range(9, 0, -1))
    return next((c for c in caps if sum(inputs.capped(c).rows) <= FITTING_ROWS), 1)
