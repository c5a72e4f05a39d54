"""Locks that a process holds for as long as it lives, however it ends, and folders of its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lokakern.errors import DatabaseError

_POLL_S = 0.05
_PREFIX = "lokakern-private-"


class Lock:
    """The system's lock of a file, or nothing: where there is none, that is an error.

    A file whose existence is the lock would outlive whoever is killed. The file may be removed by
    whoever holds its lock.

    Args:
        path: The file; made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self, timeout_s: float = 0.0) -> bool:
        """Take the lock; False if another process held it all the time.

        Raises:
            OSError: The file cannot be made, or nothing can be locked there.
        """
        ends = time.monotonic() + timeout_s
        while not self._try():
            if time.monotonic() >= ends:
                return False
            time.sleep(_POLL_S)
        return True

    def _try(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Removed since it was opened, it locks nothing: another makes a new one.
            if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                self._descriptor = descriptor
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if self._descriptor is None:
                os.close(descriptor)
        return False

    def release(self) -> None:
        """Let others have it; nothing if it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that nobody else may enter; first, those of processes that were killed are removed.

    Raises:
        DatabaseError: It cannot be made.
    """
    try:
        _remove_left_over()
        folder, lock = _make()
    except OSError as error:
        raise DatabaseError(
            f"no folder for copies can be made: {error.strerror}; make room, or choose another "
            "place for temporary files (TMPDIR)"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _make() -> tuple[Path, Lock]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = Lock(folder / "lock")
        try:
            if lock.acquire():
                return folder, lock
        except FileNotFoundError:
            pass
        except OSError:  # no locks: then nobody else can take it for left over, either
            return folder, lock
        # Another took it for left over, just before it was locked, and removes it.


def _remove_left_over() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        lock = Lock(folder / "lock")
        with suppress(OSError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and lock.acquire():
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
