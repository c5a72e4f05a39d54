"""The time model that belongs to the rows of a snapshot, if there is one.

A model predicts only beside the rows that it was fitted from. One that was fitted from others is
named in a warning, and not used.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lokakern.errors import DatabaseError, UnknownNameError
from lokakern.registry.storage.paths import model_folder
from lokakern.selection.prediction.model_file import Model, load
from lokakern.selection.prediction.transfer import PEAKS, transferred

if TYPE_CHECKING:
    from lokakern.registry.snapshot.snapshot import Snapshot
    from lokakern.types import Device

logger = logging.getLogger("lokakern")
FEWEST_TIMES = 200  # of a device, from which its own rows are to be fitted


def is_on() -> bool:
    """Whether predictions are on: they are unless LOKAKERN_PREDICT is 0.

    Raises:
        UnknownNameError: LOKAKERN_PREDICT is neither 0 nor 1.
    """
    given = os.environ.get("LOKAKERN_PREDICT", "1")
    if given not in ("0", "1"):
        raise UnknownNameError(f"LOKAKERN_PREDICT is {given!r}; expected 0 (off) or 1 (on)")
    return given == "1"


def model_path(database: Path, device: Device) -> Path:
    """The place of the model that is fitted from a database."""
    name = re.sub(r"[^a-z0-9]+", "-", device.product.lower()).strip("-")
    return model_folder(database) / f"{name}.json"


def model_for(facts: Snapshot, device: Device) -> Model | None:
    """The model of a device, beside the last database of a snapshot that has one.

    A user's database comes after the shipped ones. Without one, the model of another device of the
    architecture is transferred, for a device with few times.
    """
    for source in reversed(facts.sources):
        place = model_path(Path(source), device)
        if not place.is_file():
            continue
        try:
            model = load(place)
        except DatabaseError as error:
            logger.warning("no predictions from it: %s", error)
            continue
        if model.device != device:
            logger.warning(
                "model %s is of %s, not of %s, and is not used: fit it again with "
                "`python -m lokakern.bench fit`", place, model.device, device,
            )  # fmt: skip
        elif not _is_of(model, facts, source):
            logger.warning(
                "model %s was fitted from other rows than those of %s, and is not used: fit it "
                "again with `python -m lokakern.bench fit`", place, source,
            )  # fmt: skip
        else:
            return model
    return _transferred(facts, device)


def _transferred(facts: Snapshot, device: Device) -> Model | None:
    """The model of another device, for one with few measurements."""
    if device.product not in PEAKS or facts.timing_count(device) >= FEWEST_TIMES:
        return None
    for source in reversed(facts.sources):
        for place in sorted(model_folder(Path(source)).glob("*.json")):
            if not place.is_file():
                continue
            try:
                model = load(place)
            except DatabaseError as error:
                logger.warning("no predictions from it: %s", error)
                continue
            found = transferred(model, device)
            if found is not None and _is_of(model, facts, source):
                return found
    return None


def _is_of(model: Model, facts: Snapshot, source: str) -> bool:
    """Whether a model was fitted from all rows of a snapshot, or from those of one file of it."""
    from lokakern.registry.snapshot.loading import load_snapshot

    digest = model.content.rows_digest
    return facts.keys_digest == digest or (
        len(facts.sources) > 1 and load_snapshot([source]).keys_digest == digest
    )
