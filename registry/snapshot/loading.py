"""Loading the data of dispatch: the shipped files, the user's, and its quarantine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lokakern.errors import DatabaseError
from lokakern.registry.quarantine import QuarantinedFile, QuarantinedRows, quarantined_files
from lokakern.registry.snapshot.facts import (
    Facts,
    Image,
    check_agreement,
    image_of,
    set_disputed_apart,
)
from lokakern.registry.snapshot.snapshot import Snapshot, without_garbage_collection
from lokakern.registry.storage import paths as places

if TYPE_CHECKING:
    from lokakern.registry.storage.merge import MergeReport
    from lokakern.registry.storage.reader import Source

logger = logging.getLogger("lokakern")


def load_snapshot(paths: Sequence[str | Path] | None = None) -> Snapshot:
    """Read database files into memory, merged by key.

    Args:
        paths: Files that must exist, without their quarantines; by default the shipped files and,
            if it exists, the user's with its quarantine.

    Raises:
        DatabaseError: A file cannot be read, or files contradict each other.
    """
    with without_garbage_collection():
        if paths is not None:
            return Snapshot(Facts([image_of(path) for path in paths]), [*map(str, paths)])
        user = places.user_database()
        # Before the database, into which it may be moved meanwhile: then both have it.
        quarantined = _read_quarantined(quarantined_files(user))
        paths = [*places.shipped_databases(), *([user] if user.exists() else [])]
        trusted = [image_of(path) for path in paths]
        quarantined = _agreeing(quarantined, trusted)
        others = [part for _, part in quarantined]
        # Before they are united, which takes from each what another has.
        rows = QuarantinedRows(trusted, others) if others else None
        sources = [str(path) for path in (*paths, *(found.path for found, _ in quarantined))]
        return Snapshot(Facts([*others, *trusted]), sources, rows)


class SweepDatabase:
    """The database of a sweep, read once for everything that is asked of it.

    Args:
        source: A file or URL; need not exist.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def collect_runs(self) -> MergeReport:
        """Merge the run files that dead processes left, see `run_files.collect_runs`."""
        from lokakern.registry.storage.run_files import collect_runs

        report = collect_runs(self.source)
        if any(report.added.values()):
            self.forget()
        return report

    def forget(self) -> None:
        """Read again next time, because rows were added."""
        for cached in ("_image", "own", "dispatched"):
            self.__dict__.pop(cached, None)

    @cached_property
    def _image(self) -> Image | None:
        from lokakern.registry.storage.reader import is_there

        return image_of(self.source) if is_there(self.source) else None

    @cached_property
    def own(self) -> Snapshot | None:
        """What the database holds; None if it does not exist."""
        return Snapshot(Facts([self._image]), [self._image.name]) if self._image else None

    @cached_property
    def dispatched(self) -> Snapshot:
        """What dispatch would read if the database were the user's: the shipped files, too."""
        with without_garbage_collection():
            images = [*map(image_of, places.shipped_databases())]
            images += [self._image] if self._image else []
            return Snapshot(Facts(images), [image.name for image in images])


def _read_quarantined(files: Sequence[QuarantinedFile]) -> list[tuple[QuarantinedFile, Image]]:
    found = []
    for one in files:
        try:
            found.append((one, image_of(one.path)))
        except DatabaseError as error:
            if one.path.exists():  # else it was verified meanwhile
                _leave_out(one, error)
    return found


def _agreeing(
    quarantined: Sequence[tuple[QuarantinedFile, Image]], trusted: Sequence[Image]
) -> list[tuple[QuarantinedFile, Image]]:
    """The quarantined files that agree with all trusted ones, without rows in which two differ.

    A foreign file must stop neither dispatch nor another foreign file.
    """
    found: list[tuple[QuarantinedFile, Image]] = []
    for one, part in quarantined:
        try:
            for known in trusted:
                check_agreement(known, part)
        except DatabaseError as error:
            _leave_out(one, error)
        else:
            found.append((one, part))
    of = {id(part): one for one, part in found}
    for one_part, other_part, count in set_disputed_apart([part for _, part in found]):
        one, other = of[id(one_part)], of[id(other_part)]
        logger.warning(
            "quarantined files %s (%s) and %s (%s) differ in %d rows of the same keys: "
            "one was edited, and these rows are left out; run `verify`, or remove one of the two",
            one.path, one.since, other.path, other.since, count,
        )  # fmt: skip
    return found


def _leave_out(quarantined: QuarantinedFile, error: DatabaseError) -> None:
    logger.warning(
        "quarantined file %s is left out: %s; remove it, and import it again",
        quarantined.path, error,
    )  # fmt: skip
