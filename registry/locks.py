"""Locks that end with their process, however it ends, and private folders."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lokakern.errors import DatabaseError

_POLL_S = 0.05
_PREFIX = "lokakern-private-"


class Lock:
    """The system's lock of a file, which ends with its process; without such locks an error.

    The holder may remove the file: a lock of a removed file is none.

    Args:
        path: The file; made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        from filelock import FileLock  # a third of the time of `import lokakern`

        self._path = path
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)

    def acquire(self, timeout_s: float = 0.0) -> bool:
        """Take the lock; False if another process held it all the time.

        Raises:
            OSError: The file cannot be made, or nothing can be locked there.
        """
        from filelock import Timeout

        # FileLock would try again, until the timeout, where no file can be made.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(self._path, flags, 0o644))
        with suppress(Timeout):
            self._lock.acquire(timeout_s, _POLL_S)
            return True
        return False

    def release(self) -> None:
        """Release the lock; nothing if it is not held."""
        self._lock.release()


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder with mode 0700. Folders of killed processes are removed first.

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
