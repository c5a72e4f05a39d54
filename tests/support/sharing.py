"""Objects that one test process makes and all test processes use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import filelock

FOLDER = "LOKAKERN_TESTS"  # variable with the session's folder; conftest.py sets it


def shared_folder(name: str) -> Path:
    """A folder of this session, whichever of its processes asks."""
    folder = Path(os.environ[FOLDER], name)
    folder.mkdir(exist_ok=True)
    return folder


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """A file that `make` has written, once: whoever needs it meanwhile waits."""
    if not path.exists():
        with filelock.FileLock(f"{path}.lock"):
            if not path.exists():
                unfinished = path.with_name(f"unfinished-{path.name}")
                make(unfinished)
                unfinished.replace(path)
    return path
