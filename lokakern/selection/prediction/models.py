"""The time model that belongs to the rows of a snapshot, if there is one.

A model predicts only beside the rows that it was fitted from. One that was fitted from others is
named in a warning, and not used.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
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
    return model_folder(database) / _file_name(device)


def _file_name(device: Device) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", device.product.lower()).strip("-")
    return f"{name}.json"


def model_for(facts: Snapshot, device: Device) -> Model | None:
    """The model of a device, beside the last database of a snapshot that has one.

    A user's database comes after the shipped ones, which share a folder of models. Without one, the
    model of another device of the architecture is transferred.
    """
    for folder, sources in _folders(facts).items():
        place = folder / _file_name(device)
        model = _read(place)
        if model is None:
            continue
        if model.device != device:
            logger.warning(
                "model %s is of %s, not of %s, and is not used: fit it again with "
                "`python -m lokakern.bench fit`", place, model.device, device,
            )  # fmt: skip
        elif not _is_of(model, facts, sources):
            logger.warning(
                "model %s was fitted from other rows than those of %s, and is not used: fit it "
                "again with `python -m lokakern.bench fit`", place, " or ".join(sources),
            )  # fmt: skip
        else:
            return model
    return _transferred(facts, device)


def _transferred(facts: Snapshot, device: Device) -> Model | None:
    """The model of another device, by the peaks of both."""
    if device.product not in PEAKS:
        return None
    for folder, sources in _folders(facts).items():
        for place in sorted(folder.glob("*.json")):
            model = _read(place)
            found = transferred(model, device) if model else None
            if model and found and _is_of(model, facts, sources):
                return found
    return None


def _folders(facts: Snapshot) -> dict[Path, list[str]]:
    """Folders of models, those of the last databases first, with the databases of each."""
    found: dict[Path, list[str]] = {}
    for source in reversed(facts.sources):
        found.setdefault(model_folder(Path(source)), []).append(source)
    return found


def _read(place: Path) -> Model | None:
    """The model in a file, if there is one that can be read."""
    try:
        return load(place) if place.is_file() else None
    except DatabaseError as error:
        logger.warning("no predictions from it: %s", error)
        return None


def _is_of(model: Model, facts: Snapshot, sources: Sequence[str]) -> bool:
    """Whether a model was fitted from all rows of a snapshot, or from those of one file of it."""
    from lokakern.registry.snapshot.loading import load_snapshot

    digest = model.content.rows_digest
    return (
        digest == facts.digest
        or facts.has_part(digest)
        or (
            len(facts.sources) > 1
            and any(load_snapshot([source]).digest == digest for source in sources)
        )
    )
