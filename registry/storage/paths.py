"""Where databases are: the shipped ones, and the user's."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_data_dir

from lokakern.errors import DatabaseError


def user_database() -> Path:
    """Where measurements made here go: $LOKAKERN_DB, or a file in the user's data folder.

    Raises:
        DatabaseError: $LOKAKERN_DB is a URL: dispatch reads files only.
    """
    given = os.environ.get("LOKAKERN_DB")
    if given and "://" in given:
        raise DatabaseError(
            "LOKAKERN_DB is a URL; expected a path: dispatch reads files, so merge the URL into "
            "one with lokakern.registry.storage.merge.merge"
        )
    return Path(given).expanduser() if given else user_folder() / "lokakern.sqlite"


def shipped_databases() -> list[Path]:
    """The database files that come with lokakern."""
    return sorted((Path(__file__).resolve().parents[1] / "databases").glob("*.sqlite"))


def model_folder(database: Path) -> Path:
    """The folder with time models that were fitted from a database."""
    if database in shipped_databases():
        return database.parents[1] / "models"
    return database.parent / "models"


def shipped_with(database: Path) -> list[Path]:
    """Shipped files, where dispatch reads them with a database."""
    try:
        is_read = database == Path(os.path.realpath(user_database()))
    except DatabaseError:  # LOKAKERN_DB is a server
        return []
    return shipped_databases() if is_read else []


def user_folder() -> Path:
    """Where what belongs to the user is."""
    return Path(user_data_dir("lokakern", appauthor=False))
